"""Device ids: parses a device plugin's id string, and finds the device of a tick that it names.

In: an id as the kubelet reports it, and the devices of a node's tick. Out: the device's UUID, or None.

Source: the id formats of NVIDIA's device plugin (a UUID, ``::N`` for a time-sliced or MPS replica,
``MIG-GPU-<uuid>/<gi>/<ci>`` before driver R470), of GKE's (``nvidia<I>[/gi<J>][/vgpu<N>]``: I is the number of the
device file, which NVML calls the minor number, and the compute instance is 0) and of HAMi's (``GPU-<uuid>-<N>``).
Devices of resource claims have no id string.
"""

import re
from collections.abc import Hashable, Iterable, Iterator

import msgspec

from topics.samples import Device

_MAX_QUOTED = 100
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"

_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"(?P<uuid>GPU-{_UUID})(?:::(?P<replica>{_NUMBER})|-(?P<slot>{_NUMBER}))?",
        rf"(?P<uuid>MIG-{_UUID})(?:::(?P<replica>{_NUMBER}))?",
        rf"MIG-(?P<parent_uuid>GPU-{_UUID})/(?P<gpu_instance>{_NUMBER})/(?P<compute_instance>{_NUMBER})",
        rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gpu_instance>{_NUMBER}))?(?:/vgpu(?P<replica>{_NUMBER}))?",
    )
)


class UnknownDeviceId(ValueError):
    """The id has no known form, so it names no device. Count it, and ignore the id."""

    def __init__(self, device_id: str) -> None:
        quoted = repr(device_id[:_MAX_QUOTED]) + ("..." if len(device_id) > _MAX_QUOTED else "")
        super().__init__(f"{quoted} is not a device id of a known form")


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed device id: a UUID, or the parent GPU's UUID or minor number with the ids of the instances.

    ``uuid`` and ``parent_uuid`` are in lower case after their ``GPU-`` or ``MIG-``. ``replica`` is a share of a
    time-sliced or MPS device, ``slot`` one of a HAMi device (whose real device only the pod's annotation names).
    """

    uuid: str | None = None
    parent_uuid: str | None = None
    minor: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    replica: int | None = None
    slot: int | None = None

    @property
    def physical(self) -> Hashable:
        """A key of the device without its share: equal for two shares of a device that are named in the same form."""
        return (self.uuid, self.parent_uuid, self.minor, self.gpu_instance, self.compute_instance)


def parse(device_id: str) -> DeviceRef:
    """Parse a device id.

    :raises UnknownDeviceId: it has no known form; no other error is raised.
    """
    for form in _FORMS:
        match = form.fullmatch(device_id)
        if match:
            groups = {name: text for name, text in match.groupdict().items() if text}
            fields = {name: normal(text) if name.endswith("uuid") else int(text) for name, text in groups.items()}
            return msgspec.convert(fields, DeviceRef)
    raise UnknownDeviceId(device_id)


def normal(uuid: str) -> str:
    """A UUID in the form in which it is compared: in lower case after its ``GPU-`` or ``MIG-``."""
    return uuid[:4] + uuid[4:].lower()


class DeviceIndex:
    """The devices of one node's tick, by what device ids may name them by.

    A minor number or an instance that two devices of the tick claim names neither of them.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._uuids: dict[Hashable, str | None] = {}
        for device in devices:
            for ref in _refs(device):
                uuid = self._uuids.setdefault(ref.physical, device.uuid)
                if uuid != device.uuid:
                    self._uuids[ref.physical] = None

    def find(self, ref: DeviceRef) -> str | None:
        """The UUID of the named device, as the tick writes it, or None if the tick has no such device."""
        return self._uuids.get(ref.physical)


def _refs(device: Device) -> Iterator[DeviceRef]:
    """Every reference by which an id may name this device. Without a minor number, its index takes that place."""
    yield DeviceRef(uuid=normal(device.uuid))
    minor = device.index if device.minor is None else device.minor
    mig = device.mig
    if mig is None:
        if minor is not None:
            yield DeviceRef(minor=minor)
    elif mig.gpu_instance is not None:
        gpu_instance, compute_instance = mig.gpu_instance, mig.compute_instance or 0
        parent_uuid = normal(mig.parent_uuid)
        yield DeviceRef(parent_uuid=parent_uuid, gpu_instance=gpu_instance, compute_instance=compute_instance)
        if minor is not None and compute_instance == 0:
            yield DeviceRef(minor=minor, gpu_instance=gpu_instance)
