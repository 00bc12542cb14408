"""gpu.alerts, and what the alert stream remembers: gpu.alert-state, gpu.alert-members and gpu.alert-groups.

Source: RFC 3339 for the times, RFC 7693 (BLAKE2) for the fingerprint, CloudEvents 1.0 and its Kafka protocol binding
for the headers.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from topics.blake2 import blake2b
from topics.times import epoch_ms
from topics.topic import Cluster, Name, Node, Number, Topic, UInt, Version, about

Severity = Literal["info", "warning", "critical"]  # the severities that a rule may have
AnySeverity = Annotated[
    str, about("How bad it is, from the least to the worst.", words=("info", "warning", "critical"))
]
State = Annotated[str, about("firing: it goes on. resolved: it is over.", words=("firing", "resolved"))]
Fingerprint = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z", description="16 hex digits")]
Time = Annotated[datetime, msgspec.Meta(tz=True, description="RFC 3339, UTC, of a whole millisecond")]

RUNBOOKS = "https://github.com/gpustream/gpustream/blob/main/docs/runbooks"
"""The default address of the runbooks: an absolute one works from a notification."""


class AlertGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU or MIG device that an alert is about."""

    uuid: Annotated[str, about("The device's UUID.")]
    node: Annotated[Name, about("The node that it is on.")]
    index: Annotated[UInt | None, about("The GPU's index on its node.", "none")] = None
    pod: Annotated[
        str | None,
        about(
            "Who holds it: NAMESPACE/POD, or job ID of a batch job; several, with commas, of GPUs of a node that fail."
        ),
    ] = None


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an alert has come to.

    An alert may be about several GPUs. If ``gpus``, ``idle``, ``held`` or the severity change while it fires, it is
    written again with the next ``revision``.
    """

    schema: Version
    name: Annotated[str, about("The rule's name.")]
    state: State
    fingerprint: Annotated[Fingerprint, about("What tells alerts apart, 16 hex digits: the record's key.")]
    cluster: Cluster
    node: Annotated[Name, about("The node that it is about; of an alert about several GPUs, that of the first one.")]
    starts_at: Annotated[Time, about("When it fired, by the time of the tick that made it fire.")]
    ends_at: Annotated[Time | None, about("When it was resolved, likewise. Absent while it fires.")] = None
    severity: AnySeverity
    value: Annotated[
        Number | None,
        about(
            "The figure that the rule judges, as of when it fired; of an alert that has gpus, as of when it was "
            "written.",
            "that of the rule",
        ),
    ] = None
    labels: Annotated[
        dict[str, str],
        about(
            "The alert's labels, by name, as when it fired, but for severity, which is as in severity: "
            "docs/reference/alerts.md lists them."
        ),
    ] = {}
    annotations: Annotated[
        dict[str, str], about("Sentences for people and figures, by name, as of when it was written.")
    ] = {}
    resolved_because: Annotated[
        str | None,
        about(
            "Why it was resolved: condition (it no longer holds), pod_ended, policy, rule_removed, "
            "device_removed, node_removed, ticks (of a node that had been silent), maintenance (of its node), "
            "grouped (an alert of its workload says it now), or superseded (another alert says why). A later version "
            "may have other words."
        ),
    ] = None
    revision: Annotated[UInt, about("How often it was written again while it fires.", "none")] = 0
    gpus: Annotated[tuple[AlertGpu, ...], about("The GPUs of which it is true now, if it is about several.")] = ()
    held: Annotated[
        UInt | None, about("How many GPUs the workload, or the pod, holds in all; a MIG device counts as one.", "GPUs")
    ] = None
    idle: Annotated[UInt | None, about("Of how many of these it is true now.", "GPUs")] = None
    confirmed_at: Annotated[
        Time | None,
        about(
            "Until when it is known of each of the GPUs, by the log: when the tick was logged that confirmed it last."
            " Each is confirmed once an hour, while ticks show it. Absent if the alert is not about GPUs of pods."
        ),
    ] = None

    @property
    def is_open(self) -> bool:
        """Whether it goes on: every alert that is not resolved does, whatever else a later version says of it."""
        return self.state != "resolved"

    @property
    def gpu_count(self) -> int:
        """How many GPUs it is about: those that pods share, or that are cut into MIG devices, count once."""
        return len({(gpu.node, gpu.uuid if gpu.index is None else gpu.index) for gpu in self.gpus})


Scope = Annotated[Literal["workload", "pod", "node"], about("What the alert of several GPUs is about.")]


class Tracked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A condition that holds, or held so lately that its alert still fires."""

    name: Annotated[str, about("The rule's name.")]
    device: Annotated[str, about("The UUID of the device that it is about.")] = ""
    pod_uid: Annotated[str, about("The UID of the pod that it is about.")] = ""
    key: Annotated[str, about("What else tells it apart from others of the rule.")] = ""
    since_ms: Annotated[UInt, about("Since when it has held.", "ms since the epoch")]
    ceased_ms: Annotated[UInt | None, about("Since when it no longer holds.", "ms since the epoch")] = None
    blind_ms: Annotated[UInt | None, about("Since when there is no evidence.", "ms since the epoch")] = None
    event: Annotated[bool, about("Whether it is something that happened, and no state that lasts.")] = False
    keep_ms: Annotated[UInt, about("For how long its alert fires on after it ceased.", "ms")] = 0
    alert: Annotated[Alert | None, about("What is written of it to gpu.alerts. A pending condition has none.")] = None
    written_ms: Annotated[
        UInt | None,
        about("When that was written. Absent with an alert: it is still to be written.", "ms since the epoch"),
    ] = None
    scope: Annotated[
        Scope | None,
        about(
            "Set if the alert is a part of one of that scope: it is then reported to gpu.alert-members in "
            "place of gpu.alerts."
        ),
    ] = None
    paused_ms: Annotated[UInt, about("For how long in all it did not hold, while its alert fired on.", "ms")] = 0
    again_ms: Annotated[
        UInt | None, about("Since when it holds again after the last such time.", "ms since the epoch")
    ] = None


