"""The cluster producer as it runs: one replica at a time sends what the API server has."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from delivery import sender
from delivery.connection import Connection
from producers import PRODUCERS
from producers.cluster import component as module
from producers.cluster import config as cluster_config
from producers.cluster import instruments as own
from producers.cluster.component import ClusterProducer
from producers.cluster.config import ClusterSettings
from producers.cluster.takeover import PublishedNodes
from streams.attribution.holders import holder_of
from tests.eventually import eventually
from tests.producers.cluster.api_server import ApiServer, Reply, Request, answers, kubeconfig
from tests.producers.cluster.kubernetes_objects import claim_json, named, over, pod_json, slice_json
from tests.producers.fakes import FakeSender
from topics.attributed import Workload
from topics.topic import decoder
from topics.workloads import NodeWorkloads, Owner

PODS, NODES, NAMESPACES = "/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
REPLICA_SETS = "/apis/apps/v1/namespaces/ml/replicasets"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/gpus/leases"
RS = Owner("apps/v1", "ReplicaSet", "llm-5d", "rs-1")
DEPLOYMENT = Owner("apps/v1", "Deployment", "llm", "dep-1")


def cluster_of(*nodes: str) -> ApiServer:
    """An API server with these nodes."""
    server = ApiServer()
    server.objects = {
        PODS: {},
        NODES: {node: named(node, {"topology.kubernetes.io/zone": "a"}) for node in nodes},
        NAMESPACES: {"ml": named("ml", {"team": "research"})},
        LEASES: {},
    }
    return server


class Replica:
    """A running cluster producer, and what it sent."""

    def __init__(self, server: ApiServer, directory: Path, *, prompt: bool = True, **changed: Any) -> None:
        config = directory / "kubeconfig"
        config.write_text(kubeconfig(server.url, {"token": "t"}))
        self.sender, self.stop = FakeSender(prompt=prompt), asyncio.Event()
        self.log: list[dict[str, Any]] = list(changed.pop("log", ()))
        self.readable = asyncio.Event()
        self.readable.set()
        settings = ClusterSettings(kafka="127.0.0.1:1", **{"kubeconfig": config, "lease": None, **changed})
        self.component = ClusterProducer(settings, sender=self.sender, read_back=self._read_back)
        self.task = asyncio.create_task(self.component.run(self.stop))

    async def _read_back(self, _: Connection, since_ms: int, published: PublishedNodes) -> None:
        await self.readable.wait()
        for record in self.log:
            published.add(orjson.dumps(record))

    def records(self, node: str = "n1") -> list[dict[str, Any]]:
        return [record for record in self.sender.records("gpu.workloads") if record["node"] == node]

    def pods(self, node: str = "n1") -> dict[str, dict[str, Any]]:
        """The pods of a node's last record, by uid."""
        records = self.records(node)
        return {pod["uid"]: pod for pod in records[-1]["pods"]} if records else {}

    def value(self, name: str, **labels: str) -> float:
        return self.component.registry.get_sample_value(name, labels) or 0.0

    async def until(self, condition: Callable[[], object]) -> None:
        await eventually(condition, unless=self.task)

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(10):
            await self.task


@contextlib.asynccontextmanager
async def running(server: ApiServer, directory: Path, **settings: Any) -> AsyncIterator[Replica]:
    """A replica, stopped at the end."""
    replica = Replica(server, directory, **settings)
    try:
        yield replica
    finally:
        await replica.end()


