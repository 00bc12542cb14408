"""The sinks of alerts as processes, between a real Kafka and a real Alertmanager, or a webhook that fails."""

import asyncio
import hashlib
import hmac
import json
import time as clock
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
import yaml
from aiohttp import web
from aiokafka import AIOKafkaProducer
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from sinks.webhook import AHEAD
from tests.docs.page import blocks
from tests.eventually import eventually, eventually_sync
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import AlertmanagerServer, KafkaServer
from tests.sinks.alerts import alert, assert_says
from topics.alerts import Alert, transition_id

PARTITIONS = 3

Start = Callable[..., Gpustream]
Respond = Callable[[web.Request, bytes], int]


@pytest.fixture
def alerts_kafka(empty_kafka: KafkaServer) -> KafkaServer:
    """Kafka with the two topics that these sinks use."""
    return prepared(empty_kafka)


def prepared(kafka: KafkaServer) -> KafkaServer:
    """With the topics made."""
    kafka.create_ours({"gpu.alerts": PARTITIONS, "gpu.dead-letters": 1})
    return kafka


class Fleet:
    """Alerts of pods that are the test's own, in their order of time."""

    def __init__(self) -> None:
        self.began_ms = int(clock.time() * 1000) - 60_000

    def firing(self, pod: object, number: int = 0) -> Alert:
        """The alert of a pod, when it fires for the first time, or again."""
        return alert(f"pod-{pod}", self.began_ms + number * 2000)

    def over(self, pod: object, number: int = 0) -> Alert:
        """The alert of a pod, when it is over."""
        return alert(f"pod-{pod}", self.began_ms + number * 2000, self.began_ms + number * 2000 + 1000)

    def history(self, pods: int, times: int) -> list[Alert]:
        """Alerts that fire and end by turns, so many times."""
        return [
            state(pod, number) for number in range(times) for state in (self.firing, self.over) for pod in range(pods)
        ]


