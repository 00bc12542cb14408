"""Reads the workloads of alerts from the API server, and changes them.

In: an alert; a change. Out: :class:`~sinks.reclaim.decide.Facts`; whether the change was made.
State: namespaces, for some seconds; the version of Kueue, for some minutes.
On failure: :class:`~delivery.kubernetes.client.Unreachable`, or :class:`Denied` by this policy:

| answer | what it means |
|---|---|
| 404 | the object does not exist, which is no error |
| 409 | to a change: the object was replaced or changed since it was read |
| 403 | the right is missing: refused, and tried again |
| 401, 408, 429, 5xx | the API server is not available: tried again, after `Retry-After` |
| any other 4xx | the API server or an admission webhook rejects it: refused, and tried again |
"""

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from delivery.kubernetes.client import Answer, Client, Unreachable, can_be_read, message
from sinks.reclaim.decide import KUEUE, Facts, Json, group_kind, is_over, pods_of
from topics.actions import Target
from topics.alerts import Alert
from topics.topic import UNDECODABLE

PLURALS = {
    ("", "Pod"): "pods",
    ("apps", "Deployment"): "deployments",
    ("apps", "StatefulSet"): "statefulsets",
    ("apps", "ReplicaSet"): "replicasets",
    ("batch", "Job"): "jobs",
    ("batch", "CronJob"): "cronjobs",
    ("jobset.x-k8s.io", "JobSet"): "jobsets",
    (KUEUE, "Workload"): "workloads",
}
"""The kinds that are read. Of any other owner only the reference to it is known."""

JOB_UID = f"{KUEUE}/job-uid"
"""The label by which Kueue's Workload names its job."""

NAMESPACE_S = 15.0
_KUEUE_S = 300.0
_MAX_NAMESPACES = 1000
_MAX_DEPTH = 8
_AT_ONCE = 8
_TIMEOUT_S = 5.0
_MERGE = {"Content-Type": "application/merge-patch+json"}


class Denied(Exception):
    """The API server refuses the request. ``reason``: forbidden or rejected."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Away(Unreachable):
    """The API server can't answer now. ``retry_after_s``: for how long, if it says that."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("cut", f"HTTP {answer.status}: {message(answer.body)}")
        self.retry_after_s = answer.retry_after_s


