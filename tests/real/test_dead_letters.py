"""``gpustream dead-letters`` on Apache Kafka: what is resubmitted is there once, and attributed after the fix."""

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result
from confluent_kafka import Producer

from delivery import topic_admin
from gpustream import history
from gpustream.cli import main
from gpustream.dead_letters import letters
from gpustream.dead_letters.letters import TRANSACTIONAL_ID
from tests.eventually import eventually
from tests.real.certificates import Authority
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import KafkaServer
from tests.real.test_bad_input import GPU, attributed_until, snapshot, tick
from topics import dead_letters
from topics.dead_letters import Origin

LETTERS = 2000


@pytest.fixture
async def kafka(empty_kafka: KafkaServer) -> KafkaServer:
    """A broker with our topics."""
    await topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1)
    return empty_kafka


def producing(kafka: KafkaServer) -> AIOKafkaProducer:
    """A producer of large records."""
    return AIOKafkaProducer(bootstrap_servers=kafka.address, max_request_size=8 << 20)


async def command(kafka: KafkaServer, *arguments: str) -> Result:
    """What `gpustream dead-letters` answers."""
    arguments = ("dead-letters", *arguments, "--kafka", kafka.address)
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


async def test_a_letter_is_attributed_once_after_the_fix_with_the_bytes_that_it_lacked(
    kafka: KafkaServer, gpustream: Callable[..., Gpustream]
) -> None:
    async with producing(kafka) as producer:

        async def send(topic: str, record: dict[str, Any]) -> Any:
            return await producer.send_and_wait(topic, json.dumps(record).encode(), b"c/n")

        async def workloads(seq: int, label: str) -> None:
            pod = {"namespace": "ns", "name": "p-0", "uid": "u", "started_ms": 0, "labels": {"big": label}}
            fields = {"schema": 1, "cluster": "c", "node": "n", "epoch": 1, "seq": seq, "ts_ms": seq, "pods": [pod]}
            await send("gpu.workloads", fields)
            await asyncio.sleep(2.2)  # by then what is logged counts for samples

        devices = [{"uuid": f"{GPU[:-2]}{i:02}", "model": "m" * 150_000} for i in range(20)]
        large = tick("n", allocations_seq=1, devices=devices)
        await workloads(1, "x" * 200_000)
        await send("gpu.allocations", snapshot("n", *(str(device["uuid"]) for device in devices)))
        first = await send("gpu.samples", large)
        await send("gpu.samples", tick("n", seq=2, allocations_seq=1))
        stream = gpustream("stream", "stream", "attribution", "--kafka", kafka.address)
        await asyncio.to_thread(stream.start)
        await attributed_until(kafka, "n")
        (letter,) = await read_all(kafka.address, "gpu.dead-letters")
        listed = (await command(kafka, "list", "--format", "json")).stdout
        raw = (await command(kafka, "show", f"{letter.partition}:{letter.offset}", "--format", "raw")).stdout_bytes
        await workloads(2, "small")
        dry = await command(kafka, "resubmit", "--reason", "unsendable")
        results = [await command(kafka, "resubmit", "--reason", "unsendable", "--yes") for _ in range(2)]

    async def both_are_attributed() -> list[Any] | None:
        attributed_records = await read_all(kafka.address, "gpu.attributed")
        return attributed_records if len(attributed_records) >= 2 else None

    attributed = [json.loads(record.value) for record in await eventually(both_are_attributed)]
    samples = [
        record for record in await read_all(kafka.address, "gpu.samples") if json.loads(record.value)["seq"] == 1
    ]
    snapshots = await read_all(kafka.address, "gpu.allocations")

    assert len(letter.value) < len(raw) == len(json.dumps(large))
    assert json.loads(listed) | {"last": ""} == {
        "letters": 1,
        "sent_again": 0,
        "last": "",
        "stage": "attribution",
        "topic": "gpu.samples",
        "reason": "unsendable",
        "key": "c/n",
        "last_letter": f"{letter.partition}:{letter.offset}",
    }
    assert (dry.exit_code, dry.stdout) == (0, "gpu.samples: 1 record would be sent again: add --yes\n")
    assert [(result.exit_code, result.stdout) for result in results] == [
        (0, "gpu.samples: 1 record sent again\n"),
        (0, "nothing is to be sent again\n"),
    ]
    assert [(record.key, record.value, record.partition) for record in samples] == 2 * [(b"c/n", raw, first.partition)]
    assert len(snapshots) == 2
    assert len({(record.key, record.value, record.partition) for record in snapshots}) == 1
    assert [(sample["seq"], sample["attribution"]) for sample in attributed] == [(2, "exact"), (1, "exact")]
    assert {holder["pod"] for device in attributed[1]["devices"] for holder in device["holders"]} == {"p-0"}


