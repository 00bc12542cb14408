"""Decides about an alert, does what is due, and writes down both.

In: an alert that fires; gpu.actions. Out: requests to the API server; records for gpu.actions.
State: what was decided before, as gpu.actions says it: nothing is done that another replica could not find there.
On failure: :class:`Unreachable` if the API server is away, and an intention may be left open then: :meth:`settle` looks
what has become of it. What the API server refuses is written as refused.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from delivery.clock import now_ms
from delivery.dead_letters import Abandoned, Record, until_abandoned
from delivery.instruments import Instrument, Instruments, named
from delivery.kubernetes.client import ApiHealth, requests_instrument
from delivery.policies import RECLAIM, OptIn, opt_in
from delivery.values import duration_words
from sinks import outcomes
from sinks.reclaim.cluster import NAMESPACE_S, Cluster, Denied
from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.decide import (
    Facts,
    Firing,
    Json,
    Objection,
    Watched,
    WorkloadChange,
    changed_by,
    decide,
    describe,
    event,
    event_name,
    is_done,
    patch,
    subject,
)
from sinks.reclaim.ledger import OVER, Ledger, is_repeated
from topics.actions import KINDS, Action, ActionKind, action_id
from topics.alerts import Alert
from topics.times import epoch_ms, time_of
from topics.topic import decoder

log = logging.getLogger(__name__)

COMPONENT = "reclaim"
ACTIONS = "gpustream_reclaim_actions_total"
UNSETTLED = "gpustream_reclaim_unsettled"
BUDGET = "gpustream_reclaim_budget_left"
API_REQUESTS = "gpustream_reclaim_api_requests_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    *named(
        outcomes.COMMON,
        "gpustream_reclaim_records_read_total",
        "gpustream_reclaim_records_delivered_total",
        "gpustream_reclaim_records_duplicate_total",
        "gpustream_reclaim_records_dropped_total",
        "gpustream_reclaim_records_dead_lettered_total",
        "gpustream_reclaim_records_released_total",
        "gpustream_reclaim_records_held",
        "gpustream_reclaim_records_expired_total",
        "gpustream_reclaim_new_logs_total",
        "gpustream_reclaim_commits_total",
        "gpustream_reclaim_partitions",
        "gpustream_reclaim_lag_records",
        "gpustream_reclaim_loop_late_seconds",
    ),
    Instrument(
        ACTIONS,
        "counter",
        "What was written to gpu.actions, by what became of it, and why.",
        ("action", "state", "reason"),
    ),
    Instrument(UNSETTLED, "gauge", "Actions that are planned, or intended and without an outcome."),
    Instrument(BUDGET, "gauge", "How many more actions the budget lets be done now, of each.", ("budget",)),
    requests_instrument(API_REQUESTS),
)

CHECK_S = 60.0
"""How often an alert is checked if nothing is due before, because its namespace may have changed."""

CHECK_REFUSED_S = 300.0
FRESH_S = 5.0
"""How long a decision may take from the moment that the end of the partition was read. After that, read on first."""

_FACTS_S = 15.0
"""For how long what took longer to read is kept, so that it is decided when the partition was read on."""

_OLDEST_FACTS_S = 120.0
"""How long ago the reading may have begun: a process may be stopped in the middle of it, and go on hours later."""

_MAX_EVENTS = 8
_CHANGED = "somebody changed it between the decision and the action, or it went: nothing was done"
_FORGOTTEN = "the object has the id of this action: it was done, and perhaps undone, and gpu.actions does not have it"
_INTERRUPTED = "it was not done: the process ended, or Kafka or the API server took too long"
_decode = decoder(Action)


class _SlowFacts(NamedTuple):
    """What took long to read about an alert, and until when it may be decided by that."""

    watched: Watched
    facts: Facts
    until_s: float


class Reclaimer:
    """Decides and acts, for all partitions. ``now_ms``: the time of day. ``clock_s`` never steps back."""

    def __init__(
        self,
        settings: ReclaimSettings,
        cluster: Cluster,
        send: Callable[[Action], Coroutine[Any, Any, None]],
        instruments: Instruments,
        now_ms: Callable[[], int] = now_ms,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.cluster = settings, cluster
        budgets = {"stop": settings.budget, "event": settings.event_budget}
        self.ledger = Ledger(settings.cluster, budgets)
        self.health = ApiHealth("the API server", log)
        self._send, self._instruments, self._now_ms, self._clock_s = send, instruments, now_ms, clock_s
        self._by = settings.instance_id or socket.gethostname()
        self._read = asyncio.Event()
        self._slow_facts: dict[str, _SlowFacts] = {}
        instruments.gauge(UNSETTLED).set_function(lambda: len(self.ledger.unsettled()))
        for budget in budgets:
            instruments.gauge(BUDGET, budget).set_function(lambda name=budget: self.ledger.left(name, self._now_ms()))  # type: ignore[misc]

    def handle(self, _: str, records: Sequence[Record]) -> None:
        """Add records of gpu.actions to the ledger."""
        for record in records:
            try:
                self.ledger.add(_decode(record.value or b""), record.timestamp)
            except msgspec.DecodeError as error:
                log.warning("partition %d offset %d: no action: %s", record.partition, record.offset, error)
        self._read.set()

    async def consider(self, watched: Watched, abandon: asyncio.Event) -> float:
        """Do what is due about an alert. Returns in how many seconds to consider it again.

        0: what it needs to know took long to read, and is kept for some seconds. Read the partition on, and call this
        again first. Raises Unreachable and Abandoned.
        """
        began_s, alert = self._clock_s(), watched.alert
        firing = Firing(alert, None, partly=False, written_ms=watched.written_ms, until_s=began_s + FRESH_S)
        namespace, allowed = await self._opt_in(alert)
        if isinstance(allowed, Objection):
            await self._refuse(firing, None, allowed, abandon)
            return CHECK_REFUSED_S
        for kind in [kind for kind in KINDS if kind not in allowed.actions]:
            await self.end(self.ledger.last(action_id(alert, kind)), "not_opted_in", abandon)
        firing = firing._replace(since_ms=self._since_ms(watched, allowed), partly=allowed.partly)
        dues, now_ms = self._dues(alert, allowed, firing.since_ms or watched.fired_ms), self._now_ms()
        if not dues:
            return CHECK_S
        wait_s = max(0.0, (min(dues.values()) - now_ms) / 1000)
        last_actions = [(self.ledger.last(action_id(alert, kind)), time_of(at_ms)) for kind, at_ms in dues.items()]
        revision = None if allowed.partly else alert.revision  # a new one is written: after a restart the time goes on
        planned = all(
            last and (last.state, last.due_at, last.revision) == ("planned", due_at, revision)
            for last, due_at in last_actions
        )
        if wait_s and (firing.since_ms is None or planned):
            return min(CHECK_S, wait_s)
        slow = self._slow_facts.pop(alert.fingerprint, None)
        if slow is not None and slow.watched is watched and began_s <= slow.until_s:
            facts: Facts | Objection = slow.facts
        else:
            facts = await self._facts(firing, namespace, now_ms)
        if isinstance(facts, Objection):
            for kind in [kind for kind, due_at_ms in dues.items() if due_at_ms <= now_ms]:
                await self._refuse(firing, kind, facts, abandon)
            return min(CHECK_S, wait_s or CHECK_S)
        if (now_s := self._clock_s()) > firing.until_s:
            self._slow_facts = {key: read for key, read in self._slow_facts.items() if read.until_s >= now_s}
            until_s = min(now_s + _FACTS_S, began_s + _OLDEST_FACTS_S)
            self._slow_facts[alert.fingerprint] = _SlowFacts(watched, facts, until_s)
            return 0.0
        return await self._decide_and_act(firing, facts, dues, abandon)

    async def settle(self, intention: Action, abandon: asyncio.Event, reason: str = "interrupted") -> None:
        """Find out whether an intended action was done, and write its outcome. Raises Unreachable and Abandoned."""
        target, generation = intention.target, intention.generation
        try:
            if target is None:
                done = False
            elif intention.action == "event":
                done = await self.cluster.has_event(intention.namespace, event_name(intention.id, target.uid))
            else:
                obj = await self.cluster.get(target, intention.namespace)
                done = is_done(obj, intention.id)
        except Denied as denied:
            self.health.bad(denied.reason, f"whether {intention.id} was done is not known: {denied}")
            return  # it stays open, because it may have been done
        if done:
            await self._write(_next_state(intention, "done", generation=generation), abandon)
        else:
            texts = {"interrupted": _INTERRUPTED, "changed": _CHANGED}
            await self._write(_next_state(intention, "refused", reason=reason, message=texts[reason]), abandon)

    async def end(self, planned: Action | None, reason: str, abandon: asyncio.Event) -> None:
        """Cancel a planned action. Raises Abandoned."""
        if planned is not None and planned.state == "planned":
            texts = {
                "resolved": "the alert was resolved or can't be read, or --alert-names does not have it any more",
                "not_opted_in": "the namespace does not let it be done any more",
            }
            await self._write(_next_state(planned, "ended", reason=reason, message=texts[reason]), abandon)

    async def _opt_in(self, alert: Alert, max_age_s: float = NAMESPACE_S) -> tuple[Json, OptIn | Objection]:
        """The namespace of an alert, and which actions it allows. Raises Unreachable."""
        try:
            namespace = await self.cluster.namespace(_namespace(alert), max_age_s)
        except Denied as denied:
            return {}, Objection(denied.reason, str(denied))
        self.health.good("it answers")
        if namespace is None:
            return {}, OptIn()
        try:
            return namespace, opt_in((namespace["metadata"].get("annotations") or {}).get(RECLAIM, "off"))
        except ValueError as error:
            message = f"the annotation {RECLAIM} of the namespace can't be read, so nothing is done: {error}"
            return namespace, Objection("policy_invalid", message)

    async def _facts(self, firing: Firing, namespace: Json, now_ms: int) -> Facts | Objection:
        """The objects of an alert, or why nothing is done about it. Raises Unreachable."""
        alert, confirmed_at = firing.alert, firing.alert.confirmed_at
        known_ms = firing.written_ms if confirmed_at is None else min(firing.written_ms, epoch_ms(confirmed_at))
        age_ms = now_ms - known_ms
        if firing.since_ms is None:
            share = f"{alert.idle} of {alert.held} devices are in it"
            count = share if alert.held else "how many GPUs it holds is not known"
            return Objection(
                "partly", f"{subject(alert)} works partly ({count}), and the namespace does not say partly"
            )
        if age_ms > self.settings.alert_age_s * 1000:
            known = f"what {subject(alert)} does is known as of {duration_words(age_ms)} ago"
            return Objection("old", f"{known}: is the alert stream well, do all its nodes send ticks?")
        try:
            return await self.cluster.facts(alert, namespace)
        except Denied as denied:
            return Objection(denied.reason, str(denied))

    def _since_ms(self, watched: Watched, allowed: OptIn) -> int | None:
        """Since when the alert has fired as the namespace requires; None: it does not, because some GPUs work.

        Actions that were written before a restart may have an earlier time than the log of alerts, which keeps only
        the last record of each.
        """
        alert, in_log_ms = watched.alert, watched.fired_ms if allowed.partly else watched.whole_ms
        if in_log_ms is None:
            return None
        last_actions = [self.ledger.last(action_id(alert, kind)) for kind in KINDS]
        revisions = range(watched.revision, alert.revision + 1)
        in_actions_ms = [
            epoch_ms(action.since)
            for action in last_actions
            if action is not None and action.since is not None
            if (action.revision is None if allowed.partly else action.revision in revisions)
        ]
        return min([in_log_ms, *in_actions_ms])

    def _dues(self, alert: Alert, allowed: OptIn, since_ms: int) -> dict[ActionKind, int]:
        """When each allowed action is due that is neither done nor open: after the time that its namespace sets, and no
        stop before ``--least``. One in a state that is not known, of a later version, is left alone."""
        dues: dict[ActionKind, int] = {}
        may_begin = {"planned", "refused", "ended", *(["dry_run"] if self.settings.act else [])}
        for kind in [kind for kind in KINDS if kind in allowed.actions]:
            last = self.ledger.last(action_id(alert, kind))
            min_after_ms = 0 if kind == "event" else round(self.settings.least_s * 1000)
            if last is None or last.state in may_begin:
                dues[kind] = since_ms + max(allowed.actions[kind] or 0, min_after_ms)
        return dues

    async def _decide_and_act(
        self, firing: Firing, facts: Facts, dues: dict[ActionKind, int], abandon: asyncio.Event
    ) -> float:
        """Decide about each action, plan those of later, and do those that are due."""
        now_ms, wait_s = self._now_ms(), CHECK_S
        idle_ms = now_ms - (firing.since_ms or now_ms)
        decisions = {kind: decide(kind, firing, facts, idle_ms=idle_ms) for kind in dues}
        stops = [decision for kind, decision in decisions.items() if kind != "event"]
        can_stop = any(isinstance(stop, WorkloadChange) or stop.reason != "unsupported" for stop in stops)
        for kind, decision in decisions.items():
            action = action_id(firing.alert, kind)
            intention, is_changed = self.ledger.intention(action), changed_by(action, facts)
            if is_changed and intention is not None:
                await self._write(_next_state(intention, "done"), abandon)  # after it was taken for refused
            elif is_changed:
                await self._refuse(firing, kind, Objection("already", _FORGOTTEN), abandon)
            elif isinstance(decision, Objection):
                if decision.reason != "unsupported" or not can_stop:
                    await self._refuse(firing, kind, decision, abandon)
                wait_s = CHECK_REFUSED_S if len(decisions) == 1 else wait_s
            elif dues[kind] > now_ms:
                wait_s = min(wait_s, (dues[kind] - now_ms) / 1000)
                message = f"{describe(kind, decision.target, _namespace(firing.alert))}, unless its GPUs work by then"
                due_at = time_of(dues[kind])
                planned = self._action(firing, kind, "planned", target=decision.target, due_at=due_at, message=message)
                await self._write(planned, abandon)
            else:
                await self._act(firing, kind, decision, facts, abandon)
        return wait_s

    async def _act(
        self, firing: Firing, kind: ActionKind, change: WorkloadChange, facts: Facts, abandon: asyncio.Event
    ) -> None:
        """Write the intention, act, and write the outcome. In a dry run, write what would be done.

        Nothing is done if that takes so long that the decision is old: an intention is left open then, and settled.
        """
        namespace, _ = await self._opt_in(firing.alert, max_age_s=0.0)
        if namespace != facts.namespace or self._clock_s() > firing.until_s:
            return
        summary = firing.alert.annotations.get("summary", firing.alert.name)
        generation = change.object["metadata"].get("generation")
        intention = self._action(
            firing, kind, "intended" if self.settings.act else "dry_run", message=summary,
            target=change.target, replicas=change.replicas,
            generation=generation + 1 if generation is not None and change.spec is not None else None,
        )  # fmt: skip
        if not self.settings.act:
            await self._write(intention, abandon)
            return
        is_granted = self.ledger.has_room(intention, self._now_ms()) and await self._write(intention, abandon)
        last = self.ledger.last(intention.id)
        if last is not None and (last.state in OVER or (last.state == "intended" and last.by != self._by)):
            return  # done or begun by another replica, whose records were not read before
        if not is_granted:
            budget = self.settings.event_budget if kind == "event" else self.settings.budget
            text = f"the budget of {budget} an hour is spent: {subject(firing.alert)} is tried again"
            await self._refuse(firing, kind, Objection("budget", text), abandon)
            return
        if abandon.is_set():
            raise Abandoned
        if self._clock_s() > firing.until_s:
            return
        try:
            done = await self._do(change, intention, firing.alert, facts)
        except Denied as denied:
            await self._write(_next_state(intention, "refused", reason=denied.reason, message=str(denied)), abandon)
            return
        if done:
            await self._write(_next_state(intention, "done"), abandon)
            log.info("done: %s (%s)", describe(kind, change.target, intention.namespace), intention.id)
        else:
            await self.settle(intention, abandon, "changed")

    async def _do(self, change: WorkloadChange, intention: Action, alert: Alert, facts: Facts) -> bool:
        """Change the object, or write the Events. False: the object was changed or deleted since it was read."""
        namespace, target = intention.namespace, change.target
        if change.spec is not None:
            content = patch(change, intention.id, intention.message)
            return await self.cluster.change(target, namespace, content) is not None
        text = f"{intention.message}. {alert.annotations.get('policy', '')}".strip()
        pods, now = [pod for pod in facts.pods.values() if pod is not None][:_MAX_EVENTS], datetime.now(UTC)
        written = [
            await self.cluster.write_event(event(alert, intention.id, obj, namespace, text, now))
            for obj in (*pods, change.object)  # the workload's comes last: if it exists, all do
        ]
        return all(written)

    async def _refuse(
        self, firing: Firing, kind: ActionKind | None, objection: Objection, abandon: asyncio.Event
    ) -> None:
        refused = self._action(firing, kind, "refused", reason=objection.reason, message=objection.message)
        await self._write(refused, abandon)

    async def _write(self, action: Action, abandon: asyncio.Event) -> bool:
        """Write an action and wait until it was read back, unless it is repeated. Returns whether it is granted."""
        if action.state != "intended" and is_repeated(action, self.ledger.last(action.id)):
            return False

        async def write() -> None:
            await self._send(action)
            while self.ledger.verdict(action) is None:
                self._read.clear()
                await self._read.wait()

        await until_abandoned(abandon, write())
        self._instruments.counter(ACTIONS, action.action or "none", action.state, action.reason or "none").inc()
        return self.ledger.verdict(action) is True

    def _action(self, firing: Firing, kind: ActionKind | None, state: str, **more: Any) -> Action:
        alert = firing.alert
        return Action(
            schema=1, id=action_id(alert, kind), state=state, at=time_of(self._now_ms()), by=self._by,
            cluster=alert.cluster, namespace=_namespace(alert), action=kind, alert=alert.name,
            fingerprint=alert.fingerprint, starts_at=alert.starts_at, gpus=alert.gpu_count,
            since=None if firing.since_ms is None else time_of(firing.since_ms),
            revision=None if firing.partly or firing.since_ms is None else alert.revision, **more,
        )  # fmt: skip


def _namespace(alert: Alert) -> str:
    return alert.labels["k8s_namespace_name"]


def _next_state(before: Action, state: str, **more: Any) -> Action:
    """The next record of an action."""
    return msgspec.structs.replace(before, state=state, at=time_of(now_ms()), **more)
