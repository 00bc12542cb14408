"""What the contract says of topics against what a broker has.

In: a broker's topics. Out: topics made, settings altered, or every mistake in one message.
On failure: :class:`BrokerUnavailable` may be tried again; every other error is to be read by a person.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from aiokafka.admin import NewTopic

from delivery.kafka_admin import Admin, BrokerError, BrokerUnavailable, Refused, SettingsUnknown, connect
from topics.topic import PARTITIONS, REPLICATION_FACTOR, Topic, load_topics

__all__ = [
    "BrokerError",
    "BrokerUnavailable",
    "Checked",
    "ContractMismatch",
    "Found",
    "Mismatch",
    "Refused",
    "SettingsUnknown",
    "check",
    "compare",
    "create",
    "inspect",
    "mismatches",
]

_AT_LEAST = ("retention.ms", "max.message.bytes")
"""Settings of which more is as good; retention.ms of -1 is for ever."""

_HARMLESS = ("segment.ms",)
"""Settings that a component can do with otherwise: they change when old records go, not which may be relied on."""

_PASSES = 100
_PASS_S = 0.1
"""A broker hears of a change later than the controller says that it is made."""


ASK_AFTER_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""When to ask again; the last of them again and again, for a fleet may wait."""

COMMAND = "`gpustream topics create`"
"""What mends most of it, and says how to mend the rest."""

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A topic as the broker has it: ``led`` when each partition has a leader, ``settings`` None if it does not say."""

    partitions: int
    settings: Mapping[str, str] | None = None
    led: bool = True


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
    """Topics are missing or not as they must be; one line a mistake."""

    advice = "`gpustream topics create` makes what is missing, mends settings, and says how to mend the rest"

    def __init__(self, mistakes: Iterable[Mismatch]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


def mismatches(topics: Iterable[Topic], found: Mapping[str, Found], beside: Iterable[Topic] = ()) -> list[Mismatch]:
    """Everything about these topics that is not as it must be, of what the broker says.

    Topics ``beside`` them may be missing, and have other settings: only their numbers of partitions count.
    """
    topics = list(topics)
    there = [topic for topic in topics if topic.name in found]
    missing = [Mismatch(topic.name, "the topic", "there", "missing") for topic in topics if topic.name not in found]
    settings = [one for topic in there for one in _settings(topic, found[topic.name].settings)]
    return [*missing, *_counts([*there, *(topic for topic in beside if topic.name in found)], found), *settings]


async def inspect(kafka: str, names: Iterable[str] | None = None) -> tuple[dict[str, Found], str | None]:
    """The topics of the contract (or those named) that the broker has, and why their settings are not known, if so.

    :raises BrokerUnavailable: nobody answers at ``kafka``.
    """
    async with connect(kafka) as admin:
        return await _inspect(admin, load_topics() if names is None else names)


async def compare(kafka: str, names: Iterable[str] | None = None) -> list[Mismatch]:
    """Everything about the topics of the contract (or those named) that is not as it must be.

    :raises BrokerUnavailable: nobody answers at ``kafka``.
    """
    topics = _named(names)
    found, _ = await inspect(kafka, topics)
    return mismatches(topics.values(), found)


async def check(kafka: str, names: Iterable[str], beside: Iterable[str] = ()) -> Checked:
    """Whether a component may use these topics; ``beside`` them are those that must have as many partitions, if any.

    :raises ContractMismatch: it may not, and every reason.
    :raises BrokerUnavailable: nobody answers at ``kafka``.
    """
    topics, others = _named(names), _named(beside)
    found, unchecked = await inspect(kafka, [*topics, *others])
    wrong = mismatches(topics.values(), found, others.values())
    if any(one.breaks for one in wrong):
        raise ContractMismatch(one for one in wrong if one.breaks)
    return Checked({name: found[name].partitions for name in topics}, tuple(wrong), unchecked)


async def create(
    kafka: str,
    partitions: int = PARTITIONS,
    replication_factor: int = REPLICATION_FACTOR,
    *,
    recreate_empty: bool = False,
) -> list[str]:
    """Make the broker's topics what the contract says: create what is missing, alter settings. One line a change.

    Nothing is changed where a topic keyed by node has another number of partitions; with ``recreate_empty`` such topics
    are deleted first and created again, if each of them is empty.

    :raises ContractMismatch: a topic keyed by node has another number of partitions.
    :raises Refused: the broker would not (too few brokers for the replication factor, no permission).
    :raises SettingsUnknown: the broker has no topic settings, so it is not one to create topics on.
    :raises BrokerUnavailable: nobody answers at ``kafka``.
    """
    topics = load_topics()
    changes: dict[str, None] = {}
    deleted: list[str] = []
    async with connect(kafka) as admin:
        for _ in range(_PASSES):
            found, unknown = await _inspect(admin, topics)
            if unknown is not None:
                raise SettingsUnknown(f"topics can't be created: {unknown}")
            if wrong := _resized(topics, found, partitions, but=deleted):
                await _delete_empty(admin, wrong, partitions, allowed=recreate_empty)
                deleted = [*wrong]
                changes |= {
                    f"{name}: deleted: it was empty, with {count} partitions": None for name, count in wrong.items()
                }
                continue
            made = await _create(admin, topics, found, partitions, replication_factor)
            altered = [line for name, one in found.items() for line in await _alter(admin, topics[name], one)]
            if not made and not altered and _is_settled(topics, found, changes):
                return list(changes)
            changes |= dict.fromkeys([*made, *altered])
            await asyncio.sleep(_PASS_S)
    raise BrokerUnavailable(f"not seen by the broker yet: {'; '.join(changes)}")


def _named(names: Iterable[str] | None) -> dict[str, Topic]:
    topics = load_topics()
    return topics if names is None else {name: topics[name] for name in names}


def _counts(topics: Iterable[Topic], found: Mapping[str, Found]) -> list[Mismatch]:
    """Topics keyed by node whose number of partitions is not the first one's."""
    by_node = [topic.name for topic in topics if topic.by_node]
    if not by_node:
        return []
    first, *others = by_node
    want = found[first].partitions
    return [
        Mismatch(name, "its number of partitions", f"{want}, as {first} has", str(found[name].partitions))
        for name in others
        if found[name].partitions != want
    ]


