"""The containers of a node are what its kubelet said last, whatever becomes of the kubelet."""

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from producers.node import instruments as names
from producers.node import kubelet as module
from producers.node import podresources_pb2
from producers.node.kubelet import Kubelet, Undecodable, containers, failure
from producers.node.podresources_pb2 import ContainerDevices, ContainerResources, PodResources
from producers.records import containers_content
from tests.producers.fakes import FakeClock, value
from tests.producers.node.pod_resources import (
    Server,
    answer,
    claiming,
    container,
    dead,
    listening,
    many,
    pod,
    pods_on,
    serving,
)
from topics.allocations import Container
from topics.instruments import Instruments

ROOT = Path(__file__).parents[3]
NVIDIA = ("nvidia.com/",)
GPU_A, GPU_B = "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b", "GPU-1f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"


# -- the answer


def test_each_container_and_resource_is_a_row() -> None:
    said = answer(
        pod("bert-0", container("pytorch", gpus=[GPU_A, GPU_B]), container("sidecar")),
        pod("bert-1", container("pytorch", **{"nvidia.com/gpu.shared": [f"{GPU_A}::3"], "nvidia.com/gpu": [GPU_B]})),
    )
    assert containers(said, NVIDIA) == [
        {"namespace": "ml-team", "pod": "bert-0", "container": "pytorch", "resource": "nvidia.com/gpu"}
        | {"device_ids": [GPU_A, GPU_B]},
        {"namespace": "ml-team", "pod": "bert-1", "container": "pytorch", "resource": "nvidia.com/gpu.shared"}
        | {"device_ids": [f"{GPU_A}::3"]},
        {"namespace": "ml-team", "pod": "bert-1", "container": "pytorch", "resource": "nvidia.com/gpu"}
        | {"device_ids": [GPU_B]},
    ]


def test_devices_that_are_listed_by_numa_node_are_one_row_and_each_is_there_once() -> None:
    by_node = [ContainerDevices(resource_name="nvidia.com/gpu", device_ids=ids) for ids in ([GPU_B], [GPU_A, GPU_B])]
    said = answer(pod("bert-0", ContainerResources(name="main", devices=by_node)))
    assert [row["device_ids"] for row in containers(said, NVIDIA)] == [[GPU_B, GPU_A]]


def test_claims_are_a_row_of_their_own_without_a_resource() -> None:
    said = answer(
        pod("bert-0", claiming("main", "gpus", ("gpu.nvidia.com", "n", "gpu-1"), ("gpu.nvidia.com", "n", "gpu-0")))
    )
    claim = {"claim": "gpus", "namespace": "ml-team", "driver": "gpu.nvidia.com", "pool": "n"}
    assert containers(said, NVIDIA) == [
        {"namespace": "ml-team", "pod": "bert-0", "container": "main"}
        | {"claims": [{**claim, "device": "gpu-0"}, {**claim, "device": "gpu-1"}]}
    ]


@pytest.mark.parametrize(
    ("driver", "prefix", "counts"),
    [
        ("gpu.nvidia.com", "nvidia.com/", True),
        ("nvidia.com", "nvidia.com/", True),
        ("gpu.nvidia.com", "nvidia.com/gpu", True),
        ("gpu.notnvidia.com", "nvidia.com/", False),
        ("notnvidia.com", "nvidia.com/", False),
        ("nvidia.com.example.org", "nvidia.com/", False),
        ("gpu.amd.com", "nvidia.com/", False),
        ("", "nvidia.com/", False),
    ],
)
def test_a_claim_counts_if_its_driver_is_of_the_domain_of_a_prefix(driver: str, prefix: str, counts: bool) -> None:
    said = answer(pod("bert-0", claiming("main", "gpus", (driver, "n", "gpu-0"))))
    assert bool(containers(said, (prefix,))) is counts


def test_only_resources_of_the_prefixes_count() -> None:
    said = answer(pod("p", container("c", **{"amd.com/gpu": ["a"], "nvidia.com/gpu": [GPU_A], "rdma/hca": ["m"]})))
    assert [row["resource"] for row in containers(said, NVIDIA)] == ["nvidia.com/gpu"]
    assert [row["resource"] for row in containers(said, ("amd.com/gpu", "rdma/"))] == ["amd.com/gpu", "rdma/hca"]


