"""How a tick is decoded: repeated content is the same object, and every change is seen."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.series.tick import TickDecoder, decode
from tests.growth import kept

MIG = {"uuid": "MIG-1", "parent_uuid": "GPU-a", "gpu_instance": 7, "profile": "1g.10gb"}
PARTS = {"utilization_ratio": 0.5, "memory_used_bytes": 10}
CHANGES: dict[str, list[Any]] = {
    "index": [0, 1],
    "model": ["H100", None],
    "mig": [MIG, None],
    "metrics": [{"power_watts": 100}, {"power_watts": 101.5, "temperature_celsius": 40, "strange": 1}],
    "processes": [[{"pid": 1}], [{"pid": 2}]],
    "jobs": [[{"id": "7"}], []],
    "events": [[{"kind": "xid", "code": 79, "holders": [{"namespace": "ml", "pod": "a"}]}]],
    "info": [{"serial": "1"}, {"serial": "2"}],
    "xids": [{"79": 1}, {"79": 2}],
    "holders": [
        [{"namespace": "ml", "pod": "a", "labels": {"app": "x"}}],
        [{"namespace": "ml", "pod": "a", "parts": PARTS}, {"namespace": "ml", "pod": "b", "parts": None}],
        [{"namespace": "ml", "pod": "a", "parts": {"power_watts": 1}}, {"namespace": "ml", "pod": "b"}],
    ],
    "unattributed": [PARTS, {"power_watts": 2.5}],
    "split_scaled": [True, False],
    "conflict": ["no_pod"],
}
DEVICE = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHANGES.items()})
DEVICES = st.lists(DEVICE, max_size=3)


def record(*devices: dict[str, Any], backwards: bool = False) -> bytes:
    """A tick's record, in whose devices the fields come in this or the other order."""
    header = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": 1, "ts_ms": 1, "offset": 1}
    listed = [{"uuid": f"GPU-{number}", **fields} for number, fields in enumerate(devices)]
    ordered = [dict(reversed(fields.items())) for fields in listed] if backwards else listed
    return json.dumps({**header, "attribution": "exact", "devices": ordered}).encode()


@given(st.lists(st.tuples(DEVICES, st.booleans()), min_size=2, max_size=6))
def test_a_tick_says_the_same_whatever_came_before_it(ticks: list[tuple[list[dict[str, Any]], bool]]) -> None:
    remembering = TickDecoder()
    for devices, backwards in ticks:
        encoded_record = record(*devices, backwards=backwards)
        assert remembering.decode(encoded_record) == TickDecoder().decode(encoded_record)


def test_a_device_and_its_holders_are_the_same_objects_while_only_values_and_parts_change() -> None:
    info = {"info": {"serial": "1"}}
    first, second, third = (
        decode(record({**info, "metrics": metrics, "holders": holders, "processes": [{"pid": pid}]})).devices[0]
        for pid, (metrics, holders) in enumerate(
            zip([*CHANGES["metrics"], {}], [CHANGES["holders"][1], CHANGES["holders"][2], []], strict=True)
        )
    )

    assert first.device is second.device is third.device
    assert first.holders is second.holders is not third.holders
    assert (first.metrics, first.parts) != (second.metrics, second.parts)


@pytest.mark.parametrize(
    "changes", [{"info": {"serial": 1}}, {"holders": [{"pod": "a"}]}, {"events": 3}, {"xids": [1]}]
)
def test_what_is_no_such_record_is_none_though_its_node_is_known(changes: dict[str, Any]) -> None:
    decode(record({"info": {"serial": "1"}}))
    with pytest.raises(msgspec.DecodeError):
        decode(record(changes))


@pytest.mark.parametrize("null", ["info", "xids", "holders", "metrics", "events", "vendor"])
def test_null_means_absent(null: str) -> None:
    assert decode(record({null: None})) == decode(record({}))


def test_nothing_is_kept_of_nodes_that_are_gone_also_if_they_had_few_ticks() -> None:
    decoder, sizes = TickDecoder(), list[int]()
    for number in range(200):
        for _ in range(30):
            for node in ("n1", "n2", f"gone-{number}"):
                decoder.decode(record({"uuid": "GPU-a"}).replace(b'"n"', f'"{node}"'.encode()))
        sizes.append(kept(decoder))
    assert max(sizes[100:]) <= max(sizes[10:100])
