"""What the sink decides and does, and that it does it only once."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from delivery.kubernetes.client import Answer, Unreachable
from sinks.reclaim.cluster import Denied
from sinks.reclaim.decide import RECLAIMED_BY, UNDONE, Facts
from sinks.reclaim.ledger import HOUR_MS as LEDGER_HOUR_MS
from sinks.reclaim.ledger import Ledger
from tests.sinks.alerts import START_MS, alert, alert_record
from tests.sinks.reclaim.fakes import HOUR_MS, Fault, Killed, Replica, World, away, over, status
from topics.actions import Action, Target, action_id
from topics.alerts import Alert
from topics.times import time_of

DEPLOYMENT = "/apis/apps/v1/namespaces/ml/deployments/web"
NAMESPACE = "/api/v1/namespaces/ml"
POD = "/api/v1/namespaces/ml/pods/web-0"
KEPT = {"metadata": {"annotations": {"gpustream.dev/reclaim": "off"}}}
"""A template by which no pods are made yet: its Deployment is paused."""
Json = dict[str, Any]


def annotate(world: World, path: str, **annotations: str) -> None:
    """Add annotations under ``gpustream.dev/`` to an object."""
    existing = world.api.objects[path]
    changed = {f"gpustream.dev/{name.replace('_', '-')}": text for name, text in annotations.items()}
    existing["metadata"]["annotations"] = {**(existing["metadata"].get("annotations") or {}), **changed}


def replicas(world: World) -> int:
    """How many replicas the Deployment has."""
    return int(world.api.objects[DEPLOYMENT]["spec"]["replicas"])


async def test_a_deployment_is_scaled_to_0_when_its_namespace_says_so_and_not_before() -> None:
    world = World("scale=4h")
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=4 * HOUR_MS - 1000)
    assert (world.states(), replicas(world)) == (["planned"], 2)
    assert world.log[0].due_at == time_of(START_MS + 4 * HOUR_MS)
    world.write(world.deployment())  # the alert is renewed
    await sink.run(later_ms=1000)
    assert (world.states(), replicas(world)) == (["planned", "intended", "done"], 0)
    outcome = world.log[-1]
    assert (outcome.replicas, outcome.target and outcome.target.uid, outcome.generation) == (2, "uid-web", 2)
    assert world.api.objects[DEPLOYMENT]["metadata"]["annotations"][RECLAIMED_BY] == outcome.id
    await sink.run(later_ms=HOUR_MS)
    assert len(world.log) == 3


async def test_a_dry_run_changes_nothing_and_says_what_it_would_have_done_once() -> None:
    world = World("scale=1h, event")
    world.write(world.deployment())
    sink = world.replica(act=False)
    await sink.run()
    await sink.run(later_ms=HOUR_MS)
    await sink.run(later_ms=HOUR_MS // 2)
    assert (world.states("scale"), world.states("event")) == (["planned", "dry_run"], ["dry_run"])
    assert (world.api.changes, world.api.events) == ([], {})
    acting = world.replica()
    await acting.run()
    assert world.states("scale")[-2:] == ["intended", "done"]


async def test_an_action_of_which_a_later_version_has_made_something_unknown_is_left_alone() -> None:
    world = World("scale=1h")
    world.write(world.deployment())
    await world.replica().run()
    world.log.append(msgspec.structs.replace(world.log[-1], state="handed_over"))
    await world.replica().run(later_ms=HOUR_MS)
    assert (world.states(), replicas(world)) == (["planned", "handed_over"], 2)


@pytest.mark.parametrize("state", ["planned", "intended"])
async def test_an_action_of_a_kind_that_only_a_later_version_knows_is_left_alone(state: str) -> None:
    world = World("scale=4h")
    firing = world.deployment()
    world.write(firing)
    await world.replica().run()
    evicting = msgspec.structs.replace(world.log[-1], id=action_id(firing, "evict"), action="evict", state=state)
    world.log.append(evicting)
    world.write(over(firing, START_MS + 1))
    await world.replica().run(later_ms=1000)
    assert (world.states("evict"), world.states("scale")) == ([state], ["planned", "ended resolved"])


@pytest.mark.parametrize("state", ["planned", "intended"])
async def test_an_action_on_an_object_of_a_kind_that_only_a_later_version_knows_is_left_alone(state: str) -> None:
    world = World("scale=4h")
    firing = world.deployment()
    world.write(firing)
    await world.replica().run()
    target = Target(api_version="trainer.kubeflow.org/v1", kind="TrainJob", name="train", uid="uid-train")
    of_later = {"id": action_id(firing, "suspend"), "action": "suspend", "target": target, "state": state}
    world.log.append(msgspec.structs.replace(world.log[-1], **of_later))
    world.write(over(firing, START_MS + 1))
    await world.replica().run(later_ms=1000)
    assert (world.states("suspend"), world.states("scale")) == ([state], ["planned", "ended resolved"])


async def test_an_object_that_can_not_be_asked_for_is_a_sentence_or_not_there() -> None:
    world = World()
    cluster = world.replica().reclaimer.cluster
    target = Target(api_version="trainer.kubeflow.org/v1", kind="TrainJob", name="train", uid="u")
    with pytest.raises(Denied, match=r"TrainJob of trainer\.kubeflow\.org/v1 is a kind that is not known here"):
        await cluster.get(target, "ml")
    listed = Answer(200, b'{"kind": "DeploymentList", "metadata": {}, "items": []}', None)
    world.api.faults.append(lambda *_: listed)
    assert await cluster.get(Target(api_version="apps/v1", kind="Deployment", name="", uid="u"), "ml") is None


async def test_a_namespace_that_says_nothing_is_left_alone_and_nothing_is_written() -> None:
    world = World(None)
    world.write(world.deployment())
    await world.replica().run(later_ms=HOUR_MS)
    assert (world.log, world.api.changes) == ([], [])


async def test_an_invalid_annotation_is_refused_once_and_the_message_names_the_valid_form() -> None:
    world = World("scale=soon")
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=HOUR_MS)
    assert (world.states(), replicas(world)) == (["refused policy_invalid"], 2)
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
    assert world.states("suspend") == ["refused managed"]


async def test_of_the_workloads_of_an_elastic_job_the_one_that_has_not_ended_is_made_inactive() -> None:
    world = World("deactivate")
    world.write(world.job())
    replaced = world.kueue("uid-train", "job-train-a", active=True)
    replaced["status"] = {"conditions": [{"type": "Finished", "status": "True"}]}
    world.kueue("uid-train", "job-train-b", active=True)
    await world.replica().run()
    assert [(path.rpartition("/")[2], spec) for path, spec in world.api.changes] == [("job-train-b", {"active": False})]


async def test_a_jobset_is_suspended_and_not_its_jobs() -> None:
    world = World("suspend")
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/set"
    top = world.api.put(path, "JobSet", "jobset.x-k8s.io/v1alpha2")
    world.write(world.job(above=top))
    await world.replica().run()
    assert world.api.changes == [(path, {"suspend": True})]


@pytest.mark.parametrize(
    ("condition", "is_so", "states"),
    [
        ("Completed", "True", ["refused already"]),
        ("Completed", "False", ["intended", "done"]),
        ("StartupPolicyCompleted", "True", ["intended", "done"]),
    ],
)
async def test_a_jobset_that_has_completed_is_left_alone(condition: str, is_so: str, states: list[str]) -> None:
    world = World("suspend")
    conditions = {"conditions": [{"type": condition, "status": is_so}]}
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/set"
    world.write(world.job(above=world.api.put(path, "JobSet", "jobset.x-k8s.io/v1alpha2", status=conditions)))
    await world.replica().run()
    assert world.states() == states


async def test_a_workload_of_kueue_without_content_does_not_end_the_sink() -> None:
    world = World("scale, deactivate")
    world.write(world.job(), world.deployment())
    del world.kueue("uid-train")["spec"]
    await world.replica().run()
    assert (world.states("deactivate"), replicas(world)) == (["refused unsupported"], 0)


async def test_the_job_of_a_cronjob_is_suspended_and_one_of_an_operator_is_not() -> None:
    for kind, version, states in (
        ("CronJob", "batch/v1", ["intended", "done"]),
        ("TrainJob", "trainer.kubeflow.org/v1alpha1", ["refused managed"]),
    ):
        world = World("suspend")
        path = f"/apis/{version}/namespaces/ml/{kind.lower()}s/top"
        world.write(world.job(above=world.api.put(path, kind, version)))
        await world.replica().run()
        assert world.states() == states


async def test_of_two_jobs_of_a_cronjob_in_one_alert_none_is_suspended() -> None:
    world = World("suspend")
    top = world.api.put("/apis/batch/v1/namespaces/ml/cronjobs/nightly", "CronJob", "batch/v1")
    first, second = world.job("nightly-1", above=top), world.job("nightly-2", above=top)
    world.write(msgspec.structs.replace(first, gpus=first.gpus + second.gpus, idle=2, held=2))
    await world.replica().run()
    assert (world.states(), world.api.changes) == (["refused several_owners"], [])


async def test_an_event_is_written_once_on_each_pod_and_on_the_workload() -> None:
    world = World("event")
    world.write(world.deployment())
    await world.replica().run()
    event_objects = {
        (event["involvedObject"]["kind"], event["involvedObject"]["name"]) for event in world.api.events.values()
    }
    assert event_objects == {("Pod", "web-0"), ("Pod", "web-1"), ("Deployment", "web")}
    assert {event["reason"] for event in world.api.events.values()} == {"GPUHeldIdle"}
    await world.replica().run(later_ms=60_000)
    assert (len(world.api.events), world.states()) == (3, ["intended", "done"])


def _mixed(world: World) -> None:
    """One of the alert's pods belongs to a Job, which can't be scaled."""
    world.job("other")
    world.api.put(POD, "Pod", "v1", owner=world.api.objects["/apis/batch/v1/namespaces/ml/jobs/other"])


async def test_no_event_is_written_about_pods_of_several_owners() -> None:
    world = World("event")
    world.write(world.deployment())
    _mixed(world)
    await world.replica().run()
    assert (world.states(), world.api.events) == (["refused several_owners"], {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: annotate(w, POD, alerts="off"), "opted_out"),
        (lambda w: annotate(w, POD, alerts="whatever"), "opted_out"),
        (lambda w: annotate(w, POD, idle_after="10d"), "opted_out"),
        (lambda w: annotate(w, POD, idle_after="nonsense"), "opted_out"),
        (lambda w: annotate(w, POD, reclaim="off"), "opted_out"),
        (lambda w: annotate(w, DEPLOYMENT, reclaim="off"), "opted_out"),
        (lambda w: annotate(w, NAMESPACE, alerts="off"), "opted_out"),
        (lambda w: w.api.objects[NAMESPACE]["metadata"].update(labels={"gpustream.dev/alerts": "off"}), "opted_out"),
        (lambda w: w.api.objects[DEPLOYMENT]["spec"].update(template=KEPT), "opted_out"),
        (lambda w: w.api.objects.pop(POD), "changed"),
        (lambda w: w.api.put(POD, "Pod", "v1", metadata={"creationTimestamp": "2027-01-01T00:00:00Z"}), "changed"),
        (lambda w: w.api.objects[POD]["metadata"].update(deletionTimestamp="2026-11-21T00:00:00Z"), "changed"),
        (lambda w: w.api.objects[POD].update(spec={"nodeName": "another"}), "changed"),
        (lambda w: w.api.objects[POD].update(status={"phase": "Succeeded"}), "changed"),
        (lambda w: w.api.objects[POD]["metadata"].pop("ownerReferences"), "no_owner"),
        (lambda w: w.api.objects[DEPLOYMENT]["spec"].update(replicas=0), "already"),
        (lambda w: w.api.objects[DEPLOYMENT]["metadata"].update(deletionTimestamp="2026-11-21T00:00:00Z"), "changed"),
        (lambda w: w.api.objects[DEPLOYMENT]["metadata"].update(uid="another"), "unsupported"),
        (_mixed, "several_owners"),
    ],
)
async def test_a_pod_that_has_changed_since_the_alert_or_has_opted_out_is_refused(change: Any, reason: str) -> None:
    world = World("scale")
    world.write(world.deployment())
    change(world)
    await world.replica().run()
    assert (world.states(), world.api.changes) == ([f"refused {reason}"], [])
    assert world.log[0].message


async def test_a_workload_on_several_nodes_is_stopped() -> None:
    world = World("scale")
    firing = world.deployment()
    gpus = [msgspec.structs.replace(gpu, node=f"n{number}") for number, gpu in enumerate(firing.gpus, 1)]
    for number, gpu in enumerate(gpus):
        world.api.objects[f"/api/v1/namespaces/ml/pods/web-{number}"]["spec"] = {"nodeName": gpu.node}
    world.write(msgspec.structs.replace(firing, gpus=gpus))
    await world.replica().run()
    assert world.states() == ["intended", "done"]


async def test_an_alert_that_names_no_pod_is_refused() -> None:
    world = World("scale")
    world.write(msgspec.structs.replace(world.deployment(), gpus=(), labels={"k8s_namespace_name": "ml"}))
    await world.replica().run()
    assert (world.states(), world.api.changes) == (["refused no_owner"], [])
    assert world.log[0].message == "what GPUHeldIdle is about: the alert names no pod"


async def test_an_alert_that_is_old_resolved_of_another_rule_or_of_another_cluster_is_not_acted_on() -> None:
    world = World("scale=3h")
    firing = world.deployment()
    world.write(firing)
    await world.replica().run(later_ms=3 * HOUR_MS)
    assert (world.states(), replicas(world)) == (["refused old"], 2)

    for ignored in (over(firing, START_MS + 1), alert("web", name="GPUXid", labels=firing.labels), _elsewhere(firing)):
        world = World("scale")
        world.deployment()
        world.write(firing, ignored) if ignored.state == "resolved" else world.write(ignored)
        await world.replica().run()
        assert (world.log, replicas(world)) == ([], 2)


@pytest.mark.parametrize(("known_ms", "states"), [(HOUR_MS, ["refused old"]), (3 * HOUR_MS, ["intended", "done"])])
async def test_an_alert_that_was_renewed_but_not_confirmed_of_all_gpus_is_old(known_ms: int, states: list[str]) -> None:
    world = World("scale")
    world.now_ms += 4 * HOUR_MS
    world.write(msgspec.structs.replace(world.deployment(), confirmed_at=time_of(START_MS + known_ms)))
    await world.replica().run()
    assert world.states() == states


@pytest.mark.parametrize(
    ("reason", "hours", "held", "budget"), [("old", 3, 2, 9), ("partly", 0, 3, 9), ("budget", 0, 2, 0)]
)
async def test_what_is_refused_says_of_which_workload(reason: str, hours: int, held: int, budget: int) -> None:
    world = World("scale")
    world.write(msgspec.structs.replace(world.deployment(), held=held))
    await world.replica(budget=budget).run(later_ms=hours * HOUR_MS)
    assert world.states() == [f"refused {reason}"]
    assert "Deployment web" in world.log[0].message


async def test_mig_devices_are_no_gpus_of_what_is_done_or_refused() -> None:
    """Two pods idle on MIG devices of one GPU, and a third of the workload's devices works."""
    for says, message in (("scale", "Deployment web works partly (2 of 3 devices are in it)"), ("scale, partly", "")):
        world = World(says)
        firing = world.deployment()
        parts = tuple(msgspec.structs.replace(gpu, uuid=f"MIG-{gpu.pod}", index=0) for gpu in firing.gpus)
        world.write(msgspec.structs.replace(firing, gpus=parts, held=3))
        await world.replica().run()
        assert world.log[0].message.startswith(message)
        assert {action.gpus for action in world.log} == {1}


