"""The rules that k8s/rules.py writes and the configurations of docker-compose.yml, as promtool reads and tries them."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.k8s.dashboard import PROMETHEUS, filled, queries, rules
from tests.real.conftest import need
from tests.real.servers import find_promtool
from tests.test_compose import COMPOSE

FILES = sorted(PROMETHEUS.glob("*.yml"))
ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]

SCRAPED = 'job="gpustream",instance="producer"'
DEVICE = 'k8s_cluster_name="c",k8s_node_name="n",gpu_index="0",gpu_uuid="GPU-0"'
POD = f'{DEVICE},k8s_namespace_name="ml",k8s_pod_name="bert-0"'
NEXT_POD = f'{DEVICE},k8s_namespace_name="ml",k8s_pod_name="bert-1"'


class Case(NamedTuple):
    """Series a minute apart, in promtool's notation, and whether the alert fires for them at that time."""

    alert: str
    series: Mapping[str, str]
    at: str
    fires: bool


CASES = [
    Case("GpustreamDown", {f"up{{{SCRAPED}}}": "1 0 0 0"}, "3m", True),
    Case("GpustreamDown", {f"up{{{SCRAPED}}}": "1 0 1 0"}, "3m", False),
    Case("GpustreamDown", {'up{job="another"}': "0x9"}, "9m", False),
    Case("GpustreamNotReady", {f"gpustream_ready{{{SCRAPED}}}": "0x9"}, "9m", True),
    Case("GpustreamNotReady", {f"gpustream_ready{{{SCRAPED}}}": "0x3 1x6"}, "9m", False),
    Case(
        "GpustreamTicksDropped",
        {f'gpustream_producer_ticks_dropped_total{{{SCRAPED},reason="stopped"}}': "_x9 7"},
        "10m",
        True,
    ),
    Case(
        "GpustreamTicksDropped",
        {f'gpustream_producer_ticks_dropped_total{{{SCRAPED},reason="stopped"}}': "7x9 8"},
        "10m",
        True,
    ),
    Case(
        "GpustreamTicksDropped",
        {f'gpustream_producer_ticks_dropped_total{{{SCRAPED},reason="stopped"}}': "7x20"},
        "20m",
        False,
    ),
    Case(
        "GpustreamAttributionBehind",
        {f'gpustream_attribution_lag_records{{{SCRAPED},topic="gpu.samples"}}': "1x20"},
        "20m",
        True,
    ),
    Case(
        "GpustreamAttributionBehind",
        {
            f'gpustream_attribution_lag_records{{{SCRAPED},topic="gpu.samples"}}': "300x20",
            f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="exact"}}': "0+240x20",
        },
        "20m",
        True,
    ),
    Case(
        "GpustreamAttributionBehind",
        {
            f'gpustream_attribution_lag_records{{{SCRAPED},topic="gpu.samples"}}': "200x20",
            f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="exact"}}': "0+240x20",
        },
        "20m",
        False,
    ),
    Case(
        "GpustreamAlertsBehind",
        {f'gpustream_alerts_lag_records{{{SCRAPED},topic="gpu.attributed"}}': "1x20"},
        "20m",
        True,
    ),
    Case(
        "GpustreamAlertsBehind",
        {
            f'gpustream_alerts_lag_records{{{SCRAPED},topic="gpu.attributed"}}': "300x20",
            f'gpustream_alerts_ticks_total{{{SCRAPED},outcome="judged"}}': "0+240x20",
        },
        "20m",
        True,
    ),
    Case(
        "GpustreamAlertsBehind",
        {
            f'gpustream_alerts_lag_records{{{SCRAPED},topic="gpu.attributed"}}': "200x20",
            f'gpustream_alerts_ticks_total{{{SCRAPED},outcome="judged"}}': "0+240x20",
        },
        "20m",
        False,
    ),
    Case(
        "GpustreamUsageBehind",
        {f'gpustream_usage_lag_records{{{SCRAPED},topic="gpu.attributed"}}': "1x20"},
        "20m",
        True,
    ),
    Case(
        "GpustreamUsageBehind",
        {
            f'gpustream_usage_lag_records{{{SCRAPED},topic="gpu.attributed"}}': "300x20",
            f'gpustream_usage_ticks_total{{{SCRAPED},outcome="booked"}}': "0+240x20",
        },
        "20m",
        True,
    ),
    Case(
        "GpustreamUsageBehind",
        {
            f'gpustream_usage_lag_records{{{SCRAPED},topic="gpu.attributed"}}': "200x20",
            f'gpustream_usage_ticks_total{{{SCRAPED},outcome="booked"}}': "0+240x20",
        },
        "20m",
        False,
    ),
    Case("GpustreamReceiverFailing", {f"gpustream_parquet_failing{{{SCRAPED}}}": "1x9"}, "9m", True),
    Case("GpustreamDeadLetters", {f"gpustream_parquet_records_dead_lettered_total{{{SCRAPED}}}": "0x9 1"}, "10m", True),
    Case(
        "GpustreamRemoteWriteBehind",
        {
            f"gpustream_remote_write_lag_records{{{SCRAPED}}}": "1x20",
            f"gpustream_remote_write_records_delivered_total{{{SCRAPED}}}": "9x20",
        },
        "20m",
        True,
    ),
    Case(
        "GpustreamRemoteWriteBehind",
        {
            f"gpustream_remote_write_lag_records{{{SCRAPED}}}": "1x20",
            f"gpustream_remote_write_records_delivered_total{{{SCRAPED}}}": "0+240x20",
        },
        "20m",
        False,
    ),
    Case(  # it has too little CPU: its group puts it out, and takes it back
        "GpustreamRemoteWriteBehind",
        {
            f"gpustream_remote_write_lag_records{{{SCRAPED}}}": "500 0 " * 10,
            f"gpustream_remote_write_records_delivered_total{{{SCRAPED}}}": "0+240x20",
        },
        "19m",
        True,
    ),
    Case(
        "GpustreamRemoteWriteBehind",
        {
            f"gpustream_remote_write_lag_records{{{SCRAPED}}}": "0x5 500 0x10",
            f"gpustream_remote_write_records_delivered_total{{{SCRAPED}}}": "0+240x20",
        },
        "12m",
        False,
    ),
    Case("GpustreamReceiverFailing", {f"gpustream_remote_write_receiver_failing{{{SCRAPED}}}": "1x9"}, "9m", True),
    Case(
        "GpustreamReceiverFailing", {f"gpustream_remote_write_receiver_failing{{{SCRAPED}}}": "1x3 0 1x4"}, "9m", False
    ),
    Case(
        "GpustreamReceiverFailing",
        {f'gpustream_alertmanager_receiver_failing{{{SCRAPED},receiver="http://a"}}': "1x9"},
        "9m",
        True,
    ),
    Case(
        "GpustreamReceiverFailing",
        {f'gpustream_webhook_receiver_failing{{{SCRAPED},receiver="http://a"}}': "1x9"},
        "9m",
        True,
    ),
    Case("GpustreamSeriesLeftOut", {f"gpustream_remote_write_series_left_out{{{SCRAPED}}}": "3x20"}, "20m", True),
    Case("GpustreamSeriesLeftOut", {f"gpustream_remote_write_series_left_out{{{SCRAPED}}}": "3x10 0x9"}, "19m", False),
    Case("GpustreamCountersBroken", {f'gpustream_counters_broken{{{SCRAPED},sink="scrape"}}': "0 1x4"}, "5m", True),
    Case("GpustreamCountersBroken", {f'gpustream_counters_broken{{{SCRAPED},sink="scrape"}}': "1 1 0x4"}, "5m", False),
    Case(
        "GpustreamSeriesCollide",
        {f'gpustream_remote_write_samples_withheld_total{{{SCRAPED},reason="collision"}}': "0+60x20"},
        "20m",
        True,
    ),
    Case(
        "GpustreamSeriesCollide",
        {f'gpustream_scrape_samples_withheld_total{{{SCRAPED},reason="rule"}}': "0+60x20"},
        "20m",
        False,
    ),
    Case("GpustreamMisplacedNodes", {f"gpustream_usage_misplaced_nodes_total{{{SCRAPED}}}": "0x5 1x4"}, "6m", True),
    Case("GpustreamMisplacedNodes", {f"gpustream_attribution_misplaced_nodes_total{{{SCRAPED}}}": "0x9"}, "9m", False),
    Case(
        "GpustreamTicksMissed",
        {
            f"gpustream_node_ticks_missed_total{{{SCRAPED}}}": "0+3x40",
            f"gpustream_producer_ticks_made_total{{{SCRAPED}}}": "0+57x40",
        },
        "40m",
        True,
    ),
    Case(
        "GpustreamTicksMissed",
        {
            f"gpustream_node_ticks_missed_total{{{SCRAPED}}}": "0x20 1x20",
            f"gpustream_producer_ticks_made_total{{{SCRAPED}}}": "0+60x40",
        },
        "40m",
        False,
    ),
    Case(
        "GpustreamDeadLetters",
        {f'gpustream_alerts_records_dead_lettered_total{{{SCRAPED},topic="t",reason="key"}}': "_x9 1"},
        "10m",
        True,
    ),
    Case(
        "GpustreamDeadLetters",
        {f'gpustream_attribution_records_dead_lettered_total{{{SCRAPED},topic="t",reason="key"}}': "_x9 1"},
        "10m",
        True,
    ),
    Case(
        "GpustreamDeadLetters",
        {f"gpustream_remote_write_records_dead_lettered_total{{{SCRAPED}}}": "0x9 1"},
        "10m",
        True,
    ),
    Case("GpustreamDeadLetters", {f"gpustream_scrape_records_dead_lettered_total{{{SCRAPED}}}": "3x20"}, "20m", False),
    Case(
        "GpustreamLateAttribution",
        {
            f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="exact"}}': "0+90x30",
            f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="late"}}': "0+10x30",
        },
        "30m",
        True,
    ),
    Case(
        "GpustreamLateAttribution",
        {
            f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="exact"}}': "0+9000x30",
            f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="late"}}': "0+10x30",
        },
        "30m",
        False,
    ),
    Case("GPULost", {f'gpustream_node_gpus{{{SCRAPED},state="lost"}}': "0 1x4"}, "5m", True),
    Case("GPULost", {f'gpustream_node_gpus{{{SCRAPED},state="ok"}}': "8x5"}, "5m", False),
    Case("GpustreamKubeletSilent", {f"gpustream_node_kubelet_age_seconds{{{SCRAPED}}}": "240+60x5"}, "5m", True),
    Case("GpustreamKubeletSilent", {f"gpustream_node_kubelet_age_seconds{{{SCRAPED}}}": "0x5"}, "5m", False),
    Case(
        "GPUEccUncorrectable",
        {f'gpu_ecc_errors{{{POD},gpu_ecc_error_type="uncorrectable"}}': "2x9 3x5"},
        "12m",
        True,
    ),
    Case(  # another pod's series begins where the last one's ended: the GPU had no new error
        "GPUEccUncorrectable",
        {
            f'gpu_ecc_errors{{{POD},gpu_ecc_error_type="uncorrectable"}}': "2x5 stale",
            f'gpu_ecc_errors{{{NEXT_POD},gpu_ecc_error_type="uncorrectable"}}': "_x6 2x9",
        },
        "12m",
        False,
    ),
    Case("GPUEccUncorrectable", {f'gpu_ecc_errors{{{POD},gpu_ecc_error_type="correctable"}}': "0+1x12"}, "12m", False),
    Case("GPURowRemapFailure", {f"gpu_row_remap_failure{{{POD}}}": "1"}, "0m", True),
    Case("GPURowRemapFailure", {f"gpu_row_remap_failure{{{POD}}}": "0"}, "0m", False),
    Case("GPURowRemapPending", {f"gpu_row_remap_pending{{{POD}}}": "1x61"}, "61m", True),
    Case("GPURowRemapPending", {f"gpu_row_remap_pending{{{POD}}}": "1x59"}, "59m", False),
    Case("GPUThermalSlowdown", {f'gpu_throttle_reason{{{POD},gpu_throttle_cause="temp_hardware"}}': "1x6"}, "6m", True),
    Case(
        "GPUThermalSlowdown",
        {f'gpu_throttle_reason{{{POD},gpu_throttle_cause="power_software"}}': "1x6"},
        "6m",
        False,
    ),
    Case("GPUHeldIdle", {f"gpu_utilization{{{POD}}}": "0.001x70", f"gpu_holders{{{POD}}}": "1x70"}, "70m", True),
    Case("GPUHeldIdle", {f"gpu_pod_utilization_ratio{{{POD}}}": "0x70"}, "70m", True),
    Case(
        "GPUHeldIdle",
        {
            f"gpu_utilization{{{POD}}}": "0x70",
            f'gpu_encode_utilization{{{POD},gpu_task_type="encoder"}}': "0.3x70",
            f"gpu_holders{{{POD}}}": "1x70",
        },
        "70m",
        False,
    ),
    Case(  # what an MPS server does may be the pod's
        "GPUHeldIdle",
        {f"gpu_pod_utilization_ratio{{{POD}}}": "0x70", f"gpu_unattributed_utilization_ratio{{{DEVICE}}}": "0.9x70"},
        "70m",
        False,
    ),
    Case(  # what is measured beside the parts of others is not
        "GPUHeldIdle",
        {
            f"gpu_pod_utilization_ratio{{{POD}}}": "0x70",
            f"gpu_pod_utilization_ratio{{{NEXT_POD}}}": "0.8x70",
            f"gpu_unattributed_utilization_ratio{{{DEVICE}}}": "0.1x70",
        },
        "70m",
        True,
    ),
    Case(
        "GPUHeldIdle",
        {
            f"gpu_pod_utilization_ratio{{{POD}}}": "0x70",
            f'gpu_decode_utilization{{{DEVICE},gpu_task_type="decoder"}}': "0.3x70",
        },
        "70m",
        False,
    ),
    Case("GPUHeldIdle", {f"gpu_utilization{{{POD}}}": "0x55 0.9x15", f"gpu_holders{{{POD}}}": "1x70"}, "70m", False),
    Case("GPUHeldIdle", {f"gpu_utilization{{{POD}}}": "_x30 0x40", f"gpu_holders{{{POD}}}": "_x30 1x40"}, "70m", False),
    Case("GPUHeldIdle", {f"gpu_utilization{{{DEVICE}}}": "0x70", f"gpu_holders{{{DEVICE}}}": "0x70"}, "70m", False),
    Case("GPUXid", {f'gpu_xid_errors_total{{{DEVICE},xid="79"}}': "_x9 1"}, "10m", True),
    Case("GPUXid", {f'gpu_xid_errors_total{{{DEVICE},xid="13"}}': "1x29 2 2"}, "30m", True),
    Case("GPUXid", {f'gpu_xid_errors_total{{{DEVICE},xid="63"}}': "_x9 1"}, "10m", True),
    Case("GPUXid", {f'gpu_xid_errors_total{{{DEVICE},xid="9999"}}': "_x9 1"}, "10m", True),
    Case("GPUXid", {f'gpu_xid_errors_total{{{DEVICE},xid="79"}}': "1x40"}, "40m", False),
    Case(  # another MIG device of the GPU had more of them before
        "GPUXid",
        {
            f'gpu_xid_errors_total{{{DEVICE},gpu_mig_uuid="MIG-1",xid="31"}}': "5x60",
            f'gpu_xid_errors_total{{{DEVICE},gpu_mig_uuid="MIG-2",xid="31"}}': "1x30 2x30",
        },
        "40m",
        True,
    ),
    Case(  # a MIG device is destroyed: the counter of another one is not its, begun again
        "GPUXid",
        {
            f'gpu_xid_errors_total{{{DEVICE},gpu_mig_uuid="MIG-1",xid="31"}}': "5x60",
            f'gpu_xid_errors_total{{{DEVICE},gpu_mig_uuid="MIG-2",xid="31"}}': "7x30 stale",
        },
        "40m",
        False,
    ),
    Case("GPUNvlinkErrors", {f"gpu_interconnect_crc_errors{{{POD}}}": "0+50x10"}, "10m", True),
    Case("GPUNvlinkErrors", {f"gpu_interconnect_recoveries{{{POD}}}": "3x8 4x2"}, "10m", True),
    Case("GPUNvlinkErrors", {f"gpu_interconnect_crc_errors{{{POD}}}": "0+10x10"}, "10m", False),
    Case(
        "GPUUsedUnallocated", {f"gpu_utilization{{{DEVICE}}}": "0.4x5", f"gpu_holders{{{DEVICE}}}": "0x5"}, "4m", True
    ),
    Case("GPUUsedUnallocated", {f"gpu_utilization{{{POD}}}": "0.4x5", f"gpu_holders{{{POD}}}": "1x5"}, "4m", False),
    Case("GPUAttributionConflict", {f'gpu_attribution_conflict{{{DEVICE},reason="no_pod"}}': "1x5"}, "4m", True),
    Case("GPUAttributionConflict", {f'gpu_attribution_conflict{{{DEVICE},reason="no_pod"}}': "1 stale"}, "4m", False),
    Case("GPUNotAnswering", {f'gpustream_node_gpus{{{SCRAPED},state="timeout"}}': "0 1x4"}, "5m", True),
    Case("GPUNotAnswering", {f'gpustream_node_gpus{{{SCRAPED},state="lost"}}': "0 1x4"}, "5m", False),
    Case("NodeSilent", {f"gpu_holders{{{POD}}}": "1x20 stale"}, "25m", True),
    Case("NodeSilent", {f"gpu_holders{{{POD}}}": "1x20 stale", f"gpu_holders{{{DEVICE}}}": "_x21 0x9"}, "25m", False),
    Case("NodeSilent", {f"gpu_holders{{{POD}}}": "1 _x14 " * 4}, "43m", False),  # read every 15 minutes
    Case("NodeSilent", {f"gpu_holders{{{POD}}}": "1 _x4 " * 4}, "23m", True),  # read every 5 minutes
    Case(
        "GpustreamRecordsExpired", {f"gpustream_remote_write_records_expired_total{{{SCRAPED}}}": "0x9 4"}, "10m", True
    ),
    Case(
        "GpustreamRecordsExpired", {f"gpustream_remote_write_records_expired_total{{{SCRAPED}}}": "4x10"}, "10m", False
    ),
    Case("GpustreamNoLeader", {f"gpustream_cluster_leading{{{SCRAPED}}}": "0x5"}, "4m", True),
    Case(
        "GpustreamNoLeader",
        {
            f"gpustream_cluster_leading{{{SCRAPED}}}": "0x5",
            'gpustream_cluster_leading{job="gpustream",instance="b"}': "1x5",
        },
        "4m",
        False,
    ),
]


