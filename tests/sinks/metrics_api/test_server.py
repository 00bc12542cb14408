"""What the server answers, and to whom."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from prometheus_client import Counter
from yarl import URL

from delivery.kubernetes.client import Unreachable
from sinks.http_server import listening
from sinks.metrics_api.custom_metrics import quantity, resource_of
from sinks.metrics_api.holdings import SERVED, STALE_S, Holdings
from sinks.metrics_api.selectors import SelectorError
from sinks.metrics_api.server import Access, Api
from tests.sinks.metrics_api.ticks import device, holder, of_deployment, tick

USED = "gpu_utilization_ratio"
BASE = "/apis/custom.metrics.k8s.io/v1beta2"
OPEN = Access(guarded=False, names=frozenset, token_file=None)


class Pods:
    """An API server's lists of pods."""

    def __init__(self, answers: dict[str, set[str] | Exception]) -> None:
        self.answers = answers

    async def pods(self, namespace: str, selector: str) -> set[str]:
        """The prepared answer."""
        answer = self.answers[f"{namespace}: {selector}"]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Answer(NamedTuple):
    """An HTTP answer: its status and its JSON."""

    status: int
    content: Any

    @property
    def values(self) -> dict[str, str]:
        """The values of a list by the names of their objects."""
        return {item["describedObject"]["name"]: item["value"] for item in self.content["items"]}


class Bench:
    """A server, the holdings that it serves, and its clock."""

    def __init__(self, access: Access, lists: dict[str, set[str] | Exception] | None) -> None:
        self.holdings = Holdings()
        self.now_s = 1000.0
        self.counter = Counter("requests_total", "Requests.", ("code",), registry=None)
        cluster: Any = None if lists is None else Pods(lists)
        self.api = Api(self.holdings, access, cluster, self.counter.labels, lambda: self.now_s)
        self.url = ""

    def tick(self, seq: int, *devices: dict[str, Any], **more: Any) -> None:
        """Add a tick to the holdings."""
        self.holdings.add_tick(tick(seq, *devices, **more), self.now_s, 0.0)

    async def ask(self, path: str, **headers: str) -> Answer:
        """Get a path, which is already percent-encoded."""
        url = URL(self.url + path, encoded=True)
        async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as response:
            assert response.content_type == "application/json"
            return Answer(response.status, json.loads(await response.read()))


@asynccontextmanager
async def bench(lists: dict[str, set[str] | Exception] | None = None, access: Access = OPEN) -> AsyncIterator[Bench]:
    """Serves; without ``lists`` plain JSON only."""
    server = Bench(access, lists)
    async with listening(
        server.api.routes(), ("127.0.0.1", 0), option="--metrics-listen", middlewares=[server.api.guard]
    ) as address:
        server.url = "http://{}:{}".format(*address)
        yield server


# -- plain JSON


async def test_a_workload_says_what_its_holders_do_as_mean_sum_and_maximum() -> None:
    async with bench() as server:
        server.tick(1, device("GPU-a", of_deployment("p"), metrics={USED: 0.25, "temperature_celsius": 40}))
        server.tick(
            2,
            device("GPU-b", of_deployment("q"), metrics={USED: 0.75, "temperature_celsius": 60, "sm_clock_hz": 2e9}),
            node="n2",
        )
        server.tick(3, device("GPU-c", of_deployment("other", "train"), used=1.0), node="n3")
        answer = await server.ask("/v1/workloads/ml/Deployment/infer")
        lower = await server.ask("/v1/workloads/ml/deployment/infer")

    assert answer.content == {
        "namespace": "ml",
        "kind": "Deployment",
        "name": "infer",
        "holders": 2,
        "devices": 2,
        "oldest_ts_ms": 1_795_219_153_000,
        "mean_over_holders": {USED: 0.5, "temperature_celsius": 50, "sm_clock_hz": 2e9},
        "sum_over_holders": {USED: 1.0},
        "max_over_holders": {USED: 0.75, "temperature_celsius": 60, "sm_clock_hz": 2e9},
    }
    assert lower.content["holders"] == 2


