"""The kubelet's pod resources: which container of this node was given which devices, asked at each tick.

In: the answers to ``/v1.PodResourcesLister/List`` on the kubelet's unix socket. From Kubernetes 1.37 on, the kubelet
also pushes its pods as they begin and end (``pods_api.py``), and is then asked at once. Out: the containers of
gpu.allocations.
State: the last answer that could be read, which stays in force until the next; the answers that were in force lately;
the call in flight, at most one.
On failure: a failed call is counted by what went wrong, logged when that changes, and made again at the next tick, or
less often if that can't help. The last known containers stay in force, for as long as it takes. A kubelet that was
restarted answers before it knows all its pods. For some seconds a container that it does not list is kept, unless
another container has its devices.

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

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.podresources_pb2 import ListPodResourcesResponse
from producers.node.pods_api import PodWatch, held, holder

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
UNREADY_AFTER_S = 30.0
SETTLED_AFTER_S = 5.0  # static pods are listed at once, the others when the kubelet has them from the API server
AFTERWARDS_MS = 500  # an answer so soon after an event was asked for because of it: who held what at the event
ASKED_WITHIN_S, ASKED_EVERY_S = 0.8, 0.05  # after a push
_LOG_AGAIN_S = 60.0
_REMEMBERED_ANSWERS = 64
_LONGEST_REASON = 300
_DECODED_ASIDE_BYTES = 256 * 1024

_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_CLAIMED = ("claim", "namespace", "driver", "pool", "device")  # of a device of a resource claim, as in gpu.allocations
JsonDict = Mapping[str, Any]

Result = Literal["ok", "unavailable", "deadline", "rate_limited", "too_large", "undecodable", "refused"]
State = Literal["absent"] | Result
_PAUSE_S: Mapping[State, float] = {"too_large": 60.0, "refused": 10.0}  # after what asking again does not mend

_FAILURES: Sequence[tuple[grpc.StatusCode, str, Result]] = (
    (grpc.StatusCode.UNAVAILABLE, "", "unavailable"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "", "deadline"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", "too_large"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate limit", "rate_limited"),
)
"""What the error status of a call means, if its text has these words."""

_SENTENCES: Mapping[State, str] = {
    "absent": "no kubelet at %s: %s",
    "unavailable": "nobody answers on the kubelet's socket %s: %s",
    "deadline": "the kubelet at %s does not answer in time: %s",
    "rate_limited": "the kubelet at %s is asked too often by all its clients together: %s",
    "too_large": "the answer of the kubelet at %s is larger than any node's should be; look at what device plugins list"
    " there, or at what serves the socket: %s",
    "undecodable": "the answer of the kubelet at %s can't be read: %s",
    "refused": "the kubelet at %s does not answer v1.PodResourcesLister/List: %s",
}


class UndecodableAnswer(ValueError):
    """The kubelet's answer can't be read. Keep the last one, and ask again."""


def containers(answer: bytes, prefixes: Sequence[str]) -> list[dict[str, Any]]:
    """The containers of gpu.allocations in a ListPodResourcesResponse.

    One dict for each container and resource whose name begins with one of ``prefixes``, and one for the claims of a
    container whose driver is of the domain of one ("gpu.nvidia.com" is of "nvidia.com/"). What the answer says twice is
    there once. Raises :class:`UndecodableAnswer`.
    """
    try:
        decoded = ListPodResourcesResponse.FromString(answer)
    except DecodeError as error:
        raise UndecodableAnswer(str(error)) from error
    domains = tuple("." + prefix.partition("/")[0] for prefix in prefixes)
    given: dict[tuple[str, ...], dict[Any, None]] = {}
    for pod, container in [(one, each) for one in decoded.pod_resources for each in one.containers]:
        who = (pod.namespace, pod.name, container.name)
        for devices in container.devices:
            if devices.device_ids and devices.resource_name.startswith(tuple(prefixes)):
                given.setdefault((*who, devices.resource_name), {}).update(dict.fromkeys(devices.device_ids))
        claims = [
            (dynamic.claim_name, dynamic.claim_namespace, one.driver_name, one.pool_name, one.device_name)
            for dynamic in container.dynamic_resources
            for one in dynamic.claim_resources
            if f".{one.driver_name}".endswith(domains)
        ]
        if claims:
            given.setdefault(who, {}).update(dict.fromkeys(claims))
    rows = []
    for (namespace, pod_name, container_name, *resource), once in given.items():
        if not (namespace and pod_name and container_name):
            raise UndecodableAnswer("a container with devices, or its pod or namespace, has no name")
        row: dict[str, Any] = {"namespace": namespace, "pod": pod_name, "container": container_name}
        if resource:
            rows.append({**row, "resource": resource[0], "device_ids": list(once)})
        else:
            rows.append({**row, "claims": [dict(zip(_CLAIMED, one, strict=True)) for one in sorted(once)]})
    return rows


def failure(code: grpc.StatusCode, details: str | None) -> tuple[Result, str]:
    """What a call's error status means here, and in words. The text says which meaning RESOURCE_EXHAUSTED has."""
    text = " ".join((details or "").split())[:_LONGEST_REASON]
    reason = f"{code.name}: {text}"
    found = (result for status, said, result in _FAILURES if code is status and said in text)
    return next(found, "refused"), reason


