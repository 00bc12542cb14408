"""What is written beside a device's metrics: parts of shared devices, the unattributed rest, and device info."""

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.series import extras
from sinks.series.cache import Cache
from sinks.series.extras import HeldDevice, Source, series_set
from sinks.series.labels import MAX_LABELS, MAX_VALUE_BYTES, device_identity, node_of
from sinks.series.model import Row, SeriesSet
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.tick import DeviceReading, SeriesDevice, SeriesParts, SeriesTick
from sinks.series.translation import Translator
from tests.growth import kept
from tests.sinks.conftest import sample
from tests.sinks.series.test_labels import BERT, MIG
from tests.sinks.series.test_tick import DEVICES
from topics.attributed import Holder, holder_of_job, pods_of
from topics.catalogue import DEVICE_INFO, FURTHER
from topics.profiles import LABELS, PROFILES, profile_names
from topics.samples import Job

FIVE = {"gpu", "uuid", "pod_namespace", "pod_name", "container_name"}
INFO = dict.fromkeys(DEVICE_INFO.labels, "x")
OTHER = {**BERT, "pod": "bert-1", "pod_uid": "u2", "container": None}
every_label_set = pytest.mark.parametrize("label_set", LABELS)

RowsByName = dict[tuple[str, str | None, str | None], tuple[float, dict[str, str]]]


def parts(used: float | None = None, memory: float | None = None, power: float | None = None) -> dict[str, Any]:
    return {"utilization_ratio": used, "memory_used_bytes": memory, "power_watts": power}


class Extra(NamedTuple):
    """A set beside metrics, as a sink writes it."""

    key: tuple[str, ...]
    source: Source
    values: list[float]


def all_extras(label_set: Any, tick: SeriesTick) -> list[Extra]:
    """All sets beside the metrics of a tick's devices."""
    names, node, sets, devices = LABELS[label_set], node_of(tick), list[Extra](), list[HeldDevice]()
    for reading in tick.devices:
        device, holders, values = reading.device, reading.holders, extras.split_values(reading)
        devices.append(HeldDevice(node, device, holders, pods_of(holders), device_identity(node, device), None))
        of_device = extras.device_extras(names, devices[-1], [value is not None for value in values])
        sets += [Extra(key, source, extras.resolve(sources, values)) for key, source, sources in of_device]
    infos = extras.pod_infos(devices) if names.tenants else ()
    return sets + [Extra(key, source, extras.resolve(sources, ())) for key, source, sources in infos]


def series_of(label_set: Any, source: Source) -> SeriesSet:
    """A set beside metrics, with these labels."""
    return series_set(LABELS[label_set], source)


def extras_of(label_set: Any, *holders: dict[str, Any], **fields: Any) -> list[Extra]:
    """The extra sets of a tick with this device, without the pods' own series."""
    tick = sample(1, {"uuid": "GPU-a", "index": 0, "holders": list(holders), **fields})
    return [extra for extra in all_extras(label_set, tick) if extra.key[0] != "pod"]


def rows(label_set: Any, sets: list[Extra]) -> list[tuple[Row, float, dict[str, str]]]:
    """Every series: its row, its value and all of its labels."""
    series_values = [(series_of(label_set, extra.source), extra.values) for extra in sets]
    return [
        (row, value, dict((*series.labels, *row.labels)))
        for series, values in series_values
        for row, value in zip(series.rows, values, strict=True)
    ]


def values(label_set: Any, *holders: dict[str, Any], **fields: Any) -> dict[tuple[str, str | None], float]:
    """The value of each series, by its name and pod."""
    found_rows = rows(label_set, extras_of(label_set, *holders, **fields))
    pod = {"otel": "k8s_pod_name", "dcgm": "pod", "dcgm-4.9": "pod"}.get(label_set, "pod_name")
    return {(row.name, labels.get(pod)): value for row, value, labels in found_rows}