class AlertState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the alert stream remembers of a node, as of the last tick that changed it."""

    schema: Version
    cluster: Cluster
    node: Node
    generation: Annotated[UInt, about("How often the offsets in gpu.attributed have begun again.", "none")] = 0
    offset: Annotated[UInt, about("The offset of the tick's sample in gpu.samples.", "none")]
    run_id: Annotated[UInt, about("The run of the tick.", "none")] = 0
    seq: Annotated[UInt, about("The number of the tick in its run.", "none")] = 0
    newest_ts_ms: Annotated[UInt, about("The latest time of any tick.", "ms since the epoch")] = 0
    position: Annotated[UInt, about("The offset of the tick in gpu.attributed.", "none")]
    last_ts_ms: Annotated[UInt, about("The time of the tick, by the node's clock.", "ms since the epoch")]
    logged_ms: Annotated[UInt, about("The time of the tick, by the broker's clock.", "ms since the epoch")]
    interval_ms: Annotated[UInt | None, about("How far apart the node's ticks are meant to be.", "ms")] = None
    silent: Annotated[bool, about("Whether no tick came after it for a while.")] = False
    maintenance: Annotated[
        str | None, about("What the node's annotation or taint says, if the node is in maintenance.")
    ] = None
    tracked: Annotated[tuple[Tracked, ...], about("The conditions that hold, or whose alerts still fire.")] = ()
    resolved: Annotated[
        dict[str, UInt],
        about(
            "The fingerprints of resolved alerts that are still in gpu.alerts, and when they ended.",
            "ms since the epoch",
        ),
    ] = {}
    holdings: Annotated[
        dict[str, UInt] | None,
        about(
            "How many devices each workload, or pod without one, holds here, as reported last, by its alert.", "devices"
        ),
    ] = None
    memory: Annotated[Any, about("The conditions' own.")] = None


class Rank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A GPU of a workload, and what it did in the five minutes that have ended."""

    uuid: Annotated[str, about("The device's UUID.")]
    index: Annotated[int | None, about("The GPU's index on its node.", "none")]
    pod: Annotated[str, about("The pod that holds it.")]
    figures: Annotated[
        tuple[float | None, ...],
        about(
            "Utilization, activity of SMs, of tensor cores, SM clock, power, the share of time in which it was slowed "
            "down, and that with violations of power or temperature.",
            "0-1, 0-1, 0-1, Hz, W, 0-1, 0-1",
        ),
    ]
    model: Annotated[str | None, about("Its model: those of a model are compared.")] = None


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The thresholds by which ranks are compared, as they are for the workload."""

    for_ms: Annotated[UInt, about("For how long a rank must lag.", "ms")]
    keep_ms: Annotated[UInt, about("For how long it must not, to be over.", "ms")]
    peers: Annotated[UInt, about("With how many others it must be compared.", "none")]
    deviations: Annotated[float, about("By how many deviations an outlier differs from the median.", "none")]
    critical_ms: Annotated[UInt, about("After how long its alert is critical. 0: never.", "ms")] = 0


class AlertReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tick of a node changes in an alert of several GPUs: those of single GPUs that begin, go on or end."""

    schema: Version
    group: Annotated[Fingerprint, about("The fingerprint of the alert that they are parts of.")]
    scope: Scope
    cluster: Cluster
    node: Node
    ts_ms: Annotated[UInt, about("The time of the tick.", "ms since the epoch")]
    position: Annotated[UInt, about("The offset of the tick in gpu.attributed.", "none")] = 0
    logged_ms: Annotated[UInt, about("When it was logged there.", "ms since the epoch")] = 0
    phase: Annotated[UInt, about("Tells reports of one tick apart.", "none")] = 0
    held: Annotated[
        UInt | None, about("How many devices of the node the workload holds now, if that has changed.", "devices")
    ] = None
    alerts: Annotated[tuple[Alert, ...], about("The alerts of single GPUs.")] = ()
    others: Annotated[
        tuple[Alert, ...], about("Alerts of the workload's GPUs, by other rules, that this one goes by.")
    ] = ()
    ranks: Annotated[tuple[Rank, ...], about("What the workload's GPUs on the node did, to compare them.")] = ()
    limits: Annotated[Limits | None, about("By which they are compared.")] = None
    pattern: Annotated[
        Alert | None,
        about("An alert about one of them, if it lags. If they are not compared, resolved_because says why."),
    ] = None


