"""What the sink decides and does, and that it does it once."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from delivery.kubernetes.client import Answer, Unreachable
from sinks.reclaim.decide import RECLAIMED_BY
from sinks.reclaim.ledger import HOUR_MS as LEDGER_HOUR_MS
from sinks.reclaim.ledger import Ledger
from tests.sinks.alerts import START_MS, alert
from tests.sinks.reclaim.fakes import HOUR_MS, Fault, Killed, Replica, World, away, over, status
from topics.actions import Action, action_id
from topics.alerts import Alert, time

DEPLOYMENT = "/apis/apps/v1/namespaces/ml/deployments/web"
POD = "/api/v1/namespaces/ml/pods/web-0"


def annotate(world: World, path: str, **annotations: str) -> None:
    """Other annotations of an object, under ``gpustream.dev/``."""
    one = world.api.objects[path]
    given = {f"gpustream.dev/{name.replace('_', '-')}": text for name, text in annotations.items()}
    one["metadata"]["annotations"] = {**(one["metadata"].get("annotations") or {}), **given}


def replicas(world: World) -> int:
    """How many replicas the Deployment has."""
    return int(world.api.objects[DEPLOYMENT]["spec"]["replicas"])


async def test_a_deployment_is_scaled_to_0_when_its_namespace_says_so_and_not_before() -> None:
    world = World("scale=4h")
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=4 * HOUR_MS - 1000)
    assert (world.words(), replicas(world)) == (["planned"], 2)
    assert world.log[0].due_at == time(START_MS + 4 * HOUR_MS)
    world.write(world.deployment())  # the alert is renewed
    await sink.run(later_ms=1000)
    assert (world.words(), replicas(world)) == (["planned", "intended", "done"], 0)
    done = world.log[-1]
    assert (done.replicas, done.target and done.target.uid, done.generation) == (2, "uid-web", 2)
    assert world.api.objects[DEPLOYMENT]["metadata"]["annotations"][RECLAIMED_BY] == done.id
    await sink.run(later_ms=HOUR_MS)
    assert len(world.log) == 3


async def test_a_dry_run_changes_nothing_and_says_what_it_would_have_done_once() -> None:
    world = World("scale=1h, event")
    world.write(world.deployment())
    sink = world.replica(act=False)
    await sink.run()
    await sink.run(later_ms=HOUR_MS)
    await sink.run(later_ms=HOUR_MS // 2)
    assert (world.words("scale"), world.words("event")) == (["planned", "dry_run"], ["dry_run"])
    assert (world.api.changes, world.api.events) == ([], {})
    acting = world.replica()
    await acting.run()
    assert world.words("scale")[-2:] == ["intended", "done"]


async def test_a_namespace_that_says_nothing_is_left_alone_and_nothing_is_written() -> None:
    world = World(None)
    world.write(world.deployment())
    await world.replica().run(later_ms=HOUR_MS)
    assert (world.log, world.api.changes) == ([], [])


async def test_nonsense_in_the_annotation_does_nothing_and_is_written_once_with_what_would_be_right() -> None:
    world = World("scale=soon")
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=HOUR_MS)
    assert (world.words(), replicas(world)) == (["refused policy_invalid"], 2)
    assert "'soon' is not a duration: write 500ms" in world.log[0].message


async def test_a_job_is_suspended_and_a_workload_of_kueue_made_inactive_in_its_place() -> None:
    world = World("suspend, deactivate")
    world.write(world.job())
    await world.replica().run()
    assert world.api.changes == [("/apis/batch/v1/namespaces/ml/jobs/train", {"suspend": True})]

    world = World("suspend, deactivate")
    world.write(world.job())
    world.kueue("uid-train", active=True)
    await world.replica().run()
    assert [spec for _, spec in world.api.changes] == [{"active": False}]
    assert world.words("suspend") == ["refused managed"]


async def test_a_jobset_is_suspended_and_not_its_jobs() -> None:
    world = World("suspend")
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/set"
    top = world.api.put(path, "JobSet", "jobset.x-k8s.io/v1alpha2")
    world.write(world.job(above=top))
    await world.replica().run()
    assert world.api.changes == [(path, {"suspend": True})]


async def test_the_job_of_a_cronjob_is_suspended_and_one_of_an_operator_is_not() -> None:
    for kind, version, words in (
        ("CronJob", "batch/v1", ["intended", "done"]),
        ("TrainJob", "trainer.kubeflow.org/v1alpha1", ["refused managed"]),
    ):
        world = World("suspend")
        path = f"/apis/{version}/namespaces/ml/{kind.lower()}s/top"
        world.write(world.job(above=world.api.put(path, kind, version)))
        await world.replica().run()
        assert world.words() == words


async def test_an_event_is_written_once_on_each_pod_and_on_the_workload() -> None:
    world = World("event")
    world.write(world.deployment())
    await world.replica().run()
    about = {(one["involvedObject"]["kind"], one["involvedObject"]["name"]) for one in world.api.events.values()}
    assert about == {("Pod", "web-0"), ("Pod", "web-1"), ("Deployment", "web")}
    assert {one["reason"] for one in world.api.events.values()} == {"GPUHeldIdle"}
    await world.replica().run(later_ms=60_000)
    assert (len(world.api.events), world.words()) == (3, ["intended", "done"])


def _mixed(world: World) -> None:
    """One of the alert's pods belongs to another Deployment."""
    world.deployment("other")
    other = world.api.objects["/apis/apps/v1/namespaces/ml/replicasets/other-1"]
    world.api.put(POD, "Pod", "v1", owner=other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: annotate(w, POD, alerts="off"), "opted_out"),
        (lambda w: annotate(w, POD, alerts="whatever"), "opted_out"),
        (lambda w: annotate(w, POD, idle_after="10d"), "opted_out"),
        (lambda w: annotate(w, POD, idle_after="nonsense"), "opted_out"),
        (lambda w: annotate(w, POD, reclaim="off"), "opted_out"),
        (lambda w: annotate(w, DEPLOYMENT, reclaim="off"), "opted_out"),
        (lambda w: annotate(w, "/api/v1/namespaces/ml", alerts="off"), "opted_out"),
        (lambda w: w.api.objects.pop(POD), "changed"),
        (lambda w: w.api.put(POD, "Pod", "v1", metadata={"creationTimestamp": "2027-01-01T00:00:00Z"}), "changed"),
        (lambda w: w.api.objects[POD].update(status={"phase": "Succeeded"}), "changed"),
        (lambda w: w.api.objects[POD]["metadata"].pop("ownerReferences"), "no_owner"),
        (lambda w: w.api.objects[DEPLOYMENT]["spec"].update(replicas=0), "already"),
        (lambda w: w.api.objects[DEPLOYMENT]["metadata"].update(uid="another"), "unsupported"),
        (_mixed, "several_owners"),
    ],
)
async def test_what_is_not_what_the_alert_was_about_or_wants_to_be_left_alone_is_refused(
    change: Any, reason: str
) -> None:
    world = World("scale")
    world.write(world.deployment())
    change(world)
    await world.replica().run()
    assert (world.words(), world.api.changes) == ([f"refused {reason}"], [])
    assert world.log[0].message