def test_containers_without_devices_are_left_out() -> None:
    assert containers(answer(pod("p", container("c"), container("d", gpus=[])), pod("q")), NVIDIA) == []
    assert containers(b"", NVIDIA) == []


def test_what_a_newer_kubelet_says_beside_it_is_skipped() -> None:
    cpus_and_memory = b"\x1a\x02\x01\x02" + b"\x22\x02\x0a\x00"
    extra = ContainerResources.FromString(container(gpus=[GPU_A]).SerializeToString() + cpus_and_memory)
    assert containers(answer(pod("p", extra)) + b"\x9a\x06\x01x", NVIDIA) == containers(pods_on({GPU_A: "p"}), NVIDIA)


@pytest.mark.parametrize(
    "said",
    [
        answer(PodResources(name="", namespace="n", containers=[container(gpus=[GPU_A])])),
        answer(PodResources(name="p", namespace="", containers=[container(gpus=[GPU_A])])),
        answer(pod("p", container("", gpus=[GPU_A]))),
        answer(pod("p", claiming("", "gpus", ("gpu.nvidia.com", "n", "gpu-0")))),
    ],
)
def test_an_answer_with_devices_of_nobody_is_none(said: bytes) -> None:
    with pytest.raises(Undecodable, match="has no name"):
        containers(said, NVIDIA)


def test_names_are_needed_only_where_there_are_devices() -> None:
    assert containers(answer(pod("", container(""))), NVIDIA) == []


INVALID_UTF8 = pods_on({GPU_A: "bert-0"}).replace(b"bert-0", b"ber\xff-0")


@pytest.mark.parametrize("said", [b"\xff", b"hello", INVALID_UTF8, pods_on({GPU_A: "bert-0"})[:-1]])
def test_what_is_no_answer_is_said_to_be_none(said: bytes) -> None:
    with pytest.raises(Undecodable):
        containers(said, NVIDIA)


@given(st.binary() | st.builds(lambda cut: many(3)[cut:], st.integers(0, 100)))
def test_any_bytes_are_containers_or_undecodable(said: bytes) -> None:
    with contextlib.suppress(Undecodable):
        msgspec.convert(containers(said, NVIDIA), list[Container])


IDS = st.lists(st.sampled_from([GPU_A, GPU_B, "nvidia0", "x"]), max_size=3)
RESOURCES = st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "rdma/hca"])
NAMES = st.sampled_from(["a", "b"])


@given(st.lists(st.tuples(NAMES, NAMES, NAMES, RESOURCES, IDS)))
def test_every_device_is_in_the_row_of_its_holder_and_no_other(
    said: list[tuple[str, str, str, str, list[str]]],
) -> None:
    pods = [pod(p, container(c, **{r: ids}), namespace=n) for n, p, c, r, ids in said]
    rows = containers(answer(*pods), NVIDIA)

    held = {(n, p, c, r, i) for n, p, c, r, ids in said if r.startswith("nvidia.com/") for i in ids}
    found = [(r["namespace"], r["pod"], r["container"], r["resource"], i) for r in rows for i in r["device_ids"]]
    assert set(found) == held
    assert len(found) == len(held)
    assert len({row[:4] for row in found}) == len(rows)
    assert containers_content(rows) == containers_content(containers(answer(*reversed(pods)), NVIDIA))


# -- what an error means


@pytest.mark.parametrize(
    ("code", "text", "result"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", "unavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "deadline"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit", "rate_limited"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (6 vs. 4)", "too_large"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "grpc: trying to send message larger than max (6 vs. 4)", "too_large"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "out of something else", "refused"),
        (grpc.StatusCode.UNIMPLEMENTED, "unknown service v1.PodResourcesLister", "refused"),
        (grpc.StatusCode.PERMISSION_DENIED, "", "refused"),
        (grpc.StatusCode.INTERNAL, None, "refused"),
    ],
)
def test_each_error_has_its_result(code: grpc.StatusCode, text: str | None, result: str) -> None:
    found, reason = failure(code, text)
    assert found == result
    assert reason.startswith(code.name)


def test_what_a_server_says_of_its_error_is_one_line_of_bounded_length() -> None:
    _, reason = failure(grpc.StatusCode.UNKNOWN, "a\nb\r" + "x" * 10_000)
    assert reason.startswith("UNKNOWN: a b xxx")
    assert len(reason) < 400


