"""The scrape sink as Prometheus reads it: checked by promtool, and scraped by a Prometheus from a real Kafka."""

import asyncio
import json
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from delivery.values import Address
from sinks.scrape import server
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.exposition import TEXT, TEXT_UTF8, Renderings, accepted
from sinks.scrape.server import serving
from sinks.scrape.sink import ScrapeSink
from tests.eventually import LIMIT_S, eventually, eventually_sync
from tests.real.conftest import need
from tests.real.servers import KafkaServer, PrometheusServer, find_prometheus, find_promtool
from tests.sinks.scrape.fleet import exposed, full_node, node, samples, types
from tests.sinks.scrape.handler import groups_of
from topics.catalogue import CATALOGUE, POD_INFO, XIDS
from topics.profiles import LABELS, PROFILES, LabelSet, ProfileName
from topics.topic import node_key

CAMEL_CASE_NAME = "metric names should be written in 'snake_case' not 'camelCase'"
COUNT = 'non-histogram and non-summary metrics should not have "_count" suffix'
TYPE_IN_NAME = "metric name should not include type 'counter'"
TOTAL_OF_A_GAUGE = 'non-counter metrics should not have "_total" suffix'

NO_TOTAL = 'counter metrics should have "_total" suffix'
"""What it finds of a counter that an exporter, or OpenTelemetry's form, calls otherwise."""

COMPLAINTS: dict[ProfileName, set[tuple[str, str]]] = {
    "otel": {
        ("gpu_memory_total", TOTAL_OF_A_GAUGE),
        ("gpu_pcie_replay_count", COUNT),
        ("gpu_row_remap_count", COUNT),
    },
    "otel-suffixed": {
        ("gpu_energy_consumption_mJ", CAMEL_CASE_NAME),
        ("gpu_pcie_replay_count", COUNT),
        ("gpu_row_remap_count", COUNT),
    },
    "dcgm-4.9": set(),
    "dcgm": {("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", TYPE_IN_NAME)},
    "dcgm-legacy": {
        ("dcgm_fb_total", TOTAL_OF_A_GAUGE),
        ("dcgm_nvlink_bandwidth_total", TOTAL_OF_A_GAUGE),
        ("dcgm_pcie_replay_counter", TYPE_IN_NAME),
    },
}
"""All else that promtool finds of a profile: names that are its own."""

CAMEL_CASE = "label names should be written in 'snake_case' not 'camelCase'"
"""What it finds of the label set dcgm, of every metric: ``modelName``."""


def check(text: str) -> set[tuple[str, str]]:
    """The complaints of promtool about a text, by metric; a text that it can't parse fails the test."""
    need(find_promtool)
    command: list[str | Path] = [find_promtool(), "check", "metrics"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode in (0, 3), result.stdout + result.stderr
    lines = (result.stdout + result.stderr).splitlines()
    return {(name, complaint) for name, _, complaint in (line.partition(" ") for line in lines if line)}


@pytest.mark.parametrize(("names", "label_set"), list(product(PROFILES, LABELS)))
def test_promtool_finds_only_what_the_profiles_own_names_force(names: ProfileName, label_set: LabelSet) -> None:
    text = exposed(groups_of(full_node(), names, label_set=label_set))
    described = {name: kind for name, kind in types(text).items() if name != POD_INFO.name}
    model_name = {(name, CAMEL_CASE) for name in described} if label_set in {"dcgm", "dcgm-4.9"} else set()
    counters = {name for name, kind in described.items() if kind == "counter" and not name.endswith("_total")}
    named = {series.name for series_of_key in PROFILES[names].series.values() for series in series_of_key} | {XIDS.name}

    assert counters <= named
    assert check(text) == COMPLAINTS[names] | model_name | {(name, NO_TOTAL) for name in counters}


def test_promtool_complains_where_it_should() -> None:
    assert check("# TYPE a_total gauge\na_total 1\n") == {
        ("a_total", "no help text"),
        ("a_total", TOTAL_OF_A_GAUGE),
    }


every_protocol = pytest.mark.parametrize(
    ("protocols", "content_type"), [(None, TEXT_UTF8), (["PrometheusText0.0.4"], TEXT)], ids=["default", "text"]
)

ODD = 'quo"ted\\ back\nslash # EOF\r\t\x00\x7f\x85\u2028ü😀{a="b"} 1'


def test_promtool_parses_whatever_a_tenant_calls_a_pod() -> None:
    holders = [{"namespace": ODD, "pod": ODD, "container": ODD}]
    tick = node({"uuid": "GPU-a", "metrics": {"temperature_celsius": 33}, "holders": holders})

    assert check(exposed(groups_of(tick, "dcgm-legacy", label_set="pod-devices"))) == set()


class Scraper(PrometheusServer):
    """A Prometheus that scrapes some targets twice a second; ``protocols`` None is what it asks for by itself."""

    def __init__(self, directory: Path, targets: Mapping[str, tuple[str, int]], *, protocols: list[str] | None) -> None:
        super().__init__(directory)
        self.targets = targets
        self.protocols = protocols

    def prepare(self) -> None:
        """Writes the configuration: JSON, which is YAML."""
        jobs = [self._job(name, "{}:{}".format(*address)) for name, address in self.targets.items()]
        (self.directory / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))

    def scraped(self, job: str = "gpustream") -> dict[tuple[str, ...], float]:
        """Every series of a job that an instant query finds now, by name and labels but for the target's."""
        series_list = self.query(f'{{job="{job}",__name__!~"up|scrape_.*"}}')
        return {identity(series.labels): series.value for series in series_list}

    def _job(self, name: str, target: str) -> dict[str, Any]:
        pace = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "honor_labels": True}
        protocols = {"scrape_protocols": self.protocols} if self.protocols else {}
        return {"job_name": name, **pace, **protocols, "static_configs": [{"targets": [target]}]}


