"""The reclaim sink as it is deployed, between a real Kafka and a real API server with RBAC, and killed as it acts."""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from gpustream.cli import main
from sinks.reclaim.decide import RECLAIMED_BY, UNDONE, WorkloadChange, patch
from tests.eventually import eventually
from tests.k8s.manifests import K8S
from tests.real.kubernetes import ApiServer, Json
from tests.real.pipeline import Gpustream, records_of
from tests.real.servers import KafkaServer
from tests.real.test_alert_sinks import write
from tests.sinks.alerts import alert
from topics.actions import Action, action_id
from topics.alerts import Alert, AlertGpu

CLUSTER = "c1"
SPACE = "reclaimed"
KUEUE = "kueue.x-k8s.io/v1beta1"
JOBSET = "jobset.x-k8s.io/v1alpha2"
PATHS = {
    "web": f"/apis/apps/v1/namespaces/{SPACE}/deployments/web",
    "notes": f"/apis/apps/v1/namespaces/{SPACE}/statefulsets/notes",
    "train": f"/apis/batch/v1/namespaces/{SPACE}/jobs/train",
    "gang": f"/apis/{JOBSET}/namespaces/{SPACE}/jobsets/gang",
    "queued": f"/apis/{KUEUE}/namespaces/{SPACE}/workloads/queued",
}
"""What is to be stopped."""


class Proxy:
    """Between the sink and the API server. It kills the sink before a change is made, or after, without an answer."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self.url = ""
        self.kill: Callable[[], None] | None = None
        self.when = "before"
        self.changed: Counter[str] = Counter()

    async def handle(self, request: web.Request) -> web.Response:
        """Forwards a request."""
        body, acts = await request.read(), request.method in ("PATCH", "POST")
        kill = self.kill if acts else None
        if kill is not None:
            self.kill = None
        if kill is not None and self.when == "before":
            kill()
            return web.Response(status=503)
        headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Content-Type", "Accept")}
        context = ssl.create_default_context(cafile=str(self._api.ca))
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self._api.url + request.path_qs, data=body, headers=headers, ssl=context
            ) as response,
        ):
            answered = await response.read()
            if acts and response.status < 300:
                self.changed[request.path] += 1
            if kill is not None:
                kill()
            return web.Response(status=response.status, body=answered, content_type="application/json")


@pytest.fixture
async def proxy(kube_api: ApiServer) -> AsyncIterator[Proxy]:
    """A proxy before the run's API server."""
    new_proxy = Proxy(kube_api)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", new_proxy.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    new_proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield new_proxy
    await runner.cleanup()


def crd(api: ApiServer, group: str, version: str, kind: str) -> None:
    """The definition of a custom resource of a controller."""
    plural = f"{kind.lower()}s"
    any_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": any_object}}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    api.apply(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{plural}.{group}",
                "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
            },
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
        }
    )


def bind(api: ApiServer, component: str) -> None:
    """Binds the rights that a component of k8s/ gives the sink."""
    for kind in ("clusterrole", "clusterrolebinding"):
        api.apply(yaml.safe_load((K8S / "components" / component / f"{kind}.yaml").read_text()))


def create(api: ApiServer, kind: str, version: str, name: str, *, owner: Json | None = None, **content: Any) -> Json:
    """An object in the namespace."""
    metadata: Json = {"name": name, "namespace": SPACE, **content.pop("metadata", {})}
    if owner is not None:
        reference = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"], "controller": True}
        metadata["ownerReferences"] = [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], **reference}]
    return api.create({"apiVersion": version, "kind": kind, "metadata": metadata, **content})


POD_SPEC = {"containers": [{"name": "main", "image": "x"}], "restartPolicy": "Never"}


