"""The table covers the catalogue, and pynvml has all that it names."""

import pynvml

from producers.node.nvml.table import MEMORY_V2, TABLE, Call, Field, GpmMetric, Sampled, Scale
from topics.catalogue import CATALOGUE

SOURCES = [(row, source) for row in TABLE for source in row.sources]


def test_every_key_of_the_catalogue_has_one_row() -> None:
    assert sorted(row.key for row in TABLE) == sorted(CATALOGUE)


def test_the_first_source_is_the_catalogues_own() -> None:
    assert [row.key for row in TABLE if row.sources[0].question.name not in CATALOGUE[row.key].nvml] == []


def test_every_source_is_one_that_pynvml_has() -> None:
    questions = {source.question for row in TABLE for source in row.sources}
    for question in questions:
        if isinstance(question, Call):
            assert callable(getattr(pynvml, question.name))
        else:
            assert getattr(pynvml, question.name) == question.number


def test_the_arguments_are_pynvmls_constants() -> None:
    assert pynvml.nvmlMemory_v2 == MEMORY_V2
    questions = {row.key: row.sources[0].question for row in TABLE}
    clock = "nvmlDeviceGetClockInfo"
    assert questions["graphics_clock_hz"] == Call(clock, (pynvml.NVML_CLOCK_GRAPHICS,))
    assert questions["sm_clock_hz"] == Call(clock, (pynvml.NVML_CLOCK_SM,))
    assert questions["memory_clock_hz"] == Call(clock, (pynvml.NVML_CLOCK_MEM,))
    assert questions["temperature_celsius"] == Call("nvmlDeviceGetTemperatureV", (pynvml.NVML_TEMPERATURE_GPU,))
    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC)
    assert questions["ecc_corrected_volatile_total"] == Call("nvmlDeviceGetTotalEccErrors", kinds)
    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    assert questions["ecc_uncorrected_volatile_total"] == Call("nvmlDeviceGetTotalEccErrors", kinds)


def test_rates_are_of_byte_counters_since_the_throughput_call_of_pcie_measures_for_20_ms() -> None:
    assert not any(source.question.name == "nvmlDeviceGetPcieThroughput" for _, source in SOURCES)
    rates = {row.key: source for row, source in SOURCES if source.rate}
    assert all(isinstance(source.question, Field) for source in rates.values())
    assert sorted(rates) == [f"{bus}_{way}_bytes_per_second" for bus in ("nvlink", "pcie") for way in ("rx", "tx")]


def test_mean_minimum_and_maximum_come_from_one_call() -> None:
    questions = {source.question for _, source in SOURCES if isinstance(source.question, Sampled)}
    assert len(questions) == 2
    for sampled in questions:
        expected = [(row.limits, source.scale) for row, source in SOURCES if source.question == sampled]
        assert len(expected) == 3
        assert len(set(expected)) == 1


def test_percentages_of_gpm_become_ratios_and_its_mebibytes_bytes() -> None:
    for row, source in SOURCES:
        if isinstance(source.question, GpmMetric):
            assert source.scale == (Scale(per=100) if row.key.endswith("_ratio") else Scale(times=1 << 20))