def promtool(*arguments: str | Path) -> None:
    """Runs promtool; an error fails the test with its output."""
    need(find_promtool)
    done = subprocess.run([find_promtool(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def unit_test(case: Case) -> dict[str, Any]:
    """The case in the form of ``promtool test rules``, which compares the names of alerts that fire."""
    return {
        "name": f"{case.alert} fires: {case.fires}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})',
                "eval_time": case.at,
                "exp_samples": [{"labels": "{}", "value": 1}] if case.fires else [],
            }
        ],
    }


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint-fatal", *FILES)


def test_prometheus_accepts_the_configuration_of_compose(tmp_path: Path) -> None:
    for file in FILES:
        shutil.copy(file, tmp_path)
    config_file = tmp_path / "prometheus.yml"
    config_file.write_text(COMPOSE["configs"]["prometheus"]["content"])
    promtool("check", "config", "--lint-fatal", config_file)


def test_every_alert_fires_when_it_should_and_not_when_it_should_not(tmp_path: Path) -> None:
    """Each alert by itself: promtool evaluates every rule of a file in every minute of every case."""
    assert {(case.alert, case.fires) for case in CASES} == {(name, fires) for name in ALERTS for fires in (True, False)}
    for name in ALERTS:
        own_rules = [rule for rule in rules() if rule.get("alert") == name]
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump({"groups": [{"name": name, "rules": own_rules}]}))
        tests = [unit_test(case) for case in CASES if case.alert == name]
        document = {"rule_files": [f"{name}.yml"], "evaluation_interval": "1m", "tests": tests}
        (tmp_path / f"{name}.tests.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", *tmp_path.glob("*.tests.yml"))


