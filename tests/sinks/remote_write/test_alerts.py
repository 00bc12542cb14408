"""An alert is 1 from its start to its end, whatever happens to the sink."""

import asyncio
import struct
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.dead_letters import Abandoned
from sinks.remote_write.alerts import AlertPartition, AlertSeries, labels
from sinks.remote_write.policy import Protocol
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from tests.sinks.alerts import START_MS, alert, alert_record, deleted
from tests.sinks.records import ConsumedRecord
from tests.sinks.remote_write.receivers import KINDS, STALE_BITS, Kind, Receiver, of_every_kind
from tests.sinks.remote_write.setup import SharedSetup
from topics.alerts import Alert, AlertGpu

MINUTE_MS = 60_000
DAY_MS = 24 * 3_600_000
END = "end"
Point = tuple[int, float | str]
"""When, in milliseconds after the first alert's start, and what: 1, or the end."""


class Setup(SharedSetup):
    """A partition's handler between records and a receiver, with its own clock in milliseconds after the start."""

    def __init__(
        self,
        receiver: Receiver | None = None,
        protocol: Protocol = "1.0",
        max_samples: int = 1000,
        relabelling: Relabelling | None = None,
    ) -> None:
        super().__init__(receiver, protocol, max_samples)
        self.now_ms = 0
        series = AlertSeries(relabelling=relabelling or Relabelling())
        self.handler = AlertPartition(series, self.shared, lambda: (START_MS + self.now_ms) / 1000)

    async def deliver(self, now_ms: int, *records: ConsumedRecord) -> None:
        self.now_ms = now_ms
        self.counted.read(len(records))
        async for _ in self.handler.deliver(records, self.abandon):
            pass

    async def quiet(self, now_ms: int) -> None:
        self.now_ms = now_ms
        await self.handler.quiet(self.abandon)

    def points(self, of_alert: Alert) -> list[Point]:
        series = frozenset({("__name__", "gpu_alert_firing"), *labels(of_alert)})
        stored = self.receiver.stored.get(series, [])
        return [(ts_ms - START_MS, END if bits == STALE_BITS else 1.0) for ts_ms, bits in stored]


def ended_alert(after_ms: int) -> Alert:
    return alert(ends_ms=START_MS + after_ms)


async def test_an_alert_is_1_at_its_start_and_each_minute_until_it_ends() -> None:
    setup = Setup()
    await setup.deliver(700, alert_record(alert()))
    for now_ms in (900, 59_000, 60_500, 61_500, 120_100):
        await setup.quiet(now_ms)
    await setup.deliver(130_900, alert_record(ended_alert(130_000)))
    await setup.quiet(400_000)
    assert setup.points(alert()) == [(0, 1.0), (60_000, 1.0), (120_000, 1.0), (130_000, END)]
    assert setup.ends() == {"delivered": 2}
    assert setup.count("markers_total") == 1


async def test_its_series_has_the_alerts_labels_its_severity_and_its_fingerprint() -> None:
    setup = Setup()
    await setup.deliver(0, alert_record(alert()))
    assert [dict(series) for series in setup.receiver.stored] == [
        {
            "__name__": "gpu_alert_firing",
            "alertname": "GPUHeldIdle",
            "severity": "warning",
            "fingerprint": alert().fingerprint,
            "k8s_node_name": "n1",
            "k8s_pod_name": "a",
        }
    ]


async def test_rules_change_its_labels_but_never_take_its_fingerprint() -> None:
    rules = load("- {regex: __name__|severity, action: labelkeep}", "rules.yml")
    setup = Setup(relabelling=Relabelling([rules], (("region", "eu"),)))
    await setup.deliver(0, alert_record(alert(), 0))
    await setup.deliver(MINUTE_MS, alert_record(ended_alert(MINUTE_MS), 1))
    ((series, points),) = setup.receiver.stored.items()
    assert dict(series).keys() == {"__name__", "severity", "region", "fingerprint"}
    assert [bits == STALE_BITS for _, bits in points] == [False, True]


