"""``--counters``: just the metrics of a file of dcgm-exporter, with its types and help, and again when it changes."""

import gc
import logging
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from delivery.instruments import Instruments
from sinks.counters_reload import INSTRUMENTS, CountersReload, following
from sinks.remote_write.nodes import OpenSeries
from sinks.scrape.config import ScrapeSettings
from sinks.series.cache import Cache
from sinks.series.counters import Picked, load, pick
from sinks.series.counters_file import Counter, CountersError
from sinks.series.model import STALE, SampleGroup
from sinks.series.translation import Translator
from sinks.series_settings import NamingSettings
from tests.eventually import eventually
from tests.sinks.conftest import device, sample
from tests.sinks.scrape.fleet import INFO, exposed, full_node, node

TWO = """# made for this test
DCGM_FI_DEV_FB_USED, gauge,"Memory, in MiB."
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION, counter, Energy (in mJ).
"""


def counter(line: int, row: str) -> Counter:
    """A row given as ``NAME`` or ``NAME TYPE``."""
    name, _, kind = row.partition(" ")
    return Counter(line, name, kind or "gauge", f"Of {name}.")


def picked(*rows: str) -> Picked:
    return pick([counter(line, row) for line, row in enumerate(rows, 1)])


def refusal_of(row: str) -> str:
    (left_out,) = picked("DCGM_FI_DEV_GPU_TEMP", row).left_out
    return left_out.reason


def counters_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "counters.csv"
    path.write_text(text)
    return path


def text(settings: NamingSettings, *devices: Mapping[str, object]) -> str:
    """The exposition with these settings."""
    tick = node(*devices) if devices else full_node()
    return exposed(Translator(settings.profiles()).translate(tick, Cache())[1])


def names(exposition: str) -> set[str]:
    return {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE")}


# -- what a file picks


def test_the_series_are_those_of_the_file_with_its_types_and_help_and_the_units_of_its_names(tmp_path: Path) -> None:
    metrics = {"memory_used_bytes": 3 << 20, "energy_joules_total": 1.5, "temperature_celsius": 33}
    gpu = {"uuid": "GPU-a", "index": 0, "metrics": metrics, "info": INFO}

    exposition = text(NamingSettings(counters=counters_file(tmp_path, TWO)), gpu)

    labels = 'UUID="GPU-a",cluster="prod",gpu="0",hostname="gpu-node-1",instance="gpu-node-1:9400"'
    assert exposition.splitlines() == [
        "# HELP DCGM_FI_DEV_FB_USED Memory, in MiB.",
        "# TYPE DCGM_FI_DEV_FB_USED gauge",
        f"DCGM_FI_DEV_FB_USED{{{labels}}} 3.0",
        "# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Energy (in mJ).",
        "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter",
        f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels}}} 1500.0",
    ]


def test_nothing_else_of_a_device_is_written_beside_a_file(tmp_path: Path) -> None:
    assert names(text(NamingSettings(counters=counters_file(tmp_path, TWO)))) == {
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    }


def test_a_file_may_have_the_last_xid_error_alone(tmp_path: Path) -> None:
    gpu = {"uuid": "GPU-a", "metrics": {"temperature_celsius": 33}, "info": INFO, "xids": {"31": 1}}

    exposition = text(NamingSettings(counters=counters_file(tmp_path, "DCGM_FI_DEV_XID_ERRORS, gauge, Last.\n")), gpu)

    assert exposition.splitlines()[-1].endswith("} 31.0")
    assert names(exposition) == {"DCGM_FI_DEV_XID_ERRORS"}


def test_other_profiles_are_written_beside_the_file_which_stands_for_those_of_dcgm(tmp_path: Path) -> None:
    file = counters_file(tmp_path, TWO)
    both = names(text(NamingSettings(names=("otel", "dcgm"), counters=file)))

    assert {name for name in both if name.startswith("DCGM")} == names(text(NamingSettings(counters=file)))
    assert both - {name for name in both if name.startswith("DCGM")} == names(text(NamingSettings(names=("otel",))))


def test_a_file_of_1_x_names_has_the_labels_of_1_x() -> None:
    legacy, current = (
        picked(*rows).profile.labels for rows in (["dcgm_gpu_temp", "dcgm_fb_used"], ["DCGM_FI_DEV_GPU_TEMP"])
    )

    assert {"uuid", "node"} <= {name for name, _ in legacy.device}
    assert [name for name, _ in legacy.holder] == ["pod_namespace", "pod_name", "container_name"]
    assert {"UUID", "hostname"} <= {name for name, _ in current.device}


def test_label_rows_are_labels_of_every_series_of_the_file(tmp_path: Path) -> None:
    rows = "DCGM_FI_DRIVER_VERSION,label,Driver\nDCGM_FI_DEV_SERIAL,label,Serial\nDCGM_FI_DEV_GPU_TEMP,gauge,T\n"
    gpu = {"uuid": "GPU-a", "metrics": {"temperature_celsius": 33}, "info": INFO}

    exposition = text(NamingSettings(counters=counters_file(tmp_path, rows)), gpu)

    assert f'DCGM_FI_DRIVER_VERSION="{INFO["driver_version"]}"' in exposition
    assert f'DCGM_FI_DEV_SERIAL="{INFO["serial"]}"' in exposition
    assert text(NamingSettings(counters=counters_file(tmp_path, TWO))).count("DCGM_FI_DRIVER_VERSION") == 0


