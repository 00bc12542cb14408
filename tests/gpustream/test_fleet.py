"""The fleet now, and its last minutes, compared with a simulated fleet."""

from typing import Any

import msgspec
import pytest

from gpustream import fleet as fleet_module
from gpustream.fleet import Device, Fleet, Flow, pods, workloads
from gpustream.ticks import Tick, decode_tick
from producers.simulated.fleet import Fleet as SimulatedFleet
from producers.simulated.fleet import NodeReading
from sinks.metrics_api.holdings import Holdings, HoldingsTick, pod_value
from topics.attributed import TOPIC


def record(reading: NodeReading, node: str, seq: int, ts_ms: int) -> bytes:
    """What gpu.attributed would have of a simulated reading."""
    devices = [{**d, "holders": holders} for d, holders in zip(reading.devices, reading.reported, strict=True)]
    return msgspec.json.encode(
        TOPIC.example | {"node": node, "seq": seq, "offset": seq, "ts_ms": ts_ms, "devices": devices}
    )


def tick(*devices: dict[str, Any], node: str = "n", seq: int = 1, ts_ms: int | None = None, **more: Any) -> Tick:
    """A tick; by default one a second."""
    head = {
        "schema": 1,
        "cluster": "c",
        "node": node,
        "run_id": 1,
        "seq": seq,
        "attribution": "exact",
        "offset": seq,
        **more,
    }
    return msgspec.convert(head | {"ts_ms": 1000 * seq if ts_ms is None else ts_ms, "devices": devices}, Tick)


def gpu(uuid: str, used: float | None = 0.5, *holders: str, memory: float = 1024, **more: Any) -> dict[str, Any]:
    """A device that pods ``NAMESPACE/POD`` hold."""
    metrics = {"memory_used_bytes": memory} | ({} if used is None else {"gpu_utilization_ratio": used})
    rows = [dict(zip(("namespace", "pod"), holder.split("/"), strict=True)) for holder in holders]
    return {"uuid": uuid, "index": 0, "metrics": metrics, "holders": rows, **more}


def fleet_of(*ticks: Tick, **options: Any) -> Fleet:
    """A fleet that has observed these ticks, one each second."""
    fleet = Fleet(**options)
    for second, observed in enumerate(ticks):
        fleet.observe(observed, float(second), observed.ts_ms + 250)
    return fleet


def device(fleet: Fleet, uuid: str = "a") -> Device:
    return next(device for device in fleet.devices() if device.uuid == uuid)


@pytest.mark.slow
def test_what_is_shown_of_a_simulated_fleet_is_true() -> None:
    simulated, fleet = SimulatedFleet(4, 8, pod_life_s=20.0), Fleet()
    nodes = [simulated.node(index) for index in range(4)]
    truth: dict[str, tuple[Any, list[str], int]] = {}
    for second in range(1, 61):
        for node in nodes:
            reading = node.read(second * 1000, 1)
            fleet.observe(decode_tick(record(reading, node.name, second, second * 1000)), float(second), second * 1000)
            for read_device, holders in zip(reading.devices, reading.reported, strict=True):
                names = sorted({f"{row['namespace']}/{row['pod']}" for row in holders})
                before = truth.get(read_device["uuid"], (read_device, [""], 0))
                truth[read_device["uuid"]] = read_device, names, before[2] if before[1] == names else second * 1000

    assert {view.uuid for view in fleet.devices()} == set(truth)
    for view in fleet.devices():
        expected, names, began_ms = truth[view.uuid]
        assert sorted(holder.name for holder in view.holders) == names
        assert view.metrics.temperature_celsius == expected["metrics"].get("temperature_celsius")
        assert view.metrics.memory_used_bytes == expected["metrics"].get("memory_used_bytes")
        assert view.tenures[-1].from_ms == began_ms
        if "gpu_utilization_ratio" in expected["metrics"]:
            assert view.metrics.used_ratio == expected["metrics"]["gpu_utilization_ratio"]
        parts = [names_of for uuid, (_, names_of, _) in truth.items() if device(fleet, uuid).gpu == view.uuid]
        assert view.mig or (view.status == "free") == (not any(parts))
    holding = {name for _, names, _ in truth.values() for name in names}
    assert {use.who for use in pods(fleet.devices())} == holding
    assert sum(use.pods for use in workloads(fleet.devices())) == len(holding)
    assert len(list(fleet.gpus())) == 32


