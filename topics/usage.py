"""gpu.usage-minutes and gpu.usage: who had each device in each minute and each hour, and what they did with it."""

from typing import Annotated, NamedTuple

import msgspec

from topics.attributed import Workload
from topics.topic import Name, Topic, UInt, Version

MINUTE_MS = 60_000
HOUR_MS = 3_600_000

Category = Annotated[
    str,
    msgspec.Meta(
        examples=["held", "free", "unobserved", "lost"],
        description="held, free, unobserved, lost, or a word of a later version",
    ),
]
Policy = Annotated[
    str, msgspec.Meta(examples=["used", "equal"], description="used, equal, or a word of a later version")
]


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device, or part of one, in one window of UTC, for one holder or category. Integers only.

    ``uuid`` is the device's, ``gpu_uuid`` the physical GPU's; the window is [``start_ms``, ``end_ms``). ``category``:
    ``held`` (by ``container`` of ``pod``), ``free`` (nobody is known to hold it), ``lost`` (it did not answer), or
    ``unobserved`` (no tick says anything of that time). ``policy``: how a device that pods share was divided.
    ``generation`` is 0, or higher if a replay wrote it; ``revision`` counts what was written of the window. Of one key
    the highest generation counts and, in that, the highest revision. If it is ``final``, no later revision comes.

    ``device_ms``: for how long. ``slice_ms``: that, times the compute slices of the device; the GPU has ``of`` of them.
    ``used_us``: of that time, how long it computed. ``idle_ms``: how long the holder did nothing with it.
    ``tensor_us``: how long the tensor cores worked. ``energy_mj``: millijoules. ``memory_byte_ms``: bytes of memory in
    use, times milliseconds. ``exact_ms``, ``late_ms`` and ``none_ms`` say what the ticks' attribution rested on: they
    add up to ``device_ms``, or are 0 if unobserved. Workload, ``team``, labels and model are those of the last tick.
    """

    schema: Version
    cluster: Name
    node: Name
    gpu_uuid: str
    uuid: str
    start_ms: UInt
    end_ms: UInt
    category: Category
    generation: UInt
    revision: UInt
    final: bool
    policy: Policy
    namespace: str | None = None
    pod: str | None = None
    pod_uid: str | None = None
    container: str | None = None
    workload: Workload | None = None
    team: str | None = None
    labels: dict[str, str] = {}
    node_labels: dict[str, str] = {}
    model: str | None = None
    device_ms: UInt
    slice_ms: UInt
    of: UInt
    used_us: UInt
    idle_ms: UInt
    tensor_us: UInt
    energy_mj: UInt
    memory_byte_ms: UInt
    exact_ms: UInt
    late_ms: UInt
    none_ms: UInt

    @property
    def key(self) -> "Key":
        holder = (self.namespace or "", self.pod or "", self.pod_uid or "", self.container or "")
        return Key(self.cluster, self.node, self.uuid, self.start_ms, *holder, self.category)

    @property
    def order(self) -> tuple[int, int]:
        """By which of two records of one key the one that counts is known: the greater."""
        return self.generation, self.revision


class Key(NamedTuple):
    """What tells the records of a topic of usage apart. A part that a record does not have is empty."""

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


def read_key(key: bytes | None) -> Key:
    """What a record is about, by its key alone. Raises ValueError for what is no such key: dead-letter it."""
    parts = (key or b"").decode().split("/")
    if len(parts) != len(Key._fields):
        raise ValueError(f"the key {key!r:.300} has {len(parts)} parts, not {len(Key._fields)}")
    cluster, node, uuid, start_ms, *rest = parts
    return Key(cluster, node, uuid, int(start_ms), *rest)


class UsageState(msgspec.Struct, kw_only=True):
    """The usage stream's books of a node, as of a tick. ``offset`` is the sample's, ``run_id`` and ``seq`` its identity
    (-1: there was none), ``logged_ms`` its log time, ``newest_ts_ms`` the latest time of any tick; ``logs`` counts how
    often the offsets began again. ``tick_ms`` is the time of the last tick of the run. Up to ``booked_ms`` time is
    booked, up to ``final_ms`` windows are final. The windows that are open are the stream's own."""

    schema: Version
    cluster: Name
    node: Name
    logs: UInt = 0
    offset: UInt = 0
    run_id: int = -1
    seq: UInt = 0
    newest_ts_ms: UInt = 0
    logged_ms: UInt = 0
    tick_ms: UInt = 0
    booked_ms: UInt = 0
    final_ms: UInt = 0


_PROMISE = (
    "In the partition number that the node's ticks have. Of a GPU and a window, each revision has every key that it "
    "ever had, zeros included. Of one key take the highest generation, then the highest revision. Once final, the "
    "slice_ms of a GPU and a window add up to the window's length times `of`; those of a window that grows, to its "
    "length so far. A window without a tick of a GPU has no record of it."
)

_EXAMPLE = {
    "schema": 1,
    "cluster": "prod-us-east-1",
    "node": "gpu-node-1",
    "gpu_uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
    "uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
    "start_ms": 1795219140000,
    "end_ms": 1795219200000,
    "category": "held",
    "generation": 0,
    "revision": 1,
    "final": True,
    "policy": "used",
    "namespace": "ml-team",
    "pod": "bert-0",
    "pod_uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
    "container": "pytorch",
    "workload": {"kind": "Job", "name": "bert-finetune-v3"},
    "team": "ml",
    "labels": {"team": "ml"},
    "node_labels": {"topology.kubernetes.io/zone": "us-east-1a"},
    "model": "NVIDIA H100 80GB HBM3",
    "device_ms": 60000,
    "slice_ms": 420000,
    "of": 7,
    "used_us": 55800000,
    "idle_ms": 0,
    "tensor_us": 21000000,
    "energy_mj": 41000000,
    "memory_byte_ms": 4123168604160000,
    "exact_ms": 60000,
    "late_ms": 0,
    "none_ms": 0,
}

_KEY = "cluster/node/uuid/start_ms/namespace/pod/pod_uid/container/category"

MINUTES = Topic(
    name="gpu.usage-minutes",
    key=_KEY,
    record=Usage,
    cleanup="delete",
    retention_hours=7 * 24,
    by_node=True,
    promise=f"Windows of a minute. {_PROMISE}",
    example=_EXAMPLE,
)

HOURS = Topic(
    name="gpu.usage",
    key=_KEY,
    record=Usage,
    cleanup="compact,delete",
    retention_hours=45 * 24,
    by_node=True,
    promise=f"Windows of an hour, each the exact sum of its minutes. {_PROMISE}",
    example={
        **_EXAMPLE,
        "start_ms": 1795215600000,
        "end_ms": 1795219200000,
        "revision": 60,
        "device_ms": 3600000,
        "slice_ms": 25200000,
        "used_us": 3348000000,
        "tensor_us": 1260000000,
        "energy_mj": 2460000000,
        "memory_byte_ms": 247390116249600000,
        "exact_ms": 3600000,
    },
)

STATE = Topic(
    name="gpu.usage-state",
    key="cluster/node",
    record=UsageState,
    cleanup="compact",
    retention_hours=None,
    by_node=True,
    promise="Private to the usage stream, which writes it once a minute and reads it whole when it starts.",
    example={
        "schema": 1,
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "logs": 0,
        "offset": 40312,
        "run_id": 1795218340000,
        "seq": 812,
        "newest_ts_ms": 1795219200200,
        "logged_ms": 1795219200240,
        "tick_ms": 1795219200200,
        "booked_ms": 1795219200200,
        "final_ms": 1795218000000,
    },
    segment_ms=10 * MINUTE_MS,
)
