"""The fields of a gpu.attributed record that the rules read. The others are not decoded.

In: the JSON of gpu.attributed. Out: a :class:`Tick`.
On failure: ``msgspec.DecodeError`` for a record that is not one of gpu.attributed.
"""

from functools import cached_property

import msgspec

from topics.attributed import AttributedEvent, AttributedTick, Attribution, Holder, Parts, by_pod
from topics.idleness import Ratios
from topics.samples import Job, Mig, State
from topics.times import MAX_TIME_MS
from topics.topic import UInt, decoder
from topics.workloads import UnwellDevice


class Metrics(Ratios, frozen=True, omit_defaults=True, gc=False):
    """The metrics of the catalogue that rules judge, or that the texts of alerts have."""

    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    sm_clock_hz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    tensor_active_ratio: float | None = None
    temperature_celsius: float | None = None
    clock_event_reasons: float | None = None
    power_violation_seconds_total: float | None = None
    thermal_violation_seconds_total: float | None = None
    row_remap_pending: float | None = None
    row_remap_failure: float | None = None
    retired_pages_pending: float | None = None
    ecc_uncorrected_volatile_total: float | None = None
    ecc_uncorrected_aggregate_total: float | None = None
    nvlink_crc_errors_total: float | None = None
    nvlink_replay_errors_total: float | None = None
    nvlink_recovery_errors_total: float | None = None


class Process(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    pid: UInt
    pod_uid: str | None = None
    sm_utilization_ratio: float | None = None
    job_id: str | None = None


class Info(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    mig_mode: str | None = None
    processes_visible: str | None = None


class Device(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    uuid: str
    index: UInt | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    state: State = "ok"
    mig: Mig | None = None
    metrics: Metrics = Metrics()
    processes: tuple[Process, ...] | None = None
    jobs: tuple[Job, ...] | None = None
    events: tuple[AttributedEvent, ...] | None = None
    info: Info = Info()
    xids: dict[str, UInt] = {}
    holders: tuple[Holder, ...] = ()
    unattributed: Parts | None = None
    conflict: str | None = None
    attribution: Attribution | None = None
    compute_slices: UInt | None = None

    @property
    def pods(self) -> tuple[tuple[Holder, ...], ...]:
        """The pods that hold the device, each as its holders (one for each container)."""
        if len(self.holders) < 2:
            return (self.holders,) if self.holders else ()
        return self._sharing_pods

    @cached_property
    def _sharing_pods(self) -> tuple[tuple[Holder, ...], ...]:
        return tuple(map(tuple, by_pod(self.holders).values()))


class Tick(AttributedTick, frozen=True, kw_only=True):
    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    unwell: tuple[UnwellDevice, ...] = ()

    def mig_devices_of(self, uuid: str) -> list[Device]:
        """The MIG devices of a GPU."""
        return [device for device in self.devices if device.mig is not None and device.mig.parent_uuid == uuid]

    def knows_holders(self, uuid: str) -> bool:
        """Whether it is known who holds a device, or if ``uuid`` is empty, each device of the node."""
        attributions = [self.attribution_of(device) for device in self.devices if uuid in ("", device.uuid)]
        return "none" not in (attributions or [self.attribution])


_decode = decoder(Tick)


def decode(value: bytes) -> Tick:
    """The tick of a record. One past the year 9999 is malformed: an alert could not say when it began."""
    tick = _decode(value)
    if tick.ts_ms > MAX_TIME_MS:
        raise msgspec.DecodeError(f"ts_ms is {tick.ts_ms}, past the year 9999")
    return tick
