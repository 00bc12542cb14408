"""Whichever of NVML's calls fails, and with whichever error: the tick has all the other values, and the reason."""

import pytest

from producers.node.nvml import binding, table
from producers.node.nvml.gpu import PhysicalGpu
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import FakeDevice, FakeNvml, FakeProcessOwners, part, running

CALLS = sorted({name if isinstance(name, str) else name[0] for name in FakeDevice("").answers})
CODES = [
    binding.INVALID_ARGUMENT,
    binding.NOT_SUPPORTED,
    binding.NO_PERMISSION,
    binding.NOT_FOUND,
    binding.INSUFFICIENT_SIZE,
    binding.FUNCTION_NOT_FOUND,
    binding.ARGUMENT_VERSION_MISMATCH,
    binding.UNKNOWN,
    binding.NOTHING_FILLED_IN,
    4711,
]
"""The errors that mean something to the producer but no loss of the GPU, and some that mean nothing to it."""


class Bench:
    """A GPU that is whole, and one that is cut into two MIG devices. Both have GPM and a process."""

    def __init__(self) -> None:
        self.nvml, self.clock = FakeNvml(2), FakeClock()
        self.whole, self.cut = self.nvml.gpus
        self.whole.answers["nvmlDeviceGetMigMode"] = [0, 0]
        self.whole.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = [running(5)]
        self.parts = [part("MIG-1", 1, "1g.10gb", 7), part("MIG-2", 2)]
        self.cut.cut(*self.parts)
        for gpu in self.nvml.gpus:
            gpu.profiled({2: 50, (1, 2): 20, (2, 2): 30})
        self.nvml.init()
        owners = FakeProcessOwners()
        self.gpus = [PhysicalGpu(self.nvml, index, owners, list_every_s=0, clock=self.clock) for index in range(2)]

    def fail(self, call: str, code: int) -> None:
        for device in (*self.nvml.gpus, *self.parts):
            for answer in [name for name in device.answers if call in (name, name[0])]:
                device.fail(answer, code)

    def read(self) -> dict[str, dict[str, float]]:
        """The metrics of each device."""
        self.clock.now_s += 1
        devices = [device for gpu in self.gpus for device in gpu.read().devices]
        assert {device["state"] for device in devices} == {"ok"}
        return {device["uuid"]: device["metrics"] for device in devices}

    def tried(self, uuid: str, key: str) -> list[str]:
        """The calls that were tried for a value that is left out."""
        left_out = [gpu.left_out()[uuid] for gpu in self.gpus if uuid in gpu.left_out()]
        return [failed_call.call for failed_call in left_out[0][key]]


@pytest.fixture(scope="module")
def healthy() -> dict[str, dict[str, float]]:
    bench = Bench()
    bench.read()
    return bench.read()


@pytest.mark.parametrize("answered_before", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_costs_its_own_values_only_and_is_named(
    call: str, answered_before: bool, healthy: dict[str, dict[str, float]]
) -> None:
    own_keys = {row.key for row in table.TABLE for source in row.sources if source.question.name == call}
    for code in CODES:
        bench = Bench()
        if answered_before:
            bench.read()
        bench.fail(call, code)
        bench.read()
        read = bench.read()
        assert {"GPU-0", "GPU-1"} <= read.keys()
        for uuid, metrics in read.items():
            others = {key: value for key, value in healthy[uuid].items() if key not in own_keys}
            assert others == {key: value for key, value in metrics.items() if key not in own_keys}, (code, uuid)
            for key in healthy[uuid].keys() - metrics.keys():
                assert call in bench.tried(uuid, key), (code, uuid)
