"""Pipelines that are broken in the ways in which operators break them: each is found, with its cause and what shows it.

The evidence is made. Where a real server has to show that the evidence comes so, ``tests/real/test_doctor.py`` does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from prometheus_client.samples import Sample

from delivery.kafka_admin import Acl, Disk, TopicDescription
from delivery.ledger import Partition
from delivery.topic_admin import HARMLESS, mismatches
from gpustream.doctor import brokers, checks, command
from gpustream.doctor.evidence import NodeName
from gpustream.doctor.situation import Finding, Group, Lag, OpenTransaction, OwnMetrics, Prometheus, Situation
from tests.gpustream.doctor.records import SINCE_MS, Record, attributed, sample, snapshot, workloads
from tests.gpustream.doctor.test_checks import KAFKA, READING, findings_of, healthy, only_finding, see
from topics.topic import load_topics

MINUTE_MS = 60_000


def clock_of(node: str, by_ms: int) -> list[Record]:
    """A healthy node whose clock is so much ahead."""
    records = [record for record in healthy([node]) if record.topic not in ("gpu.workloads", "gpu.samples")]
    at_ms = SINCE_MS + by_ms
    return records + [sample(seq, node=node, at_ms=at_ms + seq * 1000, delay_ms=-by_ms) for seq in range(1, 61)]


def without_kubelet(node: str) -> list[Record]:
    """A healthy node that has no kubelet."""
    seqs = range(1, 61)
    return [attributed(seq, "none", node=node) for seq in seqs] + [sample(seq, node=node, named=None) for seq in seqs]


def silent_kubelet(not_ready: str = "") -> OwnMetrics:
    """A node producer whose kubelet has not answered for long."""
    return OwnMetrics("http://n", [Sample("gpustream_node_kubelet_age_seconds", {}, 400.0)], not_ready)


def lagging(
    finished: int, grew: int, members: int = 1, name: str = "gpustream-sink-remote-write", *, partition: int = 3
) -> Situation:
    """A group that is behind, and what it did while it was watched."""
    situation = see(healthy())
    lag = Lag("gpu.attributed", 500, (partition,), situation.now_ms - 120_000, finished, grew, 3.0)
    return situation._replace(groups=[READING, Group(name, "Stable", members, (lag,))])


def hanging(finished: int, members: int = 1) -> Situation:
    """A sink that is behind and does not answer, and a Prometheus that lacks what it has not delivered."""
    situation = lagging(finished, 30, members)
    committed = {Partition("gpu.attributed", 3): 1}
    groups = [READING, (situation.groups or [])[1]._replace(committed=committed)]
    silent = OwnMetrics("http://sink:9401", error="no answer within 10s")
    old = dict.fromkeys((NodeName("c", f"n{number}") for number in range(3)), 0)
    return situation._replace(groups=groups, components=[silent], prometheus=Prometheus("http://prometheus", old))


def emptied(topic: str, *groups: Group, to: int = 61, newer: Iterable[Record] = ()) -> Situation:
    """A pipeline of which somebody has deleted all records of a topic, before others came."""
    records = [*healthy(), *newer]
    ours = [record for record in records if record.topic != topic or record in newer]
    ours.sort(key=lambda record: record.topic == "gpu.samples")
    return see(ours, begins={Partition(topic, 0): to}, groups=[READING, *groups])


def behind_a_transaction(topic: str) -> Situation:
    """A pipeline of which nobody can read the last two minutes of a topic: what is there behind a transaction."""
    tp = Partition(topic, 0)
    attributed_too = [record for record in healthy() if topic == "gpu.samples" or record.topic != "gpu.attributed"]
    situation = see(attributed_too, hiding=[tp])
    now_ms = situation.now_ms + (2 * MINUTE_MS if topic == "gpu.samples" else 0)
    hanging = {tp: OpenTransaction(12, 345, now_ms - 2 * MINUTE_MS)}
    return situation._replace(now_ms=now_ms, open_transactions=hanging)


def hidden(topic: str, situation: Situation) -> Situation:
    """The same, while a transaction is open in a topic."""
    hanging = {Partition(topic, 0): OpenTransaction(12, 345, situation.now_ms - 2 * MINUTE_MS)}
    return situation._replace(open_transactions=hanging)


def left_behind(name: str, topic: str = "gpu.attributed", committed: int = 20) -> Group:
    """A group that had not read all when the log was cut at offset 61."""
    partition = Partition(topic, 0)
    return Group(name, "Stable", 1, (), {partition: committed}, {partition: 61})


def sink_counts(name: str, **labels: str) -> Situation:
    """A sink that counts three of something."""
    return see(healthy(), components=[OwnMetrics("http://sink", [Sample(f"gpustream_{name}", labels, 3.0)])])


def remote_write_says(error: str) -> Situation:
    return see(
        healthy(), components=[OwnMetrics("http://sink:9401", not_ready=f"the receiver does not accept: {error}")]
    )


def topic_with(name: str, partitions: int = 1, **settings: str) -> Situation:
    """A Kafka whose topic has other settings than the contract's."""
    topics = load_topics()
    have = {name: TopicDescription(1, dict(topic.settings())) for name, topic in topics.items()}
    have[name] = TopicDescription(
        partitions, dict(topics[name].settings()) | {key.replace("_", "."): value for key, value in settings.items()}
    )
    wrong = [mismatch for mismatch in mismatches(topics.values(), have) if mismatch.subject not in HARMLESS]
    return see(healthy(), kafka=KAFKA._replace(topics=have, mismatches=wrong))