async def test_no_letter_is_sent_twice_however_often_the_command_is_killed(kafka: KafkaServer) -> None:
    async with producing(kafka) as producer:
        for n in range(LETTERS):
            value = json.dumps(tick(f"n{n}")).encode()
            origin = Origin("gpu.samples", n % 2, n)
            letter = dead_letters.letter(
                f"c/n{n}".encode(), value, origin, stage="attribution", error="undecodable: x", at_ms=1
            )
            await producer.send(dead_letters.TOPIC.name, letter.value, letter.key, headers=letter.headers)
        await producer.flush()

    arguments = [sys.executable, "-m", "gpustream", "dead-letters", "resubmit", "--kafka", kafka.address, "--yes"]
    async with history.opened(kafka.connection, ["gpu.samples"]) as log:

        async def committed() -> int:
            return sum(span.end for span in (await log.spans("gpu.samples")).values())

        for _ in range(3):
            before = await committed()
            process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.DEVNULL)
            try:
                await eventually(partial(_has_sent, process, before, committed))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    last = await command(kafka, "resubmit", "--yes")
    records = await read_all(kafka.address, "gpu.samples")

    assert last.exit_code == 0
    assert Counter(record.key for record in records) == {f"c/n{n}".encode(): 1 for n in range(LETTERS)}
    assert (await command(kafka, "resubmit", "--yes")).stdout == "nothing is to be sent again\n"


async def _has_sent(process: asyncio.subprocess.Process, before: int, committed: Callable[[], Awaitable[int]]) -> bool:
    """Whether it has begun to send, or there was nothing to be sent."""
    return process.returncode is not None or await committed() > before


async def test_what_readers_would_drop_or_take_for_news_is_refused_with_the_reason(kafka: KafkaServer) -> None:
    async with producing(kafka) as producer:
        for topic, key, value in (
            ("gpu.attributed", b"c/n", b"{}"),
            ("gpu.alerts", b"f", b"{}"),
            ("gpu.samples", b"c/n", b"x" * 100_000),
            ("gpu.samples", b"k" * 2000, b"{}"),
        ):
            letter = dead_letters.letter(key, value, Origin(topic, 0, 7), stage="s", error="e: f", at_ms=1)
            await producer.send_and_wait(
                dead_letters.TOPIC.name, letter.value, letter.key, headers=letter.headers, partition=0
            )
    result = await command(kafka, "resubmit", "--yes")

    assert result.exit_code == 1
    assert result.stdout == "nothing is to be sent again\n"
    assert result.stderr.splitlines() == [
        "not sent: 0:0: every reader of gpu.attributed drops a tick that comes again as a replay",
        "not sent: 0:1: gpu.alerts keeps the last record of each key: this one would take the place of a newer one",
        "not sent: 0:2: the letter lacks a part of its value, and gpu.samples does not have the record any more",
        "not sent: 0:3: the letter lacks its key, and gpu.samples does not have the record any more",
    ]
    assert await read_all(kafka.address, "gpu.samples") == []


async def test_records_without_a_key_are_sent_again_once_and_hold_up_no_others(kafka: KafkaServer) -> None:
    records = [(None, b"no key"), (b"k" * 2000, b"a long key"), (b"c/n", b"a key"), (None, None)]
    originals = Producer({"bootstrap.servers": kafka.address})  # aiokafka's sends none without key and value
    for key, value in records:
        originals.produce("gpu.samples", value, key, partition=0)
    originals.flush(10)
    async with producing(kafka) as producer:
        for offset, (key, value) in enumerate(records):
            origin = Origin("gpu.samples", 0, offset)
            letter = dead_letters.letter(key, value, origin, stage="s", error="e: f", at_ms=1)
            await producer.send_and_wait(
                dead_letters.TOPIC.name, letter.value, letter.key, headers=letter.headers, partition=0
            )
    first, second = [await command(kafka, "resubmit", "--yes") for _ in range(2)]
    samples = [(record.key, record.value) for record in await read_all(kafka.address, "gpu.samples")]

    assert (first.stdout, second.stdout) == (
        "gpu.samples: 3 records sent again\n",
        "nothing is to be sent again\n",
    )
    assert first.stderr == "not sent: 0:3: it has neither a key nor a value: there is nothing to send\n"
    assert samples == [*records, *records[:3]]


RIGHTS = [
    *(("READ", "TOPIC", name) for name in (dead_letters.TOPIC.name, *letters.RESUBMITTABLE)),
    *(("WRITE", "TOPIC", name) for name in (dead_letters.TOPIC.name, *letters.RESUBMITTABLE)),
    ("WRITE", "TRANSACTIONAL_ID", TRANSACTIONAL_ID),
]


async def test_a_user_resubmits_through_tls_with_exactly_the_acls_that_the_docs_name(
    kafka: KafkaServer, authority: Authority, tmp_path: Path
) -> None:
    async with producing(kafka) as producer:
        letter = dead_letters.letter(b"c/n", b"{}", Origin("gpu.samples", 0, 7), stage="s", error="e: f", at_ms=1)
        position = {"headers": letter.headers, "partition": 0}
        await producer.send_and_wait(dead_letters.TOPIC.name, letter.value, letter.key, **position)
    kafka.add_user("operator", "secret")
    (tmp_path / "password").write_text("secret")
    login = ("--kafka-security", "sasl-ssl", "--kafka-sasl-mechanism", "scram-sha-512", "--kafka-username", "operator")
    files = ("--kafka-password-file", str(tmp_path / "password"), "--kafka-ca", str(authority.ca))
    arguments = ("dead-letters", "resubmit", "0:0", "--yes", "--kafka", kafka.sasl_ssl, *login, *files)
    for acl in RIGHTS:
        kafka.allow("operator", *acl)
    try:
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    finally:
        for acl in RIGHTS:
            kafka.forbid("operator", *acl)

    assert (result.exit_code, result.stdout) == (0, "gpu.samples: 1 record sent again\n"), result.stderr