def identity(labels: Mapping[str, str]) -> tuple[str, ...]:
    """A series' name and labels, without those that Prometheus adds of the target."""
    return tuple(f"{name}={value}" for name, value in sorted(labels.items()) if name not in ("job", "instance"))


METRICS = {
    "temperature_celsius": 0,
    "memory_used_bytes": 1 << 30,
    "memory_total_bytes": 80 << 30,
    "power_watts": 412.345,
    "energy_joules_total": 123456789.012,
    "ecc_corrected_volatile_total": 3,
}
NAMED = {
    "dcgm_gpu_temp": 0.0,
    "dcgm_fb_used": 1024.0,
    "dcgm_fb_total": 81920.0,
    "dcgm_power_usage": 412.345,
    "dcgm_total_energy_consumption": 123456789012.0,
    "dcgm_ecc_sbe_volatile_total": 3.0,
}
"""What METRICS is called in dcgm-legacy."""


def tick(name: str, seq: int, *pods: str | None) -> dict[str, Any]:
    """A node's tick: a GPU for each pod, with a container of the pod's own name; None: nobody holds it."""
    holders = [[{"namespace": "ml", "pod": pod, "container": pod}] if pod else [] for pod in pods]
    devices = [
        {"uuid": f"GPU-{name}-{index}", "index": index, "metrics": METRICS, "holders": device_holders}
        for index, device_holders in enumerate(holders)
    ]
    header = {"schema": 1, "cluster": "scraped", "node": name, "run_id": 1, "seq": seq, "ts_ms": seq * 1000}
    return {**header, "offset": seq, "attribution": "exact", "devices": devices}


def expected(ticks: Iterable[dict[str, Any]]) -> dict[tuple[str, ...], float]:
    """What Prometheus must have of these ticks."""
    devices = [
        ({"node": sent_tick["node"], "cluster": sent_tick["cluster"]}, device)
        for sent_tick in ticks
        for device in sent_tick["devices"]
    ]
    return {
        identity({"__name__": name, **of_node, **of_device(device)}): value
        for of_node, device in devices
        for name, value in {**NAMED, "gpu_holders": float(len(device["holders"]))}.items()
    }


def of_device(device: dict[str, Any]) -> dict[str, str]:
    """The labels of a device and its holder."""
    labels = {"gpu": str(device["index"]), "uuid": device["uuid"]}
    for holder in device["holders"]:
        labels |= {"pod_namespace": "ml", "pod_name": holder["pod"], "container_name": holder["pod"]}
    return labels


