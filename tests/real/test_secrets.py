"""No secret is in anything that a component writes, while it works and while it is refused."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from tests.eventually import LIMIT_S, eventually
from tests.real.certificates import Authority
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import KafkaServer
from topics import TOPICS

SECRETS = {
    "password": "Kafka-Secret-1f6c",
    "wrong": "Wrong-Secret-9a2e",
    "token": "Bearer-Secret-77d0",
    "webhook": "Webhook-Secret-4b3f-0123456789abcdef",
}


def commands(login: tuple[str, ...], folder: Path, properties: Path, url: str) -> dict[str, tuple[str, ...]]:
    """Every component, those with secrets of their own with these; one reads Kafka's from a file of a cloud."""
    kubelet = ("--pod-resources-socket", "off")
    return {
        "node": ("produce", "node", "--node", "n", *kubelet, *login),
        "simulated": ("produce", "simulated", "--fleet", "2x2", *login),
        "attribution": ("stream", "attribution", *login, "--log-format", "json"),
        "alerts": ("stream", "alerts", *login),
        "remote-write": ("sink", "remote-write", "--url", url, "--bearer-token-file", f"{folder / 'token'}", *login),
        "scrape": ("sink", "scrape", "--scrape-listen", "127.0.0.1:0", "--kafka-config", str(properties)),
        "alertmanager": ("sink", "alertmanager", "--url", url, *login),
        "webhook": ("sink", "webhook", "--url", url, "--secret-file", f"{folder / 'webhook'}", *login),
        "refused": ("sink", "scrape", "--scrape-listen", "127.0.0.1:0", *login[:-1], f"{folder / 'wrong'}"),
    }


def answer(process: Gpustream, path: str) -> str:
    """The answer of its own HTTP server, whatever the status."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{process.ports[0].number}{path}", timeout=LIMIT_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    except OSError:
        return ""


def texts_of(name: str, process: Gpustream) -> dict[str, str]:
    """Everything that a process has written when it has ended."""
    texts = {f"{path} of {name}": answer(process, path) for path in ("/metrics", "/readyz", "/healthz")}
    command = Path(f"/proc/{process.pid}/cmdline").read_text()
    process.stop()
    return {**texts, f"command line of {name}": command, f"log of {name}": process.log.read_text()}


async def test_no_component_writes_a_secret(
    empty_kafka: KafkaServer,
    authority: Authority,
    receiver: str,
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    for name, secret in SECRETS.items():
        (folder / name).write_text(secret)
    for resource in ("TOPIC", "GROUP"):
        await asyncio.to_thread(empty_kafka.allow, "secretive", "ALL", resource, "*")
    await asyncio.to_thread(empty_kafka.add_user, "secretive", SECRETS["password"])
    await topic_admin.create(empty_kafka.connection, partitions=1, replication_factor=1)
    async with AIOKafkaProducer(bootstrap_servers=empty_kafka.address) as producer:
        for topic in ("gpu.samples", "gpu.attributed", "gpu.alerts"):
            await producer.send_and_wait(topic, b"{", key=b"c/malformed")
    properties = folder / "client.properties"
    properties.write_text(
        f"bootstrap.servers={empty_kafka.sasl_ssl}\nsecurity.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required"
        f' username="secretive" password="{SECRETS["password"]}";\nssl.ca.location={authority.ca}\n'
    )
    tls = ("--kafka", empty_kafka.sasl_ssl, "--kafka-security", "sasl-ssl", "--kafka-ca", str(authority.ca))
    user = ("--kafka-sasl-mechanism", "scram-sha-512", "--kafka-username", "secretive")
    login = (*tls, *user, "--kafka-password-file", str(folder / "password"))
    started = {
        name: gpustream(name, *arguments) for name, arguments in commands(login, folder, properties, receiver).items()
    }
    for process in started.values():
        process.begin()
    working = [process for name, process in started.items() if name not in ("node", "refused")]

    async def all_work() -> bool:
        return all([await asyncio.to_thread(answer, process, "/readyz") == "ready\n" for process in working])

    await eventually(all_work)

    async def is_refused() -> bool:
        return "does not accept the user" in await asyncio.to_thread(answer, started["refused"], "/readyz")

    await eventually(is_refused)

    async def has_letters() -> bool:
        return len(await read_all(empty_kafka.address, "gpu.dead-letters")) >= 3

    await eventually(has_letters)
    texts: dict[str, str] = {}
    for name, process in started.items():
        texts |= await asyncio.to_thread(texts_of, name, process)
    for topic in TOPICS:
        texts[topic] = str(
            [(record.key, record.value, record.headers) for record in await read_all(empty_kafka.address, topic)]
        )
    secrets = {**SECRETS, "base64": "S2Fma2EtU2VjcmV0"}
    assert [
        (source, name) for source, text in texts.items() for name, secret in secrets.items() if secret in text
    ] == []
    assert all(texts[f"log of {name}"] for name in ("attribution", "refused"))
    assert "gpustream_" in texts["/metrics of attribution"]