@dataclass(slots=True)
class _Answered:
    """Containers that the kubelet named from one time to another, in milliseconds since the epoch."""

    containers: list[JsonDict]
    first_ms: int
    last_ms: int


class Kubelet:
    """Asks one kubelet, on ``socket``; None: there is none. A resource that begins with one of ``prefixes`` counts.
    ``pods_socket`` is its Pods API's, followed while :meth:`run` runs; None: it is not followed.
    ``clock`` gives seconds and never steps back, ``now_ms`` the time of day in milliseconds since the epoch."""

    def __init__(
        self,
        socket: Path | None,
        instruments: Instruments,
        *,
        pods_socket: Path | None = None,
        prefixes: Sequence[str] = ("nvidia.com/",),
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        deadline_s: float = DEADLINE_S,
        largest_answer_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        self._socket, self._instruments, self._prefixes, self._clock = socket, instruments, tuple(prefixes), clock
        self._now_ms = now_ms
        self._deadline_s, self._largest_answer_bytes = deadline_s, largest_answer_bytes
        self._channel: grpc.aio.Channel | None = None
        self._asking: asyncio.Task[None] | None = None
        self._ask_again_s = self._settled_s = clock()
        self._met: tuple[int, ...] | None = None
        self._answer: bytes | None = None
        self._listed: list[JsonDict] | None = None
        self._containers: list[JsonDict] | None = None
        self._pushed, self._asked = asyncio.Event(), 0
        self._pods = (
            None
            if socket is None or pods_socket is None
            else PodWatch(pods_socket, instruments, prefixes=self._prefixes, changed=self._take_push)
        )
        self._answers: deque[_Answered] = deque(maxlen=_REMEMBERED_ANSWERS)
        self._answered_s: float | None = None
        self._state: State | None = None
        self._reason = ""
        self._logged: State | None = None
        self._logged_s: dict[State, float] = {}

    async def run(self) -> None:
        """Follow the pods for as long as it runs, and ask which devices they have when one begins, changes or ends."""
        if self._pods is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods.run())
            while True:
                await self._pushed.wait()
                self._pushed.clear()
                await self.read(ASKED_WITHIN_S)
                await asyncio.sleep(ASKED_EVERY_S)

    async def read(self, within_s: float) -> list[JsonDict] | None:
        """Ask, and give the last known containers after at most ``within_s``; None while nothing is known.
        They are dicts as in gpu.allocations, not to be changed. An answer that comes later is in force from then on."""
        if self._socket is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._ended()
                    self._begin(self._socket)
                    await self._ended()
            age_s = 0.0 if self._answered_s is None else self._clock() - self._answered_s
            self._instruments.gauge(names.KUBELET_AGE).set(age_s)
        return self._containers

    def in_force(self, ts_ms: int) -> list[JsonDict] | None:
        """The containers at an earlier time, in milliseconds since the epoch: those of an answer that came within half
        a second after it, else of the last one before it. None while nothing is known."""
        before = after = None
        for answered in reversed(self._answers):
            if answered.first_ms <= ts_ms:
                before = answered
                break
            after = answered
        if before is not None and ts_ms <= before.last_ms:
            return before.containers
        if after is not None and (before is None or after.first_ms - ts_ms <= AFTERWARDS_MS):
            return after.containers
        return self._containers if before is None else before.containers

    def not_ready(self) -> list[str]:
        """Why it is not ready: the kubelet never answered, or not for 30 s."""
        if self._socket is None:
            return []
        silent_s = None if self._answered_s is None else self._clock() - self._answered_s
        if silent_s is not None and silent_s <= UNREADY_AFTER_S:
            return []
        since = "has not answered yet" if silent_s is None else f"has not answered for {silent_s:.0f} s"
        if self._state in (None, "ok"):
            return [f"the kubelet at {self._socket} {since}"]
        return [f"{self._sentence()} (it {since})"]

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking], timeout=1.0)
        if self._channel is not None:
            await self._channel.close()

    async def _ended(self) -> None:
        """Wait for the call in flight, if there is one. A caller that stops waiting does not end it."""
        asking = self._asking
        if asking is not None:
            if not asking.done():
                await asyncio.wait([asking])
            if self._asking is asking:
                self._asking = None
            asking.result()

    def _begin(self, socket: Path) -> None:
        """Begin a call, unless there is one, or none may be made yet."""
        try:
            found = socket.stat()
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            self._note("absent", "the socket is not there" if absent else error.strerror or str(error))
            return
        identity, now_s = (found.st_dev, found.st_ino, found.st_ctime_ns), self._clock()
        if identity != self._met:  # of a kubelet that has just begun, whatever the last one refused
            self._settled_s = now_s + (SETTLED_AFTER_S if self._met is not None else 0.0)
            self._met, self._ask_again_s = identity, now_s
        if self._asking is None and now_s >= self._ask_again_s:
            self._asking = asyncio.create_task(self._ask(socket))

    async def _ask(self, socket: Path) -> None:
        if self._channel is None:
            limit = ("grpc.max_receive_message_length", self._largest_answer_bytes)
            self._channel = grpc.aio.insecure_channel(f"unix:{quote(str(socket))}", (limit, *_RECONNECT))
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        ask = self._channel.unary_unary("/v1.PodResourcesLister/List")
        result: Result = "ok"
        reason, pushes = "", self._pods.pushes if self._pods else 0
        try:
            await self._take(await ask(b"", timeout=self._deadline_s), pushes)
        except grpc.aio.AioRpcError as error:
            result, reason = failure(error.code(), error.details())
        except UndecodableAnswer as error:
            result, reason = "undecodable", str(error)
        self._ask_again_s = self._clock() + _PAUSE_S.get(result, 0.0)
        self._instruments.counter(names.KUBELET_CALLS, result).inc()
        self._note(result, reason)

    async def _take(self, answer: bytes, asked: int) -> None:
        """Take an answer to what was asked after so many pushes. Raises UndecodableAnswer."""
        if self._listed is None or answer != self._answer:
            if len(answer) < _DECODED_ASIDE_BYTES:
                found = containers(answer, self._prefixes)
            else:
                found = await asyncio.to_thread(containers, answer, self._prefixes)
            settled = self._clock() >= self._settled_s
            missed: list[JsonDict] = []
            if not settled:  # it may lack pods: what is known stays, unless another container has its devices
                there, taken = set(map(holder, found)), {device for row in found for device in _devices(row)}
                missed = [
                    row for row in self._listed or () if holder(row) not in there and taken.isdisjoint(_devices(row))
                ]
            self._listed, self._answer = [*found, *missed], answer if settled else None
        self._asked, self._answered_s = asked, self._clock()
        if self._pods is not None:
            self._pods.forget({(row["namespace"], row["pod"]) for row in self._listed}, asked)
        self._put_in_force(self._listed)

    def _take_push(self) -> None:
        """A pod began, changed or ended: what is known of it is in force at once, and the kubelet is asked for more.
        Until then nothing had changed."""
        self._pushed.set()
        if self._listed is not None:
            if self._answers:
                self._answers[-1].last_ms = max(self._answers[-1].last_ms, self._now_ms())
            self._put_in_force(self._listed)

    def _put_in_force(self, listed: list[JsonDict]) -> None:
        """Put into force what is listed and what is known of the pods, and remember since when."""
        known, now_ms = listed, self._now_ms()
        if self._pods is not None and self._pods.pods:
            known = held(listed, self._asked, self._pods.pods)
        if known == self._containers:
            known = self._containers
        self._containers = known
        if self._answers and self._answers[-1].last_ms > now_ms:  # the clock was set back
            self._answers.clear()
        if self._answers and self._answers[-1].containers is known:
            self._answers[-1].last_ms = now_ms
        else:
            self._answers.append(_Answered(known, now_ms, now_ms))

    def _note(self, state: State, reason: str) -> None:
        """Remember the kubelet's state; log it when it has changed, and one that comes and goes once a minute."""
        self._state, self._reason = state, reason
        now_s = self._clock()
        if state == self._logged or now_s - self._logged_s.get(state, float("-inf")) < _LOG_AGAIN_S:
            return
        self._logged, self._logged_s[state] = state, now_s
        if state == "ok":
            log.info("the kubelet answers", extra={"socket": str(self._socket)})
        else:
            log.warning("%s", self._sentence())

    def _sentence(self) -> str:
        return _SENTENCES[self._state or "absent"] % (self._socket, self._reason)


def _devices(row: JsonDict) -> set[Any]:
    claimed = {(claim["driver"], claim["pool"], claim["device"]) for claim in row.get("claims", ())}
    return {*row.get("device_ids", ()), *claimed}