@every_label_set
def test_a_shared_device_has_a_part_for_each_pod_and_a_rest(label_set: Any) -> None:
    shared: list[dict[str, Any]] = [{**BERT, "parts": parts(0.25, 10, 100.5)}, {**OTHER, "parts": parts(0.5, 20, 150)}]

    assert values(label_set, *shared, unattributed=parts(0.0, 5, 49.5)) == {
        ("gpu_pod_utilization_ratio", "bert-0"): 0.25,
        ("gpu_pod_memory_used_bytes", "bert-0"): 10.0,
        ("gpu_pod_power_watts", "bert-0"): 100.5,
        ("gpu_pod_utilization_ratio", "bert-1"): 0.5,
        ("gpu_pod_memory_used_bytes", "bert-1"): 20.0,
        ("gpu_pod_power_watts", "bert-1"): 150.0,
        ("gpu_unattributed_utilization_ratio", None): 0.0,
        ("gpu_unattributed_memory_used_bytes", None): 5.0,
        ("gpu_unattributed_power_watts", None): 49.5,
        ("gpu_split_scaled", None): 0.0,
    }


@every_label_set
def test_the_containers_of_a_pod_are_one_part(label_set: Any) -> None:
    both = [{**BERT, "container": name, "parts": parts(0.25, memory)} for name, memory in (("a", 10), ("b", None))]
    named = {"k8s_container_name", "container", "container_name"}

    assert values(label_set, *both) == {
        ("gpu_pod_utilization_ratio", "bert-0"): 0.5,
        ("gpu_pod_memory_used_bytes", "bert-0"): 10.0,
        ("gpu_split_scaled", None): 0.0,
    }
    assert not named & {name for *_, labels in rows(label_set, extras_of(label_set, *both)) for name in labels}


@pytest.mark.parametrize(("label_set", "pods"), [("otel", 2), ("dcgm", 1), ("dcgm-legacy", 1), ("pod-devices", 1)])
def test_a_pod_made_again_is_another_one_only_where_its_uid_is_a_label(label_set: Any, pods: int) -> None:
    remade = [{**BERT, "pod_uid": uid, "parts": parts(memory=10)} for uid in ("u1", "u2")]
    parts_of = [
        value for row, value, _ in rows(label_set, extras_of(label_set, *remade)) if row.name != "gpu_split_scaled"
    ]

    assert (len(parts_of), sum(parts_of)) == (pods, 20.0)


def test_a_part_says_all_of_its_pod_that_a_sole_holders_series_says() -> None:
    holder = {**BERT, "labels": {"app": "bert"}, "namespace_labels": {"team": "ml"}, "parts": parts(memory=1)}
    (labels,) = [
        labels for row, _, labels in rows("otel", extras_of("otel", holder, OTHER)) if "pod_memory" in row.name
    ]

    assert labels == {
        "k8s_cluster_name": "c1",
        "k8s_node_name": "n1",
        "host_name": "n1",
        "service_name": "gpustream",
        "gpu_vendor": "nvidia",
        "gpu_index": "0",
        "gpu_uuid": "GPU-a",
        "k8s_namespace_name": "ml-team",
        "k8s_pod_name": "bert-0",
        "k8s_pod_uid": "u1",
        "k8s_job_name": "bert",
        "k8s_workload_kind": "CronJob",
        "k8s_workload_name": "nightly",
        "k8s_pod_label_app": "bert",
        "k8s_namespace_label_team": "ml",
    }


@every_label_set
def test_only_a_part_names_a_pod_even_where_one_pod_holds_the_device(label_set: Any) -> None:
    fields = {"info": INFO, "xids": {"79": 1}, "conflict": "no_pod", "unattributed": parts(1)}
    of_held, of_free = (
        [series_of(label_set, extra.source) for extra in extras_of(label_set, *holders, **fields)]
        for holders in ([BERT], [])
    )

    assert [(series_set.labels, series_set.rows) for series_set in of_held] == [
        (series_set.labels, series_set.rows) for series_set in of_free
    ]


@every_label_set
def test_the_part_of_a_mig_device_is_distinguished_from_its_gpus(label_set: Any) -> None:
    (of_mig, *_), (of_gpu, *_) = (
        rows(label_set, extras_of(label_set, {**BERT, "parts": parts(1)}, **fields))
        for fields in ({"uuid": "MIG-1", "mig": MIG}, {})
    )
    assert of_mig[2] != of_gpu[2]


