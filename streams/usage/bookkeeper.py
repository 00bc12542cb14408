"""Keeps the books of a node: its ticks become minutes, minutes hours, and both become records. Integers only. Pure.

In: ticks of one node with their log times, or how far the log has advanced without one. Out: records of usage to write.
State: all of it is in :class:`Books`, which changes in place and is written to gpu.usage-state as it is.

- Time is the tick's own. A tick stands for the time since the previous tick of its run, at most for three intervals.
- Time goes forward only: time up to the latest that was booked is not booked again, whatever a clock does.
  Time that no tick stands for is unobserved.
- A GPU is in the books of each hour in which a tick has it, for the whole hour.
- A minute is closed when the node's time has passed its end, and nothing of it changes after that. It is final 20
  minutes later. An hour is the sum of its closed minutes, and final when the last of them is.
- If the log has no tick of a node for 20 minutes and for three intervals, the node's windows are closed without one:
  those that ended that long before the time of the log.
- ``revision`` is how much of a window is closed, so that the same books give the same records whenever they are
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
    FINAL_AFTER_MS,
    LATE,
    NONE,
    SLICE,
    Account,
    Accounting,
    Books,
    Closed,
    Hour,
    Meter,
    Window,
    add_amounts,
    add_rows,
    encode,
    labels_of,
    of_team,
    records_of,
    row_of,
    rows_of,
    workload_of,
)
from streams.usage.measure import MOST_WATTS, DeviceAccounts, DeviceShare, Gpu, divide, gpus_of
from streams.usage.tick import CountedTick, kept
from topics.samples import silent_after_ms
from topics.usage import HOUR_MS, MINUTE_MS, Usage

AHEAD_MS = 60_000
INTERVAL_MS = 10_000  # of a producer that does not report it
FORGET_MS = 25 * HOUR_MS
"""A node's books are deleted after this time without a tick, and a GPU is forgotten after this time without a reading
of its counter: by then gpu.attributed has no tick of it any more."""

MOST_OWNER_BYTES = 1024 * 1024
"""With more than this of workloads and labels in its books, a node's new ones are left out: books have to fit in a
record."""

Outcome = Literal["booked", "opened", "behind", "ahead", "replayed"]
"""How a tick was handled. ``booked``: its time was booked. ``opened``: it is the first of its run, and stands for no
time. ``behind``: its time was booked or closed before. ``ahead``: it is further ahead of its log time than a clock may
be. ``replayed``: it was read before."""

_ATTRIBUTIONS = {"exact": EXACT, "none": NONE}


class Booking(NamedTuple):
    """How a tick was handled, and the records to write. ``unbooked_ms``: time that it stands for and is not booked."""

    outcome: Outcome
    records: list[Usage]
    unbooked_ms: int = 0


class EnergyDrawn(msgspec.Struct, frozen=True, gc=False):
    """The energy that a GPU drew evenly from one time to another. ``before_mj`` is the part that it drew until
    ``booked_ms``, or in hours in which it has no rows. That is no holder's part: it is booked as unobserved."""

    start_ms: int
    end_ms: int
    mj: int
    booked_ms: int = 0
    before_mj: int = 0

    def within(self, start_ms: int, end_ms: int) -> int:
        """The energy in a part of the time that is not booked. What was drawn until a moment is rounded down, so that
        the energies of consecutive parts add up."""
        if not self.mj or (max(start_ms, self.booked_ms) <= self.start_ms and end_ms >= self.end_ms):
            return self.mj
        return self._until(max(end_ms, self.booked_ms)) - self._until(max(start_ms, self.booked_ms))

    def _until(self, at_ms: int) -> int:
        return max(0, at_ms - self.start_ms) * self.mj // (self.end_ms - self.start_ms)


