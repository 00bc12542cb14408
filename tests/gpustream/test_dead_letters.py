"""Which letters are looked at, what is said of several, and what an old tick that comes again means to its readers."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from delivery.replays import LastTick, after, verdict
from gpustream.cli import main
from gpustream.dead_letters import letters
from gpustream.dead_letters.command import _as_text, group_of, merge_groups
from gpustream.dead_letters.letters import Letter, LetterFilter, LetterId, letter_id, refusal_reason
from gpustream.embedded import EmbeddedBroker
from gpustream.history import History
from streams.attribution import join
from tests.clock import run
from tests.streams.attribution.records import container, gpu, pending, snapshot, tick
from topics.attributed import AttributedSample
from topics.dead_letters import Cause, Origin

GRACE_S = 10.0


def letter(offset: int, *, key: str = "c/n", topic: str = "gpu.samples", error: str = "undecodable: x") -> Letter:
    cause = Cause(Origin(topic, 0, 40), "attribution", error, 2, 1)
    return Letter(LetterId(0, offset), offset * 1000, key.encode(), b"{}", cause)


@pytest.mark.parametrize(
    ("letters_filter", "expected"),
    [
        (LetterFilter(), {0, 1, 2}),
        (LetterFilter(topic="gpu.samples"), {0, 1}),
        (LetterFilter(reason="unsendable", stage="attribution"), {1}),
        (LetterFilter(key="c/m"), {2}),
        (LetterFilter(ids=frozenset([LetterId(0, 2)])), {2}),
        (LetterFilter(topic="gpu.samples", ids=frozenset([LetterId(0, 2)])), set()),
    ],
)
def test_letters_are_chosen_by_all_that_is_given(letters_filter: LetterFilter, expected: set[int]) -> None:
    letters = [letter(0), letter(1, error="unsendable: y"), letter(2, key="c/m", topic="gpu.allocations")]

    assert {dead_letter.id.offset for dead_letter in letters if dead_letter in letters_filter} == expected


@pytest.mark.parametrize("stage", ["sink remote-write", "remote-write", "remote_write"])
def test_the_letters_of_a_sink_are_chosen_by_any_way_to_write_its_name(stage: str) -> None:
    by_sink = letter(0)._replace(cause=letter(0).cause._replace(stage="sink remote-write"))

    assert by_sink in LetterFilter(stage=stage)
    assert by_sink not in LetterFilter(stage="attribution")


def test_rows_of_several_letters_say_what_they_have_in_common() -> None:
    first, second = letter(1), letter(2, key="c/m")._replace(resubmitted=True)
    merged = merge_groups(group_of(first), group_of(second))

    assert merged._asdict() == {
        "letters": 2,
        "sent_again": 1,
        "last": "1970-01-01 00:00:02Z",
        "stage": "attribution",
        "topic": "gpu.samples",
        "reason": "undecodable",
        "key": "several",
        "last_letter": "0:2",
    }


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "a:1", "-1:2", "1:2:3", "1" * 99 + ":1"])
def test_what_is_no_letter_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write PARTITION:OFFSET"):
        letter_id(text)
    assert CliRunner().invoke(main, ["dead-letters", "show", "--kafka", "x:1", "--", text]).exit_code == 2


def test_only_what_attribution_reads_is_sent_again_and_only_once() -> None:
    assert [refusal_reason(letter(0, topic=name)) for name in letters.RESUBMITTABLE] == [None, None, None]
    assert refusal_reason(letter(0)._replace(resubmitted=True)) == letters.ALREADY_SENT
    assert refusal_reason(letter(0, topic="gpu.alert-state")) == "gpu.alert-state is not a topic that attribution reads"


@pytest.mark.parametrize("partition", [-1, 2])
async def test_of_a_partition_that_the_topic_does_not_have_no_record_is_looked_for(partition: int) -> None:
    reader = cast("History", SimpleNamespace(partitions={"gpu.samples": 2}))
    cut = letter(0)._replace(cause=Cause(Origin("gpu.samples", partition, 0), "attribution", "undecodable: x", 9, 1))

    assert await letters.original(reader, cut) == f"gpu.samples has no partition {partition} any more"


def test_a_letter_that_is_named_and_not_there_is_an_error() -> None:
    with EmbeddedBroker() as broker:
        broker.start(dict.fromkeys(("gpu.dead-letters", *letters.RESUBMITTABLE), 1))
        result = CliRunner().invoke(main, ["dead-letters", "resubmit", "0:7", "0:3", "--kafka", broker.address])
    assert (result.exit_code, result.stdout) == (1, "nothing is to be sent again\n")
    assert result.stderr == "not sent: 0:3, 0:7: it is not there, or the other options leave it out\n"


# -- what an old tick means


def _worker_that_forgot() -> join.NodeState:
    """A node's state after some minutes: the first snapshot is not in use any more, and what came is committed."""
    state, offset = join.NEW, 0
    for number in (1, 2, 3):
        state, _ = join.step(state, snapshot(number, container(f"p{number}", gpu(0))), GRACE_S)
        for _ in range(3):
            offset += 1
            state, out = join.step(state, pending(tick(offset, number, ts_ms=offset * 11_000), offset, offset), GRACE_S)
            assert len(out) == 1
    return join.step(state, join.Committed(offset + 1), GRACE_S)[0]


OLD = pending(tick(2, 1, ts_ms=22_000), offset=11, at_s=20.0)


def test_an_old_tick_is_attributed_exactly_if_its_snapshot_is_sent_again_before_it() -> None:
    state, _ = join.step(_worker_that_forgot(), snapshot(1, container("p1", gpu(0))), GRACE_S)
    _, (joined,) = join.step(state, OLD, GRACE_S)

    assert joined.sample.attribution == "exact"
    assert [holder.pod for holder in joined.sample.devices[0].holders] == ["p1"]


