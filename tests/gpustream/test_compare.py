"""Another exporter's values beside gpustream's: what differs, and why."""

import json
import math
from collections.abc import Mapping, Sequence

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from gpustream.cli import main
from gpustream.compare import PrometheusClient, PrometheusError, gather, report, summary
from gpustream.comparison import FINE, Compared, Comparison, Reading, Sample, compared, is_ours
from sinks.receiver import Credentials
from sinks.series.cache import Cache
from sinks.series.translation import Translator
from sinks.settings import HttpSettings
from tests.sinks.scrape.fleet import full_node
from topics.catalogue import CATALOGUE
from topics.profiles import PROFILES, ProfileName

NOW = 1000.0
MIB = 1 << 20

LABELS = {"gpu_utilization": {"gpu_task_type": "compute"}, "gpu_temperature": {"gpu_temperature_sensor": "edge"}}
"""Labels that tell a series from others of its name."""


def reading(
    name: str, values: float | Sequence[float], labels: Mapping[str, str], *, every_s: float = 1.0, age_s: float = 0.0
) -> Reading:
    """A series whose last value is ``age_s`` old."""
    numbers = [values] if isinstance(values, float | int) else values
    times = [NOW - age_s - every_s * (len(numbers) - 1 - index) for index in range(len(numbers))]
    return Reading(
        {"__name__": name, **labels}, tuple(Sample(at_s, float(v)) for at_s, v in zip(times, numbers, strict=True))
    )


def dcgm(name: str, values: float | Sequence[float], gpu: str = "GPU-a", pod: str = "bert-0", **more: str) -> Reading:
    """A series of dcgm-exporter."""
    holder = {"namespace": "ml", "pod": pod, "container": "main"} if pod else {}
    labels = {"gpu": "0", "UUID": gpu, "Hostname": "n1", "job": "dcgm-exporter", **holder, **more}
    return reading(name, values, labels, age_s=float(more.pop("age_s", "0")))


def otel(name: str, values: float | Sequence[float], gpu: str = "GPU-a", pod: str = "bert-0", **more: str) -> Reading:
    """A series of gpustream."""
    holder = {"k8s_namespace_name": "ml", "k8s_pod_name": pod} if pod else {}
    labels = {"gpu_index": "0", "gpu_uuid": gpu, "k8s_node_name": "n1", "service_name": "gpustream", **holder, **more}
    return reading(name, values, labels)


def compare(theirs: Sequence[Reading], ours: Sequence[Reading]) -> Comparison:
    return compared(theirs, ours, 0.02)


def compared_row(theirs: Reading, ours: Reading) -> Compared:
    (row,) = compare([theirs], [ours]).rows
    return row


def test_the_same_value_in_other_units_under_another_name_is_the_same() -> None:
    row = compared_row(dcgm("DCGM_FI_DEV_FB_USED", 2048), otel("gpu_memory_used", 2048 * MIB + 1000))

    assert (row.verdict, row.reason, row.quantity) == ("same", "another name for the same", "memory_used_bytes")
    assert row.theirs is not None
    assert row.ours is not None
    assert (row.theirs.pod, row.ours.pod) == ("ml/bert-0", "ml/bert-0")


def test_what_gpustream_said_earlier_was_only_read_at_another_time() -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_GPU_UTIL", 93),
        otel("gpu_utilization", [0.93, 0.2, 0.2, 0.2], gpu_task_type="compute"),
    )

    assert (row.verdict, row.reason) == (
        "timing",
        "another name for the same; theirs is what gpustream said 3 s before",
    )


def test_what_gpustream_said_later_was_only_read_at_another_time() -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_GPU_UTIL", 93, age_s="3"),
        otel("gpu_utilization", [0.2, 0.2, 0.2, 0.93, 0.2, 0.93], gpu_task_type="compute"),
    )

    assert row.reason.endswith("theirs is what gpustream said 1 s after")


