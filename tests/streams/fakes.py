"""Records, and the app as the stages of all streams see it, without a broker: the ledger is the real one."""

import asyncio
from types import SimpleNamespace
from typing import NamedTuple, cast

from delivery.ledger import Ledger, Partition, Slot
from delivery.watchdog import LoopLateness
from streams.app import ReaderApp


class Record(NamedTuple):
    """A record of a log, with the fields that are used."""

    key: bytes | None
    value: bytes | None
    timestamp: int = 0
    topic: str = ""
    partition: int = 0


class LedgerApp:
    """An app of a ledger alone. ``settled``: before which offset of each partition all is committed."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.rebalances = self.holes = self.lost = 0
        self.group = SimpleNamespace(lateness=LoopLateness())
        self.settled: dict[Partition, int] = {}
        self.failures: list[str] = []

    def finish(self, slot: Slot) -> None:
        self.ledger.finish(slot)

    def finish_when(self, slot: Slot, sent: "asyncio.Future[int]") -> None:
        ReaderApp.finish_when(cast("ReaderApp", self), slot, sent)

    def is_settled(self, slot: Slot) -> bool:
        return slot.offset < self.settled.get(slot.tp, 0)

    def is_current(self, slot: Slot) -> bool:
        return slot.epoch == self.ledger.epoch

    def fail(self, reason: str) -> None:
        self.failures.append(reason)
