"""Kafka itself: whether it answers and to whom, its brokers and their disks, the topics, and who may do what.

In:       a connection; in the checks, what was found out.
Out:      a :class:`Kafka`; findings.
On failure: a broker that does not answer is a finding, and so is what this client may not know.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from delivery import kafka_admin, topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import Acl, BrokerError, TopicDescription
from gpustream import acls
from gpustream.command import counted
from gpustream.doctor.seen import Checked, Finding, Findings, Kafka, Situation
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS
from topics import TOPICS, samples

NEARLY_FULL = 0.05
"""A disk is nearly full if less than this share of it is free."""

COMPONENTS = {
    f"{word} {name}": acls.of_component(row)
    for word, rows in (("produce", PRODUCERS), ("stream", STREAMS), ("sink", SINKS))
    for name, row in rows.items()
    if word != "produce" or name in ("node", "cluster")
}
"""What each component must be allowed to do, by the words that run it. Simulated fleets write what others do."""


async def ask(connection: Connection) -> Kafka:
    """All that is known of a Kafka without reading a record."""
    asked = Kafka(
        str(connection), whom(connection), create=topic_admin.command(connection), prefix=connection.topic_prefix
    )
    try:
        async with kafka_admin.connect(connection) as admin:
            brokers = await admin.brokers()
            found = await admin.layouts(topic_admin.contract(connection))
            seen = [name for name, one in found.items() if one.partitions]
            unchecked = None
            try:
                settings = await admin.settings(seen)
                found |= {name: found[name]._replace(settings=some) for name, some in settings.items()}
            except kafka_admin.SettingsUnknown as error:
                unchecked = str(error)
            looked_at = {name: found[name] for name in seen}
            contract = topic_admin.contract(connection)
            groups = (acl.name for needed in COMPONENTS.values() for acl in needed if acl.resource == "Group")
            same = [name for name in await admin.names() if name.endswith(samples.TOPIC.name)]
            prefixes = {name.removesuffix(samples.TOPIC.name) for name in same}
            may_see = [topic for name, topic in contract.items() if name in seen or name not in found]
            return asked._replace(
                brokers=brokers,
                disks=await admin.disks(brokers),
                found={connection.unprefixed(name): one for name, one in found.items()},
                unchecked=unchecked,
                mismatches=[one for one in topic_admin.mismatches(may_see, looked_at) if one.breaks],
                elsewhere=sorted(prefixes - {connection.topic_prefix}),
                acls=await admin.acls(),
                hidden=await admin.hidden_groups(dict.fromkeys(groups)),
            )
    except BrokerError as error:
        return asked._replace(error=str(error))


def whom(connection: Connection) -> str:
    """The user that a client of this connection is for Kafka, as far as the connection says."""
    secrets = connection.secrets()
    if connection.has_login:
        name = secrets.username or secrets.oauth_client_id
        return f"User:{name}" if name else f"whoever {connection.mechanism} says"
    return f"whom the certificate {connection.cert} names" if connection.cert else "User:ANONYMOUS"


# -- the checks


def broker(seen: Situation) -> Checked:
    """Whether Kafka answers, as whom it was asked, and whether its disks have room."""
    kafka = seen.kafka
    if kafka.error:
        refused = any(word in kafka.error for word in ("refuse", "password", "log in", "login", "certificate", "TLS"))
        then = (
            f"it was asked as {kafka.whom}: docs/how-to/kafka.md says what --kafka-security and its options must be"
            if refused
            else "is a broker up there, and is that port for clients? `kcat -b HOST:PORT -L` asks it, too"
        )
        return Checked(
            f"no answer, as {kafka.whom}",
            [Finding(f"Kafka at {kafka.servers} can't be asked", kafka.error, "it was asked", then)],
        )
    found = Findings()
    for disk in kafka.disks:
        if disk.error:
            cause, shown = "the broker can't use it: the disk is full or broken", disk.error
        elif 0 <= disk.usable < NEARLY_FULL * disk.total:
            cause, shown = "it is nearly full", f"{_gib(disk.usable)} of {_gib(disk.total)} are left"
        else:
            continue
        found.say(
            f"broker {disk.broker}: the disk of {disk.path}",
            cause,
            shown,
            "make it larger, or give topics less retention.ms; a broker whose disk is full stops",
        )
    return Checked(f"{counted(len(kafka.brokers), 'broker')} at {kafka.servers}, asked as {kafka.whom}", found)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def topics(seen: Situation) -> Checked:
    """Whether the topics are there, and as they must be, and each partition has a leader and enough replicas."""
    kafka = seen.kafka
    if kafka.error:
        return Checked("not asked", looked=False)
    if not kafka.found:
        others = ", ".join(repr(one) for one in kafka.elsewhere)
        under = f"with the prefix {kafka.prefix!r}" if kafka.prefix else "without a prefix"
        return Checked(
            "there is none",
            [
                Finding(
                    f"there is no topic of gpustream {under}",
                    f"--topic-prefix is wrong: {others} is there" if others else "the topics were never made",
                    "gpu.samples and all others are missing",
                    "give the --topic-prefix that the producers have" if others else f"run `{kafka.create}`",
                )
            ],
        )
    wrong = Findings(
        Finding(
            str(one),
            "the topic was made or changed by something else, or never made",
            one.topic,
            f"run `{kafka.create}`: it makes what is missing, and sets the settings right",
        )
        for one in kafka.mismatches
        if one.subject != topic_admin.NUMBER_OF_PARTITIONS
    )
    if numbers := [one for one in kafka.mismatches if one.subject == topic_admin.NUMBER_OF_PARTITIONS]:
        wrong.say(
            f"{counted(len(numbers), 'topic')} of another number of partitions: it must be {numbers[0].want}",
            "partitions were added to a topic, or it was made by something else",
            ", ".join(f"{one.topic} has {one.have}" for one in numbers),
            "see `More partitions` in docs/operations/README.md: records of a node must stay in one partition",
        )
    wrong += [found for name, one in kafka.found.items() for found in _without_leader_or_replicas(kafka, name, one)]
    wrong += _limited(kafka)
    said = "as they must be" if not kafka.unchecked else f"there; their settings are not known: {kafka.unchecked}"
    return Checked(f"{counted(len(wrong), 'mistake')}" if wrong else said, wrong)


def _without_leader_or_replicas(kafka: Kafka, name: str, one: TopicDescription) -> Iterator[Finding]:
    """Findings for partitions of a topic that have no leader, or too few replicas in sync to take records."""
    if one.leaderless:
        yield Finding(
            f"{name}: {counted(len(one.leaderless), 'partition')} of {one.partitions} have no leader",
            "the brokers that have the replicas are down, or their disks are",
            f"partitions {', '.join(map(str, one.leaderless))}; brokers"
            f" {', '.join(map(str, sorted(kafka.brokers))) or 'none'} answer",
            "start these brokers; what comes for these partitions waits in the producers' buffers until then",
        )
    least = int((one.settings or {}).get("min.insync.replicas", "1") or 1)
    short = [number for number, count in one.in_sync.items() if 0 < count < least and number not in one.leaderless]
    if short:
        yield Finding(
            f"{name}: {counted(len(short), 'partition')} take no records",
            f"fewer than min.insync.replicas ({least}) replicas are in sync",
            f"partitions {', '.join(map(str, short[:20]))}",
            "start the brokers that are missing, or see why their replicas do not follow",
        )


def _limited(kafka: Kafka) -> Iterator[Finding]:
    """A finding for topics that lose records because of their size, before their time."""
    limited: list[str] = []
    for name, one in kafka.found.items():
        settings = one.settings or {}
        limit = settings.get("retention.bytes") or "-1"
        if limit != "-1" and "delete" in settings.get("cleanup.policy", ""):
            limited.append(f"{kafka.prefix}{name}: {limit}")
    if limited:
        yield Finding(
            f"{counted(len(limited), 'topic')} may lose records before their time: retention.bytes limits them",
            "it was set for them, or for the broker (log.retention.bytes)",
            f"bytes of each partition: {', '.join(limited)}",
            "see in docs/how-to/kafka.md how many bytes a day has; `kafka-configs.sh --alter --add-config"
            " retention.bytes=-1 --entity-type topics --entity-name TOPIC` takes the limit away",
        )


def rights(seen: Situation) -> Checked:
    """What this client may not see, and which users have some of a component's rights and lack others."""
    kafka = seen.kafka
    if kafka.error:
        return Checked("not asked", looked=False)
    missing = [name for name, one in kafka.found.items() if one.allowed is not None and "Read" not in one.allowed]
    found = Findings()
    if missing:
        found.say(
            f"{counted(len(missing), 'topic')} not looked at: {kafka.whom} may not read",
            "its ACLs are not those of `doctor` in docs/how-to/kafka.md",
            ", ".join(missing),
            f"allow Read on these topics, with the prefix {kafka.prefix!r}" if kafka.prefix else "allow Read on these",
        )
    if kafka.hidden:
        found.say(
            f"{counted(len(kafka.hidden), 'group')} not looked at: {kafka.whom} may not see",
            "its ACLs are not those of `doctor` in docs/how-to/kafka.md",
            ", ".join(kafka.hidden),
            "allow Describe on these groups",
        )
    if kafka.acls is None:
        return Checked("ACLs are not known: there are none, or this client may not Describe the cluster", found)
    for words, needed in COMPONENTS.items():
        theirs = [acl._replace(name=kafka.prefix + acl.name) for acl in needed]
        for principal in _who_runs(kafka.acls, theirs):
            for one in (one for one in theirs if not allows(kafka.acls, principal, one)):
                denied = _given(kafka.acls, principal, one)
                found.say(
                    f"{principal} may not {one.operation} {one.resource} {one.name}",
                    "an ACL denies it" if denied else "the ACL is missing",
                    f"it has other rights of `gpustream {words}`, which needs this one",
                    f"`kafka-acls.sh --bootstrap-server HOST:PORT --{'remove' if denied else 'add'}"
                    f" --{'deny' if denied else 'allow'}-principal {principal} --operation {one.operation}"
                    f" --{one.resource.lower()} {one.name}`",
                )
    users = {one.principal for one in kafka.acls}
    return Checked(f"{counted(len(kafka.acls), 'ACL')} of {counted(len(users), 'user')}", found)


