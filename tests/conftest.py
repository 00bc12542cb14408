"""Fixtures and hooks for the tests of all folders."""

import asyncio
import atexit
import contextlib
import gc
import importlib
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

from tests.eventually import LIMIT_S
from tests.nvml.scripted import NoCompiler, ScriptedNvml, library

# A busy machine is no reason to fail, so no example has a deadline. The examples are the same every time, except in the
# nightly run, which looks for new ones: GPUSTREAM_HYPOTHESIS=nightly.
for name, examples, reproducible in (("fast", 5, True), ("default", 25, True), ("nightly", 200, False)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=reproducible,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("GPUSTREAM_HYPOTHESIS", "default"))

os.environ.setdefault("GPUSTREAM_PAGE_LISTEN", "127.0.0.1:0")
"""A free port for each page, since several runs may serve one at the same time."""

os.environ["SSL_CERT_FILE"] = os.devnull
"""Servers of the tests have certificates of the tests. Each client and process reads the system's file of authorities
otherwise: 30 ms of CPU."""

for name in ("NO_PROXY", "no_proxy"):  # the servers of the tests are on this machine, and the proxy may not be
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost,::1,[::1]")))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Tests are collected without the garbage collector: it takes up to a third of the time, and finds nothing.

    In a fresh tree every worker would compile every file, all at the same time. So each begins with files of its own,
    and then finds the others' compiled.
    """
    gc.disable()
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        root, number = session.config.rootpath, int(worker.removeprefix("gw"))
        named = [root / argument.partition("::")[0] for argument in session.config.args]
        files = sorted({file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])})
        for file in files[number :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports it
                importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Collect a test's garbage at its own end, and report errors of that there.

    Objects that are still alive then are frozen: they are no garbage of a later test, and this stays fast.
    """
    yield
    errors: list[str] = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: errors.append(f"{unraisable.exc_value!r} in {unraisable.object!r}")
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook
    gc.freeze()
    assert not errors, f"left to the garbage collector: {errors}"


atexit.register(gc.unfreeze)
"""Or libraries written in C++ report what is frozen as leaked when the process ends."""


def _close_connections_first(loop: asyncio.SelectorEventLoop) -> None:
    """Close a loop without leaving sockets to the garbage collector; warn of each that nobody has closed.

    A connection over TLS is closed only when the other side has closed it too, and the loop of a command does not wait
    for that.
    """
    attributes, forgotten = vars(loop), list[str]()
    # asyncio has no public list of them
    open_transports = [transport for transport in attributes["_transports"].values() if transport._sock is not None]
    for transport in open_transports if not loop.is_closed() else ():
        protocol = transport.get_protocol()
        app_transport = protocol._app_transport if isinstance(protocol, SSLProtocol) else transport
        if app_transport is not None and not app_transport.is_closing():
            forgotten.append(f"{transport!r} of {type(protocol).__qualname__}, {transport.get_extra_info('sockname')}")
        transport.abort()
    if open_transports and not loop.is_closed():
        loop.run_until_complete(asyncio.sleep(0))
    _close(loop)
    for connection in forgotten:
        warnings.warn(f"open when its loop was closed: {connection}", ResourceWarning, stacklevel=2)


_close = asyncio.SelectorEventLoop.close
asyncio.SelectorEventLoop.close = _close_connections_first  # type: ignore[assignment,method-assign]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the root logger, which a command that runs in this process configures. What the command's handler holds
    back is written now: later nothing would capture it."""
    root = logging.getLogger()
    level, handlers, filters = root.level, root.handlers[:], root.filters[:]
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.setLevel(level)
    root.handlers[:], root.filters[:] = handlers, filters


@pytest.fixture
def nvml_directory(tmp_path: Path) -> Path:
    """A folder for a scripted NVML. Without a C compiler the test is skipped, or fails if GPUSTREAM_REQUIRE_REAL=1."""
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

    After the test no call hangs, and a process that has it loaded finds no driver. The test's threads that call NVML
    have ended: one that closed NVML later would close it for the next test.
    """
    scripted = ScriptedNvml(nvml_directory, log=True)
    before = set(threading.enumerate())
    yield scripted
    scripted.release()
    scripted.driver("absent")
    started = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("nvml-")]
    for thread in started:
        thread.join(timeout=LIMIT_S)
    assert not [thread.name for thread in started if thread.is_alive()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report why tests were skipped: a line for each reason, not for each test."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
