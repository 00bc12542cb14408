"""What tests of more than one folder use."""

import asyncio
import gc
import logging
import os
import sys
import threading
import warnings
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.nvml.scripted import NoCompiler, ScriptedNvml, library

# A busy machine is no reason to fail, so no example has a deadline. The same examples run every time; what runs each
# night looks for new ones: GPUSTREAM_HYPOTHESIS=nightly.
for name, examples, same in (("fast", 5, True), ("default", 25, True), ("nightly", 200, False)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=same,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("GPUSTREAM_HYPOTHESIS", "default"))

os.environ.setdefault("GPUSTREAM_PAGE_LISTEN", "127.0.0.1:0")
"""Several runs at a time each serve a page."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests are collected without the garbage collector: it takes up to a third of the time, and finds nothing."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """What a test leaves to the garbage collector is collected at the test's own end, and reported there.

    What is still alive then is no garbage of a later test: it is put aside, which also keeps this short.
    """
    yield
    found: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda one: found.append(f"{one.exc_value!r} in {one.object!r}")
    try:
        gc.collect()
    finally:
        sys.unraisablehook = before
    gc.freeze()
    assert not found, f"left to the garbage collector: {found}"


def pytest_unconfigure() -> None:
    """What was put aside is given back, or libraries written in C++ report it as leaked when the process ends."""
    gc.unfreeze()


def _close_connections_first(loop: asyncio.SelectorEventLoop) -> None:
    """Close a loop without leaving sockets to the garbage collector; warn of each that nobody has closed.

    A connection over TLS is closed when the other side has said so too, and the loop of a command does not wait.
    """
    attributes, forgotten = vars(loop), list[str]()
    left = [one for one in attributes["_transports"].values() if one._sock is not None]  # there is no other list
    for one in left if not loop.is_closed() else ():
        protocol = one.get_protocol()
        asked = protocol._app_transport if isinstance(protocol, SSLProtocol) else one
        if asked is not None and not asked.is_closing():
            forgotten.append(f"{one!r} of {type(protocol).__qualname__}, {one.get_extra_info('sockname')}")
        one.abort()
    if left and not loop.is_closed():
        loop.run_until_complete(asyncio.sleep(0))
    _close(loop)
    for words in forgotten:
        warnings.warn(f"open when its loop was closed: {words}", ResourceWarning, stacklevel=2)


_close = asyncio.SelectorEventLoop.close
asyncio.SelectorEventLoop.close = _close_connections_first  # type: ignore[assignment,method-assign]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a test sets of the root logger, as a command does that runs in process, is not left to the next one."""
    root = logging.getLogger()
    level, handlers, filters = root.level, root.handlers[:], root.filters[:]
    yield
    root.setLevel(level)
    root.handlers[:], root.filters[:] = handlers, filters


@pytest.fixture
def nvml_directory(tmp_path: Path) -> Path:
    """A folder for a scripted NVML; skips, loudly, without a C compiler, and fails with GPUSTREAM_REQUIRE_REAL=1."""
    try:
        library()
    except NoCompiler as missing:
        if os.environ.get("GPUSTREAM_REQUIRE_REAL") == "1":
            pytest.fail(f"GPUSTREAM_REQUIRE_REAL=1, but {missing}")
        pytest.skip(f"C COMPILER MISSING: {missing}")
    return tmp_path / "nvml"


@pytest.fixture
def nvml(nvml_directory: Path) -> Iterator[ScriptedNvml]:
    """A scripted NVML of 8 GPUs that keeps a log, for this process (``nvml.load()``) or a child's environment.

    After the test nothing hangs, and a process that has it loaded finds no driver. The threads that the test began to
    ask NVML have ended: one that closes NVML later would close it for the next test.
    """
    scripted = ScriptedNvml(nvml_directory, log=True)
    before = set(threading.enumerate())
    yield scripted
    scripted.release()
    scripted.driver("absent")
    began = [one for one in set(threading.enumerate()) - before if one.name.startswith("nvml-")]
    for thread in began:
        thread.join(timeout=60)
    assert not [thread.name for thread in began if thread.is_alive()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped and why: a line for each reason, not for each test."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