async def test_each_node_is_reported_with_its_pods_labels_and_devices(tmp_path: Path) -> None:
    server = cluster_of("n1", "n2")
    server.objects[PODS]["bert-0"] = pod_json()
    server.objects[SLICES] = {"s": slice_json()}
    server.objects[CLAIMS] = {"monitor": claim_json()}
    async with server, running(server, tmp_path) as replica:
        await replica.until(lambda: replica.records("n1") and replica.records("n2"))
        first = decoder(NodeWorkloads)(orjson.dumps(replica.records()[0]))

    assert (first.cluster, first.seq, first.node_labels) == ("default", 1, {"topology.kubernetes.io/zone": "a"})
    assert [(pod.uid, pod.namespace_labels) for pod in first.pods] == [("uid-bert-0", {"team": "research"})]
    assert [device.uuid for device in first.dra_devices] == ["GPU-a", "GPU-b"]
    assert [claim.claim for claim in first.admin_claims] == ["monitor"]
    assert replica.records("n2")[0]["pods"] == []


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
async def test_slices_and_claims_of_an_older_api_server_are_those_of_its_version(tmp_path: Path, version: str) -> None:
    server, slice_of_node = cluster_of("n1"), slice_json()
    if version == "v1beta1":
        for device in slice_of_node["spec"]["devices"]:
            device["basic"] = {"attributes": device.pop("attributes")}
    server.objects[SLICES.replace("v1", version)] = {"s": slice_of_node}
    server.objects[CLAIMS.replace("v1", version)] = {"monitor": claim_json()}
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.records)

    assert [device["uuid"] for device in replica.records()[0]["dra_devices"]] == ["GPU-a", "GPU-b"]
    assert [claim["claim"] for claim in replica.records()[0]["admin_claims"]] == ["monitor"]


async def test_annotations_that_are_allowed_are_reported_beside_those_that_gpustream_needs(tmp_path: Path) -> None:
    server = cluster_of("n1")
    needed = {"gpustream.dev/idle-after": "2h", "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,500,5:;"}
    server.objects[PODS]["bert-0"] = pod_json(annotations={**needed, "billing": "b-7", "other": "x"})
    async with server, running(server, tmp_path, pod_annotations=("billing",)) as replica:
        await replica.until(replica.pods)

    assert replica.pods()["uid-bert-0"]["annotations"] == {**needed, "billing": "b-7"}


async def test_the_first_record_of_a_pod_has_its_whole_owner_chain(tmp_path: Path) -> None:
    server = cluster_of("n1")
    server.objects[REPLICA_SETS] = {"llm-5d": pod_json("llm-5d", "rs-1", owner=DEPLOYMENT)}
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.records)
        server.put(PODS, pod_json(owner=RS))
        await replica.until(replica.pods)
        chains = [[owner["kind"] for pod in record["pods"] for owner in pod["owners"]] for record in replica.records()]

    assert chains == [[], ["ReplicaSet", "Deployment"]]


async def test_a_pod_whose_owner_can_not_be_read_is_reported_all_the_same(tmp_path: Path) -> None:
    server = cluster_of("n1")
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.records)
        server.next(answers(503))
        server.put(PODS, pod_json(owner=RS))
        await replica.until(replica.pods)

    assert [owner["kind"] for owner in replica.pods()["uid-bert-0"]["owners"]] == ["ReplicaSet"]


async def test_with_a_slow_api_server_a_pod_never_has_another_workload_than_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cluster.component.DEFER_S", 0.2)
    server = cluster_of("n1")
    server.objects[REPLICA_SETS] = {"llm-5d": pod_json("llm-5d", "rs-1", owner=DEPLOYMENT)}
    answered = asyncio.Event()

    async def slow(request: Request, reply: Reply) -> None:
        await answered.wait()
        await reply.answer(200, server.objects[REPLICA_SETS]["llm-5d"])

    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.records)
        server.next(slow)
        server.put(PODS, pod_json(owner=RS))
        await replica.until(replica.pods)
        answered.set()
        await replica.until(lambda: "owners_complete" not in replica.pods()["uid-bert-0"])
        pod_lists = [decoder(NodeWorkloads)(orjson.dumps(record)).pods for record in replica.records()]

    workloads = [holder_of(pod).workload for pods in pod_lists for pod in pods]
    assert workloads == [None, Workload("Deployment", "llm")]


async def test_a_pod_that_comes_back_under_its_name_is_another(tmp_path: Path) -> None:
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json(uid="first")
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        server.delete(PODS, "bert-0")
        server.put(PODS, pod_json(uid="second"))
        await replica.until(lambda: len(replica.pods()) == 2)

    assert "ended_ms" in replica.pods()["first"]
    assert "ended_ms" not in replica.pods()["second"]


