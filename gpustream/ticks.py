"""The ticks of gpu.attributed as the views need them: only the fields that are shown are decoded."""

import msgspec

from topics.attributed import AttributedTick, Parts, Workload
from topics.idleness import Ratios
from topics.samples import Mig, Process
from topics.topic import decoder
from topics.workloads import UnwellDevice


class Metrics(Ratios, frozen=True, gc=False):
    """The values that are shown, under the catalogue's keys."""

    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None

    @property
    def used_ratio(self) -> float | None:
        """How much the device is used: NVML's utilization; of a MIG device, which has none, GPM's. As usage has it."""
        ratios = self.gpu_utilization_ratio, self.graphics_engine_active_ratio, self.sm_active_ratio
        return next((ratio for ratio in ratios if ratio is not None), None)


class TickHolder(msgspec.Struct, frozen=True):
    """A container that holds a device."""

    namespace: str
    pod: str
    pod_uid: str | None = None
    workload: Workload | None = None
    labels: dict[str, str] = {}
    namespace_labels: dict[str, str] = {}
    parts: Parts | None = None
    observed: bool = False


class TickEvent(msgspec.Struct, frozen=True, gc=False):
    """Something that happened on a device."""

    kind: str
    code: int | None = None
    ts_ms: int | None = None


class TickDevice(msgspec.Struct, frozen=True):
    """A GPU or MIG device of a tick."""

    uuid: str
    index: int | None = None
    model: str | None = None
    state: str = "ok"
    mig: Mig | None = None
    metrics: Metrics = Metrics()
    holders: tuple[TickHolder, ...] = ()
    processes: tuple[Process, ...] | None = None
    events: tuple[TickEvent, ...] | None = None
    unattributed: Parts | None = None
    attribution: str | None = None


class Tick(AttributedTick, frozen=True, kw_only=True):
    """A node's tick in gpu.attributed, as far as it is shown."""

    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[TickDevice, ...] = ()
    unwell: tuple[UnwellDevice, ...] = ()


decode_tick = decoder(Tick)
"""Decodes a record of gpu.attributed. Raises ``msgspec.DecodeError`` if it is not one."""
