"""Compares a broker's topics with the contract, creates and mends them, and lets components wait for them.

In: a broker's topics. Out: topics created, settings altered, or every mistake in one message.
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

from delivery.clients import LogThrottle, backoff
from delivery.connection import Connection
from delivery.kafka_admin import Admin, BrokerError, BrokerUnavailable, SettingsUnknown, TopicDescription, connect
from delivery.settings import TopicAccess
from delivery.tasks import set_within
from topics.topic import PARTITIONS, REPLICATION_FACTOR, Topic, load_topics

_AT_LEAST = ("retention.ms", "max.message.bytes")  # settings of which more is as good; retention.ms of -1 is for ever
_HARMLESS = ("segment.ms",)
"""Settings that do no harm if they differ: they change when old records go, not which ones a reader may rely on."""

_PASSES = 100
_PASS_S = 0.1  # a broker learns of a change some time after the controller has made it
ASK_AFTER_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # when to ask again: not too often, because a whole fleet may wait
NUMBER_OF_PARTITIONS = "its number of partitions"  # what a mismatch is about that no command mends
COMMAND = "gpustream topics create"  # it makes what is missing, mends settings, and says how to mend the rest
log = logging.getLogger(__name__)


class Mismatch(NamedTuple):
    """One thing that a topic is not as it must be. ``breaks``: a component that uses the topic must not start."""

    topic: str
    what: str
    want: str
    have: str
    breaks: bool = True

    def __str__(self) -> str:
        return f"{self.topic}: {self.what} is {self.have}, must be {self.want}"


class Checked(NamedTuple):
    """Topics that a component may use: their partition counts, and what is not as it should be and does no harm.

    ``unchecked`` says why the settings were not looked at, or is None.
    """

    partitions: Mapping[str, int]
    harmless: tuple[Mismatch, ...] = ()
    unchecked: str | None = None


class ContractMismatch(BrokerError):
    """Topics are missing or not as they must be; one line a mistake. ``advice`` is logged if this ends a process."""

    def __init__(self, mistakes: Iterable[Mismatch], command: str = COMMAND) -> None:
        self.mistakes = tuple(mistakes)
        self.advice = f"`{command}` makes what is missing, mends settings, and says how to mend the rest"
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


class NotAllowed(BrokerError):
    """Kafka's ACLs do not let this client do what it must; one line a topic and a right."""


def mismatches(
    topics: Iterable[Topic], found: Mapping[str, TopicDescription], optional: Iterable[Topic] = ()
) -> list[Mismatch]:
    """Everything about these topics that is not as it must be, of what the broker says.

    ``optional`` topics may be missing, and have other settings: only their numbers of partitions count.
    """
    topics = list(topics)
    there = [topic for topic in topics if topic.name in found]
    wrong = [Mismatch(topic.name, "the topic", "there", "missing") for topic in topics if topic.name not in found]
    by_node = [topic.name for topic in (*there, *optional) if topic.by_node and topic.name in found]
    for name in by_node[1:]:
        want, have = found[by_node[0]].partitions, found[name].partitions
        if have != want:
            wrong.append(Mismatch(name, NUMBER_OF_PARTITIONS, f"{want}, as {by_node[0]} has", str(have)))
    return wrong + [one for topic in there for one in _settings(topic, found[topic.name].settings)]


def contract(connection: Connection, names: Iterable[str] | None = None) -> dict[str, Topic]:
    """The topics of the contract (or those named) by the names that they have in this Kafka, which are theirs then."""
    topics = load_topics()
    theirs = {connection.prefixed(name): topics[name] for name in (topics if names is None else names)}
    return {name: msgspec.structs.replace(topic, name=name) for name, topic in theirs.items()}


def command(connection: Connection) -> str:
    """The command to run if topics are missing or not as they must be."""
    return f"{COMMAND} --topic-prefix {connection.topic_prefix}" if connection.topic_prefix else COMMAND


