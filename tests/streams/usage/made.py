"""Ticks of a node as in gpu.attributed, and a bookkeeper that reads them."""

from typing import Any

import msgspec

from streams.usage.bookkeeper import Booking, Bookkeeper
from streams.usage.books import Accounting, Books
from streams.usage.tick import CountedTick, decode
from topics.usage import HOUR_MS, Usage

START_MS = 1_795_215_600_000
assert START_MS % HOUR_MS == 0
Json = dict[str, Any]


def holder(pod: str, used: float | None = None, **fields: Any) -> Json:
    parts = {} if used is None else {"parts": {"utilization_ratio": used}}
    return {"namespace": "ml", "pod": pod, "pod_uid": f"uid-{pod}", "container": "main", **parts, **fields}


def gpu(uuid: str = "GPU-a", *holders: Json, **fields: Any) -> Json:
    metrics = {"gpu_utilization_ratio": fields.pop("busy", 0.5), **fields.pop("metrics", {})}
    return {"uuid": uuid, "model": "H100", "compute_slices": 7, "metrics": metrics, "holders": list(holders), **fields}


def mig(uuid: str, profile: str, *holders: Json, parent: str = "GPU-a", **fields: Any) -> Json:
    mig_fields = {"uuid": uuid, "parent_uuid": parent, "gpu_instance": 1, "compute_instance": 0, "profile": profile}
    return {"uuid": uuid, "model": "H100", "mig": mig_fields, "holders": list(holders), **fields}


def tick(at_ms: int, *devices: Json, **fields: Any) -> CountedTick:
    """A tick so many milliseconds after the start."""
    number = at_ms // 100 + 1
    record = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": number, "ts_ms": START_MS + at_ms}
    record |= {"interval_ms": 1000, "offset": number, "attribution": "exact", "devices": list(devices)} | fields
    return decode(msgspec.json.encode(record))


def books() -> Books:
    return Books(schema=1, cluster="c", node="n")


class BookkeeperHarness:
    """A bookkeeper, and the last record that it wrote of each key."""

    def __init__(self, policy: Accounting | None = None) -> None:
        self.policy = policy or Accounting()
        self.keeper = Bookkeeper(books(), self.policy)
        self.records: dict[tuple[Any, ...], Usage] = {}
        self.written: list[Usage] = []

    def book(self, counted: CountedTick, logged_ms: int | None = None) -> Booking:
        if logged_ms is None:
            logged_ms = counted.ts_ms if counted.logged_ms is None else counted.logged_ms
        booking = self.keeper.book(counted, logged_ms)
        self.learn(booking.records)
        return booking

    def silent(self, at_ms: int) -> None:
        self.learn(self.keeper.close_silent(START_MS + at_ms))

    def learn(self, records: list[Usage]) -> None:
        for record in records:
            key = (record.end_ms - record.start_ms, *record.key)
            assert key not in self.records or self.records[key].order <= record.order
            self.records[key] = record
        self.written += records

    def play(self, *ticks: CountedTick) -> "BookkeeperHarness":
        for counted in ticks:
            self.book(counted)
        return self

    def window(self, start_ms: int = 0, lasts_ms: int = HOUR_MS) -> dict[tuple[str, str, str | None], Usage]:
        """The records of a window, by device, category and pod."""
        records = [row for (lasts, *_), row in self.records.items() if lasts == lasts_ms]
        return {(row.uuid, row.category, row.pod): row for row in records if row.start_ms == START_MS + start_ms}
