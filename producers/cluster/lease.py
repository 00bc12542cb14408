"""Leader election with a Lease: of several processes the one that holds it leads, and never two at a time.

In: a coordination.k8s.io/v1 Lease. Out: the work, which runs while this process holds the Lease.
State: the Lease as last observed, and when it last changed by our own clock.
On failure: if the Lease can't be renewed for 7 s, the work is cancelled and awaited. After 10 s another process may
take the Lease. If the work has not ended by then, this process ends.

Source: the Lease's fields as client-go's leader election writes them. Clocks of two machines are never compared: the
Lease of another process has expired if, by our clock, it has not changed for its duration.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, ApiHealth, Client, Unreachable, message
from producers.cluster import instruments as names
from topics.topic import UNDECODABLE

log = logging.getLogger(__name__)

RENEW_S = 2.0
GIVE_UP_S = 7.0
CALL_WITHIN_S = 4.0
RELEASE_WITHIN_S = 2.0
LEAST_TO_END_S = 1.0  # how long the work may take to end even if the Lease has expired, as after a suspended process
DURATION_S = 10.0
LONGEST_DURATION_S = 60.0  # a longer duration is cut to this: a typing error must not stop the next leader for a day
_LAST_YEAR = 9000  # a later time is ignored: epochs must have room to count up
_MOST_TRANSITIONS = 2**31 - 2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Json = dict[str, Any]

Work = Callable[[int], Coroutine[Any, Any, None]]


class LeaseRecord(NamedTuple):
    """The spec of a Lease. Times are microseconds since the epoch, by the clock of the process that wrote them."""

    holder: str = ""
    duration_s: float = DURATION_S
    acquired_us: int = 0
    renewed_us: int = 0
    transitions: int = 0

    @property
    def epoch(self) -> int:
        """When the holder acquired it, in milliseconds since the epoch."""
        return self.acquired_us // 1000


def decode_lease(lease: Json) -> LeaseRecord:
    """The record of a Lease. A missing or invalid field has the value that it has in a Lease without a holder."""
    spec = lease.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    holder, transitions = spec.get("holderIdentity"), spec.get("leaseTransitions")
    seconds = spec.get("leaseDurationSeconds")
    return LeaseRecord(
        holder=holder if isinstance(holder, str) else "",
        duration_s=float(min(max(seconds, 1), LONGEST_DURATION_S)) if isinstance(seconds, int) else DURATION_S,
        acquired_us=_parse_us(spec.get("acquireTime")),
        renewed_us=_parse_us(spec.get("renewTime")),
        transitions=min(max(transitions, 0), _MOST_TRANSITIONS) if isinstance(transitions, int) else 0,
    )


def encode_spec(record: LeaseRecord) -> Json:
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": math.ceil(record.duration_s),
        "acquireTime": _format_us(record.acquired_us),
        "renewTime": _format_us(record.renewed_us),
        "leaseTransitions": record.transitions,
    }


def acquired(last: LeaseRecord, identity: str, *, duration_s: float, now_us: int) -> LeaseRecord:
    """The record with which ``identity`` acquires the Lease after ``last``. Its epoch is higher, even if clocks stepped
    back."""
    acquired_us = max(now_us, (last.epoch + 1) * 1000)
    return LeaseRecord(identity, duration_s, acquired_us, now_us, last.transitions + 1)


def _parse_us(value: Any) -> int:
    """A time of the API in microseconds since the epoch; 0 if it is invalid."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        timestamp = datetime.fromisoformat(value).astimezone(UTC)
        return (timestamp - _EPOCH) // timedelta(microseconds=1) if timestamp.year < _LAST_YEAR else 0
    return 0


