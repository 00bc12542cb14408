"""What the live view knows of the fleet, and how that looks."""

import dataclasses

import pytest
from rich.console import Console

from gpustream import alerts, live
from gpustream.live import Display, Fleet, Frame, Use, View
from gpustream.tally import Attributed, Summary
from tests.sinks.alerts import START_MS, alert
from topics.alerts import time
from topics.attributed import AttributedDevice, AttributedSample, Holder, Parts, Workload
from topics.samples import Mig, Process


def _device(uuid: str, used: float | None, *pods: str, mig_of: str | None = None) -> AttributedDevice:
    metrics: dict[str, int | float | None] = {"memory_used_bytes": 1024}
    if used is not None:
        metrics["gpu_utilization_ratio"] = used
    holders = tuple(Holder("team", pod, workload=Workload("Job", f"{pod}-job")) for pod in pods)
    mig = Mig(uuid, mig_of) if mig_of else None
    return AttributedDevice(uuid=uuid, metrics=metrics, holders=holders, mig=mig)


def _tick(*devices: AttributedDevice, node: str = "n-0", ts_ms: int = 0) -> AttributedSample:
    return AttributedSample(
        schema=1, cluster="c", node=node, run_id=1, seq=1, ts_ms=ts_ms, offset=0, attribution="exact", devices=devices
    )


def test_a_pod_is_as_busy_as_its_gpus_are_on_average() -> None:
    fleet = Fleet()
    fleet.observe(_tick(_device("a", 0.4, "bert"), _device("b", 0.0, "bert"), _device("c", 0.9, "llm")), 0.0, 0)

    view = fleet.view(0.0)
    assert (view.nodes, view.gpus, view.held) == (1, 3, 3)
    assert view.uses[0] == Use("team", "llm", "Job/llm-job", 1, 0.9, 1024)
    assert view.uses[1] == Use("team", "bert", "Job/bert-job", 2, 0.2, 2048)


def test_pods_that_share_a_gpu_have_their_own_workloads_and_parts() -> None:
    holders = (
        Holder("team", "one", workload=Workload("Job", "j"), parts=Parts(utilization_ratio=0.7, memory_used_bytes=700)),
        Holder("team", "two", workload=Workload("Pod", "two"), parts=Parts(utilization_ratio=0.2)),
    )
    metrics: dict[str, int | float | None] = {"gpu_utilization_ratio": 0.9, "memory_used_bytes": 1024}
    fleet = Fleet()
    fleet.observe(_tick(AttributedDevice(uuid="a", metrics=metrics, holders=holders)), 0.0, 0)

    assert fleet.view(0.0).uses == [
        Use("team", "one", "Job/j", 1, 0.7, 700),
        Use("team", "two", "Pod/two", 1, 0.2, 1024),
    ]


def test_of_a_pods_containers_the_one_that_has_its_parts_counts() -> None:
    parts = Parts(utilization_ratio=0.25, memory_used_bytes=10)
    holders = Holder("team", "one", container="b"), Holder("team", "one", container="a", parts=parts)
    metrics: dict[str, int | float | None] = {"gpu_utilization_ratio": 0.9, "memory_used_bytes": 1024}
    fleet = Fleet()
    fleet.observe(_tick(AttributedDevice(uuid="a", metrics=metrics, holders=holders)), 0.0, 0)

    assert fleet.view(0.0).uses == [Use("team", "one", "", 1, 0.25, 10)]


def test_zero_is_zero_and_missing_is_missing() -> None:
    fleet = Fleet()
    fleet.observe(_tick(_device("a", 0.0, "zero"), _device("b", None, "missing")), 0.0, 0)

    assert [use.name for use in fleet.view(0.0).idle] == ["zero"]
    assert [use.name for use in fleet.view(0.0).uses] == ["zero"]


def test_idle_pods_come_with_the_most_gpus_first_and_free_gpus_are_nobodys() -> None:
    fleet = Fleet()
    devices = [_device("a", 0.01, "one"), _device("b", 0.0, "two"), _device("c", 0.02, "two"), _device("d", 0.0)]
    fleet.observe(_tick(*devices), 0.0, 0)

    assert [use.name for use in fleet.view(0.0).idle] == ["two", "one"]
    assert fleet.view(0.0).held == 3


