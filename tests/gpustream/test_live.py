"""What a run looks like."""

import dataclasses

import pytest
from rich.console import Console

from gpustream import alerts_command, live
from gpustream.fleet import Use, View
from gpustream.live import Frame
from gpustream.tally import Attributed, Summary
from tests.sinks.alerts import START_MS, alert
from topics.alerts import time

BUSY = Use("ml-team", "bert-0", "Job/bert-finetune-v3", 2, 0.93, 64 * 1024**3)
IDLE = Use("nlp", "notebook-7f", "Deployment/notebook", 1, 0.0, 1024**3)
VIEW = View(4, 32, 30, 120, 4.0, 890.0, 0.3, [BUSY, IDLE])
FRAME = Frame(12.0, "4x8 simulated", VIEW, {"scrape": 9600}, {"scrape": 9})

ALERTS = [alerts_command.row(alert(f"pod-{n}"), time(START_MS + 61_000)) for n in range(9)]


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
