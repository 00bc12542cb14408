"""gpu.actions: what was decided about workloads that waste GPUs, what was done, and what was refused.

Source: CloudEvents 1.0 and its Kafka protocol binding for the headers, RFC 7693 (BLAKE2) for the id.
"""

from typing import Annotated, Literal, get_args

import msgspec

from topics.alerts import Alert, Fingerprint, Time
from topics.blake2 import blake2b
from topics.times import epoch_ms
from topics.topic import Cluster, Topic, UInt, Version, about

ActionKind = Literal["event", "scale", "suspend", "deactivate"]
"""An Event; a Deployment or StatefulSet to 0 replicas; a Job or JobSet suspended; a Workload of Kueue inactive."""

KINDS: tuple[ActionKind, ...] = get_args(ActionKind)

State = Annotated[
    str,
    about(
        "What has become of it: planned (due_at says for when), dry_run (it would have been done), intended (it is "
        "about to be done), done, refused, ended (what was planned is not due any more), undone.",
        words=("planned", "dry_run", "intended", "done", "refused", "ended", "undone"),
    ),
]
Reason = Annotated[
    str | None,
    about(
        "Why it was refused or has ended.",
        words=(
            "policy_invalid", "opted_out", "partly", "old", "no_owner", "several_owners", "unsupported", "managed",
            "already", "changed", "budget", "forbidden", "rejected", "interrupted", "resolved", "not_opted_in",
        ),
    ),
]  # fmt: skip


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The object that an action is about, or changes."""

    api_version: Annotated[str, about("Its API version, such as apps/v1.")]
    kind: Annotated[str, about("Its kind.")]
    name: Annotated[str, about("Its name.")]
    uid: Annotated[str, about("Its UID: another object of that name is another object.")]


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was decided about a workload of an alert, or what became of that.

    There is one action of each kind for a firing of an alert: what is written of it later has the same ``id``.
    """

    schema: Version
    id: Annotated[Fingerprint, about("What tells actions apart; `gpustream reclaim undo` takes it.")]
    state: State
    at: Annotated[Time, about("When this was decided, or done, by the clock of who wrote it.")]
    by: Annotated[str, about("Who wrote it: a process of the sink, or the user of the command.")]
    cluster: Cluster
    namespace: Annotated[str, about("The workload's namespace.")]
    action: Annotated[
        str | None, about("What is done. None if the namespace's annotation can't be read.", words=KINDS)
    ] = None
    target: Annotated[
        Target | None, about("The object that is changed, or that an Event is about, if it was found.")
    ] = None
    alert: Annotated[str, about("The alert's name.")]
    fingerprint: Annotated[Fingerprint, about("The alert's fingerprint: its key in gpu.alerts.")]
    starts_at: Annotated[Time, about("When the alert fired.")]
    gpus: Annotated[
        UInt, about("How many GPUs the alert is about: one that is shared or cut into MIG devices counts once.", "GPUs")
    ] = 0
    since: Annotated[
        Time | None, about("Since when the alert has been as it must be: its time is counted from here.")
    ] = None
    revision: Annotated[
        UInt | None, about("The alert's revision, if all GPUs of the workload must idle for it to be done.", "none")
    ] = None
    due_at: Annotated[Time | None, about("When it is due, if nothing changes until then.")] = None
    reason: Reason = None
    message: Annotated[str, about("One or two sentences for people.")] = ""
    replicas: Annotated[UInt | None, about("How many replicas it had before it was scaled to none.", "replicas")] = None
    generation: Annotated[
        UInt | None, about("The target's generation after it: another one says that somebody changed it since.", "none")
    ] = None


def action_id(alert: Alert, action: str | None) -> str:
    """The id of an action: a hash of the alert's firing and of what is done about it."""
    parts = (alert.cluster, alert.fingerprint, str(epoch_ms(alert.starts_at)), action or "")
    return blake2b("\0".join(parts).encode(), 8).hex()


def kafka_headers(action: Action) -> list[tuple[str, bytes]]:
    """The headers of an action's record: those of a CloudEvent in binary mode."""
    at_ms = epoch_ms(action.at)
    attributes = {
        "ce_specversion": "1.0",
        "ce_id": f"{action.id}/{action.state}/{at_ms}",
        "ce_source": f"urn:gpustream:{action.cluster}",
        "ce_type": f"gpustream.action.{action.state}",
        "ce_subject": f"{action.namespace}/{action.id}",
        "ce_time": msgspec.to_builtins(action.at),
        "content-type": "application/json",
        "ce_dataschema": f"urn:gpustream:gpu.actions:{action.schema}",
        "ce_partitionkey": action.cluster,
    }
    return [(name, value.encode()) for name, value in attributes.items()]


TOPIC = Topic(
    name="gpu.actions",
    key="the cluster: all of a cluster is in one partition, in the order in which it was decided",
    record=Action,
    cleanup="delete",
    retention_hours=90 * 24,
    by_node=False,
    promise=(
        "What `sink reclaim` decides, would do, refuses and does, and what is undone. The last record of an id is what "
        "has become of the action. Before anything is changed, `intended` is written; after it `done` or `refused`. At "
        "least once: a record may be there again. Records have the headers of a CloudEvent, as gpu.alerts has."
    ),
)