def acls(*, without: str = "", denied: str = "") -> list[Acl]:
    """What attribution needs, without one topic, or with one denied."""
    needed = brokers.COMPONENTS["stream attribution"]
    allowed = [Acl("User:a", row.operation, row.resource, row.name, True) for row in needed if row.name != without]
    return allowed + [
        Acl("User:a", row.operation, row.resource, row.name, False) for row in needed if row.name == denied
    ]


def unlisted(at_ms: int) -> Record:
    """The workloads, logged so long before the end."""
    return workloads()._replace(timestamp=SINCE_MS + MINUTE_MS - at_ms)


BROKEN: dict[str, tuple[Callable[[], Situation], str]] = {
    "gpu.attributed was emptied before sinks read it": (
        lambda: emptied("gpu.attributed", left_behind("gpustream-sink-remote-write"), left_behind("gpustream-alerts")),
        "records of gpu.attributed were deleted before they were read: 41 that gpustream-sink-remote-write lacks,"
        " 41 that gpustream-alerts lacks | retention.ms | kafka-delete-records"
        " | partition 0 begins at offset 61, gpustream-alerts has finished up to 20 | GpustreamRecordsExpired",
    ),
    "gpu.attributed was emptied, and everybody goes on": (
        lambda: emptied("gpu.attributed"),
        "gpu.attributed no longer has 60 ticks that gpustream-attribution has finished | made again"
        " | partition 0 begins at offset 61 | records_expired_total",
    ),
    "gpu.attributed was made again": (
        lambda: emptied("gpu.attributed", to=0),
        "gpu.attributed no longer has 60 ticks | made again | partition 0 begins at offset 0",
    ),
    "a producer of transactions hangs in gpu.attributed": (
        lambda: behind_a_transaction("gpu.attributed"),
        "gpu.attributed: 1 partition can't be read to the end: a transaction is open | its producer hangs"
        " | partition 0 from offset 12 on, which was logged 2m ago: 345 records"
        " | abort --topic gpu.attributed --partition 0 --start-offset 12",
    ),
    "a producer of transactions hangs in gpu.samples": (
        lambda: behind_a_transaction("gpu.samples"),
        "gpu.samples: 1 partition can't be read to the end | describe-producers --topic gpu.samples --partition 0",
    ),
    "a producer of transactions hangs in gpu.allocations, and ticks were late": (
        lambda: hidden("gpu.allocations", see([*healthy(), attributed(61, "late"), sample(61, named=2)])),
        "gpu.allocations: 1 partition can't be read to the end",
    ),
    "a producer of transactions hangs in gpu.allocations, and ticks wait": (
        lambda: hidden("gpu.allocations", see([*healthy(), sample(61, named=2)], finished=61)),
        "gpu.allocations: 1 partition can't be read to the end",
    ),
    "a producer of transactions hangs in gpu.workloads, and a cluster is new": (
        lambda: hidden("gpu.workloads", see([workloads("other"), *healthy()[1:]])),
        "gpu.workloads: 1 partition can't be read to the end",
    ),
    "a producer of transactions hangs in gpu.workloads, and a node is new": (
        lambda: hidden("gpu.workloads", see([*healthy(), *map(_holding, healthy(["m"])[1:])])),
        "gpu.workloads: 1 partition can't be read to the end",
    ),
    "a producer of transactions hangs in gpu.workloads for long": (
        lambda: hidden("gpu.workloads", see([unlisted(8 * MINUTE_MS), *healthy()[1:]])),
        "gpu.workloads: 1 partition can't be read to the end",
    ),
    "a producer of transactions hangs in gpu.dead-letters": (
        lambda: behind_a_transaction("gpu.dead-letters"),
        "gpu.dead-letters: 1 partition can't be read to the end | `dead-letters resubmit`",
    ),
    "gpu.samples was emptied before it was attributed": (
        lambda: see(
            healthy(),
            groups=[left_behind("gpustream-attribution", "gpu.samples")],
        ),
        "records of gpu.samples were deleted before they were read: 41 that gpustream-attribution lacks",
    ),
    "gpu.alerts was emptied before a webhook read it": (
        lambda: see(
            healthy(),
            groups=[
                READING,
                Group("gpustream-alerts", "Stable", 1, ()),
                left_behind("gpustream-sink-webhook", "gpu.alerts"),
            ],
        ),
        "records of gpu.alerts were deleted before they were read: 41 that gpustream-sink-webhook lacks",
    ),
    "a producer drops what the broker refuses": (
        lambda: sink_counts("producer_ticks_dropped_total", reason="refused"),
        "http://sink: 3 ticks dropped: refused | max.message.bytes | GpustreamTicksDropped",
    ),
    "a producer drops snapshots": (
        lambda: sink_counts("producer_snapshots_dropped_total", reason="refused"),
        "http://sink: 3 snapshots of the kubelet's pods dropped: refused | an ACL | GpustreamLateAttribution",
    ),
    "a sink counts records that expired": (
        lambda: sink_counts("remote_write_records_expired_total"),
        "http://sink: 3 records deleted before they were read | somebody deleted them | GpustreamRecordsExpired",
    ),
    "a partitioner of another kind writes": (
        lambda: sink_counts("attribution_misplaced_nodes_total"),
        "http://sink: nodes in a partition that is not theirs: 3 | murmur2",
    ),
    "series collide": (
        lambda: sink_counts("scrape_samples_withheld_total", reason="collision"),
        "http://sink: 3 samples withheld: collision | --relabel | GpustreamSeriesCollide",
    ),
    "the tenant has too many series": (
        lambda: sink_counts("remote_write_values_left_out_total", reason="series_limit"),
        "http://sink: 3 values not sent: series_limit | as many series as it may have | GpustreamSeriesLeftOut",
    ),
    "the receiver refuses the alerts' series": (
        lambda: sink_counts("remote_write_alert_samples_refused_total", reason="series_limit"),
        "http://sink: 3 samples of alerts refused: series_limit | remote_write_alert_samples_refused_total",
    ),
    "Alertmanager refuses alerts": (
        lambda: sink_counts("alertmanager_refused_total", receiver="am:9093"),
        "http://sink: 3 alerts refused | takes no alert as this one",
    ),
    "rows of --counters are not served": (
        lambda: sink_counts("counters_rows_left_out", sink="scrape"),
        "http://sink: 3 rows of the file of --counters not served",
    ),
    "the file of --counters is broken": (
        lambda: sink_counts("counters_broken", sink="scrape"),
        "http://sink: the file of --counters can't be used | its log",
    ),
    "an Alertmanager is down": (
        lambda: see(
            healthy(),
            components=[
                OwnMetrics(
                    "http://sink",
                    [Sample("gpustream_alertmanager_receiver_failing", {"receiver": "am:9093"}, 1.0)],
                    "am:9093: does not accept: ConnectionRefusedError",
                )
            ],
        ),
        "http://sink: not ready | am:9093: does not accept | GpustreamReceiverFailing",
    ),
    "no broker answers": (
        lambda: Situation(0, 1, KAFKA._replace(error="no Kafka broker answers at k:9092"), unread="-", groups=None),
        "Kafka at k:9092 | no Kafka broker answers | is a broker up there",
    ),
    "Kafka stops answering": (
        lambda: Situation(0, 1, KAFKA, unread="no record for 30 s", silent="no record for 30 s", groups=None),
        "Kafka at k:9092 answers only some requests | no record for 30 s | look at the network",
    ),
    "the password is wrong": (
        lambda: Situation(0, 1, KAFKA._replace(error="the broker refuses the password"), unread="-", groups=None),
        "Kafka | refuses the password | as User:doctor",
    ),
    "the prefix is wrong": (
        lambda: Situation(0, 1, KAFKA._replace(topics={}, prefix="pord.", other_prefixes=["prod."]), unread="-"),
        "no topic of gpustream with the prefix 'pord.' | 'prod.' is there | --topic-prefix",
    ),
    "a topic is compacted that must not be": (
        lambda: topic_with("gpu.samples", cleanup_policy="compact"),
        "gpu.samples: cleanup.policy is compact, must be delete | made or changed | topics create",
    ),
    "a topic is deleted that must be compacted": (
        lambda: topic_with("gpu.alerts", cleanup_policy="delete"),
        "gpu.alerts: cleanup.policy is delete, must be compact",
    ),
    "a topic keeps minutes": (
        lambda: topic_with("gpu.attributed", retention_ms="600000"),
        "gpu.attributed: retention.ms is 600000, must be at least",
    ),
    "a topic keeps few bytes": (
        lambda: topic_with("gpu.samples", retention_bytes="100000"),
        "1 topic may lose records before their time | log.retention.bytes | gpu.samples: 100000 | retention.bytes=-1",
    ),
    "partitions were added": (
        lambda: topic_with("gpu.samples", partitions=7),
        "of another number of partitions: it must be 7 | gpu.allocations has 1 | More partitions",
    ),
    "nobody writes what a sink reads": (
        lambda: see(healthy(), groups=[READING, Group("gpustream-sink-parquet", "Stable", 1, ())]),
        "gpustream-sink-parquet has nothing to read: gpustream-usage has never run | start it",
    ),
    "messages may not be large": (
        lambda: topic_with("gpu.samples", max_message_bytes="1024"),
        "gpu.samples: max.message.bytes is 1024, must be at least",
    ),
    "log times are the producers'": (
        lambda: topic_with("gpu.samples", message_timestamp_type="CreateTime"),
        "message.timestamp.type is CreateTime",
    ),
    "a partition has no leader": (
        lambda: see(healthy(), kafka=KAFKA._replace(topics={"gpu.samples": TopicDescription(2, leaderless=(1,))})),
        "gpu.samples: 1 partition of 2 have no leader | brokers that have the replicas are down | partitions 1;",
    ),
    "too few replicas are in sync": (
        lambda: see(
            healthy(),
            kafka=KAFKA._replace(
                topics={"gpu.samples": TopicDescription(1, {"min.insync.replicas": "2"}, in_sync={0: 1}, replicas=3)}
            ),
        ),
        "gpu.samples: 1 partition take no records | fewer than min.insync.replicas (2)",
    ),
    "there are not so many replicas as must be in sync": (
        lambda: see(
            healthy(),
            kafka=KAFKA._replace(
                topics={"gpu.samples": TopicDescription(1, {"min.insync.replicas": "2"}, in_sync={0: 1}, replicas=1)}
            ),
        ),
        "min.insync.replicas of 1 topic is above the number of replicas | before 3.7 | gpu.samples: 2 of 1 | lower",
    ),
    "a broker is down, and all goes on": (
        lambda: see(
            healthy(),
            kafka=KAFKA._replace(
                topics={"gpu.samples": TopicDescription(2, {"min.insync.replicas": "2"}, (), {0: 3, 1: 2}, replicas=3)}
            ),
        ),
        "not all replicas of 1 topic are in sync | a broker is down | gpu.samples: 2 of 3; brokers | start",
    ),
    "a disk is nearly full": (
        lambda: see(healthy(), kafka=KAFKA._replace(disks=[Disk(1, "/data", 100 << 30, 1 << 30)])),
        "broker 1: the disk of /data | nearly full | 1.0 GiB of 100.0 GiB",
    ),
    "a disk is full": (
        lambda: see(healthy(), kafka=KAFKA._replace(disks=[Disk(1, "/data", -1, -1, "KafkaStorageError")])),
        "broker 1: the disk of /data | full or broken | KafkaStorageError",
    ),
    "a user lacks a right": (
        lambda: see(healthy(), kafka=KAFKA._replace(acls=acls(without="gpu.attributed"))),
        "User:a may not Write Topic gpu.attributed | missing | stream attribution | kafka-acls.sh",
    ),
    "a right is denied": (
        lambda: see(healthy(), kafka=KAFKA._replace(acls=acls(denied="gpu.workloads"))),
        "User:a may not Read Topic gpu.workloads | denies it | --remove --deny-principal",
    ),
    "the doctor may not read": (
        lambda: see(
            [], kafka=KAFKA._replace(topics={"gpu.samples": TopicDescription(0, allowed=frozenset())}), evidence=None
        ),
        "1 topic not looked at: User:doctor may not read | `doctor` in docs/how-to/kafka.md | gpu.samples",
    ),
    "a node's clock is ahead": (
        lambda: see([*healthy(["m"]), *clock_of("n", 10 * MINUTE_MS)]),
        "c/n: its clock is 10m ahead of the brokers' | time server | 10m later | chronyc",
    ),
    "a node's clock is behind": (
        lambda: see([*healthy(["m"]), *clock_of("n", -10 * MINUTE_MS)]),
        "c/n: its clock is 10m behind the brokers'",
    ),
    "the brokers' clock is wrong": (
        lambda: see([workloads(), *clock_of("m", 10 * MINUTE_MS), *clock_of("n", 10 * MINUTE_MS)]),
        "all 2 nodes are 10m ahead of the brokers' clock | the brokers' clock is wrong",
    ),
    "this machine's clock is wrong": (
        lambda: see(healthy(), now_ms=SINCE_MS),
        "this machine's clock is 1m behind",
    ),
    "a kubelet does not answer": (
        lambda: see([*healthy(["m"]), *without_kubelet("n")]),
        "c/n: no kubelet answers | socket | --pod-resources-socket",
    ),
    "snapshots can't be written": (
        lambda: see([record for record in healthy() if record.topic != "gpu.allocations"]),
        "c/n: the snapshot that its ticks name is not in gpu.allocations",
    ),
    "nobody leads": (
        lambda: see([unlisted(8 * MINUTE_MS), *healthy()[1:]]),
        "c: no cluster producer leads | 8m ago | GpustreamNoLeader",
    ),
    "two lead": (
        lambda: see([_of_epoch(2), _of_epoch(1), *healthy()[1:]]),
        "c: two cluster producers write at a time | two clusters have this --cluster | --lease | epoch 2",
    ),
    "two lead, each with nodes of its own": (
        lambda: see([_of_epoch(1), _of_epoch(2, node="m", at_ms=SINCE_MS - 2 * MINUTE_MS), *healthy()[1:]]),
        "c: two cluster producers write at a time | two clusters have this --cluster | epoch 1 is written",
    ),
    "another cluster has removed the nodes": (
        lambda: see([_removed(), *healthy()[1:]]),
        "c/n: it sends, and gpu.workloads says that it was removed | another cluster has this --cluster | kubectl get",
    ),
    "the cluster has another name": (
        lambda: see([workloads("other"), *healthy()[1:]]),
        "c: nothing is in gpu.workloads of this cluster | another --cluster | other is there",
    ),
    "the node has another name": (
        lambda: see([*healthy(["m"]), *[_holding(record) for record in healthy(["n-1.local"])[1:]]]),
        "c/n-1.local: the API server of c has no node of this name | --node",
    ),
    "another partitioner writes a node": (
        lambda: see(
            [record._replace(partition=1) for record in healthy()],
            kafka=KAFKA._replace(topics={**KAFKA.topics, "gpu.samples": TopicDescription(4)}),
        ),
        "1 node in a partition that is not theirs | another partitioner | c/n in partition 1 | murmur2",
    ),
    "two groups attribute": (
        lambda: see(healthy(), groups=[READING, _reading_samples("gpustream-mine")]),
        "gpustream-mine reads gpu.samples beside gpustream-attribution | twice",
    ),
    "each tick is attributed twice": (
        lambda: see([attributed(seq) for seq in range(1, 61)] + healthy()),
        "60 ticks of 60 were attributed again | not in one group",
    ),
    "a worker has too little CPU, and its group puts it out again and again": (
        lambda: see(
            [*[attributed(seq) for seq in range(1, 61)] * 2, workloads(), snapshot(), *map(sample, range(61, 121))], 60
        ),
        "gpustream-attribution: 60 records of gpu.samples not taken yet",
    ),
    "a worker was never started": (
        lambda: see([record for record in healthy() if record.topic != "gpu.attributed"], 0, groups=[]),
        "nothing is attributed: there is no group gpustream-attribution | has ever run | gpustream stream attribution",
    ),
    "a sink hangs": (
        lambda: lagging(finished=0, grew=30),
        "500 records of gpu.attributed not taken yet | it takes nothing | in 1 partition (3) | finished 0 | restart it",
    ),
    "no tick comes, and the alert stream keeps the last ones": (
        lambda: lagging(finished=0, grew=0, name="gpustream-alerts"),
        "500 records of gpu.attributed not taken yet | no tick comes | why no tick comes: is attribution well?",
    ),
    "the alert stream hangs": (
        lambda: lagging(finished=0, grew=30, name="gpustream-alerts"),
        "500 records of gpu.attributed not taken yet | it takes nothing | restart it",
    ),
    "a sink hangs, and what it says of itself is asked": (
        lambda: hanging(finished=0),
        "500 records of gpu.attributed not taken yet | http://sink:9401 does not answer (no answer | restart it",
    ),
    "a sink hung until its group went on without it": (
        lambda: hanging(finished=0, members=0),
        "500 records of gpu.attributed not taken yet | http://sink:9401 does not answer | restart it",
    ),
    "a pod has more labels than a series may have": (
        lambda: sink_counts("remote_write_labels_cut_total"),
        "3 labels of pods and namespaces on no series | --max-labels | raise --max-labels",
    ),
    "a node has more pods than a record has room for": (
        lambda: sink_counts("cluster_pods_shed_total"),
        "3 times a pod | had no room | --pod-labels",
    ),
    "pods have labels that are too long": (
        lambda: sink_counts("cluster_labels_cut_total"),
        "3 labels or annotations of pods cut | --pod-labels",
    ),
    "a sink is too slow": (
        lambda: lagging(finished=300, grew=30),
        "500 records of gpu.attributed not taken yet | slower than what comes | lags by 30 more | more members",
    ),
    "a sink catches up": (
        lambda: lagging(finished=300, grew=-150),
        "500 records of gpu.attributed not taken yet | catches up | 150 less, so 10s more | wait",
    ),
    "a sink is stopped": (lambda: lagging(0, 30, members=0), "not taken yet | nobody reads: the group has no member"),
    "the tenant is wrong": (
        lambda: remote_write_says("it refuses everything: HTTP 401: no org id"),
        "not ready | HTTP 401 | --bearer-token-file",
    ),
    "the tenant may not write": (
        lambda: remote_write_says("it refuses everything: HTTP 403: forbidden"),
        "not ready | HTTP 403 | X-Scope-OrgID",
    ),
    "the receiver is off": (
        lambda: remote_write_says("it refuses everything: HTTP 404: not found"),
        "not ready | HTTP 404 | --web.enable-remote-write-receiver",
    ),
    "the receiver limits for ever": (
        lambda: remote_write_says("again: HTTP 429: too many requests"),
        "not ready | HTTP 429 | raise its limit",
    ),
    "the receiver fails": (
        lambda: remote_write_says("server-error: HTTP 500: oops"),
        "not ready | HTTP 500 | its own log",
    ),
    "a component has too little CPU": (
        lambda: see(healthy(), components=[OwnMetrics("http://s", [], "the event loop has not answered for 2 s")]),
        "http://s: not ready | the event loop has not answered | too little CPU | `kubectl top pods`",
    ),
    "a kubelet has been silent, and the producer says so": (
        lambda: see(healthy(), components=[silent_kubelet("node: no connection to the kubelet's socket")]),
        "http://n: not ready | no connection to the kubelet's socket | GpustreamKubeletSilent",
    ),
    "many calls to a GPU are slow": (
        lambda: see(healthy(), components=[OwnMetrics("http://n", not_ready="node: GPU 0 (GPU-1) took 0.7 s")]),
        "http://n: not ready | GPU 0 (GPU-1) | GPUNotAnswering | `gpustream devices`",
    ),
    "a cluster producer may not write its Lease": (
        lambda: see(healthy(), components=[OwnMetrics("http://c", not_ready="cluster: lease a/b: not allowed (403)")]),
        "http://c: not ready | lease a/b: not allowed | GpustreamNoLeader",
    ),
    "a transaction hangs, and the alert stream keeps the last ticks": (
        lambda: hidden("gpu.attributed", lagging(finished=0, grew=0, name="gpustream-alerts", partition=0)),
        "gpu.attributed: 1 partition can't be read to the end: a transaction is open | its producer hangs",
    ),
    "a kubelet has been silent": (
        lambda: see(healthy(), components=[silent_kubelet()]),
        "http://n: its kubelet has been silent for 6m 40s | new pods are missing | GpustreamKubeletSilent",
    ),
    "Prometheus takes no remote write": (
        lambda: see(healthy(), prometheus=Prometheus("http://p", {}, accepts_remote_write=False)),
        "http://p has no sample of 1 node | no remote write | --web.enable-remote-write-receiver",
    ),
    "the sink writes elsewhere": (
        lambda: see(
            healthy(),
            prometheus=Prometheus("http://p", {NodeName("x", "y"): 1}, accepts_remote_write=True),
            groups=[READING, Group("gpustream-sink-remote-write", "Stable", 1, ())],
        ),
        "http://p has no sample of 1 node | another Prometheus or tenant | 1 other node | --url",
    ),
    "a rule fails": (
        lambda: _rules(broken_rules={"GPULost": "many-to-many matching not allowed"}),
        "http://p: the rule GPULost fails | many-to-many | promtool check rules",
    ),
    "rules do not parse": (
        lambda: _rules(reload_failed=True),
        "http://p: it does not run with the configuration that it has | rules | promtool check config",
    ),
}