# -- the kubelet


class Bench:
    """A Kubelet on a path, between a test's clock and a test's server."""

    def __init__(self, path: Path | None, **settings: Any) -> None:
        self.clock = FakeClock()
        self.instruments = Instruments(names.INSTRUMENTS)
        self.kubelet = Kubelet(path, self.instruments, clock=self.clock, **settings)

    async def pods(self, within_s: float = 10.0) -> list[str] | None:
        """The pods of the containers in force."""
        rows = await self.kubelet.read(within_s)
        return None if rows is None else [row["pod"] for row in rows]

    async def until(self, result: str, count: int = 1) -> list[str] | None:
        """Ticks until there were that many calls of that result (or, of some); gives the pods then in force."""
        async with asyncio.timeout(30):
            while True:
                pods = await self.pods(0.5)
                counted = self.counted()
                if sum(counted.get(one, 0) for one in result.split(" or ")) >= count:
                    return pods
                await asyncio.sleep(0.02)

    def counted(self) -> dict[str, float]:
        """The calls so far, by result."""
        found = {
            result: value(self.instruments, names.KUBELET_CALLS, result=result) for result in names.KUBELET_RESULTS
        }
        return {result: count for result, count in found.items() if count}

    def age_s(self) -> float:
        """What the gauge says."""
        return value(self.instruments, names.KUBELET_AGE)


