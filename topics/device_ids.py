"""Device ids: what a device plugin's id string says of the device, and which device of a tick that is.

In: an id as the kubelet reports it, and the devices of a node's tick. Out: the device's UUID, or that there is none.

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
    """The id has no known form, so it names no device. Count it, and go on without it."""

    def __init__(self, device_id: str) -> None:
        quoted = repr(device_id[:_MAX_QUOTED]) + ("..." if len(device_id) > _MAX_QUOTED else "")
        super().__init__(f"{quoted} is not a device id of a known form")


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """What an id says of a device: its UUID, or its parent's UUID or minor number and the instances it is made of.

    ``uuid`` and ``parent_uuid`` keep their ``GPU-`` or ``MIG-`` and are in lower case after it. ``replica`` is a share
    of a time-sliced or MPS device, ``slot`` one of a HAMi device (whose true device only the pod's annotation names).
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
        """The physical device as a key: equal for two shares of one device named in the same form."""
        return (self.uuid, self.parent_uuid, self.minor, self.gpu_instance, self.compute_instance)


def parse(device_id: str) -> DeviceRef:
    """What a device id says.

    :raises UnknownDeviceId: it is of no known form; nothing else is ever raised.
    """
    for form in _FORMS:
        match = form.fullmatch(device_id)
        if match:
            said = {name: text for name, text in match.groupdict().items() if text}
            fields = {name: normal(text) if name.endswith("uuid") else int(text) for name, text in said.items()}
            return msgspec.convert(fields, DeviceRef)
    raise UnknownDeviceId(device_id)


def normal(uuid: str) -> str:
    """A UUID as it is compared: in lower case, except the ``GPU-`` or ``MIG-`` before it."""
    return uuid[:4] + uuid[4:].lower()


class DeviceIndex:
    """The devices of one node's tick, found by what an id says of them.

    A place (a minor number, an instance) that two devices of the tick claim names neither of them.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._uuids: dict[Hashable, str | None] = {}
        for device in devices:
            for ref in _refs(device):
                uuid = self._uuids.setdefault(ref.physical, device.uuid)
                if uuid != device.uuid:
                    self._uuids[ref.physical] = None

    def find(self, ref: DeviceRef) -> str | None:
        """The UUID of the device meant, as the tick has it, or None if the tick has no such device."""
        return self._uuids.get(ref.physical)


def _refs(device: Device) -> Iterator[DeviceRef]:
    """Everything that an id of this device may say. A device without a minor number goes by its index."""
    yield DeviceRef(uuid=normal(device.uuid))
    minor = device.index if device.minor is None else device.minor
    mig = device.mig
    if mig is None:
        if minor is not None:
            yield DeviceRef(minor=minor)
    elif mig.gpu_instance is not None:
        gi, ci = mig.gpu_instance, mig.compute_instance or 0
        yield DeviceRef(parent_uuid=normal(mig.parent_uuid), gpu_instance=gi, compute_instance=ci)
        if minor is not None and ci == 0:
            yield DeviceRef(minor=minor, gpu_instance=gi)
