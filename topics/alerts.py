"""gpu.alerts, and what the alert stream remembers: gpu.alert-state, gpu.alert-members and gpu.alert-groups.

Source: RFC 3339 for the times, RFC 7693 (BLAKE2) for the fingerprint, CloudEvents 1.0 and its Kafka protocol binding
for the headers.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from topics.topic import Name, Number, Topic, UInt, Version

Severity = Literal["info", "warning", "critical"]
"""The severities that a rule may have."""

AnySeverity = Annotated[
    str,
    msgspec.Meta(
        examples=["info", "warning", "critical"], description="info, warning, critical, or a word of a later version"
    ),
]
State = Annotated[
    str, msgspec.Meta(examples=["firing", "resolved"], description="firing, resolved, or a word of a later version")
]
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z", description="16 hex digits")]
Time = Annotated[datetime, msgspec.Meta(tz=True, description="RFC 3339, UTC, of a whole millisecond")]

MAX_TIME_MS = 253_402_300_799_999
"""The last millisecond of the year 9999: RFC 3339 has no later one."""

RUNBOOKS = "https://github.com/gpustream/gpustream/blob/main/docs/runbooks"
"""Where the runbooks are, unless it is said otherwise: an absolute address works from a notification."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class AlertGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU or MIG device that an alert is about, and the pod that holds it."""

    uuid: str
    node: Name
    index: UInt | None = None
    pod: str | None = None


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an alert has come to.

    ``name`` is the rule's, ``starts_at`` and ``ends_at`` the event times at which it fired and was resolved, ``value``
    the figure that the rule judges, when it fired. ``labels`` were frozen then. ``resolved_because``: ``condition`` (it
    no longer holds), ``pod_ended``, ``policy``, ``rule_removed``, ``device_removed``, ``node_removed``, ``ticks``
    (of a node that had been silent), ``maintenance`` (of its node), or ``grouped`` (its workload's alert says it now).

    An alert may be about several GPUs: ``gpus`` are those of which it is true now, ``idle`` how many they are, and
    ``held`` how many the same pods hold in all. If these or the severity change while it fires, it is written again
    with the next ``revision``. The figures in its annotations are as of when it was written. ``node`` is then that of
    the first GPU.
    """

    schema: Version
    name: str
    state: State
    fingerprint: Fingerprint
    cluster: Name
    node: Name
    starts_at: Time
    ends_at: Time | None = None
    severity: AnySeverity
    value: Number | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    resolved_because: str | None = None
    revision: UInt = 0
    gpus: tuple[AlertGpu, ...] = ()
    held: UInt | None = None
    idle: UInt | None = None

    @property
    def is_open(self) -> bool:
        """Whether it goes on: every alert that is not resolved does, whatever else a later version says of it."""
        return self.state != "resolved"


Scope = Literal["workload", "pod", "node"]
"""What an alert of several GPUs is about."""


class Tracked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A condition that holds, or held so lately that its alert still fires.

    ``since_ms``: from when on it has held. ``ceased_ms``: it no longer does, since then; ``keep_ms``: for how long its
    alert fires on. ``blind_ms``: there is no evidence since then. ``event``: it is no state that lasts, but something
    that happened. ``alert`` is what is written of it to gpu.alerts, ``written_ms`` when it was; an alert without
    ``written_ms`` is still to be written. A pending condition has neither. ``scope``: the alert is a part of one of
    that scope, and is reported to gpu.alert-members in place of gpu.alerts. ``paused_ms``: for how long in all it did
    not hold since then, while its alert fired on; ``again_ms``: since when it holds again after the last such time.
    """

    name: str
    device: str = ""
    pod_uid: str = ""
    key: str = ""
    since_ms: UInt
    ceased_ms: UInt | None = None
    blind_ms: UInt | None = None
    event: bool = False
    keep_ms: UInt = 0
    alert: Alert | None = None
    written_ms: UInt | None = None
    scope: Scope | None = None
    paused_ms: UInt = 0
    again_ms: UInt | None = None


class AlertState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the alert stream remembers of a node, as of the last tick that changed it.

    ``offset`` is that tick's own (of the sample), ``run_id`` and ``seq`` its identity, ``position`` the offset of its
    record in gpu.attributed, ``generation`` how often these offsets have begun again. ``last_ts_ms`` and ``logged_ms``
    are its time, by the node's clock and by the broker's, ``newest_ts_ms`` the latest of any tick. ``silent``: no tick
    came after it for a while. ``resolved``: the fingerprints of resolved alerts that are still in gpu.alerts, and when
    they ended. ``maintenance``: what the node's annotation or taint says. ``memory`` is the conditions' own.
    """

    schema: Version
    cluster: Name
    node: Name
    generation: UInt = 0
    offset: UInt
    run_id: UInt = 0
    seq: UInt = 0
    newest_ts_ms: UInt = 0
    position: UInt
    last_ts_ms: UInt
    logged_ms: UInt
    silent: bool = False
    maintenance: str | None = None
    tracked: tuple[Tracked, ...] = ()
    resolved: dict[str, UInt] = {}
    memory: Any = None


class AlertReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tick of a node changes in an alert of several GPUs: those of single GPUs that begin, go on or end.

    ``group`` is the fingerprint of the alert that they are parts of, ``ts_ms`` the time of the tick, ``position`` its
    offset in gpu.attributed and ``logged_ms`` when it was logged there. ``phase`` tells reports of one tick apart.
    """

    schema: Version
    group: Fingerprint
    scope: Scope
    cluster: Name
    node: Name
    ts_ms: UInt
    position: UInt = 0
    logged_ms: UInt = 0
    phase: UInt = 0
    alerts: tuple[Alert, ...]


class Seen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last report of a node: position, phase and log time of its tick."""

    position: int
    phase: int
    logged_ms: int


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an alert of several GPUs, by its own fingerprint.

    It fires since ``starts_ms``, unless it has ended (``ended_ms``). Its condition has held for ``seconds`` as of the
    last report of it, and for ``before_s`` in earlier firings of it, since the group fires. ``share`` is the part of a
    GPU that it is about, ``price`` what an hour of such a GPU costs, ``last_active`` when it last worked, ``held`` how
    many devices its pod holds.
    """

    fingerprint: Fingerprint
    gpu: AlertGpu
    severity: str
    model: str | None = None
    starts_ms: UInt
    ended_ms: UInt | None = None
    seconds: float | None = None
    before_s: float = 0.0
    share: float | None = None
    price: str | None = None
    last_active: str | None = None
    held: UInt = 0


class AlertGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An alert of several GPUs, and its parts, as of the report at ``offset`` of its partition of gpu.alert-members.

    That report was of ``node``. ``seen`` is the last report of each node: what it sends again after a crash is not new.
    """

    schema: Version
    group: Fingerprint
    cluster: Name
    node: Name
    offset: int
    alert: Alert | None = None
    members: tuple[Member, ...] = ()
    seen: dict[str, Seen] = {}


def fingerprint(name: str, cluster: str, node: str, device: str = "", pod_uid: str = "", key: str = "") -> str:
    """What tells alerts apart: the rule's name, the node, and the device, pod and key that it is about, if any."""
    return blake2b("\0".join((name, cluster, node, device, pod_uid, key)).encode(), digest_size=8).hexdigest()


def transition_id(alert: Alert) -> str:
    """What tells transitions and updates apart: a repeat after a crash has the same one."""
    update = f"/{alert.revision}" if alert.revision else ""
    return f"{alert.fingerprint}/{milliseconds(alert.starts_at)}/{alert.state}{update}"


class EventAttribute(NamedTuple):
    """What an alert says of itself as a CloudEvent: the attribute's name, its value, and what a reader may rely on."""

    name: str
    of: Callable[[Alert], str]
    meaning: str

    @property
    def header(self) -> str:
        """The header of a record in which it is."""
        return "content-type" if self.name == "datacontenttype" else f"ce_{self.name}"


CLOUD_EVENT = (
    EventAttribute("specversion", lambda _: "1.0", "The version of CloudEvents."),
    EventAttribute(
        "id",
        transition_id,
        "The transition: `FINGERPRINT/STARTS_AT_MS/STATE`. With `source` it identifies the event; a record that is"
        " written again has the same one.",
    ),
    EventAttribute("source", lambda alert: f"urn:gpustream:{alert.cluster}/{alert.node}", "The node that it is about."),
    EventAttribute(
        "type",
        lambda alert: f"gpustream.alert.{alert.state}",
        "The state after the last dot. Take a state that you do not know for an open alert's.",
    ),
    EventAttribute("subject", lambda alert: f"{alert.name}/{alert.fingerprint}", "The rule's name and the alert."),
    EventAttribute(
        "time",
        lambda alert: msgspec.to_builtins((not alert.is_open and alert.ends_at) or alert.starts_at),
        "`ends_at` of a resolved alert, `starts_at` of any other.",
    ),
    EventAttribute("datacontenttype", lambda _: "application/json", "The data are the record's value."),
    EventAttribute(
        "dataschema", lambda alert: f"urn:gpustream:gpu.alerts:{alert.schema}", "`$id` of the record's JSON Schema."
    ),
    EventAttribute("partitionkey", lambda alert: alert.fingerprint, "The key: events of an alert are in order."),
)
"""What depends on the record alone, so that a repeat has the same headers."""


def cloud_event(alert: Alert) -> dict[str, str]:
    """The attributes of an alert as a CloudEvent, by their names."""
    return {attribute.name: attribute.of(alert) for attribute in CLOUD_EVENT}


def kafka_headers(alert: Alert) -> list[tuple[str, bytes]]:
    """The headers of an alert's record: those of a CloudEvent in binary mode."""
    return [(attribute.header, attribute.of(alert).encode()) for attribute in CLOUD_EVENT]


def time(ms: int) -> datetime:
    """The time of milliseconds since the epoch, from 0 to :data:`MAX_TIME_MS`."""
    return _EPOCH + ms * _MILLISECOND


def milliseconds(at: datetime) -> int:
    """Milliseconds since the epoch."""
    return (at - _EPOCH) // _MILLISECOND


_EXAMPLE = {
    "schema": 1,
    "name": "GPUHeldIdle",
    "state": "firing",
    "fingerprint": fingerprint(
        "GPUHeldIdle",
        "prod-us-east-1",
        "gpu-node-1",
        "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
        "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
    ),
    "cluster": "prod-us-east-1",
    "node": "gpu-node-1",
    "starts_at": "2026-11-20T23:59:12.500000Z",
    "severity": "warning",
    "value": 900.0,
    "labels": {
        "alertname": "GPUHeldIdle",
        "severity": "warning",
        "k8s_cluster_name": "prod-us-east-1",
        "k8s_node_name": "gpu-node-1",
        "gpu_uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
        "gpu_index": "0",
        "k8s_namespace_name": "ml-team",
        "k8s_pod_name": "bert-0",
        "k8s_workload_kind": "Job",
        "k8s_workload_name": "bert-finetune-v3",
    },
    "annotations": {
        "summary": "ml-team/bert-0 holds GPU 0 of gpu-node-1 and has not used it for 15m",
        "runbook": f"{RUNBOOKS}/GPUHeldIdle.md",
    },
}

TOPIC = Topic(
    name="gpu.alerts",
    key="the alert's fingerprint",
    record=Alert,
    cleanup="compact",
    retention_hours=None,
    by_node=False,
    promise=(
        "The last record of a key is the alert's state. A transition is identified by (fingerprint, starts_at, state): "
        "at least once, and a repeat has the same bytes. Each firing is followed by at most one resolved. Open alerts "
        "are written again daily; an alert that was resolved 7 days ago is deleted (a record without a value)."
    ),
    example=_EXAMPLE,
)

STATE = Topic(
    name="gpu.alert-state",
    key="cluster/node",
    record=AlertState,
    cleanup="compact",
    retention_hours=None,
    by_node=True,
    promise="Private to the alert stream, which writes it when it changes and reads it whole when it starts.",
    example={
        "schema": 1,
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "offset": 40312,
        "run_id": 1795218340000,
        "seq": 812,
        "newest_ts_ms": 1795219152500,
        "position": 40377,
        "last_ts_ms": 1795219152500,
        "logged_ms": 1795219152540,
        "tracked": [
            {
                "name": _EXAMPLE["name"],
                "device": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
                "pod_uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
                "since_ms": 1795218252500,
                "alert": _EXAMPLE,
                "written_ms": 1795219152500,
            }
        ],
        "memory": {},
    },
)

MEMBERS = Topic(
    name="gpu.alert-members",
    key="the fingerprint of the alert that they are parts of",
    record=AlertReport,
    cleanup="delete",
    retention_hours=48,
    by_node=True,
    promise="Private to the alert stream: what its workers report of single GPUs, for alerts of several GPUs.",
    example={
        "schema": 1,
        "group": "0f3c5b8e9a1d2c47",
        "scope": "workload",
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "ts_ms": 1795219152500,
        "alerts": [_EXAMPLE],
    },
)

GROUPS = Topic(
    name="gpu.alert-groups",
    key="the alert's fingerprint",
    record=AlertGroup,
    cleanup="compact",
    retention_hours=None,
    by_node=True,
    promise="Private to the alert stream, which writes it when it changes and reads it whole when it starts.",
    example={
        "schema": 1,
        "group": "0f3c5b8e9a1d2c47",
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "offset": 118,
        "alert": _EXAMPLE | {"fingerprint": "0f3c5b8e9a1d2c47"},
        "members": [
            {
                "fingerprint": _EXAMPLE["fingerprint"],
                "gpu": {"uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b", "node": "gpu-node-1", "index": 0},
                "severity": "warning",
                "starts_ms": 1795219152500,
                "seconds": 900.0,
                "share": 1.0,
                "held": 8,
            }
        ],
    },
)
