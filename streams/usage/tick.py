"""The fields of a record of gpu.attributed that count for usage: the others are not decoded.

In: the JSON of gpu.attributed. Out: a :class:`CountedTick`. Labels and workloads stay JSON text: they are decoded only
if they differ from those of the previous tick.
On failure: ``msgspec.DecodeError`` if it is no such record.
"""

from functools import lru_cache

import msgspec

from topics.attributed import AttributedTick, Attribution, Parts
from topics.idleness import Ratios
from topics.samples import Mig, State
from topics.topic import UInt, decoder

JSON_NULL = msgspec.Raw(b"null")
_shared_json = lru_cache(maxsize=8192)(msgspec.Raw)


def kept(json: msgspec.Raw) -> msgspec.Raw:
    """JSON text of a record as it is to be kept: a copy, or it would keep the whole record alive. Equal texts, as those
    of the labels of a namespace, have one."""
    return json if json is JSON_NULL else _shared_json(bytes(json))


class CountedMetrics(Ratios, frozen=True, omit_defaults=True, gc=False):
    """The metrics of the catalogue that are counted."""

    memory_used_bytes: float | None = None
    power_watts: float | None = None
    energy_joules_total: float | None = None
    tensor_active_ratio: float | None = None


class CountedProcess(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    pod_uid: str | None = None
    sm_utilization_ratio: float | None = None
    job_id: str | None = None


class Holder(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    namespace: str
    pod: str
    pod_uid: str | None = None
    container: str | None = None
    workload: msgspec.Raw = JSON_NULL
    labels: msgspec.Raw = JSON_NULL
    namespace_labels: msgspec.Raw = JSON_NULL
    parts: Parts | None = None
    observed: bool = False


class CountedInfo(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    mig_mode: str | None = None


class CountedDevice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    uuid: str
    model: str | None = None
    state: State = "ok"
    mig: Mig | None = None
    metrics: CountedMetrics = CountedMetrics()
    processes: tuple[CountedProcess, ...] | None = None
    info: CountedInfo = CountedInfo()
    compute_slices: UInt | None = None
    holders: tuple[Holder, ...] = ()
    unattributed: Parts | None = None
    attribution: Attribution | None = None


class CountedTick(AttributedTick, frozen=True, kw_only=True, gc=False):
    logged_ms: UInt | None = None
    node_labels: msgspec.Raw = JSON_NULL
    devices: tuple[CountedDevice, ...] = ()


decode = decoder(CountedTick)