@contextlib.asynccontextmanager
async def asking(path: Path | None, **settings: Any) -> AsyncIterator[Bench]:
    """A Kubelet that is closed at the end."""
    bench = Bench(path, **settings)
    try:
        yield bench
    finally:
        await bench.kubelet.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a kubelet's socket may come to be."""
    return tmp_path / "kubelet.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    """A kubelet with a pod."""
    with serving(path, pods_on({GPU_A: "bert-0"})) as running:
        yield running


async def test_where_no_kubelet_is_wanted_none_is_asked_or_missed() -> None:
    async with asking(None) as bench:
        assert await bench.kubelet.read(10.0) is None
        assert bench.kubelet.not_ready() == []
        assert bench.counted() == {}


async def test_each_read_gives_what_the_kubelet_says_then(path: Path, server: Server) -> None:
    async with asking(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.reply = pods_on({GPU_A: "bert-1", GPU_B: "bert-2"})
        assert await bench.pods() == ["bert-1", "bert-2"]
        server.reply = b""
        assert await bench.pods() == []
        assert bench.counted() == {"ok": 3}
        assert bench.kubelet.not_ready() == []


async def test_an_unchanged_answer_is_decoded_once(path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counting(said: bytes, prefixes: Sequence[str]) -> list[dict[str, Any]]:
        decoded.append(said)
        return containers(said, prefixes)

    monkeypatch.setattr(module, "containers", counting)
    async with asking(path) as bench:
        for _ in range(3):
            assert await bench.pods() == ["bert-0"]
        assert len(decoded) == 1


async def test_a_kubelet_that_comes_later_is_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with asking(path) as bench:
        for _ in range(3):
            assert await bench.pods() is None
            bench.clock.now_s += 100.0
        assert bench.counted() == {}
        missing = f"no kubelet at {path}: the socket is not there"
        assert bench.kubelet.not_ready() == [f"{missing} (it has not answered yet)"]
        assert caplog.messages == [missing]
        with serving(path, pods_on({GPU_A: "bert-0"})):
            assert await bench.until("ok") == ["bert-0"]
            assert bench.kubelet.not_ready() == []
        assert caplog.messages == [missing, "the kubelet answers"]


async def test_a_folder_that_is_missing_or_is_none_is_no_kubelet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere" / "kubelet.sock", tmp_path / "file" / "kubelet.sock"):
        async with asking(path) as bench:
            assert await bench.pods() is None
            assert bench.kubelet.not_ready()[0].startswith(f"no kubelet at {path}: ")
            assert bench.counted() == {}


async def test_a_kubelet_that_restarts_keeps_its_containers_and_is_asked_again(path: Path, server: Server) -> None:
    async with asking(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        dead(path)
        assert await bench.until("unavailable") == ["bert-0"]
        server.reply = pods_on({GPU_A: "bert-1"})
        server.start()
        assert await bench.until("ok", 2) == ["bert-1"]


async def test_containers_stay_while_the_socket_is_gone(path: Path, server: Server) -> None:
    async with asking(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        assert await bench.pods() == ["bert-0"]
        bench.clock.now_s += 29.0
        assert bench.kubelet.not_ready() == []
        bench.clock.now_s += 2.0
        assert await bench.pods() == ["bert-0"]
        assert bench.kubelet.not_ready() == [
            f"no kubelet at {path}: the socket is not there (it has not answered for 31 s)"
        ]
        assert bench.age_s() == 31.0


async def test_the_age_is_0_until_it_first_answers_and_after_each_answer(path: Path) -> None:
    async with asking(path) as bench:
        bench.clock.now_s += 5.0
        await bench.pods()
        assert bench.age_s() == 0.0
        with serving(path):
            await bench.until("ok")
            assert bench.age_s() == 0.0
        bench.clock.now_s += 5.0
        await bench.pods()
        assert bench.age_s() == 5.0


@pytest.mark.parametrize(
    "greeting",
    [
        None,
        b"",
        b"\0" * 100,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff" * 99,
    ],
    ids=["never accepts", "says nothing", "zeros", "another protocol", "HTTP/2, then not"],
)
async def test_what_is_no_kubelet_is_counted_and_healed_from(path: Path, greeting: bytes | None) -> None:
    async with asking(path, deadline_s=1.0) as bench:
        with listening(path, greeting):
            assert await bench.until("unavailable or deadline", 3) is None
            bench.clock.now_s += 31.0
            assert len(bench.kubelet.not_ready()) == 1
        with serving(path, pods_on({GPU_A: "bert-0"})):
            assert await bench.until("ok") == ["bert-0"]


async def test_a_socket_without_a_server_is_counted_and_healed_from(path: Path) -> None:
    async with asking(path) as bench:
        dead(path)
        assert await bench.until("unavailable", 3) is None
        assert "nobody answers" in bench.kubelet.not_ready()[0]
        with serving(path, pods_on({GPU_A: "bert-0"})):
            assert await bench.until("ok") == ["bert-0"]


@pytest.mark.parametrize("said", [b"\xff\xff", INVALID_UTF8, answer(pod("p", container("", gpus=[GPU_A])))])
async def test_an_answer_that_is_none_leaves_the_last_one_in_force(path: Path, server: Server, said: bytes) -> None:
    async with asking(path) as bench:
        assert await bench.pods() == ["bert-0"]
        good, server.reply = server.reply, said
        assert await bench.pods() == ["bert-0"]
        assert await bench.pods() == ["bert-0"]
        assert bench.counted() == {"ok": 1, "undecodable": 2}
        bench.clock.now_s += 31.0
        assert "can't be read" in bench.kubelet.not_ready()[0]
        server.reply = good
        assert await bench.pods() == ["bert-0"]
        assert bench.kubelet.not_ready() == []


async def test_an_answer_that_comes_after_the_tick_is_in_force_from_then_on(path: Path, server: Server) -> None:
    async with asking(path, deadline_s=60.0) as bench:
        assert await bench.pods() == ["bert-0"]
        server.delay_s, server.reply = 60.0, pods_on({GPU_A: "bert-1"})
        for _ in range(3):
            assert await bench.pods(0.05) == ["bert-0"]
        assert server.calls == 2
        server.release()
        async with asyncio.timeout(30):
            while await bench.pods(0.5) != ["bert-1"]:
                pass


async def test_a_tick_that_gets_a_late_answer_asks_for_a_new_one(path: Path, server: Server) -> None:
    async with asking(path, deadline_s=60.0) as bench:
        server.delay_s = 60.0
        assert await bench.pods(0.05) is None
        await server_has(server, calls=1)
        server.release()
        server.reply = pods_on({GPU_A: "bert-1"})
        assert await bench.pods() == ["bert-1"]
        assert bench.counted() == {"ok": 2}


async def test_a_read_that_is_given_up_leaves_its_call_alone(path: Path, server: Server) -> None:
    async with asking(path, deadline_s=60.0) as bench:
        server.delay_s = 60.0
        reading = asyncio.create_task(bench.pods())
        await server_has(server, calls=1)
        reading.cancel()
        await asyncio.wait([reading])
        server.release()
        assert await bench.pods() == ["bert-0"]
        assert server.calls == 2


async def test_a_kubelet_that_hangs_is_given_up_at_the_deadline_and_asked_again(path: Path, server: Server) -> None:
    async with asking(path, deadline_s=0.2) as bench:
        server.delay_s = 60.0
        assert await bench.until("deadline", 2) is None
        bench.clock.now_s += 31.0
        assert "does not answer in time" in bench.kubelet.not_ready()[0]
        server.release()
        assert await bench.until("ok") == ["bert-0"]


async def test_a_rate_limited_call_is_made_again_at_the_next_tick(path: Path, server: Server) -> None:
    async with asking(path) as bench:
        await bench.pods()
        server.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        server.reply = pods_on({GPU_A: "bert-1"})
        assert await bench.pods() == ["bert-0"]
        server.fail(None)
        assert await bench.pods() == ["bert-1"]
        assert bench.counted() == {"ok": 2, "rate_limited": 1}


async def test_an_answer_above_the_limit_is_asked_for_again_once_a_minute(
    path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(path, largest_answer_bytes=10_000) as bench:
        assert await bench.pods() == ["bert-0"]
        server.reply = many(200)
        assert len(server.reply) > 10_000
        for _ in range(60):
            assert await bench.pods() == ["bert-0"]
            bench.clock.now_s += 0.999
        assert bench.counted() == {"ok": 1, "too_large": 1}
        assert len(caplog.messages) == 1
        assert "larger than any node's should be" in caplog.messages[0]
        assert "larger than any node's should be" in bench.kubelet.not_ready()[0]
        server.reply = pods_on({GPU_A: "bert-1"})
        bench.clock.now_s += 1.0
        assert await bench.pods() == ["bert-1"]


async def test_an_answer_of_5_mb_is_read(path: Path) -> None:
    said = many(40_000)
    assert len(said) > 5_000_000
    with serving(path, said):
        async with asking(path, deadline_s=60.0) as bench:
            assert len(await bench.pods(60.0) or ()) == 40_000
            assert bench.counted() == {"ok": 1}


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
async def test_a_kubelet_that_refuses_is_asked_again_after_10_s(
    path: Path, server: Server, code: grpc.StatusCode
) -> None:
    async with asking(path) as bench:
        server.fail(code, "no")
        for _ in range(10):
            assert await bench.pods() is None
            bench.clock.now_s += 0.999
        assert bench.counted() == {"refused": 1}
        assert f"{code.name}: no" in bench.kubelet.not_ready()[0]
        server.fail(None)
        bench.clock.now_s += 1.0
        assert await bench.pods() == ["bert-0"]


async def test_a_kubelet_without_this_service_refuses(path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        async with asking(path) as bench:
            assert await bench.until("refused") is None
            assert "UNIMPLEMENTED" in bench.kubelet.not_ready()[0]
    finally:
        server.stop(0).wait()


async def test_one_that_wavers_is_spoken_of_once_a_minute_and_what_it_ends_as_is_said(
    path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with asking(path) as bench:
        for second in range(60):
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if second % 2 else None
            server.fail(code, "rejected by rate limit")
            await bench.pods()
            bench.clock.now_s += 0.99
        assert len(caplog.messages) == 2
        server.fail(None)
        for _ in range(10):
            bench.clock.now_s += 1.0
            await bench.pods()
        assert [message.startswith("the kubelet answers") for message in caplog.messages] == [True, False, True]


async def test_a_path_of_odd_characters_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a b%41?c#d.sock"
    with serving(path, pods_on({GPU_A: "bert-0"})):
        async with asking(path) as bench:
            assert await bench.pods() == ["bert-0"]


async def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    path.touch()
    async with asking(path) as bench:
        assert await bench.pods() is None
        assert bench.counted() == {"refused": 1}
        assert "Failed to create channel" in bench.kubelet.not_ready()[0]


async def test_the_loop_runs_on_while_the_kubelet_hangs_and_close_does_not_wait(path: Path, server: Server) -> None:
    server.delay_s = 60.0
    async with asking(path, deadline_s=60.0) as bench:
        reading = asyncio.create_task(bench.pods(60.0))
        await server_has(server, calls=1)
        assert await longest_gap_s(0.3) < 0.25
        began_s = time.monotonic()
        await bench.kubelet.close()
        assert time.monotonic() - began_s < 1.0
        reading.cancel()
        await asyncio.wait([reading])


# -- the process


SCENARIO = """
import asyncio, logging, sys, uvloop
from pathlib import Path
from producers.node import instruments
from producers.node.kubelet import Kubelet
from topics.instruments import Instruments