def _elsewhere(firing: Alert) -> Alert:
    return msgspec.structs.replace(firing, cluster="c2")


async def test_a_workload_that_works_partly_is_left_alone_unless_the_namespace_allows_it() -> None:
    for says, states in (("scale", ["refused partly"]), ("scale, partly", ["intended", "done"])):
        world = World(says)
        world.write(msgspec.structs.replace(world.deployment(), held=3))
        await world.replica().run()
        assert world.states() == states
    world = World("scale")
    world.write(msgspec.structs.replace(world.deployment(), held=None, idle=None))
    await world.replica().run()
    assert world.states() == ["refused partly"]


@pytest.mark.parametrize(
    ("says", "replicas", "states"),
    [
        ("scale", 2, ["intended", "done"]),
        ("scale", 3, ["refused partly"]),
        ("scale, partly", 3, ["intended", "done"]),
        ("event", 3, ["intended", "done"]),
    ],
)
async def test_a_deployment_with_a_pod_that_the_alert_does_not_know_is_left_alone(
    says: str, replicas: int, states: list[str]
) -> None:
    world = World(says)
    world.write(world.deployment())
    world.api.objects[DEPLOYMENT]["status"] = {"replicas": replicas}
    await world.replica().run()
    assert world.states() == states


async def test_a_job_with_a_pod_that_the_alert_does_not_know_is_left_alone() -> None:
    world = World("suspend")
    world.write(world.job())
    (job,) = [content for path, content in world.api.objects.items() if "/jobs/" in path]
    job["status"] = {"active": 9}
    await world.replica().run()
    assert world.states() == ["refused partly"]
    assert world.log[0].message.startswith("Job train has 9 pods, and the alert is about ")


