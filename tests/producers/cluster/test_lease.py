"""Two never lead at the same time, and the next one leads soon, with a higher epoch."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.instruments import Instruments
from delivery.kubernetes import client
from delivery.kubernetes.client import Answer, Client, Unreachable
from producers.cluster import instruments as names
from producers.cluster import lease as module
from producers.cluster.lease import LeaderElector, LeaseRecord, Stuck, acquired, decode_lease, encode_spec
from tests import clock
from tests.eventually import eventually
from tests.producers.cluster.api_server import ApiServer, Json, Reply, Request, answers, kubeconfig
from tests.producers.fakes import value

pytestmark = pytest.mark.slow

LEASES = "/apis/coordination.k8s.io/v1/namespaces/gpu/leases"
NOW_US = 1_795_000_000_123_456


class CuttableClient(Client):
    """The connection to the API server. While it is ``cut``, every request times out."""

    def __init__(self, api: Client) -> None:
        super().__init__(None)
        self.api, self.cut = api, False

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
        if self.cut:
            await asyncio.sleep(timeout_s)
            raise Unreachable("timeout", "no answer in time")
        return await self.api.request(method, path, body=body, timeout_s=timeout_s)


class Candidate:
    """A process that wants to lead. All of them write ``diary``: (identity, begins or ends)."""

    def __init__(self, api: Client, identity: str, diary: list[tuple[str, str]], **settings: Any) -> None:
        times = {"duration_s": 4.0, "renew_s": 0.1, "give_up_s": 2.5, **settings}
        self.client, self.identity, self.diary = CuttableClient(api), identity, diary
        self.instruments = Instruments(names.INSTRUMENTS)
        self.lease = LeaderElector(
            self.client, self.instruments, namespace="gpu", name="leader", identity=identity, **times
        )
        self.stop = asyncio.Event()
        self.epochs: list[int] = []
        self.ends = asyncio.Event()
        self.task = asyncio.create_task(self.lease.run(self.work, self.stop))

    async def work(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.diary.append((self.identity, "begins"))
        try:
            await self.ends.wait()
        finally:
            await asyncio.sleep(0.2)
            self.diary.append((self.identity, "ends"))

    async def until_leading(self) -> None:
        await eventually(
            lambda: self.lease.leading and bool(self.epochs) and self.diary[-1] == (self.identity, "begins")
        )


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        yield running


Join = Callable[..., Candidate]


@pytest.fixture
async def join(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Join]:
    """Adds a candidate. All candidates of a test share one diary."""
    config = tmp_path_factory.mktemp("config") / "config"
    config.write_text(kubeconfig(server.url, {}))
    api = Client(config)
    await api.start()
    diary: list[tuple[str, str]] = []
    candidates: list[Candidate] = []

    def add(identity: str, **settings: Any) -> Candidate:
        candidates.append(Candidate(api, identity, diary, **settings))
        return candidates[-1]

    yield add
    for candidate in candidates:
        candidate.task.cancel()
    await asyncio.gather(*(candidate.task for candidate in candidates), return_exceptions=True)
    await api.close()


def spec(server: ApiServer) -> Json:
    content: Json = server.objects[LEASES]["leader"]["spec"]
    return content


def held_by(holder: str, **fields: Any) -> Json:
    record = {**encode_spec(LeaseRecord(holder, 2.0, NOW_US, NOW_US, 7)), **fields}
    return {"metadata": {"name": "leader", "namespace": "gpu", "labels": {"a": "b"}}, "spec": record}


# -- acquiring it


async def test_the_first_candidate_creates_the_lease_and_leads(server: ApiServer, join: Join) -> None:
    first = join("a", now_us=lambda: NOW_US)
    await first.until_leading()
    assert spec(server) == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 4,
        "acquireTime": "2026-11-18T11:06:40.123456Z",
        "renewTime": spec(server)["renewTime"],
        "leaseTransitions": 1,
    }
    assert first.epochs == [NOW_US // 1000]
    assert value(first.instruments, names.LEADING) == 1
    assert first.lease.not_ready() == []


async def test_a_candidate_stands_by_while_another_renews(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    second = join("b")
    renewals = len({request.body for request in server.requests if request.method == "PUT"})
    await eventually(
        lambda: len({r.body for r in server.requests if r.method == "PUT"}) > renewals + 45
    )  # > the duration
    assert second.epochs == []
    assert not second.lease.leading
    assert second.lease.not_ready() == []
    assert value(second.instruments, names.LEADING) == 0


async def test_a_lease_that_is_not_renewed_is_taken_after_its_duration_and_not_before(
    server: ApiServer, join: Join
) -> None:
    server.put(LEASES, held_by("dead"))
    began = asyncio.get_running_loop().time()
    next_one = join("b", renew_s=0.5)
    await next_one.until_leading()
    assert asyncio.get_running_loop().time() - began >= 2.0
    assert spec(server)["leaseTransitions"] == 8
    assert server.objects[LEASES]["leader"]["metadata"]["labels"] == {"a": "b"}


async def test_a_lease_that_nobody_holds_is_taken_at_once(server: ApiServer, join: Join) -> None:
    server.put(LEASES, held_by("", leaseDurationSeconds=3600))
    await join("b").until_leading()


async def test_a_lease_without_a_spec_is_taken(server: ApiServer, join: Join) -> None:
    server.put(LEASES, {"metadata": {"name": "leader"}})
    await join("b").until_leading()


async def test_of_two_that_take_it_at_once_one_leads(server: ApiServer, join: Join) -> None:
    server.put(LEASES, held_by(""))
    candidates = [join("a"), join("b")]
    await eventually(lambda: any(candidate.lease.leading for candidate in candidates))
    await eventually(lambda: len(server.requests) > 40)
    assert [candidate.lease.leading for candidate in candidates].count(True) == 1
    assert len(candidates[0].diary) == 1


async def test_a_candidate_that_took_the_lease_and_got_no_answer_leads_all_the_same(
    server: ApiServer, join: Join
) -> None:
    server.put(LEASES, held_by(""))

    async def reads(request: Request, reply: Reply) -> None:
        await reply.answer(200, server.objects[LEASES]["leader"])

    async def writes_and_resets(request: Request, reply: Reply) -> None:
        server.put(LEASES, msgspec.json.decode(request.body))
        reply.reset()

    server.next(reads, writes_and_resets)
    began = asyncio.get_running_loop().time()
    await join("a", duration_s=50.0).until_leading()
    assert asyncio.get_running_loop().time() - began < 40


# -- handing it over


async def test_a_stop_ends_the_work_and_then_lets_the_next_one_lead(server: ApiServer, join: Join) -> None:
    first = join("a", duration_s=50.0)
    await first.until_leading()
    second = join("b")
    await eventually(lambda: len(server.requests) > 10)
    first.stop.set()
    await second.until_leading()
    await first.task
    assert first.diary == [("a", "begins"), ("a", "ends"), ("b", "begins")]
    assert second.epochs[0] > first.epochs[0]
    assert value(first.instruments, names.LEADING) == 0
    assert value(first.instruments, names.TRANSITIONS, to="standby") == 1


async def test_a_leader_that_is_cut_off_ends_its_work_before_another_leads(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    second = join("b")
    await eventually(lambda: len(server.requests) > 10)
    first.client.cut = True
    await second.until_leading()
    assert first.diary == [("a", "begins"), ("a", "ends"), ("b", "begins")]
    assert second.epochs[0] > first.epochs[0]
    first.client.cut = False
    await eventually(lambda: first.lease._health.problem == "")
    assert not first.lease.leading


async def test_a_leader_that_lost_the_lease_leads_again_when_the_other_ends(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    second = join("b")
    first.client.cut = True
    await second.until_leading()
    first.client.cut = False
    second.stop.set()
    await eventually(lambda: len(first.epochs) == 2)
    assert first.epochs[0] < second.epochs[0] < first.epochs[1]


async def test_a_lease_that_another_wrote_is_lost_at_once(server: ApiServer, join: Join) -> None:
    first = join("a", give_up_s=45.0, duration_s=50.0)
    await first.until_leading()
    server.put(LEASES, held_by("thief", leaseDurationSeconds=60))
    await eventually(lambda: first.diary[-1] == ("a", "ends") and not first.lease.leading)
    requests_before = len(server.requests)
    await eventually(lambda: len(server.requests) > requests_before + 4)
    assert spec(server)["holderIdentity"] == "thief", "it is not released for another"


async def test_a_label_on_the_lease_changes_nothing(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    for number in range(5):
        content = server.objects[LEASES]["leader"]
        server.put(LEASES, {**content, "metadata": {**content["metadata"], "labels": {"n": str(number)}}})
        requests_before = len(server.requests)
        await eventually(lambda before=requests_before: len(server.requests) > before + 4)  # type: ignore[misc]
    assert first.diary == [("a", "begins")]
    assert server.objects[LEASES]["leader"]["metadata"]["labels"] == {"n": "4"}


async def test_a_lease_that_is_deleted_is_created_again_by_its_leader(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    second = join("b")
    await eventually(lambda: len(server.requests) > 10)
    epoch = spec(server)["acquireTime"]
    server.delete(LEASES, "leader")
    await eventually(lambda: "leader" in server.objects[LEASES])
    assert (spec(server)["holderIdentity"], spec(server)["acquireTime"]) == ("a", epoch)
    assert first.diary == [("a", "begins")]
    assert second.epochs == []


async def test_a_few_failures_do_not_end_the_lead(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    server.next(answers(500), answers(429), answers(403), answers(401), answers(504, "Too large resource version"))
    await eventually(lambda: server.faults_left == 0)
    requests_before = len(server.requests)
    await eventually(lambda: len(server.requests) > requests_before + 4)
    assert first.diary == [("a", "begins")]


@pytest.mark.parametrize(
    ("conflicts", "reason"),
    [
        (5, None),
        (10_000, "the lease could not be renewed for 2.5 s: the API server found a conflict at each write (409)"),
    ],
)
async def test_a_leader_whose_writes_conflict_leads_for_as_long_as_it_may(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, conflicts: int, reason: str | None
) -> None:
    first, refused = join("a"), 0
    await first.until_leading()
    request_really = first.client.request

    async def request(method: str, path: str, **options: Any) -> Answer:
        nonlocal refused
        if method == "PUT" and refused < conflicts:
            refused += 1
            return Answer(409, b"{}", None)
        return await request_really(method, path, **options)

    monkeypatch.setattr(first.client, "request", request)
    renewed_s = first.lease._renewed_s
    await eventually(lambda: first.lease._renewed_s > renewed_s or not first.lease.leading)
    stopped = [record.getMessage() for record in caplog.records if "no longer leading" in record.getMessage()]
    assert stopped == ([] if reason is None else [f"no longer leading: {reason}"])


@pytest.mark.parametrize("other", [b'{"kind": "Status", "metadata": {}, "status": "Success"}', None])
async def test_a_success_that_does_not_show_what_was_written_is_no_renewal(
    server: ApiServer, join: Join, monkeypatch: pytest.MonkeyPatch, other: bytes | None
) -> None:
    """A gateway answered in the API server's place, or a cache with the Lease as it was: another may lead by now."""
    first = join("a")
    await first.until_leading()
    body, request_really = other or json.dumps(server.objects[LEASES]["leader"]).encode(), first.client.request

    async def request(method: str, path: str, **options: Any) -> Answer:
        return Answer(200, body, None) if method == "PUT" else await request_really(method, path, **options)

    monkeypatch.setattr(first.client, "request", request)
    await eventually(lambda: first.diary[1:] == [("a", "ends")] and not first.lease.leading)


