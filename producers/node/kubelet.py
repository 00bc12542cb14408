"""The kubelet's pod resources: which container of this node was given which devices, read at each tick.

In: the answers to ``/v1.PodResourcesLister/List`` on the kubelet's unix socket. From Kubernetes 1.37 on, the kubelet
also pushes its pods as they begin and end (``pods_api.py``); after each push it is called at once. Out: the containers
of gpu.allocations.
State: the last answer that could be decoded, which stays in force until the next; the answers that were in force
lately; the call in flight, at most one.
On failure: a failed call is counted by its result, logged when the result changes, and made again at the next tick;
after some results only later. The last known containers stay in force, however long that takes. A kubelet that was
restarted answers before it knows all its pods. So for some seconds a container that it does not list is kept, unless
another container has got its devices.

Source: Kubernetes' pod-resources API, v1 (podresources.proto); the kubelet limits all its clients together to 100 calls
a second.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from delivery.clock import now_ms
from delivery.instruments import Instruments
from delivery.log_throttle import LogThrottle
from delivery.tasks import running
from producers.node import instruments as names
from producers.node.podresources_pb2 import ListPodResourcesResponse
from producers.node.pods_api import PodWatch, container_key, merge_pods
from topics.samples import MISSED_INTERVALS

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
UNREADY_AFTER_S = 30.0
SETTLED_AFTER_S = 5.0  # static pods are listed at once, the others when the kubelet has them from the API server
EVENT_READ_WITHIN_MS = 500  # an answer that comes so soon after an XID error counts for its time
PUSH_READ_WITHIN_S, PUSH_READ_EVERY_S = 0.8, 0.05  # after a push of the Pods API
_MAX_ANSWERS = 64
_MAX_REASON_CHARS = 300
_DECODED_IN_LOOP_BYTES = 256 * 1024

_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2000),  # the kubelet has so long to answer a new connection
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_CLAIM_KEYS = ("claim", "namespace", "driver", "pool", "device")  # as in gpu.allocations
Json = Mapping[str, Any]

Result = Literal["ok", "unavailable", "deadline", "rate_limited", "too_large", "undecodable", "refused"]
State = Literal["absent"] | Result
_PAUSE_S: Mapping[State, float] = {"too_large": 60.0, "refused": 10.0}  # until the next call, after such a result

_FAILURES: Sequence[tuple[grpc.StatusCode, str, Result]] = (
    (grpc.StatusCode.UNAVAILABLE, "", "unavailable"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "", "deadline"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", "too_large"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate limit", "rate_limited"),
)
"""The result of a call by its error status, if the status text contains these words."""

_STATE_TEXTS: Mapping[State, str] = {
    "absent": "no kubelet at %s: %s",
    "unavailable": "no connection to the kubelet's socket %s: %s",
    "deadline": "the kubelet at %s does not answer in time: %s",
    "rate_limited": "the kubelet at %s is asked too often by all its clients together: %s",
    "too_large": "the answer of the kubelet at %s is larger than any node's should be; look at what device plugins list"
    " there, or at what serves the socket: %s",
    "undecodable": "the answer of the kubelet at %s can't be read: %s",
    "refused": "the kubelet at %s does not answer v1.PodResourcesLister/List: %s",
}


class UndecodableAnswer(ValueError):
    """The kubelet's answer can't be decoded. Keep the last one, and call again."""


def containers(answer: bytes, prefixes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The containers of gpu.allocations in a ListPodResourcesResponse.

    One dict for each container and resource whose name begins with one of ``prefixes``. One more for the resource
    claims of a container whose driver belongs to the domain of a prefix ("gpu.nvidia.com" belongs to "nvidia.com/").
    A device that the answer lists twice is returned once. Raises :class:`UndecodableAnswer`.
    """
    try:
        response = ListPodResourcesResponse.FromString(answer)
    except DecodeError as error:
        raise UndecodableAnswer(str(error)) from error
    domains = tuple("." + prefix.partition("/")[0] for prefix in prefixes)
    devices_by_container: dict[tuple[str, ...], dict[Any, None]] = {}
    for pod, container in [(listed, each) for listed in response.pod_resources for each in listed.containers]:
        full_name = (pod.namespace, pod.name, container.name)
        for devices in container.devices:
            if devices.device_ids and devices.resource_name.startswith(prefixes):
                distinct = devices_by_container.setdefault((*full_name, devices.resource_name), {})
                distinct.update(dict.fromkeys(devices.device_ids))
        claims = [
            (claim.claim_name, claim.claim_namespace, device.driver_name, device.pool_name, device.device_name)
            for claim in container.dynamic_resources
            for device in claim.claim_resources
            if f".{device.driver_name}".endswith(domains)
        ]
        if claims:
            devices_by_container.setdefault(full_name, {}).update(dict.fromkeys(claims))
    rows = []
    for (namespace, pod_name, container_name, *resource), device_ids in devices_by_container.items():
        if not (namespace and pod_name and container_name):
            raise UndecodableAnswer("a container with devices, or its pod or namespace, has no name")
        row: dict[str, Any] = {"namespace": namespace, "pod": pod_name, "container": container_name}
        if resource:
            rows.append({**row, "resource": resource[0], "device_ids": list(device_ids)})
        else:
            rows.append({**row, "claims": [dict(zip(_CLAIM_KEYS, claim, strict=True)) for claim in sorted(device_ids)]})
    return rows