@pytest.mark.parametrize(
    ("name", "theirs", "our_name", "ours", "verdict"),
    [
        ("DCGM_FI_DEV_GPU_UTIL", 3, "gpu_utilization", 0.038, "same"),  # they have whole percents
        ("DCGM_FI_DEV_GPU_UTIL", 3.5, "gpu_utilization", 0.03, "value"),
        ("DCGM_FI_DEV_GPU_TEMP", 33, "gpu_temperature", 33.9, "value"),
    ],
)
def test_a_whole_number_of_a_larger_unit_may_be_rounded(
    name: str, theirs: float, our_name: str, ours: float, verdict: str
) -> None:
    assert compared_row(dcgm(name, theirs), otel(our_name, ours, **LABELS[our_name])).verdict == verdict


def test_what_gpustream_said_of_the_pod_before_counts_for_when_it_was_read() -> None:
    before = otel("gpu_temperature", [80, 80], pod="old-0", gpu_temperature_sensor="edge")._replace(ended=True)
    now = otel("gpu_temperature", 33, gpu_temperature_sensor="edge")

    (row,) = compare([dcgm("DCGM_FI_DEV_GPU_TEMP", 80)], [before, now]).rows

    assert row.verdict == "timing"


def test_a_counter_between_two_of_gpustreams_values_was_only_read_at_another_time() -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 5_000_000),
        reading(
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            [1e6, 8e6, 9e6],
            {"UUID": "GPU-a", "namespace": "ml", "pod": "bert-0"},
        ),
    )

    assert row.verdict == "timing"


def test_another_unit_than_the_name_says_is_named_with_its_factor() -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_POWER_VIOLATION", 5_000_000),
        reading("DCGM_FI_DEV_POWER_VIOLATION", 5e9, {"UUID": "GPU-a", "namespace": "ml", "pod": "bert-0"}),
    )

    assert row.verdict == "unit"
    assert "0.001 times" in row.reason


def test_a_value_that_gpustream_never_had_differs() -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_GPU_TEMP", 80), otel("gpu_temperature", [33.0, 34.0], gpu_temperature_sensor="edge")
    )

    assert row.verdict == "value"
    assert "+46 from gpustream's 34" in row.reason


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        ([math.nan], [33.0], "value"),
        ([33.0], [math.nan], "value"),
        ([math.inf], [33.0], "value"),
        ([33.0], [math.inf], "value"),
        ([math.nan], [33.0, math.nan], "same"),
        ([33.0], [math.nan, 33.0], "same"),
    ],
)
def test_what_is_no_finite_number_is_only_like_itself(theirs: list[float], ours: list[float], verdict: str) -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_GPU_TEMP", theirs), otel("gpu_temperature", ours, gpu_temperature_sensor="edge")
    )
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ("old-0", "bert-0", "another pod"),
        ("", "bert-0", "they name no pod"),
        ("bert-0", "", "gpustream names no pod"),
    ],
)
def test_another_holder_differs_also_if_the_value_is_the_same(theirs: str, ours: str, reason: str) -> None:
    row = compared_row(
        dcgm("DCGM_FI_DEV_GPU_TEMP", 33, pod=theirs),
        otel("gpu_temperature", 33, pod=ours, gpu_temperature_sensor="edge"),
    )

    assert row.verdict == "holder"
    assert row.reason.startswith(reason)


def test_a_shared_gpu_says_that_they_copy_the_whole_to_each_pod() -> None:
    theirs = [dcgm("DCGM_FI_DEV_POWER_USAGE", 300, pod=pod) for pod in ("a", "b")]

    comparison = compare(theirs, [otel("gpu_power_draw", 300, pod="")])

    assert [row.verdict for row in comparison.rows] == ["holder", "holder"]
    assert all("each of them the whole" in row.reason for row in comparison.rows)


def test_each_of_their_pods_is_beside_gpustreams_part_of_that_pod() -> None:
    theirs = [dcgm("DCGM_FI_DEV_FB_USED", value, pod=pod) for pod, value in (("a", 100), ("b", 200))]
    ours = [dcgm("DCGM_FI_DEV_FB_USED", value, pod=pod, job="") for pod, value in (("b", 200), ("a", 100))]

    assert [row.verdict for row in compare(theirs, ours).rows] == ["same", "same"]