@pytest.mark.parametrize(
    ("reported", "status"),
    [
        (gpu("a", 0.5, "ml/bert"), "busy"),
        (gpu("a", 0.0, "ml/bert"), "idle"),
        (gpu("a", None, "ml/bert"), "held"),
        (gpu("a", 0.9), "free"),
        (gpu("a", 0.9, "ml/bert", state="lost"), "failing"),
        (gpu("a", 0.9, state="timeout"), "failing"),
        (gpu("a", None, processes=[{"pid": 7}]), "held"),
    ],
)
def test_a_device_has_a_status(reported: dict[str, Any], status: str) -> None:
    assert device(fleet_of(tick(reported))).status == status


@pytest.mark.parametrize(("works", "status"), [(["u", "u"], "busy"), (["u", "v"], "idle"), ([None, None], "idle")])
def test_a_device_is_busy_if_the_processes_of_a_pod_are_together(works: list[str | None], status: str) -> None:
    processes = [{"pid": 7, "pod_uid": uid, "sm_utilization_ratio": 0.006} for uid in works]
    holder = {"namespace": "ml", "pod": "bert", "pod_uid": "u"}
    held = device(fleet_of(tick(gpu("a", 0.0, processes=processes) | {"holders": [holder]})))

    assert held.status == status
    assert held.holders[0].idle == (status == "idle")


def test_a_device_that_the_api_server_calls_unwell_fails() -> None:
    failing = device(fleet_of(tick(gpu("a", 0.9, "ml/bert"), unwell=[{"device_id": "a", "health": "Unhealthy"}])))

    assert (failing.status, failing.trouble) == ("failing", "unwell")


@pytest.mark.parametrize("in_order", [True, False])
def test_a_gpu_that_is_cut_does_what_its_busiest_part_does_and_counts_once(in_order: bool) -> None:
    mig = {"uuid": "m", "parent_uuid": "a", "profile": "1g.10gb"}
    devices = [gpu("a", None), gpu("m", None, "ml/bert", mig=mig)]
    fleet = fleet_of(tick(*(devices if in_order else reversed(devices))))

    assert [view.status for view in fleet.devices()] == ["held", "held"]
    assert [gpu_device.uuid for gpu_device in fleet.gpus()] == ["a"]
    assert device(fleet, "m").where == "n GPU 0 1g.10gb"
    assert [(use.who, use.gpus) for use in pods(fleet.devices())] == [("ml/bert", 1)]


def test_a_mig_device_that_is_said_to_be_cut_from_a_mig_device_is_a_part_of_none() -> None:
    said = {"m": "m", "n": "o", "o": "n", "p": "a"}
    devices = [gpu(uuid, 0.5, "ml/bert", mig={"uuid": uuid, "parent_uuid": parent}) for uuid, parent in said.items()]
    fleet = fleet_of(tick(gpu("a"), *devices))
    assert {view.uuid: [part.uuid for part in view.parts] for view in fleet.devices() if view.parts} == {"a": ["p"]}
    assert {view.status for view in fleet.devices()} == {"busy"}


def test_a_mig_device_is_used_for_as_long_as_its_engines_are_active() -> None:
    """As usage, the dashboards and the metrics API have it. How many of its SMs are busy is something else."""
    mig = {"uuid": "m", "parent_uuid": "a", "profile": "1g.10gb"}
    active = {"graphics_engine_active_ratio": 0.9, "sm_active_ratio": 0.3}

    assert device(fleet_of(tick(gpu("m", mig=mig) | {"metrics": active})), "m").metrics.used_ratio == 0.9


def test_a_gpu_is_idle_for_a_pod_that_uses_none_of_its_parts() -> None:
    def parts(*used: float) -> list[dict[str, Any]]:
        migs = [{"uuid": f"m{n}", "parent_uuid": "a", "profile": "1g.10gb"} for n in range(len(used))]
        return [gpu(mig["uuid"], ratio, "ml/x", mig=mig) for mig, ratio in zip(migs, used, strict=True)]

    uses = [pods(fleet_of(tick(gpu("a", None), *parts(*used))).devices())[0] for used in ((0.0, 0.9), (0.0, 0.0))]
    assert [(use.gpus, use.idle) for use in uses] == [(1, 0), (1, 1)]