class Suspect(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A GPU that lags behind its peers."""

    node: Annotated[str, about("The node that it is on.")]
    since_ms: Annotated[int, about("Since when it lags.", "ms since the epoch")]
    evidence: Annotated[str, about("By which measures.")]
    starts_ms: Annotated[int | None, about("Since when that is an alert, if it is one.", "ms since the epoch")] = None
    ceased_ms: Annotated[int | None, about("Since when it no longer lags.", "ms since the epoch")] = None
    critical: Annotated[bool, about("Whether it has lagged for so long that its alert is critical.")] = False


class Seen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last report of a node."""

    position: Annotated[int, about("The offset of its tick in gpu.attributed.", "none")]
    phase: Annotated[int, about("Which of the reports of the tick it was.", "none")]
    logged_ms: Annotated[int, about("When the tick was logged there.", "ms since the epoch")]
    held: Annotated[
        int | None, about("How many devices the workload holds there, if that was ever reported.", "devices")
    ] = None


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an alert of several GPUs."""

    fingerprint: Annotated[Fingerprint, about("The part's own fingerprint.")]
    gpu: Annotated[AlertGpu, about("The GPU that it is about.")]
    severity: Annotated[str, about("Its severity.")]
    model: Annotated[str | None, about("The GPU's model.")] = None
    starts_ms: Annotated[UInt, about("Since when it fires.", "ms since the epoch")]
    ended_ms: Annotated[UInt | None, about("When it ended.", "ms since the epoch")] = None
    seconds: Annotated[
        float | None, about("For how long its condition has held, as of the last report of it.", "s")
    ] = None
    confirmed_ms: Annotated[
        UInt | None, about("When the tick of the last report of it was logged.", "ms since the epoch")
    ] = None
    before_s: Annotated[
        float, about("For how long its condition held in earlier firings, since the group fires.", "s")
    ] = 0.0
    share: Annotated[float | None, about("The part of a GPU that it is about.", "0-1")] = None
    price: Annotated[str | None, about("What an hour of such a GPU costs, as a decimal number.")] = None
    last_active: Annotated[str | None, about("When the GPU last worked.")] = None
    held: Annotated[UInt, about("How many devices its pod holds.", "devices")] = 0
    evidence: Annotated[
        str | None, about("The measures by which it was found; of a GPU that fails, what the API server says of it.")
    ] = None
    since: Annotated[Time | None, about("Since when its condition has held, work of a moment left out.")] = None
    name: Annotated[str | None, about("Its rule, if that is another than the group's.")] = None


class AlertGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An alert of several GPUs, and its parts, as of the report at ``offset``, which was of ``node``.

    A group without an alert only knows how many GPUs the workload holds, for the alert that it may have.
    """

    schema: Version
    group: Annotated[Fingerprint, about("The alert's fingerprint.")]
    cluster: Cluster
    node: Node
    generation: Annotated[UInt, about("How often the offsets in gpu.alert-members have begun again.", "none")] = 0
    offset: Annotated[int, about("The report's offset in its partition of gpu.alert-members.", "none")]
    alert: Annotated[Alert | None, about("The alert, as it was written last.")] = None
    members: Annotated[tuple[Member, ...], about("Its parts.")] = ()
    others: Annotated[
        tuple[Member, ...], about("What other rules, by which this alert goes, say of the workload's GPUs.")
    ] = ()
    part: Annotated[
        Alert | None, about("One of its parts, if it is about all GPUs: the alert waits until all are.")
    ] = None
    seen: Annotated[
        dict[str, Seen], about("The last report of each node: what a node sends again after a crash is not new.")
    ] = {}
    ranks: Annotated[
        dict[str, tuple[Rank, ...]], about("What is reported of ranks and not compared yet, by the node.")
    ] = {}
    suspects: Annotated[dict[str, Suspect], about("The GPUs that lag behind their peers, by UUID.")] = {}

    @property
    def firing_members(self) -> list[Member]:
        """The parts that fire."""
        return [member for member in self.members if member.ended_ms is None]


def fingerprint(name: str, cluster: str, node: str, device: str = "", pod_uid: str = "", key: str = "") -> str:
    """The id of an alert: a hash of the rule's name, the node, and the device, pod and key that it is about, if any."""
    return blake2b("\0".join((name, cluster, node, device, pod_uid, key)).encode(), 8).hex()


def transition_id(alert: Alert) -> str:
    """The id of a transition or an update: a repeat after a crash has the same one."""
    update = f"/{alert.revision}" if alert.revision else ""
    return f"{alert.fingerprint}/{epoch_ms(alert.starts_at)}/{alert.state}{update}"


class EventAttribute(NamedTuple):
    """An attribute of an alert as a CloudEvent: its name, its value, and what a reader may rely on."""

    name: str
    value: Callable[[Alert], str]
    meaning: str

    @property
    def header(self) -> str:
        """The name of the record's header that has it."""
        return "content-type" if self.name == "datacontenttype" else f"ce_{self.name}"


CLOUD_EVENT = (
    EventAttribute("specversion", lambda _: "1.0", "The version of CloudEvents."),
    EventAttribute(
        "id",
        transition_id,
        "The transition: `FINGERPRINT/STARTS_AT_MS/STATE`, and `/REVISION` if that is not 0. With `source` it"
        " identifies the event; a record that is written again, also with new figures, has the same one.",
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
"""They depend on the record alone, so that a repeat has the same headers."""


def cloud_event(alert: Alert) -> dict[str, str]:
    """The attributes of an alert as a CloudEvent, by their names."""
    return {attribute.name: attribute.value(alert) for attribute in CLOUD_EVENT}


def kafka_headers(alert: Alert) -> list[tuple[str, bytes]]:
    """The headers of an alert's record: those of a CloudEvent in binary mode."""
    return [(attribute.header, attribute.value(alert).encode()) for attribute in CLOUD_EVENT]


TOPIC = Topic(
    name="gpu.alerts",
    key="the alert's fingerprint",
    record=Alert,
    cleanup="compact",
    by_node=False,
    promise=(
        "The last record of a key is the alert's state. A transition is identified by (fingerprint, starts_at, state), "
        "and comes at least once. A repeat has the same bytes, but an alert about several GPUs is also written again "
        "while it fires: with the next revision if its GPUs or its severity change, and once an hour with new figures, "
        "while ticks show that it goes on. Each firing is followed by at most one resolved. Open alerts "
        "are written again daily; an alert that was resolved 7 days ago is deleted (a record without a value), and "
        "earlier if its node has more than 2,000 that were resolved since."
    ),
)

_STATE_PROMISE = "Private to the alert stream, which writes it when it changes and reads it whole when it starts."

STATE = Topic(
    name="gpu.alert-state",
    record=AlertState,
    cleanup="compact",
    promise=_STATE_PROMISE,
)

MEMBERS = Topic(
    name="gpu.alert-members",
    key="the fingerprint of the alert that they are parts of",
    record=AlertReport,
    cleanup="delete",
    retention_hours=48,
    promise="Private to the alert stream: what its workers report of single GPUs, for alerts of several GPUs.",
)

GROUPS = Topic(
    name="gpu.alert-groups",
    key="the alert's fingerprint",
    record=AlertGroup,
    cleanup="compact",
    promise=_STATE_PROMISE,
)