def test_slices_of_one_gpu_are_one_gpu() -> None:
    fleet = Fleet()
    fleet.observe(
        _tick(_device("a", None), _device("m1", 0.5, "x", mig_of="a"), _device("m2", 0.5, "x", mig_of="a")), 0.0, 0
    )

    assert (fleet.view(0.0).gpus, fleet.view(0.0).held) == (1, 1)
    assert fleet.view(0.0).uses[0].gpus == 1


def test_use_is_smoothed_while_the_pod_stays_and_starts_again_with_another() -> None:
    fleet = Fleet()
    fleet.observe(_tick(_device("a", 1.0, "old")), 0.0, 0)
    fleet.observe(_tick(_device("a", 0.0, "old")), 1.0, 0)
    assert fleet.view(1.0).uses[0].utilization_ratio == pytest.approx(0.9)

    fleet.observe(_tick(_device("a", 0.0, "new")), 2.0, 0)
    assert fleet.view(2.0).uses[0].utilization_ratio == 0.0


def test_rates_and_latency_are_of_the_last_seconds() -> None:
    fleet = Fleet()
    for second in range(10):
        fleet.observe(_tick(_device("a", 1.0), ts_ms=1000 * second), float(second), 1000 * second + 250)

    view = fleet.view(9.0)
    assert view.ticks == 10
    assert view.ticks_per_s == pytest.approx(6 / 5)
    assert view.values_per_s == pytest.approx(12 / 5)
    assert view.latency_s == pytest.approx(0.25)


def test_a_silent_node_is_left_out() -> None:
    fleet = Fleet()
    fleet.observe(_tick(_device("a", 1.0), node="n-0"), 0.0, 0)
    fleet.observe(_tick(_device("b", 1.0), node="n-1"), 50.0, 0)

    assert fleet.view(61.0).nodes == 1
    assert fleet.view(61.0).latency_s is None


def test_a_device_that_no_pod_holds_is_its_processes() -> None:
    processes = (Process(7, memory_used_bytes=512, sm_utilization_ratio=0.8), Process(8))
    metrics: dict[str, int | float | None] = {"gpu_utilization_ratio": 0.9, "memory_used_bytes": 1024}
    fleet = Fleet(lambda node, pid: f"{node}-python{pid}")
    fleet.observe(_tick(AttributedDevice(uuid="a", metrics=metrics, processes=processes)), 0.0, 0)

    view = fleet.view(0.0)
    assert view.held == 1
    assert view.uses == [Use("", "pid 8", "n-0-python8", 1, 0.9, 1024), Use("", "pid 7", "n-0-python7", 1, 0.8, 512)]


def test_a_process_on_several_gpus_is_one_that_has_them() -> None:
    processes = (Process(7, memory_used_bytes=512, sm_utilization_ratio=0.5),)
    devices = [AttributedDevice(uuid=uuid, processes=processes) for uuid in ("a", "b")]
    fleet = Fleet()
    fleet.observe(_tick(*devices), 0.0, 0)

    assert fleet.view(0.0).uses == [Use("", "pid 7", "", 2, 0.5, 1024)]


def test_the_processes_of_a_pod_are_the_pods() -> None:
    device = AttributedDevice(
        uuid="a",
        metrics={"gpu_utilization_ratio": 0.9},
        holders=(Holder("team", "bert"),),
        processes=(Process(7, sm_utilization_ratio=0.8),),
    )
    fleet = Fleet()
    fleet.observe(_tick(device), 0.0, 0)

    assert [use.who for use in fleet.view(0.0).uses] == ["team/bert"]


# -- how it is shown


BUSY = Use("ml-team", "bert-0", "Job/bert-finetune-v3", 2, 0.93, 64 * 1024**3)
IDLE = Use("nlp", "notebook-7f", "Deployment/notebook", 1, 0.0, 1024**3)
VIEW = View(4, 32, 30, 120, 4.0, 890.0, 0.3, [BUSY, IDLE])
FRAME = Frame(12.0, "4x8 simulated", VIEW, {"scrape": 9600}, {"scrape": 9})

ALERTS = [alerts.row(alert(f"pod-{n}"), time(START_MS + 61_000)) for n in range(9)]


def _drawn(frame: Frame, width: int = 160) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(live.screen(frame, 24))
    return capture.get()


@pytest.mark.parametrize(
    "part",
    [
        "4x8 simulated  12 s",
        "4 nodes, 32 GPUs (30 held)",
        "4 ticks/s, 890 values/s",
        "lag 0.3 s",
        "scrape 9,600 values (9 ticks behind)",
        "ml-team/bert-0",
        "Job/bert-finetune-v3",
        "93%",
        "64 GiB",
        "pods that idle: 1",
    ],
)
def test_the_screen_shows(part: str) -> None:
    assert part in _drawn(FRAME)


