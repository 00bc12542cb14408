"""The history of a node's pods, as of the time of a sample."""

import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.attribution.attribute import ResolvedSnapshot, attribute, facts_of
from streams.attribution.log_time import LookupTime, ResolvedPods, index_snapshot, resolve
from streams.attribution.workloads import (
    LISTED_MS,
    REMEMBERED_MS,
    TOLERANCE_MS,
    AsOf,
    KnownWorkloads,
    Since,
    add_record,
    forget_before,
    version_at,
)
from tests.streams.attribution import model
from tests.streams.attribution.records import container, gpu, pod, snapshot, tick, workloads
from topics.allocations import Claim
from topics.samples import Device
from topics.workloads import DraDevice, NodeWorkloads, Owner, Pod, UnwellDevice

NAME = ("ns", "p")


def history_of(*records: NodeWorkloads) -> KnownWorkloads:
    """The workloads of a node after these records."""
    history: KnownWorkloads | None = None
    for record in records:
        history = add_record(history, record, 0)
    assert history is not None
    return history


def full_view(history: KnownWorkloads) -> AsOf:
    """The history as of the end of time."""
    return AsOf(history, 1 << 60)


def uid_at(history: KnownWorkloads, ts_ms: int) -> str | None:
    pod = full_view(history).pod_at(NAME, ts_ms)
    return pod.uid if pod else None


def labels_at(history: KnownWorkloads, ts_ms: int) -> dict[str, str]:
    pod = full_view(history).pod_at(NAME, ts_ms)
    assert pod is not None
    return pod.labels


# -- life times


@pytest.mark.parametrize(
    ("ts_ms", "runs"),
    [
        (10_000 - TOLERANCE_MS - 1, False),
        (10_000 - TOLERANCE_MS, True),
        (10_000, True),
        (19_999, True),
        (20_000 + TOLERANCE_MS - 1, True),
        (20_000 + TOLERANCE_MS, False),
    ],
)
def test_a_pod_exists_from_its_start_to_before_its_end_give_or_take_two_seconds(ts_ms: int, runs: bool) -> None:
    known_then = full_view(history_of(workloads(1, pod("p", started=10_000, ended=20_000))))

    assert (known_then.pod_of("uid-p", ts_ms) is not None) is runs
    assert (known_then.new_pod_at(NAME, ts_ms, None) is not None) is runs


@pytest.mark.parametrize(("ts_ms", "is_meant"), [(7_999, False), (8_000, True), (30_000, True), (30_001, False)])
def test_a_pod_that_its_snapshot_still_names_matches_for_ten_seconds_after_its_end(ts_ms: int, is_meant: bool) -> None:
    assert (uid_at(history_of(workloads(1, pod("p", started=10_000, ended=20_000))), ts_ms) is not None) is is_meant


def test_a_pod_that_surely_ran_before_its_name_had_gone_is_not_the_new_one() -> None:
    known_then = full_view(
        history_of(workloads(1, pod("p", uid="old", started=10_000), pod("p", uid="new", started=50_000)))
    )

    assert [p.uid if (p := known_then.new_pod_at(NAME, 50_100, gone_ms)) else None for gone_ms in (None, 49_000)] == [
        "old",
        "new",
    ]
    assert known_then.new_pod_at(NAME, 30_000, 29_000) is None


def test_a_pod_without_times_has_always_run() -> None:
    history = history_of(workloads(1, pod("p", started=None)))

    assert uid_at(history, 0) == uid_at(history, 10**15) == "uid-p"


@pytest.mark.parametrize(
    ("ts_ms", "uid"), [(19_000, "first"), (20_499, "first"), (20_500, "next"), (21_000, "next"), (25_000, "next")]
)
def test_of_two_pods_of_one_name_the_nearest_in_time_matches(ts_ms: int, uid: str) -> None:
    first = pod("p", uid="first", started=0, ended=20_000)

    assert uid_at(history_of(workloads(1, first, pod("p", uid="next", started=21_000))), ts_ms) == uid