async def inspect(
    connection: Connection, names: Iterable[str] | None = None
) -> tuple[dict[str, TopicDescription], str | None]:
    """The topics of the contract (or those named) that the broker has, by its own names, and why their settings
    are not known, if so.

    :raises NotAllowed: this client may not see one of them.
    :raises BrokerUnavailable: nobody answers.
    """
    async with connect(connection) as admin:
        found, unchecked = await _inspect(admin, contract(connection, names))
    _require(found, {"Describe": found})
    return found, unchecked


async def check(connection: Connection, uses: TopicAccess) -> Checked:
    """Whether a component may use its topics.

    :raises NotAllowed: it has not the right to, and every right that is missing.
    :raises ContractMismatch: they are not as they must be, and every reason.
    :raises BrokerUnavailable: nobody answers.
    """
    reads, writes, describes, optional = (
        contract(connection, names) for names in (uses.reads, uses.writes, uses.describes, uses.optional)
    )
    topics = reads | writes | describes
    async with connect(connection) as admin:
        found, unchecked = await _inspect(admin, [*topics, *optional])
    _require(found, {"Read": reads, "Write": writes, "Describe": describes})
    found = {name: one for name, one in found.items() if one.partitions}
    wrong = mismatches(topics.values(), found, optional.values())
    if any(one.breaks for one in wrong):
        raise ContractMismatch((one for one in wrong if one.breaks), command(connection))
    partitions = {connection.unprefixed(name): found[name].partitions for name in topics}
    return Checked(partitions, tuple(wrong), unchecked)