def test_what_only_one_side_has_is_missing_with_the_reason() -> None:
    theirs = [
        dcgm("DCGM_FI_DEV_GPU_TEMP", 33),
        dcgm("DCGM_FI_DEV_GPU_TEMP", 33, gpu="GPU-b"),
        dcgm("DCGM_EXP_GPU_HEALTH_STATUS", 0),
        dcgm("DCGM_FI_DEV_MEMORY_TEMP", 40),
    ]
    ours = [
        otel("gpu_temperature", 33, gpu_temperature_sensor="edge"),
        otel("gpu_temperature", 30, gpu="GPU-c", gpu_temperature_sensor="edge"),
        otel("gpu_memory_used", 5),
    ]

    comparison = compare(theirs, ours)

    verdicts = {
        (str(row.device), row.quantity): (row.verdict, row.reason) for row in comparison.rows if row.verdict not in FINE
    }
    assert verdicts[("GPU-b", "temperature_celsius")] == ("missing", "gpustream has no such GPU")
    assert verdicts[("GPU-c", "")] == ("missing", "they have no such GPU")
    assert verdicts[("GPU-a", "DCGM_EXP_GPU_HEALTH_STATUS")][0] == "unknown"
    assert "DCGM's health checks" in verdicts[("GPU-a", "DCGM_EXP_GPU_HEALTH_STATUS")][1]
    assert verdicts[("GPU-a", "memory_temperature_celsius")] == (
        "missing",
        "gpustream has it with --names otel or otel-suffixed or dcgm or dcgm-4.9 or dcgm-legacy, if NVML says it",
    )
    assert comparison.only_ours == ("gpu_memory_used",)
    assert comparison.differing == 4


def test_a_gpu_that_is_only_named_by_node_and_index_is_found_by_them() -> None:
    theirs = reading(
        "gpu_power_draw_watts",
        300,
        {"gpu_index": "0", "host_name": "n1", "k8s_pod_name": "bert-0", "k8s_namespace_name": "ml"},
    )

    assert compared_row(theirs, otel("gpu_power_draw", 300)).device.uuid == "GPU-a"


def test_nodes_that_are_scraped_at_ipv6_addresses_are_not_one() -> None:
    instances = {"GPU-a": "[fd00::7]:9400", "GPU-b": "[fd00::8]:9400"}
    ours = [otel("gpu_power_draw", 300, gpu, "", k8s_node_name="", instance=at) for gpu, at in instances.items()]
    theirs = [reading("gpu_power_draw_watts", 300, {"gpu_index": "0", "instance": at}) for at in instances.values()]

    rows = compare(theirs, ours).rows
    assert sorted((row.device.uuid, row.verdict) for row in rows) == [("GPU-a", "same"), ("GPU-b", "same")]


def test_the_pod_of_the_exporter_itself_holds_nothing() -> None:
    """A scrape without honor_labels calls the holder's labels ``exported_``, and has its own in their place."""
    scraped = {"pod": "dcgm-exporter-x", "namespace": "monitoring", "container": "exporter"}
    of_pod = dcgm("DCGM_FI_DEV_GPU_TEMP", 33, **scraped, exported_pod="bert-0", exported_namespace="ml")
    free = dcgm("DCGM_FI_DEV_GPU_TEMP", 30, gpu="GPU-b", **scraped)
    ours = [
        otel("gpu_temperature", 33, gpu_temperature_sensor="edge"),
        otel("gpu_temperature", 30, gpu="GPU-b", pod="", gpu_temperature_sensor="edge"),
    ]

    assert [row.verdict for row in compare([of_pod, free], ours).rows] == ["same", "same"]


def test_mig_devices_are_distinguished() -> None:
    theirs = [dcgm("DCGM_FI_DEV_FB_USED", value, GPU_I_ID=instance) for instance, value in (("1", 10), ("2", 20))]
    ours = [dcgm("DCGM_FI_DEV_FB_USED", value, GPU_I_ID=instance, job="") for instance, value in (("2", 20), ("1", 10))]

    comparison = compare(theirs, ours)

    assert [(str(row.device), row.verdict) for row in comparison.rows] == [("GPU-a/1", "same"), ("GPU-a/2", "same")]


def test_the_mig_device_of_a_resource_claim_is_the_one_of_that_uuid() -> None:
    theirs = dcgm("DCGM_FI_DEV_FB_USED", 10, GPU_I_ID="7", dra_mig_device_uuid="MIG-c")
    by_uuid = otel("gpu_memory_used", 10 * MIB, gpu_mig_uuid="MIG-c")
    by_instance = dcgm("DCGM_FI_DEV_FB_USED", 10, GPU_I_ID="7", job="")

    for ours in (by_uuid, by_instance):
        row = compared_row(theirs, ours)
        assert (str(row.device), row.verdict) == ("MIG-c", "same")


