"""The pods of a simulated fleet: what runs, who owns it, and how long it lives.

In: a template, and the pod's place in the fleet. Out: a pod with its names, owners, labels and devices.
Times are milliseconds since the fleet's start; those before it are negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from producers.simulated import names
from producers.simulated.behaviours import BLOCK, Behaviour, Label, Story, attempt, attempts
from producers.simulated.hardware import Unit

STARTING_MS = 2_000
"""How long the images of a pod's containers take to start, in which it has its devices and no process on them: longer
than a kubelet lags, so that no process is seen of a pod that is not reported yet."""

Activity = Literal["busy", "idle", "bursty", "serving"]
Kind = Literal["Deployment", "Job", "CronJob", "StatefulSet", "DaemonSet", "RayCluster", "PyTorchJob", "Pod"]


class Template(NamedTuple):
    """A workload: ``units`` it may ask for, ``life`` of its pods as a multiple of the fleet's mean, its containers."""

    kind: Kind
    name: str
    namespace: str
    team: str
    activity: Activity | Behaviour
    units: tuple[int, ...]
    life: float
    containers: tuple[str, ...] = ("main",)


TEMPLATES = (
    Template("Job", "finetune-bert", "ml-research", "research", "busy", (1, 2, 4, 8), 1.0, ("pytorch",)),
    Template("Deployment", "llm-gateway", "serving", "platform", "serving", (1, 2), 1.2, ("vllm",)),
    Template("StatefulSet", "vector-index", "search", "search", "serving", (1,), 1.5, ("milvus",)),
    Template("Pod", "jupyter-ana", "notebooks", "research", "idle", (1,), 0.8, ("notebook",)),
    Template("CronJob", "nightly-eval", "ml-research", "research", "busy", (1, 2), 0.4, ("eval",)),
    Template("RayCluster", "ray-tune", "ml-research", "research", "bursty", (1, 2), 0.8, ("ray-worker",)),
    Template("Deployment", "embedder", "search", "search", "bursty", (2,), 1.0, ("triton", "reranker")),
    Template("DaemonSet", "video-edge", "media", "media", "bursty", (1,), 4.0, ("transcode",)),
    Template("Job", "pretrain-vision", "vision", "vision", "busy", (4, 8), 1.5, ("trainer", "evaluator")),
    Template("StatefulSet", "feature-server", "vision", "vision", "bursty", (1, 2), 1.0, ("server",)),
    Template("Pod", "jupyter-tomo", "notebooks", "vision", "idle", (1,), 0.6, ("notebook",)),
    Template("Deployment", "speech-to-text", "media", "media", "serving", (1,), 0.9, ("whisper",)),
)

_CAST = (
    Template("PyTorchJob", "pretrain-llm", "foundation", "foundation", "hung", (), 1.0, ("pytorch",)),
    Template("PyTorchJob", "align-llm", "foundation", "foundation", "straggler", (), 1.0, ("pytorch",)),
    Template("Job", "train-ranker", "search", "search", "throttled", (), 1.0, ("trainer",)),
    Template("Job", "train-ocr", "vision", "vision", "loader-bound", (), 1.0, ("trainer",)),
    Template("Pod", "jupyter-lena", "notebooks", "research", "notebook", (), 1.0, ("notebook",)),
    Template("Deployment", "draft-assistant", "serving", "platform", "hoarder", (), 1.0, ("vllm",)),
    Template("Deployment", "caption-api", "media", "media", "crash-loop", (), 1.0, ("server",)),
    Template("Job", "tune-prompts", "ml-research", "research", "underused", (), 1.0, ("agent",)),
)
CAST: dict[Behaviour, Template] = {template.activity: template for template in _CAST}  # type: ignore[misc]
"""What runs on the GPUs of each behaviour."""

_API_VERSIONS = dict.fromkeys(("ReplicaSet", "Deployment", "StatefulSet", "DaemonSet"), "apps/v1")
_API_VERSIONS |= {"Job": "batch/v1", "CronJob": "batch/v1", "RayCluster": "ray.io/v1", "PyTorchJob": "kubeflow.org/v1"}


