"""The containers of a node are those of the kubelet's last answer, whatever happens to the kubelet."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest

from delivery.clock import now_ms
from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node import kubelet as module
from producers.node.kubelet import SETTLED_AFTER_S, Kubelet, Result, call_failure, containers
from tests.eventually import eventually
from tests.producers.fakes import FakeClock, value
from tests.producers.node.pod_resources import (
    GPU_A,
    GPU_B,
    INVALID_UTF8,
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
    actual, reason = call_failure(code, text)
    assert actual == result
    assert reason.startswith(code.name)


def test_a_socket_that_may_not_be_connected_to_is_said_to_be_roots() -> None:
    """The text is that of grpc for a socket of another user."""
    details = "failed to connect to all addresses; last error: FAILED_PRECONDITION: unix:/s: error: Permission denied"

    result, reason = call_failure(grpc.StatusCode.UNAVAILABLE, details)

    assert result == "unavailable"
    assert reason.startswith("this process may not connect: it must run as root")


def test_the_text_of_a_servers_error_is_one_line_of_bounded_length() -> None:
    _, reason = call_failure(grpc.StatusCode.UNKNOWN, "a\nb\r" + "x" * 10_000)
    assert reason.startswith("UNKNOWN: a b xxx")
    assert len(reason) < 400


# -- the kubelet


class Bench:
    """A Kubelet on a path, with a fake clock and a fake server."""

    def __init__(self, path: Path | None, **settings: Any) -> None:
        self.clock = FakeClock()
        self.now_ms = 0
        self.instruments = Instruments(names.INSTRUMENTS)
        self.kubelet = Kubelet(path, self.instruments, clock=self.clock, now_ms=lambda: self.now_ms, **settings)

    async def pods(self, within_s: float = 10.0) -> list[str] | None:
        """The pods of the containers in force."""
        rows = await self.kubelet.read(within_s)
        return None if rows is None else [row["pod"] for row in rows]

    async def until(self, result: str, count: int = 1) -> list[str] | None:
        """Tick until ``count`` calls had this result (``a or b``: one of these). Returns the pods then in force."""
        pods: list[str] | None = None

        async def tick_and_check() -> bool:
            nonlocal pods
            pods = await self.pods(0.5)
            return sum(self.counted().get(name, 0) for name in result.split(" or ")) >= count

        await eventually(tick_and_check)
        return pods

    def pods_in_force(self, ts_ms: int) -> list[str] | None:
        """The pods of the containers that were in force at ``ts_ms``."""
        rows = self.kubelet.in_force(ts_ms)
        return None if rows is None else [row["pod"] for row in rows]

    def counted(self) -> dict[str, float]:
        """The calls so far, by result."""
        counts = {result: value(self.instruments, names.KUBELET_CALLS, result=result) for result in get_args(Result)}
        return {result: count for result, count in counts.items() if count}

    def age_s(self) -> float:
        """The age that the gauge reports."""
        return value(self.instruments, names.KUBELET_AGE)


@contextlib.asynccontextmanager
async def polling(path: Path | None, **settings: Any) -> AsyncIterator[Bench]:
    """A Kubelet that is closed at the end."""
    bench = Bench(path, **settings)
    try:
        yield bench
    finally:
        await bench.kubelet.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a kubelet's socket, which does not exist yet."""
    return tmp_path / "kubelet.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    """A kubelet with one pod."""
    with serving(path, pods_on({GPU_A: "bert-0"})) as running:
        yield running


async def test_without_a_kubelet_in_the_settings_none_is_called_or_missed() -> None:
    async with polling(None) as bench:
        assert await bench.kubelet.read(10.0) is None
        assert bench.kubelet.not_ready() == []
        assert bench.counted() == {}


async def test_each_read_returns_the_kubelets_current_answer(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.reply = pods_on({GPU_A: "bert-1", GPU_B: "bert-2"})
        assert await bench.pods() == ["bert-1", "bert-2"]
        server.reply = b""
        assert await bench.pods() == []
        assert bench.counted() == {"ok": 3}
        assert bench.kubelet.not_ready() == []


async def test_an_unchanged_answer_is_decoded_once(path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counting(payload: bytes, prefixes: tuple[str, ...]) -> list[dict[str, Any]]:
        decoded.append(payload)
        return containers(payload, prefixes)

    monkeypatch.setattr(module, "containers", counting)
    async with polling(path) as bench:
        for _ in range(3):
            assert await bench.pods() == ["bert-0"]
        assert len(decoded) == 1


@pytest.mark.parametrize(("count", "aside"), [(100, False), (5_000, True)])
async def test_a_large_answer_is_decoded_beside_the_loop(
    path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, count: int, aside: bool
) -> None:
    threads: list[int] = []

    def watched(payload: bytes, prefixes: tuple[str, ...]) -> list[dict[str, Any]]:
        threads.append(threading.get_ident())
        return containers(payload, prefixes)

    monkeypatch.setattr(module, "containers", watched)
    server.reply = many(count)
    async with polling(path) as bench:
        assert len(await bench.pods() or ()) == count
        assert [thread != threading.get_ident() for thread in threads] == [aside]


async def test_a_kubelet_that_starts_later_is_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with polling(path) as bench:
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


async def test_a_missing_folder_or_a_file_in_its_place_is_no_kubelet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere" / "kubelet.sock", tmp_path / "file" / "kubelet.sock"):
        async with polling(path) as bench:
            assert await bench.pods() is None
            assert bench.kubelet.not_ready()[0].startswith(f"no kubelet at {path}: ")
            assert bench.counted() == {}


async def test_a_kubelet_that_restarts_keeps_its_containers_and_is_called_again(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        dead(path)
        assert await bench.until("unavailable") == ["bert-0"]
        server.reply = pods_on({GPU_A: "bert-0", GPU_B: "bert-1"})
        server.start()
        assert await bench.until("ok", 2) == ["bert-0", "bert-1"]


async def test_after_a_restart_a_missing_container_has_ended_only_once_the_kubelet_has_settled(
    path: Path, server: Server
) -> None:
    async with polling(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        await bench.pods()
        server.reply = answer(pod("static"))
        server.start()
        assert await bench.until("ok", 2) == ["bert-0"]
        server.reply = pods_on({GPU_B: "bert-1"})
        bench.clock.now_s += SETTLED_AFTER_S - 0.1
        assert sorted(await bench.pods() or ()) == ["bert-0", "bert-1"]
        bench.clock.now_s += 0.1
        assert await bench.pods() == ["bert-1"]


async def test_a_kubelet_that_was_restarted_long_before_a_tick_is_believed_in_it(path: Path, server: Server) -> None:
    async with polling(path, interval_s=60.0) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        server.reply = answer(pod("static"))
        server.start()
        bench.now_ms = now_ms() + 50_000
        assert await bench.until("ok", 2) == []


async def test_after_a_restart_a_device_with_another_holder_is_believed_at_once(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        await bench.pods()
        server.reply = pods_on({GPU_A: "bert-1"})
        server.start()
        assert await bench.until("ok", 2) == ["bert-1"]


async def test_after_a_restart_a_device_that_several_containers_have_by_claims_keeps_those_that_are_not_listed_yet(
    path: Path, server: Server
) -> None:
    gpu_0, gpu_1 = (("gpu.nvidia.com", "n1", f"gpu-{i}") for i in (0, 1))
    monitor = pod("monitor", claiming("main", "monitor-gpus", gpu_0, gpu_1))
    train, share_a, share_b = (
        pod(name, claiming("main", claim, device))
        for name, claim, device in [("train", "one", gpu_0), ("share-a", "shared", gpu_1), ("share-b", "shared", gpu_1)]
    )
    async with polling(path) as bench:
        server.reply = answer(monitor, train, share_a, share_b)
        assert await bench.pods() == ["monitor", "train", "share-a", "share-b"]
        server.stop()
        await bench.pods()
        server.reply = answer(monitor, share_a)
        server.start()
        assert sorted(await bench.until("ok", 2) or ()) == ["monitor", "share-a", "share-b", "train"]
        server.reply = answer(monitor, share_a, pod("next", claiming("main", "two", gpu_0)))
        assert sorted(await bench.pods() or ()) == ["monitor", "next", "share-a", "share-b"]


async def test_after_a_restart_a_kubelet_that_has_its_pods_is_believed_at_once(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        assert await bench.pods() == ["bert-0"]
        server.stop()
        await bench.pods()
        server.reply = pods_on({GPU_B: "bert-0", GPU_A: "bert-1"})
        server.start()
        assert await bench.until("ok", 2) == ["bert-0", "bert-1"]


async def test_a_new_kubelet_is_called_whatever_the_last_one_refused(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        server.fail(grpc.StatusCode.UNIMPLEMENTED, "unknown service")
        assert await bench.until("refused") is None
        server.stop()
        server.fail(None)
        server.start()
        assert await bench.until("ok") == ["bert-0"]


async def test_containers_stay_while_the_socket_is_gone(path: Path, server: Server) -> None:
    async with polling(path) as bench:
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


async def test_a_node_that_is_read_every_minute_is_ready_between_its_readings(path: Path, server: Server) -> None:
    async with polling(path, interval_s=60.0) as bench:
        assert await bench.pods() == ["bert-0"]
        bench.clock.now_s += 59.0
        assert bench.kubelet.not_ready() == []
        bench.clock.now_s += 122.0
        assert bench.kubelet.not_ready() == [f"the kubelet at {path} has not answered for 181 s"]


async def test_the_age_is_0_until_it_first_answers_and_after_each_answer(path: Path) -> None:
    async with polling(path) as bench:
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
async def test_a_listener_that_is_no_kubelet_is_counted_and_later_a_kubelet_is_found(
    path: Path, greeting: bytes | None
) -> None:
    async with polling(path, deadline_s=1.0) as bench:
        with listening(path, greeting):
            assert await bench.until("unavailable or deadline", 3) is None
            bench.clock.now_s += 31.0
            assert len(bench.kubelet.not_ready()) == 1
        with serving(path, pods_on({GPU_A: "bert-0"})):
            assert await bench.until("ok") == ["bert-0"]


async def test_a_socket_without_a_server_is_counted_and_later_a_kubelet_is_found(path: Path) -> None:
    async with polling(path) as bench:
        dead(path)
        assert await bench.until("unavailable", 3) is None
        assert "no connection to the kubelet's socket" in bench.kubelet.not_ready()[0]
        with serving(path, pods_on({GPU_A: "bert-0"})):
            assert await bench.until("ok") == ["bert-0"]


@pytest.mark.parametrize("payload", [b"\xff\xff", INVALID_UTF8, answer(pod("p", container("", gpus=[GPU_A])))])
async def test_a_malformed_answer_leaves_the_last_one_in_force(path: Path, server: Server, payload: bytes) -> None:
    async with polling(path) as bench:
        assert await bench.pods() == ["bert-0"]
        good, server.reply = server.reply, payload
        assert await bench.pods() == ["bert-0"]
        assert await bench.pods() == ["bert-0"]
        assert bench.counted() == {"ok": 1, "undecodable": 2}
        bench.clock.now_s += 31.0
        assert "can't be read" in bench.kubelet.not_ready()[0]
        server.reply = good
        assert await bench.pods() == ["bert-0"]
        assert bench.kubelet.not_ready() == []


async def test_an_answer_that_comes_after_the_tick_is_in_force_from_then_on(path: Path, server: Server) -> None:
    async with polling(path, deadline_s=60.0) as bench:
        assert await bench.pods() == ["bert-0"]
        server.delay_s, server.reply = 60.0, pods_on({GPU_A: "bert-1"})
        for _ in range(3):
            assert await bench.pods(0.05) == ["bert-0"]
        assert server.calls == 2
        server.release()
        async with asyncio.timeout(30):
            while await bench.pods(0.5) != ["bert-1"]:
                pass


async def test_a_tick_that_gets_a_late_answer_makes_a_new_call(path: Path, server: Server) -> None:
    async with polling(path, deadline_s=60.0) as bench:
        server.delay_s = 60.0
        assert await bench.pods(0.05) is None
        await server_has(server, calls=1)
        server.release()
        server.reply = pods_on({GPU_A: "bert-1"})
        assert await bench.pods() == ["bert-1"]
        assert bench.counted() == {"ok": 2}


async def test_a_cancelled_read_does_not_cancel_its_call(path: Path, server: Server) -> None:
    async with polling(path, deadline_s=60.0) as bench:
        server.delay_s = 60.0
        reading = asyncio.create_task(bench.pods())
        await server_has(server, calls=1)
        reading.cancel()
        await asyncio.wait([reading])
        server.release()
        assert await bench.pods() == ["bert-0"]
        assert server.calls == 2


async def test_a_call_that_hangs_ends_at_the_deadline_and_is_made_again(path: Path, server: Server) -> None:
    async with polling(path, deadline_s=0.2) as bench:
        server.delay_s = 60.0
        assert await bench.until("deadline", 2) is None
        bench.clock.now_s += 31.0
        assert "does not answer in time" in bench.kubelet.not_ready()[0]
        server.release()
        assert await bench.until("ok") == ["bert-0"]


async def test_a_rate_limited_call_is_made_again_at_the_next_tick(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        await bench.pods()
        server.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        server.reply = pods_on({GPU_A: "bert-1"})
        assert await bench.pods() == ["bert-0"]
        server.fail(None)
        assert await bench.pods() == ["bert-1"]
        assert bench.counted() == {"ok": 2, "rate_limited": 1}


async def test_after_an_answer_above_the_limit_the_call_is_made_once_a_minute(
    path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with polling(path, largest_answer_bytes=10_000) as bench:
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


@pytest.mark.slow
async def test_an_answer_of_5_mb_is_read(path: Path) -> None:
    payload = many(40_000)
    assert len(payload) > 5_000_000
    with serving(path, payload):
        async with polling(path, deadline_s=60.0) as bench:
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
async def test_a_kubelet_that_refuses_is_called_again_after_10_s(
    path: Path, server: Server, code: grpc.StatusCode
) -> None:
    async with polling(path) as bench:
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
        async with polling(path) as bench:
            assert await bench.until("refused") is None
            assert "UNIMPLEMENTED" in bench.kubelet.not_ready()[0]
    finally:
        server.stop(0).wait()


async def test_changing_results_are_logged_once_a_minute_and_the_last_one_is_logged(
    path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with polling(path) as bench:
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


async def test_a_path_may_have_unusual_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b%41?c#d.sock"
    with serving(path, pods_on({GPU_A: "bert-0"})):
        async with polling(path) as bench:
            assert await bench.pods() == ["bert-0"]


async def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    path.touch()
    async with polling(path) as bench:
        assert await bench.pods() is None
        assert bench.counted() == {"refused": 1}
        assert "Failed to create channel" in bench.kubelet.not_ready()[0]


async def test_the_loop_runs_on_while_the_kubelet_hangs_and_close_does_not_wait(path: Path, server: Server) -> None:
    server.delay_s = 60.0
    async with polling(path, deadline_s=60.0) as bench:
        reading = asyncio.create_task(bench.pods(60.0))
        await server_has(server, calls=1)
        assert await longest_gap_s(0.3) < 10.0
        call, began_s = bench.kubelet._call, time.monotonic()
        await bench.kubelet.close()
        assert time.monotonic() - began_s < 10.0
        assert call is not None
        assert call.cancelled()
        reading.cancel()
        await asyncio.wait([reading])


async def longest_gap_s(for_s: float) -> float:
    """The longest time for which the event loop was blocked, in seconds."""
    end_s, last_s, longest_s = time.monotonic() + for_s, time.monotonic(), 0.0
    while last_s < end_s:
        await asyncio.sleep(0.001)
        last_s, gap_s = time.monotonic(), time.monotonic() - last_s
        longest_s = max(longest_s, gap_s)
    return longest_s


async def server_has(server: Server, *, calls: int) -> None:
    await asyncio.to_thread(server.called, calls)


# -- the holders at an earlier time


async def test_the_containers_in_force_at_an_earlier_time_can_be_read(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        assert bench.pods_in_force(0) is None
        for bench.now_ms, pod_name in ((10_000, "a"), (20_000, "a"), (30_000, "b")):
            server.reply = pods_on({GPU_A: pod_name})
            assert await bench.pods() == [pod_name]

    assert [bench.pods_in_force(ts_ms) for ts_ms in (10_000, 15_000, 20_000, 28_000)] == [["a"]] * 4, "b came 2 s later"
    assert [bench.pods_in_force(ts_ms) for ts_ms in (29_500, 30_000, 31_000)] == [["b"]] * 3
    assert bench.pods_in_force(5_000) == ["a"], "the first known containers"


async def test_an_answer_soon_after_an_event_has_the_holders_at_the_event(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        for bench.now_ms, pod_name in ((10_000, "a"), (15_003, "came at 12"), (20_000, "came at 17")):
            server.reply = pods_on({GPU_A: pod_name})
            await bench.pods()

    assert bench.pods_in_force(15_000) == ["came at 12"]


async def test_after_a_clock_was_set_back_only_later_answers_count(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        for bench.now_ms, pod_name in ((10_000, "a"), (5_000, "b")):
            server.reply = pods_on({GPU_A: pod_name})
            await bench.pods()

    assert [bench.pods_in_force(ts_ms) for ts_ms in (4_000, 5_000, 11_000)] == [["b"]] * 3


async def test_all_reads_during_a_call_share_the_next_one(path: Path, server: Server) -> None:
    async with polling(path) as bench:
        await asyncio.gather(bench.pods(), bench.pods(), bench.pods())

    assert bench.counted() == {"ok": 2}
