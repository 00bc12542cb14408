"""A simulated fleet through the join: who is reported to hold a device holds it, and parts and rest are the device."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.simulated.fleet import Fleet
from streams.attribution import join
from tests.producers.simulated.fleet_ticks import Tick, ticks
from tests.streams.attribution.records import pending
from topics.allocations import Allocations
from topics.attributed import AttributedDevice
from topics.samples import Sample
from topics.workloads import NodeWorkloads

pytestmark = pytest.mark.slow

START_MS = 1_795_218_340_000
TOLD_WITHIN = 2
"""How many ticks later the API server reports a pod."""

QUANTITIES = (
    ("gpu_utilization_ratio", "utilization_ratio"),
    ("memory_used_bytes", "memory_used_bytes"),
    ("power_watts", "power_watts"),
)

fleets = st.builds(
    Fleet,
    nodes=st.just(4),
    gpus=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 10_000),
    pod_life_s=st.sampled_from([3.0, 10.0, 60.0]),
)


class Reading(NamedTuple):
    """A device of an attributed tick, and the containers that were reported to hold it."""

    device: AttributedDevice
    reported: list[tuple[str, ...]]

    def held_by(self) -> list[tuple[str, ...]]:
        """The containers that hold it."""
        rows = [(h.namespace, h.pod, h.pod_uid or "", h.container or "") for h in self.device.holders]
        return sorted(rows)


def attributed(fleet: Fleet, count: int) -> Iterator[Reading]:
    """Every device of every tick, joined in a replay: what is known of the pods is read first."""
    log = list(ticks(fleet, START_MS, 1000, count + TOLD_WITHIN))
    states: dict[str, join.NodeState] = {}
    for tick in log:
        for workloads in _workloads_of(tick):
            states[tick.node.name], _ = join.step(states.get(tick.node.name, join.NEW), workloads, 10.0)
    for tick in (tick for tick in log if tick.seq <= count):
        for record in _snapshots_of(tick):
            states[tick.node.name], joined = join.step(states[tick.node.name], record, 10.0)
        for device, rows in zip(joined[0].sample.devices, tick.reading.reported, strict=True):
            reported = [(h["namespace"], h["pod"], h["pod_uid"], h["container"]) for h in rows]
            yield Reading(device, sorted(reported))


def _workloads_of(tick: Tick) -> Iterable[join.LoggedWorkloads]:
    head = {"schema": 1, "cluster": "default", "node": tick.node.name, "epoch": 1}
    for news in tick.news:
        record: dict[str, Any] = {**head, "seq": news.at_ms, "ts_ms": news.at_ms, "pods": news.pods}
        yield join.LoggedWorkloads(msgspec.convert(record, NodeWorkloads), 0)


def _snapshots_of(tick: Tick) -> Iterable[join.Record]:
    head = {"schema": 1, "cluster": "default", "node": tick.node.name, "run_id": 1, "seq": tick.seq}
    yield msgspec.convert({**head, "ts_ms": tick.ts_ms, "containers": tick.reading.containers}, Allocations)
    sample = {**head, "ts_ms": tick.ts_ms, "allocations_seq": tick.seq, "devices": tick.reading.devices}
    yield pending(msgspec.convert(sample, Sample), tick.seq)


@given(fleets)
def test_who_is_reported_to_hold_a_device_holds_it_and_parts_and_rest_are_the_device_at_every_tick(
    fleet: Fleet,
) -> None:
    for reading in attributed(fleet, 15):
        assert reading.held_by() == reading.reported
        assert reading.device.conflict is None

        device = reading.device
        parts = [holder.parts for holder in device.holders]
        assert (device.unattributed is not None) == bool(parts)
        for key, quantity in QUANTITIES:
            amounts = [getattr(part, quantity) for part in (*parts, device.unattributed) if part is not None]
            total = device.metrics.get(key)
            if total is None or not parts or (device.mig and quantity != "memory_used_bytes"):
                assert all(value is None for value in amounts)
            else:
                assert min(amounts) >= 0
                assert abs(sum(amounts) - total) <= 1e-9 * total


def test_pods_share_gpus_and_their_processes_may_sum_to_more() -> None:
    devices = [device for device, _ in attributed(Fleet(2, 8, pod_life_s=60), 60)]
    pods = [{(h.namespace, h.pod) for h in device.holders} for device in devices]

    assert max(map(len, pods)) > 2
    assert any(len(names) > 1 and device.unattributed for names, device in zip(pods, devices, strict=True))
