"""The exposition has the latest tick of every node, and nothing that has ended."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from delivery.dead_letters import Abandoned, Record
from sinks.scrape.sink import VALUES
from sinks.series.windows import Resolution
from tests.growth import kept
from tests.sinks.records import ConsumedRecord
from tests.sinks.scrape.fleet import parsed, samples
from tests.sinks.scrape.handler import Bench, FakeLetters
from topics.attributed import AttributedDevice, AttributedSample, Holder, Parts


def _device(uuid: str, used: float, *pods: str, **metrics: float) -> AttributedDevice:
    holders = tuple(Holder("ml-team", pod) for pod in pods)
    return AttributedDevice(uuid=uuid, metrics={"gpu_utilization_ratio": used, **metrics}, holders=holders)


def _tick(
    number: int,
    *devices: AttributedDevice,
    node: str = "n-0",
    offset: int | None = None,
    interval_ms: int | None = None,
) -> ConsumedRecord:
    offset = number if offset is None else offset
    sample = AttributedSample(
        schema=1,
        cluster="c",
        node=node,
        run_id=1,
        seq=number + 1,
        ts_ms=1000 * number,
        interval_ms=interval_ms,
        offset=offset,
        attribution="exact",
        devices=devices,
    )
    return ConsumedRecord(offset, msgspec.json.encode(sample))


async def test_the_last_tick_of_every_node_is_shown() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1, "bert-0")), _tick(1, _device("z", 0.3), node="n-1"))
    await bench.deliver(_tick(2, _device("a", 0.2, "bert-0")))

    assert 'gpu_uuid="a"' in bench.exposition()
    assert 'k8s_pod_name="bert-0",service_name="gpustream"} 0.2\n' in bench.exposition()
    assert 'k8s_node_name="n-1"' in bench.exposition()
    assert " 0.1\n" not in bench.exposition()
    assert bench.counted("gpustream_scrape_delay_seconds_count") == 3


async def test_with_a_resolution_the_last_window_that_is_over_is_shown() -> None:
    bench = Bench(resolution=Resolution(10_000, ("max",)))
    used = {2: 0.9, 9: 0.2, 10: 0.3, 11: 0.4, 20: 0.5}
    for number, part in used.items():
        assert await bench.deliver(_tick(number, _device("a", part))) == [number + 1]
        if number == 9:
            assert bench.exposition() == ""

    values = {sample.name: sample.value for sample in samples(bench.exposition()) if "gpu_task_type" in sample.labels}
    assert values == {"gpu_utilization": 0.4, "gpu_utilization_max": 0.4}
    assert bench.counted("gpustream_scrape_delay_seconds_count") == 2
    assert [outcome for _, _, outcome in bench.outcomes] == ["delivered"] * 5


async def test_what_is_read_back_shows_the_window_that_was_shown_and_goes_on_in_the_one_that_is_not_over() -> None:
    ticks = [_tick(number, _device("a", number / 100)) for number in range(40)]
    uninterrupted = Bench(resolution=Resolution(10_000, ("min", "max")))
    await uninterrupted.deliver(*ticks)
    for start in range(20, 39):
        bench = Bench(resolution=uninterrupted.resolution)
        for record in ticks[:start]:
            bench.handler.recall(record)
        await bench.deliver(*ticks[start:])
        assert bench.exposition() == uninterrupted.exposition()


async def test_the_ticks_of_a_new_log_are_shown_and_counted_once() -> None:
    bench = Bench()
    await bench.deliver(_tick(1000, _device("a", 0.1)))
    new_ticks = _tick(1001, _device("a", 0.2), offset=0), _tick(1002, _device("a", 0.3), offset=1)
    await bench.deliver(*new_ticks)
    await bench.deliver(*new_ticks)

    value = bench.instruments.registry.get_sample_value
    assert " 0.3\n" in bench.exposition()
    assert value("gpustream_scrape_new_logs_total") == 1
    assert value("gpustream_scrape_records_duplicate_total") == 2


async def test_a_series_of_a_pod_that_ended_is_gone() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.5, "old"), _device("b", 0.5)))
    await bench.deliver(_tick(1, _device("a", 0.5, "new")))

    assert 'pod_name="old"' not in bench.exposition()
    assert 'pod_name="new"' in bench.exposition()
    assert 'gpu_uuid="b"' not in bench.exposition()


async def test_a_device_that_several_pods_hold_is_shown_once_without_holder() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.5, "one", "other")))

    (used,) = (sample for sample in samples(bench.exposition()) if sample.name == "gpu_utilization")
    assert "k8s_pod_name" not in used.labels


async def test_every_pod_that_holds_a_device_has_an_info_series_until_it_ends() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.5, "one", "other"), _device("b", 0.5, "one")))
    assert _pods(bench) == ["one", "other"]
    assert {(family.name, family.type) for family in parsed(bench.exposition())} == {
        ("gpu_holders", "gauge"),
        ("gpu_pod_info", "gauge"),
        ("gpu_utilization", "gauge"),
    }
    assert [sample.value for sample in samples(bench.exposition()) if sample.name == "gpu_holders"] == [2.0, 1.0]

    await bench.deliver(_tick(1, _device("a", 0.5, "other")))
    assert _pods(bench) == ["other"]


def _pods(bench: Bench) -> list[str]:
    return [sample.labels["k8s_pod_name"] for sample in samples(bench.exposition()) if sample.name == "gpu_pod_info"]


async def test_other_label_sets_have_no_info_series() -> None:
    bench = Bench(label_set="dcgm")
    await bench.deliver(_tick(0, _device("a", 0.5, "one")))

    assert "gpu_pod_info" not in bench.exposition()


def _parts(memory: float) -> Parts:
    return Parts(memory_used_bytes=memory)


def _shared(used: float, *pods: str, **fields: Any) -> AttributedDevice:
    """A device that these pods share, by parts of 1, 2, ... bytes."""
    holders = tuple(Holder("ml-team", pod, parts=_parts(n)) for n, pod in enumerate(pods, 1))
    return AttributedDevice(
        uuid="a", metrics={"gpu_utilization_ratio": used}, holders=holders, unattributed=_parts(9), **fields
    )


async def test_parts_of_a_shared_device_are_shown_while_it_is_shared() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _shared(0.5, "one", "other")))
    assert _memory(bench) == {"one": 1.0, "other": 2.0, None: 9.0}

    await bench.deliver(_tick(1, _shared(0.5, "other", "next")))
    assert _memory(bench) == {"other": 1.0, "next": 2.0, None: 9.0}

    await bench.deliver(_tick(2, _device("a", 0.5, "next")))
    assert _memory(bench) == {}
    names = {sample.name for sample in samples(bench.exposition())}
    assert names == {"gpu_holders", "gpu_pod_info", "gpu_utilization"}


def _memory(bench: Bench) -> dict[str | None, float]:
    """Parts and the rest, by pod."""
    memory_samples = [sample for sample in samples(bench.exposition()) if sample.name.endswith("_memory_used_bytes")]
    return {memory_sample.labels.get("k8s_pod_name"): memory_sample.value for memory_sample in memory_samples}


async def test_a_part_of_a_pod_without_containers_is_shown_beside_the_devices_own_series_of_it() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _shared(0.5, "one")))
    labels = {sample.name: sample.labels for sample in samples(bench.exposition())}

    assert labels["gpu_pod_memory_used_bytes"].items() == labels["gpu_holders"].items()


async def test_what_a_device_is_and_its_errors_are_shown_as_the_last_tick_has_them() -> None:
    bench = Bench(names=("dcgm-legacy",), label_set="pod-devices")
    for offset, errors in enumerate((1, 2)):
        shared_device = _shared(
            0.5, info={"serial": "7"}, xids={"79": errors}, conflict="no_pod" if offset == 0 else None
        )
        await bench.deliver(_tick(offset, shared_device))
    by_name = {sample.name: (sample.labels, sample.value) for sample in samples(bench.exposition())}

    assert by_name["gpu_info"] == ({"uuid": "a", "serial": "7"}, 1.0)
    assert by_name["gpu_xid_errors_total"] == ({"uuid": "a", "xid": "79"}, 2.0)
    assert "gpu_attribution_conflict" not in by_name


async def test_a_replay_is_a_duplicate_and_changes_nothing() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1)), _tick(1, _device("a", 0.2)))
    await bench.deliver(_tick(0, _device("a", 0.1)))

    assert [outcome for _, _, outcome in bench.outcomes] == ["delivered", "delivered", "duplicate"]
    assert " 0.2\n" in bench.exposition()


async def test_values_are_counted_without_derived_series() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1, memory_used_bytes=1.0, memory_total_bytes=2.0)))

    assert "gpu_memory_used_percent{" in bench.exposition()
    assert bench.counted(VALUES) == 3.0

    await bench.deliver(_tick(1, _shared(0.1, "one", "other", info={"serial": "7"}, xids={"79": 1})))
    assert bench.counted(VALUES) == 4.0


async def test_a_silent_node_is_not_shown() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1)))
    bench.now_s = 59.0
    assert "n-0" in bench.exposition()

    bench.now_s = 60.0
    assert bench.exposition() == ""


async def test_a_node_that_is_seldom_read_is_shown_for_three_of_its_intervals() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1), interval_ms=60_000))
    bench.now_s = 179.0
    assert "n-0" in bench.exposition()
    bench.now_s = 180.0
    assert bench.exposition() == ""


async def test_a_tick_that_is_read_late_is_shown_for_what_is_left_of_its_time() -> None:
    bench = Bench(wall_s=61.0)
    await bench.deliver(_tick(1, _device("a", 0.1)))
    assert bench.exposition() == ""
    assert bench.outcomes == [("n-0", 2, "delivered")]

    bench.handler.recall(_tick(2, _device("a", 0.1))._replace(timestamp=11_000))
    bench.now_s = 9.0
    assert "n-0" in bench.exposition()
    bench.now_s = 10.0
    assert bench.exposition() == ""


async def test_what_comes_after_the_log_was_read_to_its_end_is_shown_although_this_hosts_clock_is_ahead() -> None:
    bench = Bench(wall_s=3600.0)
    bench.handler.recall(_tick(0, _device("a", 0.1)))
    assert bench.exposition() == "", "it may be as old as the clock says"

    await bench.handler.quiet(bench.abandon)
    await bench.deliver(_tick(1, _device("a", 0.2)))
    bench.now_s = 59.0
    assert " 0.2\n" in bench.exposition()
    bench.now_s = 60.0
    assert bench.exposition() == ""


async def test_what_waited_in_kafka_is_not_shown_for_longer_than_since_the_log_was_read_to_its_end() -> None:
    bench = Bench(wall_s=3600.0)
    await bench.handler.quiet(bench.abandon)
    bench.now_s = 61.0
    await bench.deliver(_tick(1, _device("a", 0.1)))
    assert bench.exposition() == ""


async def test_a_partition_that_was_taken_away_is_not_shown_until_it_is_ours_again() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1)))
    bench.abandon.set()
    assert bench.exposition() == ""

    await bench.handler.quiet(asyncio.Event())
    assert "n-0" in bench.exposition()


async def test_what_an_earlier_life_showed_is_shown_again() -> None:
    bench = Bench()
    recalled: Any = [_tick(0, _device("a", 0.1)), ConsumedRecord(0, b"{"), ConsumedRecord(0, None)]
    for record in recalled:
        bench.handler.recall(record)

    assert "n-0" in bench.exposition()
    assert bench.outcomes == []
    await bench.deliver(_tick(0, _device("a", 0.1)))
    assert bench.outcomes == [("n-0", 1, "duplicate")]


@pytest.mark.parametrize("value", [b"", b"{", b'{"schema":2}', b"\xff", None])
async def test_a_record_that_cannot_be_decoded_is_dead_lettered(value: bytes | None) -> None:
    bench = Bench()

    assert await bench.deliver(ConsumedRecord(7, value)) == [8]
    assert bench.letters.errors[0].startswith("not a record of gpu.attributed")
    assert bench.counted("gpustream_scrape_records_dead_lettered_total") == 1.0


async def test_nothing_counts_of_a_step_whose_dead_letter_is_abandoned() -> None:
    class Away(FakeLetters):
        async def write(self, record: Record, error: str, abandon: asyncio.Event) -> None:
            raise Abandoned

    bench = Bench(letters=Away())
    with pytest.raises(Abandoned):
        await bench.deliver(_tick(0, _device("a", 0.1)), ConsumedRecord(1, b"{"))
    assert bench.outcomes == []
    assert bench.counted("gpustream_scrape_records_delivered_total") == 0


@pytest.mark.parametrize("broken", [b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\udfff", b"a\nb"])
async def test_a_name_that_is_no_text_is_dead_lettered_and_the_last_tick_stays(broken: bytes) -> None:
    bench = Bench()
    value = _tick(1, _device("a", 0.2, "bert-0")).value or b""
    await bench.deliver(_tick(0, _device("a", 0.1)), ConsumedRecord(1, value.replace(b"bert-0", broken)))

    assert len(bench.letters.errors) == 1
    assert " 0.1\n" in bench.exposition()


async def test_of_two_devices_with_one_uuid_the_first_is_shown() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1), _device("a", 0.2)))

    assert [sample.value for sample in samples(bench.exposition()) if sample.name == "gpu_utilization"] == [0.1]


async def test_a_value_beyond_any_float_is_dead_lettered_and_the_last_tick_stays() -> None:
    bench = Bench()
    await bench.deliver(_tick(0, _device("a", 0.1)), _tick(1, _device("a", 10**400)))

    assert len(bench.letters.errors) == 1
    assert " 0.1\n" in bench.exposition()


async def test_a_topic_that_was_created_again_starts_again() -> None:
    bench = Bench()
    await bench.deliver(_tick(5, _device("a", 0.1)))
    bench.handler.reset()
    await bench.deliver(_tick(0, _device("a", 0.2)))

    assert " 0.2\n" in bench.exposition()


async def test_many_records_are_committed_in_steps_of_one_turn_each(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.turns, "next", turn := AsyncMock())
    assert await bench.deliver(*(_tick(number, _device("a", 0.1)) for number in range(120))) == [50, 100, 120]
    assert turn.await_count == 3


async def test_nothing_is_kept_of_silent_nodes_that_nobody_scrapes() -> None:
    bench, sizes = Bench(), list[int]()
    for number in range(20):
        bench.now_s = bench.wall_s = 100.0 * number
        await bench.deliver(_tick(100 * number, _device("a", 0.1, f"bert-{number}"), node=f"n-{number}"))
        await bench.handler.quiet(bench.abandon)
        sizes.append(kept(bench.handler, without=[bench, bench.outcomes]))
    assert max(sizes[10:]) <= max(sizes[5:10])