def test_of_a_shared_device_each_pod_has_its_part() -> None:
    parts = [{"utilization_ratio": 0.1, "memory_used_bytes": 256}, {"utilization_ratio": 0.4, "memory_used_bytes": 768}]
    holders = [{"namespace": "ml", "pod": f"p{n}", "parts": part} for n, part in enumerate(parts)]
    uses = pods(fleet_of(tick(gpu("a", 0.5) | {"holders": holders})).devices())

    assert [(use.who, use.used_ratio, use.memory_used_bytes) for use in uses] == [
        ("ml/p0", 0.1, 256),
        ("ml/p1", 0.4, 768),
    ]


def test_a_pod_that_holds_a_device_alone_has_all_that_the_device_does() -> None:
    by_mps = {"utilization_ratio": 0.0, "memory_used_bytes": 256, "power_watts": 0.0}
    sole = gpu("a", 0.9) | {"holders": [{"namespace": "ml", "pod": "by-mps", "parts": by_mps}]}
    sole["metrics"] |= {"power_watts": 400}
    (use,) = pods(fleet_of(tick(sole)).devices())

    assert (use.used_ratio, use.memory_used_bytes, use.power_watts) == (0.9, 1024, 400)


def test_of_a_shared_device_a_pod_whose_part_is_not_known_has_no_numbers() -> None:
    known = {"namespace": "ml", "pod": "known", "parts": {"memory_used_bytes": 256, "power_watts": 9}}
    shared = gpu("a", 0.9) | {"holders": [known, {"namespace": "ml", "pod": "unknown"}]}
    shared["metrics"] |= {"power_watts": 400}
    uses = {
        use.name: (use.used_ratio, use.memory_used_bytes, use.power_watts)
        for use in pods(fleet_of(tick(shared)).devices())
    }

    assert uses == {"known": (None, 256, 9), "unknown": (None, None, None)}


def test_a_pod_has_the_numbers_that_the_metrics_api_has() -> None:
    part = {"utilization_ratio": 0.1, "memory_used_bytes": 256, "power_watts": 30.0}
    mig = {"uuid": "m", "parent_uuid": "d", "profile": "1g.10gb"}
    engines = {"graphics_engine_active_ratio": 0.9, "sm_active_ratio": 0.3, "memory_used_bytes": 64}
    devices = [
        gpu("a", 0.9, "ml/sole") | {"holders": [{"namespace": "ml", "pod": "sole", "parts": part}]},
        gpu("b", 0.5)
        | {"holders": [{"namespace": "ml", "pod": "sole", "parts": part}, {"namespace": "ml", "pod": "x"}]},
        gpu("m", mig=mig) | {"metrics": engines, "holders": [{"namespace": "ml", "pod": "cut"}]},
    ]
    devices[0]["metrics"] |= {"power_watts": 400.0}
    api = Holdings()
    api.add_tick(msgspec.convert({"schema": 1, **msgspec.to_builtins(tick(*devices))}, HoldingsTick), 0.0, 0.0)
    answers = {
        name: tuple(pod_value(holdings, key) for key in ("gpu_utilization_ratio", "memory_used_bytes", "power_watts"))
        for name, holdings in api.pods("ml", 0.0).items()
    }

    shown = {
        use.name: (use.used_ratio, use.memory_used_bytes, use.power_watts)
        for use in pods(fleet_of(tick(*devices)).devices())
    }
    assert shown == answers == {"sole": (0.5, 1280, 430.0), "x": (None, None, None), "cut": (0.9, 64, None)}


def test_a_pod_may_have_done_what_is_no_pods_part_and_is_not_called_idle() -> None:
    """Of a device that it holds alone it has done all; of a shared one perhaps what an MPS server did, or video."""
    nothing = {"utilization_ratio": 0.0}

    def idle(*pod_names: str, rest: float = 0.0, **metrics: float) -> list[int]:
        holders = [{"namespace": "ml", "pod": name, "pod_uid": name, "parts": nothing} for name in pod_names]
        work = gpu("a", None) | {"holders": holders, "unattributed": {"utilization_ratio": rest}, "metrics": metrics}
        return [use.idle for use in pods(fleet_of(tick(work)).devices())]

    assert idle("encodes", gpu_utilization_ratio=0.0, encoder_utilization_ratio=0.6) == [0]
    assert idle("by-mps", rest=0.9, gpu_utilization_ratio=0.9) == [0]
    assert idle("by-mps", "too", rest=0.9, gpu_utilization_ratio=0.9) == [0, 0]
    assert idle("idles", gpu_utilization_ratio=0.0) == [1]
    assert idle("idles", "too", gpu_utilization_ratio=0.005) == [1, 1]


