"""What OpenCost asks about GPUs, answered by promtool of gpustream's series and the rule of docs/how-to/opencost.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sinks.series.cache import Cache
from sinks.series.translation import Translator
from tests.docs.page import blocks
from tests.real.test_rules import promtool
from tests.sinks.scrape.fleet import exposed, node, samples
from topics.profiles import PROFILES

ENGINE = 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{container!=""}'
WHICH = 'DCGM_FI_DEV_DEC_UTIL{container!=""}'


def holder(pod: str, used: float | None = None) -> dict[str, Any]:
    """A pod on a device, with its part if it shares it."""
    parts = {} if used is None else {"parts": {"utilization_ratio": used}}
    return {"namespace": "ml", "pod": pod, "container": "main", **parts}


def gpu(index: int, *holders: dict[str, Any], used: float, engine: float | None = None) -> dict[str, Any]:
    """A GPU; ``engine``: as GPM measures it, from Hopper on."""
    metrics = {"gpu_utilization_ratio": used, "decoder_utilization_ratio": 0.0}
    metrics |= {} if engine is None else {"graphics_engine_active_ratio": engine}
    return {"uuid": f"GPU-{index}", "index": index, "model": "L4", "metrics": metrics, "holders": list(holders)}


def mig(instance: int, pod: str, engine: float | None) -> dict[str, Any]:
    """A MIG device of GPU 9."""
    uuid = f"MIG-{instance}"
    place = {"parent_uuid": "GPU-9", "gpu_instance": instance, "compute_instance": 0, "profile": "1g.10gb"}
    metrics = {"memory_used_bytes": 1 << 30} | ({} if engine is None else {"graphics_engine_active_ratio": engine})
    return {"uuid": uuid, "index": 9, "mig": {"uuid": uuid, **place}, "metrics": metrics, "holders": [holder(pod)]}


DEVICES = [
    gpu(0, holder("hopper"), used=1.0, engine=0.5),
    gpu(1, holder("ampere"), used=0.25),
    gpu(2, holder("one", 0.25), holder("other", 0.125), used=0.5, engine=0.75)
    | {"unattributed": {"utilization_ratio": 0.125}},
    gpu(3, holder("two"), used=1.0),
    gpu(4, holder("two"), used=0.5),
    gpu(5, used=1.0, engine=1.0),
    mig(1, "mig-hopper", 0.375),
    mig(2, "mig-ampere", None),
]
USED = {"hopper": 0.5, "ampere": 0.25, "one": 0.25, "other": 0.125, "two": 0.75, "mig-hopper": 0.375}
WHOLE = {"hopper": "GPU-0", "ampere": "GPU-1", "two": "GPU-3"}


def asked(expr: str, values_by_labels: Mapping[str, float]) -> dict[str, Any]:
    """A query after two minutes, and the only answers that it may have."""
    answers = [{"labels": labels, "value": value} for labels, value in values_by_labels.items()]
    return {"expr": expr, "eval_time": "2m", "exp_samples": answers}


def test_opencost_gets_the_use_of_every_pod_and_the_gpus_of_those_that_have_whole_ones(tmp_path: Path) -> None:
    rules, _ = blocks("how-to/opencost.md", "yaml", "Set it up", indented=True)
    (tmp_path / "rules.yml").write_text(rules.text)
    groups = Translator([PROFILES["dcgm"]], by_pod=True).translate(node(*DEVICES), Cache())[1]
    series = []
    for sample in samples(exposed(groups)):
        labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
        series.append({"series": f"{sample.name}{{{labels}}}", "values": f"{sample.value}x8"})
    used = {f'{{container="main", namespace="ml", pod="{pod}"}}': value for pod, value in USED.items()}
    queries = [
        asked(f"avg(avg_over_time({ENGINE}[1m])) by (container, pod, namespace)", used),
        asked(f"min(count_over_time({ENGINE}[1m])) by (container, pod, namespace)", dict.fromkeys(used, 4)),
        asked(
            f"min(avg_over_time({WHICH}[1m])) by (pod, UUID) * 0",
            {f'{{pod="{pod}", UUID="{uuid}"}}': 0 for pod, uuid in [*WHOLE.items(), ("two", "GPU-4")]},
        ),
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": queries}
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(content))

    promtool("test", "rules", tmp_path / "tests.yml")