@pytest.mark.parametrize(
    ("ended_ms", "following", "changes_at"),
    [(12_400, 12_000, 12_400), (None, 12_000, 12_999), (19_000, 12_000, 12_999), (11_000, 13_000, 12_000)],
    ids=["within the second", "not told", "told too late", "before"],
)
def test_lives_of_one_name_never_overlap(ended_ms: int | None, following: int, changes_at: int) -> None:
    pods = pod("p", uid="old", started=0, ended=ended_ms), pod("p", uid="new", started=following)
    history = history_of(workloads(1, *pods))

    assert [uid_at(history, ts_ms) for ts_ms in (changes_at - 1, changes_at)] == ["old", "new"]


def test_of_two_pods_that_ran_at_once_the_one_that_started_last_matches() -> None:
    history = history_of(workloads(1, pod("p", uid="a", started=10_000), pod("p", uid="b", started=5_000)))

    assert uid_at(history, 30_000) == "a"


def test_a_pod_that_a_newer_record_does_not_have_has_ended_by_then() -> None:
    history = history_of(workloads(1, pod("p")), workloads(2, ts_ms=50_000))

    assert uid_at(history, 49_999) == "uid-p"
    assert uid_at(history, 50_000 + LISTED_MS + 1) is None


def test_the_end_that_was_reported_counts_and_not_the_record_that_lacks_the_pod() -> None:
    history = history_of(workloads(1, pod("p", ended=10_000)), workloads(2, ts_ms=50_000), workloads(3, ts_ms=90_000))

    assert uid_at(history, 9_999) == "uid-p"
    assert uid_at(history, 30_000) is None


def test_a_pod_that_is_missing_once_and_comes_back_never_ended() -> None:
    history = history_of(workloads(1, pod("p")), workloads(2, ts_ms=50_000), workloads(3, pod("p"), ts_ms=90_000))

    assert uid_at(history, 70_000) == "uid-p"


def test_a_start_that_was_reported_once_is_not_forgotten() -> None:
    history = history_of(workloads(1, pod("p", started=50_000)), workloads(2, pod("p", started=None), ts_ms=60_000))

    assert uid_at(history, 10_000) is None


def test_a_pod_of_another_namespace_is_another_pod() -> None:
    assert full_view(history_of(workloads(1, pod("p")))).pod_at(("other", "p"), 0) is None


@pytest.mark.parametrize(("ts_ms", "is_present"), [(999, False), (1_000, True), (1_999, True), (3_000, False)])
def test_a_pod_that_ended_before_it_started_existed_while_both_clocks_allow_it(ts_ms: int, is_present: bool) -> None:
    """Its start is reported by the node, and its end, if it is only missing, by the API server."""
    history = history_of(workloads(1, pod("p", started=3_000, ended=1_000)))

    assert (full_view(history).new_pod_at(NAME, ts_ms, None) is not None) is is_present


# -- versions


@pytest.mark.parametrize(("ts_ms", "version"), [(0, "1"), (10_000, "1"), (19_999, "1"), (20_000, "2"), (10**12, "2")])
def test_labels_are_of_the_last_version_before_the_sample_else_of_the_earliest(ts_ms: int, version: str) -> None:
    history = history_of(
        workloads(1, pod("p", labels={"v": "1"}), ts_ms=10_000, labels={"node": "1"}),
        workloads(2, pod("p", labels={"v": "2"}), ts_ms=20_000, labels={"node": "2"}),
    )

    assert labels_at(history, ts_ms) == {"v": version}
    assert full_view(history).node_at(ts_ms)[0] == {"node": version}


def test_annotations_namespace_labels_and_owners_make_a_version_too() -> None:
    plain = pod("p")
    changed = [
        Pod("ns", "p", "uid-p", annotations={"a": "1"}),
        Pod("ns", "p", "uid-p", namespace_labels={"team": "1"}),
        Pod("ns", "p", "uid-p", owners=(Owner("batch/v1", "Job", "j"),)),
    ]
    for other in changed:
        history = history_of(workloads(1, plain), workloads(2, other, ts_ms=1_000))
        assert full_view(history).pod_at(NAME, 999) == plain
        assert full_view(history).pod_at(NAME, 1_000) == other


