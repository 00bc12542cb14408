"""The file of ``--counters``, followed: what it picks is in force while a sink runs, and when it has changed.

In: the file, once a second. Out: the profiles of a translator; a line in the log.
State: what the file said at the last look, and what was judged of it last.
On failure: a file that can't be used is logged and counted, and what it held before stays in force.

A change is taken when two looks in a row agree on it, so that a file that is being written is not. What it is read
through, a link to a ConfigMap or a file that another was renamed to, makes no difference.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from delivery.instruments import Instrument, Instruments
from sinks.series.counters import Picked, pick, read
from sinks.series.counters_file import Counter, CountersError, Mistake
from sinks.series.translation import Translator
from sinks.settings import NamingSettings
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

LOOK_EVERY_S = 1.0
_SHOWN = 20

Said = tuple[Counter, ...] | tuple[Mistake, ...]
"""What a file says: its rows, or all that is wrong with it."""


class CountersReload:
    """Looks at a file; ``take`` gets what it picks, at first and each time that it has changed."""

    def __init__(
        self,
        path: Path,
        take: Callable[[Picked], None],
        instruments: Instruments,
        sink: str,
        labels: LabelNames | None = None,
    ) -> None:
        self._path, self._take, self._labels = path, take, labels
        self._broken = instruments.gauge("gpustream_counters_broken", sink)
        self._reloads = instruments.counter("gpustream_counters_reloads_total", sink)
        self._served = instruments.gauge("gpustream_counters_rows_served", sink)
        self._left_out = instruments.gauge("gpustream_counters_rows_left_out", sink)
        self._seen: Said | None = None
        self._judged: Said | None = None

    def look(self) -> Said | None:
        """What the file says; None if that was judged already, or if it was something else a look ago."""
        try:
            said: Said = read(self._path)
        except CountersError as error:
            said = error.mistakes
        settled, self._seen = self._judged is None or said == self._seen, said
        return said if settled and said != self._judged else None

    def judge(self, said: Said) -> None:
        """Take it, or say what is wrong with it."""
        first, self._judged = self._judged is None, said
        try:
            if mistakes := [one for one in said if isinstance(one, Mistake)]:
                raise CountersError(mistakes)
            picked = pick([one for one in said if isinstance(one, Counter)], self._labels)
        except CountersError as error:
            self._broken.set(1)
            log.error("--counters can't be used, so what it held before stays in force: %s", f"{self._path}: {error}")
            return
        self._broken.set(0)
        self._served.set(len(picked.served))
        self._left_out.set(len(picked.left_out))
        if not first:
            self._reloads.inc()
            log.info("--counters has changed and is in force: %s", f"{self._path}: {len(picked.served)} served")
        if picked.left_out:
            texts = "; ".join(f"line {row.line}: {row.name}: {why}" for row, why in picked.left_out[:_SHOWN])
            log.warning("--counters has rows that can't be served: %s", f"{self._path}: {texts}")
        self._take(picked)


@asynccontextmanager
async def following(
    settings: NamingSettings, translator: Translator, instruments: Instruments, sink: str
) -> AsyncIterator[None]:
    """While inside, the translator's profiles are those that the settings' file picks, if there is one."""
    if settings.counters is None:
        yield
        return

    def take(picked: Picked) -> None:
        translator.profiles = settings.profiles(picked.profile)

    reload = CountersReload(settings.counters, take, instruments, sink, settings.label_names())

    async def look() -> None:
        """Beside the event loop: the file may be on a network that does not answer."""
        if (said := await asyncio.to_thread(reload.look)) is not None:
            reload.judge(said)

    async def follow() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await look()

    await look()
    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
