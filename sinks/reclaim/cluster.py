"""The API server, as far as it is asked about the workloads of alerts, and changed.

In: an alert; a plan. Out: :class:`~sinks.reclaim.decide.Facts`; what became of a change.
State: the annotations of namespaces, for some seconds; which version of Kueue there is, for some minutes.
On failure: :class:`~delivery.kubernetes.client.Unreachable`, or :class:`Denied` by this policy:

| answer | what it means |
|---|---|
| 404 | the object is not there: an answer as good as any |
| 409 | to a change: the object is another, or was changed, since it was looked at |
| 403 | the right is missing: refused, and tried again |
| 401, 408, 429, 5xx | the API server is away for now: tried again, after what `Retry-After` says |
| any other 4xx | the API server, or an admission webhook, does not take it: refused, and tried again |
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from delivery.kubernetes.client import Answer, Client, Unreachable, message
from sinks.reclaim.decide import KUEUE, Facts, group_kind, pods_of
from topics.actions import Target
from topics.alerts import Alert

Json = dict[str, Any]

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
"""The kinds that are read: of any other owner only what the object below it says."""

JOB_UID = f"{KUEUE}/job-uid"
"""The label by which Kueue's Workload names its job."""

NAMESPACE_S = 15.0
_KUEUE_S = 300.0
_MOST_NAMESPACES = 1000
_DEEPEST = 8
_AT_ONCE = 8
_TIMEOUT_S = 5.0
_MERGE = {"Content-Type": "application/merge-patch+json"}


class Denied(Exception):
    """The API server does not do it. ``reason``: forbidden or rejected."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Away(Unreachable):
    """The API server says that it can't answer now, and perhaps for how long."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("cut", f"HTTP {answer.status}: {message(answer.body)}")
        self.retry_after_s = answer.retry_after_s


class Cluster:
    """One cluster. The client is to be started."""

    def __init__(self, api: Client) -> None:
        self._api = api
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._namespaces: dict[str, tuple[float, Json | None]] = {}
        self._kueue: tuple[float, str | None] = (float("-inf"), None)

    async def namespace(self, name: str) -> Json | None:
        """A namespace; None if it is not there. Raises Denied and Unreachable."""
        asked_s, known = self._namespaces.get(name, (float("-inf"), None))
        if time.monotonic() - asked_s > NAMESPACE_S:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            known = await self._get(f"/api/v1/namespaces/{quote(name, safe='')}")
            self._namespaces[name] = time.monotonic(), known
        return known

    async def facts(self, alert: Alert, namespace: Json) -> Facts:
        """The pods of an alert and what is above them, as they are now. Raises Denied and Unreachable."""
        where, names = namespace["metadata"]["name"], pods_of(alert)
        found = await asyncio.gather(*(self._get(_path("v1", "pods", where, name)) for name in names))
        pods, seen = dict(zip(names, found, strict=True)), dict[str, Json]()
        owners = {name: await self._owners(pod, where, seen) if pod is not None else [] for name, pod in pods.items()}
        return Facts(namespace, pods, owners, await self._workload(where, list(seen)) if seen else None)

    async def look(self, target: Target, namespace: str) -> Json | None:
        """An object as it is now; None if it, and not only one of its name, is gone. Raises Denied and Unreachable."""
        one = await self._get(_path_of(target, namespace))
        return one if one is not None and one["metadata"]["uid"] == target.uid else None

    async def change(self, target: Target, namespace: str, content: Json) -> Json | None:
        """Change an object, if it is still as it was; None if it is not. Raises Denied and Unreachable."""
        answer = await self._ask("PATCH", _path_of(target, namespace), content, _MERGE)
        return msgspec.json.decode(answer.body, type=Json) if answer.status == 200 else None

    async def has_event(self, namespace: str, name: str) -> bool:
        """Whether there is an Event of that name. Raises Denied and Unreachable."""
        return await self._get(_path("v1", "events", namespace, name)) is not None

    async def write_event(self, content: Json) -> bool:
        """Write an Event, unless it is there; False if its namespace is gone. Raises Denied and Unreachable."""
        path = f"/api/v1/namespaces/{content['metadata']['namespace']}/events"
        return (await self._ask("POST", path, content)).status != 404

    async def _owners(self, pod: Json, namespace: str, seen: dict[str, Json]) -> list[Json]:
        """What is above a pod, each object asked for once."""
        chain: list[Json] = []
        while len(chain) < _DEEPEST:
            one = chain[-1] if chain else pod
            owners = one["metadata"].get("ownerReferences") or ()
            above = next((owner for owner in owners if owner.get("controller")), None)
            if above is None:
                break
            uid = above["uid"]
            if uid not in seen:
                reference = {**above, "metadata": {"name": above["name"], "uid": uid}}
                found = None
                if group_kind(reference) in PLURALS:
                    target = Target(api_version=above["apiVersion"], kind=above["kind"], name=above["name"], uid=uid)
                    found = await self.look(target, namespace)
                seen[uid] = found or reference
            chain.append(seen[uid])
        return chain

    async def _workload(self, namespace: str, uids: Sequence[str]) -> Json | None:
        """The Workload by which Kueue queues one of these objects; None if there is none."""
        asked_s, version = self._kueue
        if time.monotonic() - asked_s > _KUEUE_S:
            group = await self._get(f"/apis/{KUEUE}")
            version = group["preferredVersion"]["groupVersion"] if group is not None else None
            self._kueue = time.monotonic(), version
        if version is None:
            return None
        selector = quote(f"{JOB_UID} in ({','.join(uids)})", safe="")
        listed = await self._get(f"/apis/{version}/namespaces/{namespace}/workloads?labelSelector={selector}")
        items = listed["items"] if listed is not None else []
        return {"apiVersion": version, "kind": "Workload", **items[0]} if items else None

    async def _get(self, path: str) -> Json | None:
        answer = await self._ask("GET", path)
        return msgspec.json.decode(answer.body, type=Json) if answer.status == 200 else None

    async def _ask(
        self, method: str, path: str, body: Json | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Ask; the answers that are given are 2xx, 404 and 409. Raises Denied and Unreachable."""
        content = None if body is None else msgspec.json.encode(body)
        async with self._slots:
            answer = await self._api.request(method, path, body=content, headers=headers, timeout_s=_TIMEOUT_S)
        if 200 <= answer.status < 300 or answer.status in (404, 409):
            return answer
        if answer.status in (401, 408, 429) or answer.status >= 500:
            raise Away(answer)
        reason = "forbidden" if answer.status == 403 else "rejected"
        raise Denied(reason, f"the API server says to {method} {path} (HTTP {answer.status}): {message(answer.body)}")


def _path_of(target: Target, namespace: str) -> str:
    group = target.api_version.rpartition("/")[0]
    return _path(target.api_version, PLURALS[group, target.kind], namespace, target.name)


def _path(version: str, plural: str, namespace: str, name: str) -> str:
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{quote(namespace, safe='')}/{plural}/{quote(name, safe='')}"