def test_the_kubelets_uid_selects_the_pod_whatever_the_times_are() -> None:
    first, second = pod("p", uid="first", started=0), pod("p", uid="second", started=100_000)
    history = history_of(workloads(1, first, second))
    for uid in ("first", "second"):
        listed = index_snapshot(snapshot(1, msgspec.structs.replace(container("p", gpu(1)), pod_uid=uid)), None)
        resolved = resolve(history, listed, frozenset(), LookupTime(100_500, 10_000, float("inf")))
        assert isinstance(resolved, ResolvedPods)
        assert resolved.pods[NAME] == {"first": first, "second": second}[uid]


def test_what_the_api_server_reports_of_devices_is_in_the_attributed_tick_by_their_uuids() -> None:
    unwell = (UnwellDevice("nvidia0", health="Unhealthy"), UnwellDevice(gpu(9), taint="lost:NoSchedule"))
    history = history_of(msgspec.structs.replace(workloads(1), unwell=unwell))
    resolved = resolve(history, None, frozenset(), LookupTime(0, 10_000, float("inf")))
    assert isinstance(resolved, ResolvedPods)
    sample = msgspec.structs.replace(tick(1, None), devices=(Device(gpu(1), index=0, minor=0),))
    joined, _ = attribute(
        sample, facts_of(sample.devices, None), 1, 1, ResolvedSnapshot(None, "none", resolved), {}, None
    )
    assert joined.sample.unwell == (msgspec.structs.replace(unwell[0], device_id=gpu(1)), unwell[1])
    history = history_of(msgspec.structs.replace(workloads(1), unwell=unwell), workloads(2))
    assert history.unwell[-1].value[-1].value == ()


def test_shares_of_a_gpu_that_are_unwell_are_the_gpu_once_also_if_it_is_gone() -> None:
    shares = [UnwellDevice(f"{gpu(n)}::{share}", health="Unhealthy") for n in (1, 9) for share in range(3)]
    history = history_of(msgspec.structs.replace(workloads(1), unwell=tuple(shares)))
    resolved = resolve(history, None, frozenset(), LookupTime(0, 10_000, float("inf")))
    assert isinstance(resolved, ResolvedPods)
    sample = msgspec.structs.replace(tick(1, None), devices=(Device(gpu(1), index=0),))
    joined, _ = attribute(
        sample, facts_of(sample.devices, None), 1, 1, ResolvedSnapshot(None, "none", resolved), {}, None
    )
    assert joined.sample.unwell == tuple(UnwellDevice(gpu(n), health="Unhealthy") for n in (1, 9))


def test_of_two_records_at_one_time_the_later_counts() -> None:
    history = history_of(workloads(1, pod("p", labels={"v": "1"})), workloads(2, pod("p", labels={"v": "2"})))

    assert labels_at(history, 0) == {"v": "2"}


def test_a_leader_whose_clock_is_behind_has_its_versions_sorted_by_time() -> None:
    history = history_of(
        workloads(9, pod("p", labels={"v": "1"}), ts_ms=10_000, epoch=1),
        workloads(1, pod("p", labels={"v": "2"}), ts_ms=9_000, epoch=2),
        workloads(2, pod("p", labels={"v": "3"}), ts_ms=11_000, epoch=2),
    )

    assert [labels_at(history, ts_ms)["v"] for ts_ms in (9_500, 10_500, 11_500)] == ["2", "1", "3"]


def test_a_dra_device_is_what_the_last_record_before_the_sample_says() -> None:
    def slices(seq: int, ts_ms: int, uuid: str) -> NodeWorkloads:
        device = DraDevice("gpu.nvidia.com", "n", "gpu-0", uuid)
        return NodeWorkloads(
            schema=1, cluster="c", node="n", epoch=1, seq=seq, ts_ms=ts_ms, pods=(), dra_devices=(device,)
        )

    history = history_of(slices(1, 0, "GPU-a"), slices(2, 10_000, "GPU-b"))

    assert full_view(history).node_at(9_999)[1] == {("gpu.nvidia.com", "n", "gpu-0"): "GPU-a"}
    assert full_view(history).node_at(10_000)[1] == {("gpu.nvidia.com", "n", "gpu-0"): "GPU-b"}