def test_scaling_is_reported_devices_that_are_split_and_of_no_others() -> None:
    assert values("otel", unattributed=parts(0), split_scaled=True)["gpu_split_scaled", None] == 1.0
    assert values("otel", unattributed={}, split_scaled=False) == {("gpu_split_scaled", None): 0.0}
    assert values("otel", BERT, split_scaled=True) == {}


def test_a_conflict_is_reported_while_there_is_one() -> None:
    (row,) = rows("otel", extras_of("otel", BERT, conflict="unallocated_process"))

    assert (row[0].name, row[0].labels, row[1]) == (
        "gpu_attribution_conflict",
        (("reason", "unallocated_process"),),
        1.0,
    )
    assert extras_of("otel", BERT, conflict=None) == extras_of("otel", BERT, conflict="") == []


def test_xid_errors_are_counted_by_code() -> None:
    xid_rows = rows("dcgm", extras_of("dcgm", xids={"79": 2, "48": 0, "": 7}))

    assert {(row.labels, row.kind, value) for row, value, _ in xid_rows} == {
        ((("xid", "79"),), "counter", 2.0),
        ((("xid", "48"),), "counter", 0.0),
    }


def xid(code: int, *holders: dict[str, Any] | None) -> dict[str, Any]:
    """An XID error, of the holders of the tick unless it has its own."""
    return {"kind": "xid", "code": code} | ({} if holders == (None,) else {"holders": list(holders)})


@every_label_set
def test_a_pods_xid_errors_are_those_that_came_while_it_alone_held_the_device(label_set: Any) -> None:
    events = [xid(31, BERT), xid(31, BERT), xid(79, BERT), xid(31, None), xid(13, BERT, OTHER), xid(13), {"kind": "x"}]
    xid_rows = rows(label_set, extras_of(label_set, OTHER, events=events))
    pod = {"otel": "k8s_pod_name", "dcgm": "pod", "dcgm-4.9": "pod"}.get(label_set, "pod_name")

    assert {(row.name, labels[pod], labels["xid"], value) for row, value, labels in xid_rows} == {
        ("gpu_pod_xid_errors", "bert-0", "31", 2.0),
        ("gpu_pod_xid_errors", "bert-0", "79", 1.0),
        ("gpu_pod_xid_errors", "bert-1", "31", 1.0),
    }
    assert all("container" not in name for _, _, labels in xid_rows for name in labels)


@every_label_set
def test_the_info_of_a_device_is_in_the_labels_of_one_series(label_set: Any) -> None:
    info = {"serial": "1", "driver_version": "570.1", "mig_mode": "", "processes_visible": "no", "strange": "x"}
    (row,) = rows(label_set, extras_of(label_set, info=info))
    plain = rows(label_set, extras_of(label_set, xids={"79": 1}))[0][2]

    assert (row[0].name, row[1]) == ("gpu_info", 1.0)
    assert row[2].items() - plain.items() == {
        ("serial", "1"),
        ("driver_version", "570.1"),
        ("processes_visible", "no"),
    }


def test_pod_devices_keeps_its_five_labels_on_all_but_info() -> None:
    found_rows = rows(
        "pod-devices", extras_of("pod-devices", {**BERT, "parts": parts(1)}, info=INFO, unattributed=parts(0))
    )
    names = {row.name: set(labels) - FIVE for row, _, labels in found_rows}

    assert {name for name, extra_labels in names.items() if extra_labels} == {"gpu_info"}


def test_a_device_without_extras_has_no_further_series() -> None:
    assert extras_of("otel", BERT) == extras_of("otel") == []


TEXT = st.text(st.characters(), max_size=20) | st.just("é" * 2000)
NUMBER = st.none() | st.floats(0, 1e308)
PARTS = st.none() | st.builds(SeriesParts, NUMBER, NUMBER, NUMBER)
HOLDER = st.builds(Holder, TEXT, TEXT, st.none() | TEXT, labels=st.dictionaries(TEXT, TEXT, max_size=30))
DEVICE = st.builds(
    SeriesDevice,
    uuid=TEXT,
    conflict=st.none() | TEXT,
    info=st.dictionaries(st.sampled_from(DEVICE_INFO.labels) | TEXT, TEXT, max_size=4),
    xids=st.dictionaries(TEXT, st.integers(0, 2**63 - 1), max_size=3),
)