@pytest.mark.parametrize("path", ["ml/Deployment/none", "ml/Job/infer", "else/Deployment/infer"])
async def test_a_workload_that_holds_no_gpu_is_not_found(path: str) -> None:
    async with bench() as server:
        server.tick(1, device("GPU-a", of_deployment("p"), used=0.25))
        answer = await server.ask(f"/v1/workloads/{path}")

    assert answer.status == 404
    assert "holds a GPU" in answer.content["error"]


@pytest.mark.parametrize("path", ["/", "/v1/workloads/ml", "/v1/workloads/ml/Deployment/infer/", "/metrics"])
async def test_an_unknown_path_is_answered_with_the_paths_that_exist(path: str) -> None:
    async with bench() as server:
        answer = await server.ask(path)

    assert answer.status == 404
    assert "/v1/workloads/NAMESPACE/KIND/NAME" in answer.content["error"]


async def test_a_value_that_is_too_old_is_not_found_and_never_zero() -> None:
    async with bench({}) as server:
        server.tick(1, device("GPU-a", of_deployment("p"), used=0.25))
        server.now_s += STALE_S
        plain = await server.ask("/v1/workloads/ml/Deployment/infer")
        single = await server.ask(f"{BASE}/namespaces/ml/pods/p/{USED}")
        every = await server.ask(f"{BASE}/namespaces/ml/pods/%2A/{USED}")

    assert (plain.status, single.status, every.status) == (404, 404, 200)
    assert every.content["items"] == []


async def test_a_value_that_became_too_old_while_pods_were_listed_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench({}) as server:

        async def list_slowly(*_: object) -> set[str]:
            server.now_s += 10.0
            return {"p", "q"}

        monkeypatch.setattr(Pods, "pods", list_slowly)
        server.tick(1, device("GPU-a", holder("p"), used=0.25))
        server.now_s += STALE_S - 5.0
        server.tick(1, device("GPU-b", holder("q"), used=0.5), node="n2")
        answer = await server.ask(f"{BASE}/namespaces/ml/pods/*/{USED}?labelSelector=app%3Dinfer")

    assert answer.values == {"q": "500m"}


async def test_a_pod_with_a_cron_job_above_its_job_is_of_both() -> None:
    owned = holder("p", workload={"kind": "CronJob", "name": "nightly"}, job="nightly-1")
    async with bench() as server:
        server.tick(1, device("GPU-a", owned, used=0.25))
        answers = [await server.ask(f"/v1/workloads/ml/{path}") for path in ("CronJob/nightly", "Job/nightly-1")]

    assert [answer.status for answer in answers] == [200, 200]


async def test_the_aggregated_api_is_off_unless_it_is_enabled() -> None:
    async with bench() as server:
        answer = await server.ask(BASE)

    assert (answer.status, answer.content["kind"], answer.content["reason"]) == (404, "Status", "NotFound")


async def test_an_answer_to_another_method_names_those_that_there_are() -> None:
    async with bench({}) as server, aiohttp.ClientSession() as client, client.post(server.url + BASE) as response:
        content = await response.json()
        assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")
    assert (content["kind"], content["reason"], content["code"]) == ("Status", "MethodNotAllowed", 405)


# -- custom.metrics.k8s.io


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_discovery_lists_every_metric_of_pods_workloads_and_namespaces(version: str) -> None:
    async with bench({}) as server:
        group = await server.ask("/apis/custom.metrics.k8s.io")
        answer = await server.ask(f"/apis/custom.metrics.k8s.io/{version}")

    assert group.content["preferredVersion"]["version"] == "v1beta2"
    assert (answer.content["kind"], answer.content["groupVersion"]) == (
        "APIResourceList",
        f"custom.metrics.k8s.io/{version}",
    )
    names = {resource["name"]: resource["namespaced"] for resource in answer.content["resources"]}
    assert {f"pods/{metric}" for metric in SERVED} <= names.keys()
    assert (names[f"deployments.apps/{USED}"], names[f"namespaces/{USED}"]) == (True, False)