def with_missing(listed: Sequence[Json], known: Sequence[Json]) -> list[Json]:
    """The listed containers, and the known ones that are missing there, unless another container has got their devices.
    For the first answers of a kubelet that was restarted, which may lack pods."""
    devices_before = {container_key(row): _devices(row) for row in known}
    taken_devices = set[Any]()  # what a container had before, beside another, it took from nobody
    for row in listed:
        taken_devices |= _devices(row) - devices_before.get(container_key(row), set())
    listed_keys = set(map(container_key, listed))
    missing = [row for row in known if container_key(row) not in listed_keys]
    return [*listed, *(row for row in missing if taken_devices.isdisjoint(_devices(row)))]


def call_failure(code: grpc.StatusCode, details: str | None) -> tuple[Result, str]:
    """The result of a failed call, and a text for people. RESOURCE_EXHAUSTED has several meanings, which differ in
    ``details``."""
    text = " ".join((details or "").split())[:_MAX_REASON_CHARS]
    reason = f"{code.name}: {text}"
    if code is grpc.StatusCode.UNAVAILABLE and "Permission denied" in text:
        reason = f"this process may not connect: it must run as root, and SELinux must let it ({reason})"
    results = (result for status, text_part, result in _FAILURES if code is status and text_part in text)
    return next(results, "refused"), reason


@dataclass(slots=True)
class _Answer:
    """Containers that were in force from ``first_ms`` to ``last_ms``, in milliseconds since the epoch. Those of the
    last answer are in force."""

    containers: list[Json]
    first_ms: int
    last_ms: int


