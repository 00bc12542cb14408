"""The fleet that the page shows."""

from typing import Any

import pytest

from sinks.page import frames
from sinks.page.fleet import FORGET_S, HISTORY_METRICS, MAX_MISSING, MAX_SPANS, SILENT_S, STEP_MS, STEPS, Fleet
from tests.sinks.page.ticks import START_MS, alert, device, holder, hour, tick
from topics.usage import HOUR_MS


def fleet_of(*ticks: Any) -> Fleet:
    """A fleet with these ticks, each read in the second of its number."""
    fleet = Fleet(START_MS)
    for added in ticks:
        fleet.add_tick(added, float(added.seq))
    return fleet


def signs(fleet: Fleet) -> str:
    """The signs of all devices."""
    return "".join(node.signs for node in fleet.nodes.values())


@pytest.mark.parametrize(
    ("device_fields", "sign"),
    [
        (device("GPU-a", holder("p-0"), used=0.5), "b"),
        (device("GPU-a", holder("p-0"), used=0.0), "i"),
        (device("GPU-a", holder("p-0")), "h"),
        (device("GPU-a", used=0.5), "f"),
        (device("GPU-a", holder("p-0"), used=0.5, state="lost"), "x"),
    ],
)
def test_each_activity_of_a_device_has_a_sign(device_fields: dict[str, Any], sign: str) -> None:
    assert signs(fleet_of(tick(1, device_fields))) == sign


def test_a_pod_is_idle_when_it_has_done_nothing_for_ten_seconds() -> None:
    works, rests = device("GPU-a", holder("p-0"), used=0.5), device("GPU-a", holder("p-0"), used=0.0)

    assert signs(fleet_of(tick(1, works), tick(10, rests))) == "b"
    assert signs(fleet_of(tick(1, works), tick(11, rests))) == "i"


def test_a_pod_is_not_busy_with_what_the_pod_before_it_did() -> None:
    before, after = device("GPU-a", holder("p-0"), used=0.5), device("GPU-a", holder("q-0"), used=0.0)

    assert signs(fleet_of(tick(1, before), tick(2, after))) == "i"


def test_a_node_falls_silent_is_back_with_its_next_tick_and_is_forgotten_after_an_hour() -> None:
    fleet = fleet_of(tick(1, device("GPU-a", holder("p-0"), used=0.5)))

    fleet.expire(1 + SILENT_S + 1)
    assert signs(fleet) == "s"
    fleet.add_tick(tick(60, device("GPU-a", holder("p-0"), used=0.5)), 60.0)
    assert signs(fleet) == "b"
    fleet.expire(60 + FORGET_S + 1)
    assert fleet.nodes == {}


def test_a_node_that_is_seldom_read_is_silent_after_three_of_its_intervals() -> None:
    fleet = fleet_of(tick(1, device("GPU-a", holder("p-0"), used=0.5), interval_ms=3_600_000))

    fleet.expire(1 + 3 * FORGET_S)
    assert signs(fleet) == "b"
    fleet.expire(1 + 3 * FORGET_S + 1)
    assert fleet.nodes == {}


def test_a_device_by_itself_is_what_its_tile_is_also_between_two_readings() -> None:
    works, lost = device("GPU-a", holder("p-0"), used=0.5), device("GPU-a", holder("p-0"), state="lost")
    fleet = fleet_of(tick(1, works), tick(2, lost))

    assert signs(fleet) == "x"
    assert (frames.device(fleet, "GPU-a") or {})["word"] == "x"
    fleet.expire(2 + SILENT_S + 1)
    assert (frames.device(fleet, "GPU-a") or {})["word"] == "s"


def test_a_replay_changes_nothing() -> None:
    fleet = fleet_of(tick(2, device("GPU-a", holder("p-0"), used=0.5)))
    version = fleet.version

    assert fleet.add_tick(tick(1, device("GPU-a")), 3.0) == "replay"
    assert (signs(fleet), fleet.version) == ("b", version)