def test_an_idle_pod_is_found_beside_one_that_works() -> None:
    holders = [
        {"namespace": "ml", "pod": name, "pod_uid": name, "parts": {"utilization_ratio": part}}
        for name, part in {"works": 0.8, "idles": 0.0}.items()
    ]
    shared = gpu("a", 0.9) | {"holders": holders, "unattributed": {"utilization_ratio": 0.1}}

    assert {use.name: use.idle for use in pods(fleet_of(tick(shared)).devices())} == {"works": 0, "idles": 1}


def test_an_idle_pod_is_found_beside_one_of_its_name_that_was_not_given_the_device() -> None:
    named = {"namespace": "ml", "pod": "web-0"}
    rows = [{**named, "pod_uid": "old"}, {**named, "pod_uid": "new", "observed": True}]
    shared = device(fleet_of(tick(gpu("a", 0.0) | {"holders": rows})))

    assert [holder.idle for holder in shared.holders] == [True, False]


def test_an_idle_batch_job_is_found_beside_one_that_works() -> None:
    used = {"41": 0.0, "42": 0.8}
    holders = [
        {"namespace": "gpu", "pod": job, "pod_uid": job, "parts": {"utilization_ratio": part}}
        for job, part in used.items()
    ]
    processes = [{"pid": int(job), "job_id": job, "sm_utilization_ratio": part} for job, part in used.items()]
    shared = gpu("a", 0.9, processes=processes) | {"holders": holders, "unattributed": {"utilization_ratio": 0.1}}

    assert {use.name: use.idle for use in pods(fleet_of(tick(shared)).devices())} == {"41": 1, "42": 0}


def test_the_pods_of_a_workload_are_one_row_and_a_pod_without_one_is_its_own() -> None:
    def holder(pod: str, workload: dict[str, str] | None) -> dict[str, Any]:
        return {"namespace": "ml", "pod": pod, "workload": workload, "labels": {"team": "nlp"}}

    job = {"kind": "Job", "name": "train"}
    devices = [gpu("a") | {"holders": [holder("t-0", job)]}, gpu("b") | {"holders": [holder("t-1", job)]}]
    devices.append(gpu("c", 0.0) | {"holders": [holder("alone", None)]})
    uses_by_name = {use.who: use for use in workloads(fleet_of(tick(*devices)).devices())}

    job_use = uses_by_name["ml/Job/train"]
    assert (job_use.pods, job_use.gpus, job_use.idle) == (2, 2, 0)
    assert (uses_by_name["ml/alone"].idle, uses_by_name["ml/alone"].team) == (1, "nlp")


def test_the_team_of_a_pod_is_by_the_label_that_is_given() -> None:
    holder = {"namespace": "ml", "pod": "p", "labels": {"team": "nlp"}, "namespace_labels": {"cost-center": "42"}}
    fleet = fleet_of(tick(gpu("a") | {"holders": [holder]}), team_label="cost-center")

    assert [use.team for use in workloads(fleet.devices())] == ["42"]


def test_a_workload_uses_of_a_gpu_that_its_pods_share_what_they_use_together() -> None:
    replicas = [
        {"namespace": "ml", "pod": f"r-{n}", "workload": {"kind": "Deployment", "name": "serve"}, "parts": part}
        for n, part in enumerate([{"utilization_ratio": 0.2}] * 4)
    ]
    shared, alone = gpu("a", 0.8) | {"holders": replicas}, gpu("b", 0.4) | {"holders": replicas[:1]}
    (use,) = workloads(fleet_of(tick(shared, alone)).devices())

    assert (use.pods, use.gpus) == (4, 2)
    assert use.used_ratio == pytest.approx(0.6)
    assert [held.uuid for held in use.devices] == ["a", "b"]


