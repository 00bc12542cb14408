"""The binding returns pynvml's answers, and raises errors of one kind."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from producers.node.nvml import binding, processes
from producers.node.nvml.binding import FieldValue, Nvml, NvmlError
from tests.nvml.scripted import Process, ScriptedNvml

CODES = [name for name, code in vars(binding).items() if isinstance(code, int) and name[0].isupper() and code > 0]


@pytest.fixture
def real(nvml: ScriptedNvml) -> Iterator[Nvml]:
    nvml.load()
    bound = Nvml()
    bound.call("nvmlInit")
    yield bound
    bound.call("nvmlShutdown")


def error(ask: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(NvmlError) as caught:
        ask()
    return caught.value.code, caught.value.name


@pytest.mark.parametrize("name", CODES)
def test_the_codes_are_those_of_pynvml(name: str) -> None:
    assert getattr(pynvml, f"NVML_ERROR_{name}") == getattr(binding, name)
    assert NvmlError(getattr(binding, name)).name == name


def test_a_code_of_a_later_nvml_has_a_name_too() -> None:
    assert NvmlError(4711).name == "CODE_4711"


@pytest.mark.slow
def test_answers_are_those_of_pynvml(nvml: ScriptedNvml, real: Nvml) -> None:
    assert real.count() == 8
    assert real.call("nvmlSystemGetDriverVersion") == pynvml.nvmlSystemGetDriverVersion()
    gpu = real.handle(1)
    assert real.ask("nvmlDeviceGetUUID", gpu) == "GPU-5c41b7ed-0000-4000-8000-000000000001"
    nvml.set(1, power_mw=123)
    assert real.ask("nvmlDeviceGetPowerUsage", gpu) == 123


def test_errors_come_as_one_kind_with_code_and_name(nvml: ScriptedNvml, real: Nvml) -> None:
    gpu = real.handle(0)
    nvml.fail(0, "nvmlDeviceGetPowerUsage", 999)
    assert error(lambda: real.ask("nvmlDeviceGetPowerUsage", gpu)) == (999, "UNKNOWN")
    nvml.fail(0, "nvmlDeviceGetPowerUsage", 4711)
    assert error(lambda: real.ask("nvmlDeviceGetPowerUsage", gpu)) == (4711, "CODE_4711")
    nvml.lose(0)
    assert error(lambda: real.handle(0)) == (15, "GPU_IS_LOST")


def test_without_a_driver_or_after_shutdown_calls_raise_errors_too(nvml: ScriptedNvml) -> None:
    nvml.load()
    nvml.driver("absent")
    assert error(lambda: Nvml().call("nvmlInit")) == (9, "DRIVER_NOT_LOADED")
    assert error(lambda: Nvml().call("nvmlShutdown")) == (1, "UNINITIALIZED")
    assert error(Nvml().count) == (1, "UNINITIALIZED")


def test_a_successful_empty_list_of_processes_is_empty(nvml: ScriptedNvml, real: Nvml) -> None:
    nvml.empty_processes(succeed=True)
    for function in ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"):
        assert list(real.ask(function, real.handle(0), 1 << 62)) == []
    nvml.processes(0, [Process(7, None)])
    (process,) = real.ask("nvmlDeviceGetComputeRunningProcesses_v3", real.handle(0))
    assert (process.pid, process.usedGpuMemory) == (7, None)


@pytest.mark.parametrize("bytes_held", [[5], [5, 6], [5, 6, 7], [None, None]])
@pytest.mark.parametrize("item_bytes", [16, 24, 32])
def test_processes_are_those_of_the_driver_whatever_the_size_of_its_items(
    nvml: ScriptedNvml, real: Nvml, item_bytes: int, bytes_held: list[int | None]
) -> None:
    nvml.set(0, process_v3_bytes=item_bytes)
    nvml.processes(0, [Process(41 + number, held) for number, held in enumerate(bytes_held)])
    listed = real.ask("nvmlDeviceGetComputeRunningProcesses_v3", real.handle(0))
    assert [(process.pid, process.usedGpuMemory) for process in listed] == [*enumerate(bytes_held, 41)]


def test_an_impossible_number_of_gpus_is_an_error(real: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(count: Any) -> int:
        count._obj.value = 0x7FFFFFFF
        return 0

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda symbol: answer)
    assert error(real.count) == (-1, "NO_VALUE")


@pytest.mark.parametrize("number_at", [0, 1], ids=["of the items to make room for", "of the items filled in"])
@pytest.mark.parametrize(
    "function",
    [*processes.UTILIZATION, *(name for names in binding.PROCESS_LISTS for name in names), "nvmlDeviceGetSamples"],
)
def test_a_list_of_an_impossible_length_is_an_error_and_no_memory_is_taken_for_it(
    real: Nvml, monkeypatch: pytest.MonkeyPatch, function: str, number_at: int
) -> None:
    codes = iter([binding.INSUFFICIENT_SIZE, 0])

    def answer(*arguments: Any) -> int:
        code = next(codes)
        number = 0xFFFFFFFF if (code == 0) is (number_at == 1) else 1
        (*_, counted) = (argument._obj for argument in arguments if hasattr(argument, "_obj"))
        if hasattr(counted, "processSamplesCount"):
            counted.processSamplesCount = number
        else:
            counted.value = number
        return code

    gpu = real.handle(0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda symbol: answer)
    if function == "nvmlDeviceGetSamples":
        assert error(lambda: real.samples(gpu, 0, 0)) == (-1, "NO_VALUE")
    else:
        since_us = [0] if function in processes.UTILIZATION else []
        assert error(lambda: real.ask(function, gpu, *since_us)) == (-1, "NO_VALUE")


def test_a_function_that_pynvml_lacks_is_missing_like_one_that_the_driver_lacks(real: Nvml) -> None:
    assert error(lambda: real.ask("nvmlDeviceGetTea", real.handle(0))) == (13, "FUNCTION_NOT_FOUND")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (pynvml.NVMLLibraryMismatchError("x"), 13),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), 999),
        (pynvml.NVMLError(15), 15),
    ],
)
def test_pynvmls_other_exceptions_are_errors_as_well(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, code: int
) -> None:
    def fail(handle: object) -> None:
        raise raised

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", fail)
    with pytest.raises(NvmlError) as caught:
        Nvml().ask("nvmlDeviceGetName", binding.Handle(None))
    assert caught.value.code == code


def test_each_field_has_its_own_code_width_and_time(nvml: ScriptedNvml, real: Nvml) -> None:
    nvml.set(0, memory_temperature=71, pcie_tx_bytes=2**40, type_197=1, type_83=99)
    nvml.fail(0, "field:94", 999)
    temperature, sent, replays, energy, none = real.fields(real.handle(0), [82, 197, 94, 83, 137])
    assert (temperature.code, temperature.value, temperature.bits) == (0, 71, 32)
    assert temperature.at_us > 10**15
    assert (sent.code, sent.value, sent.bits) == (0, 0, 32)
    assert (replays, none) == (FieldValue(999), FieldValue(3))
    assert energy == FieldValue(3)  # an unknown type


@pytest.mark.parametrize(("kind", "bits"), [(0, 0), (1, 32), (2, 64), (3, 64), (4, 64), (5, 32), (6, 16)])
def test_a_value_is_as_wide_as_its_type(nvml: ScriptedNvml, real: Nvml, kind: int, bits: int) -> None:
    nvml.set(0, memory_temperature=71, type_82=kind)
    (value,) = real.fields(real.handle(0), [82])
    assert (value.code, value.bits) == (0, bits)
    assert kind == 0 or value.value == 71


@pytest.mark.parametrize(("licensed", "expected"), [(0, 0), (1, 1)])
def test_a_license_of_any_feature_is_a_license(nvml: ScriptedNvml, real: Nvml, licensed: int, expected: int) -> None:
    nvml.set(0, vgpu_licensed=licensed)
    assert real.ask("nvmlDeviceGetGridLicensableFeatures", real.handle(0)) == expected


def test_a_gpu_without_licensable_features_does_not_support_the_call(nvml: ScriptedNvml, real: Nvml) -> None:
    nvml.set(0, vgpu_supported=0)
    with pytest.raises(NvmlError, match="NOT_SUPPORTED"):
        real.ask("nvmlDeviceGetGridLicensableFeatures", real.handle(0))


def test_creating_a_binding_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: loaded.append("library"))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", loaded.append)
    Nvml()
    assert loaded == []


def test_samples_have_their_time_and_no_new_sample_is_not_found(nvml: ScriptedNvml, real: Nvml) -> None:
    nvml.set(0, utilization_samples="10 90", sample_period_us=1_000)
    gpu = real.handle(0)
    values = real.samples(gpu, 1, 0)
    assert {(value.code, value.value, value.bits) for value in values} == {(0, 10, 32), (0, 90, 32)}
    times = [value.at_us for value in values]
    assert times == sorted(times)
    assert all(value.at_us > times[50] for value in real.samples(gpu, 1, times[50]))
    assert error(lambda: real.samples(gpu, 1, 1 << 62)) == (6, "NOT_FOUND")
    assert error(lambda: real.samples(gpu, 7, 0)) == (3, "NOT_SUPPORTED")


def test_samples_without_a_type_are_an_error_and_no_zeros(real: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*arguments: Any) -> int:
        count, samples = arguments[-2]._obj, arguments[-1]
        count.value = 1
        if samples is not None:
            samples[0].timeStamp, samples[0].sampleValue.uiVal = 10**15, 93
        return 0

    gpu = real.handle(0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda symbol: answer)
    assert error(lambda: real.samples(gpu, 1, 0)) == (-1, "NO_VALUE")


def test_gpm_compares_two_samples_metric_by_metric(nvml: ScriptedNvml, real: Nvml) -> None:
    nvml.set(1, gpm_2=12.5)
    nvml.fail(1, "gpm:10", 999)
    gpu = real.handle(1)
    older, newer = real.call("nvmlGpmSampleAlloc"), real.call("nvmlGpmSampleAlloc")
    real.ask("nvmlGpmSampleGet", gpu, older)
    real.ask("nvmlGpmSampleGet", gpu, newer)
    assert error(lambda: real.gpm_metrics(older, newer, [2])) == (21, "NO_DATA")
    time.sleep(0.11)
    real.ask("nvmlGpmSampleGet", gpu, newer)
    assert real.gpm_metrics(older, newer, [2, 10, 61]) == [
        FieldValue(0, 12.5, 0),
        FieldValue(999, 0, 0),
        FieldValue(0, 62.25, 0),
    ]
    assert [value.value for value in real.gpm_metrics(older, newer, [61])] == [62.25]
    assert error(lambda: real.gpm_metrics(newer, older, [2])) == (2, "INVALID_ARGUMENT")
    for sample in (older, newer):
        real.call("nvmlGpmSampleFree", sample)
    assert error(lambda: real.call("nvmlGpmSampleFree", older)) == (2, "INVALID_ARGUMENT")
    assert error(lambda: real.gpm_metrics(older, newer, [2])) == (2, "INVALID_ARGUMENT")


FILLED = (
    ("nvmlDeviceGetMinorNumber",),
    ("nvmlDeviceGetMigMode",),
    ("nvmlDeviceGetMaxMigDeviceCount",),
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetEncoderUtilization",),
    ("nvmlDeviceGetDecoderUtilization",),
    ("nvmlDeviceGetMemoryInfo",),
    ("nvmlDeviceGetMemoryInfo", 0x02000028),
    ("nvmlDeviceGetPowerUsage",),
    ("nvmlDeviceGetEnforcedPowerLimit",),
    ("nvmlDeviceGetTotalEnergyConsumption",),
    ("nvmlDeviceGetTemperatureV", 0),
    ("nvmlDeviceGetTemperature", 0),
    ("nvmlDeviceGetFanSpeed",),
    ("nvmlDeviceGetPerformanceState",),
    ("nvmlDeviceGetClockInfo", 1),
    ("nvmlDeviceGetCurrentClocksEventReasons",),
    ("nvmlDeviceGetCurrentClocksThrottleReasons",),
    ("nvmlDeviceGetPcieReplayCounter",),
    ("nvmlDeviceGetTotalEccErrors", 0, 1),
    ("nvmlDeviceGetRemappedRows",),
    ("nvmlDeviceGetSupportedEventTypes",),
)


@pytest.mark.parametrize("call", FILLED)
def test_an_answer_is_pynvmls_and_one_that_was_left_empty_is_an_error_and_no_zero(
    nvml: ScriptedNvml, real: Nvml, call: tuple[Any, ...]
) -> None:
    function, *arguments = call
    nvml.set(0, ecc_corrected_aggregate=3, energy_mj=5, temperature=-3)
    gpu = real.handle(0)
    expected, actual = getattr(pynvml, function)(gpu, *arguments), real.ask(function, gpu, *arguments)
    assert _plain(actual) == _plain(expected)
    nvml.leave_empty(0, function)
    assert error(lambda: real.ask(function, gpu, *arguments)) == (binding.NOTHING_FILLED_IN, "NO_VALUE")


def _plain(answer: Any) -> Any:
    if isinstance(answer, pynvml.Structure):
        return [getattr(answer, name) for name, *_ in answer._fields_]
    return list(answer) if isinstance(answer, list | tuple) else answer


def test_fields_that_were_left_empty_are_an_error_and_no_zeros(nvml: ScriptedNvml, real: Nvml) -> None:
    gpu = real.handle(0)
    nvml.leave_empty(0, "nvmlDeviceGetFieldValues")
    assert error(lambda: real.fields(gpu, [82, 83])) == (binding.NOTHING_FILLED_IN, "NO_VALUE")


def test_a_count_of_gpus_that_was_left_empty_is_an_error_and_not_none(nvml: ScriptedNvml, real: Nvml) -> None:
    nvml.leave_empty(None, "nvmlDeviceGetCount")
    assert error(real.count) == (binding.NOTHING_FILLED_IN, "NO_VALUE")


def test_the_last_value_of_gpm_is_not_used_for_one_that_it_does_not_give_now(nvml: ScriptedNvml, real: Nvml) -> None:
    gpu, older, newer = real.handle(0), real.call("nvmlGpmSampleAlloc"), real.call("nvmlGpmSampleAlloc")
    real.ask("nvmlGpmSampleGet", gpu, older)
    time.sleep(0.11)  # the driver's own clock: samples closer together are refused
    real.ask("nvmlGpmSampleGet", gpu, newer)
    assert real.gpm_metrics(older, newer, [2])[0].code == 0
    nvml.leave_empty(None, "nvmlGpmMetricsGet")
    assert real.gpm_metrics(older, newer, [2]) == [FieldValue(binding.NOTHING_FILLED_IN, 0, 0)]
    for sample in (older, newer):
        real.call("nvmlGpmSampleFree", sample)


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlGpmSampleAlloc"])
def test_a_handle_that_was_not_filled_in_is_an_error_and_never_given_to_nvml(
    nvml: ScriptedNvml, real: Nvml, function: str
) -> None:
    nvml.leave_empty(None, function)
    assert error(lambda: real.call(function)) == (binding.NOTHING_FILLED_IN, "NO_VALUE")
    nvml.leave_empty(0, "nvmlDeviceGetHandleByIndex")
    assert error(lambda: real.handle(0)) == (binding.NOTHING_FILLED_IN, "NO_VALUE")


def test_an_event_that_was_not_filled_in_is_none(nvml: ScriptedNvml, real: Nvml) -> None:
    events = binding.EventSet(real.call("nvmlEventSetCreate"))
    nvml.leave_empty(None, "nvmlEventSetWait")
    assert real.wait(events, 0) is None
    real.call("nvmlEventSetFree", events)
