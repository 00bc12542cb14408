"""What became of every sampled tick, by its identity: (cluster, node, run_id, seq). Pure.

In:       what producers sampled, what gpu.attributed held, what each sink did.
Out:      the summary of a run; ``lost`` is found from the sequence numbers, not from anybody's counters.
State:    per run of a node, the sequence numbers seen: a prefix and what is beyond it, so hours of ticks stay small.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from sinks.outcomes import Outcome
from topics.attributed import Attribution


class Run(NamedTuple):
    """One run of one node's producer."""

    cluster: str
    node: str
    run_id: int


class Seqs:
    """A set of sequence numbers, which count from 1."""

    def __init__(self) -> None:
        self.prefix = 0
        self._beyond: set[int] = set()

    def add(self, seq: int) -> bool:
        """Takes a number in; False if it was there."""
        if seq in self:
            return False
        self._beyond.add(seq)
        while self.prefix + 1 in self._beyond:
            self.prefix += 1
            self._beyond.remove(self.prefix)
        return True

    def __contains__(self, seq: int) -> bool:
        return 0 < seq <= self.prefix or seq in self._beyond


class Sampled(NamedTuple):
    """A run of which the ticks 1 to ``last_seq`` were sampled, those dropped included."""

    run: Run
    last_seq: int


class SinkTally:
    """What one sink did: the ticks that it took or dead-lettered, and how many it dropped."""

    def __init__(self) -> None:
        self.ticks: dict[Run, Seqs] = defaultdict(Seqs)
        self.dropped = 0

    def outcome(self, cluster: str, node: str, run_id: int, seq: int, outcome: Outcome) -> None:
        """Takes in what became of a tick. A duplicate is one that was taken before."""
        if outcome == "dropped":
            self.dropped += 1
        else:
            self.ticks[Run(cluster, node, run_id)].add(seq)


class Attributed(msgspec.Struct, frozen=True):
    """Ticks by how they were attributed."""

    exact: int = 0
    late: int = 0
    none: int = 0


class RunSummary(msgspec.Struct, frozen=True):
    """How a run ended: ticks sampled and metric values in them, and what became of them."""

    ticks: int
    samples: int
    attributed: Attributed
    delivered: dict[str, int]
    dead_lettered: int
    dropped: int
    lost: int

    @property
    def ok(self) -> bool:
        """Whether nothing was lost or dropped."""
        return not self.lost and not self.dropped


class Tally:
    """Counts a run. ``sinks`` are the names of those that are enabled, as the summary calls them."""

    def __init__(self, sinks: Iterable[str]) -> None:
        self.sinks = {name: SinkTally() for name in sinks}
        self._attributed: dict[Run, Seqs] = defaultdict(Seqs)
        self._kinds: Counter[tuple[Run, Attribution]] = Counter()
        self._letters: set[tuple[bytes, ...]] = set()

    def attributed(self, run: Run, seq: int, attribution: Attribution) -> bool:
        """Takes a record of gpu.attributed in; False for a replay."""
        new = self._attributed[run].add(seq)
        self._kinds[run, attribution] += new
        return new

    def dead_lettered(self, identity: tuple[bytes, ...]) -> None:
        """Takes a record of gpu.dead-letters in, known by where the original stood and who gave up."""
        self._letters.add(identity)

    def unattributed(self, sampled: Iterable[Sampled]) -> int:
        """How many of the sampled ticks have not come out of attribution."""
        return missing(sampled, [self._attributed])

    def behind(self, sink: str, sampled: Iterable[Sampled]) -> int:
        """How many of the sampled ticks one sink has neither taken nor dead-lettered."""
        return missing(sampled, [self.sinks[sink].ticks])

    def undelivered(self, sampled: Iterable[Sampled]) -> int:
        """How many of the sampled ticks some sink has neither taken nor dead-lettered."""
        return missing(sampled, [sink.ticks for sink in self.sinks.values()])

    def summary(
        self, sampled: Collection[Sampled], *, values: int, delivered: dict[str, int], dropped: int
    ) -> RunSummary:
        """The end of the run: ``values`` in the sampled ticks, ``delivered`` values by sink, ticks that producers
        ``dropped``."""
        return RunSummary(
            ticks=sum(one.last_seq for one in sampled),
            samples=values,
            attributed=Attributed(
                exact=sum(self._kinds[one.run, "exact"] for one in sampled),
                late=sum(self._kinds[one.run, "late"] for one in sampled),
                none=sum(self._kinds[one.run, "none"] for one in sampled),
            ),
            delivered=delivered,
            dead_lettered=len(self._letters),
            dropped=dropped + sum(sink.dropped for sink in self.sinks.values()),
            lost=self.undelivered(sampled),
        )


def missing(sampled: Iterable[Sampled], everywhere: Collection[Mapping[Run, Seqs]]) -> int:
    """How many sampled ticks are absent from at least one of the sets."""
    count = 0
    for one in sampled:
        sets = [ticks.get(one.run, Seqs()) for ticks in everywhere]
        common = min((seqs.prefix for seqs in sets), default=one.last_seq)
        count += sum(any(seq not in seqs for seqs in sets) for seq in range(common + 1, one.last_seq + 1))
    return count
