"""``gpustream doctor`` on a healthy pipeline and on faulty ones: it finds each gap with its cause."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiokafka import AIOKafkaProducer
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka import TopicPartition as TheirPartition

from delivery import kafka_admin, topic_admin
from delivery.connection import Connection
from delivery.ledger import Partition
from gpustream.doctor import brokers, checks, command, kubernetes, pods
from gpustream.doctor.gather import Scope, gather
from gpustream.doctor.situation import CheckResult, Finding, OwnMetrics, Situation
from producers import publisher as names
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import LIMIT_S, eventually, eventually_sync
from tests.real.kubernetes import ADMIN, ApiServer, Json
from tests.real.pipeline import Gpustream, Truth, lag, read_all, running
from tests.real.servers import KafkaCluster, KafkaServer, PrometheusServer
from topics import TOPICS

GROUP = "gpustream-attribution"
OUR_LABELS = {"app.kubernetes.io/name": "gpustream"}
TICKS = 15


@pytest.fixture(autouse=True)
def roomy_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How full the disk of this machine is makes no difference."""
    monkeypatch.setattr(brokers, "MIN_FREE_RATIO", 0.0)


async def look(
    kafka: KafkaServer, *, later_ms: int = 0, **scope_options: Any
) -> tuple[Situation, dict[str, CheckResult]]:
    """The situation and the results of the doctor; ``later_ms``: as if it looked so much later."""
    situation = await gather(kafka.connection, Scope(600.0, **scope_options))
    others = situation.kafka._replace(acls=None)  # those of other tests' users
    situation = situation._replace(now_ms=situation.now_ms + later_ms, kafka=others)
    return situation, checks.run(situation)


def fleet(kafka: KafkaServer, truth: Path, **options: Any) -> SimulatedFleet:
    """A simulated fleet that samples some ticks and ends."""
    settings = {"fleet": "3x2", "interval_s": 0.1, "stop_after_ticks": TICKS, "truth": truth, **options}
    return SimulatedFleet(SimulatedSettings(kafka=kafka.address, cluster="doctor", **settings))


async def test_a_healthy_pipeline_is_a_short_summary(
    empty_kafka: KafkaServer, prometheus: PrometheusServer, tmp_path: Path
) -> None:
    forgotten = "members that were killed are forgotten"
    await asyncio.to_thread(eventually_sync, lambda: not empty_kafka.empty(), forgotten, every_s=1)
    await topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1)
    truth, url = tmp_path / "truth.jsonl", prometheus.write_url
    stream = Attribution(AttributionSettings(kafka=empty_kafka.address))
    sink = RemoteWriteSink(RemoteWriteSettings(kafka=empty_kafka.address, url=url))
    async with running(stream, sink):
        await fleet(empty_kafka, truth).run(asyncio.Event())

        async def all_is_taken() -> bool:
            groups = (GROUP, ["gpu.samples"]), ("gpustream-sink-remote-write", ["gpu.attributed"])
            return not any([await lag(empty_kafka.address, *group) for group in groups])

        await eventually(all_is_taken)
        situation, results = await look(empty_kafka, prometheus=prometheus.url)
    lines = list(command.text(situation, results))
    report = json.loads(json.dumps(command.report(situation, results), default=str))

    assert lines[-1] == "all is well in 10m", "\n".join(lines)
    assert len(lines) < 16
    assert results["prometheus"].summary == "has 3 of 3 nodes"
    sampled = Truth.read(truth).ticks
    assert {(node["node"], run["ticks"], run["exact"]) for node in report["nodes"] for run in node["runs"]} == {
        (node, TICKS, TICKS) for _, node, _, _ in sampled
    }


async def test_what_a_full_buffer_drops_is_counted_and_the_buffer_is_named(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    truth = tmp_path / "truth.jsonl"
    producer = fleet(empty_kafka, truth, fleet="1x1", buffer_s=3.0, stop_after_ticks=60)
    sampling = asyncio.create_task(producer.run(asyncio.Event()))
    await eventually(lambda: producer.registry.get_sample_value(names.DROPPED, {"reason": "buffer_age"}))
    await topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1)
    await sampling
    _, results = await look(empty_kafka)
    seqs = {json.loads(record.value)["seq"] for record in await read_all(empty_kafka.address, "gpu.samples")}
    missing = {seq for *_, seq in Truth.read(truth).ticks} - seqs

    (gap,) = results["sent"].findings
    assert missing == set(range(1, max(missing) + 1))
    assert gap.finding == f"doctor/sim-0000: {len(missing)} ticks missing in gpu.samples"
    assert gap.cause.startswith("the node's buffer dropped them")
    assert f"seq 1-{max(missing)};" in gap.evidence
    assert results["attributed"].findings[0].cause == "no worker has ever run here"


