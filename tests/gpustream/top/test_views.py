"""The moment as a line: what a run and ``gpustream top`` print where no screen is."""

import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpustream.alerts import row
from gpustream.fleet import Fleet
from gpustream.top import draw
from gpustream.top.moment import FiringAlert, Now
from gpustream.top.tables import TABLES, load, node_row
from gpustream.top.views import device_lines, fleet_lines
from tests.gpustream.test_fleet import device, fleet_of, gpu, tick
from tests.sinks.alerts import alert

FACTS = ["4 ticks/s, 890 values/s", "lag 0.3 s", "scrape 9,600 values (9 ticks behind)"]


def line(fleet: Fleet, facts: list[str], alerts: int, trouble: str) -> str:
    firing = [FiringAlert(None, None)] * alerts  # type: ignore[arg-type] # only counted
    return Now(fleet, firing, datetime.now(UTC), "", facts, trouble).line()


def lines(fleet: Fleet) -> str:
    """The view of the fleet."""
    return "\n".join(draw.text_of(part) for part in fleet_lines(Now(fleet, [], datetime.now(UTC), ""), 100, 30))


def test_a_line_says_how_many_gpus_are_held_what_flows_and_who_is_busiest() -> None:
    fleet = fleet_of(tick(gpu("a", 0.2, "ml/x"), gpu("b", 0.93, "ml/bert-0"), gpu("c", 0.0)))

    assert line(fleet, FACTS, 0, "") == (
        "1 nodes, 3 GPUs (2 held), 4 ticks/s, 890 values/s, lag 0.3 s, "
        "scrape 9,600 values (9 ticks behind), busiest ml/bert-0 at 93%"
    )
    assert ", 9 alerts, busiest" in line(fleet, FACTS, 9, "")
    assert line(fleet, FACTS, 0, "not ready: GPU 3 is lost").endswith("at 93%, not ready: GPU 3 is lost")


def test_old_values_of_silent_nodes_are_in_no_sum() -> None:
    fleet = fleet_of(tick(gpu("a", 0.9, "ml/gone"), node="m"), tick(gpu("b", 0.2, "ml/x")))
    fleet.nodes["c", "n"].at_s = 60.0
    fleet.age(61.0)

    assert "busiest ml/x at 20%" in line(fleet, FACTS, 0, "")
    assert re.search("used .* 20%  memory", lines(fleet))


def test_a_gpu_that_fails_or_whose_node_is_silent_is_held_only_if_somebody_holds_it() -> None:
    fleet = fleet_of(tick(gpu("a", 0.2, "ml/x"), gpu("b", None, state="lost"), gpu("c", None, "ml/x", state="lost")))
    (node,) = fleet.nodes.values()

    assert node_row(node).held == 2
    fleet.age(60.0)
    assert node_row(node).held == 2


def test_power_that_no_gpu_reports_is_not_known() -> None:
    limit, both = {"power_limit_watts": 700}, {"power_watts": 350, "power_limit_watts": 700}
    unknown, known = (
        fleet_of(tick(gpu("a") | {"metrics": limit})),
        fleet_of(
            tick(*(gpu(u) | {"metrics": m} for u, m in {"a": limit, "b": both, "c": {"power_watts": 100}}.items()))
        ),
    )

    assert node_row(*unknown.nodes.values()).load.power_watts is None
    assert node_row(*known.nodes.values()).load.power_watts == 450
    assert re.search(r"power +- -", lines(unknown))
    assert re.search(r"power .* 50% 450 W", lines(known))


def test_while_it_starts_it_says_what_it_waits_for() -> None:
    waiting = "starting: sink: no assignment yet"

    assert line(Fleet(), [], 0, waiting) == waiting


def test_a_node_whose_clock_is_past_the_year_9999_is_shown() -> None:
    fleet = fleet_of(tick(gpu("a", 0.5, "ml/bert")), tick(gpu("a", 0.5, "ml/bert"), seq=2, ts_ms=2**63 - 1))
    now = Now(fleet, [], datetime.now(UTC), "gpustream top")

    for table in TABLES:
        assert all(draw.row_line(table.columns, row, 200) for row in table.rows(now))


def mig(uuid: str, *holders: str, profile: str = "1g.10gb", **more: Any) -> dict[str, Any]:
    """A MIG device of GPU a."""
    return gpu(uuid, None, *holders, mig={"uuid": uuid, "parent_uuid": "a", "profile": profile}, **more)


