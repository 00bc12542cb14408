"""Compares a broker's topics with the contract, creates and mends them, and lets components wait for them.

In: a broker's topics. Out: topics created, settings altered, or every mismatch in one message.
On failure: :class:`BrokerUnavailable` may be tried again; every other error is for a person to read. A component waits
with :class:`TopicCheck` until its topics can be used, for as long as it takes. Before that it neither reads nor writes
them.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from aiokafka.admin import NewTopic

from delivery.clients import backoff
from delivery.connection import Connection
from delivery.kafka_admin import Admin, BrokerError, BrokerUnavailable, SettingsUnknown, TopicDescription, connect
from delivery.log_throttle import LogThrottle
from delivery.settings import TopicAccess
from delivery.tasks import until_stopped
from topics import samples
from topics.topic import PARTITIONS, REPLICATION_FACTOR, Topic, load_topics

_AT_LEAST = ("retention.ms", "max.message.bytes")  # a larger value is as good; retention.ms of -1 is for ever
HARMLESS = ("segment.ms",)
"""A different value does no harm: it only changes when old records are deleted."""

_TOLERATED = (*HARMLESS, "retention.ms")
"""With a different value a component starts, and warns: a disk that is nearly full may leave no choice."""

_MAX_PASSES = 100
_PASS_EVERY_S = 0.1  # a broker learns of a change some time after the controller has made it
CHECK_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # pauses between checks: a whole fleet may wait for one broker
NUMBER_OF_PARTITIONS = "its number of partitions"  # the subject of a mismatch that no command mends
COMMAND = "gpustream topics create"  # it creates what is missing, mends settings, and tells how to mend the rest
log = logging.getLogger(__name__)


class Mismatch(NamedTuple):
    """One difference of a topic from the contract. ``breaks``: a component that uses the topic must not start.

    ``subject`` is the name of a setting, :data:`NUMBER_OF_PARTITIONS`, or the topic itself.
    """

    topic: str
    subject: str
    want: str
    have: str
    breaks: bool = True

    def __str__(self) -> str:
        return f"{self.topic}: {self.subject} is {self.have}, must be {self.want}"


class Checked(NamedTuple):
    """Topics that a component may use: their numbers of partitions, and the mismatches that are only warned of."""

    partitions: Mapping[str, int]
    tolerated: tuple[Mismatch, ...] = ()


class ContractMismatch(BrokerError):
    """Topics are missing or not as they must be; one line for each. A process that this ends logs ``advice``.

    ``hint``: another cause than that somebody has to run the command.
    """

    def __init__(self, mismatches: Iterable[Mismatch], command: str = COMMAND, hint: str = "") -> None:
        self.mismatches, self.command, self.hint = tuple(mismatches), command, hint
        self.advice = f"`{command}` makes what is missing, mends settings, and says how to mend the rest"
        self.advice += f"; {hint}" if hint else ""
        super().__init__("\n".join(map(str, self.mismatches)))


class NotAllowed(BrokerError):
    """This client lacks ACLs that it needs; one line for each topic and right."""


def mismatches(
    topics: Iterable[Topic], descriptions: Mapping[str, TopicDescription], optional: Iterable[Topic] = ()
) -> list[Mismatch]:
    """Every difference of these topics from the contract, by the broker's ``descriptions``.

    ``optional`` topics may be missing, and have other settings: only their numbers of partitions count.
    """
    topics = list(topics)
    existing = [topic for topic in topics if topic.name in descriptions]
    result = [
        Mismatch(topic.name, "the topic", "there", "missing") for topic in topics if topic.name not in descriptions
    ]
    by_node = [topic.name for topic in (*existing, *optional) if topic.by_node and topic.name in descriptions]
    for name in by_node[1:]:
        want, have = descriptions[by_node[0]].partitions, descriptions[name].partitions
        if have != want:
            result.append(Mismatch(name, NUMBER_OF_PARTITIONS, f"{want}, as {by_node[0]} has", str(have)))
    return result + [m for topic in existing for m in _setting_mismatches(topic, descriptions[topic.name].settings)]


def contract(connection: Connection, names: Iterable[str] | None = None) -> dict[str, Topic]:
    """The topics of the contract (or those named), each under its name in this Kafka."""
    topics = load_topics()
    by_kafka_name = {connection.prefixed(name): topics[name] for name in (topics if names is None else names)}
    return {name: msgspec.structs.replace(topic, name=name) for name, topic in by_kafka_name.items()}


def command(connection: Connection, by_node: Iterable[TopicDescription] = ()) -> str:
    """The command to run if topics are missing or not as they must be.

    ``by_node``: the topics keyed by node that are there. If all have another number of partitions than the default,
    the command must say it, or it changes nothing.
    """
    prefix = f" --topic-prefix {connection.topic_prefix}" if connection.topic_prefix else ""
    counts = {topic.partitions for topic in by_node} - {0}
    partitions = f" --partitions {min(counts)}" if len(counts) == 1 and counts != {PARTITIONS} else ""
    return f"{COMMAND}{prefix}{partitions}"


def other_prefixes(names: Iterable[str], connection: Connection) -> list[str]:
    """The prefixes of the topics of gpustream among a broker's topics, without that of this connection."""
    prefixes = {name.removesuffix(samples.TOPIC.name) for name in names if name.endswith(samples.TOPIC.name)}
    return sorted(prefixes - {connection.topic_prefix})


