"""Each gap has a cause, or it is said that the cause is not known and what to look at."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client.samples import Sample

from delivery.kafka_admin import TopicDescription
from delivery.ledger import Partition
from delivery.topic_admin import Mismatch
from gpustream.doctor import checks, command
from gpustream.doctor.brokers import unreadable_reason
from gpustream.doctor.components import components
from gpustream.doctor.evidence import Evidence, NodeName
from gpustream.doctor.readers import ATTRIBUTION
from gpustream.doctor.situation import (
    CheckResult,
    Finding,
    Group,
    Kafka,
    Lag,
    OwnMetrics,
    Prometheus,
    Situation,
)
from tests.gpustream.doctor.records import (
    NOW_MS,
    RUN,
    SINCE_MS,
    Record,
    attributed,
    letter,
    receipt,
    sample,
    snapshot,
    workloads,
)
from topics import TOPICS

LAST = 600
NOTHING: Mapping[Partition, int] = MappingProxyType({})
READING = Group(ATTRIBUTION, "Stable", 1, ())
KAFKA = Kafka("k:9092", "User:doctor", topics={name: TopicDescription(1) for name in TOPICS}, brokers={1: "k:9092"})


def healthy(nodes: Iterable[str] = ("n",)) -> list[Record]:
    """What the topics hold of ten minutes in which all was well: a tick every ten seconds."""
    records: list[Record] = [workloads()]
    for node in nodes:
        records += [snapshot(node=node)]
        records += [attributed(seq, node=node) for seq in range(1, LAST // 10 + 1)]
        records += [sample(seq, node=node) for seq in range(1, LAST // 10 + 1)]
    return records


def see(
    records: Iterable[Record],
    finished: int = 1000,
    begins: Mapping[Partition, int] = NOTHING,
    hiding: Iterable[Partition] = (),
    **fields: Any,
) -> Situation:
    """What a doctor sees who looks when the last of these ticks has just come."""
    evidence = Evidence({0: finished}, log_starts=begins, hiding=hiding)
    for record in records:
        evidence.add(record)
    last = max((node.last_logged_ms for node in evidence.nodes.values()), default=NOW_MS) or NOW_MS
    return Situation(SINCE_MS, last, KAFKA, evidence, groups=[READING])._replace(**fields)


def findings_of(situation: Situation) -> dict[str, list[Finding]]:
    """The findings of the checks that found something."""
    return {name: list(check.findings) for name, check in checks.run(situation).items() if check.findings}


def only_finding(situation: Situation) -> Finding:
    """The only finding."""
    ((finding,),) = findings_of(situation).values()
    return finding


def test_nothing_is_found_where_all_is_well_and_a_fleet_is_not_a_line_for_each_node() -> None:
    situation = see(healthy(f"n{i}" for i in range(50)))
    lines = list(command.text(situation, checks.run(situation)))

    assert findings_of(situation) == {}
    assert lines[-1].startswith("all is well in ")
    assert len(lines) < 16
    assert "50 nodes sent 3000 ticks in 50 runs, 0 missing" in lines[4]


def test_topics_that_are_not_as_they_must_be_are_all_that_is_said() -> None:
    missing = Mismatch("gpu.samples", "the topic", "there", "missing")
    kafka = Kafka("k", "User:x", topics={"gpu.attributed": TopicDescription(2)}, mismatches=[missing])
    situation = Situation(SINCE_MS, NOW_MS, kafka, unread="there is no gpu.samples")

    assert findings_of(situation).keys() == {"topics"}
    assert "run `gpustream topics create`" in only_finding(situation).next


def test_why_records_are_not_looked_at_is_said_with_the_prefix_of_the_topics() -> None:
    kafka = KAFKA._replace(prefix="prod.", topics={"a": TopicDescription(2, allowed=frozenset())})

    assert unreadable_reason(kafka, ["b"]) == "there is no prod.b"
    assert unreadable_reason(kafka, ["a"]) == "User:doctor may not read prod.a"


def without(records: Iterable[Record], *seqs: int) -> list[Record]:
    """The records without these ticks."""
    lost = {record.value for seq in seqs for record in (sample(seq), attributed(seq))}
    return [record for record in records if record.value not in lost]


def test_a_gap_after_which_ticks_were_old_is_the_buffers_if_that_holds_no_more_and_else_kafkas() -> None:
    records = [
        record._replace(timestamp=record.timestamp + 90_000) if record == sample(20) else record
        for record in without(healthy(), *range(5, 20))
    ]

    finding = only_finding(see(records))
    assert finding.finding == "c/n: 15 ticks missing in gpu.samples"
    assert finding.cause.startswith("the node's buffer dropped them, if it holds no more than the 1m 30s that")
    assert "Kafka refused them, or has lost them" in finding.cause
    assert "gpustream_producer_ticks_dropped_total" in finding.next
    assert f"run {RUN}, seq 5-19;" in finding.evidence


def test_a_gap_while_the_node_could_send_has_no_known_cause_and_where_to_look() -> None:
    dropped = Sample("gpustream_producer_ticks_dropped_total", {"reason": "too_large"}, 2)
    situation = see(without(healthy(), 7, 9), components=[OwnMetrics("http://n", [dropped])])

    (finding,) = findings_of(situation)["sent"]
    assert finding.cause.startswith("not known")
    assert "seq 7, 9; 58 others came; producers that were asked have dropped 2 (too_large)" in finding.evidence
    assert "gpustream_producer_ticks_dropped_total" in finding.next


@pytest.mark.parametrize(("began_ms", "gap"), [(SINCE_MS, [(1, 4)]), (RUN, [])])
def test_what_is_missing_before_the_first_tick_counts_only_for_a_run_that_began_in_the_time(
    began_ms: int, gap: list[tuple[int, int]]
) -> None:
    situation = see([sample(seq, run_id=began_ms) for seq in (5, 6)])
    assert situation.evidence is not None
    run = situation.evidence.nodes[NodeName("c", "n")].runs[began_ms]

    assert checks.gaps_of(began_ms, run, SINCE_MS) == gap


def test_a_node_that_went_silent_is_named_unless_the_cluster_removed_it() -> None:
    ended = (
        [snapshot(node="gone")]
        + [sample(seq, node="gone") for seq in range(1, 3)]
        + [attributed(seq, node="gone") for seq in range(1, 3)]
    )
    ended.sort(key=lambda record: record.topic)
    removed = workloads(removed=True)._replace(value=b'{"cluster": "c", "node": "gone", "removed": true}')

    assert only_finding(see([*ended, *healthy()])).finding == "c/gone: no tick since 58s ago"
    assert findings_of(see([*ended, removed, *healthy()])) == {}


def test_a_node_of_batch_jobs_beside_one_of_pods_needs_no_kubelet() -> None:
    seqs = range(1, LAST // 10 + 1)
    slurm = [attributed(seq, node="slurm") for seq in seqs] + [sample(seq, node="slurm", named=None) for seq in seqs]
    assert findings_of(see([*healthy(), *slurm])) == {}


def test_gpus_that_pods_have_by_ids_of_no_known_form_are_found_and_network_cards_are_none() -> None:
    def listed(resource: str, *ids: str) -> Situation:
        container = {"namespace": "ml", "pod": "a", "container": "m", "resource": resource, "device_ids": ids}
        return see([*healthy(), snapshot(2, containers=[container])])

    assert findings_of(listed("nvidia.com/gpu", "nvidia0")) == {}
    assert findings_of(listed("nvidia.com/hostdev", "0000:3b:00.0")) == {}
    found = only_finding(listed("nvidia.com/gpu", "card-0", "card-1"))
    assert found.finding == "c/n: nobody seems to hold the GPUs of 2 device ids of the kubelet"
    assert "'card-0'" in found.evidence
    assert "ml/a has it as nvidia.com/gpu" in found.evidence


@pytest.mark.parametrize("driver", ["gpu.nvidia.com", "compute-domain.nvidia.com"])
def test_claims_for_gpus_of_which_no_slice_says_which_they_are_are_found(driver: str) -> None:
    claim = {"claim": "c", "namespace": "ml", "driver": driver, "pool": "n", "device": "gpu-0"}
    holding = snapshot(2, containers=[{"namespace": "ml", "pod": "a", "container": "m", "claims": [claim]}])
    device = {"driver": driver, "pool": "n", "device": "gpu-1", "uuid": "GPU-1"}  # MIG devices of claims have no UUID

    assert findings_of(see([*healthy(), holding, workloads(dra_devices=[device])])) == {}
    found = findings_of(see([*healthy(), holding]))
    if driver == "compute-domain.nvidia.com":
        assert found == {}
    else:
        ((finding,),) = found.values()
        assert finding.finding == "c/n: nobody seems to hold the GPUs that pods have by resource claims"
        assert "gpu-0" in finding.evidence


def test_a_node_that_is_seldom_read_is_not_silent_between_its_ticks() -> None:
    seldom = [attributed(1, node="seldom"), sample(1, node="seldom", interval_ms=60_000), snapshot(node="seldom")]
    seldom.sort(key=lambda record: record.topic)
    assert findings_of(see([*seldom, *healthy()])) == {}


def test_a_fleet_that_went_silent_is_one_finding() -> None:
    situation = see(healthy(f"n{i}" for i in range(5)))

    finding = only_finding(situation._replace(now_ms=situation.now_ms + 120_000))
    assert finding.finding == "no node has sent a tick for 2m"
    assert "this machine's clock is ahead of the brokers'" in finding.cause, "it looks the same"


def test_two_producers_of_one_name_are_found() -> None:
    of_two_runs = [record for seq in range(1, 6) for record in (sample(seq), sample(seq, run_id=RUN + 7))]
    listed = [snapshot(), snapshot(run_id=RUN + 7), workloads()]
    outputs = [record for seq in range(1, 6) for record in (attributed(seq), attributed(seq, run_id=RUN + 7))]

    assert only_finding(see([*listed, *outputs, *of_two_runs])).finding == "c/n: two producers send under this name"

    late = [attributed(seq, "late", run_id=RUN + 7) for seq in range(1, 6)]  # each run's snapshot hides the other's
    also_late = see([*listed, *outputs[::2], *late, *of_two_runs])
    assert only_finding(also_late).finding == "c/n: two producers send under this name"


def test_gpus_that_two_nodes_send_at_a_time_are_found_and_those_that_moved_are_not() -> None:
    gpus = [{"uuid": f"GPU-{number}", "state": "ok"} for number in range(7)]
    lost = [{**gpu, "state": "lost"} for gpu in gpus]

    def sent_by(node: str, seqs: range, devices: list[dict[str, str]]) -> list[Record]:
        ticks = [sample(seq, node=node, devices=devices) for seq in seqs]
        return [snapshot(node=node), *[attributed(seq, node=node) for seq in seqs], *ticks]

    twice = [workloads(), *sent_by("gpu-1", range(1, 601), gpus), *sent_by("ip-10-0-0-1", range(1, 601), gpus)]
    finding = only_finding(see(twice))
    assert finding.finding == "c/gpu-1 and c/ip-10-0-0-1 send the same 7 GPUs: sums over nodes count them twice"
    assert finding.evidence == "both send GPU-0, GPU-1, GPU-2, GPU-3, GPU-4, and 2 more"

    moved = [*sent_by("a", range(1, 300), gpus), *sent_by("b", range(400, 601), gpus)]
    lost_here = [*sent_by("a", range(1, 601), lost), *sent_by("b", range(1, 601), gpus)]
    for records in (moved, lost_here):
        assert not [found for found in findings_of(see(records)).get("sent", ()) if "the same" in found.finding]


def test_a_tick_that_attribution_has_passed_without_a_record_is_lost() -> None:
    records = [record for record in healthy() if record != attributed(7)]

    assert "1 tick lost" in only_finding(see(records)).finding
    assert only_finding(see(records)).cause == "not known"


def test_late_ticks_have_the_cause_that_the_snapshots_show() -> None:
    records = [attributed(3, "late") if record == attributed(3) else record for record in healthy()]
    unsent = [record for record in records if record != snapshot()]

    assert "came after the tick had waited" in only_finding(see(records)).cause
    assert only_finding(see(unsent)).cause == "the snapshots that they name are not in gpu.allocations"


def test_what_waits_is_found_when_it_is_old_and_the_cause_is_who_reads() -> None:
    records = [record for record in healthy() if record.topic != "gpu.attributed"]
    nobody = READING._replace(state="Empty", members=0)

    assert only_finding(see(records, 0)).cause.startswith("it has not read that far")
    assert only_finding(see(records, 0, groups=[nobody])).cause == "nobody reads: the group has no member"
    assert only_finding(see(records, 0, groups=[])).cause == "no worker has ever run here"
    assert findings_of(see([snapshot(), sample(1)], 0)) == {}


def test_dead_letters_are_found_by_reason_until_they_are_sent_again() -> None:
    dead = letter(sample(7), error="undecodable: Object missing required field `seq`")
    records = [dead, *(record for record in healthy() if record != attributed(7))]

    finding = only_finding(see(records))
    assert finding.finding == "attribution dead-lettered 1 record of gpu.samples: undecodable"
    assert finding.cause == "undecodable: Object missing required field `seq`"
    assert "dead-letters show 0:0" in finding.next
    assert "dead-letters resubmit 0:0 --yes" in finding.next
    assert findings_of(see([dead, receipt(dead), *healthy()])) == {}


def behind(at_ms: int, members: int = 1) -> Group:
    return Group("gpustream-sink-remote-write", "Stable", members, (Lag("gpu.attributed", 5, (0,), at_ms),))


@pytest.mark.parametrize(("name", "ms"), [("gpustream-usage", 75_000), ("gpustream-sink-parquet", 60_000)])
def test_a_group_that_commits_once_a_minute_is_behind_only_after_that(name: str, ms: int) -> None:
    situation, usage = see(healthy()), Group("gpustream-usage", "Stable", 1, ())

    def seen(age_ms: int) -> Situation:
        return situation._replace(groups=[READING, usage, behind(situation.now_ms - age_ms)._replace(name=name)])

    assert findings_of(seen(ms)) == {}
    assert only_finding(seen(ms + 31_000)).finding.startswith(name)


@pytest.mark.parametrize(
    ("sink", "stream"),
    [("alertmanager", "alerts"), ("webhook", "alerts"), ("reclaim", "alerts"), ("parquet", "usage")],
)
def test_a_sink_whose_stream_has_never_run_has_nothing_to_read(sink: str, stream: str) -> None:
    situation = see(healthy())._replace(groups=[READING, Group(f"gpustream-sink-{sink}", "Stable", 1, ())])
    assert only_finding(situation).finding == (
        f"gpustream-sink-{sink} has nothing to read: gpustream-{stream} has never run"
    )


def test_a_sink_that_lags_is_found_when_what_it_lacks_is_old_and_its_receiver_is_named() -> None:
    failing = Sample("gpustream_remote_write_receiver_failing", {}, 1)
    situation = see(healthy())
    old = situation.now_ms - 60_000

    assert findings_of(situation._replace(groups=[READING, behind(situation.now_ms - 1000)])) == {}
    assert only_finding(situation._replace(groups=[READING, behind(old)])).cause.startswith("it has not read that far")
    assert only_finding(situation._replace(groups=[READING, behind(old, 0)])).cause.startswith("nobody reads")
    failing_sink = [OwnMetrics("http://sink:9401", [failing])]
    assert (
        only_finding(situation._replace(groups=[READING, behind(old)], components=failing_sink)).cause
        == "the receiver does not take it"
    )


def test_what_sinks_dropped_is_found_with_the_meaning_of_the_reason() -> None:
    series = [
        Sample("process_start_time_seconds", {}, NOW_MS / 1000 - 3600),
        Sample("gpustream_remote_write_records_delivered_total", {}, 90),
        Sample("gpustream_remote_write_records_dropped_total", {"reason": "out_of_order"}, 10),
        Sample("gpustream_remote_write_records_dropped_total", {"reason": "too_old"}, 0),
    ]
    situation = see(healthy(), now_ms=NOW_MS - 590_000 + 50_000, components=[OwnMetrics("http://sink", series)])

    assert only_finding(situation).finding == "http://sink: 10 records dropped: out_of_order"
    assert "ticks came after newer ones" in only_finding(situation).cause
    assert components(situation).summary == "remote_write: 90 delivered, 10 dropped"


def test_one_record_that_was_dropped_is_no_plural() -> None:
    series = [Sample("gpustream_remote_write_records_dropped_total", {"reason": "too_old"}, 1)]
    situation = see(healthy(), components=[OwnMetrics("http://sink", series)])

    assert only_finding(situation).finding == "http://sink: 1 record dropped: too_old"


def test_a_component_that_counts_no_records_was_asked_all_the_same() -> None:
    assert components(see(healthy(), components=[OwnMetrics("http://node")])).summary == "1 component asked"


def test_components_that_are_away_or_not_ready_are_found() -> None:
    own_metrics = [OwnMetrics("http://a", error="refused"), OwnMetrics("http://b", not_ready="no topic")]

    assert [finding.cause for finding in findings_of(see(healthy(), components=own_metrics))["components"]] == [
        "refused",
        "no topic",
    ]


def test_of_series_that_name_no_node_nothing_is_said_of_nodes() -> None:
    """As with --labels pod-devices."""
    situation = see(healthy(["n", "m"]))
    nameless = Prometheus("http://p", {NodeName("", ""): situation.now_ms}, broken_rules={"r": "bad"})

    finding = only_finding(situation._replace(prometheus=nameless))
    assert finding.finding == "http://p: the rule r fails"


def test_a_node_whose_newest_tick_prometheus_lacks_is_found() -> None:
    situation = see(healthy(["n", "m"]))
    newest_ms = {NodeName("c", "n"): situation.now_ms}

    finding = only_finding(situation._replace(prometheus=Prometheus("http://p", newest_ms)))
    assert finding.finding == "c/m: Prometheus does not have its newest samples"
    assert only_finding(situation._replace(prometheus=Prometheus("http://p", {}, "refused"))).cause == "refused"


@pytest.mark.parametrize(("interval_ms", "allowed_s"), [(1000, 60), (30_000, 90), (600_000, 240)])
def test_what_has_ended_in_prometheus_since_no_tick_is_attributed_is_not_missed_there(
    interval_ms: int, allowed_s: int
) -> None:
    records = [workloads(), snapshot(), attributed(60), sample(60, interval_ms=interval_ms)]
    ticks_ms = see(records).now_ms

    def seen(age_s: int) -> Situation:
        return see(records, now_ms=ticks_ms + age_s * 1000, prometheus=Prometheus("http://p", {}))

    assert findings_of(seen(allowed_s - 1))["prometheus"]
    assert "prometheus" not in findings_of(seen(allowed_s))


@pytest.mark.parametrize(("sink", "allowed_s"), [("remote-write", 30), ("scrape", 90)])
def test_prometheus_may_have_older_samples_of_what_it_scrapes_once_a_minute(sink: str, allowed_s: int) -> None:
    situation = see(healthy())
    taken = {Partition("gpu.attributed", 0): 1}
    groups = [READING, Group(f"gpustream-sink-{sink}", "Stable", 1, (), taken)]

    def seen(age_s: int) -> Situation:
        newest_ms = {NodeName("c", "n"): situation.now_ms - age_s * 1000}
        return situation._replace(groups=groups, prometheus=Prometheus("http://p", newest_ms))

    assert findings_of(seen(allowed_s)) == {}
    assert only_finding(seen(allowed_s + 1)).finding == "c/n: Prometheus does not have its newest samples"


def test_many_findings_are_a_screen_of_text_and_all_of_them_in_json() -> None:
    records = [
        make(node=f"n{node}") for node in range(100) for make in (snapshot, partial(sample, 1), partial(sample, 3))
    ]
    situation = see(records, 0)
    checked = checks.run(situation)
    lines = list(command.text(situation, checked))
    report = command.report(situation, checked)

    assert len(lines) < 160
    assert "       and 80 more: --format json has them all" in lines
    assert len(next(row for row in report["checks"] if row["check"] == "sent")["findings"]) == 100
    assert report["ok"] is False


def test_what_anybody_may_have_written_can_not_move_the_cursor() -> None:
    wrong = Finding("a\x1b[2Jb\n", "c\rd", "e", "f")
    text = "\n".join(command.text(Situation(0, 1), {"x": CheckResult("s\x07", [wrong])}))

    assert all(sign.isprintable() or sign == "\n" for sign in text)


def test_the_values_of_a_record_that_was_dropped_are_not_found_again() -> None:
    series = [
        Sample("gpustream_remote_write_records_dropped_total", {"reason": "too_old"}, 2),
        Sample("gpustream_remote_write_values_refused_total", {"reason": "too_old"}, 80),
        Sample("gpustream_remote_write_values_refused_total", {"reason": "duplicate"}, 3),
    ]
    situation = see(healthy(), components=[OwnMetrics("http://sink", series)])

    assert [finding.finding for finding in findings_of(situation)["components"]] == [
        "http://sink: 2 records dropped: too_old",
        "http://sink: 3 values refused: duplicate",
    ]


def test_nobody_is_told_to_send_a_letter_again_that_can_not_be() -> None:
    finding = only_finding(see([letter(attributed(7), error="too_old: of series a"), *healthy()]))

    assert finding.finding == "attribution dead-lettered 1 record of gpu.attributed: too_old"
    assert "resubmit" not in finding.next


def test_a_long_error_is_cut_in_the_text() -> None:
    wrong = Finding("f", "too_old: " + "x" * 1000, "e", "n")
    lines = list(command.text(Situation(0, 1), {"x": CheckResult("s", [wrong])}))

    assert "".join(lines).count("x") < 450
    assert "(--format json has all of it)" in " ".join(" ".join(lines).split())


def test_an_option_is_never_cut_at_the_end_of_a_line() -> None:
    option = "--web.enable-remote-write-receiver"
    for words in range(40):
        wrong = Finding(f"{'word ' * words}{option}", *[f"{'word ' * words}{option}"] * 3)
        lines = list(command.text(Situation(0, 1), {"x": CheckResult("s", [wrong])}))
        assert sum(option in line for line in lines) == 4