def test_pods_of_one_name_in_two_clusters_are_two() -> None:
    uses = pods(fleet_of(tick(gpu("a", 0.1, "ml/x")), tick(gpu("b", 0.9, "ml/x"), cluster="other")).devices())

    assert [(use.who, use.gpus, use.used_ratio) for use in uses] == [("ml/x", 1, 0.1), ("ml/x", 1, 0.9)]


def test_a_device_that_no_pod_holds_is_its_processes() -> None:
    unheld = gpu("a", 0.9) | {"processes": [{"pid": 7, "memory_used_bytes": 512, "sm_utilization_ratio": 0.8}]}
    (use,) = pods(fleet_of(tick(unheld), command_of=lambda node, pid: f"{node}-python{pid}").devices())

    assert (use.who, use.workload, use.used_ratio, use.memory_used_bytes) == ("pid 7", "n-python7", 0.8, 512)


def test_zero_is_zero_and_missing_is_missing() -> None:
    uses = pods(fleet_of(tick(gpu("a", 0.0, "ml/zero"), gpu("b", None, "ml/missing"))).devices())

    assert {use.name: use.used_ratio for use in uses} == {"zero": 0.0, "missing": None}


def test_who_held_a_device_is_kept_with_times_for_as_long_as_is_shown() -> None:
    pods_of = ["ml/x", "ml/x", "", "ml/y"]
    fleet = fleet_of(*[tick(gpu("a", 0.5, *filter(None, [pod])), seq=n) for n, pod in enumerate(pods_of, 1)])
    tenures = [tenure[:3] for tenure in device(fleet).tenures]
    assert tenures == [(1000, 3000, ("ml/x",)), (3000, 4000, ()), (4000, None, ("ml/y",))]

    late = [tick(gpu("a", 0.5, "ml/y"), seq=5, ts_ms=20_000)]
    fleet = fleet_of(*[tick(gpu("a", 0.5, pod), seq=n) for n, pod in enumerate(["ml/x", "ml/y"], 1)], *late, slots=3)
    assert [tenure.pods for tenure in device(fleet).tenures] == [("ml/y",)]


def test_a_device_that_changes_hands_each_second_stays_small() -> None:
    fleet = fleet_of(*[tick(gpu("a", 0.5, f"ml/p{n}"), seq=n) for n in range(1, 200)])

    assert len(device(fleet).tenures) == fleet_module.MAX_TENURES


def test_the_last_minutes_are_means_with_gaps_where_nothing_was_measured() -> None:
    values = {1: 0.2, 2: None, 3: 0.4, 4: None, 11: 1.0}
    fleet = fleet_of(*[tick(gpu("a", used, "ml/x"), seq=n) for n, used in values.items()], slot_ms=5_000, slots=4)

    assert device(fleet).history.of("used_ratio", 11_000) == [None, pytest.approx(0.3), None, 1.0]
    assert device(fleet).history.of("used_ratio", 16_000) == [pytest.approx(0.3), None, 1.0, None]
    assert device(fleet).history.of("used_ratio", 60_000) == [None] * 4


def test_the_last_minutes_begin_again_after_a_clock_was_set_back() -> None:
    ahead = tick(gpu("a", 0.2, "ml/x"), ts_ms=9_000_000)
    set_back = tick(gpu("a", 0.4, "ml/x"), ts_ms=20_000, run_id=2, offset=2)
    fleet = fleet_of(ahead, set_back, slot_ms=5_000, slots=4)

    assert device(fleet).history.of("used_ratio", 20_000) == [None, None, None, pytest.approx(0.4)]
    assert [tenure[:3] for tenure in device(fleet).tenures] == [(20_000, None, ("ml/x",))]


def test_a_node_whose_clock_is_ahead_does_not_set_the_time_of_the_others() -> None:
    fleet = Fleet()
    fleet.observe(tick(gpu("a")), 1.0, 1_100)
    fleet.observe(tick(gpu("b"), node="m", ts_ms=9_000_000), 1.0, 1_200)

    assert fleet.now_ms == 1_200