async def inspect(
    connection: Connection, names: Iterable[str] | None = None
) -> tuple[dict[str, TopicDescription], str | None]:
    """The broker's topics of the contract (or those named) by their names in Kafka, and why their settings are unknown.

    The reason is None if the settings are known.

    :raises NotAllowed: this client may not describe one of them.
    :raises BrokerUnavailable: no broker answers.
    """
    async with connect(connection) as admin:
        descriptions, unchecked = await _inspect(admin, contract(connection, names))
    _require(descriptions, {"Describe": descriptions})
    return descriptions, unchecked


async def check(connection: Connection, uses: TopicAccess) -> Checked:
    """Check that a component may use its topics.

    :raises NotAllowed: rights are missing; the message names each of them.
    :raises ContractMismatch: topics are not as they must be; the message has every reason.
    :raises BrokerUnavailable: no broker answers.
    """
    reads, writes, describes, optional = (
        contract(connection, names) for names in (uses.reads, uses.writes, uses.describes, uses.optional)
    )
    topics = reads | writes | describes
    async with connect(connection) as admin:
        descriptions, _ = await _inspect(admin, [*topics, *optional])
        has_none = not any(description.partitions for description in descriptions.values())
        others = other_prefixes(await admin.names(), connection) if has_none else []
    _require(descriptions, {"Read": reads, "Write": writes, "Describe": describes})
    descriptions = {name: description for name, description in descriptions.items() if description.partitions}
    differences = mismatches(topics.values(), descriptions, optional.values())
    if breaking := [mismatch for mismatch in differences if mismatch.breaks]:
        by_node = [descriptions[name] for name in descriptions if (topics | optional)[name].by_node]
        hint = ""
        if others:
            ours, *theirs = [
                f"with the prefix {prefix!r}" if prefix else "without a prefix"
                for prefix in (connection.topic_prefix, *others)
            ]
            found = f"there is no topic of gpustream {ours}, but there are some {' and '.join(theirs)}"
            hint = f"{found}: is --topic-prefix right?"
        raise ContractMismatch(breaking, command(connection, by_node), hint)
    partitions = {connection.unprefixed(name): descriptions[name].partitions for name in topics}
    return Checked(partitions, tuple(differences))


def _require(descriptions: Mapping[str, TopicDescription], needed: Mapping[str, Iterable[str]]) -> None:
    """Raise NotAllowed unless this client has each of the ``needed`` rights on the topics that exist."""
    missing = [
        f"{name}: Kafka does not let this client {right} it: add the ACL {right} on Topic {name} for its user"
        for right, names in needed.items()
        for name in names
        if name in descriptions and (allowed := descriptions[name].allowed) is not None and right not in allowed
    ]
    if missing:
        raise NotAllowed("\n".join(missing))


async def create(
    connection: Connection,
    partitions: int = PARTITIONS,
    replication_factor: int = REPLICATION_FACTOR,
    *,
    recreate_empty: bool = False,
) -> list[str]:
    """Create missing topics and alter settings, as the contract says. Returns one line for each change.

    Nothing is changed if a topic keyed by node has another number of partitions. With ``recreate_empty`` such topics
    are deleted first and created again, if all of them are empty.

    :raises ContractMismatch: a topic keyed by node has another number of partitions.
    :raises Refused: the broker refused a change (too few brokers for the replication factor, no permission).
    :raises SettingsUnknown: the broker has no topic settings, so topics can't be created as they must be.
    :raises BrokerUnavailable: no broker answers.
    """
    topics = contract(connection)
    changes: dict[str, None] = {}
    deleted: set[str] = set()
    async with connect(connection) as admin:
        for _ in range(_MAX_PASSES):
            delayed = ""
            descriptions, unknown = await _inspect(admin, topics)
            _require(descriptions, {"Describe": descriptions})
            if unknown is not None:
                raise SettingsUnknown(f"topics can't be created: {unknown}")
            counts = {name: topic.partitions for name, topic in descriptions.items() if topics[name].by_node}
            wrong_counts = {name: count for name, count in counts.items() if count != partitions}
            for name in deleted.intersection(wrong_counts):  # a broker may still describe them for a while
                del descriptions[name], wrong_counts[name]
            if wrong_counts:
                await _delete_empty(admin, wrong_counts, partitions, allowed=recreate_empty)
                deleted |= wrong_counts.keys()
                for name, count in wrong_counts.items():
                    changes[f"{name}: deleted: it was empty, with {count} partitions"] = None
                continue
            try:
                new_changes = await _mend(admin, topics, descriptions, partitions, replication_factor)
            except BrokerUnavailable as error:
                delayed = str(error)
                await asyncio.sleep(_PASS_EVERY_S)
                continue
            leaders_elected = not changes or not any(topic.leaderless for topic in descriptions.values())
            if not new_changes and len(descriptions) == len(topics) and leaders_elected:
                return list(changes)
            changes |= dict.fromkeys(new_changes)
            await asyncio.sleep(_PASS_EVERY_S)
    raise BrokerUnavailable(delayed or f"not seen by the broker yet: {'; '.join(changes)}")