async def test_ticks_that_wait_for_a_stopped_worker_are_counted_and_the_worker_is_named(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1)
    async with running(Attribution(AttributionSettings(kafka=empty_kafka.address))):
        await fleet(empty_kafka, tmp_path / "first.jsonl").run(asyncio.Event())

        async def is_attributed() -> bool:
            return not await lag(empty_kafka.address, GROUP, ["gpu.samples"])

        await eventually(is_attributed)
    await fleet(empty_kafka, tmp_path / "second.jsonl").run(asyncio.Event())
    _, results = await look(empty_kafka, later_ms=60_000)
    waiting = len(Truth.read(tmp_path / "second.jsonl").ticks)

    (behind,) = results["attributed"].findings
    assert behind.finding == f"{GROUP}: {waiting} records of gpu.samples not taken yet"
    assert behind.cause == "nobody reads: the group has no member"
    assert results["attributed"].summary == f"{3 * TICKS} exact, {waiting} on their way"
    assert (await look(empty_kafka))[1]["attributed"].findings == []  # they came a moment ago


async def test_a_topic_that_somebody_emptied_is_found_and_no_tick_is_taken_for_lost(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    kafka, away = empty_kafka, [TheirPartition("gpu.attributed", number, 1) for number in range(2)]
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    async with running(Attribution(AttributionSettings(kafka=kafka.address))):
        await fleet(kafka, tmp_path / "truth.jsonl", fleet="8x2").run(asyncio.Event())

        async def is_attributed() -> bool:
            return not await lag(kafka.address, GROUP, ["gpu.samples"])

        await eventually(is_attributed)
    ends = dict.fromkeys(range(2), 0)
    for record in await read_all(kafka.address, "gpu.attributed"):
        ends[record.partition] = max(ends[record.partition], record.offset + 1)
    admin = kafka.admin()
    group = ConsumerGroupTopicPartitions("gpustream-sink-webhook", away)
    for altered in admin.alter_consumer_group_offsets([group]).values():
        altered.result(LIMIT_S)
    for deleted in admin.delete_records([TheirPartition("gpu.attributed", *item) for item in ends.items()]).values():
        deleted.result(LIMIT_S)
    _, results = await look(kafka)

    (finding,) = (candidate for candidate in results["groups"].findings if "deleted" in candidate.finding)
    assert finding.finding.endswith(f": {sum(ends.values()) - 2} that gpustream-sink-webhook lacks")
    assert f"partition 0 begins at offset {ends[0]}, gpustream-sink-webhook has finished up to 1" in finding.evidence
    assert results["attributed"] == CheckResult(f"{8 * TICKS} deleted after that", [])

    admin.delete_consumer_groups(["gpustream-sink-webhook"])["gpustream-sink-webhook"].result(LIMIT_S)
    (finding,) = (await look(kafka))[1]["attributed"].findings
    assert finding.finding == f"gpu.attributed no longer has {8 * TICKS} ticks that {GROUP} has finished"


@pytest.mark.parametrize("topic", ["gpu.samples", "gpu.attributed"])
async def test_a_transaction_that_hides_the_end_of_a_topic_is_found_and_what_is_behind_it_is_not_said_to_be_lost(
    empty_kafka: KafkaServer, tmp_path: Path, topic: str
) -> None:
    kafka, hides_outputs = empty_kafka, topic == "gpu.attributed"
    await topic_admin.create(kafka.connection, partitions=1, replication_factor=1)

    async def is_attributed() -> bool:
        return not await lag(kafka.address, GROUP, ["gpu.samples"])

    async with AIOKafkaProducer(bootstrap_servers=kafka.address, transactional_id=f"{topic}-hanging") as hanging:
        async with running(Attribution(AttributionSettings(kafka=kafka.address))):
            await fleet(kafka, tmp_path / "first.jsonl").run(asyncio.Event())
            await eventually(is_attributed)
            await hanging.begin_transaction()
            await hanging.send_and_wait(topic, b"{}", key=b"theirs", partition=0)
            await fleet(kafka, tmp_path / "second.jsonl").run(asyncio.Event())
            if hides_outputs:
                await eventually(is_attributed)
        situation, results = await look(kafka, later_ms=60_000)
        await hanging.abort_transaction()

    (finding,) = results["topics"].findings
    offset, hidden, _ = situation.open_transactions[Partition(topic, 0)]
    assert (offset, hidden) == (3 * TICKS, 3 * TICKS + 1)
    assert finding.finding == f"{topic}: 1 partition can't be read to the end: a transaction is open"
    assert finding.next.endswith(f"`abort --topic {topic} --partition 0 --start-offset {offset}`")
    hidden_text = f", {3 * TICKS} behind an open transaction" if hides_outputs else ""
    assert results["attributed"] == CheckResult(f"{3 * TICKS} exact{hidden_text}", [])
    assert (await look(kafka))[1]["topics"].findings == []


async def test_topics_that_somebody_changed_a_wrong_prefix_and_a_user_without_a_right_are_found(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    kafka = empty_kafka
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    async with kafka_admin.connect(kafka.connection) as admin:
        await admin.alter("gpu.samples", {"cleanup.policy": "compact", "max.message.bytes": "1024"})
        await admin.alter("gpu.attributed", {"retention.ms": "600000"})
    rights = [acl for acl in brokers.COMPONENTS["stream attribution"] if acl.name != "gpu.attributed"]
    for acl in rights:
        kafka.allow("half", acl.operation.upper(), acl.resource.upper(), acl.name)
    situation = await gather(kafka.connection, Scope(600.0))
    results = checks.run(situation)

    subjects = {finding.finding.partition(",")[0] for finding in results["topics"].findings}
    assert subjects == {
        "gpu.samples: cleanup.policy is compact",
        "gpu.samples: max.message.bytes is 1024",
        "gpu.attributed: retention.ms is 600000",
    }
    assert "User:half may not Write Topic gpu.attributed" in {
        candidate.finding for candidate in results["rights"].findings
    }
    assert situation.kafka.principal == "User:ANONYMOUS"
    assert situation.kafka.disks

    astray = await gather(Connection(kafka.address, topic_prefix="pord."), Scope(600.0))
    (finding,) = checks.run(astray)["topics"].findings
    assert finding.cause == "--topic-prefix is wrong: '' is there"
    for acl in rights:
        kafka.forbid("half", acl.operation.upper(), acl.resource.upper(), acl.name)


async def test_a_receiver_that_refuses_the_tenant_is_named_and_a_kafka_that_is_away_hides_nothing(
    empty_kafka: KafkaServer, tmp_path: Path, unused_tcp_port: int
) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=1, replication_factor=1)
    application = web.Application()
    application.router.add_post("/", _unauthorized)
    async with TestServer(application) as receiver:
        url = str(receiver.make_url("/"))
        sink = RemoteWriteSink(RemoteWriteSettings(kafka=empty_kafka.address, url=url))
        async with running(Attribution(AttributionSettings(kafka=empty_kafka.address)), sink):
            await fleet(empty_kafka, tmp_path / "truth.jsonl").run(asyncio.Event())
            await eventually(lambda: any("HTTP 401" in reason for reason in sink.not_ready()))
            own_metrics = OwnMetrics("http://sink", not_ready="; ".join(sink.not_ready()))
    away = await gather(Connection(f"127.0.0.1:{unused_tcp_port}"), Scope(600.0))
    results = checks.run(away._replace(components=[own_metrics]))

    assert "--bearer-token-file" in results["components"].findings[0].next
    assert "no Kafka broker answers" in results["broker"].findings[0].cause


async def _unauthorized(_: web.Request) -> web.Response:
    return web.Response(status=401, text="no org id")


async def test_the_api_server_is_asked_for_pods_nodes_rights_and_settings(
    kube_api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube_api.service_account("doctor", "cluster")
    for name, component in (("attribution-0", "attribution"), ("cluster-0", "cluster")):
        kube_api.create(_pod(name, component))
    starting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    row = {"name": "c", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": starting}
    path = "/api/v1/namespaces/doctor/pods/attribution-0"
    kube_api.patch(path, {"status": {"phase": "Pending", "containerStatuses": [row]}}, status=True)
    data = {"GPUSTREAM_GRACES": "1s"}
    metadata = {"name": "settings", "namespace": "doctor"}
    kube_api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    kube_api.create(_daemon_set())
    kube_api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "doctors", "labels": GPU_LABEL}})

    cluster_state = await kubernetes.inspect(kube_api.kubeconfig(ADMIN), "doctor")
    kube_api.delete("/api/v1/nodes/doctors")
    texts = [candidate.finding for candidate in pods.pods(Situation(0, 1, cluster=cluster_state)).findings]
    assert "pod attribution-0: ErrImagePull" in texts
    assert "GPUSTREAM_GRACES is no option" in texts
    assert "node doctors has GPUs, and no pod of the node producer" in texts
    assert any(
        text.startswith("the service account cluster may not list pods, watch pods, list nodes") for text in texts
    )
    assert "no cluster producer holds the Lease doctor/gpustream-cluster" in texts

    refused = await kubernetes.inspect(kube_api.kubeconfig("one"), "doctor")
    assert {"pods", "nodes", "daemonsets"} <= refused.refusals.keys()
    assert pods.pods(Situation(0, 1, cluster=refused)).findings == []
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert "/nowhere" in (await kubernetes.inspect(None, "doctor")).error