async def write(kafka: KafkaServer, alerts: Iterable[Alert | bytes]) -> None:
    """Puts alerts onto gpu.alerts, acknowledged; bytes under a key that is none."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all", enable_idempotence=True) as producer:
        for transition in alerts:
            value, key = (
                (transition, b"x")
                if isinstance(transition, bytes)
                else (msgspec.json.encode(transition), transition.fingerprint.encode())
            )
            await producer.send("gpu.alerts", value, key=key)


def pods(server: AlertmanagerServer) -> set[str]:
    """The pods whose alerts fire, as Alertmanager sees it."""
    return {alert["labels"]["k8s_pod_name"] for alert in server.alerts()}


def first_end_s(server: AlertmanagerServer) -> float:
    """When the first alert would end in Alertmanager if none were sent to it any more."""
    return min([datetime.fromisoformat(alert["endsAt"]).timestamp() for alert in server.alerts()], default=0.0)


def named(numbers: Iterable[object]) -> set[str]:
    return {f"pod-{number}" for number in numbers}


def alertmanager_sink(gpustream: Start, kafka: KafkaServer, name: str, *urls: str, resend: str = "2s") -> Gpustream:
    """A sink of its own process, as a static member."""
    to = [argument for url in urls for argument in ("--url", url)]
    options = ("--resend", resend, "--from", "earliest", "--instance-id", name, "--session-timeout", "6s")
    return gpustream(name, "sink", "alertmanager", "--kafka", kafka.address, *to, *options)


async def caught_up(kafka: KafkaServer, group: str) -> bool:
    """Whether the group has committed all there is."""
    return await lag(kafka.address, group, ["gpu.alerts"]) == 0


async def until_caught_up(kafka: KafkaServer, group: str) -> None:
    """Waits until the group has committed all there is."""
    await eventually(lambda: caught_up(kafka, group), f"{group} has caught up", every_s=0.2)


class Hook:
    """A webhook: its requests, in order. ``respond`` gives the status of the answer."""

    def __init__(self, respond: Respond) -> None:
        self.url = ""
        self.respond = respond
        self.accepted: list[tuple[str, bytes, str]] = []
        self.messages: list[HTTPMessage] = []

    async def handle(self, request: web.Request) -> web.Response:
        """Takes a request."""
        body = await request.read()
        status = self.respond(request, body)
        if status < 300:
            headers = request.headers
            self.accepted.append((headers.get("Idempotency-Key", ""), body, headers.get("X-Gpustream-Signature", "")))
            self.messages.append(HTTPMessage(dict(headers), body))
        return web.Response(status=status)


@asynccontextmanager
async def hook(respond: Respond = lambda *_: 204) -> AsyncIterator[Hook]:
    """A webhook that listens."""
    app, new_hook = web.Application(), Hook(respond)
    app.router.add_post("/hook", new_hook.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    new_hook.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield new_hook
    finally:
        await runner.cleanup()


def notified(by: Hook, pod: str) -> list[str]:
    """What Alertmanager notified of the alert of a pod, or of its job, in order."""
    groups = [json.loads(body)["alerts"] for _, body, _ in by.accepted]
    names = ((alert["labels"], alert["status"]) for group in groups for alert in group)
    return [
        status for labels, status in names if (labels.get("k8s_pod_name") or labels["k8s_workload_name"][6:]) == pod
    ]


async def test_alerts_fire_and_end_in_alertmanager_and_are_notified_once_through_kills_of_the_sink(
    alerts_kafka: KafkaServer, start_alertmanager: Callable[..., AlertmanagerServer], gpustream: Start
) -> None:
    fleet = Fleet()
    async with hook() as notifications:
        manager = await asyncio.to_thread(start_alertmanager, webhook=notifications.url)
        sink = alertmanager_sink(gpustream, alerts_kafka, "am", manager.url, resend="5s")
        await write(alerts_kafka, [fleet.firing(pod) for pod in range(30)])
        await asyncio.to_thread(sink.start)
        await asyncio.to_thread(eventually_sync, lambda: pods(manager) == named(range(30)), "30 alerts fire")
        await asyncio.to_thread(sink.kill9)
        await write(alerts_kafka, [*[fleet.over(pod) for pod in range(10)], fleet.firing("late")])
        await asyncio.to_thread(sink.start)
        await asyncio.to_thread(
            eventually_sync, lambda: pods(manager) == named([*range(10, 30), "late"]), "10 are over, and one more fires"
        )
        await asyncio.to_thread(sink.kill9)
        await asyncio.to_thread(sink.start)
        await until_caught_up(alerts_kafka, "gpustream-sink-alertmanager")
        expected = {f"pod-{pod}": ["firing", "resolved"] for pod in range(10)}
        expected |= {f"pod-{pod}": ["firing"] for pod in [*range(10, 30), "late"]}
        await asyncio.to_thread(
            eventually_sync,
            lambda: {pod: notified(notifications, pod) for pod in expected} == expected,
            "each is notified once",
        )
        assert pods(manager) == named([*range(10, 30), "late"])
        labels = {alert["labels"]["gpustream_fingerprint"] for alert in manager.alerts()}
        assert labels == {fleet.firing(pod).fingerprint for pod in [*range(10, 30), "late"]}
    assert await read_all(alerts_kafka.address, "gpu.dead-letters") == []


@pytest.mark.parametrize("section", ["Alertmanager", "PagerDuty and Slack"])
def test_alertmanager_takes_the_routes_of_the_docs(
    start_alertmanager: Callable[..., AlertmanagerServer], section: str
) -> None:
    (route,) = blocks("how-to/notifications.md", "yaml", section)
    assert start_alertmanager(configuration=route.text).alerts() == []


async def test_pagerduty_and_slack_get_a_summary_of_each_of_several_alerts(
    alerts_kafka: KafkaServer,
    start_alertmanager: Callable[..., AlertmanagerServer],
    gpustream: Start,
    tmp_path: Path,
) -> None:
    fleet = Fleet()
    summaries = ["pod-0 idles", "pod-1 idles"]
    alerts = [
        alert(
            f"{severity} {summary}",
            fleet.began_ms,
            severity=severity,
            labels={"k8s_pod_name": summary},
            annotations={"summary": summary},
        )
        for summary in summaries
        for severity in ("critical", "warning")
    ]
    (route,) = blocks("how-to/notifications.md", "yaml", "PagerDuty and Slack")
    async with hook() as receiver:
        configuration = yaml.safe_load(route.text.replace("/etc/alertmanager", str(tmp_path)))
        configuration["route"]["group_wait"] = "2s"
        configuration["receivers"][0]["pagerduty_configs"][0]["url"] = receiver.url
        (tmp_path / "pagerduty-key").write_text("key")
        (tmp_path / "slack-url").write_text(receiver.url)
        manager = await asyncio.to_thread(start_alertmanager, configuration=json.dumps(configuration))
        await asyncio.to_thread(alertmanager_sink(gpustream, alerts_kafka, "am", manager.url).start)
        await write(alerts_kafka, alerts)

        def heard() -> tuple[list[str], list[str]]:
            bodies = [json.loads(body) for _, body, _ in receiver.accepted]
            pages = [body["payload"]["summary"] for body in bodies if "payload" in body]
            return sorted(pages), sorted(body["attachments"][0]["title"] for body in bodies if "attachments" in body)

        await asyncio.to_thread(eventually_sync, lambda: heard() == (summaries, summaries), "each has its own message")


async def test_an_alertmanager_that_is_away_loses_nothing_and_holds_up_no_other(
    alerts_kafka: KafkaServer, start_alertmanager: Callable[..., AlertmanagerServer], gpustream: Start
) -> None:
    """It is away for so long that every open alert would have ended in it, and comes back without any."""
    fleet = Fleet()
    away, stays = await asyncio.to_thread(start_alertmanager), await asyncio.to_thread(start_alertmanager)
    sink = alertmanager_sink(gpustream, alerts_kafka, "am", away.url, stays.url, resend="1s")
    await asyncio.to_thread(sink.start)
    await write(alerts_kafka, [fleet.firing(pod) for pod in range(20)])
    await asyncio.to_thread(eventually_sync, lambda: pods(away) == pods(stays) == named(range(20)), "both have all")
    await asyncio.to_thread(away.kill9)
    killed_s = clock.time()
    await write(alerts_kafka, [fleet.over(pod) for pod in range(5)])
    await write(alerts_kafka, [fleet.firing(pod) for pod in range(20, 25)])
    await asyncio.to_thread(
        eventually_sync, lambda: pods(stays) == named(range(5, 25)), "the other one has what is new"
    )
    held_s = 4.0  # four times --resend: then Alertmanager ends what is not sent to it again
    await asyncio.to_thread(eventually_sync, lambda: first_end_s(stays) > killed_s + 2 * held_s, "all is sent on")
    await write(alerts_kafka, [b"{nonsense", fleet.firing("last")])
    all_names = named([*range(5, 25), "last"])
    await asyncio.to_thread(eventually_sync, lambda: pods(stays) == all_names, "the other one has all, all the while")
    assert sink.get("/readyz") is None, "it says that it cannot reach one of them"
    await asyncio.to_thread(away.start)
    await asyncio.to_thread(
        eventually_sync, lambda: pods(away) == all_names, "what is open is sent to the one that is back"
    )
    await asyncio.to_thread(eventually_sync, sink.ready, "all is well again")
    await asyncio.to_thread(eventually_sync, lambda: pods(stays) == all_names, "and the other one has all, still")
    for letter in await read_all(alerts_kafka.address, "gpu.dead-letters"):
        assert letter.value == b"{nonsense"


async def test_while_kafka_is_away_no_alert_ends_and_when_the_sink_is_gone_all_do(
    start_kafka: Callable[..., KafkaServer],
    start_alertmanager: Callable[..., AlertmanagerServer],
    gpustream: Start,
) -> None:
    fleet, kafka = Fleet(), prepared(await asyncio.to_thread(start_kafka))
    manager = await asyncio.to_thread(start_alertmanager)
    sink = alertmanager_sink(gpustream, kafka, "am", manager.url)
    await asyncio.to_thread(sink.start)
    await write(kafka, [fleet.firing(pod) for pod in range(5)])
    await asyncio.to_thread(eventually_sync, lambda: pods(manager) == named(range(5)), "5 alerts fire")
    await asyncio.to_thread(kafka.kill9)
    for _ in range(10):  # longer than they are held
        await asyncio.sleep(1)
        assert await asyncio.to_thread(pods, manager) == named(range(5))
    await asyncio.to_thread(kafka.start)
    await write(kafka, [fleet.over(0)])
    await asyncio.to_thread(eventually_sync, lambda: pods(manager) == named(range(1, 5)), "it reads on")
    await asyncio.to_thread(sink.kill9)
    await asyncio.to_thread(eventually_sync, lambda: pods(manager) == set(), "nobody sends them any more")


async def test_a_member_that_is_killed_leaves_its_alerts_to_the_other(
    alerts_kafka: KafkaServer, start_alertmanager: Callable[..., AlertmanagerServer], gpustream: Start
) -> None:
    fleet = Fleet()
    manager = await asyncio.to_thread(start_alertmanager)
    both = [alertmanager_sink(gpustream, alerts_kafka, name, manager.url) for name in ("am-a", "am-b")]
    for sink in both:
        await asyncio.to_thread(sink.start)
    await write(alerts_kafka, [fleet.firing(pod) for pod in range(30)])
    await asyncio.to_thread(eventually_sync, lambda: pods(manager) == named(range(30)), "30 alerts fire")
    await asyncio.to_thread(both[0].kill9)
    await write(alerts_kafka, [fleet.over(pod) for pod in range(15)])
    await asyncio.to_thread(eventually_sync, lambda: pods(manager) == named(range(15, 30)), "15 are over")
    for _ in range(10):  # longer than anything is held that is not sent again
        await asyncio.sleep(1)
        assert await asyncio.to_thread(pods, manager) == named(range(15, 30))


def webhook_sink(gpustream: Start, kafka: KafkaServer, name: str, url: str, *options: str) -> Gpustream:
    """A sink of its own process, as a static member."""
    fixed = ("--from", "earliest", "--instance-id", name, "--session-timeout", "6s")
    return gpustream(name, "sink", "webhook", "--kafka", kafka.address, "--url", url, *fixed, *options)


def in_order(requests: Sequence[tuple[str, bytes, str]], expected: Iterable[Alert]) -> None:
    """Asserts that each alert's transitions arrived in order, apart from repeats, with one body for each."""
    bodies: dict[str, bytes] = {}
    for identity, body, _ in requests:
        assert bodies.setdefault(identity, body) == body
    assert bodies == {transition_id(transition): msgspec.json.encode(transition) for transition in expected}
    for fingerprint in {transition.fingerprint for transition in expected}:
        ids = [transition_id(transition) for transition in expected if transition.fingerprint == fingerprint]
        assert [identity for identity in bodies if identity.startswith(fingerprint)] == ids


