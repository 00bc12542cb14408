"""gpu.usage-minutes and gpu.usage: who had each device in each minute and each hour, and what they did with it."""

from typing import Annotated, NamedTuple

import msgspec

from topics.attributed import Workload
from topics.topic import Cluster, Node, Topic, UInt, Version, about

MINUTE_MS = 60_000
HOUR_MS = 3_600_000

Category = Annotated[
    str,
    about(
        "held (by a container of a pod, or a batch job), free (nobody is known to hold it), lost (it did not answer), "
        "or unobserved (no tick says anything of that time).",
        words=("held", "free", "unobserved", "lost"),
    ),
]
Policy = Annotated[
    str, about("How a device that pods share was divided: by what each used, or equally.", words=("used", "equal"))
]


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device, or part of one, in one window of UTC, for one holder or category. Integers only."""

    schema: Version
    cluster: Cluster
    node: Node
    gpu_uuid: Annotated[str, about("The physical GPU's UUID.")]
    uuid: Annotated[str, about("The device's UUID: the GPU's, or that of one of its MIG devices.")]
    start_ms: Annotated[UInt, about("When the window begins.", "ms since the epoch")]
    end_ms: Annotated[UInt, about("When the window ends. It is not a part of the window.", "ms since the epoch")]
    category: Category
    generation: Annotated[
        UInt, about("0, or higher if a replay wrote it. Of one key only the highest generation counts.", "none")
    ]
    revision: Annotated[
        UInt,
        about(
            "Counts what was written of the window. Of one key and generation only the highest revision counts.", "none"
        ),
    ]
    final: Annotated[bool, about("Whether no later revision comes.")]
    policy: Policy
    namespace: Annotated[str | None, about("The holder's namespace; a batch job's partition. Absent unless held.")] = (
        None
    )
    pod: Annotated[str | None, about("The holder's pod; a batch job's id.")] = None
    pod_uid: Annotated[str | None, about("The pod's UID.")] = None
    container: Annotated[str | None, about("The container that held the device.")] = None
    workload: Annotated[Workload | None, about("The holder's workload, as of the last tick.")] = None
    team: Annotated[
        str | None, about("The holder's team, by the label that --team-label names, as of the last tick.")
    ] = None
    labels: Annotated[dict[str, str], about("The holder's labels, as of the last tick.")] = {}
    node_labels: Annotated[dict[str, str], about("The node's labels, as of the last tick.")] = {}
    model: Annotated[str | None, about("The GPU's model, as of the last tick.")] = None
    device_ms: Annotated[
        UInt, about("How much of the window is this record's. Of a device that pods share, the holder's part.", "ms")
    ]
    slice_ms: Annotated[UInt, about("device_ms, times the compute slices of the device: all of a whole GPU's.", "ms")]
    of: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1), about("How many compute slices the GPU has.", "slices")]
    used_us: Annotated[
        UInt, about("Of device_ms, how long it computed. Both are rounded, so that it may be a little more.", "us")
    ]
    idle_ms: Annotated[UInt, about("Of device_ms, how long the holder did nothing with it.", "ms")]
    tensor_us: Annotated[UInt, about("Of device_ms, how long the tensor cores worked.", "us")]
    energy_mj: Annotated[UInt, about("The energy that it took.", "mJ")]
    memory_byte_ms: Annotated[UInt, about("The memory in use, times how long.", "bytes * ms")]
    exact_ms: Annotated[
        UInt,
        about(
            "For how long the holder rests on exact attribution. The three add up to device_ms, or are 0 "
            "if unobserved.",
            "ms",
        ),
    ]
    late_ms: Annotated[UInt, about("For how long it rests on late attribution.", "ms")]
    none_ms: Annotated[UInt, about("For how long it rests on no snapshot.", "ms")]

    @property
    def key(self) -> "Key":
        holder = (self.namespace or "", self.pod or "", self.pod_uid or "", self.container or "")
        return Key(self.cluster, self.node, self.uuid, self.start_ms, *holder, self.category)

    @property
    def order(self) -> tuple[int, int]:
        """The order of records of one key: the greatest one counts."""
        return self.generation, self.revision


class Key(NamedTuple):
    """The identity of a record of usage. A field that the record does not have is empty."""

    cluster: str
    node: str
    uuid: str
    start_ms: int
    namespace: str
    pod: str
    pod_uid: str
    container: str
    category: str

    def encode(self) -> bytes:
        """The key in Kafka: ``CLUSTER/NODE/UUID/START_MS/NAMESPACE/POD/POD_UID/CONTAINER/CATEGORY`` in UTF-8."""
        return "/".join(map(str, self)).encode()


class UsageState(msgspec.Struct, kw_only=True):
    """The usage stream's books of a node, as of a tick. The windows that are open are the stream's own."""

    schema: Version
    cluster: Cluster
    node: Node
    logs: Annotated[UInt, about("How often the offsets began again.", "none")] = 0
    offset: Annotated[UInt, about("The sample's offset.", "none")] = 0
    run_id: Annotated[int, about("The run of the tick. -1: there was none.", "none")] = -1
    seq: Annotated[UInt, about("The number of the tick in its run.", "none")] = 0
    newest_ts_ms: Annotated[UInt, about("The latest time of any tick.", "ms since the epoch")] = 0
    logged_ms: Annotated[UInt, about("When the broker wrote the tick.", "ms since the epoch")] = 0
    tick_ms: Annotated[UInt, about("The time of the last tick of the run.", "ms since the epoch")] = 0
    booked_ms: Annotated[UInt, about("Up to when time is booked.", "ms since the epoch")] = 0
    final_ms: Annotated[UInt, about("Up to when windows are final.", "ms since the epoch")] = 0
    interval_ms: Annotated[UInt | None, about("How far apart the node's ticks are meant to be.", "ms")] = None


_PROMISE = (
    "In the partition number that the node's ticks have. Of a GPU and a window, each revision has every key that it "
    "ever had, zeros included. Of one key take the highest generation, then the highest revision. Once final, the "
    "slice_ms of a GPU and a window add up to the window's length times `of`; those of a window that grows, to its "
    "length so far. A GPU has records for the whole of each hour in which a tick shows it, and for no other time."
)

_KEY = "cluster/node/uuid/start_ms/namespace/pod/pod_uid/container/category"

MINUTES = Topic(
    name="gpu.usage-minutes",
    key=_KEY,
    record=Usage,
    cleanup="delete",
    retention_hours=7 * 24,
    promise=f"Windows of a minute. {_PROMISE}",
)

HOURS = Topic(
    name="gpu.usage",
    key=_KEY,
    record=Usage,
    cleanup="compact,delete",
    retention_hours=45 * 24,
    promise=f"Windows of an hour, each the exact sum of its minutes. {_PROMISE}",
)

STATE = Topic(
    name="gpu.usage-state",
    record=UsageState,
    cleanup="compact",
    promise="Private to the usage stream, which writes it once a minute and reads it whole when it starts.",
    segment_ms=10 * MINUTE_MS,
)