async def test_an_alert_that_a_rule_drops_is_not_written_and_its_records_are_delivered() -> None:
    rules = load("- {source_labels: [__name__], regex: gpu_alert_firing, action: drop}", "rules.yml")
    setup = Setup(relabelling=Relabelling([rules]))
    await setup.deliver(0, alert_record(alert(), 0))
    await setup.quiet(MINUTE_MS)
    await setup.deliver(2 * MINUTE_MS, alert_record(ended_alert(MINUTE_MS), 1))
    assert (setup.receiver.stored, setup.ends()) == ({}, {"delivered": 2})


async def test_alerts_with_the_same_labels_are_series_of_their_own() -> None:
    setup = Setup()
    same = {"k8s_node_name": "n1"}
    await setup.deliver(0, *(alert_record(alert(pod, labels=same)) for pod in "abc"))
    assert setup.ends() == {"delivered": 3}
    assert len(setup.receiver.stored) == 3


def test_labels_from_hell_are_written_as_names_and_values_that_any_receiver_takes() -> None:
    pod_labels = {
        "a.b": "x",
        "a/b": "y",
        "": "z",
        "9": "n",
        "__name__": "evil",
        "alertname": "other",
        "e": "",
        "l": "é" * 999,
    }
    pairs = labels(alert(labels=pod_labels))
    assert dict(pairs) == {
        "alertname": "GPUHeldIdle",
        "severity": "warning",
        "fingerprint": alert().fingerprint,
        "a_b": "x",
        "label_": "z",
        "label_9": "n",
        "label___name__": "evil",
        "l": "é" * 512,
    }
    assert pairs == tuple(sorted(pairs))


def test_a_series_has_no_more_labels_than_a_receiver_takes_and_what_distinguishes_alerts_stays() -> None:
    pairs = labels(alert(labels={f"l{n:02}": "x" for n in range(50)}), max_labels=10)
    assert len(pairs) == 9
    assert {"alertname", "severity", "fingerprint", "l00", "l05"} <= dict(pairs).keys()


async def test_the_end_comes_after_what_was_written_before_it_was_known() -> None:
    setup = Setup()
    await setup.deliver(0, alert_record(alert()))
    await setup.quiet(125_000)
    await setup.deliver(170_000, alert_record(ended_alert(65_000), at_ms=START_MS + 169_000))
    assert setup.points(alert()) == [(0, 1.0), (60_000, 1.0), (120_000, 1.0), (120_001, END)]


async def test_an_alert_that_ended_when_it_began_still_has_a_sample() -> None:
    setup = Setup()
    await setup.deliver(1_000, alert_record(alert()), alert_record(ended_alert(0), 1))
    assert setup.points(alert()) == [(0, 1.0), (1, END)]


async def test_what_fires_again_begins_after_its_last_end() -> None:
    setup = Setup()
    second_firing = alert(starts_ms=START_MS + 90_000)
    await setup.deliver(0, alert_record(alert()))
    await setup.quiet(121_000)
    await setup.deliver(122_000, alert_record(ended_alert(61_000), 1), alert_record(second_firing, 2))
    await setup.quiet(151_000)
    assert setup.points(alert()) == [(0, 1.0), (60_000, 1.0), (120_000, 1.0), (120_001, END), (150_000, 1.0)]
    assert setup.ends() == {"delivered": 3}


@pytest.mark.parametrize("fires_again_ms", [DAY_MS + MINUTE_MS + 1, 5 * MINUTE_MS])
async def test_alerts_of_a_node_whose_clock_was_a_day_ahead_are_written_while_they_fire(fires_again_ms: int) -> None:
    """The next firing starts just after the last end or, if the node was silent in between, at its own time."""
    setup = Setup()
    ahead, again = alert(starts_ms=START_MS + DAY_MS), alert(starts_ms=START_MS + fires_again_ms)
    await setup.deliver(0, alert_record(ahead, 0, at_ms=START_MS))
    await setup.quiet(MINUTE_MS)
    escalated = msgspec.structs.replace(ahead, value=901.0, revision=1)
    await setup.deliver(90_000, alert_record(escalated, 1, at_ms=START_MS + 90_000))
    ended = alert(starts_ms=START_MS + DAY_MS, ends_ms=START_MS + DAY_MS + MINUTE_MS)
    await setup.deliver(2 * MINUTE_MS, alert_record(ended, 2, at_ms=START_MS + 100_000))
    await setup.deliver(5 * MINUTE_MS, alert_record(again, 3, at_ms=START_MS + 5 * MINUTE_MS))
    await setup.quiet(6 * MINUTE_MS)
    assert setup.points(again) == [
        (0, 1.0), (60_000, 1.0), (90_000, 1.0), (100_000, END), (300_000, 1.0), (360_000, 1.0)
    ]  # fmt: skip
    assert setup.ends() == {"delivered": 4}