class Cluster:
    """A cluster. The client has to be started."""

    def __init__(self, api: Client) -> None:
        self._api = api
        self._slots = asyncio.Semaphore(_AT_ONCE)  # of what is read: a change that waits would go by an old decision
        self._namespaces: dict[str, tuple[float, Json | None]] = {}
        self._kueue: tuple[float, str | None] = (float("-inf"), None)

    async def namespace(self, name: str, max_age_s: float = NAMESPACE_S) -> Json | None:
        """A namespace, as it was at most ``max_age_s`` ago; None if it is not there. Raises Denied and Unreachable."""
        read_s, namespace = self._namespaces.get(name, (float("-inf"), None))
        if time.monotonic() - read_s > max_age_s or not max_age_s:
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            namespace = await self._get(f"/api/v1/namespaces/{quote(name, safe='')}")
            self._namespaces[name] = time.monotonic(), namespace
        return namespace

    async def facts(self, alert: Alert, namespace: Json) -> Facts:
        """The pods of an alert and their owners. Raises Denied and Unreachable."""
        in_namespace, names = namespace["metadata"]["name"], pods_of(alert)
        reads = [asyncio.ensure_future(self._get(_path("v1", "pods", in_namespace, name))) for name in names]
        try:
            objects = await asyncio.gather(*reads)
        finally:
            for read in reads:
                read.cancel()  # when one has failed, the others are not asked for any more
        pods, owners_by_uid = dict(zip(names, objects, strict=True)), dict[str, Json]()
        owners = {
            name: await self._owners(pod, in_namespace, owners_by_uid) if pod is not None else []
            for name, pod in pods.items()
        }
        workload = await self._workload(in_namespace, list(owners_by_uid)) if owners_by_uid else None
        return Facts(namespace, pods, owners, workload)

    async def get(self, target: Target, namespace: str) -> Json | None:
        """An object; None if it is deleted, even if another has its name. Raises Denied and Unreachable."""
        obj = await self._get(_path_of(target, namespace))
        return obj if obj is not None and obj["metadata"].get("uid") == target.uid else None

    async def change(self, target: Target, namespace: str, content: Json) -> Json | None:
        """Patch an object; None if it was changed or deleted since it was read. Raises Denied and Unreachable."""
        return _object(await self._ask("PATCH", _path_of(target, namespace), content, _MERGE))

    async def has_event(self, namespace: str, name: str) -> bool:
        """Whether an Event with that name exists. Raises Denied and Unreachable."""
        return await self._get(_path("v1", "events", namespace, name)) is not None

    async def write_event(self, content: Json) -> bool:
        """Create an Event, unless it exists; False if its namespace does not. Raises Denied and Unreachable."""
        path = f"/api/v1/namespaces/{content['metadata']['namespace']}/events"
        return (await self._ask("POST", path, content)).status != 404

    async def _owners(self, pod: Json, namespace: str, owners_by_uid: dict[str, Json]) -> list[Json]:
        """The owners of a pod up to the top. Each object is read once, and is kept in ``owners_by_uid``."""
        chain: list[Json] = []
        while len(chain) < _MAX_DEPTH:
            owned = chain[-1] if chain else pod
            references = owned["metadata"].get("ownerReferences") or ()
            controller = next((reference for reference in references if reference.get("controller")), None)
            if controller is None:
                break
            uid = controller["uid"]
            if uid not in owners_by_uid:
                name, kind = controller["name"], controller["kind"]
                reference, owner = {**controller, "metadata": {"name": name, "uid": uid}}, None
                if group_kind(reference) in PLURALS and can_be_read(controller["apiVersion"], name):
                    target = Target(api_version=controller["apiVersion"], kind=kind, name=name, uid=uid)
                    owner = await self.get(target, namespace)
                owners_by_uid[uid] = owner or reference
            chain.append(owners_by_uid[uid])
        return chain

    async def _workload(self, namespace: str, uids: Sequence[str]) -> Json | None:
        """Kueue's Workload that queues one of these objects; None if there is none. Of several, one that has not ended:
        an elastic job gets another when it grows."""
        read_s, version = self._kueue
        if time.monotonic() - read_s > _KUEUE_S:
            group = await self._get(f"/apis/{KUEUE}")
            version = group["preferredVersion"]["groupVersion"] if group is not None else None
            self._kueue = time.monotonic(), version
        if version is None:
            return None
        selector = quote(f"{JOB_UID} in ({','.join(uids)})", safe="")
        listed = await self._get(f"/apis/{version}/namespaces/{namespace}/workloads?labelSelector={selector}")
        first = min(listed["items"], key=is_over, default=None) if listed is not None else None
        return None if first is None else {"apiVersion": version, "kind": "Workload", **first}

    async def _get(self, path: str) -> Json | None:
        async with self._slots:
            return _object(await self._ask("GET", path))

    async def _ask(
        self, method: str, path: str, body: Json | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request. Returns answers of 2xx, 404 and 409. Raises Denied and Unreachable."""
        content = None if body is None else msgspec.json.encode(body)
        answer = await self._api.request(method, path, body=content, headers=headers, timeout_s=_TIMEOUT_S)
        if 200 <= answer.status < 300 or answer.status in (404, 409):
            return answer
        if answer.status in (401, 408, 429) or answer.status >= 500:
            raise Away(answer)
        reason = "forbidden" if answer.status == 403 else "rejected"
        raise Denied(reason, f"the API server says to {method} {path} (HTTP {answer.status}): {message(answer.body)}")


def _object(answer: Answer) -> Json | None:
    """The object in an answer; None if there is none. Raises Unreachable if something else answers in place of the
    API server, such as a proxy with a page of its own."""
    if answer.status != 200:
        return None
    try:
        obj: Json = msgspec.json.decode(answer.body, type=Json)
    except UNDECODABLE as error:
        raise Unreachable("cut", f"HTTP 200 with what is no object of Kubernetes: {error}") from error
    # a Status has no content, and any other answer is an object, a list or a group
    if obj.get("kind") == "Status" or obj.keys().isdisjoint({"metadata", "items", "preferredVersion"}):
        raise Unreachable("cut", f"HTTP 200 with what is no object of Kubernetes: {message(answer.body)}")
    return obj


def is_read(target: Target) -> bool:
    """Whether an object is of a kind that is read. A later version may change others."""
    return _plural(target) is not None


def _plural(target: Target) -> str | None:
    return PLURALS.get((target.api_version.rpartition("/")[0], target.kind))


def _path_of(target: Target, namespace: str) -> str:
    plural = _plural(target)
    if plural is None:
        raise Denied("rejected", f"{target.kind} of {target.api_version} is a kind that is not known here")
    return _path(target.api_version, plural, namespace, target.name)


def _path(version: str, plural: str, namespace: str, name: str) -> str:
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{quote(namespace, safe='')}/{plural}/{quote(name, safe='')}"