@pytest.mark.parametrize("other", ['cluster="other"', 'namespace="other"'])
def test_a_pipeline_is_judged_by_itself_beside_another_one_with_the_same_names(tmp_path: Path, other: str) -> None:
    behind = 'job="gpustream-attribution",instance="gpustream-attribution-0"'
    series = {
        'gpustream_cluster_leading{job="gpustream-cluster",instance="a"}': "0x20",
        f'gpustream_cluster_leading{{{other},job="gpustream-cluster",instance="b"}}': "1x20",
        f'gpustream_attribution_lag_records{{{behind},topic="gpu.samples"}}': "300x20",
        f'gpustream_attribution_ticks_total{{{behind},attribution="exact"}}': "0+240x20",
        f'gpustream_attribution_lag_records{{{other},{behind},topic="gpu.samples"}}': "0x20",
        f'gpustream_attribution_ticks_total{{{other},{behind},attribution="exact"}}': "0+60000x20",
    }
    cases = (Case(name, series, "20m", True) for name in ("GpustreamNoLeader", "GpustreamAttributionBehind"))
    tests_file = tmp_path / "tests.yml"
    files = list(map(str, FILES))
    tests_file.write_text(yaml.safe_dump({"rule_files": files, "tests": list(map(unit_test, cases))}))
    promtool("test", "rules", tests_file)