class PodContainer(NamedTuple):
    name: str
    container_id: str
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class SimulatedPod:
    """A pod of one node. It holds its devices in [start_ms, end_ms); its processes begin at ``works_ms``."""

    template: Template
    namespace: str
    name: str
    uid: str
    start_ms: int
    end_ms: int
    known_ms: int
    end_known_ms: int
    containers: tuple[PodContainer, ...]
    labels: dict[str, str]
    owners: tuple[dict[str, str], ...]
    seed: float = 0.0
    story: Story | None = None

    def label(self, container: PodContainer, device: int, at_ms: int) -> Label:
        """What the pod does with a device at this time."""
        if self.story is None:
            return Label(self.template.activity, self.start_ms)
        return self.story.label(self.rank(container, device), at_ms)

    def rank(self, container: PodContainer, device: int) -> int:
        """Which rank of its job works on a device."""
        first = self.story.role.first_rank if self.story is not None else 0
        return first + [unit.device for unit in container.units].index(device)

    def places(self) -> list[tuple[PodContainer, int]]:
        """Its containers, each with the positions of its devices, once each: it may hold several replicas of a GPU."""
        return [
            (container, device)
            for container in self.containers
            for device in dict.fromkeys(unit.device for unit in container.units)
        ]

    @property
    def works_ms(self) -> int:
        """When its containers have started; a pod may end before."""
        return self.start_ms + STARTING_MS

    @property
    def workload(self) -> dict[str, str]:
        """The kind and name at the top of the pod's owner chain; its own if it has no owner."""
        if not self.owners:
            return {"kind": "Pod", "name": self.name}
        return {"kind": self.owners[-1]["kind"], "name": self.owners[-1]["name"]}

    @cached_property
    def holders(self) -> dict[str, dict[str, Any]]:
        """Its containers as holders, as the file of the truth has them, by name."""
        pod = {"namespace": self.namespace, "pod": self.name, "pod_uid": self.uid}
        tail = {"workload": self.workload, "labels": self.labels}
        return {container.name: {**pod, "container": container.name, **tail} for container in self.containers}

    @cached_property
    def allocated(self) -> tuple[dict[str, Any], ...]:
        pod = {"namespace": self.namespace, "pod": self.name}
        return tuple(
            {
                **pod,
                "container": container.name,
                "resource": container.units[0].resource,
                "device_ids": [unit.device_id for unit in container.units],
            }
            for container in self.containers
        )

    def api_object(self, at_ms: int, start_ms: int) -> dict[str, Any]:
        """The pod at the API server at ``at_ms``, for a fleet that started at ``start_ms`` since the epoch."""
        ended = self.end_known_ms <= at_ms
        last_phase = "Succeeded" if self.template.kind in ("Job", "CronJob") else "Failed"
        row = {
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
            "phase": last_phase if ended else "Running",
            "started_ms": max(0, start_ms + self.start_ms),
            "labels": self.labels,
            "namespace_labels": {"kubernetes.io/metadata.name": self.namespace, "team": self.template.team},
            "owners": self.owners,
        }
        if ended:
            return {**row, "ended_ms": max(0, start_ms + self.end_ms)}
        if self.template.activity == "crash-loop" and at_ms >= self.works_ms:
            last = attempt(at_ms - self.works_ms)
            if last.restarts and at_ms - self.works_ms >= last.fails_ms:
                return {**row, "waiting": "CrashLoopBackOff", "restarts": last.restarts}
        return row

    def changes_ms(self) -> list[int]:
        """When the pod changes at the API server."""
        times = [self.known_ms, self.end_known_ms]
        if self.template.activity == "crash-loop":
            life_ms = self.end_ms - self.works_ms
            for run in takewhile(lambda run: run.start_ms < life_ms, attempts()):
                times += [self.works_ms + run.start_ms, self.works_ms + run.fails_ms]
        return times


class PodPlace(NamedTuple):
    """The place of a pod in the fleet: its node, the number of its tenant, and its number among that tenant's pods."""

    cluster: str
    seed: int
    node: int
    tenant: int
    number: int

    @property
    def slot(self) -> int:
        """The number of the tenant in the fleet; a node has fewer than 100."""
        return self.node * 100 + self.tenant

    @property
    def serial(self) -> int:
        """The number of the pod in its fleet. No two pods that can run at the same time have the same."""
        return self.number * 100_003 + self.slot