async def test_after_the_clock_of_the_sink_was_a_day_ahead_a_firing_alert_goes_on_and_ends() -> None:
    noon_ms = START_MS + DAY_MS // 2
    setup = Setup(Receiver(lambda sample: "too far in the future" if sample.ts_ms > noon_ms else None))
    await setup.deliver(0, alert_record(alert(), 0))
    await setup.quiet(DAY_MS)
    await setup.quiet(2 * MINUTE_MS)
    await setup.quiet(3 * MINUTE_MS)
    await setup.deliver(200_000, alert_record(ended_alert(200_000), 1))
    assert setup.points(alert()) == [(0, 1.0), (120_000, 1.0), (180_000, 1.0), (200_000, END)]


async def test_a_backlog_is_written_as_it_would_have_been() -> None:
    setup = Setup()
    await setup.deliver(
        900_000, alert_record(alert()), alert_record(ended_alert(130_000), 1), alert_record(alert("b"), 2)
    )
    await setup.quiet(900_500)
    assert setup.points(alert()) == [(0, 1.0), (60_000, 1.0), (120_000, 1.0), (130_000, END)]
    assert setup.points(alert("b")) == [(n * MINUTE_MS, 1.0) for n in range(16)]


async def test_the_end_alone_is_enough_where_compaction_took_the_start() -> None:
    setup = Setup()
    await setup.deliver(900_000, alert_record(ended_alert(61_000)))
    assert setup.points(alert()) == [(0, 1.0), (60_000, 1.0), (61_000, END)]


async def test_what_has_fired_for_days_is_written_from_an_hour_ago_on() -> None:
    setup = Setup()
    day_ms = 24 * 60 * MINUTE_MS
    await setup.deliver(3 * day_ms, alert_record(alert()))
    await setup.quiet(3 * day_ms + 1)
    points = setup.points(alert())
    assert points[0] == (0, 1.0)
    assert points[1:] == [(3 * day_ms - n * MINUTE_MS, 1.0) for n in range(59, -1, -1)]


async def test_an_open_alert_that_an_earlier_life_wrote_goes_on_at_the_same_times() -> None:
    first = Setup()
    await first.deliver(0, alert_record(alert()))
    await first.quiet(61_000)
    second = Setup(first.receiver)
    second.handler.recall(alert_record(alert()))
    for now_ms in (62_000, 119_000, 120_000):
        await second.quiet(now_ms)
    assert second.points(alert()) == [(0, 1.0), (60_000, 1.0), (120_000, 1.0)]
    assert second.count("alert_samples_refused_total") == 0


async def test_the_end_of_what_an_earlier_life_wrote_comes_after_all_that_it_can_have_written() -> None:
    first = Setup()
    await first.deliver(0, alert_record(alert()))
    await first.quiet(121_000)
    second = Setup(first.receiver)
    second.handler.recall(alert_record(alert()))
    await second.deliver(900_000, alert_record(ended_alert(61_000), at_ms=START_MS + 122_000))
    assert second.points(alert()) == [(0, 1.0), (60_000, 1.0), (120_000, 1.0), (120_001, END)]
    assert second.ends() == {"delivered": 1}


@pytest.mark.parametrize(("logged_ms", "read_ms"), [(90_000, 91_000), (119_000, 121_000)])
async def test_the_end_comes_after_an_update_that_an_earlier_life_wrote(logged_ms: int, read_ms: int) -> None:
    log = [alert_record(of_gpus(3, 0)), alert_record(of_gpus(8, 1), 1, at_ms=START_MS + logged_ms)]
    first = Setup()
    await first.deliver(0, log[0])
    await first.quiet(read_ms)
    await first.deliver(read_ms, log[1])
    second = Setup(first.receiver)
    for record in log:
        second.handler.recall(record)
    await second.quiet(read_ms + 500)
    over = msgspec.structs.replace(of_gpus(8, 1), state="resolved", ends_at=ended_alert(50_000).ends_at)
    await second.deliver(read_ms + 1000, alert_record(over, 2, at_ms=START_MS + read_ms))
    assert second.points(over)[-1][1] == END
    assert second.ends() == {"delivered": 1}