def idle(api: ApiServer, name: str, owner: Json) -> Alert:
    """A pod of an owner, and its alert."""
    create(api, "Pod", "v1", f"{name}-0", owner=owner, spec=POD_SPEC)
    labels = {"k8s_namespace_name": SPACE, "k8s_workload_kind": owner["kind"], "k8s_workload_name": name}
    gpu = AlertGpu(uuid=f"GPU-{name}", node="n1", pod=f"{SPACE}/{name}-0")
    return alert(name, gpus=(gpu,), idle=1, held=1, labels=labels, annotations={"summary": f"{name} idles"})


def workloads(api: ApiServer) -> list[Alert]:
    """One of each kind that can be stopped, all idle; their alerts."""
    for group, version, kind in (("jobset.x-k8s.io", "v1alpha2", "JobSet"), ("kueue.x-k8s.io", "v1beta1", "Workload")):
        crd(api, group, version, kind)
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {**POD_SPEC, "restartPolicy": "Always"}}
    of_apps = {"replicas": 3, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    of_job = {"template": {"spec": POD_SPEC}}
    web_ = create(api, "Deployment", "apps/v1", "web", spec=of_apps)
    middle = create(api, "ReplicaSet", "apps/v1", "web-1", owner=web_, spec=of_apps)
    notes = create(api, "StatefulSet", "apps/v1", "notes", spec={**of_apps, "serviceName": "x"})
    train = create(api, "Job", "batch/v1", "train", spec=of_job)
    gang = create(api, "JobSet", JOBSET, "gang", spec={})
    part = create(api, "Job", "batch/v1", "gang-0", owner=gang, spec=of_job)
    queued = create(api, "Job", "batch/v1", "queued", spec=of_job)
    label = {"labels": {"kueue.x-k8s.io/job-uid": queued["metadata"]["uid"]}}
    create(api, "Workload", KUEUE, "queued", spec={"active": True}, metadata=label)
    owners = {"web": middle, "notes": notes, "train": train, "gang": part, "queued": queued}
    return [idle(api, name, owner) for name, owner in owners.items()]


def stopped(api: ApiServer) -> set[str]:
    """The names of the workloads that are stopped."""
    specs = {name: api.get(path)["spec"] for name, path in PATHS.items()}
    off = ({"replicas": 0}, {"suspend": True}, {"active": False})
    return {name for name, spec in specs.items() if any(off_spec.items() <= spec.items() for off_spec in off)}


async def actions(kafka: KafkaServer) -> list[Action]:
    """The records of gpu.actions, in order."""
    records = [record async for record in records_of(kafka.address, "gpu.actions")]
    return [msgspec.json.decode(record.value, type=Action) for record in records]


async def ends(kafka: KafkaServer) -> dict[str, tuple[str, str | None]]:
    """The last action of each workload."""
    return {
        action.target.name: (action.state, action.reason)
        for action in await actions(kafka)
        if action.target is not None
    }


async def test_what_idles_is_stopped_once_although_the_sink_is_killed_before_and_after_it_acts_and_is_given_back(
    empty_kafka: KafkaServer, kube_api: ApiServer, proxy: Proxy, gpustream: Callable[..., Gpustream]
) -> None:
    kafka, api = empty_kafka, kube_api
    kafka.create_ours({"gpu.alerts": 3, "gpu.dead-letters": 1, "gpu.actions": 2})
    firing = await asyncio.to_thread(workloads, api)
    await write(kafka, firing)
    token = await asyncio.to_thread(api.service_account, "gpustream", "reclaim")
    config = api.kubeconfig(server=proxy.url, token=token)

    def sink(name: str, *options: str) -> Gpustream:
        member = ("--instance-id", "reclaim-0", "--session-timeout", "6s", "--cluster", CLUSTER, "--least", "0s")
        all_options = ("--kafka", kafka.address, "--kubeconfig", str(config), *member, *options)
        return gpustream(name, "sink", "reclaim", *all_options)

    # a dry run, with the right to read alone
    await asyncio.to_thread(bind, api, "reclaim")
    note = {"gpustream.dev/reclaim": "scale, suspend, deactivate"}
    api.patch(f"/api/v1/namespaces/{SPACE}", {"metadata": {"annotations": note}})
    dry = sink("dry", "--dry-run")
    await asyncio.to_thread(dry.start)
    would = dict.fromkeys(PATHS, ("dry_run", None))
    await eventually(lambda: _is(kafka, lambda outcomes: outcomes.items() >= would.items()), "a dry run says it")
    await asyncio.to_thread(dry.stop)
    assert (stopped(api), proxy.changed) == (set(), Counter())

    # killed before and after what it does
    await asyncio.to_thread(bind, api, "reclaim-act")
    for number in range(4):
        killed_sink = sink(f"killed-{number}", "--act")
        killed = asyncio.Event()
        proxy.when, proxy.kill = ("before", "after")[number % 2], _killing(killed_sink, killed)
        await asyncio.to_thread(killed_sink.begin)
        await asyncio.wait_for(killed.wait(), 120)
    last = sink("last", "--act")
    await asyncio.to_thread(last.start)
    done = dict.fromkeys(PATHS, ("done", None))
    await eventually(lambda: _is(kafka, lambda outcomes: outcomes.items() >= done.items()), "all of it is done")
    assert stopped(api) == set(PATHS)
    assert proxy.changed == dict.fromkeys(PATHS.values(), 1)
    by_id = {action.id: action for action in await actions(kafka)}
    assert len([action for action in by_id.values() if action.target is not None]) == len(PATHS)
    await asyncio.to_thread(last.stop)

    # taken back, except for what somebody changed
    ids = {action.target.name: action.id for action in by_id.values() if action.target is not None}
    api.patch(PATHS["notes"], {"spec": {"replicas": 1}})
    undo_answers = {name: await asyncio.to_thread(_undo, kafka, api, ids[name]) for name in PATHS}
    assert {name: code for name, (code, _) in undo_answers.items()} == {name: int(name == "notes") for name in PATHS}
    changed = f"not undone: somebody changed StatefulSet {SPACE}/notes since: look at it, and change it yourself\n"
    assert undo_answers["notes"][1] == changed
    assert (stopped(api), api.get(PATHS["web"])["spec"]["replicas"]) == (set(), 3)
    annotations = api.get(PATHS["web"])["metadata"]["annotations"]
    assert (annotations.get(RECLAIMED_BY), annotations.get(UNDONE)) == (None, ids["web"])
    code, text = await asyncio.to_thread(_undo, kafka, api, ids["web"])
    assert (code, text) == (1, f"action {ids['web']} is undone: there is nothing to undo\n")
    assert (await ends(kafka))["train"] == ("undone", None)


async def _is(kafka: KafkaServer, is_expected: Callable[[dict[str, Any]], bool]) -> bool:
    return is_expected(await ends(kafka))


def _killing(process: Gpustream, killed: asyncio.Event) -> Callable[[], None]:
    def kill() -> None:
        process.kill9()
        killed.set()

    return kill


def _undo(kafka: KafkaServer, api: ApiServer, action: str) -> tuple[int, str]:
    """The output of the undo command."""
    config = str(api.kubeconfig("admin"))
    result = CliRunner().invoke(main, ["reclaim", "undo", action, "--kafka", kafka.address, "--kubeconfig", config])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.stderr


async def test_what_the_api_server_did_after_the_sink_had_given_it_up_can_be_undone(
    empty_kafka: KafkaServer, kube_api: ApiServer
) -> None:
    kafka, api, space = empty_kafka, kube_api, "late"
    kafka.create_ours({"gpu.actions": 2})
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    selector, path = {"matchLabels": {"app": "x"}}, f"/apis/apps/v1/namespaces/{space}/deployments"
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {**POD_SPEC, "restartPolicy": "Always"}}
    spec, records = {"replicas": 3, "selector": selector, "template": template}, list[Action]()
    for name in ("did", "did-not", "planned-again"):
        meta = {"name": name, "namespace": space}
        plan = WorkloadChange(
            api.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}), {"replicas": 0}
        )
        firing = alert(name)
        intended = Action(
            schema=1, id=action_id(firing, "scale"), state="intended", at=firing.starts_at, by="x", cluster=CLUSTER,
            namespace=space, action="scale", target=plan.target, alert=firing.name, fingerprint=firing.fingerprint,
            starts_at=firing.starts_at, replicas=3, generation=2,
        )  # fmt: skip
        refused = msgspec.structs.replace(intended, state="refused", reason="opted_out", target=None, replicas=None)
        records += [intended, refused]
        if name == "planned-again":  # its time began again, and then its alert was resolved
            records += [msgspec.structs.replace(refused, state=state, reason=None) for state in ("planned", "ended")]
        if name != "did-not":
            api.patch(f"{path}/{name}", patch(plan, intended.id, "it idles"))
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for action in records:
            await producer.send_and_wait("gpu.actions", msgspec.json.encode(action), key=CLUSTER.encode())
    ids = dict.fromkeys(action.id for action in records)
    did, did_not, planned_again = [await asyncio.to_thread(_undo, kafka, api, action) for action in ids]
    assert did == (0, f"undone: Deployment {space}/did has its replicas again\n")
    assert (did_not[0], "it was not done" in did_not[1]) == (1, True)
    assert planned_again == (0, f"undone: Deployment {space}/planned-again has its replicas again\n")
    names = ("did", "did-not", "planned-again")
    assert [api.get(f"{path}/{name}")["spec"]["replicas"] for name in names] == [3, 3, 3]


