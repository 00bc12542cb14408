"""Writes a Kubernetes Event on a pod if its annotations for gpustream, or its namespace's, have an error.

In: GPU pods and namespaces as the watches have them. Out: an Event for each pod and error, written by the leader.
State: the errors of pods and namespaces, and which of them have an Event. Every replica keeps them.
The name of an Event is made of its pod and error. So another leader, or this one after a restart, writes none twice
while the API server keeps it, which is an hour by default. If a replica begins to lead and has known an error for
longer than that, the last leader has written its Event.
On failure: an Event that the API server can't accept now is tried again. One that it refuses is logged.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, ApiHealth, Client, Unreachable, message
from delivery.kubernetes.events import warning
from delivery.policies import Bounds, PolicyError, annotation_errors
from producers.cluster import instruments as names
from producers.cluster.pods import KnownPod, Pods
from topics.blake2 import blake2b

log = logging.getLogger(__name__)

KEPT_S = 3600.0  # how long the API server keeps an Event, by default
REASON = "GpustreamAnnotation"
_LOOK_S = 1.0
_SPACING_S = 0.1
_AGAIN_S = 30.0
_NOTE_S = 60.0

PodError = tuple[str, PolicyError]


class PolicyEvents:
    """The errors in annotations, and which pods have an Event about them. ``pods`` are all GPU pods."""

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
        self._errors_by_pod: dict[str, list[PolicyError]] = {}
        self._errors_by_namespace: dict[str, list[PolicyError]] = {}
        self._first_seen_s: dict[PodError, float] = {}
        self._reported: set[PodError] = set()

    def put_pod(self, uid: str, namespace: str, annotations: Mapping[str, str] | None) -> None:
        """Add or update a pod's errors. Those of a pod without GPUs are dropped later."""
        self._put(self._errors_by_pod, uid, annotation_errors(annotations or {}, namespace, self._longest, of_pod=True))

    def put_namespace(self, name: str, annotations: Mapping[str, str] | None) -> None:
        """Add or update a namespace's errors."""
        self._put(
            self._errors_by_namespace, name, annotation_errors(annotations or {}, name, self._longest, of_pod=False)
        )

    def _put(self, errors_by_name: dict[str, list[PolicyError]], name: str, errors: list[PolicyError]) -> None:
        if errors:
            errors_by_name[name] = errors
        else:
            errors_by_name.pop(name, None)

    async def follow(self) -> None:
        """Keep the errors up to date, also while another replica leads, until it is cancelled."""
        while True:
            self.watch()
            await asyncio.sleep(_NOTE_S)

    async def run(self) -> None:
        """Write an Event for each unreported error, until it is cancelled."""
        now_s = self._clock_s()
        self._reported.update(error for error, seen_s in self._first_seen_s.items() if now_s - seen_s > KEPT_S)
        while True:
            self.watch()
            unreported = [(pod, error) for pod, error in self._pod_errors() if (pod.uid, error) not in self._reported]
            for pod, error in unreported:
                if (pause_s := await self._report(pod, error)) > 0:
                    await asyncio.sleep(pause_s)
                    break
                await asyncio.sleep(_SPACING_S)
            await asyncio.sleep(_LOOK_S)

    def watch(self) -> None:
        """Note each present error and when it was first seen; forget pods that are gone."""
        for uid in [uid for uid in self._errors_by_pod if self._pods.get(uid) is None]:
            del self._errors_by_pod[uid]
        now_s, present = self._clock_s(), {(pod.uid, error) for pod, error in self._pod_errors()}
        self._first_seen_s = {error: self._first_seen_s.get(error, now_s) for error in present}
        self._reported &= present

    def _pod_errors(self) -> Iterator[tuple[KnownPod, PolicyError]]:
        """Each running pod, with each error of its own and of its namespace."""
        for uid, errors in self._errors_by_pod.items():
            pod = self._pods.get(uid)
            if pod is not None and pod.ended_ms is None:
                yield from ((pod, error) for error in errors)
        for name, errors in self._errors_by_namespace.items():
            for pod in self._pods.in_namespace(name):
                if pod.ended_ms is None:
                    for error in errors:
                        yield pod, error._replace(text=f"namespace {name}: {error.text}")

    async def _report(self, pod: KnownPod, error: PolicyError) -> float:
        """Write an Event; returns the seconds to wait before the next try, 0 if none is needed."""
        content = msgspec.json.encode(event(pod, error, datetime.now(UTC)))
        try:
            answer = await self._api.request("POST", f"/api/v1/namespaces/{pod.namespace}/events", body=content)
        except Unreachable as failure:
            return self._retry_later(failure.reason, str(failure), None)
        no_answer = answer.status != 201 and answer.status < 400  # of the API server, as a proxy's page
        if no_answer or answer.status in (401, 403, 408, 429) or answer.status >= 500:
            return self._retry_later(str(answer.status), _sentence(answer), answer.retry_after_s)
        self._reported.add((pod.uid, error))
        self._health.good("they can be written")
        result = "written" if answer.status == 201 else "there" if answer.status == 409 else "refused"
        self._instruments.counter(names.POLICY_EVENTS, result).inc()
        if result == "refused" and answer.status != 404:  # the namespace may be gone by now
            log.warning("pod %s: no event about its annotations: %s", f"{pod.namespace}/{pod.name}", _sentence(answer))
        return 0.0

    def _retry_later(self, reason: str, problem: str, retry_after_s: float | None) -> float:
        self._instruments.counter(names.POLICY_EVENTS, "again").inc()
        self._health.bad(reason, problem)
        return max(_AGAIN_S, retry_after_s or 0.0)


def _sentence(answer: Answer) -> str:
    rule = '; our role lacks {apiGroups: [""], resources: [events], verbs: [create]}' if answer.status == 403 else ""
    return f"HTTP {answer.status}: {message(answer.body)}{rule}"


def event(pod: KnownPod, error: PolicyError, now: datetime) -> dict[str, Any]:
    """The Event about a pod and what is wrong with an annotation."""
    digest = blake2b(f"{pod.uid}\0{error.name}\0{error.text}".encode(), 8).hex()
    about = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "namespace": pod.namespace, "uid": pod.uid}
    return warning(f"{pod.name[:200]}.{digest}", about, now, reason=REASON, text=error.text, controller="cluster")