async def test_a_job_of_kueue_with_a_pod_that_the_alert_does_not_know_is_left_alone() -> None:
    world = World("deactivate")
    world.write(world.job())
    world.kueue("uid-train", active=True)
    world.api.objects["/apis/batch/v1/namespaces/ml/jobs/train"]["status"] = {"active": 9}
    await world.replica().run()
    assert (world.states(), world.api.changes) == (["refused partly"], [])


@pytest.mark.parametrize(("uid", "states"), [("uid-web-0", ["intended", "done"]), ("another", ["refused changed"])])
async def test_the_pod_of_an_alert_about_one_pod_is_told_by_its_uid(uid: str, states: list[str]) -> None:
    world = World("scale")
    firing = world.deployment(pods=1)
    labels = {**firing.labels, "k8s_pod_name": "web-0", "k8s_pod_uid": uid}
    world.write(msgspec.structs.replace(firing, labels=labels))
    await world.replica().run()
    assert world.states() == states


async def test_what_keeps_a_workload_of_kueue_active_is_also_an_annotation_of_its_own() -> None:
    world = World("deactivate")
    world.write(world.job())
    world.kueue("uid-train", active=True)["metadata"]["annotations"] = {"gpustream.dev/reclaim": "off"}
    await world.replica().run()
    assert (world.states(), world.api.changes) == (["refused opted_out"], [])
    assert world.log[0].message.startswith("Workload job-train is left alone: gpustream.dev/reclaim is 'off'")