# -- which records count


@pytest.mark.parametrize(
    "record",
    [
        workloads(99, pod("other"), epoch=1, ts_ms=10**6),
        workloads(4, pod("other"), epoch=2, ts_ms=10**6),
        workloads(5, pod("other"), epoch=2, ts_ms=10**6),
    ],
    ids=["an older epoch", "an older record", "the same record"],
)
def test_what_is_not_newer_changes_nothing(record: NodeWorkloads) -> None:
    history = history_of(workloads(5, pod("p"), epoch=2))

    assert add_record(history, record, 5) is history


def test_a_new_leader_counts_from_one_again() -> None:
    history = history_of(workloads(5, epoch=1), workloads(1, pod("p"), epoch=2))

    assert uid_at(history, 0) == "uid-p"


def test_a_repeated_record_takes_no_more_memory() -> None:
    history = history_of(*(workloads(i, pod("p"), ts_ms=i * 1000, labels={"a": "b"}) for i in range(50)))

    assert len(history.node_labels) == len(history.dra) == len(history.admin) == len(history.lifetimes[NAME][0]) == 1


# -- against the slow way, and pruned

times = st.integers(0, 60).map(lambda i: i * 500)
pods = st.builds(
    pod,
    st.sampled_from(["p", "q"]),
    uid=st.sampled_from(["a", "b", "c"]),
    started=st.none() | times,
    ended=st.none() | times,
    labels=st.dictionaries(st.just("v"), st.sampled_from("12"), max_size=1),
)


def looking(labels: dict[str, str]) -> Claim:
    """A claim for administration that is another one with every other value of the node's label."""
    return Claim("c", "ns", "d", "p", f"gpu-{labels['v']}")


@st.composite
def logs(draw: st.DrawFn) -> list[NodeWorkloads]:
    """A node's records: times only rise, epochs and seqs now and then fall back, and a uid keeps its name."""
    records, ts_ms = list[NodeWorkloads](), 0
    for _ in range(draw(st.integers(1, 7))):
        ts_ms += draw(st.integers(0, 8)) * 500
        present = draw(st.lists(pods, max_size=3, unique_by=lambda p: p.uid))
        named = [
            Pod("ns", "q" if p.uid == "c" else "p", p.uid, None, p.started_ms, p.ended_ms, p.labels) for p in present
        ]
        labels = {"v": draw(st.sampled_from("12"))}
        record = workloads(draw(st.integers(1, 9)), *named, ts_ms=ts_ms, epoch=draw(st.integers(1, 2)), labels=labels)
        records.append(msgspec.structs.replace(record, admin_claims=(looking(labels),)))
    return records


def answers_at(known_then: AsOf, ts_ms: int) -> tuple[object, ...]:
    """All answers that can be asked for at a time."""
    pods = [known_then.pod_at(("ns", name), ts_ms) for name in "pq"]
    new = [known_then.new_pod_at(("ns", name), ts_ms, gone_ms) for name in "pq" for gone_ms in (None, 10_000)]
    over = [known_then.has_ended(("ns", name), ts_ms) for name in "pq"]
    labels = known_then.node_at(ts_ms)[0]
    assert known_then.node_at(ts_ms)[2] == {looking(labels)}
    return labels, [(p.uid, p.labels) if p else None for p in (*pods, *new)], over


LOGGED_MS = 1_000
"""How much later each record of a log is logged than the one before."""


def logged(records: list[NodeWorkloads]) -> KnownWorkloads:
    """The history after records that were logged one after the other."""
    history: KnownWorkloads | None = None
    for i, record in enumerate(records):
        history = add_record(history, record, i * LOGGED_MS)
    assert history is not None
    return history


