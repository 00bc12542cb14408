"""A cluster and a log in memory, and replicas of the sink between them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from delivery.dead_letters import DeadLetters
from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Client, Unreachable
from sinks.outcomes import Outcomes
from sinks.reclaim.cluster import Cluster
from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.reclaimer import COMPONENT, INSTRUMENTS, Reclaimer
from sinks.reclaim.sink import ReclaimPartition
from tests.sinks.alerts import START_MS, alert, alert_record
from tests.sinks.records import ConsumedRecord
from topics.actions import Action
from topics.alerts import Alert, AlertGpu, time

Json = dict[str, Any]
Fault = Callable[[str, str], Answer | None]
"""What is done in place of a request, given its method and path; None: the request, after all."""

HOUR_MS = 3_600_000
MADE = "2026-11-20T10:00:00Z"


class Killed(Exception):
    """The process ended here."""


def status(code: int, said: str = "no", retry_after_s: float | None = None) -> Answer:
    """A failure as the API server writes it."""
    return Answer(code, json.dumps({"kind": "Status", "code": code, "message": said}).encode(), retry_after_s)


class Api:
    """The objects of a cluster by their paths, and what was changed. ``faults`` are for the coming requests."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.changes: list[tuple[str, Json]] = []
        self.events: dict[str, Json] = {}
        self.faults: list[Fault] = []
        self._version = 0

    def put(self, path: str, kind: str, version: str, *, owner: Json | None = None, **content: Any) -> Json:
        """Create or change an object."""
        self._version += 1
        name = path.rpartition("/")[2]
        before = self.objects.get(path, {}).get("metadata", {})
        metadata: Json = {
            "name": name,
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": MADE,
            **before,
            "resourceVersion": str(self._version),
            **content.pop("metadata", {}),
        }
        if owner is not None:
            ref = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **_named(owner), "controller": True}
            metadata["ownerReferences"] = [ref]
        self.objects[path] = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {}, **content}
        return self.objects[path]

    async def request(self, method: str, path: str, *, body: bytes | None = None, **_: Any) -> Answer:
        """As the client's."""
        await asyncio.sleep(0)
        fault = self.faults.pop(0)(method, path) if self.faults else None
        return fault if fault is not None else self._answer(method, path, json.loads(body or b"{}"))

    def _answer(self, method: str, path: str, content: Json) -> Answer:
        url = urlsplit(path)
        if method == "POST":
            name = f"{url.path}/{content['metadata']['name']}"
            known = name in self.events
            self.events.setdefault(name, content)
            return status(409) if known else Answer(201, json.dumps(content).encode(), None)
        if url.query:
            wanted = unquote(parse_qs(url.query)["labelSelector"][0])
            found = [one for at, one in self.objects.items() if at.startswith(url.path + "/") and _label(one) in wanted]
            return Answer(200, json.dumps({"items": found}).encode(), None)
        one = self.objects.get(url.path) or self.events.get(url.path)
        if one is None:
            return status(404)
        return self.patch(url.path, one, content) if method == "PATCH" else Answer(200, json.dumps(one).encode(), None)

    def patch(self, path: str, one: Json, content: Json) -> Answer:
        """A merge patch with preconditions."""
        meta, given = one["metadata"], content.get("metadata", {})
        if any(given.get(name, meta[name]) != meta[name] for name in ("uid", "resourceVersion")):
            return status(409)
        self.changes.append((path, content["spec"]))
        merged = {**(meta.get("annotations") or {}), **given["annotations"]}
        annotations = {name: value for name, value in merged.items() if value is not None}
        meta = {"annotations": annotations, "generation": meta["generation"] + 1}
        more = {name: value for name, value in one.items() if name not in ("apiVersion", "kind", "metadata", "spec")}
        spec = {**one["spec"], **content["spec"]}
        owners = {"ownerReferences": one["metadata"].get("ownerReferences")}
        changed = self.put(path, one["kind"], one["apiVersion"], metadata={**owners, **meta}, spec=spec, **more)
        return Answer(200, json.dumps(changed).encode(), None)


def _named(owner: Json) -> Json:
    return {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}


def _label(one: Json) -> str:
    return str(one["metadata"].get("labels", {}).get("kueue.x-k8s.io/job-uid", "none"))