def pod(
    template: Template, place: PodPlace, start_ms: int, end_ms: int, units: Sequence[Unit], story: Story | None = None
) -> SimulatedPod:
    """The pod that runs ``template`` at ``place``, with its identity and the delays of the API server.
    Each container after the first gets one of the units, while there are enough; the first gets the rest."""
    name, owners, extra = identity(template, place, start_ms, story.role.worker if story is not None else 0)
    known_ms = start_ms + int(1500 * names.fraction("known", *place))
    others = min(len(template.containers), len(units)) - 1
    shares = [tuple(units[others:]), *((unit,) for unit in units[:others])]
    return SimulatedPod(
        template=template,
        namespace=template.namespace,
        name=name,
        uid=names.object_uid("pod", *place),
        start_ms=start_ms,
        end_ms=end_ms,
        known_ms=known_ms,
        end_known_ms=max(known_ms, end_ms + int(1500 * names.fraction("ended", *place))),
        containers=tuple(
            PodContainer(container, names.container_id(container, *place), share)
            for container, share in zip(template.containers, shares, strict=False)
        ),
        labels={"app": template.name, "team": template.team, **extra},
        owners=tuple(owners),
        seed=names.fraction("activity", *place),
        story=story,
    )


def identity(
    template: Template, place: PodPlace, start_ms: int, worker: int = 0
) -> tuple[str, list[dict[str, str]], dict[str, str]]:
    """A pod's name, its owners from the pod upward, and the labels that its controller adds.

    The workload's name has a suffix of the fleet's own, so that pods without a generated suffix differ too. A CronJob's
    Job is called after the minute in which it was due, counted from an epoch of the fleet's own.
    """
    fleet = (place.cluster, place.seed, template.namespace, template.name)
    base = f"{template.name}-{names.suffix('fleet', place.cluster, place.seed)}"
    generated = names.numbered_suffix(place.serial, "pod", *fleet)

    def owner(kind: str, name: str) -> dict[str, str]:
        uid = names.object_uid(kind, name, *fleet)
        return {"api_version": _API_VERSIONS[kind], "kind": kind, "name": name, "uid": uid}

    match template.kind:
        case "Deployment":
            tag = names.template_hash(*fleet)
            owners = [owner("ReplicaSet", f"{base}-{tag}"), owner("Deployment", base)]
            return f"{base}-{tag}-{generated}", owners, {"pod-template-hash": tag}
        case "Job":
            job = f"{base}-{names.numbered_suffix(place.serial, 'job', *fleet)}"
            return f"{job}-{generated}", [owner("Job", job)], {"batch.kubernetes.io/job-name": job}
        case "CronJob":
            epoch = 29_000_000 + int(1_000_000 * names.fraction("cron", place.cluster, place.seed))
            job = f"{base}-{epoch + start_ms // 60_000}"
            owners = [owner("Job", job), owner("CronJob", base)]
            return f"{job}-{generated}", owners, {"batch.kubernetes.io/job-name": job}
        case "StatefulSet":
            name = f"{base}-{place.slot}"
            return name, [owner("StatefulSet", base)], {"statefulset.kubernetes.io/pod-name": name}
        case "DaemonSet":
            tag = names.template_hash(*fleet)
            return f"{base}-{generated}", [owner("DaemonSet", base)], {"controller-revision-hash": tag}
        case "RayCluster":
            return f"{base}-worker-{generated}", [owner("RayCluster", base)], {"ray.io/cluster": base}
        case "PyTorchJob":  # one for all nodes of a block
            serial = place.number * 100_003 + place.node // BLOCK
            job = f"{base}-{names.numbered_suffix(serial, 'job', *fleet)}"
            labels = {"training.kubeflow.org/job-name": job, "training.kubeflow.org/replica-index": str(worker)}
            return f"{job}-worker-{worker}", [owner("PyTorchJob", job)], labels
        case "Pod":
            return f"{base}-{place.node}-{place.tenant}-{place.number}", [], {}