GPU_LABEL = {"nvidia.com/gpu.present": "true"}


def _pod(name: str, component: str) -> Json:
    labels = {**OUR_LABELS, "app.kubernetes.io/component": component}
    container = {"name": "c", "image": "i", "envFrom": [{"configMapRef": {"name": "settings"}}]}
    spec = {"serviceAccountName": "cluster", "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "doctor", "labels": labels},
        "spec": spec,
    }


def _daemon_set() -> Json:
    labels = {**OUR_LABELS, "app.kubernetes.io/component": "node"}
    spec = {"nodeSelector": {"gpu": "yes"}, "containers": [{"name": "c", "image": "i"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "node", "namespace": "doctor", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


async def test_a_sink_that_hangs_is_one_finding(
    empty_kafka: KafkaServer,
    prometheus: PrometheusServer,
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpustream.doctor.gather._TIMEOUT", aiohttp.ClientTimeout(total=2.0))
    kafka = empty_kafka
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    options = ("--kafka", kafka.address, "--url", prometheus.write_url, "--session-timeout", "6s")
    sink = gpustream("sink", "sink", "remote-write", *options)
    async with running(Attribution(AttributionSettings(kafka=kafka.address))):
        await asyncio.to_thread(sink.start)
        await fleet(kafka, tmp_path / "first.jsonl").run(asyncio.Event())

        async def is_taken() -> bool:
            return not await lag(kafka.address, "gpustream-sink-remote-write", ["gpu.attributed"])

        await eventually(is_taken)
        sink.sigstop()
        await fleet(kafka, tmp_path / "second.jsonl").run(asyncio.Event())
        await eventually(lambda: _attributed_all(kafka))
        url = f"http://127.0.0.1:{sink.ports[0].number}"
        _, checked = await look(kafka, later_ms=60_000, metrics=[url], prometheus=prometheus.url)
        sink.sigcont()
    (finding,) = (candidate for name, check in checked.items() if name != "sent" for candidate in check.findings)
    assert finding.finding == f"gpustream-sink-remote-write: {3 * TICKS} records of gpu.attributed not taken yet"
    assert finding.cause.startswith(f"{url} does not answer")


async def _attributed_all(kafka: KafkaServer) -> bool:
    return not await lag(kafka.address, GROUP, ["gpu.samples"])


async def test_a_disk_that_a_broker_can_not_use_and_what_has_no_leader_for_it_are_found(
    start_kafka: Callable[..., KafkaServer], tmp_path: Path
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    settings = {"log.dirs": f"{good},{bad}", "metadata.log.dir": str(good)}
    kafka = await asyncio.to_thread(start_kafka, settings=settings)
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    await fleet(kafka, tmp_path / "truth.jsonl").run(asyncio.Event())
    bad.rename(tmp_path / "away")
    bad.write_text("no directory")  # as a disk that has gone: nothing can be made there
    with contextlib.suppress(KafkaException):
        await asyncio.to_thread(kafka.create_topics, {"more": 8})

    await asyncio.to_thread(eventually_sync, lambda: leaderless(kafka))
    _, checked = await look(kafka)

    assert f"broker 1: the disk of {bad}" in {candidate.finding for candidate in checked["broker"].findings}
    assert checked["topics"].findings
    assert all("have no leader" in candidate.finding for candidate in checked["topics"].findings)


async def test_brokers_that_were_killed_leave_what_they_had_without_a_leader(
    kafka_cluster: KafkaCluster,
) -> None:
    connection = Connection(kafka_cluster.address)
    await topic_admin.create(connection, partitions=6, replication_factor=1)
    await asyncio.to_thread(kafka_cluster.brokers[2].kill9)

    async def without_a_leader() -> list[Finding]:  # until each broker knows of it, the dead one is asked, too
        checked = checks.run(await gather(connection, Scope(600.0)))
        leaderless = [candidate for candidate in checked["topics"].findings if "no leader" in candidate.finding]
        return leaderless if not checked["broker"].findings else []

    first, *_ = await eventually(without_a_leader)
    assert first.cause == "the brokers that have the replicas are down, or their disks are"
    assert "brokers 1, 2 answer" in first.evidence


def leaderless(kafka: KafkaServer) -> bool:
    """Whether a broker says that some partitions of ours have no leader."""
    topics = kafka.admin().list_topics(timeout=LIMIT_S).topics
    return any(partition.leader == -1 for name in TOPICS for partition in topics[name].partitions.values())