async def test_the_pods_of_a_selector_are_answered_and_no_others() -> None:
    async with bench({"ml: app=infer,tier in (a,b)": {"p", "q", "without-gpu"}}) as server:
        server.tick(1, device("GPU-a", holder("p"), used=0.9), device("GPU-b", holder("q"), used=0.1))
        server.tick(1, device("GPU-c", holder("other"), used=0.5), node="n2")
        path = f"{BASE}/namespaces/ml/pods/%2A/{USED}?labelSelector=app%3Dinfer%2Ctier+in+%28a%2Cb%29"
        answer = await server.ask(path, Accept="application/vnd.kubernetes.protobuf, */*")
        every = await server.ask(f"{BASE}/namespaces/ml/pods/*/{USED}")

    assert answer.values == {"p": "900m", "q": "100m"}
    assert every.values == {"p": "900m", "q": "100m", "other": "500m"}
    assert answer.content["items"][0] == {
        "describedObject": {"kind": "Pod", "name": "p", "apiVersion": "v1", "namespace": "ml"},
        "metric": {"name": USED, "selector": None},
        "timestamp": "2026-11-20T23:59:13Z",
        "value": "900m",
    }


async def test_the_older_version_has_the_name_of_the_metric_as_a_string() -> None:
    async with bench({}) as server:
        server.tick(1, device("GPU-a", holder("p"), used=0.9))
        answer = await server.ask(f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/ml/pods/p/{USED}")

    assert answer.content["apiVersion"] == "custom.metrics.k8s.io/v1beta1"
    assert (answer.content["items"][0]["metricName"], "metric" in answer.content["items"][0]) == (USED, False)


async def test_a_metric_selector_chooses_devices_and_stands_in_the_answer() -> None:
    async with bench({}) as server:
        first = device("GPU-a", holder("p"), used=0.9)
        second = device("GPU-b", holder("p"), used=0.1, model="NVIDIA A100")
        server.tick(1, first, second, device("GPU-c", holder("q"), used=0.3, model="NVIDIA A100"))
        path = f"{BASE}/namespaces/ml/pods/*/{USED}?metricLabelSelector="
        h100 = await server.ask(path + "gpu_model%3DNVIDIA-H100-80GB-HBM3%2Cx+notin+%28y%29")
        none = await server.ask(path + "gpu_model%3DL4")
        single = await server.ask(f"{BASE}/namespaces/ml/pods/q/{USED}?metricLabelSelector=gpu_model%3DL4")
        wrong = await server.ask(path + "gpu_model%3E")

    assert h100.values == {"p": "900m"}
    assert h100.content["items"][0]["metric"]["selector"]["matchExpressions"][0]["key"] == "gpu_model"
    assert (none.status, none.values, single.status) == (200, {}, 404)
    assert (wrong.status, wrong.content["reason"]) == (400, "BadRequest")


async def test_workloads_and_namespaces_are_answered_by_name_with_exactly_one_item() -> None:
    async with bench({}) as server:
        server.tick(1, device("GPU-a", of_deployment("p"), used=0.9), device("GPU-b", of_deployment("q"), used=0.1))
        server.tick(1, device("GPU-c", holder("r"), used=0.2), node="n2")
        workload = await server.ask(f"{BASE}/namespaces/ml/deployments.apps/infer/{USED}")
        namespace = await server.ask(f"{BASE}/namespaces/ml/metrics/{USED}")
        every = await server.ask(f"{BASE}/namespaces/%2A/metrics/{USED}")
        absent = [
            await server.ask(f"{BASE}/namespaces/{path}/{USED}")
            for path in ("ml/deployments.apps/none", "none/metrics", "ml/statefulsets.apps/infer", "ml/pods/none")
        ]

    assert workload.values == {"infer": "500m"}
    assert workload.content["items"][0]["describedObject"]["kind"] == "Deployment"
    assert namespace.values == every.values == {"ml": "400m"}
    assert [answer.status for answer in absent] == [404, 404, 404, 404]


async def test_custom_workloads_are_found_by_the_plural_of_their_kind() -> None:
    owned = holder("p", workload={"kind": "RayCluster", "name": "ray"})
    async with bench({}) as server:
        server.tick(1, device("GPU-a", owned, used=0.5))
        answer = await server.ask(f"{BASE}/namespaces/ml/rayclusters.ray.io/ray/{USED}")

    assert answer.values == {"ray": "500m"}
    assert [resource_of(kind) for kind in ("job", "policy", "redis")] == ["jobs", "policies", "redises"]


async def test_what_the_api_server_refuses_or_does_not_answer_is_an_error_and_no_empty_list() -> None:
    lists: dict[str, set[str] | Exception] = {
        "ml: a==": SelectorError("unable to parse"),
        "ml: b": Unreachable("connection", "refused"),
    }
    async with bench(lists) as server:
        server.tick(1, device("GPU-a", holder("p"), used=0.5))
        wrong = await server.ask(f"{BASE}/namespaces/ml/pods/*/{USED}?labelSelector=a%3D%3D")
        away = await server.ask(f"{BASE}/namespaces/ml/pods/*/{USED}?labelSelector=b")
        workloads = await server.ask(f"{BASE}/namespaces/ml/deployments.apps/*/{USED}?labelSelector=b")
        unknown = await server.ask(f"{BASE}/namespaces/ml/pods/*/no_such_metric")

    assert [answer.status for answer in (wrong, away, workloads, unknown)] == [400, 503, 400, 404]
    assert {answer.content["kind"] for answer in (wrong, away, workloads, unknown)} == {"Status"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9, "900m"),
        (0.9000000001, "900m"),
        (0.0, "0"),
        (1.0, "1"),
        (0.0004, "0"),
        (64 << 30, "68719476736"),
        (1.5, "1500m"),
    ],
)
def test_values_are_written_as_quantities_in_thousandths(value: float, text: str) -> None:
    assert quantity(value) == text