def test_promtool_would_say_that_an_alert_does_not_fire(tmp_path: Path) -> None:
    tests_file = tmp_path / "tests.yml"
    case = Case("GPURowRemapFailure", {f"gpu_row_remap_failure{{{POD}}}": "0"}, "0m", fires=True)
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": [unit_test(case)]}))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", tests_file)


CUT = 'k8s_cluster_name="c",k8s_node_name="n",gpu_index="1",gpu_uuid="GPU-1"'
MIG = f'{CUT},gpu_mig_uuid="MIG-1",gpu_mig_profile="3g.40gb"'
SHARED = 'k8s_cluster_name="c",k8s_node_name="m",gpu_index="0",gpu_uuid="GPU-2"'
BERT = 'k8s_namespace_name="ml",k8s_pod_name="bert",k8s_workload_kind="Job",k8s_workload_name="bert"'
LLM = 'k8s_namespace_name="web",k8s_pod_name="llm",k8s_workload_kind="Deployment",k8s_workload_name="llm"'
FLEET = {
    f"gpu_holders{{{DEVICE},{BERT}}}": 1,  # a whole GPU that is half used
    f"gpu_utilization{{{DEVICE},{BERT}}}": 0.5,
    f"gpu_holders{{{CUT}}}": 0,  # one that is cut, with three of its seven slices held by one that does nothing
    f"gpu_holders{{{MIG},{LLM}}}": 1,
    f"gpu_gr_engine_active{{{MIG},{LLM}}}": 0,
    f"gpu_holders{{{SHARED}}}": 2,  # and one that two share, of which one does nothing
    f"gpu_utilization{{{SHARED}}}": 0.25,
    f"gpu_pod_utilization_ratio{{{SHARED},{BERT}}}": 0.15,
    f"gpu_pod_utilization_ratio{{{SHARED},{LLM}}}": 0,
    f"gpu_pod_memory_used_bytes{{{SHARED},{BERT}}}": 5,
    f"gpu_pod_memory_used_bytes{{{SHARED},{LLM}}}": 6,
    'gpu_holders{k8s_cluster_name="c",k8s_node_name="m",gpu_index="1",gpu_uuid="GPU-3"}': 0,
}
BY_POD = {
    f"gpu_utilization{{{SHARED}}}": 0.1,
    f"gpu_utilization{{{SHARED},{BERT}}}": 0.15,
    f"gpu_utilization{{{SHARED},{LLM}}}": 0,
    f"gpu_utilization{{{MIG},{LLM}}}": 0,
}
"""What is written of the fleet with ``--parts-by-pod``."""
ML, WEB = 'k8s_cluster_name="c",k8s_namespace_name="ml"', 'k8s_cluster_name="c",k8s_namespace_name="web"'
N, M, C = ('k8s_cluster_name="c",k8s_node_name="n"', 'k8s_cluster_name="c",k8s_node_name="m"', 'k8s_cluster_name="c"')
BERT_JOB = f'{ML},k8s_workload_kind="Job",k8s_workload_name="bert"'
LLM_DEPLOYMENT = f'{WEB},k8s_workload_kind="Deployment",k8s_workload_name="llm"'
RECORDED: dict[str, dict[str, float]] = {
    "namespace:gpu_held:sum": {ML: 1.5, WEB: 3 / 7 + 0.5},
    "namespace:gpu_used:sum": {ML: 0.65, WEB: 0},
    "namespace:gpu_idle:sum": {WEB: 3 / 7 + 0.5},
    "workload:gpu_held:sum": {BERT_JOB: 1.5, LLM_DEPLOYMENT: 3 / 7 + 0.5},
    "workload:gpu_used:sum": {BERT_JOB: 0.65, LLM_DEPLOYMENT: 0},
    "workload:gpu_idle:sum": {LLM_DEPLOYMENT: 3 / 7 + 0.5},
    "node:gpu_held:sum": {N: 1 + 3 / 7, M: 1},
    "node:gpu_used:sum": {N: 0.5, M: 0.25},
    "node:gpu_idle:sum": {N: 3 / 7},
    "node:gpu:count": {N: 2, M: 2},
    "fleet:gpu_held:sum": {C: 2 + 3 / 7},
    "fleet:gpu_used:sum": {C: 0.75},
    "fleet:gpu_idle:sum": {C: 3 / 7},
    "fleet:gpu:count": {C: 4},
}
"""What the fleet above gives at each moment, and in an hour as many GPU-hours."""


