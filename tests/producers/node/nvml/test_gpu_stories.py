"""Whatever happens to a GPU that is cut, tick after tick: nothing is invented, mixed up or forgotten."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from producers.node.nvml import binding
from producers.node.nvml.binding import Handle, NvmlError
from producers.node.nvml.gpu import MIG_MODE, MIG_SLOT, MIG_SLOTS, UUID, PhysicalGpu
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import GIB, FakeDevice, FakeNvml, FakeProcessOwners, memory, part
from tests.producers.node.nvml.test_each_call import CODES

SLOTS = 4
CALLS = [UUID, MIG_SLOT, "nvmlDeviceGetFieldValues", *sorted({key for key in part("").answers if key != MIG_MODE})]
CALLS += [MIG_MODE, MIG_SLOTS, "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPowerUsage"]
LOST = [binding.GPU_IS_LOST, binding.RESET_REQUIRED, binding.UNKNOWN, binding.UNINITIALIZED]
LASTING = ("model", "pci_bus_id", "minor", "compute_slices")  # of what a device is, what it keeps once it is known


class Tick(NamedTuple):
    """The GPU instances by slot, the calls that fail, each with its error, and the error of every call."""

    layout: Sequence[int]
    failing: Mapping[str, int]
    lost: int | None


TICKS = st.builds(
    Tick,
    st.lists(st.integers(1, SLOTS), unique=True, max_size=SLOTS),
    st.dictionaries(st.sampled_from(CALLS), st.sampled_from(CODES), max_size=4),
    st.sampled_from([None, None, None, None, *LOST]),
)


class StoryNvml(FakeNvml):
    """A machine with one GPU, whose instances are made and destroyed, and calls that fail."""

    def __init__(self) -> None:
        super().__init__(1)
        self.tick = Tick((), {}, None)
        self.instances = {number: part(f"MIG-{number}", number, f"{number}g.10gb", number) for number in range(1, 5)}
        for number, instance in self.instances.items():
            instance.answers["nvmlDeviceGetMemoryInfo"] = memory(number * GIB, 10 * GIB)
        self.init()

    def begin(self, tick: Tick) -> None:
        self.tick = tick
        slots: list[FakeDevice | None] = [self.instances[number] for number in tick.layout]
        self.gpus[0].cut(*slots, *[None] * (SLOTS - len(slots)))
        for number, instance in self.instances.items():
            instance.error = tick.lost or (None if number in tick.layout else binding.NOT_FOUND)
        self.gpus[0].error = tick.lost

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        if (code := self.tick.failing.get(function)) is not None and self.tick.lost is None:
            raise NvmlError(code)
        return super().ask(function, handle, *arguments)


class Story:
    def __init__(self) -> None:
        self.nvml, self._clock = StoryNvml(), FakeClock()
        self._gpu = PhysicalGpu(self.nvml, 0, FakeProcessOwners(), list_every_s=10, clock=self._clock)

    def read(self, tick: Tick) -> dict[str, dict[str, Any]]:
        self._clock.now_s += 1
        self.nvml.begin(tick)
        devices = self._gpu.read().devices
        by_uuid = {device["uuid"]: device for device in devices}
        assert len(by_uuid) == len(devices)
        return by_uuid


TRUTH = Story().read(Tick(range(1, SLOTS + 1), {}, None))


@given(st.lists(TICKS, max_size=30))
def test_each_value_is_its_devices_own_and_what_a_device_is_stays(ticks: list[Tick]) -> None:
    story, known_before = Story(), dict[str, dict[str, Any]]()
    story.read(Tick((), {}, None))
    for tick in ticks:
        devices = story.read(tick)
        assert not (devices and tick.lost)
        working = {uuid for uuid, device in devices.items() if device["state"] == "ok"}
        assert working <= {"GPU-0", *(f"MIG-{number}" for number in tick.layout)}
        for uuid, device in devices.items():
            truth, before = TRUTH[uuid], known_before.get(uuid, {})
            known = {key: device[key] for key in LASTING if key in device} | (device.get("mig") or {})
            assert before.keys() <= known.keys() <= {*truth, *(truth.get("mig") or ())}
            assert known.items() <= ({key: truth[key] for key in LASTING} | (truth.get("mig") or {})).items()
            assert device["metrics"].items() <= truth["metrics"].items()
            assert device.get("processes", truth.get("processes")) == truth.get("processes")
            known_before[uuid] = known
        if not tick.lost:
            known_before = {uuid: known for uuid, known in known_before.items() if uuid in devices}


@given(st.lists(TICKS, max_size=10), st.lists(st.lists(st.integers(1, SLOTS), unique=True, max_size=SLOTS), min_size=1))
def test_after_a_loss_without_another_error_the_devices_are_those_that_there_are(
    ticks: list[Tick], layouts: list[list[int]]
) -> None:
    story = Story()
    story.read(Tick((1, 2), {}, None))
    for tick in ticks:
        story.read(tick._replace(failing={}))
    for layout in layouts:
        expected = {"GPU-0", *(f"MIG-{number}" for number in layout)}
        devices = story.read(Tick(layout, {}, None))
        assert devices.keys() == expected
        assert all(device["metrics"] == TRUTH[uuid]["metrics"] for uuid, device in devices.items())
