"""Nodes whose series rules make equal: a node writes such a series after another one has ended it, and later."""

import struct
from typing import Any, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from sinks.remote_write.nodes import NodeTick, OpenSeries
from sinks.series.model import STALE, SampleGroup
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.translation import Translator
from tests.sinks.conftest import device, sample
from topics.metric import Labels
from topics.profiles import PROFILES

RULES = "- {regex: hostname|instance|UUID|gpu|device|pci_bus_id, action: labeldrop}"
"""Of a series, the metric and the pod are left."""

END = struct.pack("<d", STALE)


class Step(NamedTuple):
    """What happens to a node: it is silent, or a tick so long after its last one is sent, and accepted or refused at
    once or later."""

    kind: str
    node: int
    after_ms: int
    pods: list[str | None]


STEPS = st.builds(
    Step,
    st.sampled_from(["sent", "accepted", "accepted", "refused", "silence"]),
    st.integers(0, 2),
    st.sampled_from([500, 1000, 5000]),
    st.lists(st.sampled_from(["a", "b", None]), max_size=2),
)


class Nodes:
    """Three nodes, two of them in one partition, and a receiver that has the last sample of each series."""

    def __init__(self) -> None:
        self.translator = Translator([PROFILES["dcgm"]], relabelling=Relabelling([load(RULES, "rules.yml")]))
        self.partitions = [OpenSeries(self.translator) for _ in range(2)]
        self.times_ms, self.seq = [1_795_219_152_000] * 3, 0
        self.in_flight: dict[int, NodeTick] = {}
        self.received: dict[Labels, tuple[int, int, bool]] = {}
        """The time, the node, and whether it is an end."""

    def step(self, step: Step) -> None:
        partition = self.partitions[step.node // 2]
        if step.kind == "silence":
            busy = {("c1", f"n{node}") for node in self.in_flight}
            for silence in partition.silences(100.0, 60.0, busy):
                self.receive(int(silence.node[1][1:]), silence.groups)
                partition.ended(silence)
            return
        if step.node not in self.in_flight:
            self.tick(step, partition)
        if step.kind != "sent":
            tick, accepted = self.in_flight.pop(step.node), step.kind == "accepted"
            if accepted:
                self.receive(step.node, tick.groups)
            partition.settle(tick, 0.0, accepted=accepted)

    def tick(self, step: Step, partition: OpenSeries) -> None:
        self.seq, self.times_ms[step.node] = self.seq + 1, self.times_ms[step.node] + step.after_ms
        devices: list[dict[str, Any]] = [device(f"GPU-{n}", pod) for n, pod in enumerate(step.pods)]
        tick = sample(self.seq, node=f"n{step.node}", ts_ms=self.times_ms[step.node], devices=devices)
        self.in_flight[step.node] = partition.tick(tick)

    def receive(self, node: int, groups: list[SampleGroup]) -> None:
        for series, ts_ms, values in groups:
            for labels, value in zip(series.series(), values, strict=True):
                last_ms, last_node, has_ended = self.received.get(labels, (-1, node, True))
                assert ts_ms > last_ms, (labels, ts_ms - last_ms)
                assert has_ended or last_node == node, labels
                self.received[labels] = ts_ms, node, struct.pack("<d", value) == END


@given(st.lists(STEPS, max_size=30))
@example(
    [
        Step("accepted", 0, 1000, ["a"]),
        Step("refused", 0, 1000, ["b"]),
        Step("accepted", 0, 5000, ["b"]),
        Step("accepted", 1, 5000, ["a"]),
    ]
)
def test_of_each_series_one_node_at_a_time_writes_samples_each_later_than_the_last(steps: list[Step]) -> None:
    nodes = Nodes()
    for step in steps:
        nodes.step(step)
