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
from typing import Any

import msgspec

from delivery.dead_letters import Abandoned, Record, until_abandoned
from delivery.instruments import Instrument, Instruments
from delivery.kubernetes.client import ApiHealth
from delivery.policies import RECLAIM, OptIn, opt_in
from delivery.values import duration_words
from sinks import outcomes
from sinks.reclaim.cluster import Cluster, Denied
from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.decide import (
    Facts,
    Firing,
    Objection,
    Watched,
    WorkloadChange,
    decide,
    due_ms,
    event,
    event_name,
    is_done,
    patch,
    words,
)
from sinks.reclaim.ledger import OVER, Ledger, says_nothing_new
from topics.actions import KINDS, Action, ActionKind, action_id
from topics.alerts import Alert, milliseconds
from topics.alerts import time as time_of
from topics.topic import decoder

log = logging.getLogger(__name__)

Json = dict[str, Any]

COMPONENT = "reclaim"
ACTIONS = "gpustream_reclaim_actions_total"
UNSETTLED = "gpustream_reclaim_unsettled"
BUDGET = "gpustream_reclaim_budget_left"
API_REQUESTS = "gpustream_reclaim_api_requests_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(
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
    Instrument(
        API_REQUESTS,
        "counter",
        "Requests to the API server by the answer's status, or connection, tls, timeout or cut if there was none.",
        ("code",),
    ),
)

LOOK_S = 60.0
"""So often an alert is looked at, if nothing is due before: its namespace may say something else by then."""

LOOK_REFUSED_S = 300.0
HURRY_S = 5.0
"""For so long after the end of a partition was read what was read counts: after that it is read on first."""

_MOST_EVENTS = 8
_CHANGED = "somebody changed it between the decision and the action, or it went: nothing was done"
_decode = decoder(Action)


