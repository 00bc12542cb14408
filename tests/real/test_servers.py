"""The fixtures themselves: what the tests that use them rely on."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError, TopicAuthorizationFailedError
from aiokafka.helpers import create_ssl_context

from tests.real import servers
from tests.real.certificates import Authority
from tests.real.conftest import need
from tests.real.process import HeldPort, listens
from tests.real.servers import (
    PLAIN_PASSWORDS,
    AlertmanagerServer,
    KafkaServer,
    PrometheusServer,
    find_java,
    find_kafka,
    unsecured_token,
)


async def produce(address: str, topic: str, value: bytes, **security: Any) -> int:
    producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", **security)
    try:
        await producer.start()
        return int((await producer.send_and_wait(topic, value)).offset)
    finally:
        await producer.stop()


async def consume_one(address: str, topic: str) -> bytes:
    async with AIOKafkaConsumer(bootstrap_servers=address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        return bytes((await consumer.getone()).value)


async def test_a_record_can_be_produced_and_consumed(kafka: KafkaServer) -> None:
    kafka.create_topics({"round-trip": 1})
    assert await produce(kafka.address, "round-trip", b"hello") == 0
    assert await consume_one(kafka.address, "round-trip") == b"hello"


class Token(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """A token of a user that these brokers accept."""

    def __init__(self, user: str) -> None:
        self.user = user

    async def token(self) -> str:
        return unsecured_token(self.user)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"])
async def test_each_mechanism_lets_its_user_do_what_acls_allow(
    kafka: KafkaServer, authority: Authority, mechanism: str
) -> None:
    user, password = next(iter(PLAIN_PASSWORDS.items())) if mechanism == "PLAIN" else (mechanism, "secret")
    if mechanism.startswith("SCRAM"):
        kafka.add_user(user, password)
    allowed, refused = f"allowed-to-{mechanism}", f"refused-to-{mechanism}"
    kafka.create_topics({allowed: 1, refused: 1})
    kafka.allow(user, "WRITE", "TOPIC", allowed)
    security = {
        "security_protocol": "SASL_SSL",
        "ssl_context": create_ssl_context(cafile=authority.ca),
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
        "sasl_oauth_token_provider": Token(user),
    }
    assert await produce(kafka.sasl_ssl, allowed, b"x", **security) == 0
    with pytest.raises(TopicAuthorizationFailedError):
        await produce(kafka.sasl_ssl, refused, b"x", **security)


async def test_a_client_is_who_its_certificate_names(kafka: KafkaServer, authority: Authority) -> None:
    kafka.create_topics({"by-certificate": 1})
    kafka.allow("known", "WRITE", "TOPIC", "by-certificate")

    async def produce_as(name: str) -> int:
        signed = authority.sign(name)
        context = create_ssl_context(cafile=signed.ca, certfile=signed.certificate, keyfile=signed.key)
        return await produce(kafka.mtls, "by-certificate", b"x", security_protocol="SSL", ssl_context=context)

    assert await produce_as("known") == 0
    with pytest.raises(TopicAuthorizationFailedError):
        await produce_as("stranger")
    kafka.forbid("known", "WRITE", "TOPIC", "by-certificate")
    with pytest.raises(TopicAuthorizationFailedError):
        await produce_as("known")


async def test_a_broker_is_only_who_its_certificate_names(kafka: KafkaServer, authority: Authority) -> None:
    context = create_ssl_context(cafile=authority.ca)
    with pytest.raises(KafkaConnectionError):
        await produce(
            kafka.sasl_ssl.replace("localhost", "127.0.0.1"), "any", b"x", security_protocol="SSL", ssl_context=context
        )


def test_apache_kafka_refuses_to_go_without_the_classic_group_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it no longer refuses, docs/decisions/2026-11-22-the-classic-group-protocol.md says what to do."""
    need(find_java, find_kafka)
    monkeypatch.setattr(servers, "checkpoints", {})  # Kafka's tool says why; a broker's log is not kept
    broker = KafkaServer(tmp_path, settings={"group.coordinator.rebalance.protocols": "consumer"})
    try:
        with pytest.raises(subprocess.CalledProcessError):
            broker.start()
    finally:
        broker.close()
    assert "Disabling the 'classic' protocol is not supported" in broker.log.read_text()


def test_emptying_a_broker_leaves_no_topic(empty_kafka: KafkaServer) -> None:
    empty_kafka.create_topics({"a": 3, "b": 1})
    assert empty_kafka.topics() == {"a": 3, "b": 1}
    empty_kafka.empty()
    assert empty_kafka.topics() == {}


def test_prometheus_answers_a_query(prometheus: PrometheusServer) -> None:
    (only,) = prometheus.query("vector(1)", time_ms=1_795_219_152_000)
    assert only.points == [(1_795_219_152_000, 1.0)]
    assert prometheus.query("scalar(vector(2))")[0].value == 2.0


def test_prometheus_restarts_on_the_same_url_after_kill_9(start_prometheus: Callable[..., PrometheusServer]) -> None:
    server = start_prometheus()
    url = server.url
    server.kill9()
    assert not server.ready()
    assert server.restart().url == url
    assert server.query("vector(3)")[0].value == 3.0


def test_the_old_prometheus_answers_too(prometheus_2_42: PrometheusServer) -> None:
    assert prometheus_2_42.query("vector(4)")[0].value == 4.0


def test_alertmanager_restarts_on_the_same_url_and_has_no_alerts(
    start_alertmanager: Callable[..., AlertmanagerServer],
) -> None:
    server = start_alertmanager()
    url = server.url
    server.kill9()
    assert not server.ready()
    assert server.restart().url == url
    assert server.alerts() == []


def test_a_paused_server_keeps_its_connections_and_goes_on(start_prometheus: Callable[..., PrometheusServer]) -> None:
    server = start_prometheus()
    server.sigstop()
    assert server.running
    assert not server.ready()
    server.sigcont()
    assert server.query("vector(5)")[0].value == 5.0


def test_a_held_port_is_kept_from_others_but_refuses_connections() -> None:
    port = HeldPort()
    try:
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run(
                [sys.executable, "-c", f"import socket; socket.socket().bind(('127.0.0.1', {port.number}))"],
                check=True,
                capture_output=True,
            )
        assert not listens(port.number)
    finally:
        port.release()


def test_servers_do_not_outlive_a_test_run_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from tests.real.process import Server\n"
        "class Sleeper(Server):\n"
        "    def command(self): return ['sleep', '600']\n"
        "    def ready(self): return True\n"
        "print(Sleeper(pathlib.Path(sys.argv[1])).start().pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert has_ended(int(killed.stdout), within_s=10)


def has_ended(pid: int, within_s: float) -> bool:
    """Whether that process, not a child of ours, is gone or a zombie within that time."""
    waited = subprocess.run(["tail", f"--pid={pid}", "-f", os.devnull], timeout=within_s, check=False)
    return waited.returncode == 0