def _who_runs(known: Sequence[Acl], needed: Sequence[acls.Acl]) -> list[str]:
    """The users who seem to run a component: those who may use its group, or who may write what a producer writes."""
    kind = "Group" if any(one.resource == "Group" for one in needed) else "Topic"
    signs = [
        one for one in needed if one.resource == kind and one.operation in ("Read" if kind == "Group" else "Write")
    ]
    users = dict.fromkeys(one.principal for one in known if one.allowed and one.principal != "User:*")
    if kind == "Topic":
        signs = signs[:1]
    return [who for who in users if signs and all(_given(known, who, one) for one in signs)]


_IMPLIED = {"Describe": ("Read", "Write", "Alter", "Delete")}


def _matches(one: Acl, principal: str, needed: acls.Acl, operations: Sequence[str]) -> bool:
    named = needed.name.startswith(one.name[:-1]) if one.name.endswith("*") else one.name == needed.name
    return (
        one.principal in (principal, "User:*")
        and one.resource == needed.resource
        and one.operation in operations
        and named
    )


def _given(known: Iterable[Acl], principal: str, needed: acls.Acl) -> bool:
    some = (needed.operation, "All", *_IMPLIED.get(needed.operation, ()))
    return any(one.allowed and _matches(one, principal, needed, some) for one in known)


def allows(known: Sequence[Acl], principal: str, needed: acls.Acl) -> bool:
    """Whether a user may do something: an ACL allows it, and none denies it."""
    denied = any(not one.allowed and _matches(one, principal, needed, (needed.operation, "All")) for one in known)
    return _given(known, principal, needed) and not denied


def readable(kafka: Kafka, needed: Iterable[str]) -> str:
    """Why these topics can't be read; no text if they can."""
    missing = [name for name in needed if name not in kafka.found]
    if kafka.error or missing:
        return kafka.error or f"there is no {missing[0]}"
    hidden = [name for name in needed if (may := kafka.found[name].allowed) is not None and "Read" not in may]
    return f"{kafka.whom} may not read {hidden[0]}" if hidden else ""


def known_topics(found: Mapping[str, kafka_admin.TopicDescription]) -> list[str]:
    """Those topics of the contract that are there and can be read."""
    may = {name: one.allowed for name, one in found.items() if one.partitions}
    return [name for name in TOPICS if name in may and ((allowed := may[name]) is None or "Read" in allowed)]
