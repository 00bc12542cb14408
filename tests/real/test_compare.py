"""``gpustream compare`` on a real Prometheus, into which two sources' series were written."""

import json
import time
import urllib.request
from collections.abc import Iterable
from typing import Any

import cramjam
from click.testing import CliRunner

from gpustream.cli import main
from sinks.remote_write import encode_v1
from sinks.series.model import STALE, Row, SampleGroup, SeriesSet
from tests.eventually import LIMIT_S
from tests.real.servers import PrometheusServer

THEIR_LABELS, OUR_LABELS = 'job="compare-dcgm-exporter"', 'cluster="compare"'
MIB = 1 << 20


def write(prometheus: PrometheusServer, groups: Iterable[SampleGroup]) -> None:
    body = bytes(cramjam.snappy.compress_raw(b"".join(encode_v1.pieces([*groups]))))
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    request = urllib.request.Request(prometheus.write_url, body, headers)  # noqa: S310 - http, and ours
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310 - http, and ours
        assert answer.status in (200, 204)


def series(names: str, **labels: str) -> SeriesSet:
    return SeriesSet(tuple(sorted(labels.items())), tuple(Row(name) for name in names.split()))


def compare(prometheus: PrometheusServer, *options: str) -> Any:
    arguments = ["compare", "--prometheus", prometheus.url, "--theirs", THEIR_LABELS, "--ours", OUR_LABELS]
    return CliRunner().invoke(main, [*arguments, *options])


def test_each_gpu_and_pod_is_beside_itself_and_each_difference_has_its_reason(prometheus: PrometheusServer) -> None:
    now_ms = int(time.time() * 1000)
    names = "DCGM_FI_DEV_GPU_UTIL DCGM_FI_DEV_FB_USED DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_XYZ"
    of_them = {"gpu": "0", "job": "compare-dcgm-exporter", "Hostname": "n1"}
    their_series = series(names, UUID="GPU-a", namespace="ml", pod="bert-0", container="main", **of_them)
    their_moved_series = series("DCGM_FI_DEV_GPU_TEMP", UUID="GPU-b", namespace="ml", pod="old-0", **of_them)
    of_us = {"gpu": "0", "cluster": "compare", "hostname": "n1"}
    ended_series = series("DCGM_FI_DEV_GPU_UTIL", UUID="GPU-a", namespace="ml", pod="old-0", **of_us)
    held_series = series(
        "DCGM_FI_DEV_GPU_UTIL DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_FB_FREE",
        UUID="GPU-a", namespace="ml", pod="bert-0", container="main", **of_us,
    )  # fmt: skip
    by_otel = series(
        "gpu_memory_used", gpu_uuid="GPU-a", k8s_namespace_name="ml", k8s_pod_name="bert-0", cluster="compare"
    )
    our_moved_series = series("DCGM_FI_DEV_GPU_TEMP", UUID="GPU-b", namespace="ml", pod="gpt-0", **of_us)
    write(
        prometheus,
        [
            SampleGroup(ended_series, now_ms - 20_000, [93.0]),
            SampleGroup(ended_series, now_ms - 10_000, [STALE]),
            *(SampleGroup(held_series, now_ms - ago, [20.0, 5e9, 7.0]) for ago in (10_000, 5000, 1000)),
            SampleGroup(by_otel, now_ms - 1000, [2048.0 * MIB]),
            SampleGroup(our_moved_series, now_ms - 1000, [33.0]),
            SampleGroup(their_series, now_ms - 1500, [93.0, 2048.0, 5e6, 1.0]),
            SampleGroup(their_moved_series, now_ms - 1500, [33.0]),
        ],
    )

    result = compare(prometheus, "--format", "json")

    report = json.loads(result.output)
    verdicts = {(row["gpu"], row["theirs"]["name"]): (row["verdict"], row["why"]) for row in report["rows"]}
    assert verdicts == {
        ("GPU-a", "DCGM_FI_DEV_GPU_UTIL"): ("timing", "theirs is what gpustream said 18 s before"),
        ("GPU-a", "DCGM_FI_DEV_FB_USED"): ("same", "another name for the same"),
        ("GPU-a", "DCGM_FI_DEV_POWER_VIOLATION"): (
            "unit",
            "theirs is 0.001 times gpustream's: another unit than its name has in gpustream",
        ),
        ("GPU-a", "DCGM_FI_DEV_XYZ"): ("unknown", "gpustream has no DCGM_FI_DEV_XYZ: gpustream does not read it"),
        ("GPU-b", "DCGM_FI_DEV_GPU_TEMP"): (
            "holder",
            "another pod: theirs is who held the GPU at the scrape, ours who held it when the value was read",
        ),
    }
    assert (result.exit_code, report["ok"], report["only_ours"]) == (1, False, ["DCGM_FI_DEV_FB_FREE"])
    assert report["verdicts"] == {"timing": 1, "same": 1, "unit": 1, "unknown": 1, "holder": 1}

    text = compare(prometheus).output

    assert "GPU-b\tml/old-0 / ml/gpt-0\tDCGM_FI_DEV_GPU_TEMP\t33\tDCGM_FI_DEV_GPU_TEMP\t33\tholder" in text
    assert "5 rows of 2 GPUs: 1 holder, 1 same" in text
    assert "DCGM_FI_DEV_GPU_UTIL" not in text


def test_what_agrees_ends_with_success_and_one_side_alone_does_not(prometheus: PrometheusServer) -> None:
    now_ms = int(time.time() * 1000)
    write(
        prometheus, [SampleGroup(series("DCGM_FI_DEV_GPU_TEMP", UUID="GPU-z", job=job), now_ms, [33.0]) for job in "xy"]
    )

    agrees = CliRunner().invoke(
        main, ["compare", "--prometheus", prometheus.url, "--theirs", 'job="x"', "--ours", '{job="y"}', "--all"]
    )
    one_sided = CliRunner().invoke(
        main, ["compare", "--prometheus", prometheus.url, "--theirs", 'job="x"', "--ours", 'job="nobody"']
    )
    mislabelled = CliRunner().invoke(main, ["compare", "--prometheus", prometheus.url, "--theirs", "job=x"])

    assert (agrees.exit_code, "\tsame\t" in agrees.output) == (0, True)
    assert (one_sided.exit_code, "say with --ours which these are" in one_sided.output) == (1, True)
    assert (mislabelled.exit_code, "parse error" in mislabelled.output) == (1, True)