def test_an_xid_marks_its_gpu_for_some_minutes() -> None:
    failed = gpu("a") | {"events": [{"kind": "xid", "code": 31, "ts_ms": 900}]}
    fleet = fleet_of(tick(failed), tick(gpu("a"), seq=2))
    assert device(fleet).trouble == "XID 31"

    fleet.observe(tick(gpu("a"), seq=3, ts_ms=302_000), 301.0, 0)
    assert device(fleet).trouble == ""


def test_a_silent_node_is_marked_and_forgotten_in_the_end() -> None:
    fleet = fleet_of(tick(gpu("a", 0.5, "ml/x")))
    fleet.age(fleet_module.SILENT_S + 1)
    assert device(fleet).status == "silent"

    fleet.observe(tick(gpu("a", 0.5, "ml/x"), seq=2), 20.0, 0)
    assert device(fleet).status == "busy"
    fleet.age(20.0 + fleet_module.FORGOTTEN_S + 1)
    assert fleet.nodes == {}


def test_a_node_that_is_seldom_read_is_silent_after_three_of_its_intervals() -> None:
    fleet = fleet_of(tick(gpu("a", 0.5, "ml/x"), interval_ms=60_000))
    fleet.age(180.0)
    assert device(fleet).status == "busy"
    fleet.age(181.0)
    assert device(fleet).status == "silent"


def test_a_reading_of_a_node_that_is_seldom_read_stands_for_the_time_since_the_last_one() -> None:
    moments = [(1, 0.2), (31, 0.4), (151, 0.6), (181, 0.8)]
    ticks = [tick(gpu("a", used), seq=second, interval_ms=30_000) for second, used in moments]
    fleet = fleet_of(*ticks, slot_ms=15_000, slots=13)
    used = device(fleet).history.of("used_ratio", 181_000)
    assert used == pytest.approx([0.2, 0.4, 0.4, *[None] * 7, 0.6, 0.8, 0.8])


def test_a_replay_is_left_out() -> None:
    fleet = fleet_of(tick(gpu("a"), seq=2))

    fleet.observe(tick(gpu("a"), seq=2), 1.0, 0)
    fleet.observe(tick(gpu("a"), seq=1, ts_ms=1000, run_id=0), 1.0, 0)
    assert fleet.flow().ticks == 1
    fleet.observe(tick(gpu("a"), seq=1, ts_ms=3000, run_id=3, offset=3), 1.0, 0)
    assert fleet.flow().ticks == 2


def test_a_device_that_a_tick_lacks_is_forgotten() -> None:
    fleet = fleet_of(tick(gpu("a"), gpu("b")), tick(gpu("b"), seq=2))

    assert [view.uuid for view in fleet.devices()] == ["b"]


def test_rates_and_latency_are_of_the_last_seconds() -> None:
    fleet = fleet_of(*[tick(gpu("a"), seq=n) for n in range(1, 11)])
    fleet.age(9.0)

    assert fleet.flow() == Flow(10, 6 / 5, 0.25)
    fleet.age(100.0)
    assert fleet.flow() == Flow(10, 0.0, None)


def test_a_partition_whose_past_is_read_after_anothers_does_not_count_as_ticks_of_now() -> None:
    fleet = fleet_of(*[tick(gpu("a"), seq=n) for n in range(1, 101)])
    for n in range(1, 101):
        fleet.observe(tick(gpu("b"), node="n2", seq=n), float(n), n * 1000)
    fleet.age(100.0)

    assert fleet.flow().ticks == 200
    assert fleet.flow().ticks_per_s <= 2 * 6 / 5


def test_old_ticks_may_come_when_nothing_has_come_for_some_seconds() -> None:
    fleet = fleet_of(*[tick(gpu("a"), seq=n) for n in range(1, 101)])
    fleet.age(120.0)
    fleet.observe(tick(gpu("b"), node="n2"), 1.0, 1000)

    assert fleet.flow() == Flow(101, 0.0, None)


def test_the_time_since_a_pod_has_a_gpu_goes_over_changes_of_others() -> None:
    fleet = fleet_of(
        *[tick(gpu("a", 0.5, *pod_names), seq=n) for n, pod_names in enumerate([["ml/x"], ["ml/x", "ml/y"]], 1)]
    )
    since: dict[str, int] = {use.who: use.since.from_ms for use in pods(fleet.devices())}

    assert since == {"ml/x": 1000, "ml/y": 2000}