def test_a_mig_device_that_gpustream_may_have_by_its_uuid_is_not_said_to_be_missing() -> None:
    theirs, ours = dcgm("DCGM_FI_DEV_FB_USED", 10, GPU_I_ID="7"), otel("gpu_memory_used", 5, gpu_mig_uuid="MIG-c")
    reasons = {row.device.instance: row.reason for row in compare([theirs], [ours]).rows}
    assert reasons["7"].startswith("gpustream has no such MIG device, or has it by its UUID only: --names dcgm")


def test_a_mig_device_that_gpustream_names_by_its_uuid_and_by_its_gpu_instance_is_missing_from_neither_side() -> None:
    """As with ``--names otel,dcgm`` beside dcgm-exporter, or beside an exporter that says the UUID."""
    their_by_instance = dcgm("DCGM_FI_DEV_FB_USED", 10, GPU_I_ID="7")
    their_by_uuid = dcgm("dcgm_fb_used", 10, gpu="MIG-c")
    by_instance = [dcgm("DCGM_FI_DEV_FB_USED", 10, GPU_I_ID=instance, job="") for instance in ("7", "8")]
    by_uuid = [otel("gpu_memory_used", 10 * MIB, gpu_mig_uuid=uuid) for uuid in ("MIG-c", "MIG-d")]

    for theirs, named, missing in [
        (their_by_instance, "GPU-a/7", "GPU-a/8"),
        (their_by_uuid, "MIG-c", "MIG-d"),
    ]:
        rows = compare([theirs], [*by_instance, *by_uuid]).rows
        assert {(str(row.device), row.verdict) for row in rows} == {(named, "same"), (missing, "missing")}


def test_series_of_one_name_that_have_no_sample_of_the_same_time_are_not_added_up() -> None:
    """As of a sink that was started again with another external label."""
    before = otel("gpu_power_draw", 200, stage="trial")
    before = before._replace(samples=(Sample(NOW - 50.5, 200.0),))

    (row,) = compare([dcgm("DCGM_FI_DEV_POWER_USAGE", 300)], [before, otel("gpu_power_draw", 100)]).rows

    assert row.verdict == "value"


def test_the_parts_of_pods_that_share_a_gpu_are_the_whole_that_another_exporter_gives_each_of_them() -> None:
    """As with ``--parts-by-pod``: a series for each pod, and one for the rest."""
    theirs = [dcgm("DCGM_FI_DEV_GPU_UTIL", 90, pod=pod) for pod in ("bert-0", "bert-1")]
    of_pods = {"bert-0": 0.3, "bert-1": 0.5, "": 0.1}
    ours = [otel("gpu_utilization", used, pod=pod, gpu_task_type="compute") for pod, used in of_pods.items()]

    rows = compare(theirs, ours).rows
    assert {(row.verdict, row.reason) for row in rows} == {
        ("holder", "several pods hold the GPU: theirs is the whole of it, gpustream's the pod's part")
    }
    assert compare([dcgm("DCGM_FI_DEV_GPU_UTIL", 95)], ours).rows[0].verdict == "value"


def readings(profile: ProfileName) -> list[Reading]:
    """A node with every key, as gpustream writes it in a profile; without its MIG device."""
    _, groups = Translator([PROFILES[profile]]).translate(full_node(), Cache())
    return [
        Reading({"__name__": row.name, **dict(series.labels), **dict(row.labels)}, (Sample(NOW, float(value)),))
        for series, _, values in groups
        for row, value in zip(series.rows, values, strict=True)
        if not dict(series.labels).keys() & {"GPU_I_ID", "gpu_mig_uuid"} and dict(series.labels).get("uuid") != "MIG-c"
    ]