async def test_a_tick_of_a_time_after_9999_keeps_no_other_value_back() -> None:
    async with bench({}) as server:
        server.tick(1, device("GPU-a", of_deployment("p"), used=0.25), ts_ms=2**63 - 1)
        answer = await server.ask(f"{BASE}/namespaces/*/metrics/{USED}")

    assert (answer.status, answer.values) == (200, {"ml": "250m"})
    assert answer.content["items"][0]["timestamp"] == "9999-12-31T23:59:59Z"


# -- who may ask


async def test_a_bearer_token_opens_plain_json_and_not_the_aggregated_api(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    access = Access(guarded=True, names=frozenset, token_file=tmp_path / "token")
    async with bench({}, access) as server:
        server.tick(1, device("GPU-a", of_deployment("p"), used=0.5))
        plain = "/v1/workloads/ml/Deployment/infer"
        answers = [
            await server.ask(plain, Authorization="Bearer secret"),
            await server.ask(plain, Authorization="Bearer wrong"),
            await server.ask(plain, Authorization="Bearer "),
            await server.ask(plain),
            await server.ask(BASE, Authorization="Bearer secret"),
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(server.url).port)
        writer.write(f"GET {plain} HTTP/1.0\r\nAuthorization: Bearer ".encode() + b"\xff\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        (tmp_path / "token").write_text("other")
        answers.append(await server.ask(plain, Authorization="Bearer secret"))
        (tmp_path / "token").unlink()
        answers.append(await server.ask(plain, Authorization="Bearer other"))

    assert [answer.status for answer in answers] == [200, 401, 401, 401, 401, 401, 503]
    assert "secret" not in str(answers[1])
    assert answers[-1].content["error"] == "the file of the bearer token can't be read: No such file or directory"


@pytest.mark.parametrize("written", [1e308, -1e308])
async def test_a_value_as_large_as_a_number_can_be_keeps_no_other_value_back(written: float) -> None:
    async with bench({}) as server:
        metrics = {USED: written, "power_watts": written}
        server.tick(1, device("GPU-a", of_deployment("p"), metrics=metrics))
        server.tick(2, device("GPU-b", of_deployment("q"), metrics=metrics), node="n2")
        server.tick(3, device("GPU-c", of_deployment("r"), used=0.25), node="n3")
        pods = await server.ask(f"{BASE}/namespaces/ml/pods/*/{USED}")
        namespaces = await server.ask(f"{BASE}/namespaces/*/metrics/power_watts")
        workload = await server.ask("/v1/workloads/ml/Deployment/infer")

    assert [pods.status, namespaces.status, workload.status] == [200, 200, 200]
    assert pods.values["r"] == "250m"
    assert None not in workload.content["sum_over_holders"].values()
