"""One GPU as the event loop sees it: asked once per tick, and known by its identity while it does not answer.

In: the readings of its card. Out: its devices as in gpu.samples: ok, lost or timeout.
State: who it and its MIG devices are, whether it is lost, and since when.
On failure: while a call has not returned there is no other, and its devices are ``timeout``. A reading that comes too
late for its tick counts, but is not reported.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from producers.node import instruments as names
from producers.node.nvml.asking import LeftOut, Lost, Tried
from producers.node.nvml.binding import Handle
from producers.node.nvml.card import Card, Reading
from producers.node.nvml.missing import bare, identity
from producers.node.nvml.worker import Worker
from topics.instruments import Instruments

log = logging.getLogger(__name__)

TIMEOUT = "TIMEOUT"
"""The error of a call that has not returned."""


class Gpu:
    """The GPU at an index, since NVML was opened. ``changed`` is called after each reading; ``turned`` says whether
    the trouble began or ended with it."""

    def __init__(
        self,
        card: Card,
        instruments: Instruments,
        *,
        changed: Callable[["Gpu"], None],
        hangs_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = card.index
        self._card, self._instruments, self._changed, self._clock = card, instruments, changed, clock
        self._worker = Worker(f"nvml-{card.index}", clock)
        self._hangs_after_s = hangs_after_s
        self._told_hang = False
        self._since_s = clock()
        self.uuid: str | None = None
        self.known: Sequence[Mapping[str, Any]] = ()
        self.trouble: str | None = None
        self.lost: Lost | None = None
        self.turned = False

    @property
    def busy(self) -> bool:
        """Whether a call has not returned."""
        return self._worker.busy

    @property
    def hangs(self) -> bool:
        """Whether a call has not returned for so long that it is worth a word."""
        return self._worker.busy_s() > self._hangs_after_s

    @property
    def refused(self) -> bool:
        """Whether it could not be opened; there is no use in asking it again."""
        return self.trouble is not None and self.uuid is None

    @property
    def works(self) -> bool:
        """Whether it answered when it was asked last."""
        return self.uuid is not None and self.trouble is None

    @property
    def handle(self) -> Handle:
        """Its handle, since it has answered."""
        return self._card.handle

    def ask(self) -> "asyncio.Future[Reading]":
        """Begin to read. Only for one that is not busy and was not refused."""
        reading = self._worker.ask(self._card.read)
        reading.add_done_callback(self._settle)
        return reading

    def let_go(self) -> "asyncio.Future[None]":
        """Begin to give back what NVML has lent. Only for one that is not busy."""
        return self._worker.ask(self._card.let_go)

    def devices(self, reading: Reading | None) -> Sequence[dict[str, Any]]:
        """Its devices in this tick, whose reading is not there where it did not answer in time."""
        if reading is not None and reading.devices:
            return reading.devices
        return bare(self.known, "lost" if self.trouble is not None and not self.busy else "timeout")

    def left_out(self) -> dict[str, LeftOut]:
        """What the last reading could not have, by the UUID of the device, and why; nothing while it reads."""
        return {} if self.busy else self._card.left_out()

    def refusal(self) -> Tried | None:
        """The call that ended the last reading, or that has not returned; None where it works."""
        if self.busy:
            return Tried(self._card.doing, TIMEOUT)
        if self.lost is not None:
            return Tried(self.lost.call, self.lost.error.name)
        return Tried("", self.trouble) if self.trouble is not None else None

    def watch(self) -> None:
        """Say once that it hangs."""
        if self.hangs and not self._told_hang:
            self._told_hang = True
            log.warning("%s has not answered for %.0f s (%s)", self.title, self._worker.busy_s(), self._card.doing)

    def not_ready(self) -> list[str]:
        """What is wrong with it."""
        if self.hangs:
            return [f"{self.title} has not answered for {self._worker.busy_s():.0f} s ({self._card.doing})"]
        return [f"{self._trouble_text()} (for {self._clock() - self._since_s:.0f} s)"] if self.trouble else []

    def refuse(self, why: str) -> None:
        """Never report it; it is somebody else."""
        self.uuid, self.known = None, ()
        self._change(why)

    def stop(self) -> None:
        """Let its thread end."""
        self._worker.stop()

    @property
    def title(self) -> str:
        """For people."""
        return f"GPU {self.index} ({self.uuid})" if self.uuid else f"GPU {self.index}"

    def _settle(self, future: "asyncio.Future[Reading]") -> None:
        if self._told_hang:
            self._told_hang = False
            log.info("%s has returned", self.title)
        if (fault := future.exception()) is not None:
            if self.trouble is None:
                log.error("%s can't be read", self.title, exc_info=fault)
            self._change(f"{type(fault).__name__}: {fault}")
            return
        self._take(future.result())

    def _take(self, reading: Reading) -> None:
        self._instruments.histogram(names.READ_SECONDS).observe(reading.took_s)
        for call, error in reading.errors:
            self._instruments.counter(names.NVML_ERRORS, call, error).inc()
        if reading.identity is not None:
            self.uuid = str(reading.identity["uuid"])
            self.known = reading.devices or self.known or [reading.identity]
        self.lost = reading.trouble
        self._change(str(reading.trouble) if reading.trouble else None)

    def _change(self, trouble: str | None) -> None:
        before, self.trouble = self.trouble, trouble
        self.turned = (trouble is None) is not (before is None)
        if trouble is not None and before is None:
            self._since_s = self._clock()
            log.warning("%s", self._trouble_text(), extra=identity(self.known[0]) if self.known else {})
        elif trouble is None and before is not None:
            log.info("%s answers again", self.title)
        self._changed(self)

    def _trouble_text(self) -> str:
        if self.uuid is None:
            return f"GPU {self.index} can't be opened: {self.trouble}"
        return f"{self.title} is lost: {self.trouble}"