def evaluate(
    tmp_path: Path, fleet: Mapping[str, float | str], answers: Mapping[str, Mapping[str, float]], *, every_min: int = 1
) -> None:
    """Holds what these expressions answer after two hours of a fleet against the values by labels.
    A value of the fleet stays, or is a series in promtool's notation. ``every_min``: how many minutes its samples are
    apart."""
    expected = [
        {
            "expr": expr,
            "eval_time": "2h",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
        }
        for expr, values in answers.items()
    ]
    series = [
        {"series": name, "values": value if isinstance(value, str) else f"{value}x{120 // every_min}"}
        for name, value in fleet.items()
    ]
    test = {"interval": f"{every_min}m", "input_series": series, "promql_expr_test": expected}
    tests_file = tmp_path / "tests.yml"
    document = {"rule_files": list(map(str, FILES)), "fuzzy_compare": True, "evaluation_interval": "1m"}
    tests_file.write_text(yaml.safe_dump({**document, "tests": [test]}))
    promtool("test", "rules", tests_file)


def test_what_idles_is_recorded_in_every_minute_also_if_a_sample_comes_every_other_one(tmp_path: Path) -> None:
    """As with ``--resolution 2m``, or a node that is read every two minutes."""
    samples = {
        f"gpu_holders{{{DEVICE},{BERT}}}": "1 _x3 ",
        f"gpu_utilization{{{DEVICE},{BERT}}}": "0 _x3 ",
        f"gpu_holders{{{SHARED}}}": "2 _x3 ",
        f"gpu_pod_utilization_ratio{{{SHARED},{LLM}}}": "0 _x3 ",
        f"gpu_pod_memory_used_bytes{{{SHARED},{LLM}}}": "5 _x3 ",
    }
    series = [{"series": name, "values": values * 20} for name, values in samples.items()]
    expected = [
        {
            "expr": f"sum_over_time(namespace:gpu_idle:sum{{{labels}}}[10m])",
            "eval_time": "30m",
            "exp_samples": [{"labels": f"{{{labels}}}", "value": value}],
        }
        for labels, value in ((ML, 10), (WEB, 5))
    ]
    test = {"interval": "30s", "input_series": series, "promql_expr_test": expected}
    tests_file = tmp_path / "tests.yml"
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": [test]}))
    promtool("test", "rules", tests_file)