@given(logs(), times, st.integers(0, 7))
def test_every_answer_is_that_of_a_search_of_all_records_that_were_logged_by_then(
    records: list[NodeWorkloads], ts_ms: int, count: int
) -> None:
    counted = model.accepted(records[: count + 1])
    names = [("ns", name) for name in "pq"]
    answers = [model.pod_at(counted, name, ts_ms) for name in names]
    answers += [
        model.pod_at(counted, name, ts_ms, new=True, missing_ms=missing_ms)
        for name in names
        for missing_ms in (None, 10_000)
    ]
    over = [model.has_ended(counted, name, ts_ms) for name in names]

    expected = model.node_labels(counted, ts_ms), [(p.uid, p.labels) if p else None for p in answers], over
    assert answers_at(AsOf(logged(records), count * LOGGED_MS), ts_ms) == expected


@given(logs(), times, times, st.integers(0, 7))
def test_pruning_never_changes_an_answer_at_or_after_its_times(
    records: list[NodeWorkloads], since_ms: int, later_ms: int, count: int
) -> None:
    all_records, since_logged_ms = logged(records), count * LOGGED_MS
    pruned = forget_before(all_records, since_ms, since_logged_ms)

    for ts_ms in {since_ms, since_ms + 1, since_ms + later_ms}:
        for logged_ms in range(since_logged_ms, 8 * LOGGED_MS, LOGGED_MS):
            assert answers_at(AsOf(pruned, logged_ms), ts_ms) == answers_at(AsOf(all_records, logged_ms), ts_ms)
    assert forget_before(pruned, since_ms, since_logged_ms) == pruned


def test_a_pod_without_a_start_begins_where_the_one_before_it_ended_though_that_one_ended_long_ago() -> None:
    both = pod("p", uid="old", started=0, ended=500), pod("p", uid="new", started=None, ended=9_500)
    history = history_of(workloads(1, *both, ts_ms=500))
    pruned = forget_before(history, 11_000, 0)

    for gone_ms, uid in ((None, "new"), (10_000, None)):
        for known_then in (full_view(history), full_view(pruned)):
            pod_found = known_then.new_pod_at(NAME, 11_000, gone_ms)
            assert (pod_found.uid if pod_found else None) == uid


def test_of_a_pod_that_ended_before_only_its_end_is_remembered_and_that_for_a_day() -> None:
    history = forget_before(history_of(workloads(1, pod("p", ended=10_000))), 10_000 + LISTED_MS + 1, 0)
    assert (history.lifetimes, history.ends) == ({}, {NAME: (Since(0, 10_000),)})
    assert REMEMBERED_MS == 24 * 3_600_000

    assert full_view(forget_before(history, 10_000 + REMEMBERED_MS, 0)).has_ended(NAME, 10_000 + REMEMBERED_MS)
    assert forget_before(history, 10_000 + REMEMBERED_MS + 1, 0).ends == {}


def test_a_pod_that_was_only_missing_is_forgotten_with_its_name() -> None:
    history = forget_before(history_of(workloads(1, pod("p")), workloads(2, ts_ms=10_000)), 10_000 + LISTED_MS + 1, 1)

    assert (history.lifetimes, history.ends) == ({}, {})


def test_a_pod_whose_end_is_reported_again_and_again_is_remembered_once() -> None:
    history = history_of(workloads(1, pod("p", ended=10_000)))
    for seq in range(2, 10):
        repeated = workloads(seq, pod("p", ended=10_000), ts_ms=seq * 60_000)
        history = forget_before(add_record(forget_before(history, seq * 60_000, 0), repeated, 0), seq * 60_000, 0)

    assert history.ends == {NAME: (Since(0, 10_000),)}


# -- pods that were over


@pytest.mark.parametrize(
    ("ts_ms", "over"),
    [
        (0, False),
        (10_000 + LISTED_MS, False),
        (10_000 + LISTED_MS + 1, True),
        (10_000 + REMEMBERED_MS, True),
        (10_000 + REMEMBERED_MS + 1, False),
    ],
)
def test_a_pod_is_over_from_ten_seconds_after_its_end_for_a_day(ts_ms: int, over: bool) -> None:
    assert full_view(history_of(workloads(1, pod("p", ended=10_000)))).has_ended(NAME, ts_ms) is over


