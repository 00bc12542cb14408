"""Reloads the file of ``--counters`` when it changes, while a sink runs.

In: the file, once a second. Out: the profiles of a translator; a line in the log.
State: the content at the last check, and the content that was applied last.
On failure: a file that can't be used is logged and counted, and the content before it stays in force.

A change is applied when two checks in a row read the same content, so a file that is being written is not. It does not
matter how the file is replaced: by a link to another version of a ConfigMap, or by renaming another file to it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from delivery.instruments import Instrument, Instruments
from delivery.tasks import running
from sinks.series.counters import Picked, pick, read
from sinks.series.counters_file import Counter, CountersError
from sinks.series.translation import Translator
from sinks.series_settings import NamingSettings
from topics.profiles import LabelNames

log = logging.getLogger(__name__)

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(
        "gpustream_counters_broken",
        "gauge",
        "1 while the file of --counters can't be used, so that what it held before is in force, else 0.",
        ("sink",),
    ),
    Instrument(
        "gpustream_counters_reloads_total", "counter", "Times that a changed file of --counters was taken.", ("sink",)
    ),
    Instrument("gpustream_counters_rows_served", "gauge", "Rows of the file of --counters that are served.", ("sink",)),
    Instrument(
        "gpustream_counters_rows_left_out", "gauge", "Rows of the file of --counters that can't be served.", ("sink",)
    ),
)

CHECK_EVERY_S = 1.0
_SHOWN = 20

Content = tuple[Counter, ...] | str
"""The content of a file: its rows, or all that is wrong with it."""


class CountersReload:
    """Checks a file; ``apply`` gets the profile that it picks, at first and after each change."""

    def __init__(
        self,
        path: Path,
        apply: Callable[[Picked], None],
        instruments: Instruments,
        sink: str,
        labels: LabelNames | None = None,
    ) -> None:
        self._path, self._apply, self._labels = path, apply, labels
        self._broken = instruments.gauge("gpustream_counters_broken", sink)
        self._reloads = instruments.counter("gpustream_counters_reloads_total", sink)
        self._served = instruments.gauge("gpustream_counters_rows_served", sink)
        self._left_out = instruments.gauge("gpustream_counters_rows_left_out", sink)
        self._seen: Content | None = None
        self._applied: Content | None = None

    def check(self) -> Content | None:
        """The content to apply; None if it has been applied, or was different at the last check."""
        try:
            content: Content = read(self._path)
        except CountersError as error:
            content = str(error)
        settled, self._seen = self._applied is None or content == self._seen, content
        return content if settled and content != self._applied else None

    def apply(self, content: Content) -> None:
        """Apply new content, or log what is wrong with it."""
        is_first, self._applied = self._applied is None, content
        try:
            picked = content if isinstance(content, str) else pick(content, self._labels)
        except CountersError as error:
            picked = str(error)
        if isinstance(picked, str):
            self._broken.set(1)
            log.error("--counters can't be used, so what it held before stays in force: %s", f"{self._path}: {picked}")
            return
        self._broken.set(0)
        self._served.set(len(picked.served))
        self._left_out.set(len(picked.left_out))
        if not is_first:
            self._reloads.inc()
            log.info("--counters has changed and is in force: %s", f"{self._path}: {len(picked.served)} served")
        if picked.left_out:
            texts = "; ".join(f"line {row.line}: {row.name}: {reason}" for row, reason in picked.left_out[:_SHOWN])
            log.warning("--counters has rows that can't be served: %s", f"{self._path}: {texts}")
        self._apply(picked)


@asynccontextmanager
async def following(
    settings: NamingSettings, translator: Translator, instruments: Instruments, sink: str
) -> AsyncIterator[None]:
    """Keep the translator's profiles those of the settings' file, if there is one."""
    if settings.counters is None:
        yield
        return

    def apply(picked: Picked) -> None:
        translator.profiles = settings.profiles(picked.profile)

    reload = CountersReload(settings.counters, apply, instruments, sink, settings.label_names())

    async def check() -> None:
        """Read the file on a thread, because it may be on a network file system that does not answer."""
        if (content := await asyncio.to_thread(reload.check)) is not None:
            reload.apply(content)

    async def follow() -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await check()

    await check()
    async with running(follow()):
        yield
