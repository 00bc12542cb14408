"""Tells one Alertmanager: what is new, and again and again what is open.

In: alerts of its partitions. Out: requests, one at a time, so that no older state arrives after a newer one.
State: the partitions' boards that are ours; which alerts are refused.
On failure: an Alertmanager that is away is waited for. It has alerts in memory only, so it is told all of them when it
is back.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from sinks.alertmanager.board import Board
from sinks.alertmanager.config import AlertmanagerSettings, alerts_url
from sinks.alertmanager.encode import request
from sinks.alertmanager.instruments import COMPONENT
from sinks.dead_letters import Abandoned
from sinks.receiver import BACKOFF_FIRST_S, Post, Receiver, Request
from topics.alerts import Alert
from topics.instruments import Instruments

log = logging.getLogger(__name__)

Refused = dict[str, str]
"""Why alerts were refused, by fingerprint."""

_REFUSES_EVERYTHING = 3
"""If so many alerts are refused and no other is accepted with them, it is not about the alerts."""


class Teller:
    """One Alertmanager. Whoever tells it something has ``turn`` meanwhile, and until the board shows what was told."""

    def __init__(
        self,
        url: str,
        settings: AlertmanagerSettings,
        post: Post,
        made: Instruments,
        *,
        first_s: float = BACKOFF_FIRST_S,
    ) -> None:
        again = self._all_due
        self.receiver = Receiver(alerts_url(url), post, COMPONENT, made, first_s=first_s, on_recovery=again)
        self.turn = asyncio.Lock()
        self._settings = settings
        self._resent = made.counter("gpustream_alertmanager_resent_total", self.receiver.name)
        self._refusals = made.counter("gpustream_alertmanager_refused_total", self.receiver.name)
        made.gauge("gpustream_alertmanager_open_alerts", self.receiver.name).set_function(self._open)
        self._boards: dict[Board, asyncio.Event] = {}
        self._due: set[Board] = set()
        self._wake = asyncio.Event()
        self._refused: set[str] = set()

    def has(self, board: Board, abandon: asyncio.Event) -> None:
        """A board is complete, and ours until ``abandon``: it is told now, and again and again."""
        if self._boards.get(board) is not abandon:
            self._boards[board] = abandon
            self._due.add(board)
            self._wake.set()

    async def tell(self, alerts: Sequence[Alert], abandon: asyncio.Event) -> Refused:
        """Tell alerts, and find out which are refused. Raises Abandoned.

        Those that were refused before are told alone, so that they cost the others no more requests.
        """
        others = [one for one in alerts if one.fingerprint not in self._refused]
        refused = await self._by_halves(others, abandon)
        for one in alerts:
            if one.fingerprint in self._refused:
                refused |= await self._by_halves([one], abandon)
        if alerts:
            every = len(refused) == len(alerts) and len(self._refused | refused.keys()) >= _REFUSES_EVERYTHING
            self.receiver.refuses_all(next(iter(refused.values())) if every else None)
        for fingerprint in refused.keys() - self._refused:
            log.warning("alert %s is refused: %s", fingerprint, refused[fingerprint])
        self._refused.difference_update(one.fingerprint for one in alerts)
        self._refused.update(refused)
        return refused

    async def _by_halves(self, alerts: Sequence[Alert], abandon: asyncio.Event) -> Refused:
        why = await self.receiver.send(lambda: self._request(alerts), abandon) if alerts else None
        if why is None:
            return {}
        if len(alerts) == 1:
            self._refusals.inc()
            return {alerts[0].fingerprint: f"{self.receiver.name}: {why}"}
        half = len(alerts) // 2
        return await self._by_halves(alerts[:half], abandon) | await self._by_halves(alerts[half:], abandon)

    async def resend(self) -> None:
        """Tell again what is to be told, until cancelled."""
        next_s = time.monotonic() + self._settings.resend_s
        while True:
            try:
                async with asyncio.timeout(next_s - time.monotonic()):
                    await self._wake.wait()
            except TimeoutError:
                next_s = time.monotonic() + self._settings.resend_s
                self._all_due()
            self._wake.clear()
            due, self._due = self._due, set()
            for board in due:
                await self._resend(board)

    async def _resend(self, board: Board) -> None:
        abandon = self._boards.get(board)
        if abandon is None:
            return
        fingerprints = board.due(int(time.time() * 1000))
        try:
            for start in range(0, len(fingerprints), self._settings.max_alerts):
                async with self.turn:
                    states = board.states(fingerprints[start : start + self._settings.max_alerts])
                    await self.tell(states, abandon)
                    self._resent.inc(len(states))
        except Abandoned:
            del self._boards[board]

    def _request(self, alerts: Sequence[Alert]) -> Request:
        return request(alerts, datetime.now(UTC), self._settings.resend_s, self._settings.generator_url)

    def _all_due(self) -> None:
        self._boards = {board: abandon for board, abandon in self._boards.items() if not abandon.is_set()}
        self._due.update(self._boards)
        self._wake.set()

    def _open(self) -> int:
        return sum(board.open() for board, abandon in self._boards.items() if not abandon.is_set())
