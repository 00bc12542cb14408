"""The checks of Kafka itself: whether it answers, its brokers and their disks, the topics, and the users' rights.

In:       a connection; for the checks, the situation.
Out:      a :class:`Kafka`; findings.
On failure: a broker that does not answer is a finding, and so is what this client may not read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from delivery import kafka_admin, topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import Acl, BrokerError
from delivery.values import counted
from gpustream import acls
from gpustream.doctor.situation import CheckResult, Finding, Findings, Kafka, Situation, first_of
from topics import TOPICS

MIN_FREE_RATIO = 0.05
"""A disk is nearly full if less than this ratio of it is free."""

HANGING_MS = 30_000
"""A transaction that has been open for longer than this is a finding."""

COMPONENTS = {
    name: needed for name, needed in acls.of_components().items() if name not in ("produce replay", "produce simulated")
}
"""The ACLs that each component needs, by its subcommand. Simulated fleets need those of the real producers."""


async def inspect(connection: Connection) -> Kafka:
    """Describes a Kafka, without reading a record. ``error`` is set if it does not answer."""
    kafka = Kafka(
        str(connection),
        principal_of(connection),
        create_command=topic_admin.command(connection),
        prefix=connection.topic_prefix,
    )
    try:
        async with kafka_admin.connect(connection) as admin:
            brokers, contract = await admin.brokers(), topic_admin.contract(connection)
            layouts = await admin.layouts(contract)
            existing = [name for name, layout in layouts.items() if layout.partitions]
            settings_error = None
            try:
                settings = await admin.settings(existing)
                layouts |= {
                    name: layouts[name]._replace(settings=topic_settings) for name, topic_settings in settings.items()
                }
            except kafka_admin.SettingsUnknown as error:
                settings_error = str(error)
            existing_layouts = {name: layouts[name] for name in existing}
            groups = (acl.name for needed_acls in COMPONENTS.values() for acl in needed_acls if acl.resource == "Group")
            checkable = [topic for name, topic in contract.items() if name in existing or name not in layouts]
            mismatches = topic_admin.mismatches(checkable, existing_layouts)
            by_node = [layout for name, layout in existing_layouts.items() if contract[name].by_node]
            return kafka._replace(
                brokers=brokers,
                create_command=topic_admin.command(connection, by_node),
                disks=await admin.disks(brokers),
                topics={connection.unprefixed(name): layout for name, layout in layouts.items()},
                settings_error=settings_error,
                mismatches=[row for row in mismatches if row.subject not in topic_admin.HARMLESS],
                other_prefixes=topic_admin.other_prefixes(await admin.names(), connection),
                acls=await admin.acls(),
                hidden_groups=await admin.hidden_groups(dict.fromkeys(groups)),
            )
    except BrokerError as error:
        return kafka._replace(error=str(error))


def principal_of(connection: Connection) -> str:
    """The principal that Kafka gives a client of this connection, as far as the connection tells."""
    secrets = connection.secrets()
    if connection.has_login:
        name = secrets.username or secrets.oauth_client_id
        return f"User:{name}" if name else f"whoever {connection.mechanism} says"
    return f"whom the certificate {connection.cert} names" if connection.cert else "User:ANONYMOUS"


# -- the checks


def broker(situation: Situation) -> CheckResult:
    """Checks that Kafka answers, and that its disks have room."""
    kafka = situation.kafka
    if kafka.error:
        refused = any(word in kafka.error for word in ("refuse", "password", "log in", "login", "certificate", "TLS"))
        next_step = (
            f"it was asked as {kafka.principal}: docs/how-to/kafka.md says what --kafka-security and its"
            " options must be"
            if refused
            else "is a broker up there, and is that port for clients? `kcat -b HOST:PORT -L` asks it, too"
        )
        return CheckResult(
            f"no answer, as {kafka.principal}",
            [Finding(f"Kafka at {kafka.servers} can't be asked", kafka.error, "it was asked", next_step)],
        )
    findings = Findings()
    if situation.silent:
        findings.add(
            f"Kafka at {kafka.servers} answers only some requests, so not all was looked at",
            situation.silent,
            "it was asked",
            "look at the network to each broker, and run this again, or with a shorter --since",
        )
    for disk in kafka.disks:
        if disk.error:
            cause, shown_by = "the broker can't use it: the disk is full or broken", disk.error
        elif 0 <= disk.usable < MIN_FREE_RATIO * disk.total:
            cause, shown_by = "it is nearly full", f"{_gib(disk.usable)} of {_gib(disk.total)} are left"
        else:
            continue
        findings.add(
            f"broker {disk.broker}: the disk of {disk.path}",
            cause,
            shown_by,
            "make it larger, or give topics less retention.ms; a broker whose disk is full stops",
        )
    return CheckResult(
        f"{counted(len(kafka.brokers), 'broker')} at {kafka.servers}, asked as {kafka.principal}", findings
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def topics(situation: Situation) -> CheckResult:
    """Checks that the topics exist with the right settings, and each partition has a leader and enough replicas."""
    kafka = situation.kafka
    if kafka.error:
        return CheckResult("not asked", looked=False)
    if not kafka.topics:
        prefix_text = f"with the prefix {kafka.prefix!r}" if kafka.prefix else "without a prefix"
        cause, next_step = "the topics were never made", f"run `{kafka.create_command}`"
        if kafka.other_prefixes:
            cause = f"--topic-prefix is wrong: {', '.join(map(repr, kafka.other_prefixes))} is there"
            next_step = "give the --topic-prefix that the producers have"
        finding, shown_by = f"there is no topic of gpustream {prefix_text}", "gpu.samples and all others are missing"
        return CheckResult("there is none", [Finding(finding, cause, shown_by, next_step)])
    findings = Findings()
    if numbers := [mismatch for mismatch in kafka.mismatches if mismatch.subject == topic_admin.NUMBER_OF_PARTITIONS]:
        findings.add(
            f"{counted(len(numbers), 'topic')} of another number of partitions: it must be {numbers[0].want}",
            "partitions were added to a topic, or it was made by something else",
            ", ".join(f"{mismatch.topic} has {mismatch.have}" for mismatch in numbers),
            f"if they hold no record, run `{kafka.create_command} --recreate-empty`; else see `More partitions` in"
            " docs/operations/README.md: records of a node must stay in one partition",
        )
    findings += [
        Finding(
            str(mismatch),
            "the topic was made or changed by something else, or never made",
            mismatch.topic,
            f"run `{kafka.create_command}`: it makes what is missing, and sets the settings right",
        )
        for mismatch in kafka.mismatches
        if mismatch.subject != topic_admin.NUMBER_OF_PARTITIONS
    ]
    findings += [*_unwritable_findings(kafka), *_replica_findings(kafka), *_size_findings(kafka)]
    findings += _transaction_findings(situation)
    summary = (
        "as they must be"
        if not kafka.settings_error
        else f"there; their settings are not known: {kafka.settings_error}"
    )
    return CheckResult(f"{counted(len(findings), 'mistake')}" if findings else summary, findings)


def _unwritable_findings(kafka: Kafka) -> Iterator[Finding]:
    """Findings for partitions that take no records."""
    for name, layout in kafka.topics.items():
        if layout.leaderless:
            yield Finding(
                f"{name}: {counted(len(layout.leaderless), 'partition')} of {layout.partitions} have no leader",
                "the brokers that have the replicas are down, or their disks are",
                f"partitions {', '.join(map(str, layout.leaderless))}; brokers"
                f" {', '.join(map(str, sorted(kafka.brokers))) or 'none'} answer",
                "start these brokers; what comes for these partitions waits in the producers' buffers until then",
            )
        min_in_sync = _effective_min_in_sync(layout)
        too_few_replicas = [
            number
            for number, count in layout.in_sync.items()
            if 0 < count < min_in_sync and number not in layout.leaderless
        ]
        if too_few_replicas:
            yield Finding(
                f"{name}: {counted(len(too_few_replicas), 'partition')} take no records",
                f"fewer than min.insync.replicas ({min_in_sync}) replicas are in sync",
                f"partitions {', '.join(map(str, too_few_replicas[:20]))}",
                "start the brokers that are missing, or see why their replicas do not follow",
            )


def _min_in_sync(layout: kafka_admin.TopicDescription) -> int:
    return int((layout.settings or {}).get("min.insync.replicas", "1") or 1)


def _effective_min_in_sync(layout: kafka_admin.TopicDescription) -> int:
    """How many replicas of a partition must be in sync for it to take records: Kafka 4 asks for no more than it has."""
    return min(_min_in_sync(layout), layout.replicas)


def _replica_findings(kafka: Kafka) -> Iterator[Finding]:
    """Findings for topics that have fewer replicas than they are to have, and take records nevertheless."""
    unattainable, lacking = list[str](), list[str]()
    for name, layout in kafka.topics.items():
        if 0 < layout.replicas < _min_in_sync(layout):
            unattainable.append(f"{kafka.prefix}{name}: {_min_in_sync(layout)} of {layout.replicas}")
        fewest = min(layout.in_sync.values(), default=layout.replicas)
        if not layout.leaderless and _effective_min_in_sync(layout) <= fewest < layout.replicas:
            lacking.append(f"{kafka.prefix}{name}: {fewest} of {layout.replicas}")
    if unattainable:
        yield Finding(
            f"min.insync.replicas of {counted(len(unattainable), 'topic')} is above the number of replicas",
            "it was set for them, or for the broker: a Kafka before 3.7 takes no records then, and a later one asks for"
            " all replicas",
            ", ".join(unattainable),
            "give them more replicas (`kafka-reassign-partitions.sh`), or set min.insync.replicas lower",
        )
    if lacking:
        yield Finding(
            f"not all replicas of {counted(len(lacking), 'topic')} are in sync",
            "a broker is down, as one whose disk is full, or it does not follow; or replicas are being moved",
            f"{', '.join(lacking)}; brokers {', '.join(map(str, sorted(kafka.brokers)))} answer",
            "start the brokers that are missing; all goes on meanwhile, but if another one fails, it may not",
        )


def _size_findings(kafka: Kafka) -> Iterator[Finding]:
    """Findings for topics that lose records because of their size."""
    limited: list[str] = []
    for name, layout in kafka.topics.items():
        settings = layout.settings or {}
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


def _transaction_findings(situation: Situation) -> Iterator[Finding]:
    """Findings for topics that can't be read to their end, because a transaction in them has been open for long."""
    hanging = {
        tp: opened
        for tp, opened in situation.open_transactions.items()
        if opened.since_ms is not None and situation.now_ms - opened.since_ms > HANGING_MS
    }
    for topic in dict.fromkeys(tp.topic for tp in hanging):
        transactions = {tp.partition: opened for tp, opened in sorted(hanging.items()) if tp.topic == topic}
        number, first = next(iter(transactions.items()))
        partitions = [
            f"partition {number} from offset {opened.offset} on, which was logged"
            f" {situation.ago(opened.since_ms or 0)}: {counted(opened.hidden, 'record')}"
            for number, opened in transactions.items()
        ]
        place = f"--topic {situation.kafka.prefix}{topic} --partition {number}"
        yield Finding(
            f"{topic}: {counted(len(transactions), 'partition')} can't be read to the end: a transaction is open",
            "its producer hangs or was killed, and transaction.timeout.ms has not passed; of gpustream only"
            " `dead-letters resubmit` has transactions, of 20 s at most",
            first_of(partitions),
            f"`kafka-transactions.sh --bootstrap-server HOST:PORT describe-producers {place}` names the producer; end"
            f" it, then its transaction: `abort {place} --start-offset {first.offset}`",
        )


