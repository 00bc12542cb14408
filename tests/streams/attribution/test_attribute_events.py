"""An XID error is attributed to the holder at its own time, not at the time of the tick."""

from msgspec.structs import replace

from streams.attribution import join
from streams.attribution.attribute import EVENT_MS
from streams.attribution.join import AllocationsRead, Committed, Forget, NodeState, WatermarkRaised
from tests.streams.attribution.records import container, event, gpu, logged, pending, pod, snapshot, tick, workloads
from topics.attributed import AttributedEvent, AttributedSample

GRACE_S = 10.0
OLD, NEW = (snapshot(seq, container(name, gpu(0)), ts_ms=seq * 1_000) for seq, name in ((1, "old"), (2, "new")))
PODS = logged(workloads(1, pod("old", ended=12_000), pod("new", started=13_000)))
CHANGED = tick(2, 2, ts_ms=20_000, events=[event(1, 11_000), event(2, 15_000), event(None, 16_000)])


def run(state: NodeState, *records: join.Record) -> tuple[NodeState, list[AttributedSample]]:
    """The state after some records, and all samples that they release."""
    samples: list[AttributedSample] = []
    for record in records:
        state, joined = join.step(state, record, GRACE_S)
        samples += [output.sample for output in joined]
    return state, samples


def events_of(sample: AttributedSample) -> tuple[AttributedEvent, ...]:
    """The events of the first device."""
    return sample.devices[0].events or ()


def pods_of(attributed: AttributedEvent) -> list[tuple[str, str | None]] | None:
    return None if attributed.holders is None else [(holder.pod, holder.pod_uid) for holder in attributed.holders]


def test_an_event_names_its_own_holders_if_they_are_not_the_ticks() -> None:
    _, (sample,) = run(join.NEW, PODS, OLD, NEW, pending(CHANGED, 0))

    assert [holder.pod for holder in sample.devices[0].holders] == ["new"]
    assert [pods_of(e) for e in events_of(sample)] == [[("old", "uid-old")], None, None]
    assert [e.attribution for e in events_of(sample)] == [None, None, None]
    assert [(e.kind, e.code, e.ts_ms, e.allocations_seq) for e in events_of(sample)] == [
        ("xid", 31, 11_000, 1),
        ("xid", 31, 15_000, 2),
        ("xid", 31, 16_000, None),
    ]


def test_an_event_on_a_device_that_nobody_held_has_no_holder() -> None:
    _, (sample,) = run(join.NEW, PODS, snapshot(1), NEW, pending(CHANGED, 0))

    assert [pods_of(e) for e in events_of(sample)] == [[], None, None]


def test_an_event_that_came_while_its_tick_was_read_may_name_a_later_snapshot_than_the_tick() -> None:
    tick_of_old = tick(2, 1, ts_ms=11_500, events=[event(2, 13_500)])
    _, (sample,) = run(join.NEW, PODS, OLD, NEW, pending(tick_of_old, 0))

    assert [holder.pod for holder in sample.devices[0].holders] == ["old"]
    assert [pods_of(e) for e in events_of(sample)] == [[("new", "uid-new")]]


def test_another_snapshot_with_the_same_holder_adds_nothing() -> None:
    same = snapshot(1, container("new", gpu(0)), container("old", gpu(1)))
    _, (sample,) = run(join.NEW, PODS, same, NEW, pending(CHANGED, 0))

    assert [pods_of(e) for e in events_of(sample)] == [None, None, None]


def test_a_tick_waits_for_the_snapshots_of_its_events_and_goes_on_without_those_that_never_come() -> None:
    state, samples = run(join.NEW, PODS, NEW, pending(CHANGED, 0))
    assert samples == []
    assert join.needs_end(state, GRACE_S, GRACE_S)

    _, (in_time,) = run(state, OLD)
    assert pods_of(events_of(in_time)[0]) == [("old", "uid-old")]

    _, (without,) = run(state, AllocationsRead(GRACE_S))
    assert without.attribution == "exact"
    assert [e.attribution for e in events_of(without)] == ["none", None, None]
    assert [pods_of(e) for e in events_of(without)] == [[], None, None]


def test_an_event_whose_snapshot_never_came_is_late_with_the_last_one_before_it() -> None:
    later = replace(CHANGED, allocations_seq=3, devices=tick(2, 3, events=[event(2, 11_500)]).devices)
    own_snapshot = snapshot(3, container("new", gpu(0)))
    _, (sample,) = run(join.NEW, PODS, OLD, own_snapshot, pending(later, 0), AllocationsRead(GRACE_S))

    (attributed,) = events_of(sample)
    assert sample.attribution == "exact"
    assert (attributed.attribution, [holder.pod for holder in attributed.holders or ()]) == ("late", ["old"])


def test_a_tick_waits_for_a_pod_that_only_its_events_snapshot_names() -> None:
    state, samples = run(
        join.NEW,
        logged(workloads(1, pod("new", started=13_000))),
        OLD,
        NEW,
        pending(CHANGED, logged_ms=10_000, watermark_ms=8_000),
    )
    assert samples == []

    news = workloads(2, pod("old", ended=12_000), pod("new", started=13_000))
    _, (in_time,) = run(state, logged(news, 12_000), WatermarkRaised(12_000))
    _, (without_pod,) = run(state, WatermarkRaised(12_000))
    assert pods_of(events_of(in_time)[0]) == [("old", "uid-old")]
    assert pods_of(events_of(without_pod)[0]) == [("old", None)]


def test_a_snapshot_is_kept_until_the_samples_are_committed_whose_events_name_it() -> None:
    before: list[join.Record] = [
        PODS,
        OLD,
        pending(tick(1, 1, ts_ms=10_000), 0),
        NEW,
        pending(CHANGED, 1),
    ]
    state, first = run(join.NEW, *before, Committed(1), Forget())
    _, repeated = run(state, pending(CHANGED, 1, 5.0))

    assert repeated == first[1:]
    assert pods_of(events_of(repeated[0])[0]) == [("old", "uid-old")]


def test_a_pod_that_ended_within_a_minute_before_a_tick_is_still_known_for_its_events() -> None:
    """Nothing may depend on whether a commit came between."""
    ticks = [pending(tick(n, 1, ts_ms=12_000 + n * 11_000), n) for n in range(6)]
    last = tick(7, 2, ts_ms=11_000 + EVENT_MS, events=[event(1, 11_000)])
    samples = [
        run(run(join.NEW, PODS, OLD, NEW, *ticks, *commit)[0], pending(last, 6))[1] for commit in ([], [Committed(6)])
    ]

    assert samples[0] == samples[1]
    assert pods_of(events_of(samples[0][0])[0]) == [("old", "uid-old")]


def test_a_pod_that_ended_since_the_tick_before_is_known_for_its_events_however_seldom_its_node_is_read() -> None:
    ticks = [pending(replace(tick(n, 1, ts_ms=10_000 * n), interval_ms=300_000), n) for n in (0, 1)]
    last = replace(tick(2, 2, ts_ms=310_000, events=[event(1, 11_000)]), interval_ms=300_000)
    samples = [
        run(run(join.NEW, PODS, OLD, NEW, *ticks, *commit)[0], pending(last, 2))[1] for commit in ([], [Committed(2)])
    ]

    assert samples[0] == samples[1]
    assert pods_of(events_of(samples[0][0])[0]) == [("old", "uid-old")]