async def test_a_pod_that_is_missing_when_the_api_server_comes_back_has_ended(tmp_path: Path) -> None:
    server = cluster_of("n1", "n2")
    server.objects[PODS] = {name: pod_json(name) for name in ("stays", "goes")}
    server.objects[PODS]["moves"] = pod_json("moves", node="n2")
    async with server, running(server, tmp_path) as replica:
        await replica.until(lambda: replica.pods() and replica.pods("n2"))
        await server.stop()
        del server.objects[PODS]["goes"]
        del server.objects[NODES]["n2"]
        server.next(*[answers(410)] * 3)
        await server.start()
        await replica.until(lambda: "ended_ms" in replica.pods()["uid-goes"])
        await replica.until(lambda: "ended_ms" in replica.pods("n2")["uid-moves"])

    assert "ended_ms" not in replica.pods()["uid-stays"]


async def test_a_malformed_object_is_counted_and_nothing_else_is_lost(tmp_path: Path) -> None:
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json()
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        server.put(PODS, {**pod_json("broken"), "spec": "none"})
        server.put(PODS, {**pod_json(), "spec": {"containers": 7}})
        server.notify(PODS, "DELETED", {"metadata": {"name": "who", "resourceVersion": "9"}})
        server.put(PODS, pod_json("good"))
        await replica.until(lambda: "uid-good" in replica.pods())

    assert set(replica.pods()) == {"uid-bert-0", "uid-good"}
    assert "ended_ms" not in replica.pods()["uid-bert-0"]
    assert replica.value(own.UNDECODABLE, resource="pods") == 3
    assert replica.value(own.OBJECTS, resource="pods") == 2


async def test_a_greedy_pods_labels_are_cut_and_counted(tmp_path: Path) -> None:
    server = cluster_of("n1")
    greedy: dict[str, Any] = {
        "labels": {f"l{n}": "x" for n in range(10_000)},
        "annotations": {"gpustream.dev/x": "a" * 1_000_000},
    }
    server.objects[PODS]["bert-0"] = pod_json(**greedy)
    async with server, running(server, tmp_path, pod_labels=("*",)) as replica:
        await replica.until(replica.pods)

    assert len(replica.pods()["uid-bert-0"]["labels"]) == 64
    assert len(replica.pods()["uid-bert-0"]["annotations"]["gpustream.dev/x"]) == 4096
    assert replica.value(own.CUT) == 10_000 - 64 + 1


@pytest.mark.parametrize("unknown", [PODS, NODES])
async def test_nothing_is_reported_before_all_pods_and_nodes_are_known(unknown: str, tmp_path: Path) -> None:
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json()
    late = server.objects.pop(unknown)
    async with server, running(server, tmp_path) as replica:
        await replica.until(lambda: replica.value(own.OBJECTS, resource="namespaces") == 1)
        await replica.until(lambda: len(server.requests_for(unknown)) >= 2)
        assert replica.records() == []
        assert any(unknown.rpartition("/")[2] in reason for reason in replica.component.not_ready())

        server.objects[unknown] = late
        await replica.until(replica.pods)


@pytest.mark.slow
async def test_an_ended_pod_is_reported_for_a_while_and_then_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cluster.pods.KEPT_MS", 500)
    monkeypatch.setattr("producers.workloads.RESEND_S", 0.1)
    monkeypatch.setattr("producers.workloads.CHECK_S", 0.05)
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json()
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        server.delete(PODS, "bert-0")
        await replica.until(lambda: not replica.pods())

    end_lists = [["ended_ms" in pod for pod in record["pods"]] for record in replica.records()]
    assert [end_list for end_list, _ in itertools.groupby(end_lists)] == [[False], [True], []]


