"""Writes a Kubernetes Event on a pod if its annotations for gpustream, or its namespace's, have a mistake.

In: GPU pods and namespaces as the watches have them. Out: an Event for each pod and mistake, written by the leader.
State: the mistakes of pods and namespaces, and which of them have an Event. Every replica keeps them.
The name of an Event is made of its pod and mistake. So another leader, or this one after a restart, writes none twice
while the API server keeps it, which is an hour by default. If a replica begins to lead and has known a mistake for
longer than that, the last leader has written its Event.
On failure: what the API server can't take now is tried again. What it refuses is logged.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import msgspec

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, ApiHealth, Client, Unreachable, message
from delivery.policies import Bounds, PolicyError, annotation_errors
from producers.cluster import instruments as own
from producers.cluster.pods import KnownPod, Pods

log = logging.getLogger(__name__)

KEPT_S = 3600.0  # how long the API server keeps an Event, by default
REASON = "GpustreamAnnotation"
_LOOK_S = 1.0
_SPACING_S = 0.1
_AGAIN_S = 30.0
_NOTE_S = 60.0

Said = tuple[str, PolicyError]


class PolicyEvents:
    """The mistakes in annotations, and which pods have an Event about them. ``pods`` are all GPU pods."""

    def __init__(
        self,
        api: Client,
        pods: Pods,
        longest: Bounds,
        instruments: Instruments,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._pods, self._longest, self._instruments = api, pods, longest, instruments
        self._clock_s = clock_s
        self._health = ApiHealth("events about annotations", log)
        self._of_pods: dict[str, list[PolicyError]] = {}
        self._of_namespaces: dict[str, list[PolicyError]] = {}
        self._seen_s: dict[Said, float] = {}
        self._said: set[Said] = set()

    def put_pod(self, uid: str, namespace: str, annotations: Mapping[str, str] | None) -> None:
        """A pod as it is now; one that holds no GPU is passed over later."""
        self._put(self._of_pods, uid, annotation_errors(annotations or {}, namespace, self._longest, of_pod=True))

    def put_namespace(self, name: str, annotations: Mapping[str, str] | None) -> None:
        """A namespace as it is now."""
        self._put(self._of_namespaces, name, annotation_errors(annotations or {}, name, self._longest, of_pod=False))

    def _put(self, where: dict[str, list[PolicyError]], name: str, found: list[PolicyError]) -> None:
        if found:
            where[name] = found
        else:
            where.pop(name, None)

    async def follow(self) -> None:
        """Note what there is, also while another replica leads, until it is cancelled."""
        while True:
            self.watch()
            await asyncio.sleep(_NOTE_S)

    async def run(self) -> None:
        """Say what is not said yet, until it is cancelled."""
        since_s = self._clock_s()
        self._said.update(said for said, seen_s in self._seen_s.items() if since_s - seen_s > KEPT_S)
        while True:
            for pod, mistake in list(self.unsaid()):
                if (pause_s := await self._say(pod, mistake)) > 0:
                    await asyncio.sleep(pause_s)
                    break
                await asyncio.sleep(_SPACING_S)
            await asyncio.sleep(_LOOK_S)

    def watch(self) -> None:
        """Note what there is, and since when; forget pods that are gone."""
        for uid in [uid for uid in self._of_pods if self._pods.get(uid) is None]:
            del self._of_pods[uid]
        now_s, there = self._clock_s(), {(pod.uid, mistake) for pod, mistake in self._wrong()}
        self._seen_s = {said: self._seen_s.get(said, now_s) for said in there}
        self._said &= there

    def unsaid(self) -> Iterator[tuple[KnownPod, PolicyError]]:
        """What to write now: for each pod that runs, each mistake of its own and of its namespace."""
        self.watch()
        return ((pod, mistake) for pod, mistake in self._wrong() if (pod.uid, mistake) not in self._said)

    def _wrong(self) -> Iterator[tuple[KnownPod, PolicyError]]:
        for uid, mistakes in self._of_pods.items():
            pod = self._pods.get(uid)
            if pod is not None and pod.ended_ms is None:
                yield from ((pod, mistake) for mistake in mistakes)
        for name, mistakes in self._of_namespaces.items():
            for pod in self._pods.in_namespace(name):
                if pod.ended_ms is None:
                    of_namespace = (one._replace(text=f"namespace {name}: {one.text}") for one in mistakes)
                    yield from ((pod, mistake) for mistake in of_namespace)

    async def _say(self, pod: KnownPod, mistake: PolicyError) -> float:
        """Write an Event; gives how many seconds to wait, if it could not be written now."""
        content = msgspec.json.encode(event(pod, mistake, datetime.now(UTC)))
        try:
            answer = await self._api.request("POST", f"/api/v1/namespaces/{pod.namespace}/events", body=content)
        except Unreachable as error:
            return self._later(error.reason, str(error), None)
        if answer.status in (401, 403, 408, 429) or answer.status >= 500:
            return self._later(str(answer.status), _sentence(answer), answer.retry_after_s)
        self._said.add((pod.uid, mistake))
        self._health.good("they can be written")
        result = "written" if answer.status == 201 else "there" if answer.status == 409 else "refused"
        self._instruments.counter(own.POLICY_EVENTS, result).inc()
        if result == "refused" and answer.status != 404:  # the namespace may be gone by now
            log.warning("pod %s: no event about its annotations: %s", f"{pod.namespace}/{pod.name}", _sentence(answer))
        return 0.0

    def _later(self, kind: str, why: str, retry_after_s: float | None) -> float:
        self._instruments.counter(own.POLICY_EVENTS, "again").inc()
        self._health.bad(kind, why)
        return max(_AGAIN_S, retry_after_s or 0.0)


def _sentence(answer: Answer) -> str:
    rule = '; our role lacks {apiGroups: [""], resources: [events], verbs: [create]}' if answer.status == 403 else ""
    return f"HTTP {answer.status}: {message(answer.body)}{rule}"


def event(pod: KnownPod, mistake: PolicyError, now: datetime) -> dict[str, Any]:
    """The Event about a pod and what is wrong with an annotation."""
    which = blake2b(f"{pod.uid}\0{mistake.name}\0{mistake.text}".encode(), digest_size=8).hexdigest()
    at = f"{now:%Y-%m-%dT%H:%M:%SZ}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod.name[:200]}.{which}", "namespace": pod.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": pod.uid,
        },
        "type": "Warning",
        "reason": REASON,
        "message": mistake.text[:1024],
        "source": {"component": "gpustream"},
        "reportingComponent": "gpustream.dev/cluster",
        "reportingInstance": "gpustream",
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
