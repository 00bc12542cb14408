"""Apache Kafka that wants TLS and a login: each error is one sentence, and is fixed without a restart."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from delivery import clients, opening, topic_admin
from delivery.connection import Connection
from delivery.group import ConsumerGroup
from delivery.ledger import Partition
from delivery.settings import MemberSettings
from tests.eventually import eventually
from tests.real.certificates import Authority
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import PLAIN_PASSWORDS, KafkaServer, unsecured_token

FIRST, SECOND, WRONG_PASSWORD = "First-Passw0rd", "Second-Passw0rd", "Wrong-Passw0rd"


@pytest.fixture(autouse=True)
def _retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that need a fix are retried soon."""
    monkeypatch.setattr(opening, "PAUSES_S", (0.05,))


@pytest.fixture
def scram(kafka: KafkaServer, authority: Authority, tmp_path: Path) -> Connection:
    """A user who may connect."""
    kafka.add_user("connects", FIRST)
    (tmp_path / "password").write_text(f"{FIRST}\n")
    return Connection(
        kafka.sasl_ssl,
        security="sasl-ssl",
        mechanism="scram-sha-512",
        username="connects",
        password_file=tmp_path / "password",
        ca=authority.ca,
    )


def error_contains(connection: Connection, text: str) -> bool:
    """Whether the known error of a connection contains this text."""
    return text in (opening.trouble(connection) or "")


async def connects(connection: Connection) -> bool:
    """Whether a broker can be asked something."""
    client = await asyncio.wait_for(clients.connect_consumer(connection), 120)
    await clients.close(client)
    return opening.trouble(connection) is None


@asynccontextmanager
async def connecting(connection: Connection) -> AsyncIterator["asyncio.Task[bool]"]:
    """Tries to connect until the end."""
    task = asyncio.create_task(connects(connection))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_each_way_to_authenticate_is_understood(
    kafka: KafkaServer, authority: Authority, scram: Connection, tmp_path: Path
) -> None:
    (tmp_path / "plain").write_text(PLAIN_PASSWORDS["plain"])
    me = authority.sign("somebody")
    both = tmp_path / "both.pem"
    both.write_text(me.key.read_text() + me.certificate.read_text())
    for connection in (
        scram,
        replace(scram, mechanism="scram-sha-256"),
        replace(scram, mechanism="plain", username="plain", password_file=tmp_path / "plain"),
        replace(scram, servers=kafka.sasl_plaintext, security="sasl-plaintext"),
        Connection(kafka.mtls, security="ssl", ca=authority.ca, cert=me.certificate, key=me.key),
        Connection(kafka.mtls, security="ssl", ca=authority.ca, cert=both),
    ):
        assert await connects(connection)