@pytest.mark.parametrize("every_min", [1, 3])
@pytest.mark.parametrize("fleet", [FLEET, FLEET | BY_POD], ids=["", "parts-by-pod"])
def test_recorded_series_are_what_is_held_used_and_idle(
    tmp_path: Path, fleet: Mapping[str, float], every_min: int
) -> None:
    hours = {name.replace(":sum", "_hours:sum1h"): expr for name, expr in RECORDED.items() if name.endswith(":sum")}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert {name for name in recorded if name.split(":")[0] not in {"device", "pod"}} == {*RECORDED, *hours}
    answers = {name: {f"{name}{{{labels}}}": v for labels, v in of.items()} for name, of in (RECORDED | hours).items()}
    evaluate(tmp_path, fleet, answers, every_min=every_min)


def test_a_pod_of_a_shared_gpu_holds_its_share_also_if_its_memory_is_not_known(tmp_path: Path) -> None:
    """NVML does not say what is used of unified memory, and sometimes not what a process has."""
    fleet = {f"gpu_holders{{{SHARED}}}": 2.0, f"gpu_utilization{{{SHARED}}}": 0.15}
    fleet |= {f"gpu_pod_utilization_ratio{{{SHARED},{pod}}}": used for pod, used in ((BERT, 0.15), (LLM, 0))}
    panels = {str(query): query.expr for query in queries()}
    chosen = {"cluster": ".+", "node": ".*", "namespace": ".*", "workload": ".*"}
    shown = filled(panels["gpu-workload/Devices/A"], chosen)
    recorded = {"namespace:gpu_held:sum": (ML, WEB), "namespace:gpu_idle:sum": (WEB,)}
    answers = {name: {f"{name}{{{labels}}}": 0.5 for labels in halves} for name, halves in recorded.items()}
    evaluate(tmp_path, fleet, {shown: {"{}": 1}, **answers})


def test_a_mig_device_is_as_much_of_a_gpu_as_its_model_can_be_cut_into(tmp_path: Path) -> None:
    parts = {
        ("NVIDIA A30", "2g.12gb"): 2 / 4,
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "1g.24gb+me"): 1 / 4,
        ("NVIDIA RTX PRO 5000 Blackwell", "1g.24gb"): 1 / 2,
        ("NVIDIA B200", "1c.2g.45gb"): 1 / 7,
    }
    fleet, answers = dict[str, float](), dict[str, float]()
    for number, ((model, profile), part) in enumerate(parts.items()):
        gpu = f'k8s_cluster_name="c",k8s_node_name="n",gpu_uuid="GPU-{number}"'
        fleet[f'gpu_holders{{{gpu},gpu_model="{model}"}}'] = 0
        mig = f'{gpu},gpu_mig_uuid="MIG-{number}"'
        fleet[f'gpu_holders{{{mig},gpu_model="{model}",gpu_mig_profile="{profile}",{BERT}}}'] = 1
        answers[f"device:gpu_slices:ratio{{{mig}}}"] = part
    evaluate(tmp_path, fleet, {"device:gpu_slices:ratio": answers})


def test_memory_is_that_of_each_gpu_once_also_of_one_that_is_cut_in_part_or_does_not_report_it(tmp_path: Path) -> None:
    gpus = [f'k8s_cluster_name="c",k8s_node_name="n",gpu_uuid="GPU-{number}"' for number in range(4)]
    whole, cut_in_part, refuses, uncut = gpus
    migs = [f'{gpu},gpu_mig_uuid="MIG-{number}"' for number, gpu in enumerate((cut_in_part, refuses, refuses))]
    used_and_total = {whole: (30, 80), cut_in_part: (9, 80), migs[0]: (9, 10), migs[1]: (1, 10), migs[2]: (20, 40)}
    used_and_total[uncut] = (0, 80)  # in MIG mode, without MIG devices
    fleet = {f"gpu_memory_used{{{device}}}": used for device, (used, _) in used_and_total.items()}
    fleet |= {f"gpu_memory_total{{{device}}}": total for device, (_, total) in used_and_total.items()}
    fleet |= {f'gpu_info{{{gpu},mig_mode="{"disabled" if gpu == whole else "enabled"}"}}': 1 for gpu in gpus} | {
        f'gpu_info{{{mig},mig_mode="enabled"}}': 1 for mig in migs
    }
    chosen = {"cluster": ".+", "node": ".*", "idle": "5m"}
    panels = {str(query): filled(query.expr, chosen) for query in queries() if query.board == "gpu-fleet"}
    answers: dict[str, dict[str, float]] = {
        panels["gpu-fleet/Memory used/A"]: {"{}": 60 / 290},
        panels["gpu-fleet/All nodes/D"]: {f"{{{N}}}": 60},
    }
    evaluate(tmp_path, fleet, answers)


def test_xid_errors_of_a_gpu_are_those_of_all_its_mig_devices(tmp_path: Path) -> None:
    fleet = {
        f'gpu_xid_errors_total{{{DEVICE},xid="31"}}': 1,
        f'gpu_xid_errors_total{{{DEVICE},gpu_mig_uuid="MIG-1",xid="31"}}': 2,
        f'gpu_xid_errors_total{{{DEVICE},gpu_mig_uuid="MIG-2",xid="31"}}': 4,
    }
    panels = {str(query): query.expr for query in queries()}
    shown = filled(panels["gpu-device/XID errors/A"], {"cluster": ".+", "node": ".*", "gpu": "GPU-0"})
    evaluate(tmp_path, fleet, {shown: {'{xid="31"}': 7}})