def test_the_first_of_the_alerts_that_fire_are_shown_and_all_are_counted() -> None:
    pods = [BUSY._replace(name=f"bert-{n}") for n in range(50)]
    frame = dataclasses.replace(FRAME, alerts=ALERTS, view=VIEW._replace(uses=pods))
    drawn = _drawn(frame)

    assert "alerts that fire: 9" in drawn
    assert "warning GPUHeldIdle, c1/n1, for 1m 1s: ml/pod-0 holds GPU 0 of n1 and has not used it for 15m" in drawn
    assert drawn.count("GPUHeldIdle") == 4
    assert len(drawn.splitlines()) <= 24
    assert ", 9 alerts, busiest" in live.line(frame)
    assert "alerts" not in live.line(FRAME)


def test_a_narrow_terminal_still_shows_both_tables() -> None:
    drawn = _drawn(FRAME, width=80)

    assert "ml-team/bert-0" in drawn
    assert "nlp/notebook-7f" in drawn


def test_a_tall_list_fits_a_short_screen() -> None:
    pods = [BUSY._replace(name=f"bert-{n}") for n in range(50)] + [IDLE._replace(name=f"idle-{n}") for n in range(50)]
    drawn = _drawn(dataclasses.replace(FRAME, view=VIEW._replace(uses=pods)))

    assert len(drawn.splitlines()) <= 24
    assert "bert-0" in drawn
    assert "idle-0" in drawn


def test_a_sink_that_is_just_a_moment_behind_is_not_said_to_be() -> None:
    assert "behind" not in live.line(dataclasses.replace(FRAME, behind={"scrape": 8}))


def test_while_it_starts_it_says_what_it_waits_for() -> None:
    starting = Frame(1.0, "x", View(0, 0, 0, 0, 0.0, 0.0, None, []), {}, {}, ["sink: no assignment yet"])

    assert "starting: sink: no assignment yet" in _drawn(starting)
    assert live.line(starting) == "    1 s  starting: sink: no assignment yet"


def test_what_goes_wrong_later_is_said_beside_the_facts() -> None:
    wrong = dataclasses.replace(FRAME, not_ready=["node: GPU 3 is lost"])

    assert "not ready: node: GPU 3 is lost" in _drawn(wrong)
    assert "ml-team/bert-0" in _drawn(wrong)
    assert live.line(wrong).endswith("busiest ml-team/bert-0 at 93%, not ready: node: GPU 3 is lost")


def test_on_a_machine_without_pods_processes_are_shown() -> None:
    process = Use("", "pid 4242", "python3", 1, 0.9, 1024**3)
    drawn = _drawn(dataclasses.replace(FRAME, view=VIEW._replace(uses=[process])))

    assert "busiest processes" in drawn
    assert "pid 4242" in drawn
    assert "python3" in drawn


def test_a_line_says_the_same_in_one_line() -> None:
    assert live.line(FRAME) == (
        "   12 s  4 nodes, 32 GPUs (30 held), 4 ticks/s, 890 values/s, lag 0.3 s, "
        "scrape 9,600 values (9 ticks behind), busiest ml-team/bert-0 at 93%"
    )


def test_the_summary_says_where_everything_went() -> None:
    summary = Summary(60, 13200, Attributed(58, 1, 1), {"scrape": 13200}, 0, 0, 2)

    assert live.summary_text(summary).splitlines() == [
        "         sampled  60 ticks, 13,200 values",
        "      attributed  58 exact, 1 late, 1 without a snapshot",
        "       to scrape  13,200 values",
        "   dead-lettered  0",
        "         dropped  0",
        "            lost  2",
    ]


def test_a_frame_is_drawn_when_it_is_due_and_what_was_missed_is_not_made_up_for() -> None:
    drawn: list[float] = []
    display = Display(lambda frame: drawn.append(frame.elapsed_s), every_s=5.0, first_s=5.0)
    for elapsed_s in (0.0, 4.9, 5.1, 5.2, 10.0, 31.0, 31.1, 36.0):
        if display.is_due(elapsed_s):
            display.show(dataclasses.replace(FRAME, elapsed_s=elapsed_s))

    assert drawn == [5.1, 10.0, 31.0, 36.0]