async def test_without_a_right_and_with_nonsense_it_says_so_and_does_nothing(
    empty_kafka: KafkaServer, kube_api: ApiServer, gpustream: Callable[..., Gpustream]
) -> None:
    kafka, api = empty_kafka, kube_api
    kafka.create_ours({"gpu.alerts": 3, "gpu.dead-letters": 1, "gpu.actions": 2})
    spaces = {"denied": "scale", "nonsense": "scale-it"}
    for name, reason in spaces.items():
        note = {"gpustream.dev/reclaim": reason}
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "annotations": note}})
    rule = {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]}
    token = await asyncio.to_thread(api.service_account, "gpustream", "poor")
    await asyncio.to_thread(api.grant, "gpustream:poor", rule)
    labels = {name: {"k8s_namespace_name": name, "k8s_workload_name": "x"} for name in spaces}
    await write(
        kafka,
        [
            alert(name, gpus=(AlertGpu(uuid="G", node="n", pod=f"{name}/x-0"),), idle=1, held=1, labels=labels[name])
            for name in spaces
        ],
    )
    options = ("--kafka", kafka.address, "--cluster", CLUSTER, "--kubeconfig", str(api.kubeconfig(token=token)))
    process = gpustream("poor", "sink", "reclaim", *options, "--act", "--least", "0s")
    await asyncio.to_thread(process.start)

    async def refused() -> dict[str, str]:
        refused_actions = {action.namespace: action for action in await actions(kafka) if action.state == "refused"}
        return (
            {name: f"{action.reason}: {action.message}" for name, action in refused_actions.items()}
            if len(refused_actions) == 2
            else {}
        )

    refusals = await eventually(refused, "both are refused")
    denied = "forbidden: the API server says to GET /api/v1/namespaces/denied/pods/x-0 (HTTP 403)"
    assert refusals["denied"].startswith(denied)
    assert refusals["nonsense"].startswith("policy_invalid: the annotation gpustream.dev/reclaim of the namespace")
    listed = await asyncio.to_thread(CliRunner().invoke, main, ["reclaim", "list", "--kafka", kafka.address])
    assert listed.exit_code == 0, listed.output
    assert listed.stdout.count("refused") == 2