@pytest.mark.parametrize("theirs", PROFILES)
@pytest.mark.parametrize("ours", PROFILES)
def test_what_is_the_same_in_any_two_profiles_is_found_to_be_the_same(theirs: ProfileName, ours: ProfileName) -> None:
    comparison = compare(readings(theirs), readings(ours))

    measured = [row for row in comparison.rows if row.quantity in CATALOGUE]
    assert {row.verdict for row in measured if row.verdict != "missing"} == {"same"}
    keys = PROFILES[ours].series.keys()
    assert [row for row in measured if row.verdict == "missing" and row.quantity in keys] == []


@pytest.mark.parametrize(
    ("labels", "ours"),
    [
        ({"service_name": "gpustream", "job": "otel"}, True),
        ({"job": "gpustream-scrape"}, True),
        ({}, True),
        ({"job": "dcgm-exporter"}, False),
        ({"job": "kubernetes-pods", "service_name": "l9gpu"}, False),
    ],
)
def test_whose_a_series_is_is_found_by_its_service_and_job(labels: dict[str, str], ours: bool) -> None:
    assert is_ours(labels) == ours


def test_the_report_has_every_row_and_says_whether_all_agrees() -> None:
    comparison = compare(
        [dcgm("DCGM_FI_DEV_GPU_TEMP", 33)], [otel("gpu_temperature", 33, gpu_temperature_sensor="edge")]
    )

    content = json.loads(json.dumps(report(comparison)))

    assert (content["ok"], content["verdicts"]) == (True, {"same": 1})
    assert content["rows"][0]["theirs"]["name"] == "DCGM_FI_DEV_GPU_TEMP"
    assert summary(comparison) == "1 row of 1 GPU: 1 same"


def test_errors_of_the_command_line_are_named() -> None:
    result = CliRunner().invoke(main, ["compare", "--prometheus", "http://u:p@prometheus", "--window", "0"])

    assert result.exit_code == 2
    assert "--prometheus: credentials belong in --basic-auth-user" in result.output
    assert "--window: must be at least 1 s" in result.output


def test_a_prometheus_that_does_not_answer_is_a_sentence() -> None:
    result = CliRunner().invoke(main, ["compare", "--prometheus", "http://127.0.0.1:1"])

    assert result.exit_code == 1
    assert "http://127.0.0.1:1/api/v1/query can't be asked" in result.output


def test_a_proxy_that_can_not_be_used_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://proxy.example:1080")
    result = CliRunner().invoke(main, ["compare", "--prometheus", "http://prometheus.example:9090"])

    assert result.exit_code == 1
    assert "HTTP_PROXY names a socks5 proxy" in result.output


async def test_matchers_with_an_error_are_refused_before_all_series_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queried: list[str] = []

    async def readings(_: PrometheusClient, matchers: str, __: float) -> list[Reading]:
        queried.append(matchers)
        raise PrometheusError("parse error")

    monkeypatch.setattr(PrometheusClient, "readings", readings)
    with pytest.raises(PrometheusError):
        await gather("http://127.0.0.1:1", HttpSettings(), ("job=scraped", None), 60)

    assert queried == ["job=scraped"]


@pytest.mark.parametrize("matchers", [("theirs", None), (None, "ours"), (None, None)])
async def test_series_that_one_side_has_matchers_for_are_not_the_other_sides(
    monkeypatch: pytest.MonkeyPatch, matchers: tuple[str | None, str | None]
) -> None:
    theirs, ours = [dcgm("DCGM_FI_DEV_GPU_TEMP", 33)], [otel("gpu_temperature", 33)]
    readings_by_matcher = {"theirs": theirs, "ours": ours, "": [*theirs, *ours]}

    async def readings(_: PrometheusClient, matcher: str, __: float) -> list[Reading]:
        return readings_by_matcher[matcher]

    monkeypatch.setattr(PrometheusClient, "readings", readings)

    assert await gather("http://127.0.0.1:1", HttpSettings(), matchers, 60) == (theirs, ours)


def test_a_url_that_is_none_is_refused_without_the_address_of_another_command() -> None:
    result = CliRunner().invoke(main, ["compare", "--prometheus", "prometheus:9090"])

    assert result.exit_code == 2
    assert "not a URL that begins with http:// or https:// and a host" in result.output