def test_who_held_a_device_is_known_from_the_first_tick_to_the_last() -> None:
    p, q, nobody = device("GPU-a", holder("p-0")), device("GPU-a", holder("q-0", team="x")), device("GPU-a")
    fleet = fleet_of(tick(1, p), tick(2, p), tick(5, nobody), tick(7, q))
    content = frames.device(fleet, "GPU-a")

    assert content is not None
    assert [
        ([holder.pod for holder in holders], begin - START_MS, end and end - START_MS)
        for holders, begin, end in content["holders"]
    ] == [
        (["p-0"], 1000, 5000),
        ([], 5000, 7000),
        (["q-0"], 7000, None),
    ]


def mig(uuid: str, *holders: dict[str, Any], used: float | None = None) -> dict[str, Any]:
    """A MIG device of GPU-a."""
    engines = {} if used is None else {"metrics": {"graphics_engine_active_ratio": used}}
    return device(uuid, *holders, mig={"uuid": uuid, "parent_uuid": "GPU-a", "profile": "1g.10gb"}) | engines


def test_a_gpu_that_is_cut_has_the_holders_and_the_activity_of_its_mig_devices() -> None:
    whole = tick(1, device("GPU-a", holder("w-0"), used=0.5))
    held = tick(2, device("GPU-a"), mig("MIG-1", holder("p-0"), used=0.0), mig("MIG-2", holder("q-0"), used=0.9))
    idle = tick(20, device("GPU-a"), mig("MIG-1", holder("p-0"), used=0.0), mig("MIG-2", used=0.0))
    lost = tick(30, device("GPU-a", state="lost"), mig("MIG-1", holder("p-0"), used=0.0))
    fleet, words = fleet_of(whole), []
    for following in (held, idle, lost):
        fleet.add_tick(following, float(following.seq))
        words.append((frames.device(fleet, "GPU-a") or {})["word"])
    of_gpu, of_part = frames.device(fleet, "GPU-a") or {}, frames.device(fleet, "MIG-1") or {}

    assert words == ["b", "i", "x"]
    assert [[holder.pod for holder in holders] for holders, _, _ in of_gpu["holders"]] == [
        ["w-0"],
        ["p-0", "q-0"],
        ["p-0"],
    ]
    assert (of_gpu["profile"], of_part["profile"]) == (None, "1g.10gb")


def test_a_device_has_a_reading_in_15_s_for_an_hour_and_none_where_there_was_no_tick() -> None:
    seconds = [0, 1, 15, 45, 3599 + 45]
    fleet = fleet_of(
        *(tick(second, device("GPU-a", holder("p-0"), used=0.1 + n / 10)) for n, second in enumerate(seconds))
    )
    content = frames.device(fleet, "GPU-a")

    assert content is not None
    values = content["readings"]["gpu_utilization_ratio"]
    times = [content["first_ms"] + n * STEP_MS - START_MS for n, value in enumerate(values) if value is not None]
    assert len(values) == STEPS
    assert times == [45_000, 3_630_000]
    assert [round(value, 3) for value in values if value is not None] == [0.4, 0.5]
    assert content["words"].count("b") == 2


def test_a_reading_of_a_node_that_is_seldom_read_stands_for_the_time_since_the_last_one() -> None:
    moments = [(0, 0.2), (30, 0.4), (150, 0.6), (180, 0.0)]
    of_seconds = [
        tick(second, device("GPU-a", holder("p-0"), used=used), interval_ms=30_000) for second, used in moments
    ]
    (shown,) = fleet_of(*of_seconds).nodes["c1", "n1"].devices.values()

    utilization, *_ = shown.metric_history()
    assert utilization[-13:] == pytest.approx([0.2, 0.4, 0.4, *[None] * 7, 0.6, 0.0, 0.0])
    assert shown.sign_history()[-13:] == "bbb       bii"