async def test_what_is_no_lease_in_place_of_one_is_none(server: ApiServer, join: Join) -> None:
    bodies = [b"<html>sign in</html>", b'{"spec": "\xe9"}', b'{"spec": ' + b"[" * 50_000, b"{}", b'{"metadata": {}}']

    async def instead(body: bytes, _: Request, reply: Reply) -> None:
        await reply.answer(200, body)

    each_twice = [partial(instead, body) for body in bodies for _ in range(2)]
    server.next(*each_twice)
    first = join("a", give_up_s=45.0, duration_s=50.0)
    await first.until_leading()
    assert server.faults_left == 0
    server.next(*each_twice)
    await eventually(lambda: server.faults_left == 0)
    requests_before = len(server.requests)
    await eventually(lambda: len(server.requests) > requests_before + 4)
    assert first.diary == [("a", "begins")]


# -- the work


async def test_work_that_returns_ends_the_run_and_lets_the_next_one_lead(server: ApiServer, join: Join) -> None:
    first = join("a", duration_s=50.0)
    await first.until_leading()
    first.ends.set()
    await first.task
    assert spec(server)["holderIdentity"] == ""
    await join("b").until_leading()


async def test_work_that_raises_ends_the_run_with_it_and_releases_the_lease(server: ApiServer, join: Join) -> None:
    first = join("a")

    async def fails(epoch: int) -> None:
        raise ValueError("a bug")

    first.task.cancel()
    with pytest.raises(ValueError, match="a bug"):
        await first.lease.run(fails, first.stop)
    assert spec(server)["holderIdentity"] == ""


