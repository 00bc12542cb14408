"""The kubelet's pod resources: which container of this node was given which devices, asked at each tick.

In: the answers to ``/v1.PodResourcesLister/List`` on the kubelet's unix socket. Out: the containers of gpu.allocations.
State: the last answer that could be read, in force until there is another; which ones were in force lately; one call at
most.
On failure: a call that fails is counted by what went wrong, said in the log when that changes, and made again at the
next tick; where that can't help, less often. The last known containers stay, for as long as it takes. A kubelet that
begins again answers before it knows all its pods: until it has settled, what it lacks of them is not believed gone,
unless another has its devices.

Source: Kubernetes' pod-resources API, v1; the kubelet limits all its clients together to 100 calls a second.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import grpc
import grpc.aio

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.podresources import Undecodable, containers

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
UNREADY_AFTER_S = 30.0

SETTLED_AFTER_S = 5.0
"""A kubelet lists static pods at once, and the others when the API server has told it of them, seconds later."""

AFTERWARDS_MS = 500
"""An answer that comes so soon after an event says who held what at the event: it was asked for because of it."""

_SAY_AGAIN_S = 60.0
_REMEMBERED_ANSWERS = 64
_LONGEST_REASON = 300
_DECODED_ASIDE_BYTES = 256 * 1024

_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

JsonDict = Mapping[str, Any]

Result = Literal["ok", "unavailable", "deadline", "rate_limited", "too_large", "undecodable", "refused"]
State = Literal["absent"] | Result

_PAUSE_S: Mapping[State, float] = {"too_large": 60.0, "refused": 10.0}
"""How long it is not asked again after what no repetition mends."""

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


def failure(code: grpc.StatusCode, details: str | None) -> tuple[Result, str]:
    """What a call's error status means here, and in words. RESOURCE_EXHAUSTED has two meanings, told apart by text."""
    text = " ".join((details or "").split())[:_LONGEST_REASON]
    reason = f"{code.name}: {text}"
    if code is grpc.StatusCode.UNAVAILABLE:
        return "unavailable", reason
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "deadline", reason
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return "too_large", reason
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "rate limit" in text:
        return "rate_limited", reason
    return "refused", reason


@dataclass(slots=True)
class _Answered:
    """Containers that the kubelet named from one time to another, in milliseconds since the epoch."""

    containers: list[JsonDict]
    first_ms: int
    last_ms: int