def test_chosen_labels_are_those_of_the_files_series(tmp_path: Path) -> None:
    gpu = {"uuid": "GPU-a", "index": 0, "metrics": {"memory_used_bytes": 1 << 20}}

    exposition = text(NamingSettings(counters=counters_file(tmp_path, TWO), labels="pod-devices"), gpu)

    assert 'DCGM_FI_DEV_FB_USED{gpu="0",uuid="GPU-a"} 1.0' in exposition


def test_an_untyped_row_is_untyped(tmp_path: Path) -> None:
    file = counters_file(tmp_path, "DCGM_FI_DEV_GPU_TEMP,untyped,T\n")

    assert "# TYPE DCGM_FI_DEV_GPU_TEMP untyped" in text(NamingSettings(counters=file))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("DCGM_EXP_XID_ERRORS_COUNT counter", "gpu_xid_errors_total has it by XID"),
        ("DCGM_EXP_GPU_HEALTH_STATUS", "DCGM's health checks"),
        ("DCGM_FI_DEV_NVSWITCH_TEMP_CELSIUS", "of an NVSwitch"),
        ("DCGM_FI_DEV_CPU_UTIL_TOTAL", "of a CPU"),
        ("DCGM_FI_DEV_CONNECTX_HEALTH", "of a network card"),
        ("DCGM_FI_DEV_NVLINK_THROUGHPUT_L3", "of one NVLink"),
        ("DCGM_FI_PROF_NVDEC_UTIL_0_RATIO", "GPM does not have it"),
        ("DCGM_FI_DEV_FAN_SPEEED", "gpustream does not read it"),
        ("DCGM_FI_DEV_GPU_UTL", "is DCGM_FI_DEV_GPU_UTIL meant?"),
        ("my_metric", "no field of DCGM is called that"),
        ("DCGM_FI_DRIVER_VERSION", "give it the type label"),
        ("DCGM_FI_DEV_POWER_USAGE label", "would begin a new series with every change"),
        ("DCGM_FI_DEV_POWER_USAGE histogram", "one number is no histogram"),
        ("DCGM_FI_DEV_GPU_TEMP counter", "line 1 has it already, as a gauge"),
    ],
)
def test_a_row_that_can_not_be_served_has_its_reason(row: str, reason: str) -> None:
    assert reason in refusal_of(row)


def test_a_field_of_its_own_is_not_taken_for_another_ones_slip() -> None:
    assert refusal_of("DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN") == "gpustream does not read it"


def test_a_row_that_is_there_twice_is_served_once() -> None:
    twice = picked("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP")

    assert (len(twice.served), twice.left_out) == (1, ())


def test_a_file_that_serves_nothing_is_refused() -> None:
    with pytest.raises(CountersError, match="has no row that can be served"):
        picked("DCGM_EXP_P2P_STATUS", "DCGM_FI_DRIVER_VERSION label")


def test_a_file_that_serves_nothing_is_refused_with_the_reason_of_each_line() -> None:
    with pytest.raises(CountersError) as refused:
        picked("DCGM_EXP_P2P_STATUS", "NONSENSE")

    assert [line for line, _ in refused.value.errors] == [0, 1, 2]
    assert refused.value.errors[2].text == "NONSENSE: no field of DCGM is called that"


def test_a_yaml_file_may_name_a_csv_file(tmp_path: Path) -> None:
    csv = counters_file(tmp_path, TWO)
    (tmp_path / "a.yaml").write_text(f"version: 2\nmetrics:\n  file: {csv}\n")
    (tmp_path / "b.yaml").write_text(f"version: 2\nmetrics:\n  file: {tmp_path}/c.csv\n")

    assert len(load(tmp_path / "a.yaml").served) == 2
    with pytest.raises(CountersError, match=r"names .*c\.csv in `metrics.file`, which can't be read: No such file"):
        load(tmp_path / "b.yaml")


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with pytest.raises(CountersError, match=r"can't be read: it is larger than 1 MiB"):
        load(counters_file(tmp_path, "#" * (1 << 20) + "\n"))


def test_a_broken_file_is_an_error_of_the_command_line_with_its_lines(tmp_path: Path) -> None:
    settings = ScrapeSettings(kafka="k:1", counters=counters_file(tmp_path, "A,gauge\nDCGM_FI_DEV_GPU_TEMP,gage,x\n"))

    first, second = settings.errors()

    assert first.startswith(f"--counters: {tmp_path}/counters.csv:1: has 2 columns")
    assert ":2: has the type 'gage'" in second


# -- a file that changes


class Watched:
    """A file, and the version of it that is in use."""

    def __init__(self, path: Path) -> None:
        self.taken: list[list[str]] = []
        self.instruments = Instruments(INSTRUMENTS)
        take = lambda renderer: self.taken.append([row.name for row in renderer.served])  # noqa: E731 - two words
        self.reload = CountersReload(path, take, self.instruments, "scrape")
        self.look()

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            if (content := self.reload.check()) is not None:
                self.reload.apply(content)

    def value(self, name: str) -> float | None:
        return self.instruments.registry.get_sample_value(name, {"sink": "scrape"})


TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP,gauge,T\n"
POWER = "DCGM_FI_DEV_POWER_USAGE,gauge,P\n"


def replaced(path: Path, text: str) -> None:
    """Replaces a file as editors and deployments do: another file is renamed over it."""
    (path.parent / "new").write_text(text)
    (path.parent / "new").replace(path)


def test_a_changed_file_is_taken_when_it_rests_and_once(tmp_path: Path) -> None:
    path = counters_file(tmp_path, TEMPERATURE)
    watched = Watched(path)
    path.write_text(TEMPERATURE + "DCGM_FI_DEV_POW")
    watched.look()
    path.write_text(TEMPERATURE + POWER)
    watched.look()
    assert watched.taken == [["DCGM_FI_DEV_GPU_TEMP"]]

    watched.look(5)

    assert watched.taken[1:] == [["DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"]]
    assert watched.value("gpustream_counters_reloads_total") == 1


def test_a_file_that_another_of_the_same_size_and_time_is_renamed_to_is_taken(tmp_path: Path) -> None:
    path = counters_file(tmp_path, "DCGM_FI_DEV_FB_USED,gauge,x\n")
    watched = Watched(path)
    stat = path.stat()

    replaced(path, "DCGM_FI_DEV_FB_FREE,gauge,x\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    watched.look(2)

    assert watched.taken[1:] == [["DCGM_FI_DEV_FB_FREE"]]


def test_the_swapped_link_of_a_configmap_is_taken(tmp_path: Path) -> None:
    for name, text in (("..1", TEMPERATURE), ("..2", POWER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "metrics").symlink_to("..data/metrics")
    watched = Watched(tmp_path / "metrics")

    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    watched.look(2)

    assert watched.taken[1:] == [["DCGM_FI_DEV_POWER_USAGE"]]


@pytest.mark.parametrize("broken", ["A,gauge\n", "DCGM_EXP_P2P_STATUS,gauge,x\n", None])
def test_a_broken_or_missing_file_keeps_the_previous_one_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = counters_file(tmp_path, TEMPERATURE)
    watched = Watched(path)
    path.unlink() if broken is None else replaced(path, broken)

    with caplog.at_level(logging.ERROR):
        watched.look(5)

    assert len(watched.taken) == 1
    assert watched.value("gpustream_counters_broken") == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"--counters can't be used, so what it held before stays in force: {path}: ")

    replaced(path, TEMPERATURE + POWER)
    watched.look(2)

    assert (len(watched.taken), watched.value("gpustream_counters_broken")) == (2, 0)


def test_a_file_that_stays_broken_takes_no_more_memory_with_each_look(tmp_path: Path) -> None:
    path = counters_file(tmp_path, TEMPERATURE)
    watched = Watched(path)
    replaced(path, "A,gauge\n")
    watched.look(5)
    gc.collect()
    objects = len(gc.get_objects())

    watched.look(100)

    gc.collect()
    assert len(gc.get_objects()) < objects + 100


def test_rows_that_can_not_be_served_are_logged_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(counters_file(tmp_path, TEMPERATURE + "DCGM_EXP_P2P_STATUS,gauge,x\n"))

    assert watched.value("gpustream_counters_rows_served") == 1
    assert watched.value("gpustream_counters_rows_left_out") == 1
    assert "line 2: DCGM_EXP_P2P_STATUS: dcgm-exporter makes it itself" in caplog.text


async def test_a_sink_follows_its_file_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinks.counters_reload.CHECK_EVERY_S", 0.01)
    path = counters_file(tmp_path, TEMPERATURE)
    settings = NamingSettings(counters=path)
    translator = Translator(settings.profiles())

    async with following(settings, translator, Instruments(INSTRUMENTS), "scrape"):
        replaced(path, POWER)
        await eventually(lambda: list(translator.profiles[0].series) == ["power_watts"], "the changed file is in force")


def ended_names(groups: Iterable[SampleGroup]) -> set[str]:
    """The names of the series that end."""
    stale = struct.pack("<d", STALE)
    return {
        row.name
        for series, _, values in groups
        for row, value in zip(series.rows, values, strict=True)
        if struct.pack("<d", value) == stale
    }


def test_series_that_a_changed_file_does_not_have_any_more_end(tmp_path: Path) -> None:
    path = counters_file(tmp_path, TEMPERATURE + POWER)
    settings = NamingSettings(counters=path)
    translator = Translator(settings.profiles())
    state = OpenSeries(translator)
    sample_device = device(metrics={"temperature_celsius": 33, "power_watts": 300})
    state.settle(state.tick(sample(1, sample_device)), 0.0, accepted=True)

    path.write_text(POWER)
    translator.profiles = settings.profiles()
    second = state.tick(sample(2, sample_device))

    assert ended_names(second.groups) == {"DCGM_FI_DEV_GPU_TEMP"}