@pytest.mark.parametrize(
    ("when_scaled", "claims", "states"),
    [
        ("Delete", [{}], ["refused unsupported"]),
        ("Retain", [{}], ["intended", "done"]),
        ("Delete", [], ["intended", "done"]),
    ],
)
async def test_a_statefulset_that_would_lose_its_volumes_is_left_alone(
    when_scaled: str, claims: list[Json], states: list[str]
) -> None:
    world = World("scale")
    policy = {"whenDeleted": "Retain", "whenScaled": when_scaled}
    spec = {"replicas": 1, "volumeClaimTemplates": claims, "persistentVolumeClaimRetentionPolicy": policy}
    path = "/apis/apps/v1/namespaces/ml/statefulsets/notes"
    world.write(world.pods("notes", world.api.put(path, "StatefulSet", "apps/v1", spec=spec), 1))
    await world.replica().run()
    assert world.states() == states


@pytest.mark.parametrize(
    ("says", "states"), [("scale=4h", ["refused changed"]), ("scale=4h, partly", ["intended", "done"])]
)
async def test_a_pod_that_was_made_since_the_time_counts_is_another_pod_although_the_alert_was_renewed(
    says: str, states: list[str]
) -> None:
    world = World(says)
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    await sink.run()
    world.now_ms += 2 * HOUR_MS
    world.api.objects[POD]["metadata"]["creationTimestamp"] = time_of(world.now_ms).isoformat()
    world.now_ms += 2 * HOUR_MS
    world.write(firing)  # by what the node of the other pod reports
    await sink.run()
    assert world.states() == ["planned", *states]


async def test_what_was_undone_is_not_done_again_although_the_log_of_actions_was_lost() -> None:
    world = World("scale")
    world.write(world.deployment())
    await world.replica().run()
    deployment = world.api.objects[DEPLOYMENT]
    deployment["spec"]["replicas"], deployment["metadata"]["annotations"] = 2, {UNDONE: world.log[-1].id}
    world.log.clear()
    world.replicas.clear()
    await world.replica().run(later_ms=1000)
    assert (world.states(), replicas(world)) == (["refused already"], 2)


async def test_the_time_counts_from_when_all_of_the_workload_idles() -> None:
    world = World("scale=2h")
    firing = world.deployment()
    world.write(msgspec.structs.replace(firing, held=3))
    sink = world.replica()
    await sink.run(later_ms=2 * HOUR_MS)
    world.write(msgspec.structs.replace(firing, revision=1))
    await sink.run(later_ms=2 * HOUR_MS - 1)
    assert world.states() == ["refused partly", "planned"]
    again = world.replica()
    await again.run(later_ms=1)
    assert world.states()[2:] == ["intended", "done"]


async def test_after_a_restart_the_time_goes_on_although_the_log_has_only_the_last_record() -> None:
    world = World("scale=2h")
    firing = world.deployment()
    world.write(firing)
    await world.replica().run()
    world.now_ms += HOUR_MS
    world.alerts.clear()
    world.write(firing)  # renewed, and the record before it compacted away
    await world.replica().run(later_ms=HOUR_MS)
    assert world.states() == ["planned", "intended", "done"]


async def test_after_a_restart_the_time_goes_on_although_the_alert_has_become_critical() -> None:
    world = World("scale=2h")
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    await sink.run()
    world.write(msgspec.structs.replace(firing, revision=1, severity="critical"))
    await sink.run(later_ms=HOUR_MS)
    del world.alerts[0]  # compacted away
    await world.replica().run(later_ms=HOUR_MS)
    assert [action.due_at for action in world.log[:2]] == [time_of(START_MS + 2 * HOUR_MS)] * 2
    assert world.states() == ["planned", "planned", "intended", "done"]


async def test_a_planned_action_ends_with_the_alert_or_with_the_opt_in_of_its_namespace() -> None:
    world = World("scale=4h")
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    await sink.run()
    world.write(over(firing, START_MS + 1))
    await sink.run(later_ms=1000)
    assert world.states() == ["planned", "ended resolved"]

    world = World("scale=4h")
    world.write(firing)
    world.deployment()
    sink = world.replica()
    await sink.run()
    world.opt_in("event=4h")
    await sink.run(later_ms=120_000)
    assert world.states("scale") == ["planned", "ended not_opted_in"]


async def test_after_an_outage_of_kafka_nothing_is_done_before_the_alerts_were_read_on() -> None:
    world = World("scale=1h")
    other, firing = world.deployment("other"), world.deployment()
    world.write(other, firing)
    sink = world.replica()
    await sink.run()
    world.write(over(other, START_MS + 1), firing)
    send = sink.reclaimer._send

    async def send_after_the_outage(action: Action) -> None:
        if action.state == "ended":
            world.now_ms += HOUR_MS
            world.write(over(firing, world.now_ms))
        await send(action)

    sink.reclaimer._send = send_after_the_outage
    await sink.run(later_ms=1000)
    await sink.run(later_ms=1000)
    assert (world.states(), replicas(world)) == (["planned", "planned", "ended resolved", "ended resolved"], 2)