def test_without_its_snapshot_it_waits_for_grace_and_the_nodes_ticks_behind_it() -> None:
    state, waiting = join.step(_worker_that_forgot(), OLD, GRACE_S)
    state, behind = join.step(state, pending(tick(10, 3, ts_ms=110_000), offset=12, at_s=21.0), GRACE_S)
    _, out = join.step(state, join.AllocationsRead(OLD.read_s + GRACE_S), GRACE_S)

    assert (waiting, behind) == ([], [])
    assert [(record.sample.seq, record.sample.attribution) for record in out] == [(2, "none"), (10, "exact")]


def test_readers_that_had_a_newer_tick_of_its_run_drop_it_and_others_take_it() -> None:
    def attributed(run_id: int, seq: int, offset: int) -> AttributedSample:
        at_ms = seq * 1000
        fields = {"schema": 1, "cluster": "c", "node": "n", "attribution": "exact"}
        return AttributedSample(run_id=run_id, seq=seq, ts_ms=at_ms, offset=offset, **fields)  # type: ignore[arg-type]

    newest: LastTick = after(None, attributed(1, 9, 9))
    newer_run = after(newest, attributed(2, 10, 10))

    assert verdict(newest, attributed(1, 2, 11)) == "replay"
    assert verdict(newer_run, attributed(1, 2, 11)) == "next"


@pytest.mark.parametrize("value", [b"[" * 100_000 + b"]" * 100_000, b"[" * 100_000, b'"\xff"'])
def test_a_record_that_can_not_be_written_as_json_is_shown_as_it_is(value: bytes) -> None:
    *_, shown = _as_text(letter(0)._replace(value=value), value, None)
    assert shown == repr(value)[2:-1]


def test_the_brackets_in_the_texts_of_a_record_do_not_nest_it() -> None:
    value = b'{"error": "\\"' + b"[{" * 1000 + b'", "seq": 1}'
    *_, first, _, seq, last = _as_text(letter(0), value, None)

    assert (first, seq, last) == ("{", '  "seq": 1', "}")


def test_a_record_that_nests_deeply_is_shown_without_line_breaks() -> None:
    deep, limit = b"[" * 1001 + b"]" * 1001, sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)  # as newer Pythons: msgspec decodes it
    try:
        *_, shown = _as_text(letter(0), deep, None)
    finally:
        sys.setrecursionlimit(limit)

    assert shown == deep.decode()


def test_a_record_is_shown_with_its_own_digits() -> None:
    value = b'{"index": 18446744073709551616, "ratio": 0.10000000000000000555, "seq": 1, "seq": 2, "power": 1e400}'
    *_, first, index, ratio, one, two, power, last = _as_text(letter(0), value, None)

    assert "".join(line.strip() for line in (first, index, ratio, one, two, power, last)) == (
        '{"index": 18446744073709551616,"ratio": 0.10000000000000000555,"seq": 1,"seq": 2,"power": 1e400}'
    )


def test_a_letter_of_any_log_time_is_listed() -> None:
    assert group_of(letter(0)._replace(logged_ms=2**62)).last == "9999-12-31 23:59:59Z"


EVIL = "\x1b]0;t\x07\x9b31m\n\u202e"


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    """A broker with a dead letter whose headers are not ours."""
    headers = {"topic": EVIL, "partition": "0", "offset": str(2**70), "stage": EVIL, "error": EVIL}
    headers |= {"length": str(2**70), "at_ms": str(2**70)}

    async def write(kafka: str) -> None:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            encoded = [(name, text.encode()) for name, text in headers.items()]
            await producer.send_and_wait("gpu.dead-letters", b"{}", key=EVIL.encode(), headers=encoded)

    with EmbeddedBroker() as broker:
        broker.start(dict.fromkeys(("gpu.dead-letters", *letters.RESUBMITTABLE), 1))
        asyncio.run(write(broker.address))
        yield broker.address


@pytest.mark.parametrize(
    "command",
    [["list"], ["list", "--format", "json"], ["show", "0:0"], ["show", "0:0", "--format", "json"], ["resubmit"]],
)
def test_no_header_of_a_letter_steers_a_terminal(hostile: str, command: list[str]) -> None:
    result = CliRunner().invoke(main, ["dead-letters", *command, "--kafka", hostile])

    assert result.exit_code == (1 if command == ["resubmit"] else 0)
    assert result.output
    assert all(line.replace("\t", "").isprintable() for line in result.output.split("\n"))


def test_what_is_to_be_sent_to_a_broker_that_is_not_there_is_one_sentence() -> None:
    result = CliRunner().invoke(main, ["dead-letters", "resubmit", "--yes", "--kafka", "127.0.0.1:1"])

    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("no Kafka broker answers at 127.0.0.1:1 ")


def test_a_broker_that_goes_away_inside_the_transaction_ends_the_command() -> None:
    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[None]:
        try:
            yield
            await asyncio.get_running_loop().create_future()  # the end is not acknowledged
        except asyncio.CancelledError:
            await asyncio.get_running_loop().create_future()  # and neither is the end without what was sent
            raise

    async def send(*_: object, **__: object) -> asyncio.Future[int]:
        acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        acknowledged.set_result(0)
        return acknowledged

    async def resubmit() -> None:
        sender = SimpleNamespace(transaction=transaction, send=send)
        resubmission = letters.Resubmission(Connection("127.0.0.1:9092"), sender)
        await resubmission.add(letter(1), letters.Original(b"k", b"v"), [])
        await resubmission.flush()

    with pytest.raises(BrokerError, match=r"has not ended the transaction in 30 s\. Run the command again"):
        run(resubmit())