class Kubelet:
    """Reads the pod resources of one kubelet on ``socket``; None: this machine has no kubelet.

    Only resources whose name begins with one of ``prefixes`` count. ``pods_socket`` is that of the kubelet's Pods API,
    which is watched while :meth:`run` runs; None: it is not watched. ``interval_s`` is the time between ticks.
    ``clock`` gives seconds and never steps back; ``now_ms`` gives the time of day in milliseconds since the epoch.
    """

    def __init__(
        self,
        socket: Path | None,
        instruments: Instruments,
        *,
        pods_socket: Path | None = None,
        prefixes: tuple[str, ...] = ("nvidia.com/",),
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = now_ms,
        deadline_s: float = DEADLINE_S,
        largest_answer_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        self._socket, self._instruments, self._prefixes, self._clock = socket, instruments, prefixes, clock
        self._now_ms = now_ms
        self._deadline_s, self._largest_answer_bytes = deadline_s, largest_answer_bytes
        self._unready_after_s = max(UNREADY_AFTER_S, MISSED_INTERVALS * interval_s)
        self._channel: grpc.aio.Channel | None = None
        self._call: asyncio.Task[None] | None = None
        self._next_call_s = self._settled_s = clock()
        self._socket_identity: tuple[int, ...] | None = None
        self._last_answer: bytes | None = None
        self._listed_containers: list[Json] | None = None
        self._pod_changed, self._events_at_call = asyncio.Event(), 0
        self._pod_watch = (
            None
            if socket is None or pods_socket is None
            else PodWatch(pods_socket, instruments, prefixes=self._prefixes, changed=self._on_pod_change)
        )
        self._answers: deque[_Answer] = deque(maxlen=_MAX_ANSWERS)
        self._answered_s: float | None = None
        self._state: State | None = None
        self._reason = ""
        self._logged_state: State | None = None
        self._throttle = LogThrottle(clock)

    async def run(self) -> None:
        """Watch the pods until it is cancelled, and read their devices when one begins, changes or ends."""
        if self._pod_watch is None:
            return
        async with running(self._pod_watch.run()):
            while True:
                await self._pod_changed.wait()
                self._pod_changed.clear()
                await self.read(PUSH_READ_WITHIN_S)
                await asyncio.sleep(PUSH_READ_EVERY_S)

    async def read(self, within_s: float) -> list[Json] | None:
        """Call the kubelet, and return the containers in force after at most ``within_s``; None while none are known.
        They are dicts as in gpu.allocations; do not change them. An answer that comes later is in force from then."""
        if self._socket is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._wait_for_call()
                    self._begin_call(self._socket)
                    await self._wait_for_call()
            age_s = 0.0 if self._answered_s is None else self._clock() - self._answered_s
            self._instruments.gauge(names.KUBELET_AGE).set(age_s)
        return self._answers[-1].containers if self._answers else None

    def in_force(self, ts_ms: int) -> list[Json] | None:
        """The containers at an earlier time, in milliseconds since the epoch: those of an answer that came at most half
        a second later, else those of the last answer before it. None while none are known."""
        before = after = None
        for answer in reversed(self._answers):
            if answer.first_ms <= ts_ms:
                before = answer
                break
            after = answer
        if before is not None and ts_ms <= before.last_ms:
            return before.containers
        if after is not None and (before is None or after.first_ms - ts_ms <= EVENT_READ_WITHIN_MS):
            return after.containers
        return None if before is None else before.containers

    def not_ready(self) -> list[str]:
        """Why this is not ready: the kubelet has never answered, or not for 30 s and three intervals."""
        if self._socket is None:
            return []
        silent_s = None if self._answered_s is None else self._clock() - self._answered_s
        if silent_s is not None and silent_s <= self._unready_after_s:
            return []
        since = "has not answered yet" if silent_s is None else f"has not answered for {silent_s:.0f} s"
        if self._state in (None, "ok"):
            return [f"the kubelet at {self._socket} {since}"]
        return [f"{self._state_text()} (it {since})"]

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            await asyncio.wait([self._call], timeout=1.0)
        if self._channel is not None:
            await self._channel.close()

    async def _wait_for_call(self) -> None:
        """Wait for the call in flight, if there is one. If the caller is cancelled, the call goes on."""
        call = self._call
        if call is not None:
            if not call.done():
                await asyncio.wait([call])
            if self._call is call:
                self._call = None
            call.result()

    def _begin_call(self, socket: Path) -> None:
        """Begin a call, unless one is in flight, or the pause after a failure has not passed."""
        try:
            status = socket.stat()
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            self._set_state("absent", "the socket is not there" if absent else error.strerror or str(error))
            return
        identity, now_s = (status.st_dev, status.st_ino, status.st_ctime_ns), self._clock()
        if identity != self._socket_identity:  # the kubelet was restarted: the pause after a failure is over
            age_s = max(0.0, self._now_ms() / 1000 - status.st_ctime)
            self._settled_s = now_s + (SETTLED_AFTER_S - age_s if self._socket_identity is not None else 0.0)
            self._socket_identity, self._next_call_s = identity, now_s
        if self._call is None and now_s >= self._next_call_s:
            self._call = asyncio.create_task(self._call_list(socket))

    async def _call_list(self, socket: Path) -> None:
        if self._channel is None:
            limit = ("grpc.max_receive_message_length", self._largest_answer_bytes)
            self._channel = grpc.aio.insecure_channel(f"unix:{quote(str(socket))}", (limit, *_RECONNECT))
        call_method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        call_method = self._channel.unary_unary("/v1.PodResourcesLister/List")
        result: Result = "ok"
        reason, events = "", self._pod_watch.event_count if self._pod_watch else 0
        try:
            await self._accept(await call_method(b"", timeout=self._deadline_s), events)
        except grpc.aio.AioRpcError as error:
            result, reason = call_failure(error.code(), error.details())
        except UndecodableAnswer as error:
            result, reason = "undecodable", str(error)
        self._next_call_s = self._clock() + _PAUSE_S.get(result, 0.0)
        self._instruments.counter(names.KUBELET_CALLS, result).inc()
        self._set_state(result, reason)

    async def _accept(self, answer: bytes, events_at_call: int) -> None:
        """Put an answer into force. ``events_at_call`` is the number of pushed events before the call. Raises
        UndecodableAnswer."""
        if self._listed_containers is None or answer != self._last_answer:
            if len(answer) < _DECODED_IN_LOOP_BYTES:
                decoded = containers(answer, self._prefixes)
            else:
                decoded = await asyncio.to_thread(containers, answer, self._prefixes)
            settled = self._clock() >= self._settled_s
            self._listed_containers = [*decoded] if settled else with_missing(decoded, self._listed_containers or ())
            self._last_answer = answer if settled else None
        self._events_at_call, self._answered_s = events_at_call, self._clock()
        if self._pod_watch is not None:
            self._pod_watch.forget({(row["namespace"], row["pod"]) for row in self._listed_containers}, events_at_call)
        self._put_in_force()

    def _on_pod_change(self) -> None:
        """A pod began, changed or ended: put what is known of it into force at once, and have the kubelet called.
        Until now nothing has changed, so the last answer was in force until now."""
        self._pod_changed.set()
        if self._answers:
            self._answers[-1].last_ms = max(self._answers[-1].last_ms, self._now_ms())
            self._put_in_force()

    def _put_in_force(self) -> None:
        """Put into force the listed containers, corrected by what the Pods API reports, and note the time."""
        merged, now_ms = self._listed_containers or [], self._now_ms()
        if self._pod_watch is not None and self._pod_watch.pods:
            merged = merge_pods(merged, self._events_at_call, self._pod_watch.pods)
        if self._answers and self._answers[-1].last_ms > now_ms:  # the clock was set back
            self._answers.clear()
        if self._answers and self._answers[-1].containers == merged:
            self._answers[-1].last_ms = now_ms
        else:
            self._answers.append(_Answer(merged, now_ms, now_ms))

    def _set_state(self, state: State, reason: str) -> None:
        """Note the kubelet's state, and log it if it has changed, but each state at most once a minute."""
        self._state, self._reason = state, reason
        if state == self._logged_state or not self._throttle.is_due(state):
            return
        self._logged_state = state
        if state == "ok":
            log.info("the kubelet answers", extra={"socket": str(self._socket)})
        else:
            log.warning("%s", self._state_text())

    def _state_text(self) -> str:
        return _STATE_TEXTS[self._state or "absent"] % (self._socket, self._reason)


def _devices(row: Json) -> set[Any]:
    claimed_devices = {(claim["driver"], claim["pool"], claim["device"]) for claim in row.get("claims", ())}
    return {*row.get("device_ids", ()), *claimed_devices}