def _rules(**fields: Any) -> Situation:
    situation = see(healthy())
    return situation._replace(prometheus=Prometheus("http://p", {NodeName("c", "n"): situation.now_ms}, **fields))


def _of_epoch(epoch: int, *, node: str = "n", at_ms: int = SINCE_MS) -> Record:
    value = msgspec.json.decode(workloads().value or b"") | {"epoch": epoch, "node": node}
    return workloads()._replace(value=msgspec.json.encode(value), timestamp=at_ms)


def _removed() -> Record:
    value = msgspec.json.decode(workloads().value or b"") | {"removed": True}
    return workloads()._replace(value=msgspec.json.encode(value), timestamp=SINCE_MS - 2 * MINUTE_MS)


def _holding(record: Record) -> Record:
    if record.topic != "gpu.allocations":
        return record
    value = msgspec.json.decode(record.value or b"") | {"containers": [{}]}
    return record._replace(value=msgspec.json.encode(value))


def _reading_samples(name: str) -> Group:
    return Group(name, "Stable", 1, (), {Partition("gpu.samples", 0): 5})


@pytest.mark.parametrize("how", BROKEN)
def test_what_an_operator_breaks_is_found_with_its_cause(how: str) -> None:
    make, parts = BROKEN[how]
    findings = [row for rows in findings_of(make()).values() for row in rows]
    assert any(_says(row, parts.split(" | ")) for row in findings), findings


