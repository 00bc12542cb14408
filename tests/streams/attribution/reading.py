"""Two drivers of the join: records in one order, and a reader that drives it as the component does, in any order.

The reader asserts, whatever it does, that a node's outputs keep the order of its samples, that none comes twice in an
epoch, and that none is given up before it is certain that its snapshot never comes.
"""

from collections import defaultdict

import msgspec

from streams.attribution import join
from streams.attribution.attribute import Joined
from streams.attribution.join import NodeState
from streams.attribution.log_time import Watermark
from tests.streams.attribution.stories import Act, Story
from topics.samples import Sample

GRACE_S = 10.0


def run(state: NodeState, *records: join.Record) -> tuple[NodeState, list[Joined]]:
    """The state after some records, and all samples that they release."""
    joined_ticks: list[Joined] = []
    for record in records:
        state, joined = join.step(state, record, GRACE_S)
        joined_ticks += joined
    return state, joined_ticks


class Reading:
    """One partition, read. ``outputs`` has each output by offset; a repeated one must be the same."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.outputs: dict[int, bytes] = {}
        self.now_s, self.committed = 0.0, 0
        self._begin()

    def _begin(self) -> None:
        """A process that knows nothing: it reads the state to its present end before any sample."""
        self.states: dict[str, join.NodeState] = defaultdict(lambda: join.NEW)
        self.positions = {"samples": self.committed, "allocations": 0, "workloads": 0}
        self.asked: list[tuple[float, int]] = []
        self.read_s = float("-inf")
        self.skip_grace: dict[str, bool] = defaultdict(bool)
        self.watermark = Watermark()
        self._new_epoch()
        self.workloads(len(self.story.logs.workloads))

    def _new_epoch(self) -> None:
        self.positions["samples"] = self.committed
        self.reads: dict[int, float] = {}
        self.released: dict[str, list[int]] = defaultdict(list)
        self.asked.clear()
        self.watermark.forget()

    # -- what may happen

    def act(self, act: Act) -> None:
        """Do one act."""
        getattr(self, act.kind)(act.amount)

    def wait(self, amount: int) -> None:
        """Time passes."""
        self.now_s += amount / 2

    def allocations(self, amount: int) -> None:
        """Some more of the allocations that are written by now arrive."""
        for record in self.story.logs.allocations[self.positions["allocations"] :][:amount]:
            if self.story.allocations_written_s[self.positions["allocations"]] > self.now_s:
                return
            self.positions["allocations"] += 1
            self.skip_grace[record.node] = False
            self._step(record.node, record)

    def workloads(self, amount: int) -> None:
        """Some more of the workloads that are written by now arrive."""
        for record in self.story.logs.workloads[self.positions["workloads"] :][:amount]:
            offset = self.positions["workloads"]
            if self.story.workloads_written_s[offset] > self.now_s:
                return
            self.positions["workloads"] += 1
            logged_ms = self.watermark.workloads_read(offset, self.story.logs.workloads_logged_ms[offset])
            self._step(record.node, join.LoggedWorkloads(record, logged_ms))

    def samples(self, amount: int) -> None:
        """Some more of the samples that are written by now arrive."""
        for sample in self.story.logs.samples[self.positions["samples"] :][:amount]:
            offset = self.positions["samples"]
            if self.story.samples_written_s[offset] > self.now_s:
                return
            self.positions["samples"] += 1
            self.reads[offset] = self.now_s
            logged_ms = self.story.logs.samples_logged_ms[offset]
            self.watermark.sample_read(offset, logged_ms, self.now_s)
            self._step(sample.node, join.PendingTick(sample, offset, self.now_s, logged_ms, self.watermark.ms))

    def ask(self, _: int) -> None:
        """The broker is asked where the partitions end."""
        self.asked.append((self.now_s, self._end(self.story.allocations_written_s)))
        self.watermark.add_ends(
            self.now_s, self._end(self.story.workloads_written_s), self._end(self.story.samples_written_s)
        )

    def _end(self, written_s: list[float]) -> int:
        return sum(at_s <= self.now_s for at_s in written_s)

    def read(self, _: int) -> None:
        """The allocations or the workloads have been read to an end that was asked for."""
        self.watermark.read_to(self.positions["workloads"])
        for node in self.story.logs.runs:
            self._step(node, join.WatermarkRaised(self.watermark.ms))
        reached = [asked_s for asked_s, end in self.asked if self.positions["allocations"] >= end]
        if reached:
            self.asked = [a for a in self.asked if a[0] > reached[-1]]
            self.read_s = max(self.read_s, reached[-1])
            for node in self.story.logs.runs:
                self._step(node, join.AllocationsRead(reached[-1]))

    def commit(self, amount: int) -> None:
        """Commit some of the finished prefix."""
        done = {offset for offsets in self.released.values() for offset in offsets}
        prefix = next(o for o in range(self.committed, len(self.story.logs.samples) + 1) if o not in done)
        self.committed += -(-(prefix - self.committed) * amount // 6)
        for node in self.story.logs.runs:
            self._step(node, join.Committed(self.committed))

    def forget(self, amount: int) -> None:
        """Read again what is not committed; nodes without pending ticks need not be notified."""
        self._new_epoch()
        for node in self.story.logs.runs:
            if amount > 3 or self.states[node].pending:
                self._step(node, join.Forget())

    def restart(self, _: int) -> None:
        """Another process takes over."""
        self._begin()
        self.allocations(len(self.story.logs.allocations))

    def drain(self) -> None:
        """Read everything and let time pass; then no sample may be pending."""
        self.now_s = max(self.now_s, 1000.0)
        total = len(self.story.logs.samples) + len(self.story.logs.allocations) + len(self.story.logs.workloads)
        for kind in ("workloads", "allocations", "samples", "ask", "read"):
            self.act(Act(kind, total))
        self.now_s += GRACE_S
        for kind in ("ask", "read", "commit"):
            self.act(Act(kind, 6))
        assert self.committed == len(self.story.logs.samples)
        assert not any(state.pending for state in self.states.values())

    # -- what must hold

    def _step(self, node: str, record: join.Record) -> None:
        if isinstance(record, join.PendingTick):
            self.skip_grace[node] |= len(self.states[node].pending) >= join.MAX_PENDING
        self.states[node], joined = join.step(self.states[node], record, GRACE_S)
        for output in joined:
            self._check(node, output.sample.offset)
            value = msgspec.json.encode(output.sample)
            assert self.outputs.get(output.sample.offset, value) == value
            self.outputs[output.sample.offset] = value

    def _check(self, node: str, offset: int) -> None:
        waiting = [o for o in self.reads if self.story.logs.samples[o].node == node]
        assert offset == waiting[len(self.released[node])], "the next of the node's samples, and no other"
        self.released[node].append(offset)
        sample = self.story.logs.samples[offset]
        if sample.allocations_seq is not None and not self._arrived(sample):
            wait_s = 0.0 if self.skip_grace[node] else GRACE_S
            assert self.read_s >= self.reads[offset] + wait_s, "given up too early"
            self.skip_grace[node] = True

    def _arrived(self, sample: Sample) -> bool:
        named = (sample.node, sample.run_id, sample.allocations_seq)
        arrived = self.story.logs.allocations[: self.positions["allocations"]]
        return any((a.node, a.run_id, a.seq) == named for a in arrived)