def test_a_device_that_ticks_lack_for_less_than_an_hour_goes_on_with_its_history() -> None:
    """As all do if the producer starts before the driver. Meanwhile it is not there."""

    def history(away_until_s: int) -> tuple[int, int]:
        """Since when it is held, in seconds, and how many readings it has."""
        held, other = device("GPU-a", holder("p-0"), used=0.5), device("GPU-b")
        fleet = fleet_of(tick(0, held), tick(600, held), tick(615), tick(630, other))
        assert (signs(fleet), frames.device(fleet, "GPU-a")) == ("f", None)
        fleet.add_tick(tick(away_until_s, other), float(away_until_s))
        fleet.add_tick(tick(away_until_s + 15, other, held), float(away_until_s))
        content = frames.device(fleet, "GPU-a")
        assert content is not None
        ((_, since_ms, _),) = content["holders"]
        return (since_ms - START_MS) // 1000, content["words"].count("b")

    assert history(645) == (0, 3)
    assert history(4300) == (4315, 1)


def test_after_a_clock_was_set_back_by_far_the_history_begins_again() -> None:
    def history(*seconds: int) -> tuple[list[int], list[int]]:
        """When the device was read, and since when it was held."""
        fleet = Fleet(START_MS)
        for offset, second in enumerate(seconds):
            fleet.add_tick(tick(second, device("GPU-a", holder("p-0")), run_id=offset, offset=offset), 0.0)
        content = frames.device(fleet, "GPU-a")
        assert content is not None
        signs_and_times = enumerate(content["words"])
        read = [(content["first_ms"] - START_MS) // 1000 + n * 15 for n, sign in signs_and_times if sign != " "]
        return read, [(since_ms - START_MS) // 1000 for _, since_ms, _ in content["holders"]]

    assert history(600, 660, 645, 675) == ([600, 660, 675], [600])
    assert history(7200, 7260, 600, 615) == ([600, 615], [600])


def test_what_is_kept_of_a_device_is_bounded() -> None:
    fleet = Fleet(START_MS)
    for seq in range(3 * MAX_SPANS):
        fleet.add_tick(tick(seq, device("GPU-a", holder(f"p-{seq}"), used=0.5), device(f"GPU-{seq}")), float(seq))
    history, _ = fleet.nodes["c1", "n1"].devices.values()

    assert list(fleet.nodes["c1", "n1"].missing) == [f"GPU-{seq}" for seq in range(seq - MAX_MISSING, seq)]
    assert len(history.spans) == MAX_SPANS
    assert len(history.readings) * history.readings.itemsize + len(history.signs) == STEPS * (
        4 * len(HISTORY_METRICS) + 1
    )


def test_alerts_are_there_while_they_are_open() -> None:
    fleet = fleet_of()
    firing, older = alert(), alert(fingerprint="0" * 16, starts_at="2026-11-21T00:00:00Z")
    fleet.set_alert(b"1", firing)
    fleet.set_alert(b"2", older)
    assert fleet.alerts() == [older, firing]
    fleet.set_alert(b"1", alert(state="resolved", ends_at="2026-11-21T01:00:00Z"))
    fleet.set_alert(b"2", None)
    assert fleet.alerts() == []


def test_hours_are_those_of_the_last_revision_of_each_key_by_team() -> None:
    fleet = fleet_of()
    first = hour(device_ms=60_000, slice_ms=420_000, idle_ms=0, revision=1)
    assert fleet.add_usage(b"a", first)
    assert fleet.add_usage(b"a", hour(device_ms=3_600_000, slice_ms=25_200_000, idle_ms=1_800_000, revision=60))
    assert not fleet.add_usage(b"a", first)
    fleet.add_usage(b"b", hour(slice_ms=25_200_000 // 7, device_ms=3_600_000, idle_ms=3_600_000, team=None))
    fleet.add_usage(b"c", hour(category="free"))

    assert fleet.usage() == [
        ("ml", 1.0, 0.5),
        ("(no team)", pytest.approx(1 / 7, abs=1e-5), pytest.approx(1 / 7, abs=1e-5)),
    ]
    fleet.expire_usage(first.start_ms + 23 * HOUR_MS)
    assert len(fleet.usage()) == 2
    fleet.expire_usage(first.start_ms + 24 * HOUR_MS)
    assert fleet.usage() == []
    assert not fleet.add_usage(b"d", first)
    assert fleet.usage() == []


def test_a_frame_has_what_changed_since_the_one_before() -> None:
    a, b = device("GPU-a", holder("p-0"), used=0.5), device("GPU-b", used=0.0)
    fleet = fleet_of(tick(1, a), tick(1, b, node="n2"))
    whole, versions = frames.frame(fleet, "gpu_utilization_ratio", 1), frames.versions(fleet)
    fleet.add_tick(tick(2, a), 2.0)
    values, later_versions = frames.frame(fleet, "gpu_utilization_ratio", 2, versions), frames.versions(fleet)
    fleet.add_tick(tick(3, device("GPU-a", holder("q-0"), used=0.5)), 3.0)
    holders = frames.frame(fleet, "", 3, later_versions)

    assert whole["kind"] == "all"
    assert [node[2] for node in whole["nodes"]] == ["n1", "n2"]
    assert [node[2:] for node in whole["now"]] == [["b", [0.5]], ["f", [0.0]]]
    assert {key: values[key] for key in ("kind", "nodes", "now")} == {
        "kind": "more",
        "nodes": [],
        "now": [[0, START_MS + 2000, "b", [0.5]]],
    }
    assert "alerts" not in values
    assert [node[4][0][-1][0].pod for node in holders["nodes"]] == ["q-0"]
    assert holders["now"] == [[0, START_MS + 3000, "b", []]]


def test_a_frame_has_the_devices_again_whose_order_or_index_has_changed() -> None:
    first, second = device("GPU-a", index=0), device("GPU-b", index=1)
    fleet = fleet_of(tick(1, first, second))
    for number, devices in enumerate([(second, first), (second, device("GPU-a", index=7))], 2):
        versions = frames.versions(fleet)
        fleet.add_tick(tick(number, *devices), float(number))
        (node,) = frames.frame(fleet, "", number, versions)["nodes"]
        assert [(uuid, index) for uuid, index, *_ in node[4]] == [(one["uuid"], one["index"]) for one in devices]


def test_a_frame_after_a_node_is_gone_is_the_whole_fleet() -> None:
    fleet = fleet_of(tick(1, device("GPU-a")), tick(1, device("GPU-b"), node="n2"))
    versions = frames.versions(fleet)
    fleet.add_tick(tick(5000, device("GPU-b"), node="n2"), 5000.0)
    fleet.expire(5000.0)
    content = frames.frame(fleet, "", 1, versions)

    assert content["kind"] == "all"
    assert [node[2] for node in content["nodes"]] == ["n2"]


def test_a_pod_of_which_more_is_known_later_held_the_device_all_the_time() -> None:
    unknown = device("GPU-a", {"namespace": "ml", "pod": "p-0"}, used=0.5)
    fleet = fleet_of(tick(1, unknown), tick(3, device("GPU-a", holder("p-0"), used=0.0)))
    (history,) = fleet.nodes["c1", "n1"].devices.values()

    assert (history.since_ms, len(history.spans), history.sign) == (START_MS + 1000, 0, b"b")
    assert [holder.workload for holder in history.holders] == ["Job/p"]
    assert frames.frame(fleet, "", 1, frames.versions(fleet)._replace(version=1))["nodes"] != []


def test_critical_alerts_are_the_first() -> None:
    fleet = fleet_of()
    fleet.set_alert(b"1", alert(severity="critical"))
    fleet.set_alert(b"2", alert(fingerprint="0" * 16, starts_at="2026-11-21T00:00:00Z"))
    assert [alert.severity for alert in fleet.alerts()] == ["critical", "warning"]