async def test_what_was_over_before_is_neither_written_nor_repeated() -> None:
    setup = Setup()
    for record in (alert_record(alert()), alert_record(ended_alert(1_000)), alert_record(b"{", key=b"x")):
        setup.handler.recall(record)
    await setup.quiet(600_000)
    assert setup.receiver.stored == {}


async def test_a_replay_is_a_duplicate_and_changes_nothing() -> None:
    setup = Setup()
    start, end = alert_record(alert()), alert_record(ended_alert(30_000), 1)
    await setup.deliver(31_000, start, start, end, start, end)
    await setup.quiet(600_000)
    assert setup.points(alert()) == [(0, 1.0), (30_000, END)]
    assert setup.ends() == {"delivered": 2, "duplicate": 3}


async def test_an_alert_that_is_deleted_while_it_fires_ends() -> None:
    setup = Setup()
    await setup.deliver(0, alert_record(alert()))
    await setup.deliver(5_000, deleted(alert(), 1, at_ms=START_MS + 4_000), deleted(alert("b"), 2, at_ms=START_MS))
    await setup.quiet(600_000)
    assert setup.points(alert()) == [(0, 1.0), (4_000, END)]
    assert setup.ends() == {"delivered": 1 + 1, "duplicate": 1}


async def test_a_topic_that_was_created_again_knows_no_alert() -> None:
    setup = Setup()
    await setup.deliver(0, alert_record(alert()))
    setup.handler.reset()
    await setup.quiet(600_000)
    assert setup.points(alert()) == [(0, 1.0)]


BAD = {
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "empty": b"",
    "another schema": msgspec.json.encode(alert()).replace(b'"schema":1', b'"schema":2'),
    "no time zone": msgspec.json.encode(alert()).replace(b"Z", b""),
    "before the epoch": msgspec.json.encode(alert()).replace(b"2026-", b"1926-"),
    "ended, and not when": msgspec.json.encode(alert()).replace(b'"firing"', b'"resolved"'),
    "deeply nested": b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_record_that_is_no_alert_is_dead_lettered_before_its_offset_is_passed(bad: bytes) -> None:
    setup = Setup()
    await setup.deliver(0, alert_record(bad, 7, key=alert().fingerprint.encode()), alert_record(alert("b"), 8))
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1}
    ((topic, value, headers),) = setup.sender.sent
    assert (topic, value, headers["offset"], headers["stage"]) == ("gpu.dead-letters", bad, b"7", b"sink remote-write")


async def test_an_alert_under_anothers_key_is_dead_lettered() -> None:
    setup = Setup()
    await setup.deliver(0, alert_record(alert(), key=b"0123456789abcdef"))
    assert setup.ends() == {"dead_lettered": 1}


@of_every_kind
async def test_an_alert_that_is_refused_takes_no_other_with_it(kind: Kind) -> None:
    receiver = Receiver(lambda s: "label too long" if ("k8s_pod_name", "b") in s.labels else None, kind=kind)
    setup = Setup(receiver, kind.protocol)
    await setup.deliver(0, *(alert_record(alert(pod), n) for n, pod in enumerate("abc")))
    await setup.quiet(60_000)
    assert setup.ends() == {"delivered": 2, "dead_lettered": 1}
    assert b"gpu_alert_firing{" in setup.sender.sent[0][2]["error"]
    assert setup.points(alert("a")) == setup.points(alert("c")) == [(0, 1.0), (60_000, 1.0)]
    assert setup.count("alert_samples_refused_total") == 2


async def test_a_start_that_is_too_old_is_dropped_by_reason_and_the_alert_goes_on() -> None:
    late_receiver = Receiver(lambda sample: "too old sample" if sample.ts_ms < START_MS + 60_000 else None)
    setup = Setup(late_receiver)
    await setup.deliver(60_000, alert_record(alert()))
    await setup.quiet(60_000)
    assert setup.ends() == {"dropped": 1}
    assert setup.points(alert()) == [(60_000, 1.0)]