async def test_an_alert_that_is_old_resolved_of_another_rule_or_of_another_cluster_is_not_acted_on() -> None:
    world = World("scale=3h")
    one = world.deployment()
    world.write(one)
    await world.replica().run(later_ms=3 * HOUR_MS)
    assert (world.words(), replicas(world)) == (["refused old"], 2)

    for other in (over(one, START_MS + 1), alert("web", name="GPUXid", labels=one.labels), _elsewhere(one)):
        world = World("scale")
        world.deployment()
        world.write(one, other) if other.state == "resolved" else world.write(other)
        await world.replica().run()
        assert (world.log, replicas(world)) == ([], 2)


def _elsewhere(one: Alert) -> Alert:
    return msgspec.structs.replace(one, cluster="c2")


async def test_a_workload_that_works_partly_is_left_alone_unless_that_is_asked_for() -> None:
    for says, words in (("scale", ["refused partly"]), ("scale, partly", ["intended", "done"])):
        world = World(says)
        world.write(msgspec.structs.replace(world.deployment(), held=3))
        await world.replica().run()
        assert world.words() == words
    world = World("scale")
    world.write(msgspec.structs.replace(world.deployment(), held=None, idle=None))
    await world.replica().run()
    assert world.words() == ["refused partly"]


@pytest.mark.parametrize(
    ("says", "replicas", "words"),
    [
        ("scale", 2, ["intended", "done"]),
        ("scale", 3, ["refused partly"]),
        ("scale, partly", 3, ["intended", "done"]),
    ],
)
async def test_a_deployment_with_a_pod_that_the_alert_does_not_know_is_left_alone(
    says: str, replicas: int, words: list[str]
) -> None:
    world = World(says)
    world.write(world.deployment())
    world.api.objects[DEPLOYMENT]["status"] = {"replicas": replicas}
    await world.replica().run()
    assert world.words() == words