class Bookkeeper:
    """Keeps the books of one node."""

    def __init__(self, books: Books, policy: Accounting) -> None:
        self.books, self._policy = books, policy
        self._index_accounts()
        self._slices = {uuid: meter.slices for uuid, meter in books.meters.items()}
        self._accounts_by_device: dict[str, DeviceAccounts] = {}
        self._records: list[Usage] = []
        self._closed_live_ms = 0  # in a replay: up to when the live stream had closed this node's windows

    # -- what was read

    def book(self, tick: CountedTick, logged_ms: int) -> Booking:
        """Book a tick. Raises msgspec.DecodeError if labels or a workload are malformed; then nothing is booked."""
        books = self.books
        last = None
        if books.run_id >= 0:
            last = replays.LastTick(books.run_id, books.seq, books.offset, books.newest_ts_ms)
        verdict = replays.verdict(last, tick)
        if verdict == "replay":
            return Booking("replayed", [])
        self._pass_time(logged_ms, live=self._policy.live)
        slices = self._slices.copy()
        gpus = gpus_of(tick, slices, self._accounts_by_device, self._policy.split)
        self._accounts_by_device = {share.uuid: share.accounts for gpu in gpus for share in gpu.shares}
        if books.booked_ms < tick.ts_ms <= logged_ms + AHEAD_MS:  # an account without time would never be forgotten
            for gpu in gpus:
                for share in gpu.shares:
                    if not share.accounts.numbers:
                        share.accounts.numbers = self._numbers_of(gpu, share)
        node_labels = books.node_labels
        if tick.node_labels != node_labels:
            labels_of(tick.node_labels)
            node_labels = kept(tick.node_labels)
        previous_ms = books.tick_ms if tick.run_id == books.run_id else tick.ts_ms
        newest = replays.after(last, tick)
        books.run_id, books.seq, books.offset = newest.run_id, newest.seq, newest.offset
        books.newest_ts_ms = newest.newest_ts_ms
        books.logs += verdict == "new_log"
        books.logged_ms, books.interval_ms = logged_ms, tick.interval_ms
        if tick.ts_ms > logged_ms + AHEAD_MS:
            books.tick_ms = previous_ms
            return Booking("ahead", self._pop_records())
        books.tick_ms, books.node_labels, self._slices = tick.ts_ms, node_labels, slices
        stands_for_ms = max(0, tick.ts_ms - previous_ms)
        since_ms = max(previous_ms, tick.ts_ms - silent_after_ms(tick.interval_ms or INTERVAL_MS, 0))
        unbooked_ms = max(0, min(books.booked_ms, tick.ts_ms) - since_ms) if stands_for_ms else 0
        if tick.ts_ms <= books.booked_ms:
            self._read_meters_behind(gpus)
            return Booking("behind", self._pop_records(), unbooked_ms)
        since_ms = max(min(since_ms, tick.ts_ms), books.booked_ms)
        self._book_until(tick, gpus, since_ms)
        return Booking("booked" if stands_for_ms else "opened", self._pop_records(), unbooked_ms)

    def _pass_time(self, log_ms: int, *, live: bool) -> None:
        """The log has advanced to a time. If the node has been silent for long by then, close the windows that
        ended so long before that time. A replay notes only up to when the live stream had closed it."""
        books = self.books
        after_ms = silent_after_ms(books.interval_ms, FINAL_AFTER_MS)
        if not books.hours or log_ms - books.logged_ms < after_ms:
            return
        until_ms = (log_ms - after_ms) // MINUTE_MS * MINUTE_MS
        booked_ms = min(until_ms, books.hours[-1].end_ms)
        if not live:
            self._closed_live_ms = booked_ms
            return
        self._book_unobserved_until(booked_ms, {})
        self._write_closed(until_ms)

    def close_silent(self, log_ms: int) -> list[Usage]:
        """The records to write for a node without a tick in the log up to a time."""
        self._pass_time(log_ms, live=True)
        return self._pop_records()

    def _pop_records(self) -> list[Usage]:
        records, self._records = self._records, []
        return records

    # -- which accounts time is booked to

    def _numbers_of(self, gpu: Gpu, share: DeviceShare) -> tuple[int, ...]:
        """The numbers of the accounts to which the time of a device is booked, one for each holder.

        Within a minute the last workload and labels count, so an account that is in no closed minute is changed. Labels
        change, and pods come and go, as often as tenants like: if the books have very many labels, no more are added
        but the team's.
        """
        accounts = self.books.accounts
        if not share.accounts.identities:
            category = "lost" if share.accounts.identities is None else "free"
            return (self._account_without_holder(gpu.uuid, share.uuid, category),)
        numbers: list[int] = []
        for namespace, pod, pod_uid, container, _, *owner in share.accounts.identities:
            name = (gpu.uuid, share.uuid, "held", namespace, pod, pod_uid, container)
            number = self._account_numbers.get(name)
            if number is None or owner != accounts[number].owner:
                workload, labels, namespace_labels = owner
                workload_of(workload), labels_of(labels), labels_of(namespace_labels)
                account = Account(*name, workload, labels, namespace_labels)
                if self._owner_bytes > MOST_OWNER_BYTES:
                    account = of_team(account, self._policy.team_label)
                is_closed = any(number in hour.rows for hour in self.books.hours)
                if number is None or (is_closed and account != accounts[number]):
                    number = self._open_account(account)
                else:
                    self._owner_bytes += account.owner_bytes - accounts[number].owner_bytes
                    accounts[number] = account
            numbers.append(number)
        return tuple(numbers)

    def _account_without_holder(self, gpu_uuid: str, uuid: str, category: str) -> int:
        number = self._account_numbers.get((gpu_uuid, uuid, category, None, None, None, None))
        return self._open_account(Account(gpu_uuid, uuid, category)) if number is None else number

    def _index_accounts(self) -> None:
        """Note the last number of each account, and how many bytes of workloads and labels there are."""
        accounts = self.books.accounts
        self._account_numbers = {account.name: number for number, account in sorted(accounts.items())}
        self._owner_bytes = sum([account.owner_bytes for account in accounts.values()])

    def _open_account(self, account: Account) -> int:
        number = max(self.books.accounts, default=0) + 1
        self.books.accounts[number] = account
        self._account_numbers[account.name] = number
        self._owner_bytes += account.owner_bytes
        return number

    # -- booking

    def _book_until(self, tick: CountedTick, gpus: list[Gpu], since_ms: int) -> None:
        """Book all time up to a tick: it stands for the time from ``since_ms`` on; what is before is unobserved."""
        books, drawn_by_gpu, closed_ms = self.books, self._read_meters(gpus, since_ms, tick.ts_ms), self.books.booked_ms
        self._book_unobserved_until(since_ms, drawn_by_gpu)
        for start_ms, end_ms in _minutes(since_ms, tick.ts_ms) if since_ms < tick.ts_ms else [(since_ms, since_ms)]:
            hour, piece = self._hour(start_ms), (since_ms, start_ms, end_ms, tick.attribution)
            for gpu, drawn in zip(gpus, drawn_by_gpu.values(), strict=True):
                if gpu.uuid not in hour.of:
                    self._add_gpu(hour, gpu.uuid, start_ms, drawn)
                if drawn.before_mj and start_ms == since_ms:
                    number = self._account_without_holder(gpu.uuid, gpu.uuid, "unobserved")
                    row_of(hour.minute, number)[ENERGY] += drawn.before_mj
                if start_ms < end_ms:
                    self._book_gpu(hour, gpu, drawn.within(start_ms, end_ms), piece)
            if len(gpus) < len(hour.of) and start_ms < end_ms:
                missing = [uuid for uuid in hour.of if uuid not in drawn_by_gpu]
                self._book_unobserved(hour, missing, start_ms, end_ms, {})
            books.booked_ms = end_ms
            self._close_minute(hour, end_ms)
        if books.booked_ms // MINUTE_MS > closed_ms // MINUTE_MS:
            self._write_closed(books.booked_ms - FINAL_AFTER_MS)

    def _book_gpu(self, hour: Hour, gpu: Gpu, energy_mj: int, piece: tuple[int, int, int, str]) -> None:
        """Book one GPU for a piece of the time that a tick stands for, all within a minute."""
        since_ms, start_ms, end_ms, tick_attribution = piece
        ms, since, until, free_slices = end_ms - start_ms, start_ms - since_ms, end_ms - since_ms, hour.of[gpu.uuid]
        slices_by_share, energies = [free_slices], [energy_mj]
        if len(gpu.shares) > 1:
            slices_by_share = []
            for share in gpu.shares:
                slices_by_share.append(min(share.slices, free_slices) if share.slices else free_slices)
                free_slices -= slices_by_share[-1]
            energies = divide(energy_mj, slices_by_share)
        for share, slices, energy in zip(gpu.shares, slices_by_share, energies, strict=True):
            if not slices:
                continue
            used = share.used * until // 1000 - share.used * since // 1000
            tensor = share.tensor * until // 1000 - share.tensor * since // 1000
            amounts = ms, used, tensor, energy, share.memory_bytes * ms
            numbers, weights = share.accounts.numbers, share.weights
            attribution = _ATTRIBUTIONS.get(share.attribution or tick_attribution, LATE)
            if weights is None:
                add_amounts(hour.minute, numbers[0], amounts, slices, share.idle[0], attribution)
                continue
            for number, idle, *part in zip(numbers, share.idle, *map(divide, amounts, weights), strict=True):
                add_amounts(hour.minute, number, part, slices, idle, attribution)

    def _read_meters(self, gpus: list[Gpu], since_ms: int, ts_ms: int) -> dict[str, EnergyDrawn]:
        """The energy that each GPU has drawn: by its counter since the last reading, else by its power since
        ``since_ms``. A counter that reads less than before has started again at zero."""
        drawn_by_gpu: dict[str, EnergyDrawn] = {}
        # what the live stream had closed without a tick, it had booked by no counter
        booked_ms = max(self.books.booked_ms, min(self._closed_live_ms, since_ms))
        hour_ms, passed_ms = since_ms // HOUR_MS * HOUR_MS, ts_ms - since_ms
        for gpu in gpus:
            meter = self.books.meters.get(gpu.uuid)
            if meter is None:
                meter = self.books.meters[gpu.uuid] = Meter()
            if gpu.model is not None:
                meter.model = gpu.model
            meter.slices, drawn = self._slices[gpu.uuid], None
            now_mj, last_mj, last_ms = gpu.energy_mj, meter.energy_mj, meter.at_ms
            if now_mj is not None:
                if last_mj is not None:
                    mj = now_mj - last_mj if now_mj >= last_mj else now_mj
                    if mj <= MOST_WATTS * (ts_ms - last_ms):
                        drawn = EnergyDrawn(last_ms, ts_ms, mj)
                        if not hour_ms <= booked_ms <= last_ms:
                            drawn = self._unbooked_part(gpu.uuid, drawn, booked_ms, hour_ms)
                meter.energy_mj, meter.at_ms = now_mj, ts_ms
            elif gpu.power_watts is not None:
                meter.energy_mj = None
            drawn_by_gpu[gpu.uuid] = drawn or EnergyDrawn(since_ms, ts_ms, round((gpu.power_watts or 0.0) * passed_ms))
        return drawn_by_gpu

    def _read_meters_behind(self, gpus: list[Gpu]) -> None:
        """Read the counters of a tick that is behind: what they count since all was booked is of no time. What a GPU
        has drawn before that is still to be booked, so its counter is left to the next tick."""
        booked_ms = max(self.books.booked_ms, self._closed_live_ms)
        for index, gpu in enumerate(gpus):
            meter = self.books.meters.get(gpu.uuid)
            if meter is not None and meter.energy_mj is not None and meter.at_ms < booked_ms:
                gpus[index] = msgspec.structs.replace(gpu, energy_mj=None, power_watts=None)
        self._read_meters(gpus, booked_ms, booked_ms)

    def _unbooked_part(self, uuid: str, drawn: EnergyDrawn, booked_ms: int, hour_ms: int) -> EnergyDrawn:
        """The energy that was drawn in time that is still to be booked. The rest is ``before`` it, and no holder's: it
        was drawn in time that was booked without it, or in hours in which the GPU has no rows."""
        before_mj = drawn.within(drawn.start_ms, booked_ms)
        rows_end_ms = max([booked_ms, *[hour.end_ms for hour in self.books.hours if uuid in hour.of]])
        if rows_end_ms < hour_ms:
            before_mj += drawn.within(rows_end_ms, hour_ms)
        return EnergyDrawn(drawn.start_ms, drawn.end_ms, drawn.mj, booked_ms, before_mj)

    def _book_unobserved_until(self, until_ms: int, drawn_by_gpu: dict[str, EnergyDrawn]) -> None:
        """Book all time up to ``until_ms`` as unobserved, in the hours that are open."""
        if until_ms <= self.books.booked_ms:
            return
        for hour in self.books.hours:
            hour_start_ms, hour_end_ms = max(self.books.booked_ms, hour.start_ms), min(until_ms, hour.end_ms)
            for start_ms, end_ms in _minutes(hour_start_ms, hour_end_ms):
                self._book_unobserved(hour, list(hour.of), start_ms, end_ms, drawn_by_gpu)
                self._close_minute(hour, end_ms)
        self.books.booked_ms = until_ms

    def _book_unobserved(
        self, hour: Hour, uuids: list[str], start_ms: int, end_ms: int, drawn_by_gpu: dict[str, EnergyDrawn]
    ) -> None:
        for uuid in uuids:
            row = row_of(hour.minute, self._account_without_holder(uuid, uuid, "unobserved"))
            row[DEVICE] += end_ms - start_ms
            row[SLICE] += (end_ms - start_ms) * hour.of[uuid]
            if uuid in drawn_by_gpu:
                row[ENERGY] += drawn_by_gpu[uuid].within(start_ms, end_ms)

    # -- windows

    def _hour(self, at_ms: int) -> Hour:
        """The hour of a time. If it is new, its earlier minutes are closed, and have no GPU yet."""
        start_ms = at_ms // HOUR_MS * HOUR_MS
        for hour in self.books.hours:
            if hour.start_ms == start_ms:
                return hour
        closed = (at_ms - start_ms) // MINUTE_MS
        starts_ms = [start_ms + number * MINUTE_MS for number in range(closed)]
        final_ms = max(self.books.final_ms, at_ms - FINAL_AFTER_MS)
        minutes = [Closed(ms, msgspec.Raw(b"{}"), written=True) for ms in starts_ms if ms + MINUTE_MS > final_ms]
        hour = Hour(start_ms, closed=closed, written=closed, minutes=minutes)
        self.books.hours.append(hour)
        return hour

    def _add_gpu(self, hour: Hour, uuid: str, at_ms: int, drawn: EnergyDrawn) -> None:
        """Add a GPU to an hour. It is in the books from the start of the hour on: the time until now is unobserved."""
        slices = hour.of[uuid] = self._slices[uuid]
        number = self._account_without_holder(uuid, uuid, "unobserved")
        minutes = {minute.start_ms: minute for minute in hour.minutes}
        for start_ms, end_ms in _minutes(hour.start_ms, at_ms):
            row = [0] * len(FIELDS)
            row[DEVICE], row[SLICE] = end_ms - start_ms, (end_ms - start_ms) * slices
            row[ENERGY] = drawn.within(start_ms, end_ms)
            if start_ms == hour.start_ms + hour.closed * MINUTE_MS:
                add_rows(hour.minute, {number: row})
                continue
            add_rows(hour.rows, {number: row})
            minute = minutes.get(start_ms)
            if minute is not None:
                minute.rows = msgspec.Raw(encode(rows_of(minute.rows) | {number: row}))
            if minute is None or minute.written:
                window = Window(start_ms, start_ms + MINUTE_MS, int(minute is None), minute is None)
                self._records += records_of(self.books, self._policy, {number: row}, hour.of, window)

    def _close_minute(self, hour: Hour, at_ms: int) -> None:
        """Close the open minute, if a time is its end."""
        if at_ms == hour.start_ms + (hour.closed + 1) * MINUTE_MS:
            add_rows(hour.rows, hour.minute)
            hour.minutes.append(Closed(at_ms - MINUTE_MS, msgspec.Raw(encode(hour.minute))))
            hour.minute, hour.closed = {}, hour.closed + 1

    def _write_closed(self, final_ms: int) -> None:
        """Write the windows that were closed, and those that have become final: all that ended by ``final_ms``."""
        books = self.books
        if not any(hour.written < hour.closed or hour.minutes for hour in books.hours):
            return
        final_ms = books.final_ms = max(books.final_ms, final_ms)
        for hour in tuple(books.hours):
            for minute in tuple(hour.minutes):
                is_final = minute.start_ms + MINUTE_MS <= final_ms
                if is_final:
                    hour.minutes.remove(minute)
                if is_final or not minute.written:
                    window = Window(minute.start_ms, minute.start_ms + MINUTE_MS, int(is_final), is_final)
                    self._records += records_of(books, self._policy, rows_of(minute.rows), hour.of, window)
                    minute.written = True
            is_final = hour.end_ms <= final_ms and not hour.minutes and hour.end_ms <= books.booked_ms
            if is_final or hour.written < hour.closed:
                window = Window(hour.start_ms, hour.end_ms, 60 if is_final else hour.closed - 1, is_final)
                self._records += records_of(books, self._policy, hour.rows, hour.of, window)
                hour.written = hour.closed
            if is_final:
                books.hours.remove(hour)
                self._prune()

    def _prune(self) -> None:
        """Forget the accounts that no open window has, and the GPUs that no open hour has and that were not read for
        long: they were replaced."""
        books = self.books
        rows = [*[hour.rows for hour in books.hours], *[hour.minute for hour in books.hours]]
        rows += [rows_of(minute.rows) for hour in books.hours for minute in hour.minutes]
        used = {number for numbers in rows for number in numbers}
        books.accounts = {number: account for number, account in books.accounts.items() if number in used}
        self._index_accounts()
        self._accounts_by_device.clear()
        open_gpus = {uuid for hour in books.hours for uuid in hour.of}
        since_ms = books.booked_ms - FORGET_MS
        books.meters = {
            uuid: meter for uuid, meter in books.meters.items() if uuid in open_gpus or meter.at_ms > since_ms
        }
        self._slices = {uuid: meter.slices for uuid, meter in books.meters.items()}


def _minutes(start_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
    """A span of time, cut where minutes begin."""
    while start_ms < end_ms:
        next_ms = min(end_ms, (start_ms // MINUTE_MS + 1) * MINUTE_MS)
        yield start_ms, next_ms
        start_ms = next_ms