class Reclaimer:
    """What all partitions share: what was decided before, and what writes and does it. ``now_ms``: the time of day."""

    def __init__(
        self,
        settings: ReclaimSettings,
        cluster: Cluster,
        send: Callable[[Action], Coroutine[Any, Any, None]],
        made: Instruments,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.settings, self.cluster = settings, cluster
        budgets = {"stop": settings.budget, "event": settings.event_budget}
        self.ledger = Ledger(settings.cluster, budgets)
        self.health = ApiHealth("the API server", log)
        self._send, self._made, self._now_ms = send, made, now_ms
        self._by = settings.instance_id or socket.gethostname()
        self._taken = asyncio.Event()
        made.gauge(UNSETTLED).set_function(lambda: len(self.ledger.unsettled()))
        for budget in budgets:
            made.gauge(BUDGET, budget).set_function(lambda of=budget: self.ledger.left(of, self._now_ms()))  # type: ignore[misc]

    def take(self, _: str, records: Sequence[Record]) -> None:
        """Records of gpu.actions, as they come."""
        for record in records:
            try:
                self.ledger.take(_decode(record.value or b""), record.timestamp)
            except msgspec.DecodeError as error:
                log.warning("partition %d offset %d: no action: %s", record.partition, record.offset, error)
        self._taken.set()

    async def consider(self, watched: Watched, abandon: asyncio.Event) -> float:
        """Do what is due about an alert; gives for how many seconds nothing else is.

        Raises Unreachable and Abandoned.
        """
        began_s, alert = time.monotonic(), watched.alert
        firing = Firing(alert, None, partly=False, written_ms=watched.written_ms)
        namespace, wants = await self._wants(alert)
        if isinstance(wants, Objection):
            await self._refuse(firing, None, wants, abandon)
            return LOOK_REFUSED_S
        for kind in [kind for kind in KINDS if kind not in wants.actions]:
            await self.end(self.ledger.last(action_id(alert, kind)), "not_opted_in", abandon)
        firing = firing._replace(since_ms=self._since_ms(watched, wants), partly=wants.partly)
        dues, now_ms = self._dues(alert, wants, firing.since_ms or watched.fired_ms), self._now_ms()
        if not dues:
            return LOOK_S
        wait_s = max(0.0, (min(dues.values()) - now_ms) / 1000)
        lasts = [(self.ledger.last(action_id(alert, kind)), time_of(due_at_ms)) for kind, due_at_ms in dues.items()]
        planned = all(last and last.state == "planned" and last.due_at == due_at for last, due_at in lasts)
        if wait_s and (firing.since_ms is None or planned):
            return min(LOOK_S, wait_s)
        facts = await self._facts(firing, namespace, now_ms)
        if isinstance(facts, Objection):
            for kind in [kind for kind, due_at_ms in dues.items() if due_at_ms <= now_ms]:
                await self._refuse(firing, kind, facts, abandon)
            return min(LOOK_S, wait_s or LOOK_S)
        if time.monotonic() - began_s > HURRY_S:
            return 0.0
        return await self._follow(firing, facts, dues, abandon)

    async def settle(self, intention: Action, abandon: asyncio.Event, reason: str = "interrupted") -> None:
        """Find out whether an intention was carried out, and write that. Raises Unreachable and Abandoned."""
        target, generation = intention.target, intention.generation
        try:
            if target is None:
                done = False
            elif intention.action == "event":
                done = await self.cluster.has_event(intention.namespace, event_name(intention.id, target.uid))
            else:
                one = await self.cluster.look(target, intention.namespace)
                done = is_done(one, intention.id)
        except Denied as denied:
            self.health.bad(denied.reason, f"whether {intention.id} was done is not known: {denied}")
            return  # it stays open: what can't be looked at may have been done
        if done:
            await self._write(_then(intention, "done", generation=generation), abandon)
        else:
            texts = {"interrupted": "the process ended before it was done", "changed": _CHANGED}
            await self._write(_then(intention, "refused", reason=reason, message=texts[reason]), abandon)

    async def end(self, planned: Action | None, reason: str, abandon: asyncio.Event) -> None:
        """What was planned is not due any more. Raises Abandoned."""
        if planned is not None and planned.state == "planned":
            texts = {
                "resolved": "the alert was resolved",
                "not_opted_in": "the namespace does not let it be done any more",
            }
            await self._write(_then(planned, "ended", reason=reason, message=texts[reason]), abandon)

    async def _wants(self, alert: Alert) -> tuple[Json, OptIn | Objection]:
        """The namespace of an alert, and what it lets be done. Raises Unreachable."""
        try:
            namespace = await self.cluster.namespace(_namespace(alert))
        except Denied as denied:
            return {}, Objection(denied.reason, str(denied))
        self.health.good("it answers")
        if namespace is None:
            return {}, OptIn()
        try:
            return namespace, opt_in((namespace["metadata"].get("annotations") or {}).get(RECLAIM, "off"))
        except ValueError as error:
            why = f"the annotation {RECLAIM} of the namespace can't be read, so nothing is done: {error}"
            return namespace, Objection("policy_invalid", why)

    async def _facts(self, firing: Firing, namespace: Json, now_ms: int) -> Facts | Objection:
        """What the API server has of an alert, or why the alert is not acted on. Raises Unreachable."""
        alert, age_ms = firing.alert, now_ms - firing.written_ms
        if firing.since_ms is None:
            some = f"{alert.idle} of {alert.held} GPUs are in it"
            count = some if alert.held else "how many GPUs it holds is not known"
            return Objection("partly", f"the workload works partly ({count}), and the namespace does not say partly")
        if age_ms > self.settings.alert_age_s * 1000:
            message = f"the alert was last written {duration_words(age_ms)} ago: is the alert stream well?"
            return Objection("old", message)
        try:
            return await self.cluster.facts(alert, namespace)
        except Denied as denied:
            return Objection(denied.reason, str(denied))

    def _since_ms(self, watched: Watched, wants: OptIn) -> int | None:
        """Since when the alert has fired as it must; None: it does not, for the workload works partly.

        What was written before a restart knows more than the log, in which only the last record of an alert is kept.
        """
        alert, found = watched.alert, watched.fired_ms if wants.partly else watched.whole_ms
        if found is None:
            return None
        lasts = [self.ledger.last(action_id(alert, kind)) for kind in KINDS]
        known = [(milliseconds(one.since), one.revision) for one in lasts if one is not None and one.since is not None]
        if wants.partly:
            return min([found, *(since_ms for since_ms, revision in known if revision is None)])
        course = range(watched.revision, alert.revision + 1)
        return min([found, *(since_ms for since_ms, revision in known if revision in course)])

    def _dues(self, alert: Alert, wants: OptIn, since_ms: int) -> dict[ActionKind, int]:
        """When what the namespace lets be done is due, of what was not done yet, and is not open."""
        dues: dict[ActionKind, int] = {}
        over = {*OVER, "intended", *([] if self.settings.act else ["dry_run"])}
        for kind in [kind for kind in KINDS if kind in wants.actions]:
            last = self.ledger.last(action_id(alert, kind))
            least_ms = 0 if kind == "event" else round(self.settings.least_s * 1000)
            if last is None or last.state not in over:
                dues[kind] = due_ms(wants.actions[kind], least_ms, since_ms)
        return dues

    async def _follow(self, firing: Firing, facts: Facts, dues: dict[ActionKind, int], abandon: asyncio.Event) -> float:
        """Decide, and do what is due."""
        now_ms, wait_s = self._now_ms(), LOOK_S
        idle_ms = now_ms - (firing.since_ms or now_ms)
        decisions = {kind: decide(kind, firing, facts, idle_ms=idle_ms) for kind in dues}
        stops = [decision for kind, decision in decisions.items() if kind != "event"]
        fits = any(isinstance(one, WorkloadChange) or one.reason != "unsupported" for one in stops)
        for kind, decision in decisions.items():
            if isinstance(decision, Objection):
                if decision.reason != "unsupported" or not fits:
                    await self._refuse(firing, kind, decision, abandon)
                wait_s = LOOK_REFUSED_S if len(decisions) == 1 else wait_s
            elif dues[kind] > now_ms:
                wait_s = min(wait_s, (dues[kind] - now_ms) / 1000)
                message = f"{words(kind, decision.target, _namespace(firing.alert))}, unless its GPUs work by then"
                due_at = time_of(dues[kind])
                planned = self._action(firing, kind, "planned", target=decision.target, due_at=due_at, message=message)
                await self._write(planned, abandon)
            else:
                await self._act(firing, kind, decision, facts, abandon)
        return wait_s

    async def _act(
        self, firing: Firing, kind: ActionKind, plan: WorkloadChange, facts: Facts, abandon: asyncio.Event
    ) -> None:
        """Write the intention, do it, and write what became of it. In a dry run, write what would be done."""
        summary = firing.alert.annotations.get("summary", firing.alert.name)
        generation = plan.object["metadata"].get("generation")
        intention = self._action(
            firing, kind, "intended" if self.settings.act else "dry_run", target=plan.target, replicas=plan.replicas,
            generation=generation + 1 if generation is not None and plan.spec is not None else None, message=summary,
        )  # fmt: skip
        if not self.settings.act:
            await self._write(intention, abandon)
            return
        budget = self.settings.event_budget if kind == "event" else self.settings.budget
        over = Objection("budget", f"the budget of {budget} an hour is spent: it is tried again")
        if not self.ledger.has_room(kind, self._now_ms()) or not await self._write(intention, abandon):
            await self._refuse(firing, kind, over, abandon)
            return
        if abandon.is_set():
            raise Abandoned
        try:
            done = await self._do(plan, intention, firing.alert, facts)
        except Denied as denied:
            await self._write(_then(intention, "refused", reason=denied.reason, message=str(denied)), abandon)
            return
        if done:
            await self._write(_then(intention, "done"), abandon)
            log.info("done: %s (%s)", words(kind, plan.target, intention.namespace), intention.id)
        else:
            await self.settle(intention, abandon, "changed")

    async def _do(self, plan: WorkloadChange, intention: Action, alert: Alert, facts: Facts) -> bool:
        """Change the object, or write the Events. False: it was changed, or went, meanwhile."""
        namespace, target = intention.namespace, plan.target
        if plan.spec is not None:
            content = patch(plan, intention.id, intention.message)
            return await self.cluster.change(target, namespace, content) is not None
        text = f"{intention.message}. {alert.annotations.get('policy', '')}".strip()
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        pods = [pod for pod in facts.pods.values() if pod is not None][:_MOST_EVENTS]
        written = [
            await self.cluster.write_event(event(alert, intention.id, one, namespace, text, now))
            for one in (*pods, plan.object)  # the workload's is the last: if it is there, all are
        ]
        return all(written)

    async def _refuse(self, firing: Firing, kind: ActionKind | None, why: Objection, abandon: asyncio.Event) -> None:
        await self._write(self._action(firing, kind, "refused", reason=why.reason, message=why.message), abandon)

    async def _write(self, action: Action, abandon: asyncio.Event) -> bool:
        """Write an action, unless that was its last word, and wait until it was read back; whether it is granted."""
        if action.state != "intended" and says_nothing_new(action, self.ledger.last(action.id)):
            return False

        async def write() -> None:
            await self._send(action)
            while self.ledger.verdict(action) is None:
                self._taken.clear()
                await self._taken.wait()

        await until_abandoned(abandon, write())
        self._made.counter(ACTIONS, action.action or "none", action.state, action.reason or "none").inc()
        return self.ledger.verdict(action) is True

    def _action(self, firing: Firing, kind: ActionKind | None, state: str, **more: Any) -> Action:
        alert = firing.alert
        return Action(
            schema=1, id=action_id(alert, kind), state=state, at=time_of(self._now_ms()), by=self._by,
            cluster=alert.cluster, namespace=_namespace(alert), action=kind, alert=alert.name,
            fingerprint=alert.fingerprint, starts_at=alert.starts_at, gpus=len(alert.gpus),
            since=None if firing.since_ms is None else time_of(firing.since_ms),
            revision=None if firing.partly or firing.since_ms is None else alert.revision, **more,
        )  # fmt: skip


def _namespace(alert: Alert) -> str:
    return alert.labels["k8s_namespace_name"]


def _then(before: Action, state: str, **more: Any) -> Action:
    """What is written of an action after something else was."""
    return msgspec.structs.replace(before, state=state, at=time_of(time.time_ns() // 1_000_000), **more)