logging.disable()  # what is left on standard error is not ours

async def main():
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    kubelet = Kubelet(Path(sys.argv[1]), Instruments(instruments.INSTRUMENTS), deadline_s=60.0)
    while True:
        print(len(await kubelet.read(0.5) or ()), flush=True)
        if await asyncio.to_thread(sys.stdin.readline) == "end\\n":
            break
    if sys.argv[2] == "close":
        await kubelet.close()

uvloop.run(main())
"""


@pytest.mark.parametrize("end", ["close", "leave"])
def test_on_uvloop_a_stopped_kubelet_is_waited_out_and_the_process_ends(path: Path, end: str) -> None:
    with kubelet_process(path, 3) as kubelet, scenario(path, end) as asked:
        assert tick(asked) == "3"
        kubelet.send_signal(signal.SIGSTOP)
        assert tick(asked, "next") == "3"
        assert tick(asked, "next") == "3"
        out, err = asked.communicate("end\n", timeout=30)
        assert (asked.returncode, out, err) == (0, "", "")


def test_on_uvloop_a_kubelet_that_is_killed_is_found_again(path: Path) -> None:
    with scenario(path, "close") as asked:
        assert tick(asked) == "0"
        with kubelet_process(path, 3):
            asked_until(asked, "3")
        assert path.is_socket()
        assert tick(asked, "next") == "3"
        with kubelet_process(path, 4):
            asked_until(asked, "4")
        out, err = asked.communicate("end\n", timeout=30)
        assert (asked.returncode, out, err) == (0, "", "")


def asked_until(asked: "subprocess.Popen[str]", answer: str) -> None:
    for _ in range(100):
        if tick(asked, "next") == answer:
            return
        time.sleep(0.05)
    raise AssertionError(f"never {answer}")


def tick(asked: "subprocess.Popen[str]", line: str | None = None) -> str:
    assert asked.stdin is not None
    assert asked.stdout is not None
    if line is not None:
        asked.stdin.write(line + "\n")
        asked.stdin.flush()
    return asked.stdout.readline().strip()


@contextlib.contextmanager
def scenario(path: Path, end: str) -> "Iterator[subprocess.Popen[str]]":
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", SCENARIO, str(path), end], cwd=ROOT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def kubelet_process(path: Path, count: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "tests.producers.node.pod_resources", str(path), str(count)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            yield process
        finally:
            process.kill()


async def longest_gap_s(for_s: float) -> float:
    """The longest time that the event loop did nothing else for."""
    end_s, last_s, longest_s = time.monotonic() + for_s, time.monotonic(), 0.0
    while last_s < end_s:
        await asyncio.sleep(0.001)
        last_s, gap_s = time.monotonic(), time.monotonic() - last_s
        longest_s = max(longest_s, gap_s)
    return longest_s


async def server_has(server: Server, *, calls: int) -> None:
    await asyncio.to_thread(server.called, calls)


# -- the generated module


def test_the_generated_module_is_what_its_proto_says(tmp_path: Path) -> None:
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={tmp_path / 'set'}", str(PROTO)]) == 0
    compiled = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    for field in (field for message in compiled.file[0].message_type for field in message.field):
        field.ClearField("json_name")  # which modules go without
    assert list(compiled.file) == [
        descriptor_pb2.FileDescriptorProto.FromString(podresources_pb2.DESCRIPTOR.serialized_pb)
    ]


PROTO = ROOT / "producers" / "node" / "podresources.proto"


def test_the_oldest_protobuf_that_is_allowed_can_run_the_generated_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = next(found for found in map(Requirement, project["dependencies"]) if found.name == "protobuf")
    made_for = (PROTO.parent / "podresources_pb2.py").read_text().partition("Protobuf Python Version: ")[2].split()[0]
    assert made_for in allowed.specifier
    assert {one.version for one in allowed.specifier if one.operator == ">="} == {made_for}