def rights(situation: Situation) -> CheckResult:
    """Checks what this client may not see, and which users have some of a component's rights and lack others."""
    kafka = situation.kafka
    if kafka.error:
        return CheckResult("not asked", looked=False)
    unreadable = [name for name, layout in kafka.topics.items() if not _may_be_read(layout)]
    findings = Findings()
    if unreadable:
        findings.add(
            f"{counted(len(unreadable), 'topic')} not looked at: {kafka.principal} may not read",
            "its ACLs are not those of `doctor` in docs/how-to/kafka.md",
            ", ".join(unreadable),
            f"allow Read on these topics, with the prefix {kafka.prefix!r}" if kafka.prefix else "allow Read on these",
        )
    if kafka.hidden_groups:
        findings.add(
            f"{counted(len(kafka.hidden_groups), 'group')} not looked at: {kafka.principal} may not see",
            "its ACLs are not those of `doctor` in docs/how-to/kafka.md",
            ", ".join(kafka.hidden_groups),
            "allow Describe on these groups",
        )
    if kafka.acls is None:
        return CheckResult("ACLs are not known: there are none, or this client may not Describe the cluster", findings)
    for component, needed_acls in COMPONENTS.items():
        component_acls = [acl._replace(name=kafka.prefix + acl.name) for acl in needed_acls]
        for principal in _probable_users(kafka.acls, component_acls):
            for needed in (needed for needed in component_acls if not allows(kafka.acls, principal, needed)):
                denied = _is_allowed(kafka.acls, principal, needed)
                findings.add(
                    f"{principal} may not {needed.operation} {needed.resource} {needed.name}",
                    "an ACL denies it" if denied else "the ACL is missing",
                    f"it has other rights of `gpustream {component}`, which needs this one",
                    f"`kafka-acls.sh --bootstrap-server HOST:PORT --{'remove' if denied else 'add'}"
                    f" --{'deny' if denied else 'allow'}-principal {principal} --operation {needed.operation}"
                    f" --{needed.resource.lower()} {needed.name}`",
                )
    users = {acl.principal for acl in kafka.acls}
    return CheckResult(f"{counted(len(kafka.acls), 'ACL')} of {counted(len(users), 'user')}", findings)