def test_a_pod_may_have_done_what_is_no_pods_part_and_is_not_called_idle(tmp_path: Path) -> None:
    """Of a device that it holds alone it has done all; of a shared one perhaps what an MPS server did, or video."""
    of_pods: dict[tuple[str, ...], dict[str, float]] = {
        ("encodes",): {"gpu_utilization": 0, "gpu_encode_utilization": 0.6},
        ("by-mps",): {"gpu_utilization": 0.9, "gpu_unattributed_utilization_ratio": 0.9},
        ("by-mps-too", "and-this"): {"gpu_utilization": 0.9, "gpu_unattributed_utilization_ratio": 0.9},
        ("idles",): {"gpu_utilization": 0, "gpu_unattributed_utilization_ratio": 0},
    }
    fleet: dict[str, float] = {}
    for number, (pods, metrics) in enumerate(of_pods.items()):
        gpu = f'k8s_cluster_name="c",k8s_node_name="n",gpu_uuid="GPU-{number}"'
        labels = [f'{gpu},k8s_namespace_name="ml",k8s_pod_name="{pod}"' for pod in pods]
        of_device = labels[0] if len(labels) == 1 else gpu
        fleet |= {f"{name}{{{gpu if 'unattr' in name else of_device}}}": value for name, value in metrics.items()}
        fleet[f"gpu_holders{{{of_device}}}"] = len(pods)
        fleet |= {
            f"gpu_pod_{part}{{{pod}}}": 0 for pod in labels for part in ("utilization_ratio", "memory_used_bytes")
        }
    (panel,) = [query for query in queries() if str(query) == "gpu-idle/Pods that idle/A"]
    shown = filled(panel.expr, {"cluster": ".+", "node": ".*", "namespace": "ml", "idle": "15m"})
    recorded = {f"namespace:gpu_idle:sum{{{ML}}}": 1.0}
    evaluate(tmp_path, fleet, {shown: {"{}": 1}, "namespace:gpu_idle:sum": recorded})


def test_what_was_counted_in_the_time_shown_is_there_though_its_process_has_ended(tmp_path: Path) -> None:
    """A node is started again after some XID errors, and pods of gpustream are replaced."""
    of_gpu = 'k8s_cluster_name="c",k8s_node_name="n",gpu_index="{0}",gpu_uuid="GPU-{0}"'
    ended, counts = (f'gpu_xid_errors_total{{{of_gpu.format(number)},xid="79"}}' for number in range(2))
    dropped = f'gpustream_producer_ticks_dropped_total{{{SCRAPED},reason="stopped"}}'
    fleet = {ended: "_x60 1x9 3x9 stale", counts: "2x60 4x59", dropped: "_x60 7x9 stale"}
    panels = {str(query): query.expr for query in queries()}
    chosen = {"cluster": ".+", "node": ".*", "job": ".*", "instance": ".*", "__range": "90m"}
    by_gpu = {f'{{{of_gpu.format(number)},xid="79"}}': value for number, value in enumerate((3, 2))}
    answers = {
        filled(panels["gpu-health/XID errors/A"], chosen): {"{}": 5},
        filled(panels["gpu-health/XID errors by GPU/A"], chosen): by_gpu,
        filled(panels["gpu-pipeline/Ticks dropped/A"], chosen): {"{}": 7},
    }
    evaluate(tmp_path, fleet, answers)


def test_a_pod_that_holds_a_gpu_alone_has_all_that_the_gpu_does(tmp_path: Path) -> None:
    """What no process of its own did, as an MPS server or a GPU that idles, is not lost to it."""
    gpus = [f'k8s_cluster_name="c",k8s_node_name="n",gpu_uuid="GPU-{number}"' for number in range(2)]
    idles, by_mps = (
        f'{gpu},k8s_namespace_name="ml",k8s_pod_name="{pod}"'
        for gpu, pod in zip(gpus, ("idles", "by-mps"), strict=True)
    )
    fleet: dict[str, float] = {}
    for pod, used, watts in ((idles, 0, 70), (by_mps, 0.9, 400)):
        fleet |= {f"gpu_holders{{{pod}}}": 1, f"gpu_utilization{{{pod}}}": used, f"gpu_power_draw{{{pod}}}": watts}
        fleet |= {f"gpu_pod_{part}{{{pod}}}": 0 for part in ("utilization_ratio", "memory_used_bytes", "power_watts")}
    chosen = {"cluster": ".+", "node": ".*", "namespace": "ml", "workload": ".*", "idle": "15m"}
    panels = {
        str(q): filled(q.expr, chosen)
        for q in queries()
        if q.board in {"gpu-workload", "gpu-idle"} and "$__" not in q.expr
    }
    blocks = 'k8s_node_name="n",gpu_uuid="GPU-0",k8s_namespace_name="ml",k8s_pod_name="idles"'
    answers: dict[str, dict[str, float]] = {
        panels["gpu-workload/Devices' worth of work/A"]: {"{}": 0.9},
        panels["gpu-workload/Power/A"]: {"{}": 470},
        panels["gpu-idle/Pods and what they block/B"]: {f"{{{blocks}}}": 70},
        "namespace:gpu_used:sum": {f"namespace:gpu_used:sum{{{ML}}}": 0.9},
        "fleet:gpu_used:sum": {f"fleet:gpu_used:sum{{{C}}}": 0.9},
    }
    evaluate(tmp_path, fleet, answers)


def test_an_idle_alert_says_how_many_of_a_pods_gpus_idle_and_not_that_all_do(tmp_path: Path) -> None:
    labels = {"k8s_cluster_name": "c", "k8s_namespace_name": "ml", "k8s_pod_name": "bert-0"}
    busy = POD.replace("GPU-0", "GPU-1")
    fleet = {f"gpu_utilization{{{POD}}}": "0x70", f"gpu_utilization{{{busy}}}": "0.9x70"}
    fleet |= {f"gpu_holders{{{pod}}}": "1x70" for pod in (POD, busy)}
    (rule,) = [rule for rule in rules() if rule.get("alert") == "GPUHeldIdle"]
    summary = {"summary": "ml/bert-0 does nothing with 1 of its GPUs"}
    alert = {"exp_labels": {"severity": "info", **labels}, "exp_annotations": rule["annotations"] | summary}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in fleet.items()],
        "alert_rule_test": [{"eval_time": "70m", "alertname": "GPUHeldIdle", "exp_alerts": [alert]}],
    }
    tests_file = tmp_path / "tests.yml"
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": [test]}))
    promtool("test", "rules", tests_file)