async def test_a_record_waits_for_its_dead_letter() -> None:
    setup = Setup()
    setup.sender.away = True
    delivering = asyncio.ensure_future(setup.deliver(0, alert_record(b"{", key=b"x")))
    done, _ = await asyncio.wait([delivering], timeout=0.05)
    assert not done
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering


Event = tuple[str, int, str]
"""What happens to an alert: ``fire``, ``resolve``, ``crash`` or ``wait``; after so many seconds; which."""

events = st.lists(
    st.tuples(st.sampled_from(["fire", "resolve", "crash", "wait"]), st.integers(0, 200), st.sampled_from("ab")),
    max_size=12,
)


@given(events, st.sampled_from(KINDS), st.integers(1, 3))
def test_whatever_happens_an_alert_that_fires_is_1_and_one_that_does_not_has_ended(
    happens: Sequence[Event], kind: Kind, max_samples: int
) -> None:
    """A crash comes with a replay of the last record; the alert stream resolves an alert after 30 s."""
    receiver = Receiver(kind=kind)

    async def run() -> None:
        setup, log, now_ms = Setup(receiver, kind.protocol, max_samples), list[ConsumedRecord](), 0
        firing: dict[str, Alert] = {}
        last: dict[str, Alert] = {}
        for event, wait_s, pod in happens:
            now_ms += wait_s * 1000 + 1
            if event == "fire" and pod not in firing:
                last[pod] = firing[pod] = alert(pod, START_MS + now_ms)
            elif event == "resolve" and pod in firing:
                start = firing.pop(pod)
                last[pod] = alert(pod, round(start.starts_at.timestamp() * 1000), START_MS + max(0, now_ms - 30_000))
            elif event == "crash":
                setup = Setup(receiver, kind.protocol, max_samples)
                for record in log[:-1]:
                    setup.handler.recall(record)
                await setup.deliver(now_ms, *log[-1:])
            else:
                pass
            last_encoded = msgspec.json.encode(last.get(pod))
            if pod in last and last_encoded not in {record.value for record in log}:
                log.append(alert_record(last[pod], len(log), at_ms=START_MS + now_ms))
                await setup.deliver(now_ms, log[-1])
            await setup.quiet(now_ms)
        for pod, last_alert in last.items():
            points = setup.points(last_alert)
            assert [ts_ms for ts_ms, _ in points] == sorted({ts_ms for ts_ms, _ in points})
            assert (points[-1][1] == END) == (pod not in firing)
            if pod in firing:
                assert points[-1][0] > now_ms - MINUTE_MS

    asyncio.run(run())


def of_gpus(count: int, revision: int, severity: str = "warning") -> Alert:
    gpus = tuple(AlertGpu(uuid=f"GPU-{i}", node="n1", index=i) for i in range(count))
    labels_now = {**alert().labels, "severity": severity}
    return alert(gpus=gpus, revision=revision, severity=severity, labels=labels_now)


async def test_the_value_of_an_alert_is_of_how_many_gpus_it_is_true_and_an_update_changes_it() -> None:
    setup = Setup()
    await setup.deliver(700, alert_record(of_gpus(3, 0)))
    await setup.deliver(30_000, alert_record(of_gpus(8, 1), at_ms=START_MS + 30_000))
    await setup.quiet(60_500)
    await setup.deliver(61_000, alert_record(of_gpus(8, 1)))
    ((_, points),) = setup.receiver.stored.items()
    assert [(ts_ms - START_MS, struct.unpack("d", struct.pack("Q", bits))[0]) for ts_ms, bits in points] == [
        (0, 3.0), (30_000, 8.0), (60_000, 8.0)
    ]  # fmt: skip
    assert setup.ends() == {"delivered": 2, "duplicate": 1}


async def test_a_severity_that_changes_ends_the_series_and_begins_another() -> None:
    setup = Setup()
    await setup.deliver(700, alert_record(of_gpus(2, 0)))
    await setup.deliver(30_000, alert_record(of_gpus(2, 1, "critical"), at_ms=START_MS + 30_000))
    stored = setup.receiver.stored.items()
    ends = {dict(series)["severity"]: points[-1][1] == STALE_BITS for series, points in stored}
    assert ends == {"warning": True, "critical": False}
