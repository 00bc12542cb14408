"""What is asked of an API server, and what its answers mean."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest

from delivery.kubernetes.client import Answer, Unreachable
from sinks.metrics_api import cluster as module
from sinks.metrics_api.cluster import API_SERVICES, AUTHENTICATION, ApiServer, GroupTaken
from sinks.metrics_api.selectors import SelectorError
from tests.eventually import eventually

OURS = "gpustream/gpustream-metrics-api"
PODS = "/api/v1/namespaces/ml/pods"


class FakeClient:
    """Answers from a table by path; a list of answers is gone through, and its last one stays."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def request(self, _method: str, path: str, **how: Any) -> Answer:
        """The next answer."""
        self.asked.append((path, dict(how.get("params") or {})))
        coming = self.answers[path]
        answer = coming.pop(0) if len(coming) > 1 else coming[0]
        if isinstance(answer, Exception):
            raise answer
        status, content = answer
        return Answer(status, json.dumps(content).encode(), None)


def api_service(name: str, service: str | None, group: str = "custom.metrics.k8s.io") -> dict[str, Any]:
    """An APIService."""
    namespace, _, service_name = (service or "").partition("/")
    spec = {"group": group, "service": {"namespace": namespace, "name": service_name, "port": 443} if service else None}
    return {"metadata": {"name": name}, "spec": spec}


def api_server(answers: dict[str, list[Any]]) -> tuple[ApiServer, FakeClient]:
    """An API server with these answers by path."""
    client = FakeClient(answers)
    return ApiServer(client, OURS), client  # type: ignore[arg-type]


async def test_a_group_of_another_service_is_refused_and_its_owner_named() -> None:
    items = [
        api_service("v1.apps", None, "apps"),
        api_service("v1beta2.custom.metrics.k8s.io", OURS),
        api_service("v1beta1.custom.metrics.k8s.io", "monitoring/prometheus-adapter"),
    ]
    cluster, _ = api_server({API_SERVICES: [(200, {"items": items})]})

    with pytest.raises(GroupTaken, match=r"monitoring/prometheus-adapter .*v1beta1\.custom.*--custom-metrics"):
        await cluster.start(asyncio.Event(), ask_front_proxy=False)


async def test_a_group_that_is_ours_or_nobodys_is_taken() -> None:
    for items in (
        [],
        [api_service("v1beta2.custom.metrics.k8s.io", OURS)],
        [api_service("v1.external.metrics", "a/b", "external.metrics.k8s.io")],
    ):
        cluster, _ = api_server({API_SERVICES: [(200, {"items": items})]})
        await cluster.start(asyncio.Event(), ask_front_proxy=False)


async def test_the_api_server_is_waited_for_and_readiness_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    forbidden = (403, {"message": "apiservices is forbidden"})
    answers: dict[str, list[Any]] = {
        API_SERVICES: [Unreachable("connection", "refused"), forbidden],
        AUTHENTICATION: [
            (200, {"data": {"requestheader-client-ca-file": "PEM", "requestheader-allowed-names": '["proxy"]'}})
        ],
    }
    cluster, _ = api_server(answers)
    starting = asyncio.create_task(cluster.start(asyncio.Event(), ask_front_proxy=True))

    (reason,) = await eventually(lambda: [text for text in cluster.not_ready() if "forbidden" in text], unless=starting)
    assert "the right to list apiservices" in reason
    answers[API_SERVICES] = [(200, {"items": []})]
    await starting
    assert cluster.not_ready() == []
    assert cluster.front_proxy == ("PEM", frozenset({"proxy"}))


async def test_an_answer_without_a_list_does_not_say_that_the_group_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    taken = [api_service("v1beta1.custom.metrics.k8s.io", "monitoring/prometheus-adapter")]
    cluster, _ = api_server({API_SERVICES: [(200, {}), (200, {"items": taken})]})

    with pytest.raises(GroupTaken):
        await cluster.start(asyncio.Event(), ask_front_proxy=False)


async def test_a_ca_that_can_not_be_read_again_stays_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_REFRESH_S", 0.01)
    first, second = ((200, {"data": {"requestheader-client-ca-file": text}}) for text in ("old", "new"))
    answers: dict[str, list[Any]] = {
        API_SERVICES: [(200, {"items": []})],
        AUTHENTICATION: [first, (403, {"message": "no"})],
    }
    cluster, client = api_server(answers)
    await cluster.start(asyncio.Event(), ask_front_proxy=True)
    refreshing = asyncio.create_task(cluster.refresh())
    await eventually(lambda: len(client.asked) > 4, unless=refreshing)
    assert (cluster.front_proxy, cluster.not_ready()) == (("old", frozenset()), [])
    assert [text for text in caplog.messages if "get that ConfigMap" in text] == caplog.messages
    assert len(caplog.messages) == 1
    answers[AUTHENTICATION] = [second]
    await eventually(lambda: cluster.front_proxy == ("new", frozenset()), unless=refreshing)
    refreshing.cancel()


async def test_pods_are_read_page_by_page_with_the_selector_as_it_was_given() -> None:
    pages = [
        (200, {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "p"}}]}),
        (200, {"metadata": {}, "items": [{"metadata": {"name": "q"}}]}),
    ]
    cluster, client = api_server({PODS: pages})

    assert await cluster.pods("ml", "app in (a,b)") == {"p", "q"}
    first = {"labelSelector": "app in (a,b)", "limit": "500"}
    assert client.asked == [(PODS, first), (PODS, {**first, "continue": "more"})]


async def test_a_page_without_pods_is_one_as_the_api_server_writes_it() -> None:
    cluster, _ = api_server(
        {
            PODS: [
                (200, {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "p"}}]}),
                (200, {"metadata": {}, "items": None}),
            ]
        }
    )

    assert await cluster.pods("ml", "app=infer") == {"p"}
    assert await cluster.pods("ml", "app=none") == set()


async def test_a_namespace_can_not_lead_to_another_path() -> None:
    cluster, client = api_server(
        {f"/api/v1/namespaces/{quote('a/../b', safe='')}/pods": [(200, {"metadata": {}, "items": []})]}
    )

    assert await cluster.pods("a/../b", "x") == set()
    assert ".." not in client.asked[0][0].split("/")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((400, {"message": "unable to parse"}), SelectorError),
        ((403, {}), Unreachable),
        ((500, {}), Unreachable),
        ((200, []), Unreachable),
    ],
)
async def test_what_is_no_list_is_an_error(answer: Any, error: type[Exception]) -> None:
    cluster, _ = api_server({PODS: [answer]})

    with pytest.raises(error):
        await cluster.pods("ml", "x")


async def test_why_pods_are_not_listed_is_said_once_in_the_words_of_the_api_server() -> None:
    """The answer to the autoscaler begins with "the API server does not list pods"."""
    cluster, _ = api_server({PODS: [(403, {"message": "pods is forbidden"})]})

    with pytest.raises(Unreachable, match=r"^403: pods is forbidden$"):
        await cluster.pods("ml", "x")
