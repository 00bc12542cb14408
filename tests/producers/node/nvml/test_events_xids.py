"""XID errors reach the record of their device once, the counts always, and the log with the same identity."""

import logging
from typing import Any

import msgspec
import pytest

from delivery.instruments import Instruments
from producers.node import instruments as own
from producers.node.nvml.events import MAX_EVENTS, Xid, Xids
from topics.samples import Device

GPU: dict[str, Any] = {"uuid": "GPU-0", "index": 0, "state": "ok", "metrics": {}}


def mig(uuid: str, gpu_instance: int, compute_instance: int = 0) -> dict[str, Any]:
    instances = {"gpu_instance": gpu_instance, "compute_instance": compute_instance}
    return {**GPU, "uuid": uuid, "mig": {"uuid": uuid, "parent_uuid": "GPU-0", **instances}}


CUT = [GPU, mig("MIG-1", 1), mig("MIG-2", 2), mig("MIG-3", 2, 1)]


class Bench:
    def __init__(self) -> None:
        self.instruments = Instruments(own.INSTRUMENTS)
        self.xids = Xids(self.instruments)

    def with_errors(self, devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        devices_with_errors = self.xids.with_errors(devices)
        msgspec.convert(devices_with_errors, list[Device])
        return devices_with_errors

    def counted(self, of: str) -> float:
        return self.instruments.registry.get_sample_value(own.XIDS, {"of": of}) or 0.0


def test_an_error_is_in_one_tick_and_its_count_in_all_that_follow() -> None:
    bench = Bench()
    assert bench.with_errors([GPU]) == [GPU]
    bench.xids.record(Xid(0, 79, 1_000), [GPU])
    bench.xids.record(Xid(0, 31, 1_001), [GPU])
    bench.xids.record(Xid(0, 31, 1_002), [GPU])
    (first,) = bench.with_errors([GPU])
    assert first["events"] == [
        {"kind": "xid", "code": 79, "ts_ms": 1_000},
        {"kind": "xid", "code": 31, "ts_ms": 1_001},
        {"kind": "xid", "code": 31, "ts_ms": 1_002},
    ]
    assert first["xids"] == {"79": 1, "31": 2}
    assert bench.with_errors([GPU]) == [{**GPU, "xids": {"79": 1, "31": 2}}]
    assert bench.counted("device") == 3


def test_the_devices_of_a_tick_do_not_change_afterwards() -> None:
    bench = Bench()
    bench.xids.record(Xid(0, 31, 1), [GPU])
    (first,) = bench.with_errors([GPU])
    bench.xids.record(Xid(0, 31, 2), [GPU])
    assert first["xids"] == {"31": 1}
    assert len(first["events"]) == 1


@pytest.mark.parametrize(
    ("gpu_instance", "compute_instance", "uuids"),
    [
        (None, None, ["GPU-0"]),
        (1, None, ["MIG-1"]),
        (2, None, ["MIG-2", "MIG-3"]),
        (2, 1, ["MIG-3"]),
        (7, None, ["GPU-0"]),
    ],
)
def test_an_error_of_an_instance_belongs_to_its_mig_device(
    gpu_instance: int | None, compute_instance: int | None, uuids: list[str]
) -> None:
    bench = Bench()
    bench.xids.record(Xid(0, 31, 1, gpu_instance, compute_instance), CUT)
    assert [device["uuid"] for device in bench.with_errors(CUT) if "events" in device] == uuids
    assert [device["uuid"] for device in bench.with_errors(CUT) if "xids" in device] == uuids


def test_an_error_of_an_unknown_gpu_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.xids.record(Xid(None, 79, 1), ())
    assert bench.with_errors([GPU]) == [GPU]
    assert bench.counted("unknown_device") == 1
    assert [record.getMessage() for record in caplog.records] == ["XID 79 of a GPU that is not known"]


def test_a_tick_reports_a_limited_number_of_a_storms_errors_and_counts_all() -> None:
    bench = Bench()
    for at_ms in range(1000):
        bench.xids.record(Xid(0, 31, at_ms), [GPU])
    (device,) = bench.with_errors([GPU])
    assert len(device["events"]) == MAX_EVENTS
    assert device["xids"] == {"31": 1000}


def test_codes_beyond_a_bound_are_counted_as_unknown() -> None:
    bench = Bench()
    for code in range(1, 101):
        bench.xids.record(Xid(0, code, 1), [GPU])
    bench.xids.record(Xid(0, 2**64 - 1, 1), [GPU])
    (device,) = bench.with_errors([GPU])
    assert sum(device["xids"].values()) == 101
    assert device["xids"]["999"] == 37
    assert len(device["xids"]) == 65


def test_devices_beyond_a_bound_are_forgotten_from_the_oldest() -> None:
    bench = Bench()
    for number in range(2000):
        bench.xids.record(Xid(0, 31, 1), [{**GPU, "uuid": f"GPU-{number}"}])
    first, last = bench.with_errors([GPU, {**GPU, "uuid": "GPU-1999"}])
    assert "xids" not in first
    assert last["xids"] == {"31": 1}


def test_the_log_has_the_same_identity(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        bench.xids.record(Xid(0, 79, 5), CUT)
        bench.xids.record(Xid(0, 31, 6, 1), CUT)
    extras = [(vars(record)["gpu_uuid"], vars(record)["gpu_index"], vars(record)["xid"]) for record in caplog.records]
    assert extras == [("GPU-0", 0, 79), ("GPU-0", 0, 31)]
    assert [vars(record).get("gpu_mig_uuid") for record in caplog.records] == [None, "MIG-1"]


def test_an_error_of_a_device_that_is_not_in_a_tick_is_in_the_next_that_has_it() -> None:
    bench = Bench()
    bench.xids.record(Xid(0, 31, 1), [GPU])
    assert bench.with_errors([]) == []
    (later,) = bench.with_errors([GPU])
    assert [event["ts_ms"] for event in later["events"]] == [1]