async def test_a_removed_node_is_reported_no_more_while_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.workloads.RESEND_S", 0.2)
    monkeypatch.setattr("producers.workloads.CHECK_S", 0.05)
    server = cluster_of("n1", "n2")
    server.objects[PODS]["bert-0"] = pod_json()
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        server.delete(NODES, "n1")
        await replica.until(lambda: "ended_ms" in replica.pods()["uid-bert-0"])
        last, others = len(replica.records()), len(replica.records("n2"))
        await replica.until(lambda: len(replica.records("n2")) >= others + 3)

    assert len(replica.records()) == last


@pytest.mark.slow
async def test_a_replica_that_leads_again_reports_every_node_again(tmp_path: Path) -> None:
    server = cluster_of("n1", "n2")
    async with server, running(server, tmp_path, lease="gpus/gpustream-cluster", identity="a") as replica:
        await replica.until(lambda: replica.records("n1") and replica.records("n2"))
        lease = server.objects[LEASES]["gpustream-cluster"]
        stolen = {**lease["spec"], "holderIdentity": "b", "leaseDurationSeconds": 1}
        server.put(LEASES, {**lease, "spec": stolen})
        await replica.until(lambda: len(replica.records("n1")) == len(replica.records("n2")) == 2)

    first, again = replica.records()
    assert again["epoch"] > first["epoch"]


async def test_a_stop_sends_what_is_still_unsent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.workloads.MAX_IN_FLIGHT", 1)
    server = cluster_of("n1", "n2", "n3")
    async with server:
        replica = Replica(server, tmp_path, prompt=False)
        await replica.until(lambda: replica.sender.events)
        replica.stop.set()
        await asyncio.sleep(0.05)
        replica.sender.prompt = True
        replica.sender.acknowledge()
        await replica.end()

    assert {record["node"] for record in replica.sender.records("gpu.workloads")} == {"n1", "n2", "n3"}


async def test_a_record_does_not_wait_long_for_optional_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXTRAS_WITHIN_S", 0.1)
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json()
    del server.objects[NAMESPACES]
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        assert any("namespaces" in reason for reason in replica.component.not_ready())

        server.objects[NAMESPACES] = {"ml": named("ml", {"team": "research"})}
        await replica.until(lambda: replica.pods()["uid-bert-0"].get("namespace_labels"))


async def test_the_last_record_of_a_removed_node_ends_its_pods(tmp_path: Path) -> None:
    server = cluster_of("n1", "n2")
    server.objects[PODS]["bert-0"] = pod_json()
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        server.delete(NODES, "n1")
        await replica.until(lambda: "ended_ms" in replica.pods()["uid-bert-0"])
        server.put(PODS, pod_json("late"))
        server.put(PODS, pod_json("other", node="n2"))
        await replica.until(lambda: replica.pods("n2"))
        assert set(replica.pods()) == {"uid-bert-0"}

        server.put(NODES, named("n1"))
        await replica.until(lambda: "uid-late" in replica.pods())

    removed = [record["node"] for record in replica.records() if record.get("removed")]
    assert removed == ["n1"]
    assert not replica.records()[-1].get("removed")
    assert [record["seq"] for record in replica.records()] == sorted({r["seq"] for r in replica.records()})


async def test_an_ended_pod_has_its_end_time(tmp_path: Path) -> None:
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json()
    async with server, running(server, tmp_path) as replica:
        await replica.until(replica.pods)
        server.put(PODS, pod_json(status=over("Succeeded", "2026-03-01T13:00:00Z")))
        await replica.until(lambda: "ended_ms" in replica.pods()["uid-bert-0"])

    assert replica.pods()["uid-bert-0"]["ended_ms"] == 1_772_370_000_000


