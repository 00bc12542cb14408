"""Wrong annotations are reported as Events: each error of a pod once."""

import asyncio
import json
from typing import Any, cast

import pytest

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Client, Unreachable
from delivery.policies import DEFAULT_BOUNDS
from producers.cluster import instruments as own
from producers.cluster import policy_events
from producers.cluster.component import listeners
from producers.cluster.pods import KnownPod, Pods
from producers.cluster.policy_events import KEPT_S, PolicyEvents
from tests.producers.cluster.kubernetes_objects import named, raw, state

MISSPELT = {"gpustream.dev/idel-after": "2h"}


class Api:
    """Accepts Events as the API server does: one of each name."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.answers: list[int | None] = []
        self.request_count = 0

    async def request(self, method: str, path: str, *, body: bytes) -> Answer:
        """Answers with the next status of ``answers``, else 201 or 409; None means that the server is unreachable."""
        self.request_count += 1
        answer = self.answers.pop(0) if self.answers else 201
        if answer is None:
            raise Unreachable("connection", "refused")
        content = json.loads(body)
        exists = content["metadata"]["name"] in self.events
        if answer == 201:
            self.events.setdefault(content["metadata"]["name"], content)
        return Answer(409 if exists else answer, b'{"message": "no"}', None)


class Bench:
    """Replicas over one API server, with the same pods; a clock that a test sets."""

    def __init__(self) -> None:
        self.api, self.pods, self.now_s = Api(), Pods(), 0.0

    def pod(self, name: str, namespace: str = "ml", *, ended_ms: int | None = None) -> str:
        """A GPU pod."""
        uid = f"uid-{name}"
        self.pods.put(KnownPod(uid, namespace, name, "n1", "Running", 0, ended_ms, {}, {}, None), 0)
        return uid

    def replica(self) -> PolicyEvents:
        """A replica that has just started."""
        return PolicyEvents(
            cast("Client", self.api),
            self.pods,
            DEFAULT_BOUNDS,
            Instruments(own.INSTRUMENTS),
            clock_s=lambda: self.now_s,
        )


async def lead(replica: PolicyEvents) -> None:
    """Let the replica lead until it has written all its Events."""
    running = asyncio.ensure_future(replica.run())
    for _ in range(200):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_SPACING_S", "_AGAIN_S"):
        monkeypatch.setattr(policy_events, name, 0)


async def test_an_error_of_a_pod_gets_one_event_however_often_it_is_seen() -> None:
    bench = Bench()
    uid = bench.pod("bert-0")
    first, second = bench.replica(), bench.replica()
    for replica in (first, second):
        for _ in range(3):
            replica.put_pod(uid, "ml", MISSPELT)
            await lead(replica)
    (event,) = bench.api.events.values()
    assert bench.api.request_count == 2  # one by each replica
    assert (event["involvedObject"]["kind"], event["involvedObject"]["uid"]) == ("Pod", uid)
    assert event["message"].endswith("nobody reads it: did you mean gpustream.dev/idle-after?")


async def test_an_error_of_a_namespace_gets_an_event_on_each_of_its_running_gpu_pods() -> None:
    bench = Bench()
    bench.pod("a")
    bench.pod("b")
    bench.pod("other", "web")
    bench.pod("over", ended_ms=1)
    replica = bench.replica()
    replica.put_namespace("ml", {"gpustream.dev/reclaim": "everything"})
    await lead(replica)
    assert {event["involvedObject"]["name"] for event in bench.api.events.values()} == {"a", "b"}
    assert all(event["message"].startswith("namespace ml: the annotation") for event in bench.api.events.values())


async def test_an_error_of_a_namespace_is_forgotten_with_the_namespace() -> None:
    bench = Bench()
    replica = bench.replica()
    by_resource = listeners(state(), Instruments(own.INSTRUMENTS), lambda: None, lambda: 0, replica)
    namespace = named("ml", annotations={"gpustream.dev/reclaim": "everything"})
    by_resource["namespaces"].put(raw(namespace))
    by_resource["namespaces"].remove(raw(namespace))
    bench.pod("a")  # as of a namespace that is made again without the annotation
    await lead(replica)
    assert bench.api.events == {}


async def test_an_error_that_is_corrected_in_time_gets_no_event_and_a_new_one_does() -> None:
    bench = Bench()
    uid, replica = bench.pod("a"), bench.replica()
    replica.put_pod(uid, "ml", MISSPELT)
    replica.put_pod(uid, "ml", {"gpustream.dev/idle-after": "2h"})
    await lead(replica)
    assert bench.api.events == {}
    replica.put_pod(uid, "ml", {"gpustream.dev/idle-after": "10d"})
    await lead(replica)
    (event,) = bench.api.events.values()
    assert "1d is the most that counts here" in event["message"]


async def test_an_error_that_a_standby_saw_longer_ago_than_events_are_kept_gets_no_event_when_it_leads() -> None:
    bench = Bench()
    uid, replica = bench.pod("a"), bench.replica()
    replica.put_pod(uid, "ml", MISSPELT)
    replica.watch()
    bench.now_s += KEPT_S + 1
    await lead(replica)
    assert bench.api.request_count == 0


async def test_a_request_to_an_unreachable_api_server_is_repeated_and_a_refused_one_is_not() -> None:
    for answers, request_count, event_count in (([None, 503, 429, 403, 200, 302], 7, 1), ([422], 1, 0), ([404], 1, 0)):
        bench = Bench()
        bench.api.answers = list(answers)
        uid, replica = bench.pod("a"), bench.replica()
        replica.put_pod(uid, "ml", MISSPELT)
        await lead(replica)
        assert (bench.api.request_count, len(bench.api.events)) == (request_count, event_count)