class World:
    """A namespace ``ml`` that opts in to ``says``; a log of actions; a time of day that a test sets."""

    def __init__(self, says: str | None = "scale, suspend, deactivate, event") -> None:
        self.api = Api()
        self.log: list[Action] = []
        self.now_ms = START_MS
        self.alerts: list[ConsumedRecord] = []
        self.replicas: list[Replica] = []
        self.opt_in(says)

    def opt_in(self, says: str | None) -> None:
        """What the namespace says from now on."""
        said = {} if says is None else {"annotations": {"gpustream.dev/reclaim": says}}
        self.api.put("/api/v1/namespaces/ml", "Namespace", "v1", metadata={"annotations": None, **said})
        for replica in self.replicas:
            replica.reclaimer.cluster._namespaces.clear()

    def deployment(self, name: str = "web", pods: int = 2, replicas: int = 2, **meta: Any) -> Alert:
        """A Deployment whose pods idle; its alert."""
        base = "/apis/apps/v1/namespaces/ml"
        top = self.api.put(
            f"{base}/deployments/{name}", "Deployment", "apps/v1", spec={"replicas": replicas}, metadata=meta
        )
        middle = self.api.put(f"{base}/replicasets/{name}-1", "ReplicaSet", "apps/v1", owner=top)
        return self.pods(name, middle, pods)

    def job(self, name: str = "train", *, above: Json | None = None, **meta: Any) -> Alert:
        """A Job whose pod idles."""
        path = f"/apis/batch/v1/namespaces/ml/jobs/{name}"
        return self.pods(name, self.api.put(path, "Job", "batch/v1", owner=above, metadata=meta), 1)

    def kueue(self, uid: str, name: str = "job-train", **spec: Any) -> Json:
        """The Workload by which Kueue queues an object."""
        version = "kueue.x-k8s.io/v1beta1"
        self.api.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": version}}
        labels = {"labels": {"kueue.x-k8s.io/job-uid": uid}}
        path = f"/apis/{version}/namespaces/ml/workloads/{name}"
        return self.api.put(path, "Workload", version, spec=spec, metadata=labels)

    def pods(self, name: str, owner: Json | None, count: int, **meta: Any) -> Alert:
        """Pods of an owner that idle; their alert."""
        names = [f"{name}-{number}" for number in range(count)]
        for pod in names:
            self.api.put(f"/api/v1/namespaces/ml/pods/{pod}", "Pod", "v1", owner=owner, metadata=meta)
        gpus = tuple(AlertGpu(uuid=f"GPU-{pod}", node="n1", pod=f"ml/{pod}") for pod in names)
        labels = {"k8s_namespace_name": "ml", "k8s_workload_kind": "Deployment", "k8s_workload_name": name}
        return alert(name, gpus=gpus, idle=count, held=count, labels=labels)

    def write(self, *of: Alert | bytes) -> None:
        """Records of gpu.alerts, logged now."""
        for one in of:
            self.alerts.append(
                alert_record(one, len(self.alerts), at_ms=self.now_ms, key=b"x" if isinstance(one, bytes) else None)
            )

    def words(self, action: str | None = None) -> list[str]:
        """What was written, in its order."""
        return [
            one.state if one.reason is None else f"{one.state} {one.reason}"
            for one in self.log
            if action in (None, one.action)
        ]

    async def send(self, action: Action) -> None:
        """Write an action, and let every replica read it."""
        self.log.append(msgspec.json.decode(msgspec.json.encode(action), type=Action))
        for replica in self.replicas:
            replica.hear(self.log[-1], self.now_ms)
        await asyncio.sleep(0)

    def replica(self, **settings: Any) -> "Replica":
        """A process of the sink that has just started, and read back what there is."""
        one = Replica(self, settings)
        self.replicas.append(one)
        return one


class Replica:
    """A process of the sink. With ``kill_at`` it ends when it would write that state, ``after`` it or before."""

    def __init__(self, world: World, settings: dict[str, Any]) -> None:
        given = {"kafka": "127.0.0.1:1", "cluster": "c1", "act": True, "least_s": 0.0, **settings}
        self.world, made = world, Instruments(INSTRUMENTS)
        self.made = made
        self.kill_at: str | None = None
        self.abandon = asyncio.Event()
        self.reclaimer = Reclaimer(
            ReclaimSettings(**given), Cluster(cast("Client", world.api)), self._send, made, lambda: world.now_ms
        )
        self.partition = ReclaimPartition(
            self.reclaimer,
            cast("DeadLetters", Letters()),
            Outcomes(COMPONENT, made),
            lambda: True,
            lambda: world.now_ms / 1000,
        )
        for action in world.log:
            self.hear(action, world.now_ms)
        self.partition.recall(world.alerts)
        self._read = len(world.alerts)

    def hear(self, action: Action, at_ms: int) -> None:
        """A record of gpu.actions."""
        self.reclaimer.handle(
            "gpu.actions", [ConsumedRecord(0, msgspec.json.encode(action), at_ms, b"c1", "gpu.actions")]
        )

    async def run(self, *, later_ms: int = 0) -> None:
        """Some time passes; what is new is read, and what is due is done."""
        self.world.now_ms += later_ms
        new, self._read = self.world.alerts[self._read :], len(self.world.alerts)
        if new:
            self.partition._outcomes.read(len(new))
            async for _ in self.partition.deliver(new, self.abandon):
                pass
        await self.partition.quiet(self.abandon)

    async def _send(self, action: Action) -> None:
        if self.kill_at == f"before {action.state}":
            raise Killed
        await self.world.send(action)
        if self.kill_at == f"after {action.state}":
            raise Killed


class Letters:
    """Dead letters that go nowhere."""

    async def write(self, record: Any, error: str, abandon: asyncio.Event) -> None:
        """As the real ones'."""


def away(method: str, path: str) -> Answer | None:
    """A fault: nobody answers."""
    raise Unreachable("connection", "refused")


def over(one: Alert, at_ms: int) -> Alert:
    """That an alert has ended."""
    return msgspec.structs.replace(one, state="resolved", ends_at=time(at_ms))
