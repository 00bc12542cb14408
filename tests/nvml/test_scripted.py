"""The scripted library answers the real bindings, in a process of their own, as NVML would."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import eventually_sync
from tests.nvml.scripted import Mig, Process, ScriptedNvml

pytestmark = pytest.mark.slow  # each starts a process, which loads the library

CHILD = """
import json, sys, threading
import pynvml as p
names = {"p": p, "threading": threading}
for line in sys.stdin:
    try:
        answer = eval(line, names)
    except (p.NVMLError, p.NVMLLibraryMismatchError) as error:
        answer = f"{type(error).__name__} {error.value if isinstance(error, p.NVMLError) else ''}".strip()
    print(json.dumps(answer, default=str), flush=True)
"""
GPU = "p.nvmlDeviceGetHandleByIndex({})"
COMPARE = """
def compare(older, newer, *numbers):
    asked = p.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics, asked.sample1, asked.sample2 = 1, len(numbers), older, newer
    for metric, number in zip(asked.metrics, numbers):
        metric.metricId = number
    p.nvmlGpmMetricsGet(asked)
    return [one.nvmlReturn or one.value for one in asked.metrics[:len(numbers)]]
"""
Ask = Callable[[str], Any]


class Bindings:
    """A process with pynvml in it that evaluates expressions: its answer, or the error's name and number."""

    def __init__(self, nvml: ScriptedNvml) -> None:
        environment = os.environ | nvml.environment()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def __call__(self, expression: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(expression, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def bindings() -> Iterator[Callable[[ScriptedNvml], Ask]]:
    started: list[Bindings] = []

    def start(nvml: ScriptedNvml) -> Ask:
        started.append(Bindings(nvml))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def ask(nvml: ScriptedNvml, bindings: Callable[[ScriptedNvml], Ask]) -> Ask:
    """The bindings on the fixture's GPUs, initialised, with GPU 0 as ``a`` and GPU 1 as ``b``."""
    bound = bindings(nvml)
    assert bound("p.nvmlInit()") is None
    assert bound(f"globals().update(a={GPU.format(0)}, b={GPU.format(1)})") is None
    return bound


def test_who_a_gpu_is_differs_by_gpu(ask: Ask) -> None:
    assert ask("p.nvmlDeviceGetCount()") == 8
    assert ask("p.nvmlDeviceGetUUID(b)") == "GPU-5c41b7ed-0000-4000-8000-000000000001"
    assert ask("p.nvmlDeviceGetIndex(p.nvmlDeviceGetHandleByUUID(p.nvmlDeviceGetUUID(b)))") == 1
    assert ask("p.nvmlDeviceGetName(b)") == "NVIDIA H100 80GB HBM3"
    assert ask("p.nvmlDeviceGetMinorNumber(b)") == 1
    assert ask("p.nvmlDeviceGetPciInfo_v3(b).busId") == "00000000:0B:00.0"
    assert ask("(p.nvmlDeviceGetPciInfo_v3(b).bus, p.nvmlDeviceGetPciInfo_v3(b).busIdLegacy)") == [11, "0000:0B:00.0"]
    assert ask("p.nvmlDeviceGetSerial(b) != p.nvmlDeviceGetSerial(a)") is True
    assert ask(GPU.format(8)) == "NVMLError_InvalidArgument 2"
    assert ask("p.nvmlDeviceGetHandleByUUID('GPU-other')") == "NVMLError_NotFound 6"


ONE_VALUE_CALLS = {
    "UtilizationRates(a).gpu": ("utilization_gpu", 93),
    "UtilizationRates(a).memory": ("utilization_memory", 31),
    "EncoderUtilization(a)[0]": ("utilization_encoder", 12),
    "DecoderUtilization(a)[0]": ("utilization_decoder", 13),
    "MemoryInfo(a, p.nvmlMemory_v2).total": ("memory_total", 1 << 40),
    "MemoryInfo(a, p.nvmlMemory_v2).used": ("memory_used", 5 << 30),
    "MemoryInfo(a, p.nvmlMemory_v2).free": ("memory_free", 6 << 30),
    "MemoryInfo(a, p.nvmlMemory_v2).reserved": ("memory_reserved", 7 << 30),
    "PowerUsage(a)": ("power_mw", 412345),
    "EnforcedPowerLimit(a)": ("power_limit_mw", 650000),
    "TotalEnergyConsumption(a)": ("energy_mj", 1 << 50),
    "Temperature(a, 0)": ("temperature", 66),
    "TemperatureV(a, 0)": ("temperature", -5),
    "ClockInfo(a, 0)": ("graphics_clock_mhz", 1001),
    "ClockInfo(a, 1)": ("sm_clock_mhz", 1002),
    "ClockInfo(a, 2)": ("memory_clock_mhz", 1003),
    "ClockInfo(a, 3)": ("video_clock_mhz", 1004),
    "MaxClockInfo(a, 1)": ("max_sm_clock_mhz", 1006),
    "MaxClockInfo(a, 2)": ("max_memory_clock_mhz", 1007),
    "PowerManagementLimitConstraints(a)[0]": ("power_min_limit_mw", 210000),
    "PowerManagementLimitConstraints(a)[1]": ("power_max_limit_mw", 710000),
    "GridLicensableFeatures_v4(a).isGridLicenseSupported": ("vgpu_supported", 0),
    "GridLicensableFeatures_v4(a).gridLicensableFeatures[1].featureState": ("vgpu_licensed", 1),
    "CurrentClocksEventReasons(a)": ("clock_event_reasons", 0x80),
    "CurrentClocksThrottleReasons(a)": ("clock_event_reasons", 0x40),
    "FanSpeed(a)": ("fan_speed", 77),
    "PerformanceState(a)": ("performance_state", 8),
    "PcieReplayCounter(a)": ("pcie_replays", 9),
    "TotalEccErrors(a, 0, 0)": ("ecc_corrected_volatile", 21),
    "TotalEccErrors(a, 1, 0)": ("ecc_uncorrected_volatile", 22),
    "TotalEccErrors(a, 0, 1)": ("ecc_corrected_aggregate", 23),
    "TotalEccErrors(a, 1, 1)": ("ecc_uncorrected_aggregate", 24),
    "RemappedRows(a)[0]": ("rows_correctable", 31),
    "RemappedRows(a)[1]": ("rows_uncorrectable", 32),
    "RemappedRows(a)[2]": ("row_remap_pending", 1),
    "RemappedRows(a)[3]": ("row_remap_failure", 1),
    "PersistenceMode(a)": ("persistence_mode", 0),
    "MigMode(a)[0]": ("mig_mode", 1),
}


def test_each_call_answers_the_value_that_was_set_while_it_runs(nvml: ScriptedNvml, ask: Ask) -> None:
    for call, (key, value) in ONE_VALUE_CALLS.items():
        before = ask(f"p.nvmlDeviceGet{call}")
        nvml.set(0, **{key: value})
        assert (before, ask(f"p.nvmlDeviceGet{call}")) == (before, value), call
        assert before != value, call
        nvml.set(0, **{key: None})
        assert key == "energy_mj" or ask(f"p.nvmlDeviceGet{call}") == before, call


def test_memory_in_use_holds_the_reserved_in_the_first_version_only(ask: Ask) -> None:
    first = ask("[getattr(p.nvmlDeviceGetMemoryInfo(a), key) for key in ('total', 'free', 'used')]")
    second = ask(
        "[getattr(p.nvmlDeviceGetMemoryInfo(a, p.nvmlMemory_v2), k) for k in ('total','free','used','reserved')]"
    )
    assert first[2] == second[2] + second[3]
    assert sum(first[1:]) == first[0] == sum(second[1:]) == second[0]


FIELDS = "[(v.fieldId, v.nvmlReturn, v.valueType) for v in p.nvmlDeviceGetFieldValues(a, {})]"


def test_each_field_has_a_return_code_and_a_type_of_its_own(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.fail(0, "field:94", 999)
    nvml.set(0, memory_temperature=71)
    assert ask(FIELDS.format([82, 83, 94, 137])) == [[82, 0, 1], [83, 0, 3], [94, 999, 0], [137, 3, 0]]
    field = "p.nvmlDeviceGetFieldValues(a, [(82, 0), 185])"
    assert ask(f"[v.value.uiVal for v in {field}]") == [71, 300000]
    assert ask(f"all(v.latencyUsec > 0 and v.timestamp > 1e15 for v in {field})") is True


FIELD_KEYS: dict[int | tuple[int, int], str] = {
    3: "ecc_corrected_volatile", 4: "ecc_uncorrected_volatile", 5: "ecc_corrected_aggregate",
    6: "ecc_uncorrected_aggregate", 74: "throttled_power_ns", 82: "memory_temperature", 83: "energy_mj",
    94: "pcie_replays", 142: "rows_correctable", 143: "rows_uncorrectable", 144: "row_remap_pending",
    145: "row_remap_failure", 185: "power_mw", 186: "power_instant_mw", 190: "power_limit_mw",
    188: "power_max_limit_mw", (138, 0xFFFFFFFF): "nvlink_tx_kib", (139, 0xFFFFFFFF): "nvlink_rx_kib",
    197: "pcie_tx_bytes", 198: "pcie_rx_bytes",
}  # fmt: skip


def test_each_field_is_the_value_of_its_name(nvml: ScriptedNvml, ask: Ask) -> None:
    for value, (field, key) in enumerate(FIELD_KEYS.items(), start=123456):
        nvml.set(0, **{key: value})
        assert ask(f"p.nvmlDeviceGetFieldValues(a, [{field}])[0].value.ullVal") == value, key


def test_counters_run(ask: Ask) -> None:
    for key in ("p.nvmlDeviceGetTotalEnergyConsumption(a)", "p.nvmlDeviceGetFieldValues(a, [197])[0].value.ullVal"):
        before = ask(key)
        time.sleep(0.05)
        assert ask(key) > before


def test_absurd_values_come_as_they_were_set(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.set(0, utilization_gpu=255, power_mw=0xFFFFFFFF, energy_mj=0xFFFFFFFFFFFFFFFF, temperature=-32768, type_83=99)
    assert ask("p.nvmlDeviceGetUtilizationRates(a).gpu") == 255
    assert ask("p.nvmlDeviceGetPowerUsage(a)") == 0xFFFFFFFF
    assert ask("p.nvmlDeviceGetTotalEnergyConsumption(a)") == 0xFFFFFFFFFFFFFFFF
    assert ask("p.nvmlDeviceGetTemperatureV(a, 0)") == -32768
    assert ask("p.nvmlDeviceGetFieldValues(a, [83])[0].valueType") == 99


def test_a_value_that_does_not_exist_can_not_be_set(nvml: ScriptedNvml) -> None:
    with pytest.raises(ValueError, match="utilisation"):
        nvml.set(0, utilisation=1)


def test_all_that_is_asked_of_a_lost_gpu_says_so_and_the_count_stays(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.lose(0)
    lost = "NVMLError_GpuIsLost 15"
    for call in ("UUID(a)", "Name(a)", "PowerUsage(a)", "FieldValues(a, [82])", "ComputeRunningProcesses_v3(a)"):
        assert ask(f"p.nvmlDeviceGet{call}") == lost
    assert ask(GPU.format(0)) == lost
    assert ask("p.nvmlDeviceGetHandleByUUID(p.nvmlDeviceGetUUID(b))") == lost
    assert ask("(p.nvmlDeviceGetCount(), p.nvmlDeviceGetPowerUsage(b))") == [8, 310000]
    nvml.recover(0)
    assert ask("p.nvmlDeviceGetPowerUsage(a)") == 300000


def test_a_hang_holds_one_gpu_and_not_the_others_until_it_is_released(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.hang(0, "nvmlDeviceGetPowerUsage", 3600)
    assert ask("globals().update(hung=[])") is None
    start = "threading.Thread(target=lambda: hung.append(p.nvmlDeviceGetPowerUsage(a)), daemon=True).start()"
    assert ask(f"globals().update(threading=__import__('threading')) or {start}") is None
    eventually_sync(lambda: any(call.function == "nvmlDeviceGetPowerUsage" for call in nvml.calls()))
    assert ask("(p.nvmlDeviceGetPowerUsage(b), p.nvmlDeviceGetSerial(a), hung)") == [310000, "1650023000000", []]
    nvml.release()
    eventually_sync(lambda: ask("hung") == [300000])


def test_a_hang_takes_as_long_as_it_says(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.hang(None, "nvmlInit", 0.3)
    nvml.hang(1, "*", 0.2)
    began = time.monotonic()
    assert ask("p.nvmlInit()") is None
    assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    assert ask("p.nvmlDeviceGetName(b)") == "NVIDIA H100 80GB HBM3"
    assert time.monotonic() - began >= 0.2


def test_a_call_fails_as_it_was_set_to_on_that_gpu_only(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.fail(0, "nvmlDeviceGetFanSpeed", 3)
    nvml.fail(None, "nvmlDeviceGetMemoryInfo", 20)
    assert ask("p.nvmlDeviceGetFanSpeed(a)") == "NVMLError_NotSupported 3"
    assert ask("p.nvmlDeviceGetFanSpeed(b)") == 31
    assert ask("p.nvmlDeviceGetMemoryInfo(b, p.nvmlMemory_v2)") == "NVMLError_Memory 20"
    nvml.fail(0, "nvmlDeviceGetFanSpeed", 0)
    assert ask("p.nvmlDeviceGetFanSpeed(a)") == 30


@pytest.mark.parametrize(
    ("state", "error"), [("absent", "NVMLError_DriverNotLoaded 9"), ("mismatch", "NVMLError_LibRmVersionMismatch 18")]
)
def test_a_driver_that_is_not_there_comes_later(
    nvml: ScriptedNvml, bindings: Callable[[ScriptedNvml], Ask], state: Any, error: str
) -> None:
    nvml.driver(state)
    ask = bindings(nvml)
    assert ask("p.nvmlInit()") == error
    assert ask("p.nvmlDeviceGetCount()") == "NVMLError_Uninitialized 1"
    nvml.driver("ok")
    assert ask("p.nvmlInit() or p.nvmlDeviceGetCount()") == 8


def test_gpus_that_come_are_seen_when_the_last_user_has_shut_down(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.gpus = 9
    assert ask("p.nvmlInit() or p.nvmlShutdown() or p.nvmlDeviceGetCount()") == 8
    assert ask("p.nvmlShutdown()") is None
    assert ask("p.nvmlDeviceGetPowerUsage(a)") == "NVMLError_Uninitialized 1"
    assert ask("p.nvmlShutdown()") == "NVMLError_Uninitialized 1"
    assert ask("p.nvmlInit() or p.nvmlDeviceGetCount()") == 9


def test_a_gpu_that_goes_is_lost_until_then(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.gpus = 1
    assert ask("p.nvmlDeviceGetCount()") == 8
    assert ask("p.nvmlDeviceGetPowerUsage(b)") == "NVMLError_GpuIsLost 15"
    assert ask("p.nvmlShutdown() or p.nvmlInit() or p.nvmlDeviceGetCount()") == 1


def test_processes_come_with_what_they_hold(nvml: ScriptedNvml, ask: Ask) -> None:
    running = "[(q.pid, q.usedGpuMemory) for q in p.nvmlDeviceGet{}RunningProcesses_v3(a)]"
    assert ask(running.format("Compute")) == []
    nvml.processes(0, [(4242, 1 << 30), (4243, None), Process(7, 5, kind="graphics"), Process(8, 6, kind="mps")])
    assert ask(running.format("Compute")) == [[4242, 1 << 30], [4243, None]]
    assert ask(running.format("Graphics")) == [[7, 5]]
    assert ask(running.format("MPSCompute")) == [[8, 6]]


def test_process_utilization_is_reported_once_and_then_as_nothing_new(nvml: ScriptedNvml, ask: Ask) -> None:
    use = "[(q.pid, q.smUtil, q.memUtil) for q in p.nvmlDeviceGet{}(a, {})]"
    new = ("ProcessesUtilizationInfo", "ProcessUtilization")
    nvml.processes(0, [Process(1, 1, sm=90, memory=30), Process(2, 1, sm=7, memory=0)])
    assert [ask(use.format(call, 0)) for call in new] == [[[1, 90, 30], [2, 7, 0]]] * 2
    assert [ask(use.format(call, 1 << 62)) for call in new] == ["NVMLError_NotFound 6"] * 2
    nvml.empty_processes(succeed=True)
    assert [ask(use.format(call, 1 << 62)) for call in new] == ["NVMLError 0"] * 2


def test_a_gpu_that_is_cut_answers_for_its_parts(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.mig(0, [Mig(1, 0), None, Mig(5, 0, "3g.40gb", 40 << 30, 2 << 30, "MIG-mine")])
    nvml.processes(
        0, [Process(11, 5, gpu_instance=5, compute_instance=0), Process(12, 5, gpu_instance=1, compute_instance=0)]
    )
    assert ask("(p.nvmlDeviceGetMigMode(a), p.nvmlDeviceGetMaxMigDeviceCount(a))") == [[1, 1], 7]
    assert ask("p.nvmlDeviceGetMigDeviceHandleByIndex(a, 1)") == "NVMLError_NotFound 6"
    assert ask("globals().update(m=p.nvmlDeviceGetMigDeviceHandleByIndex(a, 2))") is None
    assert ask("(p.nvmlDeviceGetUUID(m), p.nvmlDeviceGetName(m))") == ["MIG-mine", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
    assert ask("(p.nvmlDeviceGetGpuInstanceId(m), p.nvmlDeviceGetComputeInstanceId(m))") == [5, 0]
    assert ask("p.nvmlDeviceGetIndex(p.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m))") == 0
    assert ask("p.nvmlDeviceGetIndex(p.nvmlDeviceGetHandleByUUID('MIG-mine'))") == 2
    assert ask("p.nvmlDeviceGetAttributes_v2(m).memorySizeMB") == 40 << 10
    assert ask("p.nvmlDeviceGetMemoryInfo(m, p.nvmlMemory_v2).used") == 2 << 30
    assert ask("[q.pid for q in p.nvmlDeviceGetComputeRunningProcesses_v3(m)]") == [11]
    assert ask("bool(p.nvmlDeviceIsMigDeviceHandle(m)), bool(p.nvmlDeviceIsMigDeviceHandle(a))") == [True, False]


def test_what_mig_does_not_support_says_so(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.mig(0, [Mig(1)])
    assert ask("globals().update(m=p.nvmlDeviceGetMigDeviceHandleByIndex(a, 0))") is None
    for call in ("UtilizationRates({})", "EncoderUtilization({})", "RemappedRows({})", "ProcessUtilization({}, 0)"):
        for handle in "am":
            assert ask("p.nvmlDeviceGet" + call.format(handle)) == "NVMLError_NotSupported 3", (call, handle)
    assert ask("p.nvmlDeviceGetPowerUsage(m)") == "NVMLError_NotSupported 3"
    assert ask("p.nvmlDeviceGetPowerUsage(a)") == 300000
    assert ask("p.nvmlDeviceGetAttributes_v2(a)") == "NVMLError_NotSupported 3"


def test_the_handle_of_an_instance_that_was_destroyed_is_not_answered(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.mig(0, [Mig(1)])
    assert ask("globals().update(m=p.nvmlDeviceGetMigDeviceHandleByIndex(a, 0))") is None
    nvml.mig(0, None)
    assert ask("p.nvmlDeviceGetUUID(m)") == "NVMLError_InvalidArgument 2"
    assert ask("p.nvmlDeviceGetMigMode(a)") == [0, 0]


def test_an_older_driver_lacks_the_newer_calls_and_fields(
    nvml_directory: Path, bindings: Callable[[ScriptedNvml], Ask]
) -> None:
    ask = bindings(ScriptedNvml(nvml_directory, old=True))
    assert ask(f"p.nvmlInit() or globals().update(a={GPU.format(0)})") is None
    newer = "TemperatureV(a, 0)", "CurrentClocksEventReasons(a)", "MemoryInfo(a, p.nvmlMemory_v2)"
    for call in (*newer, "ProcessesUtilizationInfo(a, 0)", "ComputeRunningProcesses_v3(a)"):
        assert ask(f"p.nvmlDeviceGet{call}") == "NVMLError_FunctionNotFound 13", call
    for call in ("Temperature(a, 0)", "CurrentClocksThrottleReasons(a)", "MemoryInfo(a).used", "PowerUsage(a)"):
        assert isinstance(ask(f"p.nvmlDeviceGet{call}"), int), call
    assert ask("p.nvmlDeviceGetComputeRunningProcesses_v2(a)") == []
    assert ask(FIELDS.format([83, 186])) == [[83, 0, 3], [186, 3, 0]]


def test_gpm_answers_for_the_gpu_and_for_each_gpu_instance(nvml: ScriptedNvml, ask: Ask) -> None:
    """What links do is the whole GPU's."""
    nvml.mig(1, [Mig(3)])
    nvml.set(0, gpm_2=20.5)
    nvml.fail(0, "gpm:10", 3)
    assert ask(f"exec({COMPARE!r}, globals())") is None
    assert ask("globals().update(s=[p.nvmlGpmSampleAlloc() for _ in range(4)])") is None
    take = "[p.nvmlGpmSampleGet(a, s[{0}]), p.nvmlGpmMigSampleGet(b, 3, s[{1}])]"
    assert ask(take.format(0, 2)) is not None
    assert ask("p.nvmlGpmMigSampleGet(b, 4, s[3])") == "NVMLError_NotFound 6"
    nvml.set(0, gpm_2=90.5)
    nvml.set(1, gpm_2=1, gpm_2_gi3=33.25)
    time.sleep(0.11)
    assert ask(take.format(1, 3)) is not None
    assert ask("compare(s[0], s[1], 2, 10, 60)") == [90.5, 3, 60.25]
    assert ask("compare(s[2], s[3], 2, 60)") == [33.25, 3]
    assert ask("compare(s[0], s[3], 2)") == "NVMLError_InvalidArgument 2", "samples of two devices"
    nvml.set(0, gpm_supported=0)
    assert ask("p.nvmlGpmQueryDeviceSupport(a).isSupportedDevice") == 0
    assert ask("p.nvmlGpmSampleGet(a, s[0])") == "NVMLError_NotSupported 3"


def test_the_samples_that_the_driver_keeps_are_those_since_a_time(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.set(0, utilization_samples="10 90", sample_period_us=1_000)
    assert ask("globals().update(k=lambda since: p.nvmlDeviceGetSamples(a, 1, since))") is None
    assert ask("globals().update(f=k(0))") is None
    assert ask("(f[0], len(f[1]), sorted({one.sampleValue.uiVal for one in f[1]}))") == [1, 120, [10, 90]]
    assert ask("(lambda last: all(one.timeStamp > last for one in k(last)[1]))(f[1][60].timeStamp)") is True
    assert ask("k(f[1][119].timeStamp + 60_000_000)") == "NVMLError_NotFound 6"
    nvml.mig(0, [Mig(1)])
    assert ask("k(0)") == "NVMLError_NotSupported 3"


def test_processes_may_use_more_than_the_gpu_and_more_than_it_holds(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.set(0, utilization_gpu=90, memory_used=40)
    nvml.processes(0, [Process(1, 30, sm=80), Process(2, 30, sm=71)])
    assert ask("[(one.pid, one.smUtil) for one in p.nvmlDeviceGetProcessUtilization(a, 0)]") == [[1, 80], [2, 71]]
    assert ask("[one.usedGpuMemory for one in p.nvmlDeviceGetComputeRunningProcesses_v3(a)]") == [30, 30]
    assert ask("p.nvmlDeviceGetUtilizationRates(a).gpu") == 90


def test_two_gpus_of_eight_are_cut_while_the_others_are_whole(nvml: ScriptedNvml, ask: Ask) -> None:
    nvml.mig(0, [Mig(1, used_bytes=11), Mig(2, used_bytes=12)])
    nvml.mig(1, [Mig(1, used_bytes=21)])
    part = "p.nvmlDeviceGetMigDeviceHandleByIndex({}, {})"
    used = f"[p.nvmlDeviceGetMemoryInfo(d, p.nvmlMemory_v2).used for d in ({part}, {part}, {part})]"
    assert ask(used.format("a", 0, "a", 1, "b", 0)) == [11, 12, 21]
    assert ask("[p.nvmlDeviceGetMigMode(p.nvmlDeviceGetHandleByIndex(i))[0] for i in range(8)]") == [1, 1, *[0] * 6]
    assert ask(f"globals().update(m={part.format('a', 1)})") is None
    nvml.mig(0, [Mig(1, used_bytes=11), Mig(3, used_bytes=13)])
    assert ask("p.nvmlDeviceGetGpuInstanceId(m)") == 3, "a handle may be used again for another"
    assert ask(used.format("a", 0, "a", 1, "b", 0)) == [11, 13, 21]


def test_events_come_to_who_waits_for_them(nvml: ScriptedNvml, ask: Ask) -> None:
    assert ask("globals().update(s=p.nvmlEventSetCreate())") is None
    assert ask("p.nvmlDeviceRegisterEvents(a, p.nvmlDeviceGetSupportedEventTypes(a), s)") is None
    assert ask("p.nvmlDeviceRegisterEvents(a, 1 << 40, s)") == "NVMLError_NotSupported 3"
    assert ask("p.nvmlEventSetWait_v2(s, 1)") == "NVMLError_Timeout 10"
    nvml.xid(1, 31)
    nvml.xid(0, 79)
    event = "(lambda e: (e.eventType, e.eventData, p.nvmlDeviceGetIndex(e.device)))(p.nvmlEventSetWait_v2(s, 5000))"
    assert ask(event) == [8, 79, 0]
    assert ask("p.nvmlEventSetWait_v2(s, 1)") == "NVMLError_Timeout 10"


def test_pcie_throughput_measures_for_20_ms(ask: Ask) -> None:
    began = time.monotonic()
    assert ask("p.nvmlDeviceGetPcieThroughput(a, 0)") == 1000
    assert time.monotonic() - began >= 0.02


def test_it_knows_who_asked_what_of_which_gpu(nvml: ScriptedNvml, ask: Ask) -> None:
    ask("p.nvmlDeviceGetPowerUsage(b)")
    calls = nvml.calls()
    assert [(call.function, call.gpu, call.mig) for call in (calls[0], calls[-1])] == [
        ("nvmlInitWithFlags", None, None),
        ("nvmlDeviceGetPowerUsage", 1, None),
    ]
    assert len({call.thread for call in calls}) == 1


def test_a_process_that_has_it_loaded_can_have_another_script(nvml_directory: Path) -> None:
    import pynvml

    first, second = ScriptedNvml(nvml_directory / "1", gpus=3), ScriptedNvml(nvml_directory / "2", gpus=5)
    for nvml, gpus in ((first, 3), (second, 5)):
        nvml.load()
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == gpus
    pynvml.nvmlShutdown()
    second.driver("absent")


def test_what_is_changed_at_once_is_seen_at_once(nvml: ScriptedNvml, ask: Ask) -> None:
    before = ask("[p.nvmlDeviceGetPowerUsage(a), p.nvmlDeviceGetMigMode(b)]")
    with nvml.at_once():
        nvml.set(0, power_mw=5)
        nvml.mig(1, [Mig(1)])
        assert ask("[p.nvmlDeviceGetPowerUsage(a), p.nvmlDeviceGetMigMode(b)]") == before
    assert ask("[p.nvmlDeviceGetPowerUsage(a), p.nvmlDeviceGetMigMode(b)]") == [5, [1, 1]]


def test_threads_may_ask_while_the_script_changes(nvml: ScriptedNvml, ask: Ask) -> None:
    stop = threading.Event()

    def steer() -> None:
        while not stop.is_set():
            nvml.set(0, power_mw=400000)
            nvml.set(0, power_mw=500000)

    thread = threading.Thread(target=steer)
    thread.start()
    seen: set[int] = set()
    pool = "__import__('concurrent.futures').futures.ThreadPoolExecutor(8)"
    try:
        while not seen >= {400000, 500000}:
            seen.update(ask(f"sorted(set({pool}.map(lambda _: p.nvmlDeviceGetPowerUsage(a), range(1000))))"))
    finally:
        stop.set()
        thread.join()
    assert seen <= {300000, 400000, 500000}