def _says(row: Finding, parts: Iterable[str]) -> bool:
    text = "\n".join((row.finding, row.cause, row.evidence, row.next))
    return all(part in text for part in parts)


@pytest.mark.parametrize("how", [how for how in BROKEN if "Kafka" not in how and "doctor" not in how])
def test_one_error_is_not_many_findings(how: str) -> None:
    assert sum(map(len, findings_of(BROKEN[how][0]()).values())) == 1


def test_another_number_of_partitions_comes_before_settings_that_one_command_mends() -> None:
    (found,) = findings_of(topic_with("gpu.samples", partitions=7, cleanup_policy="compact")).values()
    assert "of another number of partitions" in found[0].finding
    assert "topics create --recreate-empty" in found[0].next
    assert "gpu.samples: cleanup.policy is compact, must be delete" in found[1].finding


def test_what_a_rule_drops_is_no_finding() -> None:
    assert findings_of(sink_counts("scrape_samples_withheld_total", reason="rule")) == {}


def test_a_tick_that_is_missing_after_the_oldest_record_of_a_topic_that_was_emptied_is_lost() -> None:
    newer = [
        attributed(61)._replace(offset=61, timestamp=SINCE_MS + 61_000),
        sample(61),
        sample(62),
        attributed(63),
        sample(63),
    ]

    texts = [row.finding for rows in findings_of(emptied("gpu.attributed", newer=newer)).values() for row in rows]
    assert texts == [
        "c/n: 1 tick lost between gpu.samples and gpu.attributed",
        "gpu.attributed no longer has 60 ticks that gpustream-attribution has finished",
    ]