@st.composite
def readings(draw: st.DrawFn) -> DeviceReading:
    """A device in a tick."""
    holders = tuple(draw(st.lists(HOLDER, max_size=3)))
    parts = draw(st.just(()) | st.tuples(*[PARTS for _ in holders]))
    return DeviceReading(draw(DEVICE), holders, parts=parts, unattributed=draw(PARTS))


@given(readings(), st.sampled_from(list(LABELS)))
def test_whatever_a_record_says_its_series_are_ones_that_receivers_take(reading: Any, label_set: Any) -> None:
    tick = msgspec.structs.replace(sample(1), devices=(reading,))
    sets = all_extras(label_set, tick)
    for extra in sets:
        series = series_of(label_set, extra.source)
        assert len(series.rows) == len(extra.values) > 0
        for row in series.rows:
            pairs = [*series.labels, *row.labels]
            assert len({name for name, _ in pairs}) == len(pairs) < MAX_LABELS
            assert all(0 < len(value.encode()) <= MAX_VALUE_BYTES for _, value in pairs)
        assert len({(row.name, row.labels) for row in series.rows}) == len(series.rows)
        assert list(series.labels) == sorted(series.labels)
    assert [extra.source for extra in sets] == [extra.source for extra in all_extras(label_set, tick)]


@every_label_set
def test_no_label_that_distinguishes_series_of_a_name_is_one_of_a_device(label_set: Any) -> None:
    full = {"mig": MIG, "model": "H100", "minor": 0, "pci_bus_id": "0:A", "xids": {"79": 1}}
    series = series_of(label_set, extras_of(label_set, {**BERT, "parts": parts(1)}, **full)[1].source)

    assert not {name for name, _ in series.labels} & {name for info in FURTHER for name in info.labels}


@pytest.mark.parametrize("names", PROFILES)
def test_batch_jobs_hold_a_device_as_pods_do(names: Any) -> None:
    jobs = [msgspec.to_builtins(holder_of_job(Job(number))) for number in ("41", "42")]
    used = {"gpu_utilization_ratio": 0.5}
    devices = [{"uuid": f"GPU-{count}", "metrics": used, "holders": jobs[:count]} for count in range(3)]
    groups = Translator([PROFILES[names]]).translate(sample(1, *devices), Cache())[1]
    values_by_name = [(row.name, value) for g in groups for row, value in zip(g.series.rows, g.values, strict=True)]

    assert [value for name, value in values_by_name if name == "gpu_holders"] == [0.0, 1.0, 2.0]


def test_each_pod_that_holds_a_device_has_an_info_once() -> None:
    shared = DeviceReading(SeriesDevice("GPU-a"), (Holder("ml", "a"), Holder("ml", "b"), Holder("ml", "a")))
    record = SeriesTick(
        schema=1,
        cluster="c",
        node="n",
        run_id=1,
        seq=1,
        ts_ms=1,
        offset=0,
        attribution="exact",
        devices=(shared, shared),
    )
    pods = [series_of("otel", extra.source) for extra in all_extras("otel", record)]

    assert [dict(pod.labels)["k8s_pod_name"] for pod in pods] == ["a", "b"]
    assert all_extras("dcgm", record) == []
    assert dict(pods[0].labels) == {
        "k8s_cluster_name": "c",
        "k8s_node_name": "n",
        "k8s_namespace_name": "ml",
        "k8s_pod_name": "a",
    }


def written_rows(translator: Translator, tick: SeriesTick, cache: Cache) -> list[tuple[Any, ...]]:
    """All series of a tick, in the order in which they are written."""
    keys, groups = translator.translate(tick, cache)
    of_each = [(series.labels, series.rows, series.start_ms, list(values)) for series, _, values in groups]
    return [(key, *row) for key, row in zip(keys, of_each, strict=True)]


