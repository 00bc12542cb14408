"""The cluster producer's way to a real API server: its view equals the objects that exist, and one candidate leads."""

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from delivery.instruments import Instruments
from delivery.kubernetes.client import Client, Unreachable
from producers.cluster import instruments as names
from producers.cluster import reflector as module
from producers.cluster.lease import LeaderElector
from producers.cluster.reflector import Reflector
from tests.eventually import eventually
from tests.producers.cluster.recording_listener import RecordingListener
from tests.producers.fakes import value
from tests.real.conftest import need
from tests.real.cut import Line
from tests.real.kubernetes import ApiServer, Json, find_etcd, find_kube_apiserver
from tests.real.servers import find_openssl

READ_MAPS = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}
LEASE_RULES: list[Json] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["leader"],
        "verbs": ["get", "update"],
    },
]


class Maps:
    """The config maps of a namespace, and a watch of them."""

    def __init__(self, server: ApiServer, api: Client, namespace: str, **settings: Any) -> None:
        self.server, self.namespace, self.listener = server, namespace, RecordingListener()
        self.instruments = Instruments(names.INSTRUMENTS)
        self.path = f"/api/v1/namespaces/{namespace}/configmaps"
        self.watch = Reflector(api, self.path, self.listener, self.instruments, name="maps", **settings)
        self.task = asyncio.create_task(self.watch.run())

    @property
    def names_found(self) -> set[str]:
        return set(self.listener.objects)

    async def wait_for(self, *names_found: str) -> None:
        await eventually(lambda: self.task.done() or (self.watch.synced and self.names_found == set(names_found)))
        assert not self.task.done(), self.task.result()

    async def put(self, name: str, **data: str) -> None:
        await asyncio.to_thread(self.server.apply, config_map(self.namespace, name, **data))

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self.server.delete, f"{self.path}/{name}")

    def restarts(self, reason: str) -> float:
        return value(self.instruments, names.RESTARTS, resource="maps", reason=reason)

    def events(self, kind: str) -> float:
        return value(self.instruments, names.EVENTS, resource="maps", type=kind)


def config_map(namespace: str, name: str, **data: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}, "data": data}


def own_namespace(request: pytest.FixtureRequest) -> str:
    """A namespace that is called as the test."""
    return re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:50].strip("-")


Watching = Callable[..., Awaitable[Maps]]


@pytest.fixture
async def watching(request: pytest.FixtureRequest) -> AsyncIterator[Watching]:
    """Watches the config maps of a namespace of the test's own, as admin unless there is another kubeconfig."""
    namespace = own_namespace(request)
    async with contextlib.AsyncExitStack() as stack:

        async def watch(
            server: ApiServer, kubeconfig: Path | None = None, *, before: Sequence[str] = (), **settings: Any
        ) -> Maps:
            await asyncio.to_thread(server.namespace, namespace)
            for name in before:
                await asyncio.to_thread(server.apply, config_map(namespace, name))
            api = Client(kubeconfig or server.kubeconfig("admin"))
            await api.start()
            stack.push_async_callback(api.close)
            maps = Maps(server, api, namespace, **settings)
            stack.push_async_callback(all_ended, maps.task)
            return maps

        yield watch