def test_a_lost_gpu_that_is_cut_is_not_called_as_many_gpus_as_it_has_mig_devices(tmp_path: Path) -> None:
    """The node producer counts both: gpustream_node_gpus is 8 if a GPU with 7 MIG devices is lost."""
    (rule,) = [rule for rule in rules() if rule.get("alert") == "GPULost"]
    summary = {
        "summary": "8 GPUs and MIG devices of producer left the bus (XID 79): reset or replace the GPU",
    }
    labels = {"severity": "critical", "job": "gpustream", "instance": "producer", "state": "lost"}
    alert = {"exp_labels": labels, "exp_annotations": rule["annotations"] | summary}
    test = {
        "interval": "1m",
        "input_series": [{"series": f'gpustream_node_gpus{{{SCRAPED},state="lost"}}', "values": "0 8x4"}],
        "alert_rule_test": [{"eval_time": "5m", "alertname": "GPULost", "exp_alerts": [alert]}],
    }
    tests_file = tmp_path / "tests.yml"
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": [test]}))
    promtool("test", "rules", tests_file)


@pytest.mark.parametrize(("late", "text"), [("0+3x30", "0.05"), ("0+150000x30", "2.5k")])
def test_a_rate_below_one_is_a_plain_number(tmp_path: Path, late: str, text: str) -> None:
    """Prometheus' humanize calls 0.05 a second 50m, which reads like millions."""
    (rule,) = [rule for rule in rules() if rule.get("alert") == "GpustreamLateAttribution"]
    summary = {"summary": f"{text} ticks a second are attributed by an old snapshot"}
    alert = {
        "exp_labels": {"severity": "warning", "job": "gpustream"},
        "exp_annotations": rule["annotations"] | summary,
    }
    series = f'gpustream_attribution_ticks_total{{{SCRAPED},attribution="late"}}'
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": late}],
        "alert_rule_test": [{"eval_time": "30m", "alertname": "GpustreamLateAttribution", "exp_alerts": [alert]}],
    }
    tests_file = tmp_path / "tests.yml"
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": [test]}))
    promtool("test", "rules", tests_file)


@pytest.mark.parametrize(("counted", "text"), [("0x5 1x4", "1 record"), ("0x5 3x4", "3 records")])
def test_an_alert_counts_whole_records_and_one_is_no_plural(tmp_path: Path, counted: str, text: str) -> None:
    """Prometheus' increase in 5 minutes is 1.25 of one record then."""
    (rule,) = [rule for rule in rules() if rule.get("alert") == "GpustreamDeadLetters"]
    summary = {"summary": f"producer could not use {text}"}
    labels = {"severity": "warning", "job": "gpustream", "instance": "producer"}
    alert = {"exp_labels": labels, "exp_annotations": rule["annotations"] | summary}
    series = f"gpustream_usage_records_dead_lettered_total{{{SCRAPED}}}"
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": counted}],
        "alert_rule_test": [{"eval_time": "8m", "alertname": "GpustreamDeadLetters", "exp_alerts": [alert]}],
    }
    tests_file = tmp_path / "tests.yml"
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": [test]}))
    promtool("test", "rules", tests_file)


def test_a_pod_that_worked_is_not_idle_whether_it_held_its_gpu_alone_then_or_shared_it(tmp_path: Path) -> None:
    """It shares a GPU, has it alone for two minutes, and shares it again; and the other way round."""
    alone, part = f"{SHARED},{BERT}", f"gpu_pod_utilization_ratio{{{SHARED},{BERT}}}"
    (panel,) = [query.expr for query in queries() if str(query) == "gpu-idle/Pods that idle/A"]
    idle_pods = filled(panel, {"cluster": "c", "node": ".*", "namespace": ".*", "idle": "4m"})
    expected = [
        {"expr": idle_pods, "eval_time": "6m", "exp_samples": [{"labels": "{}", "value": 0}]},
        {"expr": "pod:gpu_idle:ratio", "eval_time": "6m", "exp_samples": []},
    ]
    around, within = "{0}x7 stale _x3 {0}x9", "_x8 {0}x3 stale"
    shared_then_alone = {
        part: around.format(0),
        f"gpu_holders{{{SHARED}}}": around.format(2),
        f"gpu_pod_memory_used_bytes{{{SHARED},{BERT}}}": around.format(5),
        f"gpu_holders{{{alone}}}": within.format(1),
        f"gpu_utilization{{{alone}}}": within.format(0.5),
    }
    alone_then_shared = {
        f"gpu_holders{{{alone}}}": around.format(1),
        f"gpu_utilization{{{alone}}}": around.format(0),
        part: within.format(0.5),
        f"gpu_holders{{{SHARED}}}": within.format(2),
        f"gpu_pod_memory_used_bytes{{{SHARED},{BERT}}}": within.format(5),
    }
    tests = [
        {
            "interval": "30s",
            "input_series": [{"series": name, "values": samples} for name, samples in series.items()],
            "promql_expr_test": expected,
        }
        for series in (shared_then_alone, alone_then_shared)
    ]
    tests_file = tmp_path / "tests.yml"
    tests_file.write_text(yaml.safe_dump({"rule_files": list(map(str, FILES)), "tests": tests}))
    promtool("test", "rules", tests_file)