async def test_a_job_with_a_pod_that_the_alert_does_not_know_is_left_alone() -> None:
    world = World("suspend")
    world.write(world.job())
    (job,) = [one for path, one in world.api.objects.items() if "/jobs/" in path]
    job["status"] = {"active": 9}
    await world.replica().run()
    assert world.words() == ["refused partly"]
    assert world.log[0].message.startswith("Job train has 9 pods, and the alert is about ")


async def test_the_time_counts_from_when_all_of_the_workload_idles() -> None:
    world = World("scale=2h")
    one = world.deployment()
    world.write(msgspec.structs.replace(one, held=3))
    sink = world.replica()
    await sink.run(later_ms=2 * HOUR_MS)
    world.write(msgspec.structs.replace(one, revision=1))
    await sink.run(later_ms=2 * HOUR_MS - 1)
    assert world.words() == ["refused partly", "planned"]
    again = world.replica()
    await again.run(later_ms=1)
    assert world.words()[2:] == ["intended", "done"]


async def test_after_a_restart_the_time_goes_on_although_the_log_has_only_the_last_record() -> None:
    world = World("scale=2h")
    one = world.deployment()
    world.write(one)
    await world.replica().run()
    world.now_ms += HOUR_MS
    world.alerts.clear()
    world.write(one)  # renewed, and the record before it compacted away
    await world.replica().run(later_ms=HOUR_MS)
    assert world.words() == ["planned", "intended", "done"]


async def test_what_was_planned_ends_with_the_alert_or_when_the_namespace_no_longer_lets_it_be_done() -> None:
    world = World("scale=4h")
    one = world.deployment()
    world.write(one)
    sink = world.replica()
    await sink.run()
    world.write(over(one, START_MS + 1))
    await sink.run(later_ms=1000)
    assert world.words() == ["planned", "ended resolved"]

    world = World("scale=4h")
    world.write(one)
    world.deployment()
    sink = world.replica()
    await sink.run()
    world.opt_in("event=4h")
    await sink.run(later_ms=120_000)
    assert world.words("scale") == ["planned", "ended not_opted_in"]


async def test_an_operators_least_goes_before_what_a_namespace_says() -> None:
    world = World("scale=1s")
    world.write(world.deployment())
    await world.replica(least_s=7200.0).run()
    assert world.log[0].due_at == time(START_MS + 2 * HOUR_MS)


# -- the API server's answers


@pytest.mark.parametrize(
    ("answer", "words"),
    [(status(403), ["intended", "refused forbidden"]), (status(422), ["intended", "refused rejected"])],
)
async def test_a_change_that_the_api_server_does_not_let_be_made_is_refused(answer: Answer, words: list[str]) -> None:
    world = World("scale")
    world.write(world.deployment())
    world.api.faults = [_on("PATCH", answer)] * 9
    await world.replica().run()
    assert (world.words(), replicas(world)) == (words, 2)
    assert "HTTP" in world.log[-1].message


def _on(method: str, answer: Answer | None) -> Fault:
    """A fault for requests of a method; None: nobody answers."""

    def fault(of: str, path: str) -> Answer | None:
        if of != method:
            return None
        return answer if answer is not None else away(of, path)

    return fault


async def test_a_right_to_read_that_is_missing_is_named() -> None:
    world = World("scale")
    world.write(world.deployment())
    world.api.faults = [lambda _, path: status(403, "no pods for you") if "/pods/" in path else None] * 9
    await world.replica().run()
    assert world.words() == ["refused forbidden"]
    assert "no pods for you" in world.log[0].message


@pytest.mark.parametrize("fault", [away, lambda *_: status(429, "slow", 7.0), lambda *_: status(503)])
async def test_an_api_server_that_is_away_is_waited_for_and_nothing_is_decided(fault: Fault) -> None:
    world = World("scale")
    world.write(world.deployment())
    world.api.faults = [fault]
    sink = world.replica()
    await sink.run()
    assert (world.log, sink.reclaimer.health.problem != "") == ([], True)
    await sink.run(later_ms=1000)
    assert world.log == []  # not before the pause is over
    await sink.run(later_ms=7000)
    assert (world.words(), sink.reclaimer.health.problem) == (["intended", "done"], "")


