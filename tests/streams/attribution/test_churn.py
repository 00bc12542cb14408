"""Records without the pods that ended earlier carry as much information as complete records."""

import asyncio
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import orjson
from hypothesis import given

from producers.publisher import RESEND_S
from producers.records import WorkloadsContent
from producers.workloads import WorkloadsPublisher
from streams.attribution.workloads import AsOf, KnownWorkloads, add_record
from tests.eventually import settle
from tests.producers.fakes import FakeClock, FakeSender, instruments
from topics.topic import decoder
from topics.workloads import NodeWorkloads

JsonDict = dict[str, Any]

Log = list[tuple[int, NodeWorkloads]]
"""Records, each with the time when it was logged."""

KEPT_MS = 30 * 60_000
READ_BACK_MS = 10 * 60_000
_decode = decoder(NodeWorkloads)


def _rows(events: Sequence[tuple[int, int]], now_ms: int) -> list[JsonDict]:
    """The pods that run, or ended in the last half hour: each event makes a pod at a time that runs for a while."""
    rows = []
    for number, (began_ms, ran_ms) in enumerate(events):
        ended_ms = began_ms + ran_ms
        if began_ms <= now_ms < ended_ms + KEPT_MS:
            row: JsonDict = {"namespace": "ml", "name": f"p{number % 3}", "uid": f"u{number}", "started_ms": began_ms}
            rows.append(row | ({"ended_ms": ended_ms} if ended_ms <= now_ms else {}))
    return rows


async def _logs(events: Sequence[tuple[int, int]], times_ms: Sequence[int]) -> tuple[Log, Log]:
    """The records that are sent for the node with their times, and those in which every record has every pod."""
    clock = FakeClock()
    sender = FakeSender(clock, prompt=True)
    publisher = WorkloadsPublisher(sender, instruments(), cluster="c", epoch=1, clock=clock)
    running = asyncio.create_task(publisher.run())
    full_log: Log = []
    for at_ms in times_ms:
        clock.now_s = 1000.0 + at_ms / 1000
        publisher.queue_overdue()
        rows = _rows(events, at_ms)
        publisher.publish(at_ms, "n", WorkloadsContent({}, rows))
        await settle(6)
        record = {"schema": 1, "cluster": "c", "node": "n", "epoch": 1, "seq": len(full_log) + 1, "ts_ms": at_ms}
        full_log.append((at_ms, _decode(orjson.dumps({**record, "pods": rows}))))
    running.cancel()
    sent_records = [event for event in sender.events if event.outcome == "sent"]
    return [
        (round((event.at_s - 1000.0) * 1000), _decode(orjson.dumps(event.record))) for event in sent_records
    ], full_log


def _state_at(log: Log, since_ms: int) -> AsOf:
    workloads: KnownWorkloads | None = None
    for logged_ms, record in log:
        if logged_ms >= since_ms:
            workloads = add_record(workloads, record, logged_ms)
    assert workloads is not None
    return AsOf(workloads, log[-1][0])


@given(
    st.lists(st.tuples(st.integers(0, 3_600_000), st.integers(1, 1_800_000)), min_size=1, max_size=8),
    st.integers(0, 3_600_000),
)
def test_a_reader_learns_the_same_whichever_record_it_starts_from(events: list[tuple[int, int]], from_ms: int) -> None:
    changes = {at_ms for began_ms, ran_ms in events for at_ms in (began_ms, began_ms + ran_ms)}
    resends = range(0, 3_600_000, int(RESEND_S * 1000))
    sent_log, full_log = asyncio.run(_logs(events, sorted({*changes, *resends})))
    state, all_known = (_state_at(log, from_ms - READ_BACK_MS) for log in (sent_log, full_log))

    for ts_ms in {from_ms, *(at_ms + late_ms for at_ms in changes for late_ms in (0, 1, 9_999, 10_001, 600_000))}:
        if ts_ms >= from_ms:
            for name in (("ml", f"p{number}") for number in range(3)):
                assert state.pod_at(name, ts_ms) == all_known.pod_at(name, ts_ms)
                assert state.has_ended(name, ts_ms) == all_known.has_ended(name, ts_ms)
