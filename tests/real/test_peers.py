"""The queries of dashboards for other exporters, in each of their vocabularies, compared with the truth.

One process simulates a fleet and writes it in all profiles at once to a Prometheus. The names, labels and units of a
vocabulary are written out here as those dashboards have them: nothing is taken from the catalogue.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pytest

from producers.simulated.fleet import Fleet
from tests.k8s import dashboard
from tests.real.conftest import need
from tests.real.servers import PrometheusServer, find_prometheus

CLUSTER, NODES, GPUS, RUNS_S = "peers", 4, 8, 8
ALL = "otel,otel-suffixed,dcgm,dcgm-4.9,dcgm-legacy"

Row = Mapping[str, Any]
Answer = dict[tuple[str, ...], float]
"""Values by the values of the labels that are asked for."""


class Name(NamedTuple):
    """A metric of a vocabulary: its name, the labels that distinguish it, and its value for 1 in base units."""

    name: str
    labels: str = ""
    times: float = 1.0

    def selector(self, more_matchers: str = "") -> str:
        return f"{self.name}{{{','.join(filter(None, (self.labels, more_matchers)))}}}"


class Vocabulary(NamedTuple):
    """``labels``: what it calls the node, the GPU's UUID, the namespace and the pod. ``names``: by the quantity.
    ``counts_xids``: its metric of XID errors is how many there were, not the code of the last one."""

    labels: Mapping[str, str]
    names: Mapping[str, Name]
    counts_xids: bool = False


_MIB, _OLD = 1 / (1 << 20), {"node": "hostname", "gpu": "UUID", "namespace": "namespace", "pod": "pod"}
_L9 = {
    "node": "k8s_node_name", "gpu": "gpu_uuid", "namespace": "k8s_namespace_name", "pod": "k8s_pod_name",
}  # fmt: skip

VOCABULARIES: dict[str, Vocabulary] = {
    "dcgm-exporter to 4.8": Vocabulary(_OLD, {
        "gpu_utilization_ratio": Name("DCGM_FI_DEV_GPU_UTIL", times=100),
        "memory_used_bytes": Name("DCGM_FI_DEV_FB_USED", times=_MIB),
        "memory_free_bytes": Name("DCGM_FI_DEV_FB_FREE", times=_MIB),
        "power_watts": Name("DCGM_FI_DEV_POWER_USAGE"),
        "max_power_limit_watts": Name("DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX"),
        "energy_joules_total": Name("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", times=1000),
        "temperature_celsius": Name("DCGM_FI_DEV_GPU_TEMP"),
        "sm_clock_hz": Name("DCGM_FI_DEV_SM_CLOCK", times=1e-6),
        "max_sm_clock_hz": Name("DCGM_FI_DEV_MAX_SM_CLOCK", times=1e-6),
        "fan_speed_ratio": Name("DCGM_FI_DEV_FAN_SPEED", times=100),
        "tensor_active_ratio": Name("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
        "power_violation_seconds_total": Name("DCGM_FI_DEV_POWER_VIOLATION", times=1e9),
        "nvlink_replay_errors_total": Name("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
        "retired_pages_single_bit_total": Name("DCGM_FI_DEV_RETIRED_SBE"),
        "xid": Name("DCGM_FI_DEV_XID_ERRORS"),
    }),
    "dcgm-exporter from 4.9": Vocabulary(_OLD, {
        "gpu_utilization_ratio": Name("DCGM_FI_DEV_GPU_UTIL_RATIO"),
        "memory_used_bytes": Name("DCGM_FI_DEV_FB_USED_BYTES"),
        "memory_free_bytes": Name("DCGM_FI_DEV_FB_FREE_BYTES"),
        "power_watts": Name("DCGM_FI_DEV_BOARD_POWER_WATTS"),
        "max_power_limit_watts": Name("DCGM_FI_DEV_BOARD_POWER_LIMIT_MAX_WATTS"),
        "energy_joules_total": Name("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"),
        "temperature_celsius": Name("DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
        "sm_clock_hz": Name("DCGM_FI_DEV_SM_CLOCK_HERTZ"),
        "max_sm_clock_hz": Name("DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ"),
        "fan_speed_ratio": Name("DCGM_FI_DEV_FAN_SPEED_RATIO"),
        "tensor_active_ratio": Name("DCGM_FI_PROF_TENSOR_UTIL_RATIO"),
        "power_violation_seconds_total": Name("DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL"),
        "nvlink_replay_errors_total": Name("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL"),
        "retired_pages_single_bit_total": Name("DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL"),
        "xid": Name("DCGM_FI_DEV_XID_ERROR"),
    }),
    "pod-devices-exporter": Vocabulary(
        {"node": "node", "gpu": "uuid", "namespace": "pod_namespace", "pod": "pod_name"},
        {
            "gpu_utilization_ratio": Name("dcgm_gpu_utilization", times=100),
            "memory_used_bytes": Name("dcgm_fb_used", times=_MIB),
            "memory_free_bytes": Name("dcgm_fb_free", times=_MIB),
            "power_watts": Name("dcgm_power_usage"),
            "energy_joules_total": Name("dcgm_total_energy_consumption", times=1000),
            "temperature_celsius": Name("dcgm_gpu_temp"),
            "sm_clock_hz": Name("dcgm_sm_clock", times=1e-6),
            "tensor_active_ratio": Name("dcgm_fi_prof_pipe_tensor_active"),
            "power_violation_seconds_total": Name("dcgm_power_violation", times=1e6),
            "nvlink_replay_errors_total": Name("dcgm_nvlink_replay_error_count_total"),
            "retired_pages_single_bit_total": Name("dcgm_retired_pages_sbe"),
            "xid": Name("dcgm_xid_errors"),
        },
    ),
    "l9gpu's guide": Vocabulary(_L9, {
        "gpu_utilization_ratio": Name("gpu_utilization", 'gpu_task_type="compute"'),
        "memory_used_bytes": Name("gpu_memory_used"),
        "memory_free_bytes": Name("gpu_memory_free"),
        "power_watts": Name("gpu_power_draw"),
        "energy_joules_total": Name("gpu_energy_consumption", times=1000),
        "temperature_celsius": Name("gpu_temperature", 'gpu_temperature_sensor="edge"'),
        "sm_clock_hz": Name("gpu_clock_frequency", 'gpu_clock_type="sm"', 1e-6),
        "fan_speed_ratio": Name("gpu_fan_speed"),
        "xid": Name("gpu_xid_errors", 'k8s_cluster_name!=""'),
    }, counts_xids=True),
    "l9gpu's dashboards": Vocabulary(_L9, {
        "gpu_utilization_ratio": Name("gpu_utilization_ratio", 'gpu_task_type="compute"'),
        "memory_used_bytes": Name("gpu_memory_used_bytes"),
        "memory_free_bytes": Name("gpu_memory_free_bytes"),
        "power_watts": Name("gpu_power_draw_watts"),
        "energy_joules_total": Name("gpu_energy_consumption_mJ", times=1000),
        "temperature_celsius": Name("gpu_temperature_celsius", 'gpu_temperature_sensor="edge"'),
        "sm_clock_hz": Name("gpu_clock_frequency_MHz", 'gpu_clock_type="sm"', 1e-6),
        "fan_speed_ratio": Name("gpu_fan_speed_ratio"),
        "xid": Name("gpu_xid_errors", 'k8s_cluster_name!=""'),
    }, counts_xids=True),
}  # fmt: skip


class Fed(NamedTuple):
    """A Prometheus, a time, and the truth of that time: a row for each device, in the last tick of its node."""

    prometheus: PrometheusServer
    at_ms: int
    rows: Sequence[Row]


def seed_with_an_error() -> int:
    """A fleet of which one GPU has an XID error in its first seconds."""
    for seed in range(1, 1000):
        for node in (Fleet(NODES, GPUS, cluster=CLUSTER, seed=seed).node(index) for index in range(NODES)):
            if any(device.get("xids") for device in node.read((RUNS_S - 4) * 1000).devices):
                return seed
    raise AssertionError("no seed of 1000")


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fed]:
    """The fleet after some seconds, with its truth."""
    need(find_prometheus)
    folder = tmp_path_factory.mktemp("peers")
    with PrometheusServer(folder / "prometheus") as prometheus:
        command = [sys.executable, "-m", "gpustream", "run", "--simulate", f"{NODES}x{GPUS}", "--cluster", CLUSTER]
        command += ["--seed", str(seed_with_an_error()), "--truth", str(folder / "truth"), "--names", ALL]
        command += ["--remote-write", prometheus.write_url, "--duration", f"{RUNS_S}s", "--summary", "json"]
        command += ["--listen", "off", "--scrape-listen", "off", "--page-listen", "off"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1])["lost"] == 0
        rows = [json.loads(line) for line in (folder / "truth").read_text().splitlines()]
        last = {row["node"]: row["ts_ms"] for row in rows}
        at_ms = min(last.values())
        ticks = {row["node"]: row["ts_ms"] for row in rows if row["ts_ms"] <= at_ms}
        yield Fed(prometheus, at_ms, [row for row in rows if row["ts_ms"] == ticks[row["node"]]])


# -- what is true


def pod(row: Row) -> tuple[str, str] | None:
    """The one pod that holds a device."""
    pods = {(holder["namespace"], holder["pod"]) for holder in row["reported"]}
    return next(iter(pods)) if len(pods) == 1 else None


def labels(row: Row, by: Sequence[str]) -> tuple[str, ...] | None:
    """The labels of a device; None if they need a sole holder, and it has none."""
    known_labels = {"node": row["node"], "gpu": row["uuid"]}
    if {"namespace", "pod"} & set(by):
        if (holder := pod(row)) is None:
            return None
        known_labels |= dict(zip(("namespace", "pod"), holder, strict=True))
    return tuple(known_labels[name] for name in by)


def true(rows: Sequence[Row], key: str, aggregate: Callable[[list[float]], float], by: Sequence[str] = ()) -> Answer:
    """A quantity of the devices that have it, aggregated by these labels."""
    values_by_labels: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        if key in row["metrics"] and (names := labels(row, by)) is not None:
            values_by_labels[names].append(row["metrics"][key])
    return {names: aggregate(values) for names, values in values_by_labels.items()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


AGGREGATES: dict[str, Callable[[list[float]], float]] = {"sum": sum, "avg": mean, "max": max, "count": len}


# -- what is asked


class Question(NamedTuple):
    """``how`` the quantity is aggregated, and by which labels."""

    key: str
    how: str
    by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.how} {self.key} by {','.join(self.by) or 'all'}"


QUESTIONS = [
    *(Question("gpu_utilization_ratio", "avg", by) for by in ((), ("node",), ("gpu",), ("namespace",))),
    Question("gpu_utilization_ratio", "avg", ("namespace", "pod")),
    *(Question("memory_used_bytes", "sum", by) for by in ((), ("node",), ("namespace",), ("namespace", "pod"))),
    *(Question("power_watts", "sum", by) for by in ((), ("node",), ("gpu",), ("namespace", "pod"))),
    *(Question("temperature_celsius", "max", by) for by in ((), ("node",), ("gpu",))),
    Question("temperature_celsius", "count", ("namespace",)),
    Question("temperature_celsius", "count", ("node",)),
    Question("energy_joules_total", "sum", ("node",)),
    Question("sm_clock_hz", "avg", ("node",)),
    Question("max_sm_clock_hz", "max", ("gpu",)),
    Question("max_power_limit_watts", "sum"),
    Question("fan_speed_ratio", "max", ("node",)),
    Question("tensor_active_ratio", "avg", ("node",)),
    Question("power_violation_seconds_total", "sum", ("gpu",)),
    Question("nvlink_replay_errors_total", "sum", ("node",)),
    Question("retired_pages_single_bit_total", "sum", ("node",)),
]
every_vocabulary = pytest.mark.parametrize("name", VOCABULARIES)


def ask(fed: Fed, vocab: Vocabulary, expr: str, by: Sequence[str] = ()) -> Answer:
    return {
        tuple(series.labels[vocab.labels[name]] for name in by): series.value
        for series in fed.prometheus.query(expr, fed.at_ms)
    }


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_a_query_of_a_dashboard_answers_what_is_true(fed: Fed, question: Question) -> None:
    for vocab in VOCABULARIES.values():
        if question.key in vocab.names:
            assert_answers_what_is_true(fed, vocab, question)


def assert_answers_what_is_true(fed: Fed, vocab: Vocabulary, question: Question) -> None:
    key, aggregate_name, by = question
    metric = vocab.names[key]
    held = f'{vocab.labels["pod"]}!=""' if {"namespace", "pod"} & set(by) else ""
    grouped = f" by ({', '.join(vocab.labels[label] for label in by)})" if by else ""
    times = 1 if aggregate_name == "count" else metric.times
    expected = {
        row_labels: value * times for row_labels, value in true(fed.rows, key, AGGREGATES[aggregate_name], by).items()
    }

    expr = f"{aggregate_name}{grouped} ({metric.selector(held)})"
    assert expected, expr
    assert ask(fed, vocab, expr, by) == pytest.approx(expected, rel=1e-6), expr


@every_vocabulary
def test_the_share_of_memory_in_use_is_that_of_the_fleet(fed: Fed, name: str) -> None:
    vocab = VOCABULARIES[name]
    used, free = (vocab.names[f"memory_{part}_bytes"].selector() for part in ("used", "free"))
    truly = [true(fed.rows, f"memory_{part}_bytes", sum)[()] for part in ("used", "free")]

    answer = ask(fed, vocab, f"sum({used}) / (sum({used}) + sum({free}))")
    assert answer == {(): pytest.approx(truly[0] / sum(truly))}


@every_vocabulary
def test_a_gpu_with_an_xid_error_is_found_and_no_other_one(fed: Fed, name: str) -> None:
    vocab = VOCABULARIES[name]
    xids_by_node = {row["node"]: row["xids"] for row in fed.rows if row["xids"]}
    assert xids_by_node
    expected = {
        (node,): float(sum(codes.values()) if vocab.counts_xids else max(map(int, codes)))
        for node, codes in xids_by_node.items()
    }

    assert (
        ask(fed, vocab, f"max by ({vocab.labels['node']}) ({vocab.names['xid'].selector()}) > 0", ("node",)) == expected
    )


@every_vocabulary
def test_every_pod_that_holds_a_device_alone_is_seen(fed: Fed, name: str) -> None:
    vocab = VOCABULARIES[name]
    sole_pods = {
        sole_pod for row in fed.rows if "memory_used_bytes" in row["metrics"] and (sole_pod := pod(row)) is not None
    }
    held = f'{vocab.labels["pod"]}!=""'
    by = ("namespace", "pod")
    grouped = ", ".join(vocab.labels[label] for label in by)

    assert (
        ask(fed, vocab, f"group by ({grouped}) ({vocab.names['memory_used_bytes'].selector(held)})", by).keys()
        == sole_pods
    )


def test_pods_that_share_devices_are_seen_by_their_parts_which_are_the_devices_with_the_rest(fed: Fed) -> None:
    shared = [row for row in fed.rows if len({(holder["namespace"], holder["pod"]) for holder in row["reported"]}) > 1]
    pods = {(holder["namespace"], holder["pod"]) for holder in chain.from_iterable(row["reported"] for row in shared)}
    vocab = VOCABULARIES["l9gpu's guide"]

    by = ("namespace", "pod")
    parts_seen = ask(
        fed, vocab, "group by (k8s_namespace_name, k8s_pod_name) (gpu_pod_memory_used_bytes{k8s_pod_name!=''})", by
    )
    parts = "sum by (gpu_uuid) ({k8s_node_name!='',__name__=~'gpu_(pod|unattributed)_memory_used_bytes'})"
    assert shared
    assert pods <= parts_seen.keys()
    totals = ask(fed, vocab, parts, ("gpu",))
    truly = true(shared, "memory_used_bytes", sum, ("gpu",))
    assert {gpu_key: totals[gpu_key] for gpu_key in truly} == truly


# -- what other names beside them change of ours: nothing

VALUES = {"__rate_interval": "8s", "__range": "16s", "idle": "5s", "price": "2", "gpu": "GPU"}
OUR_QUERIES = [query for query in dashboard.queries() if "$cluster" in query.expr]


@pytest.mark.parametrize("board", sorted({query.board for query in OUR_QUERIES}))
def test_our_dashboards_answer_as_if_no_other_names_were_written(fed: Fed, board: str) -> None:
    all_of_each = {name: variable.get("allValue", ".*") for name, variable in dashboard.variables(board).items()}
    for query in [query for query in OUR_QUERIES if query.board == board]:
        of_all = dashboard.filled(query.expr, {**all_of_each, **VALUES})
        of_the_one = dashboard.filled(query.expr, {**all_of_each, **VALUES, "cluster": CLUSTER})

        answers = [
            {tuple(sorted(series.labels.items())): series.value for series in fed.prometheus.query(expr, fed.at_ms)}
            for expr in (of_all, of_the_one)
        ]
        assert answers[0] == pytest.approx(answers[1], nan_ok=True), str(query)


def test_our_rules_find_nothing_without_a_cluster(fed: Fed) -> None:
    rules = [rule for rule in dashboard.rules() if "gpustream_" not in rule["expr"] and "up{" not in rule["expr"]]
    clusters = {
        rule.get("alert") or rule["record"]: {
            series.labels.get("k8s_cluster_name") for series in fed.prometheus.query(rule["expr"], fed.at_ms)
        }
        for rule in rules
    }
    assert {name: found for name, found in clusters.items() if not found <= {CLUSTER}} == {}