@pytest.mark.parametrize(("matchers", "rejected"), [('{job="x"}', ',job="x"}'), ('job="x"', ',job="x"}'), ("{", ",{}")])
async def test_braces_of_matchers_are_taken_off_in_pairs(
    monkeypatch: pytest.MonkeyPatch, matchers: str, rejected: str
) -> None:
    async def refused(_: PrometheusClient, expression: str) -> list[object]:
        raise PrometheusError(expression)

    monkeypatch.setattr(PrometheusClient, "_query", refused)
    with pytest.raises(PrometheusError) as error:
        await PrometheusClient("http://127.0.0.1:1", None, None, 0.0).readings(matchers, 60)  # type: ignore[arg-type]

    assert str(error.value).endswith(f'"{rejected})')


async def test_a_series_whose_last_sample_is_older_than_the_window_is_there_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with an --interval or a --resolution of two minutes: a query for now finds it."""
    labels = {"__name__": "gpu_utilization", "gpu_uuid": "GPU-a"}

    async def query(_: PrometheusClient, expression: str) -> list[Reading]:
        return [] if expression.endswith("ms]") else [Reading(labels, (Sample(1000.0, 0.5),))]

    monkeypatch.setattr(PrometheusClient, "_query", query)
    client = PrometheusClient("http://p", None, None, 1000.0)  # type: ignore[arg-type]
    assert await client.readings("", 120.0) == [Reading(labels, (Sample(1000.0, 0.5),))]


async def test_a_native_histogram_of_something_else_on_gpus_is_left_out() -> None:
    latency, temperature = {"__name__": "gpu_latency_seconds"}, {"__name__": "gpu_temperature"}

    async def answer(request: web.Request) -> web.Response:
        query = str((await request.post())["query"])
        of_range = query.endswith("ms]")
        plain = {"values": [[1.0, "33"]]} if of_range else {"value": [1.0, "33"]}
        histogram = {"histograms": [[1.0, {}]]} if of_range else {"histogram": [1.0, {}]}
        series = [
            {"metric": latency, **(plain if query.startswith("count") else histogram)},
            {"metric": temperature, **plain},
        ]
        return web.json_response({"status": "success", "data": {"result": series}})

    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    async with TestServer(app) as server, ClientSession() as session:
        client = PrometheusClient(str(server.make_url("/")), session, Credentials(HttpSettings()), 1.0)
        (reading,) = await client.readings("", 60)

    assert reading.labels == temperature


@pytest.mark.parametrize(
    "row",
    [
        {"value": [1.0, "33"]},
        {"metric": None, "value": [1.0, "33"]},
        {"metric": {"gpu": "0"}, "value": [1.0, "33"]},
        {"metric": {"__name__": ["gpu"]}, "value": [1.0, "33"]},
        {"metric": {"__name__": "gpu"}, "value": "33"},
        {"metric": {"__name__": "gpu"}, "values": [[1.0]]},
        {"metric": {"__name__": "gpu"}, "value": [1.0, "warm"]},
        "gpu",
        json.loads("[" * 900 + "]" * 900),
    ],
)
async def test_an_answer_that_is_none_of_prometheus_is_a_sentence(row: object) -> None:
    async def answer(_: web.Request) -> web.Response:
        text = json.dumps({"status": "success", "data": {"result": [row]}})
        return web.Response(text=text.replace("[" * 900, "[" * 90_000).replace("]" * 900, "]" * 90_000))

    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    async with TestServer(app) as server, ClientSession() as session:
        client = PrometheusClient(str(server.make_url("/")), session, Credentials(HttpSettings()), 1.0)
        with pytest.raises(PrometheusError, match=r'answered 200: {"status": "success", "data"'):
            await client.readings("", 60)


@pytest.mark.parametrize("of_range", [True, False])
async def test_a_series_with_the_samples_of_the_other_kind_of_query_is_read_as_it_is(*, of_range: bool) -> None:
    labels = {"__name__": "gpu_temperature"}

    async def answer(_: web.Request) -> web.Response:
        samples = {"values": [[1.0, "33"]]} if of_range else {"value": [1.0, "33"]}
        return web.json_response({"status": "success", "data": {"result": [{"metric": labels, **samples}]}})

    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    async with TestServer(app) as server, ClientSession() as session:
        client = PrometheusClient(str(server.make_url("/")), session, Credentials(HttpSettings()), 1.0)
        assert await client.readings("", 60) == [Reading(labels, (Sample(1.0, 33.0),))]
