"""A listener gets what the API server has, whatever the server does meanwhile."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from delivery.instruments import Instruments
from delivery.kubernetes import client
from delivery.kubernetes.client import ApiHealth, Client, message
from producers.cluster import instruments as names
from producers.cluster import reflector as module
from producers.cluster.objects import Identity, decode
from producers.cluster.reflector import Reflector, Restart, rbac_rule
from tests.eventually import eventually
from tests.producers.cluster.api_server import (
    ApiServer,
    Behaviour,
    Json,
    Reply,
    Request,
    answers,
    event,
    hang,
    kubeconfig,
    list_end,
    status_object,
    streams,
)
from tests.producers.cluster.recording_listener import RecordingListener
from tests.producers.fakes import value

PODS = "/api/v1/pods"


def pod(name: str, **spec: Any) -> Json:
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec}


def versioned(name: str, version: int | str) -> Json:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


class Bench:
    """A watch of a server's pods, and the listener that records its calls."""

    def __init__(self, server: ApiServer, api: Client, instruments: Instruments, **settings: Any) -> None:
        self.server, self.api, self.instruments, self.listener = server, api, instruments, RecordingListener()
        self.watch = Reflector(api, PODS, self.listener, instruments, name="pods", **settings)
        self.task = asyncio.create_task(self.watch.run())

    def restarts(self, reason: str) -> float:
        return value(self.instruments, names.RESTARTS, resource="pods", reason=reason)

    def events(self, kind: str) -> float:
        return value(self.instruments, names.EVENTS, resource="pods", type=kind)

    async def until(self, condition: Callable[[], bool]) -> None:
        await eventually(condition, unless=self.task)

    async def until_objects(self, *names: str) -> None:
        await self.until(lambda: set(self.listener.objects) == set(names) and self.watch.synced)

    async def watching(self) -> None:
        await self.until(lambda: self.server.watchers(PODS) == 1)

    async def slows_down(self, reason: str) -> None:
        """Asserts that the fifth restart comes after waits of at least 0.05, 0.05, 0.1 and 0.2 s."""
        began_s = asyncio.get_running_loop().time()
        await self.until(lambda: self.restarts(reason) >= 5)
        assert asyncio.get_running_loop().time() - began_s >= 0.4


Start = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(objects={PODS: {}}) as running:
        yield running