@pytest.mark.parametrize(
    ("ts_ms", "over"),
    [(40_000, True), (47_999, True), (48_000, False), (60_000, False), (70_000, False), (70_001, True)],
)
def test_a_pod_is_not_over_while_the_next_of_its_name_lives_or_has_just_ended(ts_ms: int, over: bool) -> None:
    following = pod("p", uid="next", started=50_000, ended=60_000)
    history = history_of(workloads(1, pod("p", ended=10_000), following))

    assert full_view(history).has_ended(NAME, ts_ms) is over
    assert full_view(forget_before(history, 40_000, 0)).has_ended(NAME, ts_ms) is over


@pytest.mark.parametrize("ts_ms", [50_000, 99_000, 200_000])
@pytest.mark.parametrize("ended_ms", [10_000, 50_000])
def test_a_pod_that_never_started_and_is_reported_again_after_its_end_ends_no_pod_after_it(
    ts_ms: int, ended_ms: int
) -> None:
    young = pod("p", uid="young", started=50_000)
    again = workloads(2, young, pod("p", uid="old", started=None, ended=ended_ms), ts_ms=100_000)

    assert uid_at(history_of(workloads(1, young, ts_ms=50_000), again), ts_ms) == "young"


@given(st.lists(st.integers(0, 20), min_size=1, unique=True).map(sorted), st.integers(-1, 21))
def test_the_version_at_a_time_is_the_last_one_that_began_by_then(begins: list[int], ts_ms: int) -> None:
    versions = tuple([Since(begin, begin) for begin in begins])

    assert version_at(versions, ts_ms) == max([begin for begin in begins if begin <= ts_ms], default=begins[0])


def test_what_ended_longer_ago_than_samples_are_kept_is_forgotten_without_a_sample() -> None:
    hour_ms = 3_600_000
    history = add_record(None, workloads(1, pod("old", started=0, ended=1), pod("young", started=0), ts_ms=10), 10)
    for hour in range(1, 30):
        history = add_record(
            history, workloads(1 + hour, pod("young", started=0), ts_ms=hour * hour_ms), hour * hour_ms
        )

    assert set(history.lifetimes) == {("ns", "young")}


def test_what_pods_of_two_nodes_share_is_in_memory_once() -> None:
    owner = Owner("batch/v1", "Job", "j", "job-uid")
    encoded = msgspec.json.encode(
        workloads(1, msgspec.structs.replace(pod("p", owners=(owner,)), namespace_labels={"team": "a"}))
    )
    first_pod, other = [
        full_view(history_of(msgspec.json.decode(encoded, type=NodeWorkloads))).pod_at(NAME, 0) for _ in range(2)
    ]

    assert first_pod is not None
    assert other is not None
    assert first_pod == other
    assert first_pod.namespace is other.namespace
    assert first_pod.namespace_labels is other.namespace_labels
    assert first_pod.owners is other.owners


def test_a_name_has_the_namespace_of_its_pod_and_no_copy() -> None:
    record = msgspec.json.decode(msgspec.json.encode(workloads(1, pod("p"))), type=NodeWorkloads)
    history = history_of(record)
    known = full_view(history).pod_at(NAME, 0)

    ((namespace, _),) = history.lifetimes
    assert known is not None
    assert namespace is known.namespace


def test_if_nothing_is_forgotten_all_answers_stay_valid() -> None:
    history = history_of(workloads(1, pod("p"), pod("q", ended=10_000)))
    assert forget_before(history, 0, 0) is history
    assert forget_before(history, 60_000, 60_000) is not history


def test_the_interpreter_does_not_keep_the_texts_of_a_pod() -> None:
    def text() -> str:
        return "-".join(["job", "4711"])

    history = history_of(workloads(1, pod("p", labels={"job-name": text()})))
    assert labels_at(history, 1)["job-name"] is not sys.intern(text())