async def test_every_transition_is_posted_signed_and_in_order_through_failures_and_kills(
    alerts_kafka: KafkaServer, gpustream: Start, tmp_path: Path
) -> None:
    """A sink is killed between an accepted request and its commit, four times, by a webhook that often fails."""
    history, secret = Fleet().history(25, 12), tmp_path / "secret"
    secret.write_text("s3cret\n")
    requests, kills = 0, [100, 200, 300, 400]

    def often_fails(_: web.Request, __: bytes) -> int:
        nonlocal requests
        requests += 1
        if kills and len(receiver.accepted) >= kills[0] and sink.running:
            kills.pop(0)
            sink.kill9()
        return (204, 204, 503, 204, 204, 500, 204, 204, 429)[requests % 9]

    async with hook(often_fails) as receiver:
        sink = webhook_sink(gpustream, alerts_kafka, "hook", receiver.url, "--secret-file", str(secret))
        await write(alerts_kafka, [*history[:300], *history[275:300], b"{nonsense", *history[300:], *history[-25:]])
        while kills:
            await asyncio.to_thread(_start, sink)
            await asyncio.to_thread(eventually_sync, lambda: not sink.running or not kills, "killed")
        await asyncio.to_thread(_start, sink)
        await until_caught_up(alerts_kafka, "gpustream-sink-webhook")
        await asyncio.to_thread(sink.stop)
    in_order(receiver.accepted, history)
    ahead = 4 * PARTITIONS * AHEAD
    assert len(receiver.accepted) <= len(history) + ahead, "only what was not committed at a kill is posted again"
    for _, body, signature in receiver.accepted:
        assert signature == "sha256=" + hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    letters = await read_all(alerts_kafka.address, "gpu.dead-letters")
    assert {letter.value for letter in letters} == {b"{nonsense"}