async def test_a_running_sink_counts_the_time_again_if_it_has_not_read_every_revision_of_an_alert() -> None:
    world = World("scale=2h")
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    await sink.run()
    world.now_ms += HOUR_MS
    world.write(msgspec.structs.replace(firing, revision=2))  # 1, in which one may have worked, was compacted away
    await sink.run(later_ms=HOUR_MS)
    assert [action.due_at for action in world.log] == [time_of(START_MS + ms) for ms in (2 * HOUR_MS, 3 * HOUR_MS)]
    assert replicas(world) == 2


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_alert_whose_last_record_cannot_be_read_is_not_acted_on(restarted: bool) -> None:
    world = World("scale=1h")
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    await sink.run()
    unreadable = b'{"schema":1,"state":"resolved"}'
    world.alerts.append(alert_record(unreadable, 1, at_ms=world.now_ms, key=firing.fingerprint.encode()))
    sink = world.replica() if restarted else sink
    await sink.run(later_ms=HOUR_MS)
    assert (world.states(), replicas(world)) == (["planned", "ended resolved"], 2)


async def test_what_was_begun_about_an_alert_that_is_not_acted_on_any_more_gets_its_end() -> None:
    world = World("event=1s, scale=4h")
    world.write(world.deployment())
    first = world.replica()
    await first.run()
    first.kill_at = "before done"
    with pytest.raises(Killed):
        await first.run(later_ms=1000)
    assert (world.states("event"), world.states("scale")) == (["planned", "intended"], ["planned"])
    world.replicas.remove(first)
    await world.replica(alert_names=("GPUStalled",)).run(later_ms=1000)
    assert world.states("event")[1:] == ["intended", "done"]
    assert world.states("scale") == ["planned", "ended resolved"]


async def test_the_least_time_of_the_operator_overrides_a_shorter_one_of_a_namespace() -> None:
    world = World("scale=1s")
    world.write(world.deployment())
    await world.replica(least_s=7200.0).run()
    assert world.log[0].due_at == time_of(START_MS + 2 * HOUR_MS)


# -- the API server's answers


@pytest.mark.parametrize(
    ("answer", "states"),
    [(status(403), ["intended", "refused forbidden"]), (status(422), ["intended", "refused rejected"])],
)
async def test_a_change_that_the_api_server_does_not_allow_is_refused(answer: Answer, states: list[str]) -> None:
    world = World("scale")
    world.write(world.deployment())
    world.api.faults = [_on("PATCH", answer)] * 9
    await world.replica().run()
    assert (world.states(), replicas(world)) == (states, 2)
    assert "HTTP" in world.log[-1].message


def _on(method: str, answer: Answer | None) -> Fault:
    """A fault for requests of a method; None: nobody answers."""

    def fault(requested_method: str, path: str) -> Answer | None:
        if requested_method != method:
            return None
        return answer if answer is not None else away(requested_method, path)

    return fault


async def test_a_right_to_read_that_is_missing_is_named() -> None:
    world = World("scale")
    world.write(world.deployment())
    world.api.faults = [lambda _, path: status(403, "no pods for you") if "/pods/" in path else None] * 9
    await world.replica().run()
    assert world.states() == ["refused forbidden"]
    assert "no pods for you" in world.log[0].message


@pytest.mark.parametrize(
    "fault",
    [
        away,
        lambda *_: status(429, "slow", 7.0),
        lambda *_: status(503),
        *[
            lambda *_, body=body: Answer(200, body, None)
            for body in (b"<html>", b"[1]", b'{"a":"\xff"}', b'{"error":1}', b'{"kind":"Status","metadata":{}}')
        ],
    ],
)
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
    assert (world.states(), sink.reclaimer.health.problem) == (["intended", "done"], "")


async def test_a_workload_whose_webhook_is_down_does_not_keep_the_others_waiting() -> None:
    world = World("scale, suspend")
    world.write(world.job(), world.deployment())

    def webhook_is_down(method: str, path: str) -> Answer | None:
        return status(500, "failed calling webhook") if method == "PATCH" and "/jobs/" in path else None

    world.api.faults = [webhook_is_down] * 99
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=6000)
    assert replicas(world) == 0
    world.api.faults = []
    await sink.run(later_ms=6000)
    assert world.states("suspend")[-2:] == ["intended", "done"]


@pytest.mark.parametrize(
    ("version", "kind", "name"),
    [
        ("kueue.x-k8s.io/v1beta1", "Workload", "."),
        ("apps/v1?", "Deployment", "web"),
        ("apps/..", "Deployment", "web"),
        ("apps/v1%2Fnamespaces%2Fother%2Fdeployments%2Fweb?", "Deployment", "x"),
    ],
)
async def test_an_owner_that_a_tenant_made_up_is_not_asked_for_and_keeps_no_other_alert_waiting(
    version: str, kind: str, name: str
) -> None:
    world = World("scale")
    owner = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "uid": "uid-web"}}
    world.write(world.pods("evil", owner, 1), world.deployment())
    asked: list[str] = []

    def like_an_api_server(method: str, path: str) -> Answer | None:
        asked.append(path)
        if path.endswith("/."):  # the list of all
            return Answer(200, b'{"kind": "WorkloadList", "metadata": {"resourceVersion": "1"}, "items": []}', None)
        return Answer(200, b'{"kind": "APIResourceList", "resources": []}', None) if "v1?" in path else None

    world.api.faults = [like_an_api_server] * 99
    sink = world.replica()
    await sink.run()

    assert (replicas(world), sink.reclaimer.health.problem) == (0, "")
    assert [action.reason for action in world.log if action.state == "refused"] == ["unsupported"]
    assert not [
        path
        for path in asked
        if path.startswith(("/apis/kueue.x-k8s.io/v1beta1/", "/apis/apps/v1?", "/apis/apps/..", "/apis/apps/v1%"))
    ]