@pytest.mark.slow
async def test_a_standby_is_ready_and_silent_and_takes_over_with_a_higher_epoch(tmp_path: Path) -> None:
    server = cluster_of("n1", "n2")
    server.objects[PODS]["bert-0"] = pod_json()
    lease = {"lease": "gpus/gpustream-cluster"}
    async with server, running(server, tmp_path, **lease, identity="b") as second:
        async with running(server, tmp_path, **lease, identity="a") as first:
            await first.until(lambda: first.pods() or second.pods())
            leader, standby = (first, second) if first.pods() else (second, first)
            await standby.until(
                lambda: standby.value(own.OBJECTS, resource="pods") and not standby.component.not_ready()
            )
            assert (leader.value(own.LEADING), standby.value(own.LEADING)) == (1, 0)
            assert standby.sender.events == []

            server.put(PODS, pod_json("new"))
            await leader.until(lambda: "uid-new" in leader.pods())
            await leader.end()
            await standby.until(lambda: standby.records("n1") and standby.records("n2"))
        assert {*standby.pods()} == {"uid-bert-0", "uid-new"}
        assert standby.records()[0]["epoch"] > leader.records()[-1]["epoch"]


async def test_a_standby_forgets_the_pods_that_ended_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.cluster.pods.KEPT_MS", 100)
    monkeypatch.setattr(module, "CHECK_S", 0.02)
    server = cluster_of("n1")
    server.objects[PODS] = {name: pod_json(name) for name in ("a", "b")}
    server.objects[LEASES]["gpustream-cluster"] = {
        "metadata": {"name": "gpustream-cluster", "namespace": "gpus", "uid": "lease-1"},
        "spec": {"holderIdentity": "leader", "leaseDurationSeconds": 600},
    }
    async with server, running(server, tmp_path, lease="gpus/gpustream-cluster", identity="standby") as standby:
        await standby.until(lambda: standby.value(own.OBJECTS, resource="pods") == 2)
        server.delete(PODS, "a")
        await standby.until(lambda: standby.value(own.EVENTS, resource="pods", type="DELETED"))

        def known_pods() -> float:
            server.put(PODS, pod_json("b"))
            return standby.value(own.OBJECTS, resource="pods")

        await standby.until(lambda: known_pods() == 1)
        assert (standby.value(own.LEADING), standby.sender.events) == (0, [])


async def test_a_new_leader_writes_nothing_before_it_has_read_what_the_last_one_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "UNREADY_AFTER_S", 0.0)
    server = cluster_of("n1")
    server.objects[PODS]["bert-0"] = pod_json()
    now_ms = int(time.time() * 1000)
    ended_pods = [{"namespace": "ml", "name": f"p{n}", "uid": f"gone-{n}", "ended_ms": now_ms} for n in range(1000)]
    head = {"schema": 1, "cluster": "default", "node": "n1", "epoch": 1, "seq": 1, "ts_ms": now_ms}
    async with server:
        replica = Replica(server, tmp_path, log=[{**head, "pods": ended_pods}])
        replica.readable.clear()
        await replica.until(lambda: any("for Kafka" in reason for reason in replica.component.not_ready()))
        assert replica.sender.events == []

        replica.readable.set()
        await replica.until(replica.pods)
        await replica.end()

    assert set(replica.pods()) == {"uid-bert-0", *(pod["uid"] for pod in ended_pods)}


@pytest.mark.parametrize("lease", [None, "gpus/another"])
async def test_a_leader_by_another_lease_or_clock_has_a_higher_epoch_than_what_was_published(
    tmp_path: Path, lease: str | None
) -> None:
    server, epoch = cluster_of("n1"), int(time.time() * 1000) + 3_600_000
    head = {"schema": 1, "cluster": "default", "seq": 7, "ts_ms": epoch, "pods": []}
    log = [{**head, "node": "n1", "epoch": epoch}, {**head, "node": "n2", "epoch": 2**62}]
    async with server, running(server, tmp_path, lease=lease, identity="a", log=log) as replica:
        await replica.until(replica.records)
        assert replica.records()[0]["epoch"] == epoch + 1