class Kubelet:
    """Asks one kubelet, on ``socket``; None: there is none. A resource that begins with one of ``prefixes`` counts.

    ``clock`` gives seconds and never steps back, ``now_ms`` the time of day in milliseconds since the epoch.
    """

    def __init__(
        self,
        socket: Path | None,
        instruments: Instruments,
        *,
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
        self._containers: list[JsonDict] | None = None
        self._answers: deque[_Answered] = deque(maxlen=_REMEMBERED_ANSWERS)
        self._answered_s: float | None = None
        self._state: State | None = None
        self._reason = ""
        self._told: State | None = None
        self._told_s: dict[State, float] = {}

    async def read(self, within_s: float) -> list[JsonDict] | None:
        """Ask, and give the last known containers after at most ``within_s``; None while nothing is known.

        They are dicts as in gpu.allocations, not to be changed. An answer that comes later is in force from then on.
        """
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
        """Let go, without waiting for an answer."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking], timeout=1.0)
        if self._channel is not None:
            await self._channel.close()

    async def _ended(self) -> None:
        """Wait for the call in flight, if there is one. That it is no longer waited for does not end it."""
        asking = self._asking
        if asking is not None:
            if not asking.done():
                await asyncio.wait([asking])
            if self._asking is asking:
                self._asking = None
            asking.result()

    def _begin(self, socket: Path) -> None:
        try:
            found = socket.stat()
        except OSError as error:
            self._note("absent", _absence(error))
            return
        self._meet((found.st_dev, found.st_ino, found.st_ctime_ns))
        if self._asking is None and self._clock() >= self._ask_again_s:
            self._asking = asyncio.create_task(self._ask(socket))

    def _meet(self, identity: tuple[int, ...]) -> None:
        """Another socket than before is of a kubelet that has just begun, whatever the last one refused."""
        if identity != self._met:
            begun_again, self._met = self._met is not None, identity
            self._ask_again_s = self._clock()
            self._settled_s = self._clock() + (SETTLED_AFTER_S if begun_again else 0.0)

    async def _ask(self, socket: Path) -> None:
        result, reason = await self._call(socket)
        if result == "ok":
            self._answered_s = self._clock()
            self._remember(self._now_ms())
        self._ask_again_s = self._clock() + _PAUSE_S.get(result, 0.0)
        self._instruments.counter(names.KUBELET_CALLS, result).inc()
        self._note(result, reason)

    def _remember(self, now_ms: int) -> None:
        """An answer has come. What is remembered of times that a clock set back has yet to reach is forgotten."""
        if self._answers and self._answers[-1].last_ms > now_ms:
            self._answers.clear()
        if self._containers is None:
            return
        if self._answers and self._answers[-1].containers is self._containers:
            self._answers[-1].last_ms = now_ms
        else:
            self._answers.append(_Answered(self._containers, now_ms, now_ms))

    async def _call(self, socket: Path) -> tuple[Result, str]:
        try:
            await self._take(await self._list(socket)(b"", timeout=self._deadline_s))
        except grpc.aio.AioRpcError as error:
            return failure(error.code(), error.details())
        except Undecodable as error:
            return "undecodable", str(error)
        return "ok", ""

    def _list(self, socket: Path) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
        if self._channel is None:
            limit = ("grpc.max_receive_message_length", self._largest_answer_bytes)
            self._channel = grpc.aio.insecure_channel(f"unix:{quote(str(socket))}", (limit, *_RECONNECT))
        return self._channel.unary_unary("/v1.PodResourcesLister/List")

    async def _take(self, answer: bytes) -> None:
        if answer == self._answer:
            return
        if len(answer) < _DECODED_ASIDE_BYTES:
            found = containers(answer, self._prefixes)
        else:
            found = await asyncio.to_thread(containers, answer, self._prefixes)
        settled = self._clock() >= self._settled_s
        missed = [] if settled else _not_yet_listed(self._containers or [], found)
        self._containers, self._answer = [*found, *missed], answer if settled else None

    def _note(self, state: State, reason: str) -> None:
        """Remember how it is with the kubelet; say so when it changed, and of one that wavers once a minute."""
        self._state, self._reason = state, reason
        now_s = self._clock()
        if state == self._told or now_s - self._told_s.get(state, float("-inf")) < _SAY_AGAIN_S:
            return
        self._told, self._told_s[state] = state, now_s
        if state == "ok":
            log.info("the kubelet answers", extra={"socket": str(self._socket)})
        else:
            log.warning("%s", self._sentence())

    def _sentence(self) -> str:
        return _SENTENCES[self._state or "absent"] % (self._socket, self._reason)


def _absence(error: OSError) -> str:
    return "the socket is not there" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _not_yet_listed(known: Iterable[JsonDict], found: Iterable[JsonDict]) -> list[JsonDict]:
    """What was known and is not in an answer that may lack pods, but for those whose devices others have by now."""
    there, taken = {_holder(row) for row in found}, {device for row in found for device in _devices(row)}
    return [row for row in known if _holder(row) not in there and taken.isdisjoint(_devices(row))]


def _holder(row: JsonDict) -> tuple[Any, ...]:
    return (row["namespace"], row["pod"], row["container"], row.get("resource"))


def _devices(row: JsonDict) -> set[Any]:
    claimed = {(claim["driver"], claim["pool"], claim["device"]) for claim in row.get("claims", ())}
    return {*row.get("device_ids", ()), *claimed}