def _format_us(micros: int) -> str:
    return (_EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseRefused(Exception):
    """The Lease could not be read or written; ``reason`` is the kind of the failure. Try again."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LeaseLock:
    """The Lease at the API server, as last read or written."""

    def __init__(self, api: Client, namespace: str, name: str) -> None:
        self._api, self._name = api, name
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        metadata = {"name": name, "namespace": namespace}
        self._new: Json = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        self._lease: Json | None = None

    async def read(self, within_s: float) -> Json | None:
        """The Lease; None if it does not exist. Raises LeaseRefused and Unreachable."""
        answer = await self._request("GET", f"{self._collection}/{self._name}", None, within_s)
        if answer.status not in (200, 404):
            raise self._refusal("get", answer)
        self._lease = None if answer.status == 404 else _decode_object(answer.body)
        return self._lease

    async def write(self, spec: Json, within_s: float) -> bool:
        """Write this spec into the Lease, or a new one; False if it changed since. Raises LeaseRefused, Unreachable."""
        body = msgspec.json.encode({**(self._lease or self._new), "spec": spec})
        if self._lease is None:
            verb, answer = "create", await self._request("POST", self._collection, body, within_s)
        else:
            verb, answer = "update", await self._request("PUT", f"{self._collection}/{self._name}", body, within_s)
        if answer.status == 409 or (answer.status == 404 and verb == "update"):
            return False
        if answer.status not in (200, 201):
            raise self._refusal(verb, answer)
        lease = _decode_object(answer.body)
        if decode_lease(lease) != decode_lease({"spec": spec}):  # taken for a renewal, it would make two leaders
            raise LeaseRefused("garbage", f"an answer that is not the Lease as written: {message(answer.body)}")
        self._lease = lease
        return True

    async def _request(self, method: str, path: str, body: bytes | None, within_s: float) -> Answer:
        try:
            async with asyncio.timeout(within_s):
                return await self._api.request(method, path, body=body, timeout_s=within_s)
        except TimeoutError as error:
            raise Unreachable("timeout", f"no answer within {within_s:.1f} s") from error

    def _refusal(self, verb: str, answer: Answer) -> LeaseRefused:
        text = f"{message(answer.body)} ({answer.status})"
        if answer.status != 403:
            return LeaseRefused(str(answer.status), f"the API server does not {verb} it: {text}")
        name_rule = "" if verb == "create" else f', resourceNames: ["{self._name}"]'
        rule = f'{{apiGroups: ["coordination.k8s.io"], resources: [leases]{name_rule}, verbs: [{verb}]}}'
        return LeaseRefused("403", f"not allowed (403); our Role lacks {rule}: {text}")


def _decode_object(body: bytes) -> Json:
    """The Lease in an answer. It must have a resource version: without one, a write would overwrite any holder."""
    try:
        lease = msgspec.json.decode(body, type=Json)
    except UNDECODABLE as error:
        raise LeaseRefused("garbage", f"an answer that is no Lease ({error}): {message(body)}") from error
    metadata = lease.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("resourceVersion"):
        raise LeaseRefused("garbage", f"an answer that is no Lease: {message(body)}")
    return lease


class Stuck(Exception):
    """The work did not end before another process may lead. This process has to end instead."""

    exit_code = 1


class LeaderElector:
    """The Lease ``namespace``/``name``, and this process, which writes ``identity`` into it.

    Another process may acquire it if it has not changed for ``duration_s``. The leader renews it every ``renew_s``, and
    gives up ``give_up_s`` after the last renewal. ``now_us`` is the time of day, which may step back.
    """

    def __init__(
        self,
        api: Client,
        instruments: Instruments,
        *,
        namespace: str,
        name: str,
        identity: str,
        duration_s: float = DURATION_S,
        renew_s: float = RENEW_S,
        give_up_s: float = GIVE_UP_S,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._lock = LeaseLock(api, namespace, name)
        self._instruments, self._identity, self._now_us = instruments, identity, now_us
        self._duration_s, self._renew_s, self._give_up_s = duration_s, renew_s, give_up_s
        self._health = ApiHealth(f"lease {namespace}/{name}", log)
        self._observed = self._latest = self._sent = LeaseRecord()
        self._observed_s = self._renewed_s = float("-inf")
        self.leading = False
        instruments.gauge(names.LEADING).set(0)

    async def run(self, work: Work, stop: asyncio.Event) -> None:
        """Wait to lead, run ``work(epoch)`` while leading, and again, until ``stop`` or until the work returns.

        The work is cancelled and awaited before anybody else can lead, and then the Lease is released. Raises what the
        work raises, and :class:`Stuck`.
        """
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                if await self._acquire():
                    if await self._lead(work, stopping):
                        return
                    continue
                pause_s = self._renew_s * random.uniform(0.8, 1.0)
                left_s = self._observed_s + self._observed.duration_s - time.monotonic()
                expires_first = self._observed.holder and 0 < left_s < pause_s
                await asyncio.wait({stopping}, timeout=left_s if expires_first else pause_s)
        finally:
            stopping.cancel()

    def not_ready(self) -> list[str]:
        """Why it is not ready: the Lease could not be read or written for 30 s. Standing by is ready."""
        return self._health.lasting()

    # -- acquiring it

    async def _acquire(self) -> bool:
        """Acquire the Lease if it has no holder, is our own or has expired; returns whether that worked."""
        try:
            self._observe(await self._lock.read(CALL_WITHIN_S))
            expired = time.monotonic() - self._observed_s >= self._observed.duration_s
            success = False
            if not self._observed.holder or self._is_mine() or expired:
                record = acquired(self._latest, self._identity, duration_s=self._duration_s, now_us=self._now_us())
                success = await self._write(record, CALL_WITHIN_S)
        except (LeaseRefused, Unreachable) as error:
            self._health.bad(error.reason, str(error))
            return False
        self._health.good("it can be read and written" if success else "standing by")
        return success

    def _observe(self, lease: Json | None) -> None:
        """Note a Lease, and when it last changed. A deleted Lease still holds for the rest of its duration."""
        record = self._observed if lease is None else decode_lease(lease)
        if record != self._observed:
            if record.holder not in ("", self._observed.holder, self._identity):
                log.info("%s leads", record.holder)
            self._observed, self._observed_s = record, time.monotonic()
        if record.epoch >= self._latest.epoch:
            self._latest = record

    def _is_mine(self) -> bool:
        """Whether this process wrote the observed Lease, perhaps without an answer."""
        return (self._observed.holder, self._observed.acquired_us) == (self._identity, self._sent.acquired_us)

    # -- holding it

    async def _lead(self, work: Work, stopping: "asyncio.Future[Any]") -> bool:
        """Run the work while the Lease is held, then release the Lease; returns whether the work returned by itself.
        Raises what the work raises."""
        self._set_leading(True)
        work_task, renewal = asyncio.create_task(work(self._sent.epoch)), asyncio.create_task(self._renew())
        try:
            await asyncio.wait({work_task, renewal, stopping}, return_when=asyncio.FIRST_COMPLETED)
            returned = work_task.done()
            if renewal.done():
                log.warning("no longer leading: %s", renewal.result())
        finally:
            renewal.cancel()
            work_task.cancel()
            left_s = self._renewed_s + self._duration_s - time.monotonic()
            done, _ = await asyncio.wait({work_task}, timeout=max(LEAST_TO_END_S, left_s))
            if not done:
                raise Stuck("the work did not end before another may lead; this process ends instead")
            await asyncio.wait({renewal})
            self._set_leading(False)
            with contextlib.suppress(LeaseRefused, Unreachable, TimeoutError):  # then it expires by itself
                async with asyncio.timeout(RELEASE_WITHIN_S):
                    if await self._update(self._sent._replace(holder=""), RELEASE_WITHIN_S):
                        log.info("the lease is released")
        if not work_task.cancelled():
            work_task.result()
        return returned

    async def _renew(self) -> str:
        """Renew the Lease until that fails for too long or another holds it; returns why this process can't lead."""
        pause_s, problem = self._renew_s, ""
        while (left_s := self._left_s()) > 0:
            await asyncio.sleep(min(pause_s, left_s))
            if (within_s := self._left_s()) <= 0:
                break
            try:
                async with asyncio.timeout(within_s):
                    held = await self._update(self._sent, CALL_WITHIN_S)
            except TimeoutError:  # the time left to lead is shorter than the call's limit
                problem = problem or f"no answer within {within_s:.1f} s"
            except (LeaseRefused, Unreachable) as error:
                pause_s, problem = self._renew_s / 4, str(error)
                self._health.bad(error.reason, problem)
            else:
                if held:
                    pause_s, problem = self._renew_s, ""
                    self._health.good("it can be read and written")
                elif self._is_mine():
                    pause_s, problem = self._renew_s / 4, "the API server found a conflict at each write (409)"
                    self._health.bad("409", problem)
                else:
                    return f"the lease is {self._observed.holder or 'nobody'}'s"
        reason = problem or "this process stood still, for it had no time to ask"
        return f"the lease could not be renewed for {self._give_up_s:g} s: {reason}"

    def _left_s(self) -> float:
        return self._renewed_s + self._give_up_s - time.monotonic()

    async def _update(self, record: LeaseRecord, within_s: float) -> bool:
        """Write our record with the present time; False if another holds the Lease, or at a second conflict. A conflict
        is tried once more, because others may write the Lease's labels, or an answer was lost."""
        record = record._replace(renewed_us=max(self._now_us(), record.renewed_us + 1))
        if self._is_mine() and await self._write(record, within_s):
            return True
        self._observe(await self._lock.read(within_s))
        return self._is_mine() and await self._write(record, within_s)

    async def _write(self, record: LeaseRecord, within_s: float) -> bool:
        """Write a record over the Lease as read; False if it changed since. The renewal counts from the
        start of the request."""
        self._sent, started_s = record, time.monotonic()
        if not await self._lock.write(encode_spec(record), within_s):
            return False
        self._renewed_s = started_s
        self._observed, self._observed_s, self._latest = record, time.monotonic(), record
        return True

    def _set_leading(self, leading: bool) -> None:
        self.leading = leading
        self._instruments.gauge(names.LEADING).set(int(leading))
        self._instruments.counter(names.TRANSITIONS, "leading" if leading else "standby").inc()
        if leading:
            log.info("leading, with epoch %d", self._sent.epoch)