async def test_whatever_keeps_a_connection_from_being_opened_is_one_sentence(
    kafka: KafkaServer, authority: Authority, scram: Connection, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    stranger = other.sign("stranger")
    (tmp_path / "wrong").write_text(WRONG_PASSWORD)
    mutual = Connection(kafka.mtls, security="ssl", ca=authority.ca)
    cases = {
        "does not accept the user connects with this password": replace(scram, password_file=tmp_path / "wrong"),
        "does not accept the user nobody with this password": replace(scram, username="nobody"),
        "--kafka-password-file": replace(scram, password_file=tmp_path / "missing"),
        "does not offer SCRAM-SHA-256": replace(
            scram, servers=kafka.sasl_plaintext, security="sasl-plaintext", mechanism="scram-sha-256"
        ),
        f"not signed by a CA of {other.ca}": replace(scram, ca=other.ca),
        "not signed by a CA that this machine trusts": replace(scram, ca=None),
        "it is not who it should be": replace(scram, servers=scram.servers.replace("localhost", "127.0.0.1")),
        "it may want TLS": Connection(kafka.sasl_ssl),
        "TLS handshake: give its port for TLS": Connection(kafka.address, security="ssl", ca=authority.ca),
        "wants no login on this port": replace(scram, servers=kafka.address, security="sasl-plaintext"),
        "wants a login": Connection(kafka.sasl_plaintext),
        "wants a login: give --kafka-security sasl-ssl": Connection(kafka.sasl_ssl, security="ssl", ca=authority.ca),
        "wants a certificate of the client": mutual,
        "does not accept the certificate of --kafka-cert": replace(mutual, cert=stranger.certificate, key=stranger.key),
    }
    for expected, connection in cases.items():
        async with connecting(connection) as task:
            await eventually(partial(error_contains, connection, expected), expected, unless=task)


async def test_a_password_that_is_corrected_needs_no_restart(scram: Connection, tmp_path: Path) -> None:
    assert scram.password_file is not None
    scram.password_file.write_text(WRONG_PASSWORD)
    async with connecting(scram) as task:
        await eventually(partial(error_contains, scram, "this password"))
        scram.password_file.write_text(FIRST)
        assert await asyncio.wait_for(task, 120)


async def test_a_ca_that_is_renewed_on_disk_needs_no_restart(scram: Connection, tmp_path: Path) -> None:
    assert scram.ca is not None
    renewed = replace(scram, ca=tmp_path / "ca.pem")
    (tmp_path / "ca.pem").write_text(Authority(tmp_path / "old").ca.read_text())
    async with connecting(renewed) as task:
        await eventually(partial(error_contains, renewed, "not signed by a CA of"))
        (tmp_path / "ca.pem").write_text(scram.ca.read_text())
        assert await asyncio.wait_for(task, 120)


async def test_a_token_is_obtained_by_client_credentials_and_asked_for_again_before_it_expires(
    kafka: KafkaServer, authority: Authority, tmp_path: Path
) -> None:
    requests: list[tuple[str, str | None]] = []
    secret = tmp_path / "secret"
    secret.write_text("wrong")

    async def answer(request: web.Request) -> web.Response:
        credentials = b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()
        requests.append((credentials, str((await request.post()).get("scope"))))
        if credentials != "fleet:Client-S3cret":
            return web.json_response({"error": "invalid_client"}, status=401)
        token = unsecured_token("fleet", lifetime_s=10)
        return web.json_response({"access_token": token, "token_type": "Bearer", "expires_in": 0.5})

    app = web.Application()
    app.router.add_post("/token", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    connection = Connection(
        kafka.sasl_ssl,
        security="sasl-ssl",
        mechanism="oauthbearer",
        ca=authority.ca,
        token_endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}/token",
        oauth_client_id="fleet",
        oauth_client_secret_file=secret,
        oauth_scope="kafka",
    )
    try:
        async with connecting(connection) as task:
            await eventually(partial(error_contains, connection, "it answers 401 (invalid_client"))
            secret.write_text("Client-S3cret")
            assert await asyncio.wait_for(task, 120)
        before = len(requests)

        async def asked_again() -> bool:
            return await connects(connection) and len(requests) > before

        await eventually(asked_again)  # once four fifths of the token's life are over
        assert requests[-1] == ("fleet:Client-S3cret", "kafka")
    finally:
        await runner.cleanup()


async def test_a_right_that_is_taken_away_is_reported_and_once_given_again_it_is_used_without_a_restart(
    kafka: KafkaServer, scram: Connection
) -> None:
    topic, group = "connect-rights", "connect-rights"
    kafka.create_topics({topic: 1})
    for operation in ("DESCRIBE", "READ"):
        kafka.allow("connects", operation, "TOPIC", topic)
    kafka.allow("connects", "READ", "GROUP", group)
    settings = MemberSettings(
        kafka=scram.servers,
        kafka_security="sasl-ssl",
        kafka_sasl_mechanism="scram-sha-512",
        kafka_username="connects",
        kafka_password_file=scram.password_file,
        kafka_ca=scram.ca,
        group=group,
        session_timeout_s=6.0,
    )
    member = Counting()
    reader = ConsumerGroup(settings, [topic], member, {topic: 1})
    await reader.connect()
    reader.join()
    try:
        await eventually(lambda: reader.not_ready() == [] and member.assignments == 1)
        kafka.forbid("connects", "READ", "GROUP", group)
        await eventually(lambda: f"Read the consumer group {group}" in "".join(reader.not_ready()))
        kafka.allow("connects", "READ", "GROUP", group)
        await eventually(lambda: reader.not_ready() == [] and member.assignments > 1)
        assert reader.assignment() == {Partition(topic, 0)}
        kafka.forbid("connects", "READ", "TOPIC", topic)
        await eventually(lambda: fetched(reader, topic))
        kafka.allow("connects", "READ", "TOPIC", topic)
        assert not reader.failed.done()
    finally:
        await reader.close()


class Counting:
    """A member that counts its assignments."""

    assignments = 0

    async def revoked(self) -> None:
        """Nothing to commit."""

    def assigned(self, tps: set[Partition]) -> None:
        self.assignments += 1


async def fetched(group: ConsumerGroup, topic: str) -> bool:
    """Whether a fetch reports the error."""
    await group.fetch({Partition(topic, 0)}, 0.1)
    return f"use the topic {topic}" in "".join(group.not_ready())


async def test_a_password_changes_while_components_run_and_no_tick_is_lost(
    start_kafka: Callable[..., KafkaServer],
    gpustream: Callable[..., Gpustream],
    authority: Authority,
    tmp_path: Path,
) -> None:
    kafka = start_kafka(authority=authority, settings={"connections.max.reauth.ms": "2000"})
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    kafka.add_user("rotates", FIRST)
    for resource, name in (("TOPIC", "*"), ("GROUP", "*"), ("CLUSTER", "kafka-cluster")):
        kafka.allow("rotates", "ALL", resource, name)
    config, truth = tmp_path / "client.properties", tmp_path / "truth.jsonl"
    write(config, kafka, authority, FIRST)
    reached = ("--kafka-config", str(config))
    fleet = gpustream("fleet", "produce", "simulated", "--fleet", "2x1", "--truth", str(truth), *reached)
    stream = gpustream("stream", "stream", "attribution", *reached)
    for process in (fleet, stream):
        process.begin()
    for process in (fleet, stream):
        await asyncio.to_thread(process.wait_until, process.ready)
    kafka.add_user("rotates", SECOND)  # within two seconds every connection is closed by the broker
    for process in (fleet, stream):
        await eventually(partial(is_refused, process), every_s=0.2)
    write(config, kafka, authority, SECOND)
    for process in (fleet, stream):
        await asyncio.to_thread(process.wait_until, process.ready)
    await asyncio.to_thread(fleet.stop)
    true_ticks = {(row["node"], row["seq"]) for row in map(json.loads, truth.read_text().splitlines())}
    for topic in ("gpu.samples", "gpu.attributed"):
        await eventually(partial(ticks, kafka, topic, true_ticks), every_s=0.5)
    output = "".join(process.log.read_text() + (process.get("/metrics") or "") for process in (fleet, stream))
    assert output.count("not used here: line 6, linger.ms") == 2
    assert not [secret for secret in (FIRST, SECOND) if secret in output]


def write(config: Path, kafka: KafkaServer, authority: Authority, password: str) -> None:
    """Writes the file as a console of a cloud does."""
    config.write_text(
        f"bootstrap.servers={kafka.sasl_ssl}\n"
        "security.protocol=SASL_SSL\n"
        "sasl.mechanism=SCRAM-SHA-512\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required"
        f' username="rotates" password="{password}";\n'
        f"ssl.ca.location={authority.ca}\n"
        "linger.ms=5\n"
    )


def is_refused(process: Gpustream) -> bool:
    """Whether /readyz says that the password is wrong."""
    return "does not accept the user" in process.why_not()


async def ticks(kafka: KafkaServer, topic: str, true_ticks: set[tuple[str, int]]) -> bool:
    """Whether each true tick is in a topic, once."""
    records = [json.loads(record.value) for record in await read_all(kafka.address, topic)]
    seqs = [(tick["node"], tick["seq"]) for tick in records]
    assert len(seqs) == len(set(seqs))
    return set(seqs) == true_ticks
