"""Keeps the books of a node: its ticks become minutes, minutes hours, and both become records. Integers only. Pure.

In: ticks of one node with their log times, or how far the log has come without one. Out: records of usage to write.
State: all of it is in :class:`Books`, which changes in place and is written to gpu.usage-state as it is.

- Time is the tick's own. A tick stands for the time since the tick before of its run, at most for three intervals.
- Time goes forward only. What is not later than all that was booked is not booked: no time counts twice, whatever a
  clock does. What no tick stands for is unobserved.
- A GPU is in the books of each hour in which a tick shows it, for the whole hour.
- A minute is closed when the node's time has passed its end, and nothing of it changes after that. It is final 20
  minutes later. An hour is the sum of its closed minutes, and final when the last of them is.
- A node whose log is silent for 20 minutes is closed by the time of the log: up to 20 minutes before it.
- ``revision`` says how much of a window is closed, so that the same books give the same records whenever they are
  written: a minute has 0, and 1 if it is final; an hour has one less than its closed minutes, and 60 if it is final.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from streams.usage.books import (
    DEVICE,
    ENERGY,
    EXACT,
    FIELDS,
    LATE,
    NONE,
    PATIENCE_MS,
    SLICE,
    Account,
    Accounting,
    Books,
    Closed,
    Hour,
    Meter,
    Window,
    add_rows,
    encode,
    labels_of,
    put,
    records_of,
    row_of,
    rows_of,
    workload_of,
)
from streams.usage.measure import MOST_WATTS, DeviceShare, Gpu, Held, divide, gpus_of
from streams.usage.tick import CountedTick
from topics.usage import HOUR_MS, MINUTE_MS, Usage

AHEAD_MS = 60_000
INTERVALS = 3
INTERVAL_MS = 10_000  # of a producer that does not say it
LONGEST_INTERVAL_MS = HOUR_MS

Outcome = Literal["booked", "opened", "behind", "ahead", "replayed"]
"""What became of a tick: it stands for time that was booked; it is the first of its run; its time was booked or closed
before; it is further ahead of its log time than a clock may be; it was read before."""

_ATTRIBUTIONS = {"exact": EXACT, "none": NONE}


class Taken(NamedTuple):
    """What became of a tick, and what is to be written. ``unbooked_ms``: time that it stands for and is not booked."""

    outcome: Outcome
    records: list[Usage]
    unbooked_ms: int = 0


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """The energy that a GPU drew evenly from one time to another, and what it drew ``before`` that, unobserved."""

    start_ms: int
    end_ms: int
    mj: int
    before_mj: int = 0

    def within(self, start_ms: int, end_ms: int) -> int:
        """How much of it in a part of that time: the parts of all the time sum."""
        if not self.mj or (start_ms <= self.start_ms and end_ms >= self.end_ms):
            return self.mj
        lasted_ms = self.end_ms - self.start_ms
        until, since = (max(0, at_ms - self.start_ms) * self.mj // lasted_ms for at_ms in (end_ms, start_ms))
        return until - since


class Bookkeeper:
    """Keeps the books of one node."""

    def __init__(self, books: Books, policy: Accounting) -> None:
        self.books, self._policy = books, policy
        self._numbers = {one.name: number for number, one in sorted(books.accounts.items())}
        self._of = {uuid: meter.slices for uuid, meter in books.meters.items()}
        self._held: dict[str, Held] = {}
        self._records: list[Usage] = []
        self._closed_live_ms = 0  # up to here the stream has closed what a replay has not

    # -- what was read

    def take(self, tick: CountedTick, logged_ms: int) -> Taken:
        """Book a tick. Raises msgspec.DecodeError for labels or a workload that are none; nothing is booked then."""
        books = self.books
        last = None
        if books.run_id >= 0:
            last = replays.LastTick(books.run_id, books.seq, books.offset, books.newest_ts_ms)
        verdict = replays.verdict(last, tick)
        if verdict == "replay":
            return Taken("replayed", [])
        self.pass_time(logged_ms, self._policy.patience_ms)
        gpus = gpus_of(tick, self._of, self._held, self._policy.split)
        for gpu in gpus:
            for share in gpu.shares:
                if not share.held.accounts:
                    share.held.accounts = self._accounts_of(gpu, share)
        before_ms = books.tick_ms if tick.run_id == books.run_id else tick.ts_ms
        now = replays.after(last, tick)
        books.run_id, books.seq, books.offset, books.newest_ts_ms = now.run_id, now.seq, now.offset, now.newest_ts_ms
        books.logs += verdict == "new_log"
        books.logged_ms = logged_ms
        if tick.ts_ms > logged_ms + AHEAD_MS:
            books.tick_ms = before_ms
            return Taken("ahead", self._taken())
        books.tick_ms = tick.ts_ms
        if tick.node_labels != books.node_labels:
            labels_of(tick.node_labels)
            books.node_labels = tick.node_labels.copy()
        stands_for_ms = max(0, tick.ts_ms - before_ms)
        interval_ms = min(tick.interval_ms or INTERVAL_MS, LONGEST_INTERVAL_MS)
        since_ms = max(before_ms, tick.ts_ms - INTERVALS * interval_ms)
        unbooked_ms = max(0, min(books.booked_ms, tick.ts_ms) - since_ms) if stands_for_ms else 0
        if tick.ts_ms <= books.booked_ms:
            self._drawn(gpus, books.booked_ms, books.booked_ms)
            return Taken("behind", self._taken(), unbooked_ms)
        since_ms = max(min(since_ms, tick.ts_ms), books.booked_ms)
        self._observe(tick, gpus, since_ms)
        return Taken("booked" if stands_for_ms else "opened", self._taken(), unbooked_ms)

    def pass_time(self, log_ms: int, patience_ms: int | None = PATIENCE_MS) -> None:
        """The log has come so far. What ended before it by more than the patience is closed, if the node was silent for
        as long."""
        books = self.books
        if patience_ms is None and books.hours and log_ms - books.logged_ms >= PATIENCE_MS:
            self._closed_live_ms = (log_ms - PATIENCE_MS) // MINUTE_MS * MINUTE_MS
        if patience_ms is None or not books.hours or log_ms - books.logged_ms < patience_ms:
            return
        until_ms = (log_ms - patience_ms) // MINUTE_MS * MINUTE_MS
        self._fill(min(until_ms, books.hours[-1].end_ms), {})
        self._settle(until_ms)

    def silent(self, log_ms: int) -> list[Usage]:
        """What is to be written of a node that has no tick in the log up to here."""
        self.pass_time(log_ms)
        return self._taken()

    def _taken(self) -> list[Usage]:
        records, self._records = self._records, []
        return records

    # -- whose time it is

    def _accounts_of(self, gpu: Gpu, share: DeviceShare) -> tuple[int, ...]:
        """The accounts to which the time of a device goes, one for each holder."""
        if not share.held.said:
            return (self._plain(gpu.uuid, share.uuid, "lost" if share.held.said is None else "free"),)
        numbers: list[int] = []
        for namespace, pod, pod_uid, container, _, *said in share.held.said:
            name = (gpu.uuid, share.uuid, "held", namespace, pod, pod_uid, container)
            number = self._numbers.get(name)
            known = None if number is None else self.books.accounts[number]
            if number is None or known is None or said != [known.workload, known.labels, known.namespace_labels]:
                workload, labels, namespace_labels = said
                workload_of(workload), labels_of(labels), labels_of(namespace_labels)
                number = self._open(Account(*name, workload, labels, namespace_labels))
            numbers.append(number)
        return tuple(numbers)

    def _plain(self, gpu_uuid: str, uuid: str, category: str) -> int:
        number = self._numbers.get((gpu_uuid, uuid, category, None, None, None, None))
        return self._open(Account(gpu_uuid, uuid, category)) if number is None else number

    def _open(self, account: Account) -> int:
        number = max(self.books.accounts, default=0) + 1
        self.books.accounts[number] = account
        self._numbers[account.name] = number
        return number

    # -- booking

    def _observe(self, tick: CountedTick, gpus: list[Gpu], since_ms: int) -> None:
        """Book all time up to a tick: what it stands for from ``since_ms`` on, the rest as unobserved."""
        books, attribution = self.books, _ATTRIBUTIONS.get(tick.attribution, LATE)
        drawn, closed_ms = self._drawn(gpus, since_ms, tick.ts_ms), books.booked_ms
        self._fill(since_ms, drawn)
        for start_ms, end_ms in _minutes(since_ms, tick.ts_ms) if since_ms < tick.ts_ms else [(since_ms, since_ms)]:
            hour, piece = self._hour(start_ms), (since_ms, start_ms, end_ms, attribution)
            for gpu, energy in zip(gpus, drawn.values(), strict=True):
                if gpu.uuid not in hour.of:
                    self._admit(hour, gpu.uuid, start_ms, energy)
                if energy.before_mj and start_ms == since_ms:
                    row_of(hour.minute, self._plain(gpu.uuid, gpu.uuid, "unobserved"))[ENERGY] += energy.before_mj
                if start_ms < end_ms:
                    self._book(hour, gpu, energy.within(start_ms, end_ms), piece)
            if len(gpus) < len(hour.of) and start_ms < end_ms:
                self._unobserved(hour, [uuid for uuid in hour.of if uuid not in drawn], start_ms, end_ms, {})
            books.booked_ms = end_ms
            self._close(hour, end_ms)
        if books.booked_ms // MINUTE_MS > closed_ms // MINUTE_MS:
            self._settle(books.booked_ms - PATIENCE_MS)

    def _book(self, hour: Hour, gpu: Gpu, energy_mj: int, piece: tuple[int, int, int, int]) -> None:
        """Book a piece of the time that a tick stands for, all within a minute, on one GPU."""
        since_ms, start_ms, end_ms, attribution = piece
        ms, since, until, left = end_ms - start_ms, start_ms - since_ms, end_ms - since_ms, hour.of[gpu.uuid]
        each, energies = [left], [energy_mj]
        if len(gpu.shares) > 1:
            each = []
            for share in gpu.shares:
                each.append(min(share.slices, left) if share.slices else left)
                left -= each[-1]
            energies = divide(energy_mj, each)
        for share, slices, energy in zip(gpu.shares, each, energies, strict=True):
            if not slices:
                continue
            used = share.used * until // 1000 - share.used * since // 1000
            tensor = share.tensor * until // 1000 - share.tensor * since // 1000
            amounts = ms, used, tensor, energy, share.memory_bytes * ms
            accounts, weights = share.held.accounts, share.weights
            if weights is None:
                put(hour.minute, accounts[0], amounts, slices, share.idle[0], attribution)
                continue
            for number, idle, *part in zip(accounts, share.idle, *map(divide, amounts, weights), strict=True):
                put(hour.minute, number, part, slices, idle, attribution)

    def _drawn(self, gpus: list[Gpu], since_ms: int, ts_ms: int) -> dict[str, Drawn]:
        """What each GPU has drawn, by its counter since that was last read, else by its power since ``since_ms``.
        A counter that reads less than before began again at zero."""
        found, booked_ms = dict[str, Drawn](), self.books.booked_ms
        if booked_ms < self._closed_live_ms and self.books.hours:  # it was booked live without the counter
            booked_ms = max(booked_ms, min(self._closed_live_ms, since_ms, self.books.hours[-1].end_ms))
        hour_ms = since_ms // HOUR_MS * HOUR_MS
        for gpu in gpus:
            meter = self.books.meters.get(gpu.uuid)
            if meter is None:
                meter = self.books.meters[gpu.uuid] = Meter()
            if gpu.model is not None:
                meter.model = gpu.model
            meter.slices, drawn = self._of[gpu.uuid], None
            now, last, at_ms = gpu.energy_mj, meter.energy_mj, meter.at_ms
            if now is not None:
                if last is not None and ts_ms > at_ms:
                    mj = now - last if now >= last else now
                    if mj <= MOST_WATTS * (ts_ms - at_ms):
                        drawn = Drawn(at_ms, ts_ms, mj)
                        if not hour_ms <= booked_ms <= at_ms:
                            drawn = self._placed(gpu.uuid, drawn, booked_ms, hour_ms)
                meter.energy_mj, meter.at_ms = now, ts_ms
            elif gpu.power_watts is not None:
                meter.energy_mj = None
            found[gpu.uuid] = drawn or Drawn(since_ms, ts_ms, round((gpu.power_watts or 0.0) * (ts_ms - since_ms)))
        return found

    def _placed(self, uuid: str, drawn: Drawn, booked_ms: int, hour_ms: int) -> Drawn:
        """The part of the energy that was drawn in time that is still to be booked. The rest is ``before`` it, and no
        holder's: it was drawn in time that was booked without it, or in hours in which the GPU has no rows."""
        at_ms, ts_ms, mj = drawn.start_ms, drawn.end_ms, drawn.mj
        before_mj = mj * max(0, booked_ms - at_ms) // (ts_ms - at_ms)
        placed = Drawn(max(at_ms, booked_ms), ts_ms, mj - before_mj, before_mj)
        if booked_ms < hour_ms:
            rows_end_ms = max([booked_ms, *[hour.end_ms for hour in self.books.hours if uuid in hour.of]])
            if rows_end_ms < hour_ms:
                return Drawn(placed.start_ms, ts_ms, placed.mj, before_mj + placed.within(rows_end_ms, hour_ms))
        return placed

    def _fill(self, until_ms: int, drawn: dict[str, Drawn]) -> None:
        """Book all time up to ``until_ms`` as unobserved, in the hours that there are."""
        if until_ms <= self.books.booked_ms:
            return
        for hour in self.books.hours:
            start_ms, end_ms = max(self.books.booked_ms, hour.start_ms), min(until_ms, hour.end_ms)
            for since_ms, to_ms in _minutes(start_ms, end_ms):
                self._unobserved(hour, list(hour.of), since_ms, to_ms, drawn)
                self._close(hour, to_ms)
        self.books.booked_ms = until_ms

    def _unobserved(self, hour: Hour, uuids: list[str], start_ms: int, end_ms: int, drawn: dict[str, Drawn]) -> None:
        for uuid in uuids:
            row = row_of(hour.minute, self._plain(uuid, uuid, "unobserved"))
            row[DEVICE] += end_ms - start_ms
            row[SLICE] += (end_ms - start_ms) * hour.of[uuid]
            if uuid in drawn:
                row[ENERGY] += drawn[uuid].within(start_ms, end_ms)

    # -- windows

    def _hour(self, at_ms: int) -> Hour:
        """The hour of a time; its minutes before that, if it is new, are closed, and have no GPU yet."""
        start_ms = at_ms // HOUR_MS * HOUR_MS
        for hour in self.books.hours:
            if hour.start_ms == start_ms:
                return hour
        closed = (at_ms - start_ms) // MINUTE_MS
        starts = [start_ms + number * MINUTE_MS for number in range(closed)]
        ends_ms = max(self.books.final_ms, at_ms - PATIENCE_MS)
        minutes = [Closed(at, msgspec.Raw(b"{}"), written=True) for at in starts if at + MINUTE_MS > ends_ms]
        hour = Hour(start_ms, closed=closed, written=closed, minutes=minutes)
        self.books.hours.append(hour)
        return hour

    def _admit(self, hour: Hour, uuid: str, at_ms: int, drawn: Drawn) -> None:
        """A GPU is in the books of an hour from its start on: what went by is unobserved."""
        slices = hour.of[uuid] = self._of[uuid]
        number = self._plain(uuid, uuid, "unobserved")
        not_final = {minute.start_ms: minute for minute in hour.minutes}
        for start_ms, end_ms in _minutes(hour.start_ms, at_ms):
            row = [0] * len(FIELDS)
            row[DEVICE], row[SLICE] = end_ms - start_ms, (end_ms - start_ms) * slices
            row[ENERGY] = drawn.within(start_ms, end_ms)
            if start_ms == hour.start_ms + hour.closed * MINUTE_MS:
                add_rows(hour.minute, {number: row})
                continue
            add_rows(hour.rows, {number: row})
            minute = not_final.get(start_ms)
            if minute is not None:
                minute.rows = msgspec.Raw(encode(rows_of(minute.rows) | {number: row}))
            if minute is None or minute.written:
                window = Window(start_ms, start_ms + MINUTE_MS, int(minute is None), minute is None)
                self._records += records_of(self.books, self._policy, {number: row}, hour.of, window)

    def _close(self, hour: Hour, at_ms: int) -> None:
        """Close the open minute, if that is its end."""
        if at_ms == hour.start_ms + (hour.closed + 1) * MINUTE_MS:
            add_rows(hour.rows, hour.minute)
            hour.minutes.append(Closed(at_ms - MINUTE_MS, msgspec.Raw(encode(hour.minute))))
            hour.minute, hour.closed = {}, hour.closed + 1

    def _settle(self, until_ms: int) -> None:
        """Write what was closed, and what has become final: all that ended by ``until_ms``."""
        books = self.books
        if not any(hour.written < hour.closed or hour.minutes for hour in books.hours):
            return
        until_ms = books.final_ms = max(books.final_ms, until_ms)
        for hour in tuple(books.hours):
            for minute in tuple(hour.minutes):
                final = minute.start_ms + MINUTE_MS <= until_ms
                if final:
                    hour.minutes.remove(minute)
                if final or not minute.written:
                    window = Window(minute.start_ms, minute.start_ms + MINUTE_MS, int(final), final)
                    self._records += records_of(books, self._policy, rows_of(minute.rows), hour.of, window)
                    minute.written = True
            final = hour.end_ms <= until_ms and not hour.minutes and hour.end_ms <= books.booked_ms
            if final or hour.written < hour.closed:
                window = Window(hour.start_ms, hour.end_ms, 60 if final else hour.closed - 1, final)
                self._records += records_of(books, self._policy, hour.rows, hour.of, window)
                hour.written = hour.closed
            if final:
                books.hours.remove(hour)
                self._prune()

    def _prune(self) -> None:
        """Forget the accounts and the GPUs that no open hour has."""
        books = self.books
        rows = [*[hour.rows for hour in books.hours], *[hour.minute for hour in books.hours]]
        rows += [rows_of(minute.rows) for hour in books.hours for minute in hour.minutes]
        used = {number for each in rows for number in each}
        books.accounts = {number: one for number, one in books.accounts.items() if number in used}
        self._numbers = {one.name: number for number, one in sorted(books.accounts.items())}
        self._held.clear()


def _minutes(start_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
    """A span of time, divided where minutes begin."""
    while start_ms < end_ms:
        to_ms = min(end_ms, (start_ms // MINUTE_MS + 1) * MINUTE_MS)
        yield start_ms, to_ms
        start_ms = to_ms
