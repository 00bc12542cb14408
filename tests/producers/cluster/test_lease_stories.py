"""Whatever the API server answers, however late, and wherever clocks are set: two never lead, and epochs rise."""

import asyncio
import itertools
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Unreachable
from producers.cluster import instruments as names
from producers.cluster import lease as module
from producers.cluster.lease import LeaderElector
from tests import clock

NOW_S = 1_795_000_000


class UnreliableApi:
    """An API server with one Lease. Some requests are late, refused or lost, or their answers are. A request that the
    client has given up may still arrive. ``trouble`` is the share of these."""

    def __init__(self, chance: Random) -> None:
        self._chance, self.trouble = chance, 0.0
        self._lease: dict[str, Any] | None = None
        self._version = 0
        self._requests: set[asyncio.Task[Answer | Unreachable]] = set()

    async def request(self, method: str, _: str, *, body: bytes | None, timeout_s: float) -> Answer:
        request = asyncio.ensure_future(self._handle(method, body))
        self._requests.add(request)
        await asyncio.wait([request], timeout=timeout_s)
        if not request.done():
            raise Unreachable("timeout", "no answer in time")
        if isinstance(answer := request.result(), Unreachable):
            raise answer
        return answer

    async def _handle(self, method: str, body: bytes | None) -> Answer | Unreachable:
        await self._pause()
        match self._chance.choice(["cut", "refused", "garbage", "label"]) if self._is_troubled() else "":
            case "cut":
                return Unreachable("connection", "cut")
            case "refused":
                return Answer(self._chance.choice([401, 403, 409, 429, 500]), b"{}", None)
            case "garbage":
                return Answer(200, self._chance.choice([b"<html>", b"{}"]), None)
            case "label" if self._lease is not None:
                self._store({**self._lease, "metadata": {"labels": {"n": str(self._version)}}})
        answer = self._apply(method, msgspec.json.decode(body or b"null"))
        await self._pause()
        return Unreachable("cut", "the answer was lost") if self._is_troubled() else answer

    def _apply(self, method: str, lease: Any) -> Answer:
        if method == "GET":
            return Answer(200 if self._lease else 404, msgspec.json.encode(self._lease or {}), None)
        expected = self._lease and self._lease["metadata"]["resourceVersion"]
        if (lease["metadata"].get("resourceVersion") if method == "PUT" else None) != expected:
            return Answer(409, b"{}", None)
        return Answer(200, msgspec.json.encode(self._store(lease)), None)

    def _store(self, lease: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        self._lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self._version)}}
        return self._lease

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.choice([0.1, 0.5, 2.0, 4.5, 9.0]) if self._is_troubled() else 0.01)

    def _is_troubled(self) -> bool:
        return self._chance.random() < self.trouble


class Story:
    """Processes that want to lead, come and go, and are stopped or cancelled, and what happens to them."""

    def __init__(self, chance: Random) -> None:
        self._chance, self._api = chance, UnreliableApi(chance)
        self._leading: list[str] = []
        self.epochs: list[int] = []

    async def tell(self) -> None:
        trouble = asyncio.ensure_future(self._change_trouble())
        await asyncio.gather(*(self._live(name) for name in "abc"))
        trouble.cancel()

    async def _change_trouble(self) -> None:
        while True:
            self._api.trouble = self._chance.choice([0.0, 0.1, 0.3, 0.6, 1.0])
            await asyncio.sleep(self._chance.uniform(1, 30))

    async def _live(self, name: str) -> None:
        """A process, and those that follow it: their wall clock is wrong, and is set again now and then."""
        ahead_s, time_s = [0.0], asyncio.get_running_loop().time

        def now_us() -> int:
            ahead_s[0] += self._chance.choice([0, 0, 0, -3600, -5, 5, 3600])
            return round((NOW_S + time_s() + ahead_s[0]) * 1e6)

        for life in range(3):
            await asyncio.sleep(self._chance.uniform(0, 10))
            elector = LeaderElector(
                self._api,  # type: ignore[arg-type] # all of a client that it uses
                Instruments(names.INSTRUMENTS),
                namespace="gpu",
                name="leader",
                identity=f"{name}-{life}",
                now_us=now_us,
            )
            stop = asyncio.Event()
            running = asyncio.ensure_future(elector.run(self._work(f"{name}-{life}"), stop))
            await asyncio.wait([running], timeout=self._chance.choice([5, 30, 100]))
            if self._chance.random() < 0.5:
                stop.set()
            else:
                running.cancel()
            await asyncio.wait([running])
            assert running.cancelled() or running.exception() is None

    def _work(self, identity: str) -> Callable[[int], Any]:
        async def work(epoch: int) -> None:
            self._leading.append(identity)
            self.epochs.append(epoch)
            assert self._leading == [identity]
            try:
                await asyncio.sleep(self._chance.choice([5, 3600]))
            finally:
                try:
                    await asyncio.sleep(self._chance.choice([0, 0.5, 2.5]))
                finally:  # it may be cancelled once more
                    self._leading.remove(identity)

        return work


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_two_never_lead_whatever_happens_to_requests_and_clocks(seed: int) -> None:
    async def story() -> list[int]:
        told = Story(Random(seed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
            await told.tell()
        return told.epochs

    assert all(before < after for before, after in itertools.pairwise(clock.run(story())))