async def test_an_action_whose_outcome_cannot_be_read_keeps_no_alert_waiting_and_retry_after_is_kept() -> None:
    world = World("scale, suspend")
    world.write(world.job(), world.deployment())
    asked_ms: list[int] = []

    def job_is_away(method: str, path: str) -> Answer | None:
        if "/jobs/" not in path or not world.log:
            return None
        asked_ms.append(world.now_ms - START_MS)
        return status(503, "slow", 60.0)

    world.api.faults = [job_is_away] * 99
    sink = world.replica()
    for _ in range(9):
        await sink.run(later_ms=10_000)
    assert (replicas(world), set(asked_ms)) == (0, {10_000, 70_000})
    world.api.faults = []
    await sink.run(later_ms=60_000)
    await sink.run(later_ms=1000)
    assert world.states("suspend")[-2:] == ["intended", "done"]


async def test_an_alert_whose_objects_can_not_be_read_keeps_no_action_open() -> None:
    world = World("scale, suspend")
    web = world.deployment()
    world.write(web)
    first = world.replica()
    first.kill_at = "after intended"
    with pytest.raises(Killed):
        await first.run()
    world.replicas.remove(first)
    world.write(world.job())

    def conversion_webhook_is_down(method: str, path: str) -> Answer | None:
        return status(500, "conversion webhook failed") if "/jobs/" in path else None

    sink = world.replica()
    for _ in range(4):
        world.api.faults = [conversion_webhook_is_down] * 99
        await sink.run(later_ms=10_000)
    assert world.states("scale") == ["intended", "refused interrupted", "intended", "done"]


async def test_no_more_pods_are_asked_for_when_the_api_server_says_for_one_when_to_come_again() -> None:
    world = World("scale")
    world.write(world.deployment(pods=100))
    asked: list[str] = []

    def slow_down(_: str, path: str) -> Answer | None:
        asked.append(path)
        return status(429, "slow", 60.0) if "/pods/" in path else None

    world.api.faults = [slow_down] * 999
    await world.replica().run()
    for _ in range(999):
        await asyncio.sleep(0)
    assert len(asked) < 20


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
    assert (world.states(), replicas(world)) == (["intended", "refused changed"], 5)
    world.api.faults = []
    await sink.run(later_ms=300_000)
    assert (world.states()[2:], world.log[-1].replicas) == (["intended", "done"], 5)


async def test_after_a_lost_answer_the_annotation_of_the_object_shows_that_the_change_was_made() -> None:
    world = World("scale")
    world.write(world.deployment())

    def lost(method: str, path: str) -> Answer | None:
        if method != "PATCH":
            return None
        existing = world.api.objects[path]
        version = existing["metadata"]["resourceVersion"]
        content = {
            "metadata": {"resourceVersion": version, "annotations": {RECLAIMED_BY: world.log[-1].id}},
            "spec": {"replicas": 0},
        }
        world.api.patch(path, existing, content)
        return away(method, path)

    world.api.faults = [lost] * 9
    sink = world.replica()
    await sink.run()
    assert world.states() == ["intended"]
    await sink.run(later_ms=10_000)
    assert (world.states(), len(world.api.changes)) == (["intended", "done"], 1)


async def test_a_change_that_the_api_server_did_not_answer_and_did_not_make_is_not_called_the_end_of_the_process() -> (
    None
):
    world = World("scale")
    world.write(world.deployment())
    world.api.faults = [_on("PATCH", None)] * 9
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=10_000)
    assert world.states() == ["intended", "refused interrupted"]
    assert "the API server took too long" in world.log[-1].message


async def test_an_intention_whose_object_can_not_be_read_stays_open_until_it_can() -> None:
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
    assert world.states("scale") == ["intended"]
    assert "was done is not known" in sink.reclaimer.health.problem
    world.api.faults = []
    await sink.run(later_ms=1000)
    assert world.states("scale") == ["intended", "done"]


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
        for name in ("web", "api"):
            firing = world.deployment(f"{name}-{number}")
            world.alerts.clear()
            world.write(firing)
            for record in world.alerts:
                sink.partition.recall(record)
    await asyncio.gather(*(sink.partition.quiet(sink.abandon) for sink in sinks))
    assert len(world.api.changes) == 2
    assert sum(action.reason == "budget" for action in world.log) == 4
    world.now_ms += HOUR_MS + 1000
    await asyncio.gather(*(sink.partition.quiet(sink.abandon) for sink in sinks))
    assert len(world.api.changes) == 4