def _setting_mismatches(topic: Topic, settings: Mapping[str, str] | None) -> list[Mismatch]:
    """The settings of a topic that differ from the contract; none if they are not known."""
    if settings is None:
        return []
    result = []
    for name, want in topic.settings().items():
        have = settings.get(name)
        at_least = name in _AT_LEAST
        if have == want or (at_least and have and (have == "-1" or (have.isdecimal() and int(have) >= int(want)))):
            continue
        expected = f"at least {want}" if at_least else want
        result.append(Mismatch(topic.name, name, expected, have or "not known", breaks=name not in _TOLERATED))
    return result


async def _inspect(admin: Admin, names: Iterable[str]) -> tuple[dict[str, TopicDescription], str | None]:
    descriptions = await admin.layouts(names)
    try:
        settings = await admin.settings(descriptions)
    except SettingsUnknown as unknown:
        return descriptions, str(unknown)
    return {
        name: topic._replace(settings=settings[name]) for name, topic in descriptions.items() if name in settings
    }, None


async def _delete_empty(admin: Admin, counts: Mapping[str, int], partitions: int, *, allowed: bool) -> None:
    """Delete topics that have another number of partitions (``counts``), if ``allowed`` and all of them are empty.

    :raises ContractMismatch: it is not allowed, or one of them has records.
    """
    empty = {name: await admin.is_empty(name, count) for name, count in counts.items()}
    if allowed and all(empty.values()):
        await admin.delete(counts)
        return
    advice = {
        True: "it is empty: --recreate-empty deletes it and creates it again",
        False: "it has records, and changing it breaks key -> partition: a node's records would be in two. Keep it with"
        " --partitions {count}, or delete it yourself, and all that is in it",
    }
    raise ContractMismatch(
        Mismatch(name, NUMBER_OF_PARTITIONS, f"{partitions}; {advice[empty[name]].format(count=count)}", str(count))
        for name, count in counts.items()
    )


async def _mend(
    admin: Admin,
    topics: Mapping[str, Topic],
    descriptions: Mapping[str, TopicDescription],
    partitions: int,
    replication_factor: int,
) -> list[str]:
    """Create missing topics, and set what differs; other settings stay. Returns one line for each change."""
    missing = [topic for name, topic in topics.items() if name not in descriptions]
    new = [NewTopic(topic.name, partitions, replication_factor, topic_configs=topic.settings()) for topic in missing]
    created = await admin.create(new) if new else []
    lines = [f"{name}: created, {partitions} partitions, replication factor {replication_factor}" for name in created]
    for name, description in descriptions.items():
        want = topics[name].settings()
        old = {m.subject: m.have for m in _setting_mismatches(topics[name], description.settings)}
        if old:
            await admin.alter(name, {setting: want[setting] for setting in old})
        lines += [f"{name}: {setting} altered from {have} to {want[setting]}" for setting, have in old.items()]
    return lines


class TopicCheck:
    """Waits until topics may be used."""

    def __init__(self, connection: Connection, uses: TopicAccess) -> None:
        self._connection, self._uses = connection, uses
        self._reasons: list[str] = [f"no Kafka broker has answered at {connection} yet"]
        self._checked: Checked | None = None

    def not_ready(self) -> list[str]:
        """The reasons why they may not be used; empty once they may."""
        return list(self._reasons)

    async def wait(self, stop: asyncio.Event) -> Checked | None:
        """Wait until the topics may be used, and return them; None if ``stop`` is set before."""
        await until_stopped(stop, self._check_until_usable())
        return self._checked

    async def _check_until_usable(self) -> None:
        throttle = LogThrottle()
        for delay_s in backoff(CHECK_AGAIN_S):
            try:
                checked = await check(self._connection, self._uses)
            except ContractMismatch as error:
                reasons = [f"{mismatch}: run `{error.command}`" for mismatch in error.mismatches]
                reasons += [error.hint] if error.hint else []
            except BrokerError as error:
                reasons = str(error).splitlines()
            else:
                for mismatch in checked.tolerated:
                    log.warning("%s", mismatch)
                if self._reasons:
                    log.info(
                        "the topics can be used: %s", ", ".join(map(self._connection.prefixed, checked.partitions))
                    )
                self._reasons, self._checked = [], checked
                return
            if throttle.is_due("; ".join(reasons)):
                log.warning("waiting for topics that can be used: %s", "; ".join(reasons))
            self._reasons = reasons
            await asyncio.sleep(delay_s)