RULES = {
    "none": "[]",
    "equal devices": "- {regex: gpu_uuid|UUID|gpu_index|gpu, action: labeldrop}",
    "some dropped": "- {source_labels: [__name__, k8s_pod_name], regex: gpu_power_draw.*;|gpu_holders;a, action: drop}",
    "equal names": "- {source_labels: [__name__], regex: gpu_.*, target_label: __name__, replacement: one}",
    "of meta labels": "- {source_labels: [__meta_gpustream_serial, __meta_gpustream_pod_label_app], target_label: of}",
}
TICKS = st.lists(
    st.tuples(
        st.permutations(["GPU-0", "GPU-1", "GPU-2"]),
        DEVICES,
        st.sampled_from(["exact", "exact", "none"]),
        st.sampled_from([{}, {"topology.kubernetes.io/zone": "a"}]),
    ),
    min_size=2,
    max_size=6,
)


@given(
    TICKS,
    st.booleans(),
    st.sampled_from(["otel", "otel,otel-suffixed", "dcgm,otel,dcgm-legacy"]),
    st.sampled_from(sorted(RULES)),
)
def test_a_tick_is_written_the_same_whatever_came_before_it(ticks: Any, by_pod: bool, names: str, rules: str) -> None:
    profiles = [PROFILES[name] for name in profile_names(names)]
    relabelling = Relabelling([load(RULES[rules], "rules.yml")] if rules != "none" else [])

    def new_translator() -> Translator:
        return Translator(profiles, by_pod=by_pod, relabelling=relabelling)

    translator, cache = new_translator(), Cache()
    for seq, (uuids, devices, attribution, node_labels) in enumerate(ticks, 1):
        listed = [{"uuid": uuid, **fields} for uuid, fields in zip(uuids, devices, strict=False)]
        fields = {"attribution": attribution, "node_labels": node_labels, "devices": listed}
        tick, new_cache = sample(seq, run_id=seq // 3, **fields), Cache()
        assert written_rows(translator, tick, cache) == written_rows(new_translator(), tick, new_cache)
        assert cache.withheld == new_cache.withheld


@given(
    st.lists(st.tuples(*[st.sampled_from([parts(0.5), parts(memory=1), parts(), None])] * 3), min_size=2, max_size=6)
)
def test_only_the_parts_that_are_known_are_written(ticks: Any) -> None:
    translator, cache = Translator([PROFILES["otel"]]), Cache()
    for seq, (of_bert, of_other, rest_share) in enumerate(ticks, 1):
        holders = [{**BERT, "parts": of_bert}, {**OTHER, "parts": of_other}]
        tick = sample(seq, {"uuid": "GPU-a", "holders": holders, "unattributed": rest_share})
        assert written_rows(translator, tick, cache) == written_rows(Translator([PROFILES["otel"]]), tick, Cache())


def test_little_is_kept_of_pods_that_are_gone() -> None:
    translator, cache = Translator([PROFILES["otel"]]), Cache()

    def tick(seq: int) -> SeriesTick:
        pods = [{**BERT, "pod": f"bert-{seq}-{gpu}", "pod_uid": f"uid-{seq}-{gpu}"} for gpu in range(8)]
        return sample(
            seq, *({"uuid": f"GPU-{n}", "metrics": {"power_watts": 1}, "holders": [pods[n]]} for n in range(8))
        )

    sizes = []
    for seq in range(1, 22):
        translator.translate(tick(seq), cache)
        sizes.append(kept(cache))
    assert max(sizes) < 2 * sizes[0]


def test_nothing_is_kept_of_the_errors_of_mig_devices_that_are_gone() -> None:
    translator, cache, sizes = Translator([PROFILES["dcgm"]]), Cache(), list[int]()
    for seq in range(1, 101):
        uuid = f"MIG-{seq}"
        device = {"uuid": uuid, "mig": {**MIG, "uuid": uuid}, "xids": {"31": 1}, "metrics": {"power_watts": 1}}
        translator.translate(sample(seq, device), cache)
        sizes.append(kept(cache.last_xids))
    assert max(sizes[50:]) <= max(sizes[:50])
