"""Readers can decode the records of producers."""

import math
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import records
from tests.producers.fakes import containers, devices
from topics.allocations import Allocations
from topics.samples import Sample
from topics.workloads import NodeWorkloads

NODE: dict[str, Any] = {"cluster": "prod", "node": "gpu-1"}
TICK: dict[str, Any] = {**NODE, "run_id": 1, "seq": 1, "ts_ms": 1, "allocations_seq": None}

numbers = st.none() | st.floats() | st.integers(0, 2**63 - 1) | st.booleans()


def _encoded(device: dict[str, Any]) -> dict[str, Any]:
    decoded: dict[str, Any] = orjson.loads(records.sample(**TICK, devices=[device]))["devices"][0]
    return decoded


@given(st.dictionaries(st.text("abc_", min_size=1), numbers))
def test_a_value_that_is_missing_is_absent_and_all_others_are_kept(metrics: dict[str, Any]) -> None:
    present = {
        key: value
        for key, value in metrics.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }

    assert _encoded({"uuid": "GPU-0", "metrics": metrics})["metrics"] == present


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_a_process_without_a_value_has_no_such_field(missing: float | None) -> None:
    row = {"pid": 1, "memory_used_bytes": 0, "sm_utilization_ratio": missing}
    device = {"uuid": "GPU-0", "metrics": {"power_watts": 1.0}, "processes": [row]}

    assert _encoded(device)["processes"] == [{"pid": 1, "memory_used_bytes": 0}]
    assert device["processes"] == [row]


def test_zero_is_zero() -> None:
    assert _encoded({"uuid": "GPU-0", "metrics": {"gpu_utilization_ratio": 0, "power_watts": math.nan}})["metrics"] == {
        "gpu_utilization_ratio": 0
    }


def test_a_sample_decodes_to_what_was_read() -> None:
    tick = {**TICK, "run_id": 7, "seq": 8, "ts_ms": 9, "allocations_seq": 3}
    sample = msgspec.json.decode(records.sample(**tick, devices=devices(0.25)), type=Sample)

    assert (sample.cluster, sample.node, sample.run_id, sample.seq, sample.ts_ms) == ("prod", "gpu-1", 7, 8, 9)
    assert sample.allocations_seq == 3
    assert sample.devices[0].metrics == {"gpu_utilization_ratio": 0.25}


def test_a_snapshot_decodes_to_the_kubelets_answer() -> None:
    content = records.containers_content(containers("a-0", "b-0"))
    snapshot = msgspec.json.decode(
        records.snapshot(**NODE, run_id=7, seq=2, ts_ms=9, content=content), type=Allocations
    )

    assert [row.pod for row in snapshot.containers] == ["a-0", "b-0"]
    assert snapshot.containers[1].device_ids == ("GPU-0f12ab34-5c6d-7e8f-9a0b-000000000001",)


def test_the_order_of_a_kubelets_answer_makes_no_difference() -> None:
    first = [{**row, "device_ids": ["GPU-b", "GPU-a"]} for row in containers("a-0", "b-0")]
    second = [{**row, "device_ids": ["GPU-a", "GPU-b"]} for row in reversed(containers("a-0", "b-0"))]

    assert records.containers_content(first) == records.containers_content(second)
    assert records.containers_content(first) != records.containers_content(first[:1])


def test_workloads_decode_to_what_the_api_server_has() -> None:
    pod = {"namespace": "ml", "name": "a-0", "uid": "u", "started_ms": 5, "ended_ms": None, "labels": {"app": "a"}}
    content = records.WorkloadsContent({"zone": "a"}, [pod]).encoded()
    workloads = msgspec.json.decode(
        records.workloads(**NODE, epoch=3, seq=1, ts_ms=9, content=content), type=NodeWorkloads
    )

    assert (workloads.epoch, workloads.seq, workloads.node_labels) == (3, 1, {"zone": "a"})
    assert (workloads.pods[0].name, workloads.pods[0].started_ms, workloads.pods[0].ended_ms) == ("a-0", 5, None)


def test_a_removed_node_is_marked_and_another_has_no_such_field() -> None:
    content = records.WorkloadsContent({}, [])
    present, removed = content.encoded(), content._replace(removed=True).encoded()
    last = msgspec.json.decode(records.workloads(**NODE, epoch=3, seq=2, ts_ms=9, content=removed), type=NodeWorkloads)

    assert last.removed
    assert b"removed" not in present


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 254, "nodé", "a\n"])
def test_a_name_that_readers_would_refuse_is_refused_by_the_producer(name: str) -> None:
    with pytest.raises(ValueError, match="a name has 1-253 of"):
        records.checked_name("node", name)


def test_text_that_json_can_not_hold_is_unencodable() -> None:
    with pytest.raises(records.Unencodable):
        records.sample(**TICK, devices=[{"uuid": "\ud800"}])