async def send(kafka: KafkaServer, *ticks: dict[str, Any]) -> None:
    """Puts ticks onto gpu.attributed, each node in its own partition."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for sent_tick in ticks:
            key = node_key(sent_tick["cluster"], sent_tick["node"])
            await producer.send_and_wait(
                "gpu.attributed", json.dumps(sent_tick).encode(), key, int(sent_tick["node"][-1])
            )


async def wait_for_answer(
    prometheus: Scraper, expected_values: dict[tuple[str, ...], float], job: str = "gpustream"
) -> None:
    """Waits until an instant query has exactly this answer."""
    await asyncio.to_thread(
        eventually_sync, lambda: prometheus.scraped(job) == expected_values, f"{job} is {expected_values}"
    )


@asynccontextmanager
async def scraping(kafka: KafkaServer) -> AsyncIterator[tuple[str, int]]:
    """Runs a sink while inside, once it listens; yields its address."""
    settings = ScrapeSettings(
        kafka=kafka.address,
        scrape_listen=Address("127.0.0.1", 0),
        names=("dcgm-legacy",),
        from_="earliest",
        group="scraped",
    )
    sink, stop = ScrapeSink(settings), asyncio.Event()
    running = asyncio.ensure_future(sink.run(stop))
    try:
        yield await eventually(lambda: sink.address)
    finally:
        stop.set()
        await asyncio.wait_for(running, LIMIT_S)


async def test_prometheus_has_what_was_sent_and_not_what_ended(
    empty_kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(find_prometheus)
    empty_kafka.create_ours({"gpu.attributed": 2, "gpu.dead-letters": 1})
    scrapes: dict[str, int] = defaultdict(int)
    monkeypatch.setattr(server, "accepted", counting(scrapes))
    first = [tick("n-0", 1, "bert", None, ODD), tick("n-1", 1, "llama")]
    next_ticks = [tick("n-0", 2, "next", None), first[1]]
    await send(empty_kafka, *first)
    async with scraping(empty_kafka) as address:
        with Scraper(tmp_path, {"gpustream": address}, protocols=None) as prometheus:
            await wait_for_answer(prometheus, expected(first))
            await send(empty_kafka, next_ticks[0])
            await wait_for_answer(prometheus, expected(next_ticks))
            (up,) = await asyncio.to_thread(prometheus.query, "min_over_time(up[5m])")

    assert up.value == 1
    assert scrapes.keys() == {TEXT_UTF8}
    assert len(expected(first)) == 4 * (len(NAMED) + 1)
    assert len(expected(next_ticks)) == 3 * (len(NAMED) + 1)


@every_protocol
async def test_prometheus_reads_every_series_of_every_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocols: list[str] | None, content_type: str
) -> None:
    need(find_prometheus)
    scrapes: dict[str, int] = defaultdict(int)
    monkeypatch.setattr(server, "accepted", counting(scrapes))
    devices = {names: groups_of(full_node(), names) for names in PROFILES}
    async with AsyncExitStack() as servers:
        targets: dict[str, tuple[str, int]] = {}
        for names in PROFILES:
            renderings = Renderings(partial(devices.__getitem__, names))
            served = serving(renderings, ("127.0.0.1", 0), lambda: None)
            targets[names] = await servers.enter_async_context(served)
        with Scraper(tmp_path, targets, protocols=protocols) as prometheus:
            for names in PROFILES:
                exposed_samples = samples(exposed(devices[names]))
                expected_values = {
                    identity({"__name__": exposed_sample.name, **exposed_sample.labels}): exposed_sample.value
                    for exposed_sample in exposed_samples
                }
                await wait_for_answer(prometheus, expected_values, names)
                assert len(expected_values) == len(exposed_samples) > 60
    assert scrapes.keys() == {content_type}


RATIOS = {
    "DCGM_FI_DEV_SM_CLOCK_HERTZ / DCGM_FI_DEV_SM_CLOCK": 1e6,
    "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ / DCGM_FI_DEV_MEM_CLOCK": 1e6,
    "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL / DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1 / 1000,
    "DCGM_FI_DEV_GPU_UTIL_RATIO / DCGM_FI_DEV_GPU_UTIL": 1 / 100,
    "DCGM_FI_DEV_MEMORY_UTIL_RATIO / DCGM_FI_DEV_MEM_COPY_UTIL": 1 / 100,
    "DCGM_FI_DEV_ENC_UTIL_RATIO / DCGM_FI_DEV_ENC_UTIL": 1 / 100,
    "DCGM_FI_DEV_DEC_UTIL_RATIO / DCGM_FI_DEV_DEC_UTIL": 1 / 100,
    "DCGM_FI_DEV_FB_USED_BYTES / DCGM_FI_DEV_FB_USED": 1 << 20,
    "DCGM_FI_DEV_FB_FREE_BYTES / DCGM_FI_DEV_FB_FREE": 1 << 20,
    "DCGM_FI_DEV_FB_RESERVED_BYTES / DCGM_FI_DEV_FB_RESERVED": 1 << 20,
    "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND / DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 1e6,
    "DCGM_FI_DEV_BOARD_POWER_WATTS / DCGM_FI_DEV_POWER_USAGE": 1,
}
"""How much larger the numbers of dcgm-exporter 4.9 are than those before."""


async def test_the_two_generations_of_dcgm_exporter_say_the_same_in_their_units(tmp_path: Path) -> None:
    need(find_prometheus)
    gpu = {"uuid": "GPU-a", "index": 0, "metrics": dict.fromkeys(CATALOGUE, 1 << 30), "info": {"driver_version": "1"}}
    devices = groups_of(node(gpu, {**gpu, "uuid": "GPU-b", "index": 1}), "dcgm", "dcgm-4.9")
    async with serving(Renderings(lambda: devices), ("127.0.0.1", 0), lambda: None) as address:
        with Scraper(tmp_path, {"both": address}, protocols=None) as prometheus:
            await asyncio.to_thread(eventually_sync, lambda: prometheus.query("DCGM_FI_DEV_GPU_UTIL_RATIO"), "scraped")
            for query, ratio in RATIOS.items():
                new, old = query.split(" / ")
                series_list = await asyncio.to_thread(prometheus.query, f"{new} / on (UUID) {old}")
                assert [series.value for series in series_list] == [pytest.approx(ratio)] * 2, query


def counting(scrapes: dict[str, int]) -> Callable[[str], str]:
    """Chooses the format as usual, and counts the choices."""

    def choose(accept: str) -> str:
        chosen = accepted(accept)
        scrapes[chosen] += 1
        return chosen

    return choose