async def test_an_object_that_was_changed_in_between_is_not_changed_and_is_looked_at_again() -> None:
    world = World("scale")
    world.write(world.deployment())

    def race(method: str, path: str) -> Answer | None:
        if method == "PATCH":
            world.api.put(DEPLOYMENT, "Deployment", "apps/v1", spec={"replicas": 5})
        return None

    world.api.faults = [race] * 9
    sink = world.replica()
    await sink.run()
    assert (world.words(), replicas(world)) == (["intended", "refused changed"], 5)
    world.api.faults = []
    await sink.run(later_ms=300_000)
    assert (world.words()[2:], world.log[-1].replicas) == (["intended", "done"], 5)


async def test_an_answer_that_is_lost_is_found_out_by_the_objects_annotation() -> None:
    world = World("scale")
    world.write(world.deployment())

    def lost(method: str, path: str) -> Answer | None:
        if method != "PATCH":
            return None
        one = world.api.objects[path]
        version = one["metadata"]["resourceVersion"]
        content = {
            "metadata": {"resourceVersion": version, "annotations": {RECLAIMED_BY: world.log[-1].id}},
            "spec": {"replicas": 0},
        }
        world.api.patch(path, one, content)
        return away(method, path)

    world.api.faults = [lost] * 9
    sink = world.replica()
    await sink.run()
    assert world.words() == ["intended"]
    await sink.run(later_ms=10_000)
    assert (world.words(), len(world.api.changes)) == (["intended", "done"], 1)


async def test_what_can_not_be_looked_at_stays_open_until_it_can() -> None:
    world = World("scale")
    world.write(world.deployment())
    first = world.replica()
    first.kill_at = "before done"
    with pytest.raises(Killed):
        await first.run()
    world.replicas.remove(first)
    sink = world.replica()
    world.api.faults = [lambda *_: status(403)] * 9
    await sink.run()
    assert world.words("scale") == ["intended"]
    assert "was done is not known" in sink.reclaimer.health.problem
    world.api.faults = []
    await sink.run(later_ms=1000)
    assert world.words("scale") == ["intended", "done"]


# -- the budget


async def test_the_budget_is_that_of_all_replicas_and_what_is_over_it_is_done_an_hour_later() -> None:
    world = World("scale")
    sinks = [world.replica(budget=2) for _ in range(3)]
    for number, sink in enumerate(sinks):
        world.alerts.clear()
        world.write(world.deployment(f"web-{number}"), world.deployment(f"api-{number}"))
        sink._read = 0
    world.alerts.clear()
    for number, sink in enumerate(sinks):
        sink.partition.recall([])
        for name in ("web", "api"):
            one = world.deployment(f"{name}-{number}")
            world.alerts.clear()
            world.write(one)
            sink.partition.recall(world.alerts)
    await asyncio.gather(*(sink.partition.quiet(sink.abandon) for sink in sinks))
    assert len(world.api.changes) == 2
    assert sum(one.reason == "budget" for one in world.log) == 4
    world.now_ms += HOUR_MS + 1000
    await asyncio.gather(*(sink.partition.quiet(sink.abandon) for sink in sinks))
    assert len(world.api.changes) == 4


def _intention(number: int, kind: str = "scale", state: str = "intended") -> Action:
    one = alert(f"pod-{number}")
    return Action(
        schema=1, id=action_id(one, kind), state=state, at=one.starts_at, by="x", cluster="c1", namespace="ml",
        action=kind, alert=one.name, fingerprint=one.fingerprint, starts_at=one.starts_at,
    )  # fmt: skip