def _probable_users(existing: Sequence[Acl], needed: Sequence[acls.Acl]) -> list[str]:
    """The users who seem to run a component: those who may read with its group, or who may write a producer's topic."""
    resource = "Group" if any(acl.resource == "Group" for acl in needed) else "Topic"
    operation = "Read" if resource == "Group" else "Write"
    identifying_acls = [acl for acl in needed if acl.resource == resource and acl.operation == operation]
    users = dict.fromkeys(acl.principal for acl in existing if acl.allowed and acl.principal != "User:*")
    if resource == "Topic":
        identifying_acls = identifying_acls[:1]
    return [
        user for user in users if identifying_acls and all(_is_allowed(existing, user, acl) for acl in identifying_acls)
    ]


_IMPLIED = {"Describe": ("Read", "Write", "Alter", "Delete")}


def _matches(acl: Acl, principal: str, needed: acls.Acl, operations: Sequence[str]) -> bool:
    name_matches = needed.name.startswith(acl.name[:-1]) if acl.name.endswith("*") else acl.name == needed.name
    return (
        acl.principal in (principal, "User:*")
        and acl.resource == needed.resource
        and acl.operation in operations
        and name_matches
    )


def _is_allowed(existing: Iterable[Acl], principal: str, needed: acls.Acl) -> bool:
    operations = (needed.operation, "All", *_IMPLIED.get(needed.operation, ()))
    return any(acl.allowed and _matches(acl, principal, needed, operations) for acl in existing)


def allows(existing: Sequence[Acl], principal: str, needed: acls.Acl) -> bool:
    """Whether a user has the right ``needed``: an ACL allows it, and none denies it."""
    denied = any(not acl.allowed and _matches(acl, principal, needed, (needed.operation, "All")) for acl in existing)
    return _is_allowed(existing, principal, needed) and not denied


def unreadable_reason(kafka: Kafka, topic_names: Iterable[str]) -> str:
    """Why these topics can't be read; empty if they can."""
    missing = [name for name in topic_names if name not in kafka.topics]
    if kafka.error or missing:
        return kafka.error or f"there is no {kafka.prefix}{missing[0]}"
    denied = [name for name in topic_names if not _may_be_read(kafka.topics[name])]
    return f"{kafka.principal} may not read {kafka.prefix}{denied[0]}" if denied else ""


def readable_topics(topics: Mapping[str, kafka_admin.TopicDescription]) -> list[str]:
    """The topics of the contract that exist and can be read."""
    return [name for name in TOPICS if name in topics and topics[name].partitions and _may_be_read(topics[name])]


def _may_be_read(topic: kafka_admin.TopicDescription) -> bool:
    """Whether this client may read a topic, as far as is known."""
    return topic.allowed is None or "Read" in topic.allowed