async def test_work_that_does_not_end_in_time_ends_the_process(server: ApiServer, join: Join) -> None:
    first = join("a")
    first.task.cancel()
    over = asyncio.Event()

    async def stubborn(epoch: int) -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    run = asyncio.create_task(first.lease.run(stubborn, first.stop))
    await eventually(lambda: first.lease.leading)
    first.lease._duration_s = 0.5  # the time for which it took the lease is nearly over
    first.stop.set()
    with pytest.raises(Stuck):
        await run
    assert spec(server)["holderIdentity"] == "a", "it is not released while the work goes on"
    assert Stuck.exit_code == 1
    over.set()


async def test_a_run_that_is_cancelled_ends_its_work_first(server: ApiServer, join: Join) -> None:
    first = join("a")
    await first.until_leading()
    first.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first.task
    assert first.diary == [("a", "begins"), ("a", "ends")]
    assert spec(server)["holderIdentity"] == ""


async def test_a_stop_while_standing_by_is_no_wait(server: ApiServer, join: Join) -> None:
    server.put(LEASES, held_by("other", leaseDurationSeconds=60))
    first = join("a", renew_s=3600.0)
    await eventually(lambda: len(server.requests) == 1)
    first.stop.set()
    async with asyncio.timeout(30):
        await first.task
    assert first.epochs == []


