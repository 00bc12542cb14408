"""The reclaim sink: gpu.alerts -> what namespaces let be done about workloads that waste GPUs, in one cluster.

In: gpu.alerts, as a member of a group; gpu.actions, all of it, at every replica. Out: requests to the API server;
gpu.actions; gpu.dead-letters.
State: none that a restart does not read back: the alerts that fire, and what was decided before.
An alert is only acted on while its partition is read to the end, so that none is that was resolved meanwhile. An
intention is written before anything is changed, and the change is refused if the object was changed since it was looked
at. It leaves the action's id on the object. So whoever has the partition after a crash looks at the object, and knows
whether it was done.
On failure: without Kafka or an API server it waits, and does nothing. What the API server does not let be done is
written as refused, and tried again while the alert fires.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import msgspec

from delivery.dead_letters import Abandoned, DeadLetters, Record, connecting
from delivery.instruments import Instruments
from delivery.kubernetes.client import Client, Unreachable
from delivery.positions import WHOLE_LOG
from delivery.sender import Sender
from delivery.settings import TopicAccess
from delivery.tail import Tail
from delivery.topic_admin import TopicCheck
from sinks.alerts import Transitions, key_of, read_alert
from sinks.consumer import GroupReader, Source, together
from sinks.outcomes import Outcomes, Undecodable
from sinks.reclaim.cluster import Cluster, is_read
from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.decide import Watched, works_partly
from sinks.reclaim.ledger import KEPT_MS
from sinks.reclaim.reclaimer import API_REQUESTS, COMPONENT, FRESH_S, INSTRUMENTS, Reclaimer
from topics import actions, alerts
from topics.actions import KINDS, Action, kafka_headers

log = logging.getLogger(__name__)

_AGAIN_S = 5.0
_MAX_FAILURES = 2  # if alerts can't be looked at so many times in a row, open actions are settled first


class ReclaimPartition:
    """The handler of a partition; all share the reclaimer. ``is_ready``: what was decided before is known."""

    def __init__(
        self,
        reclaimer: Reclaimer,
        letters: DeadLetters,
        outcomes: Outcomes,
        is_ready: Callable[[], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reclaimer, self._letters, self._outcomes, self._is_ready = reclaimer, letters, outcomes, is_ready
        self._clock_s = clock_s
        self._transitions = Transitions()
        self._fingerprints: set[str] = set()  # of all alerts of the cluster
        self._watched: dict[str, Watched] = {}
        self._check_at_s: dict[str, float] = {}
        self._failures = 0
        self._resume_at_s = -math.inf  # the API server is asked nothing before

    def recall(self, record: Record) -> None:
        """Restore whether an alert fires."""
        with contextlib.suppress(Undecodable):  # its dead letter has been written before
            self._learn(record)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Note which alerts fire. What is due is done when all is read."""
        for record in records:
            try:
                self._outcomes.finish("delivered" if self._learn(record) else "duplicate")
            except Undecodable as error:
                await self._letters.write(record, str(error), abandon)
                self._outcomes.finish("dead_lettered")
        yield records[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Do what is due. Raises Abandoned."""
        if not self._is_ready() or self._clock_s() < self._resume_at_s:
            return
        began_s, failure = self._clock_s(), None
        if self._failures >= _MAX_FAILURES:
            self._failures, failure = 0, await self._settle(abandon)
        if failure is None:
            failure = await self._consider(began_s, abandon)
            self._failures = 0 if failure is None else self._failures + 1
        if failure is None:
            failure = await self._settle(abandon)  # it may take long, and alerts may be resolved meanwhile
        if failure is not None:
            self._reclaimer.health.bad(failure.reason, str(failure))
            pause_s = max(_AGAIN_S, getattr(failure, "retry_after_s", None) or 0.0)
            self._resume_at_s = self._clock_s() + pause_s

    def reset(self) -> None:
        self._transitions.clear()
        self._fingerprints.clear()
        self._watched.clear()
        self._check_at_s.clear()

    async def _consider(self, began_s: float, abandon: asyncio.Event) -> Unreachable | None:
        """Do what is due about the alerts that are due to be looked at. Returns why one can't be."""
        try:
            for fingerprint, watched in list(self._watched.items()):
                if abandon.is_set():
                    raise Abandoned
                if self._clock_s() - began_s > FRESH_S:
                    break
                if self._check_at_s.get(fingerprint, -math.inf) <= self._clock_s():
                    # the last one in the next turn: an alert that always fails must not keep the others waiting
                    self._watched[fingerprint] = self._watched.pop(fingerprint)
                    self._check_at_s[fingerprint] = self._clock_s() + _AGAIN_S
                    wait_s = await self._reclaimer.consider(watched, abandon)
                    self._check_at_s[fingerprint] = self._clock_s() + wait_s
                    if not wait_s:  # what was read of it is kept for the next turn only
                        self._watched = {fingerprint: watched, **self._watched}
        except Unreachable as error:
            return error
        return None

    async def _settle(self, abandon: asyncio.Event) -> Unreachable | None:
        """Settle the actions that another process began, and cancel those that are not due any more. One of a kind that
        is not known is left alone. Returns why an action is left open, if one is: the alerts do not wait for it."""
        failure: Unreachable | None = None
        for action in self._reclaimer.ledger.unsettled():
            target = None if action.action == "event" else action.target
            is_known = action.action in KINDS and (target is None or is_read(target))  # a later version may have others
            if action.fingerprint not in self._fingerprints or not is_known:
                continue
            if action.state == "intended":
                try:
                    await self._reclaimer.settle(action, abandon)
                except Unreachable as error:
                    failure = error
                else:
                    self._check_at_s.pop(action.fingerprint, None)
            else:
                watched = self._watched.get(action.fingerprint)
                if watched is None or watched.alert.starts_at != action.starts_at:
                    await self._reclaimer.end(action, "resolved", abandon)
        return failure

    def _learn(self, record: Record) -> bool:
        """Add a record. Returns whether it is a new state of an alert that this sink acts on. Raises Undecodable."""
        settings = self._reclaimer.settings
        try:
            alert = read_alert(record)
        except Undecodable:
            self._watched.pop(key_of(record), None)  # it may be resolved by that
            raise
        if alert is None:
            self._transitions.update(record, None)
            self._watched.pop(key_of(record), None)
            self._check_at_s.pop(key_of(record), None)
            self._fingerprints.discard(key_of(record))
            return False
        if alert.cluster != settings.cluster:
            return False
        self._fingerprints.add(alert.fingerprint)
        if alert.name not in settings.alert_names:
            return False  # what was begun about it is settled all the same
        is_new = self._transitions.is_news(alert)
        if not is_new and not self._transitions.is_last(alert):
            return False  # an earlier state
        self._transitions.update(record, alert)
        before = self._watched.pop(alert.fingerprint, None)
        if is_new:
            self._check_at_s.pop(alert.fingerprint, None)
        if not alert.is_open or "k8s_namespace_name" not in alert.labels:
            return is_new
        at_ms = fired_ms = record.timestamp
        whole_ms, revision = None if works_partly(alert) else at_ms, alert.revision
        if before is not None and before.alert.starts_at == alert.starts_at:
            fired_ms = before.fired_ms
            none_missed = alert.revision <= before.alert.revision + 1  # a compaction may have deleted one between
            if whole_ms is not None and before.whole_ms is not None and none_missed:
                whole_ms, revision = before.whole_ms, before.revision
        self._watched[alert.fingerprint] = Watched(alert, fired_ms, whole_ms, revision, at_ms)
        return is_new


class ReclaimSink:
    """A component: :meth:`run` it until it has to stop. ``settings`` have no errors."""

    name = "reclaim"

    def __init__(self, settings: ReclaimSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._reclaimer: Reclaimer | None = None
        self._reader: GroupReader | None = None
        self._tail: Tail | None = None
        self._sender: Sender | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read, decide and act until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        settings, instruments = self.settings, self._instruments
        api = Client(settings.kubeconfig, partial(instruments.counter, API_REQUESTS))
        check = TopicCheck(settings.connection(), TopicAccess(writes=(actions.TOPIC.name,)))
        sender = self._sender = Sender(settings.connection(), client_id=settings.group, check=check)
        letters, record_outcomes = DeadLetters(sender, "sink reclaim"), Outcomes(COMPONENT, instruments)

        async def send(action: Action) -> None:
            value, key = msgspec.json.encode(action), action.cluster.encode()
            await (await sender.send(actions.TOPIC.name, value, key=key, headers=kafka_headers(action)))

        reclaimer = self._reclaimer = Reclaimer(settings, Cluster(api), send, instruments)
        tail = self._tail = Tail(
            settings.connection(), {actions.TOPIC.name: KEPT_MS / 1000}, reclaimer.handle, client_id=settings.group
        )
        shared = (reclaimer, letters, record_outcomes, lambda: not tail.not_ready())
        source = Source(alerts.TOPIC.name, lambda _: ReclaimPartition(*shared), settings.from_, WHOLE_LOG)
        self._reader = GroupReader(settings, [source], record_outcomes)
        if settings.act:
            log.info("acting")
        else:
            log.info("a dry run: nothing is changed, and gpu.actions says what would be")
        try:
            await api.start()
            async with connecting(sender):
                await together(stop, [self._reader, tail])
        finally:
            await api.close()

    def not_ready(self) -> list[str]:
        """The reasons why nothing is decided; empty if there are none."""
        if self._reader is None or self._tail is None or self._sender is None or self._reclaimer is None:
            return ["not started"]
        kafka_reasons = [*self._reader.not_ready(), *self._tail.not_ready(), *self._sender.not_ready()]
        return [*dict.fromkeys(kafka_reasons), *self._reclaimer.health.lasting()]
