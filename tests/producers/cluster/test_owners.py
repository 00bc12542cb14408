"""Owner chains go to the top, each owner is requested once, and one that can't be read delays no other."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Client, Unreachable
from producers.cluster import instruments as names
from producers.cluster.owners import (
    AGAIN_S,
    AT_ONCE,
    DEEPEST,
    LONGEST_PAUSE_S,
    MOST_GROUPS,
    NEW_KIND_S,
    REFUSED_S,
    Chain,
    Owners,
)
from producers.cluster.pods import PodOwner
from tests.eventually import eventually, settle
from tests.producers.cluster.kubernetes_objects import reference
from tests.producers.fakes import FakeClock, value
from topics.workloads import Owner

RS = Owner("apps/v1", "ReplicaSet", "llm-5d", "rs-1")
DEPLOYMENT = Owner("apps/v1", "Deployment", "llm", "dep-1")
JOB = Owner("batch/v1", "Job", "eval-28", "job-1")
CRONJOB = Owner("batch/v1", "CronJob", "eval", "cron-1")
RAY = Owner("ray.io/v1", "RayCluster", "tune", "ray-1")
RAY_JOB = Owner("ray.io/v1", "RayJob", "tune", "ray-job-1")
RAY_RESOURCES = {"RayCluster": ("rayclusters", True), "RayJob": ("rayjobs", True)}


class FakeApi(Client):
    """Answers from ``answers``, else with a 404; ``requested`` is every path that was requested, in order."""

    def __init__(self) -> None:
        super().__init__(None)
        self.answers: dict[str, Answer | Exception] = {}
        self.requested: list[str] = []
        self.hanging: set[str] = set()
        self.at_once = self.most_at_once = 0

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        **_: Any,
    ) -> Answer:
        assert method == "GET"
        self.requested.append(path)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            if any(path.startswith(hangs) for hangs in self.hanging):
                await asyncio.Event().wait()
        finally:
            self.at_once -= 1
        gone = {"kind": "Status", "code": 404, "details": {"name": path.rpartition("/")[2]}}
        answer = self.answers.get(path, Answer(404, json.dumps(gone).encode(), None))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def has(self, path: str, owner: Owner, above: Owner | None = None, *, uid: str | None = None) -> None:
        """Serve this owner, with ``above`` as its controller."""
        metadata = {"name": owner.name, "uid": uid or owner.uid, "ownerReferences": [reference(above)] if above else []}
        body = {"kind": "PartialObjectMetadata", "metadata": metadata}
        self.answers[path] = Answer(200, json.dumps(body).encode(), None)

    def serves(self, base: str, kinds: dict[str, tuple[str, bool]]) -> None:
        """Serve a version of an API group, with the plural and scope of each of its kinds."""
        rows = [{"kind": kind, "name": plural, "namespaced": scoped} for kind, (plural, scoped) in kinds.items()]
        rows += [{**row, "name": f"{row['name']}/status"} for row in rows]
        self.answers[base] = Answer(200, json.dumps({"kind": "APIResourceList", "resources": rows}).encode(), None)


class Bench:
    """Running owners, with a fake API server and a fake clock."""

    def __init__(self) -> None:
        self.api, self.clock = FakeApi(), FakeClock()
        self.instruments = Instruments(names.INSTRUMENTS)
        self.learned: list[tuple[str, list[str]]] = []
        self.complete: dict[str, bool] = {}
        self.owners = Owners(self.api, self.instruments, self._learn, clock=self.clock)

    def _learn(self, of: PodOwner, chain: Chain) -> None:
        uid = of.owner.uid or ""
        names = [f"{owner.kind}/{owner.name}" for owner in chain.owners]
        self.learned.append((uid, names))
        self.complete[uid] = chain.complete

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Bench"]:
        task = asyncio.create_task(self.owners.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def chain(self, owner: Owner, namespace: str = "ml") -> list[str]:
        """The chain as it is reported."""
        self.owners.follow(PodOwner(namespace, owner))
        await eventually(lambda: any(uid == owner.uid for uid, _ in self.learned))
        return dict(self.learned)[owner.uid or ""]

    async def pass_s(self, seconds: float) -> None:
        """Let this time pass, and wait for what is then due."""
        self.clock.now_s += seconds
        self.owners._wake.set()
        await settle(60)

    def requests(self, kind: str, result: str) -> float:
        return value(self.instruments, names.OWNER_REQUESTS, kind=kind, result=result)


RS_PATH = "/apis/apps/v1/namespaces/ml/replicasets/llm-5d"
DEPLOYMENT_PATH = "/apis/apps/v1/namespaces/ml/deployments/llm"
JOB_PATH = "/apis/batch/v1/namespaces/ml/jobs/eval-28"
RAY_PATH = "/apis/ray.io/v1/namespaces/ml/rayclusters/tune"
RAY_JOB_PATH = "/apis/ray.io/v1/namespaces/ml/rayjobs/tune"


async def test_a_replica_sets_chain_goes_on_to_its_deployment() -> None:
    async with Bench().running() as bench:
        bench.api.has(RS_PATH, RS, DEPLOYMENT)
        bench.api.has(DEPLOYMENT_PATH, DEPLOYMENT)

        assert await bench.chain(RS) == ["ReplicaSet/llm-5d", "Deployment/llm"]
        assert bench.api.requested == [RS_PATH, DEPLOYMENT_PATH]
        assert (bench.requests("ReplicaSet", "ok"), bench.owners.unknown) == (1, 0)


async def test_a_custom_controllers_plural_is_looked_up_once() -> None:
    async with Bench().running() as bench:
        bench.api.serves("/apis/ray.io/v1", RAY_RESOURCES)
        bench.api.has(RAY_PATH, RAY, RAY_JOB)
        bench.api.has(RAY_JOB_PATH, RAY_JOB)

        assert await bench.chain(RAY) == ["RayCluster/tune", "RayJob/tune"]
        assert bench.api.requested == ["/apis/ray.io/v1", RAY_PATH, RAY_JOB_PATH]


async def test_a_cluster_scoped_owner_is_requested_without_a_namespace() -> None:
    queue = Owner("example.com/v1", "Queue", "gpus", "q-1")
    async with Bench().running() as bench:
        bench.api.serves("/apis/example.com/v1", {"Queue": ("queues", False)})
        bench.api.has("/apis/example.com/v1/queues/gpus", queue)
        await bench.chain(queue)

        assert bench.requests("Queue", "ok") == 1


async def test_a_name_is_escaped_as_one_segment_of_the_path() -> None:
    odd = Owner("apps/v1", "ReplicaSet", "a?b:c", "rs-9")
    async with Bench().running() as bench:
        await bench.chain(odd)

        assert bench.api.requested == ["/apis/apps/v1/namespaces/ml/replicasets/a%3Fb%3Ac"]


async def test_each_owner_is_requested_once_however_many_pods_it_has() -> None:
    second = Owner("apps/v1", "ReplicaSet", "llm-6e", "rs-2")
    async with Bench().running() as bench:
        for owner in (RS, second):
            bench.api.has(f"/apis/apps/v1/namespaces/ml/replicasets/{owner.name}", owner, DEPLOYMENT)
        bench.api.has(DEPLOYMENT_PATH, DEPLOYMENT)
        bench.owners.follow(PodOwner("ml", RS))
        bench.owners.follow(PodOwner("ml", second))
        await eventually(lambda: len(bench.learned) == 2)
        assert bench.api.requested.count(DEPLOYMENT_PATH) == 1

        bench.owners.forget(PodOwner("ml", RS))
        bench.learned.clear()
        assert await bench.chain(RS) == ["ReplicaSet/llm-5d", "Deployment/llm"]
        assert len(bench.api.requested) == 3


async def test_a_static_pods_node_is_the_top_and_is_not_requested() -> None:
    async with Bench().running() as bench:
        assert await bench.chain(Owner("v1", "Node", "n1", "node-1")) == ["Node/n1"]
        assert bench.api.requested == []


async def test_a_kind_that_may_not_be_read_ends_the_chain_is_logged_once_and_requested_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = Owner("batch/v1", "Job", "eval-29", "job-2")
    async with Bench().running() as bench:
        bench.api.answers[JOB_PATH] = Answer(403, b"{}", None)
        with caplog.at_level(logging.WARNING):
            assert await bench.chain(JOB) == ["Job/eval-28"]
            assert await bench.chain(second) == ["Job/eval-29"]
        assert (bench.api.requested, bench.requests("Job", "forbidden")) == ([JOB_PATH], 1)
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["Job of batch/v1"]

        bench.api.has(JOB_PATH, JOB, CRONJOB)
        bench.api.answers["/apis/batch/v1/namespaces/ml/cronjobs/eval"] = Answer(403, b"{}", None)
        await bench.pass_s(AGAIN_S * 1.3)
        await eventually(lambda: bench.learned[-1] == ("job-1", ["Job/eval-28", "CronJob/eval"]))


async def test_a_ring_of_owners_that_could_not_be_read_before_is_reported_as_a_chain_without_a_top() -> None:
    async with Bench().running() as bench:
        bench.api.answers[JOB_PATH] = Answer(403, b"{}", None)
        assert await bench.chain(JOB) == ["Job/eval-28"]
        assert bench.complete == {"job-1": True}

        bench.api.has(JOB_PATH, JOB, CRONJOB)
        bench.api.has("/apis/batch/v1/namespaces/ml/cronjobs/eval", CRONJOB, JOB)
        await bench.pass_s(AGAIN_S * 1.3)
        assert bench.learned[1:] == [("job-1", ["Job/eval-28", "CronJob/eval"])]
        assert bench.complete == {"job-1": False}


async def test_however_many_kinds_a_tenant_invents_the_next_that_may_not_be_read_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Bench().running() as bench:
        for number in range(2 * MOST_GROUPS):
            version = f"g{number}.example.com/v1"
            bench.api.answers[f"/apis/{version}"] = Answer(403, b"{}", None)
            bench.owners.follow(PodOwner("ml", Owner(version, "Thing", "x", f"uid-{number}")))
        await eventually(lambda: bench.owners.unknown == 0)
        bench.api.answers[JOB_PATH] = Answer(403, b"{}", None)
        await bench.chain(JOB)

    assert caplog.messages[-1].startswith("Job of batch/v1: not to be read")


async def test_a_refusal_while_an_api_server_starts_is_soon_retried_and_a_lasting_one_ever_less_often() -> None:
    """An API server refuses requests until it has read its roles."""
    async with Bench().running() as bench:
        bench.api.answers[JOB_PATH] = Answer(403, b"{}", None)
        assert await bench.chain(JOB) == ["Job/eval-28"]
        for refusals, pause_s in enumerate((REFUSED_S, 4 * REFUSED_S, 16 * REFUSED_S), start=1):
            await bench.pass_s(pause_s * 0.9)
            assert bench.requests("Job", "forbidden") == refusals
            await bench.pass_s(pause_s * 0.4)
            assert bench.requests("Job", "forbidden") == refusals + 1
        for _ in range(20):
            await bench.pass_s(AGAIN_S * 1.3)
        refused = bench.requests("Job", "forbidden")
        await bench.pass_s(AGAIN_S * 0.9)
        assert bench.requests("Job", "forbidden") == refused

        bench.api.has(JOB_PATH, JOB, CRONJOB)
        await bench.pass_s(AGAIN_S * 0.4)
        await eventually(lambda: bench.learned[-1] == ("job-1", ["Job/eval-28", "CronJob/eval"]))


async def test_many_owners_of_a_kind_that_may_not_be_read_cost_one_request() -> None:
    jobs = [Owner("batch/v1", "Job", f"job-{number}", f"uid-{number}") for number in range(4 * AT_ONCE)]
    paths = [f"/apis/batch/v1/namespaces/ml/jobs/{job.name}" for job in jobs]
    async with Bench().running() as bench:
        bench.api.answers = dict.fromkeys(paths, Answer(403, b"{}", None))
        for job in jobs:
            bench.owners.follow(PodOwner("ml", job))
        await eventually(lambda: bench.owners.unknown == 0)
        assert len(bench.api.requested) <= AT_ONCE

        for path, job in zip(paths, jobs, strict=True):
            bench.api.has(path, job, CRONJOB)
        await bench.pass_s(REFUSED_S * 1.5)
        await eventually(lambda: {uid for uid, chain in bench.learned if len(chain) == 2} == {job.uid for job in jobs})


async def test_a_kind_that_was_allowed_and_is_refused_again_is_retried_soon() -> None:
    others = [Owner("batch/v1", "Job", f"job-{number}", f"other-{number}") for number in range(2)]
    async with Bench().running() as bench:
        bench.api.answers[JOB_PATH] = Answer(403, b"{}", None)
        await bench.chain(JOB)
        await bench.pass_s(REFUSED_S * 1.3)
        bench.api.has(JOB_PATH, JOB)
        await bench.pass_s(4 * REFUSED_S * 1.3)
        assert bench.requests("Job", "ok") == 1

        for owner in others:
            bench.api.answers[f"/apis/batch/v1/namespaces/ml/jobs/{owner.name}"] = Answer(403, b"{}", None)
            await bench.chain(owner)
        for owner in others:
            bench.api.has(f"/apis/batch/v1/namespaces/ml/jobs/{owner.name}", owner, CRONJOB)
        await bench.pass_s(REFUSED_S * 1.3)
        await eventually(lambda: {len(chain) for uid, chain in bench.learned[-2:]} == {2})


async def test_permissions_of_two_namespaces_are_distinguished() -> None:
    other_job = Owner("batch/v1", "Job", "train", "job-2")
    async with Bench().running() as bench:
        bench.api.answers[JOB_PATH] = Answer(403, b"{}", None)
        bench.api.has("/apis/batch/v1/namespaces/free/jobs/train", other_job, CRONJOB)
        await bench.chain(JOB)

        assert (await bench.chain(other_job, "free"))[:2] == ["Job/train", "CronJob/eval"]


@pytest.mark.parametrize("uid", [None, "another"])
async def test_a_deleted_owner_stays_in_the_chain(uid: str | None) -> None:
    async with Bench().running() as bench:
        bench.api.has(RS_PATH, RS, DEPLOYMENT)
        if uid:
            bench.api.has(DEPLOYMENT_PATH, DEPLOYMENT, RAY, uid=uid)

        assert await bench.chain(RS) == ["ReplicaSet/llm-5d", "Deployment/llm"]
        assert bench.requests("Deployment", "gone") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>default backend - 404</html>",
        b"404 page not found",
        b"[1]",
        b'{"details": null}',
        b'{"message": "the server could not find the requested resource", "details": {}}',
    ],
)
async def test_a_404_that_does_not_name_the_owner_is_no_proof_that_it_is_deleted(body: bytes) -> None:
    async with Bench().running() as bench:
        bench.api.answers[JOB_PATH] = Answer(404, body, None)
        assert await bench.chain(JOB) == ["Job/eval-28"]
        assert (bench.requests("Job", "refused"), bench.requests("Job", "gone")) == (1, 0)

        bench.api.has(JOB_PATH, JOB, CRONJOB)
        await bench.pass_s(REFUSED_S * 1.3)
        await eventually(lambda: bench.learned[-1] == ("job-1", ["Job/eval-28", "CronJob/eval"]))


async def test_an_unknown_kind_ends_the_chain_until_the_api_server_has_it() -> None:
    async with Bench().running() as bench:
        assert await bench.chain(RAY) == ["RayCluster/tune"]
        assert bench.requests("other", "unknown_kind") == 1

        bench.api.serves("/apis/ray.io/v1", RAY_RESOURCES)
        bench.api.has(RAY_PATH, RAY, RAY_JOB)
        bench.clock.now_s += NEW_KIND_S
        await bench.chain(RAY_JOB)
        await bench.pass_s(AGAIN_S * 1.3)
        await eventually(lambda: bench.learned[-1] == ("ray-1", ["RayCluster/tune", "RayJob/tune"]))


async def test_a_group_that_is_not_served_at_the_moment_is_read_again_soon_and_then_less_and_less_often() -> None:
    async with Bench().running() as bench:
        assert await bench.chain(RAY) == ["RayCluster/tune"]
        asked_s, began_s = list[float](), bench.clock.now_s
        while bench.clock.now_s < began_s + 2 * AGAIN_S:
            await bench.pass_s(5)
            asked_s += [bench.clock.now_s - began_s] * (bench.api.requested.count("/apis/ray.io/v1") - 1 - len(asked_s))
        assert asked_s[0] <= 1.4 * NEW_KIND_S
        assert 3 <= len(asked_s) <= 6

        bench.api.serves("/apis/ray.io/v1", RAY_RESOURCES)
        bench.api.has(RAY_PATH, RAY, RAY_JOB)
        await bench.pass_s(AGAIN_S * 1.3)
        await eventually(lambda: bench.learned[-1] == ("ray-1", ["RayCluster/tune", "RayJob/tune"]))


@pytest.mark.parametrize(
    "owner",
    [
        Owner("../../api/v1", "Secret", "x", "u"),
        Owner("v1?x=", "Secret", "x", "u"),
        Owner("", "Secret", "x", "u"),
        Owner("apps/v1", "ReplicaSet", "..", "u"),
        Owner("apps/v1", "ReplicaSet", "a/b", "u"),
        Owner("apps/v1", "ReplicaSet", "a%2fb", "u"),
        Owner("apps/v1", "ReplicaSet", "", "u"),
    ],
)
async def test_an_owner_that_can_be_no_path_is_never_requested(owner: Owner) -> None:
    async with Bench().running() as bench:
        assert await bench.chain(owner) == [f"{owner.kind}/{owner.name}"]
        assert bench.api.requested == []


@pytest.mark.parametrize("body", [b"", b"[]", b'{"metadata": {}}', b"<html>"])
async def test_an_answer_that_is_no_object_ends_the_chain_and_is_counted(body: bytes) -> None:
    async with Bench().running() as bench:
        bench.api.answers[RS_PATH] = Answer(200, body, None)
        bench.api.answers["/apis/ray.io/v1"] = Answer(200, body.replace(b'{"metadata": {}}', b'{"resources": 1}'), None)

        assert await bench.chain(RS) == ["ReplicaSet/llm-5d"]
        assert await bench.chain(RAY) == ["RayCluster/tune"]
        assert value(bench.instruments, names.UNDECODABLE, resource="owners") == 2


@pytest.mark.parametrize(
    "failure",
    [Unreachable("connection", "refused"), Answer(503, b"", None), Answer(429, b"", 2.0), Answer(401, b"", None)],
    ids=str,
)
async def test_an_unreachable_api_is_requested_again_until_it_answers(failure: Answer | Exception) -> None:
    async with Bench().running() as bench:
        bench.api.answers[RS_PATH] = failure
        assert await bench.chain(RS) == ["ReplicaSet/llm-5d"]
        assert (bench.complete["rs-1"], bench.owners.unknown) == (False, 1)
        for _ in range(12):
            await bench.pass_s(LONGEST_PAUSE_S * 1.3)
        assert 10 <= bench.requests("ReplicaSet", "away") <= 13

        bench.api.has(RS_PATH, RS, DEPLOYMENT)
        bench.api.has(DEPLOYMENT_PATH, DEPLOYMENT)
        await bench.pass_s(LONGEST_PAUSE_S * 1.3)
        await eventually(lambda: bench.learned[-1] == ("rs-1", ["ReplicaSet/llm-5d", "Deployment/llm"]))
        assert (bench.complete["rs-1"], bench.owners.unknown) == (True, 0)


async def test_a_retry_after_is_respected() -> None:
    async with Bench().running() as bench:
        bench.api.answers[RS_PATH] = Answer(429, b"", 30.0)
        await bench.chain(RS)
        await bench.pass_s(29.0)
        assert len(bench.api.requested) == 1

        await bench.pass_s(10.0)
        assert len(bench.api.requested) == 2


async def test_whoever_names_the_uid_of_anothers_owner_changes_nothing_of_the_others_chain() -> None:
    async with Bench().running() as bench:
        bench.api.has(RS_PATH, RS, DEPLOYMENT)
        bench.api.has(DEPLOYMENT_PATH, DEPLOYMENT, None)
        for claimed in (PodOwner("evil", RS), PodOwner("ml", Owner("apps/v1", "ReplicaSet", "mine", RS.uid))):
            bench.owners.follow(claimed)
            await settle(60)
        bench.learned.clear()

        assert await bench.chain(RS) == ["ReplicaSet/llm-5d", "Deployment/llm"]


async def test_the_pauses_grow_and_apply_to_the_whole_group() -> None:
    async with Bench().running() as bench:
        bench.api.answers[RS_PATH] = Unreachable("connection", "refused")
        await bench.chain(RS)
        await bench.chain(DEPLOYMENT)
        assert bench.api.requested == [RS_PATH]

        bench.owners.forget(PodOwner("ml", DEPLOYMENT))
        for waited_s, expected in ((0.7, 2), (0.7, 2), (0.6, 3), (1.9, 3), (0.6, 4)):
            await bench.pass_s(waited_s)
            assert len(bench.api.requested) == expected


async def test_an_owner_that_is_forgotten_during_its_request_is_not_reported() -> None:
    async with Bench().running() as bench:
        bench.api.has(RS_PATH, RS, None)
        bench.owners.follow(PodOwner("ml", RS))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.learned == []
        bench.owners.forget(PodOwner("ml", RS))
        await settle(60)

        assert (bench.learned, bench.api.requested) == ([], [RS_PATH])


async def test_a_group_that_hangs_delays_no_other() -> None:
    async with Bench().running() as bench:
        bench.api.hanging.add("/apis/ray.io/")
        for number in range(50):
            bench.owners.follow(PodOwner("ml", Owner("ray.io/v1", "RayCluster", f"r{number}", f"ray-{number}")))
        bench.api.has(JOB_PATH, JOB, None)

        assert await bench.chain(JOB) == ["Job/eval-28"]
        assert (bench.api.most_at_once, bench.owners.unknown) == (AT_ONCE + 1, 50)


async def test_a_forgotten_owner_is_not_reported() -> None:
    async with Bench().running() as bench:
        bench.api.answers[RS_PATH] = Unreachable("timeout", "")
        await bench.chain(RS)
        bench.owners.forget(PodOwner("ml", RS))
        bench.api.has(RS_PATH, RS, DEPLOYMENT)
        await bench.pass_s(100.0)

        assert (len(bench.learned), len(bench.api.requested)) == (1, 1)


@given(st.dictionaries(st.integers(0, 12), st.integers(0, 12)))
def test_every_chain_ends_without_going_in_circles(above: dict[int, int]) -> None:
    def owner(number: int) -> Owner:
        return Owner("apps/v1", "ReplicaSet", f"r{number}", f"u{number}")

    bench = Bench()

    async def learn() -> list[tuple[str, list[str]]]:
        for number in range(13):
            upper: Any = owner(above[number]) if number in above else None
            bench.api.has(f"/apis/apps/v1/namespaces/ml/replicasets/r{number}", owner(number), upper)
        async with bench.running():
            for number in range(13):
                bench.owners.follow(PodOwner("ml", owner(number)))
            await eventually(lambda: not bench.owners.unknown)
        assert len(bench.api.requested) <= 13
        return bench.learned

    for uid, chain in asyncio.run(learn()):
        expected = [int(uid[1:])]
        while len(expected) < DEEPEST and (upper := above.get(expected[-1])) is not None and upper not in expected:
            expected.append(upper)
        assert chain == [f"ReplicaSet/r{number}" for number in expected]
        assert bench.complete[uid] == (expected[-1] not in above)


@pytest.mark.parametrize("links", [DEEPEST - 1, DEEPEST, DEEPEST + 1])
async def test_a_chain_of_too_many_links_is_incomplete_counted_and_logged(
    links: int, caplog: pytest.LogCaptureFixture
) -> None:
    owners = [Owner("apps/v1", "ReplicaSet", f"r{number}", f"u{number}") for number in range(links)]
    async with Bench().running() as bench:
        for number, owner in enumerate(owners):
            above = owners[number + 1] if number + 1 < links else None
            bench.api.has(f"/apis/apps/v1/namespaces/ml/replicasets/{owner.name}", owner, above)
        chain = await bench.chain(owners[0])

    too_long = links > DEEPEST
    assert (len(chain), bench.complete["u0"]) == (min(links, DEEPEST), not too_long)
    assert (bench.requests("ReplicaSet", "too_long"), bench.owners.unknown) == (int(too_long), 0)
    assert [message.partition(":")[0] for message in caplog.messages] == ["ReplicaSet r0"] * too_long