def _require(found: Mapping[str, TopicDescription], needed: Mapping[str, Iterable[str]]) -> None:
    """Raises NotAllowed if this client has not each of these rights on the topics that are there."""
    missing = [
        f"{name}: Kafka does not let this client {right} it: add the ACL {right} on Topic {name} for its user"
        for right, names in needed.items()
        for name in names
        if name in found and (allowed := found[name].allowed) is not None and right not in allowed
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
    """Make the broker's topics what the contract says: create what is missing, alter settings. One line a change.

    Nothing is changed if a topic keyed by node has another number of partitions. With ``recreate_empty`` such topics
    are deleted first and created again, if each of them is empty.

    :raises ContractMismatch: a topic keyed by node has another number of partitions.
    :raises Refused: the broker would not (too few brokers for the replication factor, no permission).
    :raises SettingsUnknown: the broker has no topic settings, so it is not one to create topics on.
    :raises BrokerUnavailable: nobody answers.
    """
    topics = contract(connection)
    changes: dict[str, None] = {}
    deleted: set[str] = set()
    async with connect(connection) as admin:
        for _ in range(_PASSES):
            found, unknown = await _inspect(admin, topics)
            _require(found, {"Describe": found})
            if unknown is not None:
                raise SettingsUnknown(f"topics can't be created: {unknown}")
            counts = {name: one.partitions for name, one in found.items() if topics[name].by_node}
            wrong = {name: count for name, count in counts.items() if count != partitions}
            for name in deleted.intersection(wrong):  # a broker may still say that they are there
                del found[name], wrong[name]
            if wrong:
                await _delete_empty(admin, wrong, partitions, allowed=recreate_empty)
                deleted |= wrong.keys()
                for name, count in wrong.items():
                    changes[f"{name}: deleted: it was empty, with {count} partitions"] = None
                continue
            now = await _mend(admin, topics, found, partitions, replication_factor)
            led = not changes or not any(one.leaderless for one in found.values())
            if not now and len(found) == len(topics) and led:
                return list(changes)
            changes |= dict.fromkeys(now)
            await asyncio.sleep(_PASS_S)
    raise BrokerUnavailable(f"not seen by the broker yet: {'; '.join(changes)}")


def _settings(topic: Topic, settings: Mapping[str, str] | None) -> list[Mismatch]:
    """What of a topic's settings is not as it must be; nothing if they are not known."""
    wrong = []
    for name, want in topic.settings().items() if settings is not None else ():
        have = (settings or {}).get(name)
        at_least = name in _AT_LEAST
        if have == want or (at_least and have and (have == "-1" or (have.isdecimal() and int(have) >= int(want)))):
            continue
        wanted = f"at least {want}" if at_least else want
        wrong.append(Mismatch(topic.name, name, wanted, have or "not known", breaks=name not in _HARMLESS))
    return wrong


async def _inspect(admin: Admin, names: Iterable[str]) -> tuple[dict[str, TopicDescription], str | None]:
    found = await admin.layouts(names)
    try:
        settings = await admin.settings(found)
    except SettingsUnknown as unknown:
        return found, str(unknown)
    return {name: one._replace(settings=settings[name]) for name, one in found.items() if name in settings}, None


async def _delete_empty(admin: Admin, wrong: Mapping[str, int], partitions: int, *, allowed: bool) -> None:
    """Delete topics that have another number of partitions, if that is allowed and each of them is empty.

    :raises ContractMismatch: it is not.
    """
    empty = {name: await admin.is_empty(name, count) for name, count in wrong.items()}
    if allowed and all(empty.values()):
        await admin.delete(wrong)
        return
    advice = {
        True: "it is empty: --recreate-empty deletes it and creates it again",
        False: "it has records, and changing it breaks key -> partition: a node's records would be in two. Keep it with"
        " --partitions {count}, or delete it yourself, and all that is in it",
    }
    raise ContractMismatch(
        Mismatch(name, NUMBER_OF_PARTITIONS, f"{partitions}; {advice[empty[name]].format(count=count)}", str(count))
        for name, count in wrong.items()
    )


async def _mend(
    admin: Admin,
    topics: Mapping[str, Topic],
    found: Mapping[str, TopicDescription],
    partitions: int,
    replication_factor: int,
) -> list[str]:
    """Create what is missing, and set what is not as it must be; a topic's other settings stay. One line a change."""
    missing = [topic for name, topic in topics.items() if name not in found]
    new = [NewTopic(one.name, partitions, replication_factor, topic_configs=one.settings()) for one in missing]
    made = await admin.create(new) if new else []
    lines = [f"{name}: created, {partitions} partitions, replication factor {replication_factor}" for name in made]
    for name, one in found.items():
        want = topics[name].settings()
        wrong = {mismatch.what: mismatch.have for mismatch in _settings(topics[name], one.settings or {})}
        if wrong:
            await admin.alter(name, {setting: want[setting] for setting in wrong})
        lines += [f"{name}: {setting} altered from {have} to {want[setting]}" for setting, have in wrong.items()]
    return lines


class TopicCheck:
    """Asks whether topics may be used, until they may."""

    def __init__(self, connection: Connection, uses: TopicAccess) -> None:
        self._connection, self._uses = connection, uses
        self._wrong: list[str] = [f"no Kafka broker has answered at {connection} yet"]

    def not_ready(self) -> list[str]:
        """Why they may not be used, one reason a mistake; empty once they may."""
        return list(self._wrong)

    async def wait(self, stop: asyncio.Event) -> Checked | None:
        """The topics, once they may be used; None if ``stop`` is set before."""
        throttle = LogThrottle()
        for delay_s in backoff(ASK_AFTER_S):
            if stop.is_set():
                break
            try:
                found = await check(self._connection, self._uses)
            except ContractMismatch as error:
                wrong = [f"{mistake}: run `{command(self._connection)}`" for mistake in error.mistakes]
            except BrokerError as error:
                wrong = str(error).splitlines()
            else:
                for mismatch in found.harmless:
                    log.warning("%s", mismatch)
                if self._wrong:
                    used = ", ".join(map(self._connection.prefixed, found.partitions))
                    log.info("the topics can be used: %s", used)
                self._wrong = []
                return found
            if throttle.is_due("; ".join(wrong)):
                log.warning("waiting for topics that can be used: %s", "; ".join(wrong))
            self._wrong = wrong
            await set_within(stop, delay_s)
        return None