def test_ticks_that_were_deleted_from_the_samples_are_not_said_to_be_missing() -> None:
    run_id = SINCE_MS + 1
    records = [workloads(), snapshot(run_id=run_id), *(attributed(seq, run_id=run_id) for seq in range(1, 61))]
    remaining = [sample(seq, run_id=run_id) for seq in range(40, 61)]
    unread = [record for record in records if record.topic != "gpu.attributed"]

    assert findings_of(see([*records, *remaining])) == {}  # made again
    assert findings_of(see([*unread, *remaining], finished=0, begins={Partition("gpu.samples", 0): 40})) == {}
    assert "39 ticks missing" in only_finding(see([*unread, *remaining], finished=0)).finding


def test_a_user_with_all_rights_and_a_stranger_are_no_findings() -> None:
    stranger = Acl("User:b", "Read", "Topic", "gpu.attributed", True)
    everything = [Acl("User:e", "All", kind, "*", True) for kind in ("Topic", "Group")]

    assert findings_of(see(healthy(), kafka=KAFKA._replace(acls=[*acls(), stranger, *everything]))) == {}


def test_a_broker_that_is_away_does_not_keep_the_rest_from_being_asked() -> None:
    away = KAFKA._replace(error="no Kafka broker answers at k:9092", topics={})
    components = [OwnMetrics("http://sink", not_ready="HTTP 401")]
    situation = Situation(0, 1, away, unread=away.error, groups=None, components=components)

    assert findings_of(situation).keys() == {"broker", "components"}
    assert checks.run(situation)["sent"].summary == "not looked at: no Kafka broker answers at k:9092"
    lines = list(command.text(situation, checks.run(situation)))
    assert any(line.startswith("-      sent ") for line in lines)


def test_a_node_that_sends_what_it_had_kept_is_not_said_to_have_a_wrong_clock() -> None:
    records = [
        record._replace(timestamp=SINCE_MS + 300_000 + index) if record.topic == "gpu.samples" else record
        for index, record in enumerate(healthy())
    ]

    assert "still sends what it kept" in only_finding(see(records)).cause


def test_a_stream_that_is_behind_with_ticks_is_one_finding_whatever_it_has_not_read_of_its_state() -> None:
    situation = see(healthy())
    ago_ms = situation.now_ms - 120_000
    lags = [Lag("gpu.attributed", 500, (3,), ago_ms, 0, 30, 3.0), Lag("gpu.alert-groups", 19, (3,), ago_ms, 0, 0, 3.0)]
    groups = [READING, Group("gpustream-alerts", "Stable", 1, tuple(lags))]
    finding = only_finding(situation._replace(groups=groups))
    assert finding.finding == "gpustream-alerts: 500 records of gpu.attributed not taken yet"
