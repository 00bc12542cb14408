"""``gpustream run`` and ``gpustream top`` on a real terminal, by what they write to it."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from gpustream.embedded import PARTITIONS, EmbeddedBroker
from producers.simulated.fleet import Fleet
from tests.gpustream.test_fleet import record
from tests.terminal import Terminal
from topics import TOPICS

pytestmark = pytest.mark.slow

ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|9[0-7]|38)(?:;[0-9;]*)?m")


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts the command on a terminal; what still runs is killed in the end."""
    started: list[Terminal] = []

    def run(*arguments: str, **how: Any) -> Terminal:
        started.append(Terminal(*arguments, **how))
        return started[-1]

    yield run
    for terminal in started:
        terminal.close()


def run_options(port: int) -> list[str]:
    return [
        "run",
        "--simulate",
        "2x4",
        "--interval",
        "250ms",
        "--listen",
        "off",
        "--page-listen",
        "off",
        "--scrape-listen",
        f"127.0.0.1:{port}",
    ]


def test_a_run_asks_before_it_stops_and_leaves_the_summary_on_a_terminal_as_it_was(start: Any, port: int) -> None:
    terminal = start(*run_options(port))
    terminal.shows(b"GPUs by node")
    terminal.press(b"3")
    terminal.shows(b"STATUS")
    terminal.press(b"q")
    terminal.shows(b"Stop the pipeline?")
    terminal.press(b"n")
    mark = len(terminal.written)
    terminal.resize(200, 60)
    os.killpg(terminal.process.pid, signal.SIGWINCH)
    terminal.shows(b"MODEL", since=mark)
    terminal.press(b"qy")
    written = terminal.ended()

    assert terminal.process.returncode == 0
    after_leaving = written[written.rindex(LEAVES) :]
    assert written.count(ENTERS) == 1
    assert b"pods at a time" in after_leaving
    assert after_leaving.split()[-2:] == [b"lost", b"0"]
    assert b"\x1b[?25h" in written[written.index(ENTERS) :]


def test_ctrl_c_stops_a_run_at_once_and_no_colour_is_written_if_none_is_wanted(start: Any, port: int) -> None:
    terminal = start(*run_options(port), environ={"NO_COLOR": "1"})
    terminal.shows(b"GPUs by node")
    terminal.press(b"\x03")
    written = terminal.ended()

    assert terminal.process.returncode == 0
    assert written.split()[-2:] == [b"lost", b"0"]
    assert COLOUR.findall(written) == []


@pytest.mark.parametrize("ending", [b"q", b"\x03", signal.SIGTERM])
async def test_top_shows_the_fleet_of_any_pipeline_until_it_is_ended(
    start: Any, ending: bytes | signal.Signals
) -> None:
    node = Fleet(1, 8).node(0)
    with EmbeddedBroker() as broker:
        broker.start(dict.fromkeys(TOPICS, PARTITIONS))
        async with AIOKafkaProducer(bootstrap_servers=broker.address) as producer:
            await producer.send_and_wait("gpu.attributed", record(node.read(1000), node.name, 1, 1000))
        terminal = start("top", "--kafka", broker.address, environ={"TERM": "linux"})
        await asyncio.to_thread(terminal.shows, b"sim-0000")
        if isinstance(ending, bytes):
            terminal.press(ending)
        else:
            terminal.process.send_signal(ending)
        written = await asyncio.to_thread(terminal.ended)

    assert terminal.process.returncode == 0
    assert written.count(LEAVES) == 1
    assert COLOUR.search(written)
    assert b"[38;" not in written, "only the terminal's own 16 colours"


def test_top_without_a_broker_is_a_sentence(start: Any) -> None:
    terminal = start("top", "--kafka", "127.0.0.1:1")
    written = terminal.ended()

    assert terminal.process.returncode == 1
    assert ENTERS not in written
    assert b"127.0.0.1:1" in written
    assert b"Traceback" not in written


def test_a_plain_run_has_no_screen(start: Any, port: int) -> None:
    terminal = start(*run_options(port), "--plain", "--duration", "1s")
    written = terminal.ended()

    assert terminal.process.returncode == 0
    assert ENTERS not in written
    assert written.split()[-2:] == [b"lost", b"0"]


def test_a_component_that_fails_is_said_on_a_terminal_as_it_was(start: Any, port: int) -> None:
    terminal = start(*run_options(port), "--truth", "/proc/version")
    written = terminal.ended()

    assert terminal.process.returncode == 1
    assert b"simulated failed" in written[written.rindex(LEAVES) :]