def _intention(number: int, kind: str = "scale", state: str = "intended") -> Action:
    firing = alert(f"pod-{number}")
    return Action(
        schema=1, id=action_id(firing, kind), state=state, at=firing.starts_at, by="x", cluster="c1", namespace="ml",
        action=kind, target=Target(api_version="v1", kind="Pod", name=f"pod-{number}", uid="uid"), alert=firing.name,
        fingerprint=firing.fingerprint, starts_at=firing.starts_at,
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
            granted[action.id] = at_ms
        assert sum(granted_ms > at_ms - LEDGER_HOUR_MS for granted_ms in granted.values()) <= budget


# -- once, whatever happens


@pytest.mark.parametrize("kind", ["scale", "event"])
@pytest.mark.parametrize("kill_at", ["before intended", "after intended", "before done", "after done", "in between"])
async def test_an_action_is_done_once_wherever_the_process_is_killed(kill_at: str, kind: str) -> None:
    world = World(kind)
    world.write(world.deployment())
    first = world.replica()
    first.kill_at = kill_at
    if kill_at == "in between":
        world.api.faults = [_killed] * 9
    with pytest.raises(Killed):
        await first.run()
    world.replicas.remove(first)
    world.api.faults = []
    await world.replica().run(later_ms=1000)
    await world.replica().run(later_ms=HOUR_MS // 2)
    assert len(world.api.changes) == (kind == "scale")
    assert len(world.api.events) == (3 if kind == "event" else 0)
    assert world.states()[-1] == "done"
    assert len({action.id for action in world.log}) == 1


def _killed(method: str, path: str) -> Answer | None:
    if method in ("PATCH", "POST"):
        raise Killed
    return None


_STEPS = ("run", "run", "later", "lost", "away", "kill before", "kill after", "renew", "touch", "second")


@tried(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from(_STEPS), max_size=14))
def test_whatever_fails_the_object_is_changed_once_and_the_last_action_is_done(steps: list[str]) -> None:
    async def play() -> None:
        world = World("scale=1m")
        firing = world.deployment()
        world.write(firing)
        sinks = [world.replica()]
        for step in steps:
            await _step(world, firing, sinks, step)
        world.api.faults = []
        for _ in range(4):
            world.write(firing)
            world.now_ms += 301_000
            sink = world.replica()
            await sink.run()
        assert len(world.api.changes) == 1
        assert (world.states()[-1], replicas(world)) == ("done", 0)

    asyncio.run(play())


async def _step(world: World, firing: Alert, sinks: list[Replica], step: str) -> None:
    """One step of the story; then the last two processes run."""
    if step == "renew":
        world.write(firing)
    elif step == "touch":
        deployment = world.api.objects[DEPLOYMENT]
        world.api.put(DEPLOYMENT, "Deployment", "apps/v1", spec=deployment["spec"])
    elif step == "second":
        sinks.append(world.replica())  # as if the one before were dead; it still runs
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
        existing = world.api.objects[path]
        if existing["spec"]["replicas"]:
            meta = {
                "resourceVersion": existing["metadata"]["resourceVersion"],
                "annotations": {RECLAIMED_BY: world.log[-1].id},
            }
            world.api.patch(path, existing, {"metadata": meta, "spec": {"replicas": 0}})
        raise Unreachable("timeout", "no answer")

    return fault


def test_a_late_refusal_does_not_undo_done() -> None:
    ledger = Ledger("c1", {"stop": 1, "event": 0})
    for state in ("intended", "done", "refused"):
        ledger.add(_intention(0, state=state), START_MS)
    assert (last := ledger.last(_intention(0).id)) is not None
    assert (last.state, ledger.left("stop", START_MS)) == ("done", 0)


def test_what_another_replica_decides_before_it_has_read_an_intention_frees_no_budget() -> None:
    ledger = Ledger("c1", {"stop": 1, "event": 0})
    late = msgspec.structs.replace(_intention(0, state="refused"), target=None, reason="opted_out")
    for action in (_intention(0), late, _intention(1)):
        ledger.add(action, START_MS)
    assert (ledger.verdict(_intention(0)), ledger.verdict(_intention(1))) == (True, False)
    assert _intention(0) in ledger.unsettled()


def test_what_was_refused_and_done_after_all_counts_against_the_budget() -> None:
    ledger = Ledger("c1", {"stop": 1, "event": 0})
    for state in ("intended", "refused", "done"):
        ledger.add(_intention(0, state=state), START_MS)
    assert ledger.left("stop", START_MS) == 0


async def test_of_two_replicas_that_begin_an_action_at_once_one_acts_and_its_outcome_counts() -> None:
    """As when a partition was taken from a process that still decides about its alerts."""
    world = World("scale")
    world.write(world.deployment())
    sinks = [world.replica(instance_id=name) for name in ("first", "second")]
    requests: list[str] = []

    async def lose(target: Target, namespace: str, content: Json) -> Json | None:
        requests.append(content["metadata"]["annotations"][RECLAIMED_BY])
        world.api.patch(DEPLOYMENT, world.api.objects[DEPLOYMENT], content)
        raise Unreachable("timeout", "no answer")

    async def deny(target: Target, namespace: str, content: Json) -> Json | None:
        requests.append(content["metadata"]["annotations"][RECLAIMED_BY])
        raise Denied("rejected", "no")

    for sink, change in zip(sinks, (lose, deny), strict=True):
        sink.reclaimer.cluster.change = change  # type: ignore[method-assign]
    await asyncio.gather(*(sink.run() for sink in sinks))
    await world.replica(instance_id="third").run(later_ms=10_000)
    assert (world.states(), len(requests)) == (["intended", "intended", "done"], 1)
    assert [action.by for action in world.log] == ["first", "second", "first"]


async def test_nothing_is_kept_of_an_alert_of_which_a_compaction_has_left_only_the_deletion() -> None:
    world = World("scale=4h")
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    world.alerts.append(world.alerts[0]._replace(offset=1, value=None))
    await sink.run(later_ms=HOUR_MS)
    partition = sink.partition
    assert not any((partition._fingerprints, partition._watched, partition._check_at_s, partition._transitions._last))


def test_what_the_topic_has_not_any_more_is_forgotten_as_by_a_restart() -> None:
    ledger, restarted = (Ledger("c1", {"stop": 1, "event": 0}) for _ in range(2))
    day_ms = 24 * 3_600_000
    for day in range(200):
        for state in ("intended", "done"):
            ledger.add(_intention(day, state=state), START_MS + day * day_ms)
    ledger.add(_intention(150, state="undone"), START_MS + 240 * day_ms)
    for day in range(150, 200):
        for state in ("intended", "done"):
            restarted.add(_intention(day, state=state), START_MS + day * day_ms)
    restarted.add(_intention(150, state="undone"), START_MS + 240 * day_ms)
    for day in range(200):
        action = _intention(day).id
        assert ledger.last(action) == restarted.last(action)
        assert ledger.intention(action) == restarted.intention(action)
    assert sum(ledger.last(_intention(day).id) is not None for day in range(200)) == 50


def test_an_interrupted_action_keeps_its_place_in_the_budget() -> None:
    ledger = Ledger("c1", {"stop": 1, "event": 0})
    interrupted = msgspec.structs.replace(_intention(0, state="refused"), reason="interrupted")
    for action in (_intention(0), interrupted, _intention(1)):
        ledger.add(action, START_MS)
    assert ledger.verdict(_intention(1)) is False, "the request of the other may still be made"
    assert ledger.has_room(_intention(0), START_MS)
    assert not ledger.has_room(_intention(1), START_MS)


def test_an_action_that_is_intended_again_counts_for_an_hour_from_then() -> None:
    ledger = Ledger("c1", {"stop": 1, "event": 0})
    interrupted = msgspec.structs.replace(_intention(0, state="refused"), reason="interrupted")
    ledger.add(_intention(0), START_MS)
    ledger.add(interrupted, START_MS + 1000)
    ledger.add(_intention(0), START_MS + 50 * 60_000)
    assert not ledger.has_room(_intention(1), START_MS + 109 * 60_000)
    assert ledger.has_room(_intention(1), START_MS + 110 * 60_000)


async def test_what_another_replica_did_is_not_done_again_by_one_that_reads_of_it_only_now() -> None:
    world = World("scale")
    world.write(world.deployment())
    first, second = world.replica(), world.replica()
    world.replicas.remove(second)  # it reads nothing of gpu.actions for now
    await first.run()
    world.api.put(DEPLOYMENT, "Deployment", "apps/v1", spec={"replicas": 3})

    async def send(action: Action) -> None:
        world.log.append(action)
        for written in world.log:
            second.hear(written, world.now_ms)

    second.reclaimer._send = send
    await second.run()
    assert (replicas(world), len(world.api.changes)) == (3, 1)


async def test_a_change_that_is_made_after_its_request_was_given_up_is_written_as_done_and_not_made_again() -> None:
    world = World("scale")
    world.write(world.deployment())
    requests: list[Json] = []

    async def give_up(target: Target, namespace: str, content: Json) -> Json | None:
        requests.append(content)
        raise Unreachable("timeout", "no answer")

    sink = world.replica()
    change, sink.reclaimer.cluster.change = sink.reclaimer.cluster.change, give_up  # type: ignore[method-assign]
    await sink.run()
    annotate(world, POD, reclaim="off")
    await sink.run(later_ms=10_000)
    await sink.run(later_ms=1000)
    assert world.states() == ["intended", "refused interrupted", "refused opted_out"]
    world.api.patch(DEPLOYMENT, world.api.objects[DEPLOYMENT], requests[0])
    sink.reclaimer.cluster.change = change  # type: ignore[method-assign]
    await sink.run(later_ms=300_000)
    await world.replica().run(later_ms=300_000)
    assert (world.states()[3:], replicas(world), world.log[-1].replicas) == (["done"], 0, 2)


@pytest.mark.parametrize("what", ["the pod opts out", "the alert is resolved"])
async def test_a_decision_that_is_old_when_kafka_has_taken_the_intention_is_made_again(what: str) -> None:
    world = World("scale")
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    send = sink.reclaimer._send

    async def send_late(action: Action) -> None:
        world.now_ms += 600_000
        if what == "the pod opts out":
            annotate(world, POD, reclaim="off")
        else:
            world.write(over(firing, world.now_ms))
        await send(action)

    sink.reclaimer._send = send_late
    await sink.run()
    sink.reclaimer._send = send
    await sink.run(later_ms=1000)
    assert (world.api.changes, world.states()[:2]) == ([], ["intended", "refused interrupted"])


async def test_a_namespace_that_has_just_opted_out_is_left_alone() -> None:
    world = World("scale=1h")
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    world.api.put(NAMESPACE, "Namespace", "v1", metadata={"annotations": None})  # not read again yet
    await sink.run(later_ms=HOUR_MS)
    await sink.run(later_ms=60_000)
    assert (world.states()[:1], world.api.changes) == (["planned"], [])


def slow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each answer of the API server take 3 s."""
    answer = world.api.request

    async def answer_slowly(method: str, path: str, **more: Any) -> Answer:
        world.now_ms += 3000
        return await answer(method, path, **more)

    monkeypatch.setattr(world.api, "request", answer_slowly)


async def test_a_workload_whose_owners_are_read_slowly_is_stopped_once_the_log_was_read_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("scale")
    slow(world, monkeypatch)
    world.write(world.deployment(), world.deployment("other"))
    sink = world.replica()
    await sink.run()
    assert world.api.changes == [], "the alerts may be resolved by now"
    for _ in range(3):
        await sink.run(later_ms=1000)
    assert world.states() == ["intended", "done"] * 2


async def test_an_alert_that_ends_or_changes_while_its_owners_are_read_slowly_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("scale")
    slow(world, monkeypatch)
    firing = world.deployment()
    world.write(firing)
    sink = world.replica()
    await sink.run()
    annotate(world, POD, reclaim="off")
    world.write(msgspec.structs.replace(firing, revision=1))
    for _ in range(3):
        await sink.run()
    assert world.states() == ["refused opted_out"]
    world.write(over(firing, world.now_ms))
    await sink.run()
    assert world.api.changes == []


async def test_what_was_read_before_the_process_was_stopped_for_an_hour_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("scale")
    world.write(world.deployment())
    answer = world.api.request

    async def stop_after(method: str, path: str, **more: Any) -> Answer:
        answered = await answer(method, path, **more)
        if path == POD:
            monkeypatch.undo()
            annotate(world, POD, reclaim="off")
            world.now_ms += HOUR_MS
        return answered

    monkeypatch.setattr(world.api, "request", stop_after)
    sink = world.replica()
    await sink.run()
    await sink.run(later_ms=1000)
    assert (world.states(), world.api.changes) == (["refused opted_out"], [])


async def test_a_change_does_not_wait_for_what_is_read_about_other_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("scale")
    world.write(world.deployment())
    sink = world.replica()
    other, answered, answer, send = world.deployment("other", pods=9), asyncio.Event(), world.api.request, sink._send
    reading: list[asyncio.Task[Facts]] = []

    async def answer_slowly(method: str, path: str, **more: Any) -> Answer:
        if "/pods/other" in path:
            await answered.wait()
        return await answer(method, path, **more)

    async def send_and_read(action: Action) -> None:
        if action.state == "intended":
            reading.append(asyncio.ensure_future(sink.reclaimer.cluster.facts(other, {"metadata": {"name": "ml"}})))
        await send(action)

    monkeypatch.setattr(world.api, "request", answer_slowly)
    sink.reclaimer._send = send_and_read
    running = asyncio.ensure_future(sink.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert replicas(world) == 0
    answered.set()
    await asyncio.gather(running, *reading)


async def test_what_was_read_of_a_workload_long_ago_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("scale")
    slow(world, monkeypatch)
    world.write(world.deployment())
    sink = world.replica()
    await sink.run()
    annotate(world, POD, reclaim="off")
    await sink.run(later_ms=60_000)
    await sink.run(later_ms=1000)
    assert (world.states(), world.api.changes) == (["refused opted_out"], [])