async def test_a_webhook_gets_cloud_events_that_the_official_sdk_reads(
    alerts_kafka: KafkaServer, gpustream: Start
) -> None:
    history = Fleet().history(3, 2)
    for mode in ("binary", "structured"):
        async with hook() as receiver:
            form = ("--unsigned", "--format", "cloudevents", "--content-mode", mode, "--group", mode)
            sink = webhook_sink(gpustream, alerts_kafka, mode, receiver.url, *form)
            await write(alerts_kafka, history if mode == "binary" else [])
            await asyncio.to_thread(sink.start)
            await until_caught_up(alerts_kafka, mode)
            await asyncio.to_thread(sink.stop)
        events = {event.get_id(): event for event in map(from_http_event, receiver.messages)}
        assert events.keys() == {transition_id(transition) for transition in history}
        for transition in history:
            assert_says(events[transition_id(transition)], transition)


def _start(sink: Gpustream) -> None:
    """Starts a sink, which may be killed before it is ready."""
    try:
        sink.start()
    except Exception:
        if sink.running:
            raise


async def test_members_that_come_and_go_post_every_transition_in_order(
    alerts_kafka: KafkaServer, gpustream: Start
) -> None:
    history = Fleet().history(20, 6)
    async with hook() as receiver:
        stays = webhook_sink(gpustream, alerts_kafka, "stays", receiver.url, "--unsigned")
        await asyncio.to_thread(stays.start)
        for part in range(3):
            other = webhook_sink(gpustream, alerts_kafka, f"other-{part}", receiver.url, "--unsigned")
            await write(alerts_kafka, history[part * 80 : part * 80 + 40])
            await asyncio.to_thread(other.start)
            await write(alerts_kafka, history[part * 80 + 40 : part * 80 + 80])
            await asyncio.to_thread(other.kill9 if part == 1 else other.stop)
        await until_caught_up(alerts_kafka, "gpustream-sink-webhook")
    in_order(receiver.accepted, history)
    assert all(signature == "" for _, _, signature in receiver.accepted)