async def test_nodes_of_another_cluster_of_this_name_are_named_in_the_log_when_they_begin_to_count_as_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = cluster_of("n1")
    head = {"schema": 1, "cluster": "default", "epoch": 1, "seq": 1, "ts_ms": int(time.time() * 1000), "pods": []}
    log = [{**head, "node": "n1"}, {**head, "node": "gone", "removed": True}]
    theirs = [{**head, "node": f"theirs-{number}"} for number in range(7)]
    async with server, running(server, tmp_path, log=[*log, *theirs]) as replica:
        await replica.until(lambda: replica.records("theirs-6"))
    (line,) = [text for text in caplog.messages if "theirs-0" in text]
    assert line.startswith("default: the API server does not have 7 nodes that were published last (theirs-0, ")
    assert "theirs-4)" in line
    assert "gone" not in line

    caplog.clear()
    async with server, running(server, tmp_path, log=log) as replica:
        await replica.until(replica.records)
    assert not [text for text in caplog.messages if "API server does not have" in text]


async def test_a_standby_that_has_watched_for_long_enough_reads_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cluster.pods.KEPT_MS", 0)
    server = cluster_of("n1")
    async with server:
        replica = Replica(server, tmp_path)
        replica.readable.clear()
        await replica.until(replica.records)
        await replica.end()


async def test_a_stop_releases_the_lease(tmp_path: Path) -> None:
    server = cluster_of("n1")
    async with server:
        async with running(server, tmp_path, lease="gpus/gpustream-cluster", identity="a") as replica:
            await replica.until(replica.records)
            assert server.objects[LEASES]["gpustream-cluster"]["spec"]["holderIdentity"] == "a"

        assert server.objects[LEASES]["gpustream-cluster"]["spec"]["holderIdentity"] == ""
    assert replica.sender.stopped


async def test_an_unacknowledged_record_makes_it_unready_and_a_stop_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "UNREADY_AFTER_S", 0.0)
    monkeypatch.setattr(module, "DRAIN_S", 0.1)
    server = cluster_of("n1")
    async with server, running(server, tmp_path, prompt=False) as replica:
        await replica.until(replica.records)
        await replica.until(lambda: any("for Kafka" in reason for reason in replica.component.not_ready()))


async def test_a_stop_before_anything_is_known_ends_it(tmp_path: Path) -> None:
    server = ApiServer()
    async with server:
        replica = Replica(server, tmp_path)
        await asyncio.sleep(0.1)
        assert replica.component.not_ready()
        await replica.end()

    assert replica.records() == []


async def test_a_defect_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **_named: object) -> None:
        raise RuntimeError("a defect")

    server = cluster_of("n1")
    monkeypatch.setattr("producers.workloads.WorkloadsPublisher.publish", fail)
    async with server:
        replica = Replica(server, tmp_path, lease="gpus/x", identity="a")
        with pytest.raises(RuntimeError, match="a defect"):
            async with asyncio.timeout(30):
                await replica.task


def test_every_error_of_the_settings_is_named() -> None:
    settings = ClusterSettings(
        kafka="k:1",
        cluster="a/b",
        resource_prefixes=("",),
        pod_labels=("a b",),
        pod_annotations=("c d",),
        namespace_labels=("e f",),
        node_labels=("g h",),
        lease="no-slash",
        identity="",
    )
    beginnings = ("--pod-labels", "--pod-annotations", "--namespace-labels", "--node-labels", "--resource-prefixes")

    errors = settings.errors()
    assert [error.startswith(start) for error, start in zip(errors, beginnings, strict=False)] == [True] * 5
    assert errors[5].startswith("--lease")
    assert errors[6].startswith("--identity")
    assert "a/b" in errors[7]
    assert ClusterSettings(kafka="k:1").errors() == []


def test_the_lease_and_the_identity_have_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_config, "OWN_NAMESPACE", tmp_path / "namespace")
    assert cluster_config.default_lease() == "default/gpustream-cluster"
    (tmp_path / "namespace").write_text("gpustream\n")
    assert cluster_config.default_lease() == "gpustream/gpustream-cluster"

    monkeypatch.delenv("POD_NAME", raising=False)
    assert cluster_config.default_identity() != cluster_config.default_identity()
    monkeypatch.setenv("POD_NAME", "gpustream-cluster-0")
    assert cluster_config.default_identity() == "gpustream-cluster-0"


def test_the_registry_names_it() -> None:
    assert PRODUCERS["cluster"].component == f"{ClusterProducer.__module__}:{ClusterProducer.__name__}"