@example(log=[(0, "intended", 0), (1, "intended", 2 * HOUR_MS), (0, "intended", 0)], budget=1)
@given(
    log=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["intended", "intended", "done", "refused", "undone"]),
            st.sampled_from([0, 60_000, 35 * 60_000, 2 * HOUR_MS]),
        ),
        max_size=60,
    ),
    budget=st.integers(0, 4),
)
def test_no_more_than_the_budget_is_granted_within_any_hour_and_all_readers_agree(
    log: list[tuple[int, str, int]], budget: int
) -> None:
    readers = [Ledger("c1", {"stop": budget, "event": 0}) for _ in range(2)]
    at_ms, granted = START_MS, dict[str, int]()
    for number, state, later_ms in log:
        at_ms += later_ms
        action = _intention(number, state=state)
        for reader in readers:
            reader.add(action, at_ms)
        verdicts = {reader.verdict(action) for reader in readers}
        assert len(verdicts) == 1
        if state == "refused":
            granted.pop(action.id, None)
        elif state == "intended" and verdicts == {True}:
            granted.setdefault(action.id, at_ms)
            if granted[action.id] <= at_ms - LEDGER_HOUR_MS:
                granted[action.id] = at_ms
        assert sum(at > at_ms - LEDGER_HOUR_MS for at in granted.values()) <= budget


# -- once, whatever happens


@pytest.mark.parametrize("kind", ["scale", "event"])
@pytest.mark.parametrize("where", ["before intended", "after intended", "before done", "after done", "in between"])
async def test_a_process_that_is_killed_anywhere_leaves_it_done_once_or_not(where: str, kind: str) -> None:
    world = World(kind)
    world.write(world.deployment())
    first = world.replica()
    first.kill_at = where
    if where == "in between":
        world.api.faults = [_killed] * 9
    with pytest.raises(Killed):
        await first.run()
    world.replicas.remove(first)
    world.api.faults = []
    await world.replica().run(later_ms=1000)
    await world.replica().run(later_ms=HOUR_MS // 2)
    assert len(world.api.changes) == (kind == "scale")
    assert len(world.api.events) == (3 if kind == "event" else 0)
    assert world.words()[-1] == "done"
    assert len({one.id for one in world.log}) == 1


def _killed(method: str, path: str) -> Answer | None:
    if method in ("PATCH", "POST"):
        raise Killed
    return None


_STEPS = ("run", "run", "later", "lost", "away", "kill before", "kill after", "renew", "touch", "second")


@tried(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from(_STEPS), max_size=14))
def test_whatever_fails_the_object_is_changed_once_at_most_and_what_is_written_says_whether(steps: list[str]) -> None:
    async def play() -> None:
        world = World("scale=1m")
        one = world.deployment()
        world.write(one)
        sinks = [world.replica()]
        for step in steps:
            await _step(world, one, sinks, step)
        world.api.faults = []
        for _ in range(4):
            world.write(one)
            world.now_ms += 301_000
            sink = world.replica()
            await sink.run()
        assert len(world.api.changes) == 1
        assert (world.words()[-1], replicas(world)) == ("done", 0)

    asyncio.run(play())


async def _step(world: World, one: Alert, sinks: list[Replica], step: str) -> None:
    """Something happens, and the first process runs."""
    if step == "renew":
        world.write(one)
    elif step == "touch":
        at = world.api.objects[DEPLOYMENT]
        world.api.put(DEPLOYMENT, "Deployment", "apps/v1", spec=at["spec"])
    elif step == "second":
        sinks.append(world.replica())  # the one before is taken for dead, and is not
    world.now_ms += 65_000 if step == "later" else 1000
    faults: dict[str, Fault] = {"lost": _after(world), "away": _on("PATCH", None)}
    world.api.faults = [faults[step]] * 9 if step in faults else []
    sinks[-1].kill_at = {"kill before": "before done", "kill after": "after intended"}.get(step)
    try:
        await asyncio.gather(*(sink.run() for sink in sinks[-2:]))
    except Killed:
        sinks.append(world.replica())
    world.api.faults = []


def _after(world: World) -> Fault:
    """A fault: a change is made, and its answer lost."""

    def fault(method: str, path: str) -> Answer | None:
        if method != "PATCH":
            return None
        one = world.api.objects[path]
        if one["spec"]["replicas"]:
            meta = {
                "resourceVersion": one["metadata"]["resourceVersion"],
                "annotations": {RECLAIMED_BY: world.log[-1].id},
            }
            world.api.patch(path, one, {"metadata": meta, "spec": {"replicas": 0}})
        raise Unreachable("timeout", "no answer")

    return fault


def test_a_word_that_comes_late_does_not_take_back_that_something_was_done() -> None:
    ledger = Ledger("c1", {"stop": 1, "event": 0})
    for state in ("intended", "done", "refused"):
        ledger.add(_intention(0, state=state), START_MS)
    assert (last := ledger.last(_intention(0).id)) is not None
    assert (last.state, ledger.left("stop", START_MS)) == ("done", 0)
