"""A kubelet's Pods API reports at once that a pod began or ended; without it nothing is missing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.kubelet import Kubelet
from producers.node.pods_api import PushedPod, merge_pods
from tests.bench import score
from tests.eventually import eventually
from tests.producers.fakes import value
from tests.producers.node.pod_resources import GPU, GPU_A, GPU_B, Server, pods_on, serving
from tests.producers.node.pods_server import PodsServer, pushed_pod, pushing

UID, ANOTHER = "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10", "2b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10"
STATIC = "0123456789abcdef0123456789abcdef"


class Node:
    """A kubelet with both sockets, and a reader of it."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.server, self.pods_path = server, folder / "pods.sock"
        self.now_ms = 1000
        self.instruments = Instruments(names.INSTRUMENTS)
        self.kubelet = Kubelet(
            server.path, self.instruments, pods_socket=self.pods_path, now_ms=lambda: self.now_ms, deadline_s=30.0
        )

    async def holds(self) -> dict[str, str | None]:
        """The pods with devices in a new reading, with their uids."""
        return {row["pod"]: row.get("pod_uid") for row in await self.kubelet.read(30.0) or ()}

    def held_now(self) -> list[str]:
        """The pods with devices now, without a new call."""
        return [row["pod"] for row in self.kubelet.in_force(self.now_ms) or ()]

    async def until(self, bench: Callable[[], bool]) -> None:
        await eventually(bench)

    async def is_pushed(self, pushed: bool = True) -> None:
        """Wait until the stream is followed (``pushed``), or is not followed any more."""
        await eventually(lambda: value(self.instruments, names.PODS_WATCHED) == pushed)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "kubelet.sock", pods_on({GPU_A: "bert-0"})) as running:
        yield running


@contextlib.asynccontextmanager
async def following(folder: Path, server: Server) -> AsyncIterator[Node]:
    """A node whose kubelet is followed inside the ``with`` block."""
    node = Node(folder, server)
    running = asyncio.create_task(node.kubelet.run())
    try:
        yield node
    finally:
        running.cancel()
        await asyncio.wait([running])
        await node.kubelet.close()


@pytest.fixture
async def node(tmp_path: Path, server: Server) -> AsyncIterator[tuple[Node, PodsServer]]:
    """A node with a pod whose uid is known."""
    with pushing(tmp_path / "pods.sock") as pods:
        pods.push(pushed_pod("bert-0", UID))
        async with following(tmp_path, server) as bench:
            await bench.is_pushed()
            assert await bench.holds() == {"bert-0": UID}
            yield bench, pods