def _settings(topic: Topic, settings: Mapping[str, str] | None) -> list[Mismatch]:
    if settings is None:
        return []
    return [
        Mismatch(topic.name, name, _wanted(name, want), settings.get(name, "not known"), name not in _HARMLESS)
        for name, want in topic.settings().items()
        if not _suffices(name, want, settings.get(name, ""))
    ]


def _wanted(name: str, want: str) -> str:
    return f"at least {want}" if name in _AT_LEAST else want


def _suffices(name: str, want: str, have: str) -> bool:
    if have == want or name not in _AT_LEAST:
        return have == want
    return have == "-1" or (have.isdecimal() and int(have) >= int(want))


async def _inspect(admin: Admin, names: Iterable[str]) -> tuple[dict[str, Found], str | None]:
    there = await admin.layouts(names)
    try:
        settings = await admin.settings(there)
    except SettingsUnknown as unknown:
        return {name: Found(one.partitions, None, one.led) for name, one in there.items()}, str(unknown)
    return {
        name: Found(one.partitions, settings[name], one.led) for name, one in there.items() if name in settings
    }, None


def _resized(
    topics: Mapping[str, Topic], found: dict[str, Found], partitions: int, but: Iterable[str]
) -> dict[str, int]:
    """The topics keyed by node that have another number of partitions, and that number.

    A broker may still say that there are topics which were just deleted (``but``): those count as missing.
    """
    counts = {name: one.partitions for name, one in found.items() if topics[name].by_node}
    wrong = {name: count for name, count in counts.items() if count != partitions}
    for name in wrong.keys() & set(but):
        del found[name], wrong[name]
    return wrong


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
        Mismatch(
            name, "its number of partitions", f"{partitions}; {advice[empty[name]].format(count=count)}", str(count)
        )
        for name, count in wrong.items()
    )


def _is_settled(topics: Mapping[str, Topic], found: Mapping[str, Found], changes: Mapping[str, None]) -> bool:
    """Whether a component may start: all is there, and what was just made has its leaders."""
    return len(found) == len(topics) and (not changes or all(one.led for one in found.values()))


async def _create(
    admin: Admin, topics: Mapping[str, Topic], found: Mapping[str, Found], partitions: int, replication_factor: int
) -> list[str]:
    missing = [topic for name, topic in topics.items() if name not in found]
    if not missing:
        return []
    made = await admin.create(
        NewTopic(topic.name, partitions, replication_factor, topic_configs=topic.settings()) for topic in missing
    )
    return [f"{name}: created, {partitions} partitions, replication factor {replication_factor}" for name in made]


async def _alter(admin: Admin, topic: Topic, found: Found) -> list[str]:
    """Set what is not as it must be, and leave the topic's other settings as they are."""
    wrong = {one.what: one.have for one in _settings(topic, found.settings or {})}
    if not wrong:
        return []
    want = {name: value for name, value in topic.settings().items() if name in wrong}
    await admin.alter(topic.name, want)
    return [f"{topic.name}: {name} altered from {have} to {want[name]}" for name, have in wrong.items()]


class TopicCheck:
    """Asks whether the topics called ``names`` may be used, until they may.

    Topics ``beside`` them may be missing; where they are there, they must have as many partitions.
    """

    def __init__(self, kafka: str, names: Iterable[str], *, beside: Iterable[str] = ()) -> None:
        self._kafka, self._names, self._beside = kafka, tuple(names), tuple(beside)
        self._wrong: list[str] = [f"no Kafka broker has answered at {kafka} yet"]

    def not_ready(self) -> list[str]:
        """Why they may not be used, one reason a mistake; empty once they may."""
        return list(self._wrong)

    async def passed(self, stop: asyncio.Event) -> Checked | None:
        """The topics, once they may be used; None where ``stop`` is set before."""
        asked = 0
        while not stop.is_set():
            try:
                found = await check(self._kafka, self._names, self._beside)
            except ContractMismatch as error:
                self._tell([f"{mistake}: run {COMMAND}" for mistake in error.mistakes])
            except BrokerError as error:
                self._tell(str(error).splitlines())
            else:
                self._pass(found)
                return found
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), ASK_AFTER_S[min(asked, len(ASK_AFTER_S) - 1)])
            asked += 1
        return None

    def _tell(self, wrong: list[str]) -> None:
        """Say what is wrong, when that has changed."""
        if wrong != self._wrong:
            log.warning("waiting for topics that can be used: %s", "; ".join(wrong))
        self._wrong = wrong

    def _pass(self, found: Checked) -> None:
        for mismatch in found.harmless:
            log.warning("%s", mismatch)
        if self._wrong:
            log.info("the topics can be used: %s", ", ".join(self._names))
        self._wrong = []