def with_memory(device: dict[str, Any], used_gib: float, total_gib: float) -> dict[str, Any]:
    return device | {"metrics": {"memory_used_bytes": used_gib * 2**30, "memory_total_bytes": total_gib * 2**30}}


def test_memory_of_a_gpu_of_which_a_part_is_not_cut_is_all_of_it_if_the_gpu_reports_it() -> None:
    parts = with_memory(mig("m", "ml/x"), 9, 10), with_memory(gpu("b"), 11, 80)
    reported = fleet_of(tick(with_memory(gpu("a", None), 9, 80), *parts))
    refused = fleet_of(tick(gpu("a", None) | {"metrics": {}}, *parts))

    assert load(reported.devices()).memory_ratio == 20 / 160
    assert load(refused.devices()).memory_ratio == 20 / 90


def test_what_is_wrong_with_a_node_is_also_what_is_wrong_with_its_mig_devices_once_for_each_gpu() -> None:
    xid = {"events": [{"kind": "xid", "code": 31}]}
    cut = fleet_of(tick(gpu("a", None), mig("m", "ml/x") | xid, mig("o", "ml/y") | xid))
    lost = fleet_of(tick(gpu("a", None, state="lost"), mig("m", state="lost"), mig("o", state="lost")))

    assert [node_row(*fleet.nodes.values()).trouble for fleet in (cut, lost)] == ["GPU 0 XID 31", "GPU 0 lost"]


def test_who_held_a_gpu_that_is_cut_is_who_held_it_before_and_who_holds_its_mig_devices() -> None:
    fleet = fleet_of(
        tick(gpu("a", 0.9, "ml/whole"), ts_ms=600_000),
        tick(gpu("a", None), mig("m", "ml/x"), mig("o", profile="3g.40gb"), seq=2, ts_ms=660_000),
    )
    shown = [draw.text_of(line) for line in device_lines(moment(fleet), device(fleet, "a"), 100, 24)]
    held = [line.strip() for line in shown[shown.index("who held it") + 1 :]]

    assert held[3:] == ["", "held by", "1g.10gb ml/x"]
    assert [line.lstrip("━·").strip() for line in held[:3]] == ["1g.10gb ml/x", "3g.40gb free", "ml/whole"]


def test_a_pod_that_the_first_reading_names_has_had_its_gpu_for_longer_than_is_known() -> None:
    first = tick(gpu("a", 0.0, "ml/there"), gpu("b", None), ts_ms=600_000)
    fleet = fleet_of(first, *[
        tick(gpu("a", 0.0, "ml/there"), gpu("b", 0.0, "ml/came"), seq=n, ts_ms=600_000 + n * 60_000) for n in (2, 3)
    ])  # fmt: skip
    idle = lines(fleet)

    assert "ml/there 1 GPU for >3m" in idle
    assert "ml/came 1 GPU for 1m" in idle
    assert {name: cells(name, fleet) for name in ("GPUs", "Pods")} == {"GPUs": [">3m", "1m"], "Pods": [">3m", "1m"]}


def cells(name: str, fleet: Fleet) -> list[str]:
    """What a table says of how long each row has been held."""
    (table,) = (table for table in TABLES if table.name == name)
    (column,) = (column for column in table.columns if column.title in ("HELD", "FOR"))
    return [draw.text_of(column.draw(row, column.width)) for row in table.rows(moment(fleet))]


def test_an_alert_about_a_mig_device_is_shown_with_it_and_with_its_gpu() -> None:
    fleet = fleet_of(tick(gpu("a", None), mig("m", "ml/x"), mig("o", "ml/y")))
    labels = {"gpu_uuid": "a", "gpu_mig_uuid": "m"}
    about = msgspec.structs.replace(alert("x"), gpus=(), labels=labels, name="GPUXid")
    now = moment(fleet, FiringAlert(about, row(about, datetime.now(UTC))))
    shown = {d.uuid: [draw.text_of(line) for line in device_lines(now, d, 100, 24)] for d in fleet.devices()}

    assert [uuid for uuid, text in shown.items() if any("GPUXid" in line for line in text)] == ["a", "m"]


def moment(fleet: Fleet, *firing: FiringAlert) -> Now:
    return Now(fleet, list(firing), datetime.now(UTC), "")