# -- what is reported


@pytest.mark.parametrize(
    ("exists", "faults", "rule"),
    [
        (True, 1, '{apiGroups: ["coordination.k8s.io"], resources: [leases], resourceNames: ["leader"], verbs: [get]}'),
        (True, 2, 'resourceNames: ["leader"], verbs: [update]}'),
        (False, 2, "resources: [leases], verbs: [create]}"),
    ],
)
async def test_a_403_says_which_rule_is_missing(
    server: ApiServer,
    join: Join,
    exists: bool,
    faults: int,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client, "UNREADY_AFTER_S", -1.0)
    server.objects[LEASES] = {}
    if exists:
        server.put(LEASES, held_by(""))

    async def denied(request: Request, reply: Reply) -> None:
        server.next(denied)
        if request.method == "GET" and faults == 2:
            content = server.objects[LEASES].get("leader")
            return await (reply.answer(200, content) if content else reply.status(404))
        return await reply.status(403, 'User "u" cannot')

    server.next(denied)
    first = join("a")
    await eventually(lambda: len(server.requests) > 6)
    (reason,) = first.lease.not_ready()
    assert rule in reason
    assert 'User "u" cannot' in reason
    warnings = [r for r in caplog.records if r.name == module.__name__ and r.levelno >= logging.WARNING]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (lambda _: Unreachable("connection", "Cannot connect to host 10.0.0.1"), "Cannot connect to host 10.0.0.1"),
        (lambda _: None, "no answer within 0.4 s"),
    ],
)
def test_a_leader_that_stops_leading_logs_why_it_could_not_renew(
    fails: Callable[[object], Exception | None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def request(method: str, _: str, *, body: bytes | None, timeout_s: float) -> Answer:
        if method == "GET":
            return Answer(404, b"{}", None)
        if method == "POST":
            lease = msgspec.json.decode(body or b"")
            return Answer(201, msgspec.json.encode(lease | {"metadata": {"resourceVersion": "1"}}), None)
        if (error := fails(None)) is not None:
            raise error
        await asyncio.sleep(timeout_s * 10)
        raise AssertionError("waited for too long")

    async def lead_until_it_fails() -> None:
        api: Any = SimpleNamespace(request=request)
        elector = LeaderElector(
            api,
            Instruments(names.INSTRUMENTS),
            namespace="gpu",
            name="leader",
            identity="a",
            duration_s=4.0,
            renew_s=0.1,
            give_up_s=1.0,
            now_us=lambda: NOW_US,
        )
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        stop = asyncio.Event()

        async def work(_: int) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                stop.set()

        await elector.run(work, stop)

    monkeypatch.setattr(module, "CALL_WITHIN_S", 0.4)
    clock.run(lead_until_it_fails())
    (message,) = [message for message in caplog.messages if "no longer leading" in message]
    assert message == f"no longer leading: the lease could not be renewed for 1 s: {reason}"


async def test_a_process_that_was_suspended_logs_it(join: Join, caplog: pytest.LogCaptureFixture) -> None:
    first = join("a", give_up_s=0.15)
    await first.until_leading()
    time.sleep(0.2)  # noqa: ASYNC251 - the test is about a blocked loop
    await eventually(lambda: any("this process stood still" in message for message in caplog.messages))


# -- the record


def test_the_epoch_rises_even_if_clocks_step_back() -> None:
    last = LeaseRecord("a", acquired_us=NOW_US)
    after = acquired(last, "b", duration_s=10.0, now_us=NOW_US - 3_600_000_000)
    assert after.epoch == last.epoch + 1
    assert decode_lease({"spec": encode_spec(after)}) == after


async def test_the_epoch_rises_over_a_released_lease_of_a_faster_clock(server: ApiServer, join: Join) -> None:
    server.put(LEASES, held_by(""))
    first = join("a", now_us=lambda: NOW_US - 10**9)
    await first.until_leading()
    assert first.epochs == [NOW_US // 1000 + 1]


@given(st.integers(0, 4 * 10**15), st.integers(0, 4 * 10**15), st.integers(1, 60), st.integers(0, 2**31 - 2))
def test_a_record_is_read_as_it_was_written(acquired: int, renewed: int, duration: int, transitions: int) -> None:
    record = LeaseRecord("who", float(duration), acquired, renewed, transitions)
    assert decode_lease(msgspec.json.decode(msgspec.json.encode({"spec": encode_spec(record)}))) == record


any_value = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3)


@given(st.dictionaries(st.sampled_from([*encode_spec(LeaseRecord())]), any_value), any_value)
def test_a_malformed_lease_is_read_as_a_lease_of_nobody_or_within_bounds(content: Json, nonsense: Any) -> None:
    record = decode_lease({"spec": content})
    assert 1 <= record.duration_s <= 60
    assert encode_spec(acquired(record, "me", duration_s=10.0, now_us=NOW_US))["leaseTransitions"] < 2**31
    assert decode_lease({"spec": nonsense}) == LeaseRecord() or isinstance(nonsense, dict)


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z", "yesterday", ""])
def test_a_time_at_the_end_of_the_calendar_is_none(time: str) -> None:
    record = acquired(decode_lease({"spec": {"acquireTime": time}}), "me", duration_s=10.0, now_us=NOW_US)
    assert record.epoch == NOW_US // 1000


def test_times_are_utc_with_microseconds() -> None:
    assert datetime.fromisoformat(encode_spec(LeaseRecord(acquired_us=NOW_US))["acquireTime"]).tzinfo == UTC
    assert decode_lease({"spec": {"acquireTime": "2026-11-18T12:06:40.123456+01:00"}}).acquired_us == NOW_US
