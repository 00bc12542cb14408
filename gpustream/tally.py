"""Counts what became of every sampled tick, by its identity: (cluster, node, run_id, seq). Pure.

In:       what producers sampled, what gpu.attributed held, what each sink did.
Out:      the summary of a run. ``lost`` comes from the sequence numbers, not from the components' own counters.
State:    per run of a node, the sequence numbers seen, as ranges: so hours of ticks stay small.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sinks.outcomes import Outcome
from topics.attributed import Attribution


class Run(NamedTuple):
    """One run of one node's producer."""

    cluster: str
    node: str
    run_id: int


class Ranges:
    """A set of integers, as the ranges that it is made of, in their order."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, number: int) -> bool:
        """Adds a number. Returns False if it was in the set already."""
        firsts, lasts = self._firsts, self._lasts
        if lasts and number == lasts[-1] + 1:
            lasts[-1] = number
            return True
        index = bisect_left(lasts, number)  # the first range that ends at the number or after it
        if index < len(lasts) and firsts[index] <= number:
            return False
        follows = index > 0 and lasts[index - 1] == number - 1
        precedes = index < len(firsts) and firsts[index] == number + 1
        if follows and precedes:
            lasts[index - 1] = lasts.pop(index)
            del firsts[index]
        elif follows:
            lasts[index - 1] = number
        elif precedes:
            firsts[index] = number
        else:
            firsts.insert(index, number)
            lasts.insert(index, number)
        return True

    def __contains__(self, number: int) -> bool:
        index = bisect_left(self._lasts, number)
        return index < len(self._lasts) and self._firsts[index] <= number

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The first and the last number of each range."""
        return zip(self._firsts, self._lasts, strict=True)

    @property
    def prefix(self) -> int:
        """The last of the numbers from 1 on that are in the set without a gap; 0 if 1 is not."""
        return self._lasts[0] if self._firsts[:1] == [1] else 0

    def gaps(self) -> list[tuple[int, int]]:
        """The first and the last number of each gap between two ranges."""
        return [(last + 1, first - 1) for last, first in zip(self._lasts, self._firsts[1:], strict=False)]


Sampled = Mapping[Run, int]
"""By run the number of its last tick: the ticks from 1 to it were sampled, those dropped included."""


class SinkTally:
    """What one sink did: the ticks that it took or dead-lettered, and how many it dropped."""

    def __init__(self) -> None:
        self.ticks: dict[Run, Ranges] = defaultdict(Ranges)
        self.dropped = 0

    def outcome(self, cluster: str, node: str, run_id: int, seq: int, outcome: Outcome) -> None:
        """Counts what became of a tick. A duplicate is a tick that the sink took before."""
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

    def text(self, seen: Sequence[str] = ()) -> str:
        """The summary as text: the lines ``seen``, and then how many ticks came to which end."""
        by = self.attributed
        rows = [
            *(("seen" if not number else "", text) for number, text in enumerate(seen)),
            ("sampled", f"{self.ticks:,} ticks, {self.samples:,} values"),
            ("attributed", f"{by.exact:,} exact, {by.late:,} late, {by.none:,} without a snapshot"),
            *((f"to {name}", f"{values:,} values") for name, values in self.delivered.items()),
            ("dead-lettered", f"{self.dead_lettered:,}"),
            ("dropped", f"{self.dropped:,}"),
            ("lost", f"{self.lost:,}"),
        ]
        return "\n".join(f"{name:>16}  {text}" for name, text in rows)


class Tally:
    """Counts a run. ``sinks`` are the names of those that are enabled, as the summary calls them."""

    def __init__(self, sinks: Iterable[str]) -> None:
        self.sinks = {name: SinkTally() for name in sinks}
        self._attributed: dict[Run, Ranges] = defaultdict(Ranges)
        self._kinds: Counter[tuple[Run, Attribution]] = Counter()
        self._letters: set[tuple[bytes, ...]] = set()

    def attributed(self, run: Run, seq: int, attribution: Attribution) -> bool:
        """Counts a record of gpu.attributed. Returns False for a replay."""
        new = self._attributed[run].add(seq)
        self._kinds[run, attribution] += new
        return new

    def dead_lettered(self, identity: tuple[bytes, ...]) -> None:
        """Counts a dead letter: its original's topic, partition and offset, and the stage that gave up."""
        self._letters.add(identity)

    def unattributed(self, sampled: Sampled) -> int:
        """How many of the sampled ticks have not come out of attribution."""
        return missing(sampled, [self._attributed])

    def behind(self, sink: str, sampled: Sampled) -> int:
        """How many of the sampled ticks one sink has neither taken nor dead-lettered."""
        return missing(sampled, [self.sinks[sink].ticks])

    def undelivered(self, sampled: Sampled) -> int:
        """How many of the sampled ticks some sink has neither taken nor dead-lettered."""
        return missing(sampled, [sink.ticks for sink in self.sinks.values()])

    def summary(self, sampled: Sampled, *, values: int, delivered: dict[str, int], dropped: int) -> RunSummary:
        """The summary of the run. ``values``: in all sampled ticks; ``delivered``: by sink; ``dropped``: ticks."""
        return RunSummary(
            ticks=sum(sampled.values()),
            samples=values,
            attributed=Attributed(
                exact=sum(self._kinds[run, "exact"] for run in sampled),
                late=sum(self._kinds[run, "late"] for run in sampled),
                none=sum(self._kinds[run, "none"] for run in sampled),
            ),
            delivered=delivered,
            dead_lettered=len(self._letters),
            dropped=dropped + sum(sink.dropped for sink in self.sinks.values()),
            lost=self.undelivered(sampled),
        )


def missing(sampled: Sampled, all_ticks: Collection[Mapping[Run, Ranges]]) -> int:
    """How many sampled ticks are missing in at least one of the sets of ticks."""
    count = 0
    for run, last_seq in sampled.items():
        seq_sets = [ticks.get(run, Ranges()) for ticks in all_ticks]
        common = min((seqs.prefix for seqs in seq_sets), default=last_seq)
        count += sum(any(seq not in seqs for seqs in seq_sets) for seq in range(common + 1, last_seq + 1))
    return count
