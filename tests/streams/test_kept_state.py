"""A key's state in a compacted topic: whoever writes when, the last one is in the end what the owner goes by."""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from streams.kept_state import KeptState, Order


class Owner(KeptState[str | None]):
    """A worker whose state counts records. Its writes are acknowledged when the test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.count = -1

    def current_order(self) -> Order:
        return (self.count,) if self.count >= 0 else ()


class Written(NamedTuple):
    number: int
    by: str


OLDER, EQUAL, LATER = "older", "equal", "later"


class Topic:
    """The log of a topic, with the owner that reads and writes it, step by step.

    ``saved`` is what the owner relies on: the latest that it has used, or that was acknowledged. ``known`` has all that
    it has read or written, and ``used`` is the offset of the state that it went on from. ``is_lost``: it has read a
    later one after records of its own, so another worker has the partition.
    """

    def __init__(self) -> None:
        self.log: list[Written | None] = []
        self.position, self.writes, self.used = 0, 0, -1
        self.saved, self.known, self.is_lost = -1, list[int](), False
        self.owner = Owner()
        self.in_flight: Written | None = None
        self.landed: int | None = None

    def step(self, name: str) -> None:
        owner, count = self.owner, self.owner.count
        if name == "record":
            owner.count, owner.is_fresh = count + 1, False
        elif name == "write" and count >= 0 and not owner.writing:
            owner.writing, self.in_flight, self.landed = True, Written(count, "owner"), None
            self.writes += 1
        elif name == "land" and self.in_flight is not None and self.landed is None:
            self.log.append(self.in_flight)
            self.landed = len(self.log) - 1
        elif name == "acknowledge" and self.in_flight is not None and self.landed is not None:
            owner.wrote(self.landed, str(self.in_flight), (self.in_flight.number,))
            self.saved = max(self.saved, self.in_flight.number)
            self.known.append(self.in_flight.number)
            self.in_flight = None
        elif name == "read" and self.position < len(self.log):
            self.read()
        elif name == "deletion":
            self.log.append(None)
        elif name in (OLDER, EQUAL, LATER):
            self.log.append(Written(max(0, count + {OLDER: -1, EQUAL: 0, LATER: 1}[name]), "other"))

    def read(self) -> None:
        written, offset = self.log[self.position], self.position
        self.position += 1
        self.known += [] if written is None else [written.number]
        if written is None:
            if self.owner.read(offset, None):
                self.owner, self.saved, self.known = Owner(), -1, []
        elif written.number > self.owner.count and not self.owner.is_fresh:
            self.is_lost = True
            assert not self.owner.read(offset, str(written), (written.number,))
        elif self.owner.read(offset, str(written), (written.number,)):
            self.owner.count, self.saved, self.used = written.number, written.number, offset

    def settle(self) -> None:
        """Read all, and write again while the owner has to."""
        for _ in range(len(self.log) + 10):
            for name in ("land", "acknowledge", "read"):
                self.step(name)
            if self.owner.stale:
                self.step("write")


STEPS = ["record", "write", "land", "acknowledge", "read", "deletion", OLDER, EQUAL, LATER]


@settings(max_examples=2000)
@given(st.lists(st.sampled_from(STEPS), max_size=16))
def test_in_the_end_the_last_state_in_the_topic_is_what_its_owner_wrote_or_used(steps: list[str]) -> None:
    topic = Topic()
    for name in steps:
        topic.step(name)
    topic.settle()

    owner = topic.owner
    assert owner.order == ((max(topic.known),) if topic.known else ())
    if owner.latest is not None and not topic.is_lost:
        last = topic.log[-1]
        assert last is not None
        assert last.number >= topic.saved
        assert last.by == "owner" or topic.used == len(topic.log) - 1, "of another worker, and not used"
    writes = topic.writes
    topic.settle()
    assert topic.writes == writes, "nothing is written for ever"