async def test_the_end_of_a_pod_counts_at_once_though_it_is_still_listed(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    pods.push(pushed_pod("bert-0", UID, phase="Succeeded"))
    await bench.until(lambda: bench.held_now() == [])
    assert await bench.holds() == {}
    pods.delete(UID)
    assert await bench.holds() == {}


async def test_a_pod_that_is_deleted_has_ended(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    pods.delete(UID)
    await bench.until(lambda: bench.held_now() == [])


async def test_a_pod_that_begins_causes_a_call_at_once(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    bench.server.reply = pods_on({GPU_A: "bert-0", GPU_B: "bert-1"})
    pods.push(pushed_pod("bert-1", ANOTHER))
    await bench.until(lambda: bench.held_now() == ["bert-0", "bert-1"])
    assert await bench.holds() == {"bert-0": UID, "bert-1": ANOTHER}


async def test_a_pod_holds_the_devices_of_its_status_before_it_is_listed(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    devices = {"main": {GPU: [GPU_B], "rdma/hca": ["mlx5_0"]}}
    pods.push(pushed_pod("bert-1", ANOTHER, devices=devices))
    await bench.until(lambda: bench.held_now() == ["bert-0", "bert-1"])
    rows = await bench.kubelet.read(30.0) or []
    row = {"namespace": "ml-team", "pod": "bert-1", "container": "main", "resource": GPU, "device_ids": [GPU_B]}
    assert rows[1] == {**row, "pod_uid": ANOTHER}
    bench.server.reply = pods_on({GPU_A: "bert-0", GPU_B: "bert-1"})
    assert await bench.kubelet.read(30.0) == rows, "the same once it is listed"


async def test_a_name_that_comes_back_is_another_pod(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    pods.delete(UID)
    pods.push(pushed_pod("bert-0", ANOTHER))
    await eventually(lambda: _is(bench.holds(), {"bert-0": ANOTHER}))


async def test_nothing_is_kept_of_the_pods_that_had_a_name_before(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    uids = [UID, *(f"{number}b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10" for number in range(2, 9))]
    for ended, began in pairwise(uids):
        pods.delete(ended)
        pods.push(pushed_pod("bert-0", began))
        await eventually(partial(_holds, bench, {"bert-0": began}))
    assert bench.kubelet._pod_watch is not None
    assert [pod.uid for pod in bench.kubelet._pod_watch.pods] == [uids[-1]]


async def test_an_end_does_not_change_the_holders_of_earlier_times(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    bench.now_ms = 1400
    pods.delete(UID)
    await bench.until(lambda: bench.held_now() == [])
    assert [row["pod"] for row in bench.kubelet.in_force(1399) or ()] == ["bert-0"]


async def test_a_static_pod_has_no_uid_since_the_api_server_has_another(tmp_path: Path, server: Server) -> None:
    with pushing(tmp_path / "pods.sock") as pods:
        pods.push(pushed_pod("bert-0", STATIC))
        async with following(tmp_path, server) as bench:
            await bench.is_pushed()
            assert await bench.holds() == {"bert-0": None}


# -- without the Pods API


@pytest.mark.slow
async def test_without_the_socket_the_kubelet_is_polled_until_it_appears(tmp_path: Path, server: Server) -> None:
    async with following(tmp_path, server) as bench:
        assert await bench.holds() == {"bert-0": None}
        server.reply = pods_on({GPU_A: "bert-1"})
        assert await bench.holds() == {"bert-1": None}
        assert bench.kubelet.not_ready() == []
        with pushing(bench.pods_path) as pods:
            pods.push(pushed_pod("bert-1", UID))
            await bench.is_pushed()
            await eventually(lambda: _is(bench.holds(), {"bert-1": UID}))


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "refused"),
        (grpc.StatusCode.FAILED_PRECONDITION, "refused"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_slow"),
        (grpc.StatusCode.UNAVAILABLE, "unavailable"),
    ],
)
async def test_a_kubelet_that_refuses_to_push_is_polled(
    tmp_path: Path, server: Server, code: grpc.StatusCode, result: str
) -> None:
    with pushing(tmp_path / "pods.sock") as pods:
        pods.error = (code, "feature gate PodsAPI is disabled")
        async with following(tmp_path, server) as bench:
            await eventually(lambda: value(bench.instruments, names.POD_WATCHES, result=result) >= 1)
            assert await bench.holds() == {"bert-0": None}
            server.reply = pods_on({GPU_A: "bert-1"})
            assert await bench.holds() == {"bert-1": None}
            assert value(bench.instruments, names.PODS_WATCHED) == 0


@pytest.mark.slow
async def test_a_refusal_ends_with_the_kubelet_that_refused(tmp_path: Path, server: Server) -> None:
    with pushing(tmp_path / "pods.sock") as pods:
        pods.error = (grpc.StatusCode.UNIMPLEMENTED, "unknown service v1alpha1.Pods")
        async with following(tmp_path, server) as bench:
            await eventually(lambda: pods.watches == 1)
            pods.stop()
            pods.error = None
            pods.start()
            await bench.is_pushed()


async def test_while_a_stream_is_broken_the_listing_alone_counts(node: tuple[Node, PodsServer]) -> None:
    bench, pods = node
    pods.push(pushed_pod("bert-0", UID, phase="Succeeded"))
    await bench.until(lambda: bench.held_now() == [])
    pods.stop()
    await bench.is_pushed(False)
    bench.server.reply = pods_on({GPU_A: "bert-1", GPU_B: "bert-2"})
    assert await bench.holds() == {"bert-1": None, "bert-2": None}


async def test_nothing_changes_while_both_sockets_disappear_with_the_kubelet_and_come_back(
    node: tuple[Node, PodsServer],
) -> None:
    bench, pods = node
    bench.server.stop()  # first this server: without the other, its list has no UIDs
    pods.stop()
    await bench.is_pushed(False)
    assert await bench.holds() == {"bert-0": UID}, "what was known last"
    bench.server.start()
    pods.start()
    await bench.is_pushed()
    await eventually(lambda: _is(bench.holds(), {"bert-0": UID}))


async def test_a_pod_that_ended_while_nobody_followed_has_ended_when_the_stream_is_back(
    node: tuple[Node, PodsServer],
) -> None:
    bench, pods = node
    pods.end_streams()
    pods.push(pushed_pod("bert-0", UID, phase="Failed"))
    await eventually(lambda: pods.watches == 2)
    await eventually(lambda: _is(bench.holds(), {}))


@pytest.mark.parametrize("event", [b"\xff\xff", b"\x08\x01\x12\x00"])
async def test_after_a_malformed_event_a_new_stream_is_opened(node: tuple[Node, PodsServer], event: bytes) -> None:
    bench, pods = node
    pods.say(event)
    await eventually(lambda: value(bench.instruments, names.POD_WATCHES, result="undecodable") == 1)
    await bench.is_pushed()
    await eventually(lambda: _is(bench.holds(), {"bert-0": UID}))


async def test_a_stream_without_a_complete_list_changes_nothing(tmp_path: Path, server: Server) -> None:
    with pushing(tmp_path / "pods.sock") as pods:
        pods.syncs = False
        pods.push(pushed_pod("bert-0", UID, phase="Succeeded"))
        async with following(tmp_path, server) as bench:
            await eventually(lambda: value(bench.instruments, names.POD_EVENTS, type="added") == 1)
            assert await bench.holds() == {"bert-0": None}
            assert value(bench.instruments, names.PODS_WATCHED) == 0


# -- which containers hold devices


def test_a_row_that_was_listed_before_its_pod_began_belongs_to_the_pod_that_ended() -> None:
    row = {"namespace": "ml-team", "pod": "bert-0", "container": "main", "resource": GPU, "device_ids": [GPU_A]}
    name = ("ml-team", "bert-0")
    ended, began = PushedPod(name, UID, True, (), 4), PushedPod(name, ANOTHER, False, (), 5)
    assert merge_pods([row], 4, [ended, began]) == []
    assert merge_pods([row], 5, [ended, began]) == [{**row, "pod_uid": ANOTHER}]
    assert merge_pods([row], 5, [ended]) == []
    assert merge_pods([row], 0, [began]) == [{**row, "pod_uid": ANOTHER}]
    assert merge_pods([row], 0, []) == [row]


@pytest.mark.slow
async def test_with_pods_that_live_30_s_more_than_97_of_100_readings_are_given_to_their_holder() -> None:
    watched, readings = score.attributed_score(30, await score.scripted(30, 1, 120), 1, 120)
    polled, _ = score.attributed_score(30, nodes=1, seconds=120)
    assert len(readings) > 900
    assert polled < 0.97 < watched


async def _holds(node: Node, expected: dict[str, str | None]) -> bool:
    return await node.holds() == expected


async def _is(reading: Any, expected: dict[str, str | None]) -> bool:
    return bool(await reading == expected)
