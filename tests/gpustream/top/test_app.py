"""The terminal application, by its keys and its mouse, on small and large screens."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gpustream.alerts import LatestAlerts
from gpustream.fleet import Fleet
from gpustream.ticks import Tick, decode_tick
from gpustream.top import draw, tables, views
from gpustream.top.app import TopApp
from gpustream.top.draw import text_of
from gpustream.top.moment import Now, firing
from gpustream.top.widgets import HELP, Pane
from producers.simulated.fleet import Fleet as SimulatedFleet
from tests.eventually import eventually
from tests.gpustream.test_fleet import fleet_of, gpu, record, tick
from tests.sinks.alerts import START_MS, alert, alert_record
from topics.times import time_of
from topics.topic import EXAMPLES

SIZES = [(80, 24), (200, 60)]


def simulated(nodes: int = 4, seconds: int = 30) -> Fleet:
    """A fleet that was simulated for some seconds."""
    fleet = Fleet()
    for second, node_tick in _simulated_ticks(nodes, seconds):
        fleet.observe(node_tick, float(second), second * 1000)
    return fleet


@functools.cache
def _simulated_ticks(nodes: int, seconds: int) -> list[tuple[int, Tick]]:
    truth = [SimulatedFleet(nodes, 8).node(index) for index in range(nodes)]
    return [
        (second, decode_tick(record(node.read(second * 1000, 1), node.name, second, second * 1000)))
        for node in truth
        for second in range(1, seconds + 1)
    ]


def now_of(fleet: Fleet, alerts: LatestAlerts | None = None, trouble: str = "") -> Callable[[], Now]:
    at_time = time_of(START_MS + 61_000)
    return lambda: Now(
        fleet, firing(alerts or LatestAlerts(), at_time), at_time, "gpustream top", ["4 ticks/s"], trouble
    )


class Screen:
    """What is on the screen of an application that runs."""

    def __init__(self, app: TopApp, pilot: Any) -> None:
        self.app, self.pilot = app, pilot

    async def after(self, *keys: str) -> str:
        """What is shown after these keys."""
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.text()

    def lines(self) -> list[str]:
        """The lines of the view, without colour."""
        pane = self.app.screen_stack[0].query_one(Pane)
        return [text_of(pane._line(y)).rstrip() for y in range(pane.size.height)]

    def text(self) -> str:
        """What the lines, the bars and a box over them say."""
        texts = self.lines()
        for screen in self.app.screen_stack:
            texts += [str(static.render()) for static in screen.query("Static") if static.display]
        return "\n".join(texts)


async def with_screen(now: Callable[[], Now], size: tuple[int, int], test: Any, **options: Any) -> None:
    app = TopApp(now, **options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await test(Screen(app, pilot))


@pytest.mark.parametrize("size", SIZES)
async def test_every_view_shows_what_there_is_and_no_line_is_too_wide(size: tuple[int, int]) -> None:
    async def test(screen: Screen) -> None:
        titles = {"1": "GPUs by node", "2": "sim-0003", "3": "STATUS", "4": "POD", "5": "PODS", "6": "no alert fires"}
        for key, part in titles.items():
            text = await screen.after(key)
            assert part in text
            assert max(map(len, screen.lines())) <= size[0]

    await with_screen(now_of(simulated()), size, test)


async def test_the_tasks_of_the_pipeline_beside_it_are_not_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager_task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(coroutine, loop=loop, **how)

    monkeypatch.setattr(asyncio, "eager_task_factory", eager_task_factory, raising=False)  # since 3.12

    app = TopApp(now_of(simulated()))
    showing = asyncio.create_task(app.run_async(headless=True, size=SIZES[0]))
    await eventually(lambda: app.screen_stack and app.screen.query(Pane), unless=showing)
    assert asyncio.get_running_loop().get_task_factory() is None
    app.exit()
    await showing


async def test_the_fleet_is_counted_as_the_simulation_has_it() -> None:
    fleet = simulated()
    busy = sum(device.status == "busy" for device in fleet.gpus())
    free = sum(device.status == "free" for device in fleet.gpus())
    lines = [draw.text_of(line) for line in views.fleet_lines(now_of(fleet)(), 80, 24)]

    assert f"4 nodes, 32 GPUs: ▁▅█ busy {busy} " in lines[0]
    assert f"· free {free}" in lines[0]
    assert sum(line.count("·") for line in lines[1:2]) >= free
    assert next(line for line in lines if line.startswith("sim-0000")).split()[1].count("·") == sum(
        device.status == "free" for device in fleet.nodes["prod-us-east-1", "sim-0000"].gpus
    )


@pytest.mark.parametrize("size", SIZES)
async def test_enter_leads_from_a_node_to_its_gpus_to_one_gpus_last_minutes_and_escape_back(
    size: tuple[int, int],
) -> None:
    async def test(screen: Screen) -> None:
        await screen.after("2", "down")
        gpus = await screen.after("enter")
        assert "of sim-0001" in gpus
        assert "sim-0000" not in gpus
        detail = await screen.after("enter")
        assert "sim-0001 GPU 0" in detail
        assert "who held it" in detail
        assert "Tesla T4" in detail
        assert "of sim-0001" in await screen.after("escape")
        assert "TROUBLE" in await screen.after("escape") or size[0] < 90
        assert screen.app.state.view == "Nodes"

    await with_screen(now_of(simulated()), size, test)


async def test_from_a_workload_to_its_pods_to_their_gpus() -> None:
    def held_gpu(uuid: str, pod: str) -> dict[str, Any]:
        holder = {"namespace": "ml", "pod": pod, "workload": {"kind": "Job", "name": "train"}}
        return gpu(uuid) | {"holders": [holder]}

    async def test(screen: Screen) -> None:
        assert "ml/Job/train" in await screen.after("5")
        pods = await screen.after("enter")
        assert "ml/t-0" in pods
        assert "ml/other" not in pods
        gpus = await screen.after("enter")
        assert "t-0" in gpus
        assert "t-1" not in gpus

    fleet = fleet_of(tick(held_gpu("a", "t-0"), held_gpu("b", "t-1"), gpu("c", 0.1, "ml/other")))
    await with_screen(now_of(fleet), (100, 24), test)


async def test_the_pods_of_a_workload_are_not_those_of_others_on_the_gpus_that_it_shares() -> None:
    serve = {"kind": "Deployment", "name": "serve"}
    names = [("ml", "x-0", serve), ("web", "x-1", serve), ("ml", "x-2", None), ("ml", "x-3", None)]
    holders = [{"namespace": namespace, "pod": pod, "workload": top} for namespace, pod, top in names]
    shared = fleet_of(tick(gpu("a", 0.5) | {"holders": holders}))

    async def test(screen: Screen) -> None:
        opened = []
        await screen.after("5")
        for _ in names:
            text = await screen.after("enter")
            opened.append([pod for _, pod, _ in names if f"/{pod}" in text.partition("POD")[2]])
            await screen.after("escape", "down")
        assert sorted(opened) == [["x-0"], ["x-1"], ["x-2"], ["x-3"]]

    await with_screen(now_of(shared), (120, 24), test)


async def test_a_filter_takes_words_and_their_absence_and_escape_ends_it() -> None:
    fleet = fleet_of(tick(gpu("a", 0.5, "ml/bert"), gpu("b", 0.0, "ml/idler"), gpu("c", 0.0)))

    async def test(screen: Screen) -> None:
        await screen.after("3", "slash")
        text = await screen.after(*"idle", "enter")
        assert "idler" in text
        assert "bert" not in text
        assert "filter: idle" in text
        assert "bert" in await screen.after("escape")
        await screen.after("slash")
        assert "bert" in await screen.after("exclamation_mark"), "its word is still to come"
        text = await screen.after(*"free", "space", *"q1")
        assert "nothing has '!free q1'" in text
        assert screen.app.state.view == "GPUs"

    await with_screen(now_of(fleet), (100, 24), test)


async def test_it_sorts_by_the_next_column_and_the_other_way_round_with_what_is_not_known_last() -> None:
    fleet = fleet_of(tick(gpu("a", None, "ml/none"), gpu("b", 0.2, "ml/low"), gpu("c", 0.9, "ml/high")))

    def order(text: str) -> list[str]:
        return sorted(("none", "low", "high"), key=lambda name: text.index(f"ml/{name}"))

    async def test(screen: Screen) -> None:
        assert order(await screen.after("4")) == ["high", "low", "none"]
        assert order(await screen.after("r")) == ["low", "high", "none"]
        assert "MEMORY▼" in await screen.after("greater_than_sign")
        assert "USED▼" in await screen.after("less_than_sign")

    await with_screen(now_of(fleet), (100, 24), test)


async def test_a_click_on_a_title_sorts_and_on_a_row_marks_and_opens_it() -> None:
    async def test(screen: Screen) -> None:
        await screen.after("3")
        used = screen.text().splitlines()[0].index("USED")
        await screen.pilot.click(Pane, offset=(used, 0))
        assert "USED▼" in screen.text()
        await screen.pilot.click(Pane, offset=(used, 3))
        marked = screen.app.state.marked
        await screen.pilot.click(Pane, offset=(used, 3))
        assert tables.GPUS.key(screen.app.state.detail) == marked
        await screen.pilot.click("#tabs", offset=(14, 0))
        assert screen.app.state.view == "Nodes"

    await with_screen(now_of(simulated()), (100, 24), test)


@pytest.mark.slow
async def test_two_thousand_gpus_are_walked_through_to_the_last() -> None:
    async def test(screen: Screen) -> None:
        last = await screen.after("3", "end")
        assert "sim-0249" in last
        assert "sim-0000" in await screen.after("home")
        assert "sim-0002" in await screen.after("pagedown")

    await with_screen(now_of(simulated(250, 1)), (80, 24), test)


async def test_a_gpu_that_moved_is_walked_past_and_opened_on_both_nodes() -> None:
    fleet = fleet_of(tick(gpu("a"), gpu("b"), node="old"), tick(gpu("a"), node="new"))

    async def test(screen: Screen) -> None:
        for keys, opened in (
            (("3", "enter"), ["new GPU 0", "a"]),
            (("escape", "down", "enter"), ["old GPU 0", "a"]),
            (("escape", "down", "enter"), ["old GPU 0", "b"]),
        ):
            where, facts, *_ = (await screen.after(*keys)).splitlines()
            assert [where.split("  ")[0], facts.split(" · ")[0]] == opened

    await with_screen(now_of(fleet), SIZES[0], test)


async def test_another_size_is_laid_out_again() -> None:
    async def test(screen: Screen) -> None:
        narrow = await screen.after("3")
        assert "MODEL" not in narrow
        await screen.pilot.resize_terminal(200, 60)
        await screen.pilot.pause()
        await eventually(lambda: "MODEL" in screen.text() and "sim-0003" in screen.text())

    await with_screen(now_of(simulated()), (80, 24), test)


async def test_only_lines_that_changed_are_drawn_again() -> None:
    drawn: list[int] = []

    async def test(screen: Screen) -> None:
        await screen.after("3")
        pane = screen.app.pane
        whole = pane.refresh
        pane.refresh = lambda *regions, **_: drawn.extend(region.y for region in regions) or whole(*regions)  # type: ignore[method-assign,func-returns-value]
        screen.app.draw()
        assert drawn == []
        await screen.after("down")
        assert sorted(drawn) == [1, 2]

    await with_screen(now_of(simulated()), (80, 24), test)


async def test_alerts_are_listed_the_worst_first_and_opened_with_all_that_they_say() -> None:
    alerts = LatestAlerts()
    for number, severity in enumerate(["warning", "critical"]):
        alerts.update(alert_record(alert(f"pod-{number}", severity=severity)))

    async def test(screen: Screen) -> None:
        text = await screen.after("6")
        assert text.index("critical") < text.index("warning")
        assert "Alerts(2)" in text
        opened = await screen.after("enter")
        assert "k8s_pod_name=pod-1" in opened
        assert "alerts that fire: 2" in await screen.after("1")

    await with_screen(now_of(simulated(), alerts), (160, 40), test)


async def test_a_run_is_stopped_only_after_a_question() -> None:
    stopped: list[bool] = []

    async def test(screen: Screen) -> None:
        assert "Stop the pipeline?" in await screen.after("q")
        for no in ("n", "escape"):
            await screen.after(no)
            assert not stopped
            assert len(screen.app.screen_stack) == 1
            await screen.after("q")
        await screen.after("q")
        assert not stopped
        await screen.after("q", "y")
        assert stopped == [True]
        await screen.after("ctrl+c")
        assert stopped == [True, True]

    await with_screen(
        now_of(simulated()), (80, 24), test, quit_now=lambda: stopped.append(True), question="Stop the pipeline?"
    )


async def test_without_a_pipeline_q_ends_it_at_once() -> None:
    async def test(screen: Screen) -> None:
        await screen.after("q")
        await eventually(lambda: not screen.app.is_running)

    await with_screen(now_of(simulated()), (80, 24), test)


async def test_the_picture_can_be_held() -> None:
    fleet = fleet_of(tick(gpu("a", 0.5, "ml/before")))

    async def test(screen: Screen) -> None:
        assert "HELD" in await screen.after("4", "space")
        await screen.after("space")
        fleet.observe(tick(gpu("a", 0.5, "ml/after"), seq=2), 1.0, 0)
        screen.app.draw()
        assert "ml/after" in screen.text()

    await with_screen(now_of(fleet), (80, 24), test)


@pytest.mark.parametrize("size", SIZES)
async def test_the_help_fits_the_screen_and_any_key_closes_it(size: tuple[int, int]) -> None:
    assert max(map(len, HELP.splitlines())) <= 70
    assert len(HELP.splitlines()) <= 20

    async def test(screen: Screen) -> None:
        for key in ("x", "escape", "tab"):
            assert "must not" in await screen.after("question_mark")
            await screen.after(key)
            assert len(screen.app.screen_stack) == 1
            assert screen.app.state.view == "Fleet"

    await with_screen(now_of(simulated()), size, test)


async def test_the_timer_draws_nothing_when_the_screens_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(screen: Screen) -> None:
        with monkeypatch.context() as ending:
            ending.setattr(screen.app, "_screen_stacks", {"_default": []})
            screen.app._draw_again()

    await with_screen(now_of(simulated()), (80, 24), test)


async def test_what_is_logged_is_kept_from_the_screen_and_what_is_wrong_is_said() -> None:
    async def test(screen: Screen) -> None:
        screen.app._print("a warning\n", stderr=True)
        await screen.pilot.pause()
        assert "a warning" in await screen.after("7")
        assert "starting: no partitions yet" in screen.text()
        assert list(screen.app.logged) == ["a warning"]

    await with_screen(now_of(Fleet(), trouble="starting: no partitions yet"), (80, 24), test)


async def test_every_status_is_said_without_colour_too() -> None:
    fleet = fleet_of(tick(gpu("a", 0.5, "ml/x"), gpu("b", 0.0, "ml/y", index=1), gpu("c", 0.1, state="lost", index=2)))

    async def test(screen: Screen) -> None:
        text = await screen.after("3")
        assert [word in text for word in ("busy", "idle", "failing")] == [True] * 3
        assert "n ▅iX" in await screen.after("1")

    await with_screen(now_of(fleet), (80, 24), test)


@pytest.mark.parametrize("width", [1, 2, 10, 40, 79, 80, 120, 300])
def test_a_line_fits_any_width(width: int) -> None:
    fleet = simulated(1)
    for table in tables.TABLES[:4]:
        rows = table.rows(now_of(fleet)())
        for line in (
            draw.header_line(table.columns, width, table.sorted_by, descending=True),
            draw.row_line(table.columns, rows[0], width),
        ):
            assert len(draw.text_of(draw.fit(line, width))) == width


def test_bars_and_sparklines_say_what_they_are_given() -> None:
    assert draw.text_of(draw.bar(0.5, 13, "")) == "████      50%"
    assert draw.text_of(draw.bar(None, 6, "")) == "     -"
    assert draw.spark([0.0, 0.5, 1.0, None], 1.0, 1) == ["▁▅█ "]
    assert draw.spark([0.0, 0.5, 1.0], 1.0, 2) == ["  █", "▁██"]
    assert draw.text_of(draw.stacked({"busy": 98, "idle": 1, "free": 0, "failing": 1}, 10)) == "████████iX"
    assert draw.watts(12_300) == "12.3 kW"


async def test_it_ends_with_its_loop_and_nothing_is_left_running() -> None:
    app = TopApp(now_of(Fleet()))
    async with app.run_test():
        pass
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_no_text_of_a_record_acts_on_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x9b2J\n\r"
    sample: dict[str, Any] = msgspec.json.decode((EXAMPLES / "gpu.attributed.json").read_bytes())
    for device in sample["devices"]:
        device["uuid"] += evil
        device["model"] = f"H100{evil}"
        device["holders"] = [{**holder, "namespace": evil, "pod": evil} for holder in device["holders"]]
    fleet, latest_alerts = Fleet(), LatestAlerts()
    fleet.observe(decode_tick(msgspec.json.encode(sample)), 1.0, 1000)
    labels = {"k8s_namespace_name": evil, "k8s_pod_name": evil, "gpu_uuid": evil}
    latest_alerts.update(alert_record(alert("a", labels=labels, annotations={"summary": evil}), 0))
    now = now_of(fleet, latest_alerts)

    async def test(screen: Screen) -> None:
        for key in ("1", "enter", "enter", "2", "enter", "3", "enter", "4", "enter", "5", "enter", "6", "enter"):
            lines = (await screen.after(key)).split("\n")
            assert [line for line in lines if not line.isprintable()] == []

    await with_screen(now, SIZES[1], test)
    assert now().line().isprintable()


def test_a_reading_that_can_not_be_true_is_shown_as_the_highest() -> None:
    fleet = fleet_of(tick(gpu("a", 1e308, "ml/a")))

    assert [draw.sign(device)[0] for device in fleet.devices()] == ["█"]
