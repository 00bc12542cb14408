"""What ``gpustream top`` reads of the past, and what it says when nothing comes."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from delivery.connection import Connection
from delivery.ledger import Partition
from gpustream.alerts import LatestAlerts
from gpustream.fleet import Fleet
from gpustream.history import History, Span
from gpustream.top.command import follow, latest_spans, moment
from tests.gpustream.test_fleet import gpu, tick
from tests.sinks.records import ConsumedRecord

QUIET, BUSY, EMPTY = (Partition("gpu.attributed", number) for number in range(3))


def test_of_a_large_fleet_each_partition_is_read_from_about_the_same_time() -> None:
    spans = {QUIET: Span(100, 1_100), BUSY: Span(0, 9_000), EMPTY: Span(5, 5)}

    assert latest_spans(spans, 1_000) == {QUIET: Span(1_000, 1_100), BUSY: Span(8_100, 9_000), EMPTY: Span(5, 5)}


def test_of_a_small_fleet_all_of_the_time_is_read() -> None:
    spans = {QUIET: Span(100, 1_100), EMPTY: Span(5, 5)}

    assert latest_spans(spans, 1_000) == spans
    assert latest_spans({EMPTY: Span(5, 5)}, 1_000) == {EMPTY: Span(5, 5)}


@pytest.mark.parametrize(("interval_ms", "quiet_after_s"), [(None, 10), (1_000, 10), (60_000, 180)])
def test_kafka_is_said_to_be_away_when_every_node_has_missed_three_ticks(
    interval_ms: int | None, quiet_after_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    fleet.observe(tick(gpu("b"), node="gone", interval_ms=1_000), at_s=1.0, wall_ms=1_000)
    fleet.observe(tick(gpu("a"), interval_ms=interval_ms), at_s=100.0, wall_ms=1_000)

    def trouble(at_s: float) -> str:
        monkeypatch.setattr(time, "monotonic", lambda: at_s)
        return moment(fleet, LatestAlerts(), "", began_s=0.0).trouble

    assert trouble(100.0 + quiet_after_s) == ""
    assert trouble(101.0 + quiet_after_s).startswith(f"no tick for {quiet_after_s + 1} s")


class Log(History):
    """A log with a tick that was there and one that came later, as a host sees them whose clock is an hour ahead."""

    def __init__(self) -> None:
        super().__init__(Connection("127.0.0.1:1"), None, {})

    async def records(self, *_: Any, **__: Any) -> AsyncIterator[Sequence[Any]]:
        yield [self._record("there")]

    async def after(self, *_: Any, **__: Any) -> AsyncIterator[Sequence[Any]]:
        yield [self._record("new")]

    def _record(self, node: str) -> ConsumedRecord:
        logged_ms = round(time.time() * 1000) - 3_600_000
        return ConsumedRecord(0, msgspec.json.encode(tick(gpu("a"), node=node)), logged_ms, topic="gpu.attributed")


async def test_a_node_whose_ticks_come_is_not_silent_although_this_hosts_clock_is_ahead() -> None:
    fleet = Fleet()
    await follow(Log(), {}, fleet, LatestAlerts())
    now = moment(fleet, LatestAlerts(), "", began_s=0.0)

    assert [node for _, node in now.fleet.nodes] == ["new"]
    assert [device.silent for device in now.fleet.devices()] == [False]
    assert now.trouble == ""