@pytest.fixture
async def start(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a watch of the server; waits are short unless a test sets others."""
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    config = tmp_path / "config"
    config.write_text(kubeconfig(server.url, {"token": "t"}))
    async with contextlib.AsyncExitStack() as stack:

        async def begin(**settings: Any) -> Bench:
            instruments = Instruments(names.INSTRUMENTS)
            api = Client(config, partial(instruments.counter, names.API_REQUESTS))
            await api.start()
            stack.push_async_callback(api.close)
            bench = Bench(server, api, instruments, **settings)
            stack.push_async_callback(ended, bench.task)
            return bench

        yield begin


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


# -- lists


async def test_a_listener_gets_what_exists_and_each_addition_change_and_removal(
    server: ApiServer, start: Start
) -> None:
    server.put(PODS, pod("a", n=1))
    bench = await start()
    await bench.until_objects("a")
    await bench.watching()
    server.put(PODS, pod("b"))
    server.put(PODS, pod("a", n=2))
    await bench.until(lambda: bench.listener.objects["a"]["spec"] == {"n": 2})
    server.delete(PODS, "a")
    await bench.until_objects("b")
    assert bench.listener.calls == ["begin", "put a", "complete", "put b", "put a", "remove a"]
    assert (bench.events("ADDED"), bench.events("MODIFIED"), bench.events("DELETED")) == (2, 1, 1)
    assert bench.watch.not_ready() == []


async def test_a_streaming_list_asks_for_its_end_and_a_watch_goes_on_from_there(
    server: ApiServer, start: Start
) -> None:
    server.put(PODS, pod("a"))
    bench = await start()
    await bench.watching()
    await server.drop()
    await bench.until(lambda: len(server.requests) == 2)
    first, second = server.requests
    assert first.params["sendInitialEvents"] == "true"
    assert first.params["resourceVersionMatch"] == "NotOlderThan"
    assert "resourceVersion" not in first.params
    assert second.params["resourceVersion"] == str(server.version)
    for request in (first, second):
        assert request.params["allowWatchBookmarks"] == "true"
        assert 240 <= int(request.params["timeoutSeconds"]) <= 480


async def test_nothing_is_ready_before_the_end_of_the_list(server: ApiServer, start: Start) -> None:
    server.next(streams(event("ADDED", versioned("a", 5)), ends_with="hang"))
    bench = await start()
    await bench.until(lambda: "a" in bench.listener.objects)
    assert not bench.watch.synced
    assert bench.watch.not_ready() == ["pods: the list is not complete yet"]


async def test_a_bookmark_in_a_list_is_not_its_end(server: ApiServer, start: Start) -> None:
    bookmark = event("BOOKMARK", {"metadata": {"resourceVersion": "6", "annotations": {"other": "true"}}})
    server.next(streams(event("ADDED", versioned("a", 5)), bookmark, event("ADDED", versioned("b", 7)), list_end(8)))
    bench = await start()
    await bench.until(lambda: bench.listener.lists == 1)
    assert bench.listener.calls[:4] == ["begin", "put a", "put b", "complete"]


async def test_a_watch_never_continues_from_a_version_of_a_lists_own_events(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("kept"))
    server.next(streams(event("ADDED", versioned("a", 999_999)), ends_with="reset"))
    bench = await start()
    await bench.until_objects("kept")
    assert "resourceVersion" not in server.requests[1].params


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_without_streaming_lists_is_listed_in_pages(
    server: ApiServer, start: Start, status: int
) -> None:
    server.streaming, server.page_size = False, 2
    for index in range(5):
        server.put(PODS, pod(f"p{index}"))
    server.next(
        answers(status, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
    )
    bench = await start()
    await bench.until_objects(*(f"p{index}" for index in range(5)))
    await bench.watching()
    server.put(PODS, pod("later"))
    await bench.until(lambda: "later" in bench.listener.objects)
    assert [request.params.get("limit") for request in server.requests] == [None, "500", "500", "500", None]
    assert all("resourceVersion" not in request.params for request in server.requests[:4])
    assert bench.events("listed") == 5
    assert bench.restarts("unsupported") == 1
    assert bench.listener.calls[0] == "begin"


async def test_a_server_without_resource_version_match_is_listed_in_pages(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("a"))
    server.next(answers(422, "resourceVersionMatch is forbidden for watch"))
    bench = await start()
    await bench.until_objects("a")
    assert bench.events("listed") == 1


async def test_if_a_page_is_too_large_for_the_memory_the_list_begins_again_with_smaller_ones(
    server: ApiServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 4)
    monkeypatch.setattr(module, "LARGEST_PAGE_BYTES", 2500)
    server.streaming = False
    for index in range(5):
        server.put(PODS, pod(f"p{index}", text="x" * 1000))
    bench = await start()
    await bench.until_objects(*(f"p{index}" for index in range(5)))
    limits = [request.params["limit"] for request in server.requests if "limit" in request.params]
    assert limits == ["4", "2", "2", "2"]
    assert bench.restarts("cut") == 1


async def test_a_page_that_expired_begins_the_list_again(server: ApiServer, start: Start) -> None:
    server.streaming, server.page_size = False, 1
    server.put(PODS, pod("a"))
    server.put(PODS, pod("b"))

    async def first_page_then_gone(request: Request, reply: Reply) -> None:
        server.next(answers(410, "The provided continue parameter is too old"))
        await reply.answer(
            200, {"metadata": {"resourceVersion": "7", "continue": "1"}, "items": [versioned("gone", 3)]}
        )

    server.next(answers(422, "sendInitialEvents"), first_page_then_gone)
    bench = await start()
    await bench.until_objects("a", "b")
    assert bench.restarts("expired") == 1
    assert bench.listener.lists == 1


async def test_a_streaming_list_that_never_ends_is_replaced_by_pages(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("a"))

    async def endless(request: Request, reply: Reply) -> None:
        await reply.begin()
        for number in range(1_000_000):
            await reply.event("ADDED", versioned(f"x{number}", number))
            await asyncio.sleep(0.02)

    server.next(endless)
    bench = await start(list_within_s=0.3)
    await bench.until_objects("a")
    assert bench.restarts("slow") == 1
    assert bench.events("listed") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>ok</html>",
        b"{}",
        b'{"metadata": {}, "items": []}',
        b'{"metadata": {"resourceVersion": ""}, "items": []}',
    ],
)
async def test_a_page_that_is_none_is_asked_for_again(server: ApiServer, start: Start, body: bytes) -> None:
    server.put(PODS, pod("a"))

    async def garbage(request: Request, reply: Reply) -> None:
        await reply.answer(200, body)

    server.next(answers(422, "sendInitialEvents"), garbage)
    bench = await start()
    await bench.until_objects("a")
    assert bench.restarts("garbage") == 1


@pytest.mark.parametrize("pages", [False, True])
async def test_an_object_that_is_nested_deeper_than_python_reads_is_listed_and_watched(
    server: ApiServer, start: Start, monkeypatch: pytest.MonkeyPatch, pages: bool
) -> None:
    names_put: list[str] = []
    identity = msgspec.json.Decoder(Identity)
    put = lambda _, raw: names_put.append(decode(identity, raw).metadata.name)  # noqa: E731 - in place of a method
    monkeypatch.setattr(RecordingListener, "put", put)

    def deep(name: str, version: int) -> bytes:
        metadata = {"name": name, "uid": name, "resourceVersion": str(version)}
        nested = b"[" * 50_000 + b"]" * 50_000
        return b'{"metadata": ' + json.dumps(metadata).encode() + b', "spec": ' + nested + b"}"

    async def page(request: Request, reply: Reply) -> None:
        await reply.answer(200, b'{"metadata": {"resourceVersion": "6"}, "items": [' + deep("a", 5) + b"]}")

    line = b'{"type": "ADDED", "object": %s}\n'
    later = line % deep("b", 7)
    if pages:
        server.next(answers(422, "sendInitialEvents"), page, streams(later, ends_with="hang"))
    else:
        server.next(streams(line % deep("a", 5), list_end(6), later, ends_with="hang"))
    bench = await start()
    await bench.until(lambda: names_put == ["a", "b"])
    assert bench.restarts("garbage") == 0


# -- going on


async def test_what_went_while_nobody_watched_is_gone_after_the_next_list(server: ApiServer, start: Start) -> None:
    for name in ("a", "b"):
        server.put(PODS, pod(name))
    bench = await start()
    await bench.until_objects("a", "b")
    await bench.watching()
    await server.stop()
    del server.objects[PODS]["a"]
    server.next(streams(event("ERROR", status_object(410, "too old resource version: 5 (7)"))))
    await server.start()
    await bench.until_objects("b")
    assert bench.restarts("expired") == 1
    assert bench.listener.lists == 2


@pytest.mark.parametrize(
    "expired",
    [
        answers(410, "Expired"),
        streams(event("ERROR", status_object(410, "too old resource version"))),
        streams(event("ERROR", {"kind": "Status", "code": 410, "reason": "Gone"})),
    ],
)
async def test_gone_in_any_form_lists_again(server: ApiServer, start: Start, expired: Behaviour) -> None:
    bench = await start()
    await bench.watching()
    server.next(expired)
    await server.drop()
    await bench.until(lambda: bench.listener.lists == 2)
    assert bench.restarts("expired") == 1
    assert "resourceVersion" not in server.requests[-1].params


async def test_bookmarks_move_on_where_it_goes_on_from(server: ApiServer, start: Start) -> None:
    bench = await start()
    await bench.watching()
    server.notify(PODS, "BOOKMARK", {"metadata": {"resourceVersion": "opaque-7", "annotations": None}, "spec": None})
    await bench.until(lambda: bench.events("BOOKMARK") == 2)
    await server.drop()
    await bench.until(lambda: len(server.requests) == 2)
    assert server.requests[-1].params["resourceVersion"] == "opaque-7"
    assert bench.listener.calls == ["begin", "complete"]


async def test_an_event_of_an_unknown_type_is_counted_and_ignored(server: ApiServer, start: Start) -> None:
    bench = await start()
    await bench.watching()
    server.notify(PODS, "SPLIT", {"no": "metadata"})
    server.put(PODS, pod("a"))
    await bench.until_objects("a")
    assert bench.events("other") == 1
    assert bench.listener.lists == 1


async def test_a_line_may_come_in_any_pieces(server: ApiServer, start: Start) -> None:
    lines = event("ADDED", versioned("a", 5)) + b"\n" + event("ADDED", versioned("b", 6)) + list_end(7)
    pieces = [lines[n : n + 3] for n in range(0, len(lines), 3)]
    server.next(streams(*pieces, ends_with="hang"))
    bench = await start()
    await bench.until_objects("a", "b")
    assert bench.events("ADDED") == 2


async def test_a_line_of_six_megabytes_is_read_like_any_other(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("large", text="<" * 6_000_000))
    bench = await start()
    await bench.until_objects("large")
    await bench.watching()
    server.put(PODS, pod("large", text="<" * 6_000_001))
    await bench.until(lambda: bench.events("MODIFIED") == 1)
    assert bench.listener.lists == 1


async def test_an_object_whose_line_is_too_long_is_listed_in_a_page(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("large"))
    server.put(PODS, pod("small"))
    bench = await start(largest_line_bytes=10_000)
    await bench.until_objects("large", "small")
    await bench.watching()
    server.put(PODS, pod("large", text="x" * 20_000))
    server.put(PODS, pod("next"))
    await bench.until_objects("large", "small", "next")
    assert bench.listener.objects["large"]["spec"] == {"text": "x" * 20_000}
    assert (bench.restarts("too_long"), bench.events("too_long")) == (1, 1)


async def test_no_object_is_missing_in_a_list_because_its_line_is_too_long(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("large", text="x" * 20_000))
    server.put(PODS, pod("small"))
    bench = await start(largest_line_bytes=10_000)
    await bench.until_objects("large", "small")
    server.put(PODS, pod("next"))
    await bench.until_objects("large", "small", "next")
    assert bench.restarts("too_long") == 1


# -- errors


@pytest.mark.parametrize(
    ("error_behaviour", "reason"),
    [
        (answers(401, "Unauthorized"), "unauthorized"),
        (answers(403, "forbidden"), "forbidden"),
        (answers(404, "not found"), "absent"),
        (answers(429, "slow down"), "throttled"),
        (answers(500, "etcdserver: leader changed"), "server_error"),
        (answers(503), "server_error"),
        (answers(504, "Too large resource version"), "server_error"),
        (answers(302, Location="http://127.0.0.1:1/"), "refused"),
        (answers(400, "limit: Invalid value"), "refused"),
        (streams(), "empty"),
        (streams(b"\n\n\n"), "empty"),
        (streams(event("ADDED", versioned("half", 5))), "empty"),
        (streams(b"<html>\n<body>502 Bad Gateway</body>\n</html>\n"), "garbage"),
        (streams(b'{"kind": "PodList", "items": []}\n'), "garbage"),
        (streams(b"[1, 2]\n"), "garbage"),
        (streams(b'"\xff\xfe"\n'), "garbage"),
        (streams(b'{"type": "\xff", "object": {}}\n'), "garbage"),
        (streams(b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "\xff"}}}\n'), "garbage"),
        (streams(b'{"type": "BOOKMARK", "object": {"metadata": {}}}\n'), "garbage"),
        (streams(b'{"type": "BOOKMARK", "object": null}\n'), "garbage"),
        (streams(b'{"type": "ADDED", "obj'), "cut"),
        (streams(event("ADDED", versioned("half", 5)), ends_with="reset"), "connection"),
        (streams(ends_with="hang"), "timeout"),
        (hang, "timeout"),
        (streams(event("ERROR", status_object(500, "internal"))), "server_error"),
        (streams(event("ERROR", {})), "refused"),
        (streams(b'{"type": "ERROR", "object": 7}\n'), "garbage"),
    ],
)
async def test_an_error_at_the_start_is_counted_and_then_the_list_is_read(
    server: ApiServer, start: Start, error_behaviour: Behaviour, reason: str
) -> None:
    server.put(PODS, pod("a"))
    server.next(error_behaviour)
    bench = await start(silence_s=1.0)
    await bench.until_objects("a")
    assert bench.restarts(reason) == 1


@pytest.mark.parametrize(
    ("error_behaviour", "reason"),
    [
        (b"garbage\n", "garbage"),
        (b'{"type": "MODIFIED", "object": {"metadata": {}}}\n', "garbage"),
        (b'{"type": "MODIFIED", "object": {"metadata": {"resourceVersion": 7}}}\n', "garbage"),
        (event("ERROR", status_object(500, "internal")), "server_error"),
        (b'{"type": "MODI', "cut"),
    ],
)
async def test_an_error_after_the_list_loses_nothing(
    server: ApiServer, start: Start, error_behaviour: bytes, reason: str
) -> None:
    server.put(PODS, pod("a"))
    server.next(streams(event("ADDED", versioned("a", 5)), list_end(6), error_behaviour))
    bench = await start()
    await bench.until(lambda: bench.restarts(reason) == 1)
    server.put(PODS, pod("b"))
    await bench.until(lambda: "a" in bench.listener.objects)
    assert bench.watch.synced
    await bench.watching()
    server.put(PODS, pod("c"))
    await bench.until(lambda: "c" in bench.listener.objects)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error_behaviour", [answers(503), answers(403), answers(401), hang, streams(b"<html>\n"), streams()]
)
async def test_objects_are_kept_while_the_api_server_fails(
    server: ApiServer, start: Start, error_behaviour: Behaviour
) -> None:
    server.put(PODS, pod("a"))
    bench = await start(silence_s=1.0)
    await bench.until_objects("a")
    await bench.watching()
    server.next(error_behaviour, error_behaviour)
    await server.drop()
    await bench.until(lambda: server.faults_left == 0)
    assert set(bench.listener.objects) == {"a"}
    server.put(PODS, pod("b"))
    await bench.until(lambda: server.watchers(PODS) >= 1)
    server.put(PODS, pod("c"))
    await bench.until(lambda: "c" in bench.listener.objects)


async def test_a_server_that_is_away_is_found_when_it_comes_back(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("a"))
    bench = await start()
    await bench.until_objects("a")
    await bench.watching()
    await server.stop()
    await bench.until(lambda: bench.restarts("connection") >= 3)
    assert set(bench.listener.objects) == {"a"}
    await server.start()
    await bench.watching()
    server.put(PODS, pod("b"))
    await bench.until_objects("a", "b")
    assert bench.listener.lists == 1


@pytest.mark.slow
async def test_a_watch_without_its_bookmark_starts_again_with_a_new_list(server: ApiServer, start: Start) -> None:
    bench = await start(silence_s=1.0)
    await bench.watching()
    server.next(streams(ends_with="hang"))  # as a server does that does not have that version yet, or never will
    await server.drop()
    await bench.until(lambda: bench.listener.lists == 2)
    assert bench.restarts("timeout") >= 1


@pytest.mark.slow
async def test_retry_after_is_waited_for(server: ApiServer, start: Start) -> None:
    server.next(answers(429, "slow down", Retry_After="2"))
    bench = await start()
    await bench.until(lambda: bench.restarts("throttled") == 1)
    began = asyncio.get_running_loop().time()
    await bench.watching()
    assert asyncio.get_running_loop().time() - began >= 1.9


@pytest.mark.slow
async def test_a_server_that_closes_at_once_is_not_queried_in_a_loop(
    server: ApiServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.1)
    server.next(*[streams()] * 1000)
    await (await start()).slows_down("empty")


@pytest.mark.slow
async def test_a_page_that_names_itself_as_the_next_one_is_not_read_in_a_loop(
    server: ApiServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page(request: Request, reply: Reply) -> None:
        await reply.answer(200, {"metadata": {"resourceVersion": "7", "continue": "1"}, "items": [versioned("a", 3)]})

    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.1)
    server.next(answers(422, "sendInitialEvents"), *[page] * 10_000)
    bench = await start()
    await bench.slows_down("garbage")
    assert not bench.watch.synced


@pytest.mark.slow
async def test_lists_that_expire_at_once_are_not_read_in_a_loop(
    server: ApiServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.1)
    server.next(*[streams(list_end(5), event("ERROR", status_object(410)))] * 1000)
    await (await start()).slows_down("expired")


async def test_waits_double_up_to_30_s_and_start_again_after_a_success(start: Start) -> None:
    bench = await start()
    await ended(bench.task)
    waits = [bench.watch.prepare_restart(Restart("connection", "")) for _ in range(16)]
    assert waits[0] <= 0.01
    assert all(15 <= wait <= 30 for wait in waits[-3:])
    bench.watch._healthy_since_s = asyncio.get_running_loop().time() - 10
    assert bench.watch.prepare_restart(Restart("ended", "")) <= 0.01


async def test_after_an_outage_an_expired_version_is_listed_again_at_once_but_only_once(
    start: Start,
) -> None:
    bench = await start()
    await ended(bench.task)
    outage = [bench.watch.prepare_restart(Restart("connection", "")) for _ in range(16)]
    waits_s = [bench.watch.prepare_restart(Restart("expired", "", relist=True)) for _ in range(3)]
    assert outage[-1] >= 15
    assert waits_s[0] <= module.FIRST_WAIT_S
    assert all(wait >= 15 for wait in waits_s[1:])


async def test_an_exception_of_the_listener_ends_the_watch(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("a"))
    bench = await start()
    await bench.until_objects("a")

    def fail(raw: bytes) -> None:
        raise ValueError("a bug")

    bench.listener.remove = fail  # type: ignore[method-assign]
    await bench.watching()
    server.delete(PODS, "a")
    with pytest.raises(ValueError, match="a bug"):
        await bench.task


# -- what is logged


async def test_a_403_says_which_rule_is_missing(
    server: ApiServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server.next(*[answers(403, 'pods is forbidden: User "u" cannot list resource "pods"')] * 100)
    bench = await start()
    await bench.until(lambda: bench.restarts("forbidden") >= 3)
    (reason,) = bench.watch.not_ready()
    assert '{apiGroups: [""], resources: [pods], verbs: [list, watch]}' in reason
    assert 'User "u" cannot list' in reason
    logged = [record for record in caplog.records if record.name == module.__name__]
    assert len(logged) == 1, "once, not at every attempt"
    assert logged[0].levelno == logging.WARNING


def test_a_recovery_is_logged_however_recently_the_last_one_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pods = ApiHealth("pods", logging.getLogger("test"))
    pods.bad("timeout", "no answer within 10 s")
    pods.good("watching")
    pods.bad("unauthorized", "our credentials are not accepted (401)")
    pods.good("watching")
    pods.bad("timeout", "no answer within 10 s")
    pods.good("watching")

    assert caplog.messages == [
        "pods: no answer within 10 s",
        "pods: watching",
        "pods: our credentials are not accepted (401)",
        "pods: watching",
    ]


async def test_a_recovery_is_logged_and_so_is_an_error_that_differs_from_the_last(
    server: ApiServer, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEALTHY_AFTER_S", 0.1)
    caplog.set_level(logging.INFO)
    server.next(answers(403), answers(403), answers(503), answers(503))
    bench = await start()
    await bench.watching()

    def states() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == module.__name__]
        return [line.split(";")[0].split(":")[1].strip() for line in lines]

    await bench.until(lambda: "watching" in states())
    assert states() == ["not allowed (403)", "the API server fails (503)", "watching"]


async def test_a_connection_that_is_back_at_once_is_not_logged(
    server: ApiServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start()
    await bench.watching()
    await server.drop()
    await bench.until(lambda: len(server.requests) == 2)
    await bench.watching()
    assert [record for record in caplog.records if record.name == module.__name__ and record.levelno > 20] == []
    assert bench.restarts("connection") == 1


async def test_an_outage_of_30_s_is_not_ready(start: Start, monkeypatch: pytest.MonkeyPatch, server: ApiServer) -> None:
    bench = await start()
    await bench.watching()
    await server.stop()
    await bench.until(lambda: bench.restarts("connection") >= 2)
    assert bench.watch.not_ready() == []
    monkeypatch.setattr(client, "UNREADY_AFTER_S", -1.0)
    (reason,) = bench.watch.not_ready()
    assert reason.startswith("pods: ClientConnectorError: ")


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (streams(), "the watch ended as soon as it began"),
        (streams(event("ERROR", status_object(500, "etcd is away"))), "the API server fails (500): etcd is away"),
    ],
)
async def test_a_server_that_ends_every_watch_at_once_is_a_problem_until_one_lasts(
    server: ApiServer,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends: Behaviour,
    why: str,
) -> None:
    monkeypatch.setattr(module, "HEALTHY_AFTER_S", 0.5)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(client, "UNREADY_AFTER_S", 0.3)
    server.next(streams(list_end(5)), *[ends] * 1000)
    bench = await start()
    await bench.until(lambda: bench.watch.synced and bench.watch.not_ready() != [])
    assert f"pods: {why} (for " in bench.watch.not_ready()[0]
    assert [record.getMessage() for record in caplog.records if record.levelno > 20] == [f"pods: {why}"]
    server.mend()
    await bench.until(lambda: bench.watch.not_ready() == [])
    await bench.watching()


async def test_a_restored_server_behind_a_balancer_that_cuts_what_is_silent_is_listed_again(
    server: ApiServer, start: Start
) -> None:
    async def silent(request: Request, reply: Reply) -> None:
        await reply.begin()
        await asyncio.sleep(0.5)
        await reply.end()

    server.next(streams(list_end(5)), silent, silent)
    bench = await start(silence_s=1.0)
    server.put(PODS, pod("a"))
    await bench.until_objects("a")
    lists = [request.lists for request in server.requests]
    assert (lists[:2], lists[-1]) == ([True, False], True)  # on a busy machine the first watch may last long enough


async def test_an_optional_resource_that_is_missing_is_an_empty_one(server: ApiServer, start: Start) -> None:
    server.next(answers(404, "the server could not find the requested resource"))
    bench = await start(optional=True)
    await bench.until(lambda: bench.watch.synced)
    assert bench.listener.calls == ["begin", "complete"]
    assert bench.watch.not_ready() == []
    assert len(server.requests) == 1


async def test_a_missing_resource_is_looked_for_under_its_older_version(server: ApiServer, start: Start) -> None:
    older = "/apis/older/v1/pods"
    server.next(answers(404))
    server.put(older, pod("a"))
    bench = await start(optional=True, older=(older,))
    await bench.until_objects("a")
    assert [request.path.split("?")[0] for request in server.requests][:2] == [PODS, older]


async def test_an_optional_resource_may_appear_later_and_disappear_again(
    server: ApiServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABSENT_WAIT_S", 0.05)
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.0)
    server.next(answers(404), answers(404))
    server.put(PODS, pod("a"))
    bench = await start(optional=True)
    await bench.until_objects("a")
    await bench.watching()
    server.next(answers(404))
    await server.drop()
    await bench.until(lambda: bench.listener.objects == {})
    await bench.until_objects("a")
    assert bench.listener.calls == ["begin", "complete"] * 2 + ["begin", "put a", "complete"] + [
        "begin",
        "complete",
        "begin",
        "put a",
        "complete",
    ]


async def test_a_404_for_a_moment_drops_nothing_of_an_optional_resource(server: ApiServer, start: Start) -> None:
    server.put(PODS, pod("a"))
    bench = await start(optional=True)
    await bench.until_objects("a")
    await bench.watching()
    server.next(answers(404), answers(404), answers(404))
    await server.drop()
    await bench.until(lambda: bench.restarts("absent") == 3)
    await bench.watching()
    await bench.until_objects("a")
    assert bench.listener.calls == ["begin", "put a", "complete"] * 2


async def test_the_age_is_that_of_the_last_event(server: ApiServer, start: Start) -> None:
    bench = await start()
    await bench.watching()
    bench.watch._last_event_s -= 50
    assert 50 <= value(bench.instruments, names.AGE, resource="pods") < 80
    server.put(PODS, pod("a"))
    await bench.until_objects("a")
    assert value(bench.instruments, names.AGE, resource="pods") < 30


@pytest.mark.parametrize(
    ("path", "group", "resource"),
    [
        ("/api/v1/pods", "", "pods"),
        ("/api/v1/namespaces/default/pods", "", "pods"),
        ("/apis/resource.k8s.io/v1/resourceclaims", "resource.k8s.io", "resourceclaims"),
    ],
)
def test_the_rule_that_a_path_needs_names_its_group_and_resource(path: str, group: str, resource: str) -> None:
    assert rbac_rule(path) == f'{{apiGroups: ["{group}"], resources: [{resource}], verbs: [list, watch]}}'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"kind": "Status", "message": "no\\n way"}', "no way"),
        (b"<html>\n\n502</html>", "<html> 502</html>"),
        (b"", "without a word"),
        (b"{}", "without a word"),
        (b"\xff", "�"),
        (b'{"message": 7}', '{"message": 7}'),
        (b'{"message": "\xe9"}', '{"message": "�"}'),
        (b"[" * 50_000, "[" * 300),
        (b"x" * 100_000, "x" * 300),
    ],
)
def test_the_message_of_a_body_is_one_line_of_bounded_length(body: bytes, expected: str) -> None:
    assert message(body) == expected
