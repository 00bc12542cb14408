"""The Kubernetes API is read as this user may; whatever is answered in its place, the doctor goes on."""

from pathlib import Path

import pytest

from gpustream.doctor.kubernetes import inspect, lease_of
from gpustream.doctor.situation import Json
from tests.producers.cluster.api_server import ApiServer, Behaviour, Reply, Request, answers, kubeconfig


def whole(body: bytes) -> Behaviour:
    async def behave(_: Request, reply: Reply) -> None:
        await reply.answer(200, body)

    return behave


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (whole(b"<html>sign in</html>"), "HTTP 200: <html>sign in</html>"),
        (whole(b""), "HTTP 200: without a word"),
        (whole(b"null"), "HTTP 200: null"),
        (
            whole(b'{"metadata": {"continue": "1"}, "items": []}'),
            "/api/v1/namespaces/gpustream/pods: all pages of the list name the same next one",
        ),
        (whole(b'{"items": [{}]}'), "its answer has no objects of Kubernetes: KeyError: 'metadata'"),
        (
            whole(b'{"items": [null]}'),
            "its answer has no objects of Kubernetes: AttributeError: 'NoneType' object has no attribute 'get'",
        ),
        (
            whole(b'{"items": [{"metadata": {"name": "a"}, "spec": null}]}'),
            "its answer has no objects of Kubernetes: TypeError: 'NoneType' object is not subscriptable",
        ),
        (answers(302, "elsewhere"), "HTTP 302: elsewhere"),
        (answers(401, "Unauthorized"), "HTTP 401: Unauthorized"),
        (answers(503, "etcd is away"), "HTTP 503: etcd is away"),
    ],
)
async def test_what_answers_in_place_of_the_api_is_no_answer(tmp_path: Path, behaviour: Behaviour, error: str) -> None:
    async with ApiServer() as server:
        config = tmp_path / "config"
        config.write_text(kubeconfig(server.url, {}))
        server.next(*[behaviour] * 99)
        assert (await inspect(config, "gpustream")).error == error


async def test_what_this_user_may_not_see_is_named(tmp_path: Path) -> None:
    async with ApiServer() as server:
        config = tmp_path / "config"
        config.write_text(kubeconfig(server.url, {}))
        server.next(*[answers(403, "you may not")] * 99)
        cluster = await inspect(config, "gpustream")
        assert (cluster.error, set(cluster.refusals.values())) == ("", {"you may not"})


@pytest.mark.parametrize(
    ("env", "in_config_map", "lease"),
    [
        ([], {}, "monitoring/gpustream-cluster"),
        ([{"name": "GPUSTREAM_LEASE", "value": "a/b"}], {"GPUSTREAM_LEASE": "c/d"}, "a/b"),
        ([{"name": "POD_NAME", "valueFrom": {}}], {"GPUSTREAM_LEASE": "c/d"}, "c/d"),
        ([{"name": "GPUSTREAM_LEASE", "value": "off"}], {}, ""),
    ],
)
def test_the_lease_of_a_cluster_producer_is_the_one_that_its_pod_names(
    env: list[Json], in_config_map: Json, lease: str
) -> None:
    container = {"env": env, "envFrom": [{"configMapRef": {"name": "gpustream-x7"}}, {"secretRef": {"name": "s"}}]}

    assert lease_of({"spec": {"containers": [container]}}, {"gpustream-x7": in_config_map}, "monitoring") == lease