async def all_ended(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- the watch


async def test_objects_that_exist_come_change_and_go_are_known(kube_api: ApiServer, watching: Watching) -> None:
    maps = await watching(kube_api)
    await maps.wait_for()
    for name in ("a", "b"):
        await maps.put(name, n="1")
    await maps.wait_for("a", "b")
    await maps.put("a", n="2")
    await eventually(lambda: maps.listener.objects["a"]["data"] == {"n": "2"})
    await maps.delete("a")
    await maps.wait_for("b")
    assert maps.listener.lists == 1
    assert maps.events("listed") == 0, "it is a streaming list"


async def test_a_server_without_streaming_lists_is_listed_in_pages(
    start_kube_api: Callable[..., ApiServer], watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 3)
    server = await asyncio.to_thread(lambda: start_kube_api(options=["--feature-gates=WatchList=false"]))
    expected = [f"m{index}" for index in range(7)]
    maps = await watching(server, before=expected)
    await maps.wait_for(*expected)
    await maps.put("later")
    await maps.wait_for(*expected, "later")
    assert maps.restarts("unsupported") == 1
    assert (maps.events("listed"), maps.listener.lists) == (7, 1)


async def test_a_403_says_the_rule_and_with_exactly_that_rule_it_watches(
    kube_api: ApiServer, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 1.0)
    maps = await watching(kube_api, kube_api.kubeconfig("one"))
    await eventually(lambda: maps.restarts("forbidden") >= 2)
    (reason,) = maps.watch.not_ready()
    assert 'configmaps is forbidden: User "one" cannot watch resource "configmaps"' in reason
    match = re.search(r"{apiGroups: \[(.*?)\], resources: \[(.*?)\], verbs: \[(.*?)\]}", reason)
    assert match is not None
    group, resource, verbs = match.groups()
    rule = {"apiGroups": [group.strip('"')], "resources": [resource], "verbs": verbs.split(", ")}
    assert rule == READ_MAPS
    await asyncio.to_thread(kube_api.grant, "one", rule)
    await maps.wait_for()
    assert maps.watch.not_ready() == []


@pytest.fixture(scope="module")
def restarted_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API that a test may kill, if it starts it again."""
    need(find_etcd, find_kube_apiserver, find_openssl)
    with ApiServer(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


async def test_it_goes_on_over_a_restart_of_the_api_server(
    restarted_api: ApiServer, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 1.0)
    server = restarted_api
    maps = await watching(server)
    await maps.put("before")
    await maps.wait_for("before")
    await asyncio.to_thread(server.restart)
    await maps.put("after")
    await maps.wait_for("before", "after")
    await asyncio.to_thread(server.kill9)
    await eventually(lambda: maps.restarts("connection") >= 3)
    assert maps.names_found == {"before", "after"}, "what was known stays"
    await asyncio.to_thread(server.start)
    await maps.delete("before")
    await maps.wait_for("after")
    assert not maps.task.done()


async def test_a_version_that_was_compacted_away_is_listed_again(restarted_api: ApiServer, watching: Watching) -> None:
    server = restarted_api
    async with Line(server.ports[0].number) as line:
        maps = await watching(server, server.kubeconfig("admin", server=f"https://127.0.0.1:{line.port}"))
        await maps.put("goes")
        await maps.put("stays")
        await maps.wait_for("goes", "stays")
        line.silence()
        line.breaks()
        await maps.delete("goes")
        await maps.put("new")
        await asyncio.to_thread(server.etcd.compact)
        await asyncio.to_thread(server.restart)  # its own memory of what happened is gone, and so is etcd's
        assert maps.names_found == {"goes", "stays"}
        line.mend()
        line.breaks()
        await maps.wait_for("stays", "new")
    assert maps.restarts("expired") == 1
    assert maps.events("ERROR") == 1, "it is said on a line, in an answer of 200"
    assert maps.listener.lists == 2


async def test_bookmarks_move_on_where_it_goes_on_from_while_others_change(
    kube_api: ApiServer, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORTEST_WATCH_S", 5)
    monkeypatch.setattr(module, "LONGEST_WATCH_S", 5)
    maps = await watching(kube_api)
    await maps.wait_for()
    version_before = maps.watch._version
    await asyncio.to_thread(kube_api.namespace, "elsewhere")
    await asyncio.to_thread(kube_api.apply, config_map("elsewhere", "changes"))
    await eventually(lambda: maps.restarts("ended") >= 2)
    assert maps.events("BOOKMARK") >= 2, "the end of the list, and one shortly before the end of each watch"
    assert maps.watch._version != version_before
    assert maps.listener.lists == 1
    await maps.put("a")
    await maps.wait_for("a")


async def test_a_connection_on_which_nothing_moves_is_given_up(kube_api: ApiServer, watching: Watching) -> None:
    async with Line(kube_api.ports[0].number) as line:
        config = kube_api.kubeconfig("admin", server=f"https://127.0.0.1:{line.port}")
        maps = await watching(kube_api, config, silence_s=3.0)
        await maps.wait_for()
        line.silence()
        await maps.put("unseen")
        await eventually(lambda: maps.restarts("timeout") >= 1)
        assert maps.names_found == set()
        line.mend()
        line.breaks()
        await maps.wait_for("unseen")


async def test_a_certificate_of_another_authority_is_not_trusted(kube_api: ApiServer, watching: Watching) -> None:
    config = kube_api.kubeconfig("admin")
    text = json.loads(config.read_text())
    del text["clusters"][0]["cluster"]["certificate-authority"]
    config.write_text(json.dumps(text))
    maps = await watching(kube_api, config)
    await eventually(lambda: maps.restarts("tls") >= 2)
    assert "certificate" in maps.watch.not_ready()[0]


# -- who asks


async def test_a_token_file_that_rotates_is_followed_as_a_pod_and_by_a_kubeconfig(
    kube_api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(kube_api.ports[0].number))
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(kube_api.ca.read_bytes())
    token = account / "token"
    token.write_text(await asyncio.to_thread(kube_api.service_account, "rotating", "producer"))
    await asyncio.to_thread(kube_api.grant, "rotating:producer", READ_MAPS)
    config = kube_api.kubeconfig(tokenFile=str(token))
    apis = [Client(None, service_account=account, refresh_s=0.5), Client(config, refresh_s=0.5)]
    for api in apis:
        await api.start()
        assert await status(api) == 200
    await asyncio.to_thread(kube_api.delete, "/api/v1/namespaces/rotating/serviceaccounts/producer")
    for api in apis:
        await until_status(api, 401)  # the old token is dead
    fresh = await asyncio.to_thread(kube_api.service_account, "rotating", "producer")
    token.write_text(fresh + "\n")
    for api in apis:
        await until_status(api, 200)
        await api.close()


async def test_a_certificate_authority_that_is_replaced_is_followed(
    kube_api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(kube_api.ports[0].number))
    (tmp_path / "token").write_text(kube_api.token("admin"))
    await asyncio.to_thread(make_authority, tmp_path / "ca.crt")
    api = Client(None, service_account=tmp_path, refresh_s=0.2)
    await api.start()
    with pytest.raises(Unreachable, match="certificate") as error:
        await status(api)
    assert error.value.reason == "tls"
    (tmp_path / "ca.crt").write_bytes(kube_api.ca.read_bytes())

    async def trusted() -> bool:
        with contextlib.suppress(Unreachable):
            return await status(api) == 200
        return False

    await eventually(trusted)
    await api.close()


def make_authority(path: Path) -> None:
    """A certificate authority of another name."""
    arguments = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other", "-keyout", f"{path}.key"]
    subprocess.run([find_openssl(), *arguments, "-out", path], check=True, capture_output=True)


async def status(api: Client) -> int:
    return (await api.request("GET", "/api/v1/configmaps", params={"limit": "1"})).status


async def until_status(api: Client, expected: int) -> None:
    async def is_it() -> bool:
        return await status(api) == expected

    await eventually(is_it, f"a request is answered with {expected}", every_s=0.2)


# -- the lease


class Candidate:
    """A candidate for leadership, on a line of its own. The diary is shared: (name, event, time)."""

    def __init__(
        self, api: Client, line: Line, namespace: str, identity: str, diary: list[tuple[str, str, float]]
    ) -> None:
        self.identity, self.line, self.diary = identity, line, diary
        instruments = Instruments(names.INSTRUMENTS)
        self.lease = LeaderElector(api, instruments, namespace=namespace, name="leader", identity=identity)
        self.stop = asyncio.Event()
        self.epochs: list[int] = []
        self.task = asyncio.create_task(self.lease.run(self.work, self.stop))

    async def work(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.note("begins")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
            self.note("ends")

    def note(self, event_name: str) -> None:
        self.diary.append((self.identity, event_name, asyncio.get_running_loop().time()))

    async def leads(self) -> None:
        await eventually(lambda: self.lease.leading and bool(self.epochs))


Joins = Callable[[str], Awaitable[Candidate]]


@pytest.fixture
async def joins(kube_api: ApiServer, request: pytest.FixtureRequest) -> AsyncIterator[Joins]:
    """Adds a candidate, as a user with only the rights that it needs on the leases of the test's namespace."""
    namespace = own_namespace(request)
    await asyncio.to_thread(kube_api.namespace, namespace)
    await asyncio.to_thread(lambda: kube_api.grant("one", *LEASE_RULES, namespace=namespace))
    diary: list[tuple[str, str, float]] = []
    async with contextlib.AsyncExitStack() as stack:

        async def join(identity: str) -> Candidate:
            line = await stack.enter_async_context(Line(kube_api.ports[0].number))
            api = Client(kube_api.kubeconfig("one", server=f"https://127.0.0.1:{line.port}"))
            await api.start()
            stack.push_async_callback(api.close)
            candidate = Candidate(api, line, namespace, identity, diary)
            stack.push_async_callback(all_ended, candidate.task)
            return candidate

        yield join


async def test_a_leader_that_is_cut_off_ends_its_work_before_the_other_leads(joins: Joins) -> None:
    first = await joins("first")
    await first.leads()
    second = await joins("second")
    await eventually(lambda: second.lease._observed.holder == "first")
    first.line.silence()
    await second.leads()
    first.line.mend()
    events = [(candidate, event) for candidate, event, _ in first.diary]
    assert events == [("first", "begins"), ("first", "ends"), ("second", "begins")]
    await eventually(lambda: first.lease._observed.holder == "second")
    assert not first.lease.leading
    second.stop.set()
    await eventually(lambda: len(first.epochs) == 2)
    assert first.epochs[0] < second.epochs[0] < first.epochs[1]


async def test_a_leader_that_stops_in_order_is_followed_at_once(joins: Joins, caplog: pytest.LogCaptureFixture) -> None:
    first = await joins("first")
    await first.leads()
    second = await joins("second")
    await eventually(lambda: second.lease._observed.holder == "first")
    stopped_s = asyncio.get_running_loop().time()
    first.stop.set()
    await second.leads()
    assert asyncio.get_running_loop().time() - stopped_s < 10, "sooner than the lease would be over"
    assert [(candidate, event) for candidate, event, _ in first.diary][1:] == [("first", "ends"), ("second", "begins")]
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
