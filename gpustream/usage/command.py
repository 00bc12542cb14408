"""``gpustream usage``: who had how many GPU-hours, what of them was used, and what that costs.

In:       gpu.usage and gpu.usage-minutes, in no group; a file of prices, a bill.
Out:      a table, CSV or JSON on standard output; a bill whose charges are divided, in a file. What has to be known
          about them is said on standard error.
On failure: what is wrong, in a sentence, and exit code 1; mistakes in the command line, and exit code 2.
"""

import csv
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import msgspec

from delivery import prices as price_list
from delivery import values
from delivery.connection import Connection
from delivery.prices import PricesError
from delivery.settings import FILE, READABLE_FILE, Text
from gpustream.command import KAFKA, LOG_FORMAT, Command, Decorator, counted, option, output_format
from gpustream.output import FAILED, answer, failed, now_ms, printable, written
from gpustream.usage import read
from gpustream.usage.focus import Bill, BillError, Nodes, read_nodes
from gpustream.usage.read import Range, utc
from gpustream.usage.table import By, Table, UsageRow, rounded
from topics.usage import HOUR_MS, MINUTE_MS

WIDTH, NARROWEST = 80, 11
DEFAULT_S = 24 * 3600.0
CSV_COLUMNS = (
    "by", "category", "held_ms", "used_us", "idle_ms", "energy_mj", "gpu_hours", "share", "cost", "currency", "final",
)  # fmt: skip

MJ_IN_KWH = 3_600_000_000
_HAS_ZONE = re.compile(r"(Z|[+-]\d{2}:?\d{2})$", re.IGNORECASE)


class When(NamedTuple):
    """A time, or how long ago it was. ``is_assumed``: the text names no zone, and UTC is taken."""

    ms: int
    is_ago: bool
    is_assumed: bool = False

    def at_ms(self, now_ms: int) -> int:
        """The time itself, a whole minute."""
        return now_ms - self.ms if self.is_ago else self.ms


def when(text: str) -> When:
    """``2026-11-01``, ``2026-11-01T08:00+01:00``, ``2026-11-01 08:00`` (UTC), or ``7d``: seven days ago."""
    at_ms = price_list.milliseconds(text)
    try:
        found = (
            When(values.milliseconds(text), is_ago=True)
            if at_ms is None
            else When(at_ms, is_ago=False, is_assumed=_HAS_ZONE.search(text.strip()) is None)
        )
    except ValueError:
        raise ValueError(
            f"{text[:80]!r} is not a time: write 2026-11-01, 2026-11-01T08:00+01:00, or 7d for seven days ago"
        ) from None
    if found.ms % MINUTE_MS or found.ms < 0:
        raise ValueError(f"{text!r}: usage is counted by the minute: write a whole one")
    return found


_OF_FOCUS = {"--focus-nodes": "nodes_file", "--focus-label": "focus_label", "--focus-sum": "focus_sum"}
TIME = Text("TIME", when, "2026-11-01")


def wanted(since_s: float | None, first: When | None, last: When | None, now_ms: int) -> Range:
    """The time that is asked for. Raises ValueError if there is none."""
    now_ms -= now_ms % MINUTE_MS
    if first is None:
        return Range(now_ms - round((since_s or DEFAULT_S) * 1000), now_ms)
    found = Range(first.at_ms(now_ms), min(now_ms, now_ms if last is None else last.at_ms(now_ms)))
    if not found.is_some:
        raise ValueError("--from: must be before --to, and in the past")
    return found


def _whole_minutes(text: str) -> float:
    seconds = values.duration(text)
    if seconds < 60 or seconds % 60:
        raise ValueError(f"{text!r}: usage is counted by the minute: write whole minutes, such as 90m")
    return seconds


def time_options(default: str) -> Decorator[Any]:
    """The options of a time, as ``since_s``, ``first`` and ``last``. ``default``: how long it is if none is given."""
    each = (
        option(
            "--since",
            "since_s",
            type=Text("DURATION", _whole_minutes, "24h", show=values.duration_text),
            show_default=f"{default}, if --from is not given",
            help="The time until now: 24h, 7d. Whole minutes.",
        ),
        option(
            "--from",
            "first",
            type=TIME,
            help=(
                "When the time begins: 2026-11-01, 2026-11-01T08:00+01:00, or 7d for seven days ago. Without a zone:"
                " UTC."
            ),
        ),
        option("--to", "last", type=TIME, show_default="now", help="When the time ends, written as --from."),
    )
    return lambda function: functools.reduce(lambda made, one: one(made), reversed(each), function)


PRICES = option(
    "--prices",
    "prices_file",
    type=READABLE_FILE,
    help=(
        "A YAML or TOML file of what a GPU-hour costs: by model, date and node labels. docs/how-to/chargeback.md has an"
        " example."
    ),
)


def time_mistakes(given: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the options of a time together."""
    since_s, first, last = given["since_s"], given["first"], given["last"]
    if since_s is not None and (first is not None or last is not None):
        yield "--since: not together with --from and --to"
    if last is not None and first is None:
        yield "--to: needs --from"
    try:
        wanted(since_s, first, last, now_ms())
    except ValueError as error:
        yield str(error)


def _mistakes(given: dict[str, Any]) -> Iterator[str]:
    bill, out = given["bill_file"], given["focus_file"]
    if (bill is None) != (out is None):
        yield "--focus-origin and --focus go together: without a bill, --format csv is what there is"
    elif bill is None:
        yield from (f"{name}: needs --focus-origin" for name in _OF_FOCUS if given[_OF_FOCUS[name]])
    elif out.exists() and out.samefile(bill):
        yield "--focus: must not be the bill itself"
    yield from time_mistakes(given)


@click.command(
    cls=Command,
    check=_mistakes,
    example=(
        "gpustream usage --kafka kafka-0:9092 --by team --since 7d --prices prices.yaml\n"
        "gpustream usage --kafka kafka-0:9092 --by workload --from 2026-11-01 --to 2026-12-01 --format csv\n"
        "gpustream usage --kafka kafka-0:9092 --focus-origin bill.csv --focus allocated.csv"
    ),
)
@KAFKA
@option(
    "--by",
    type=click.Choice(["namespace", "workload", "team", "pod", "node"]),
    default="namespace",
    help="Whose usage is a row. A pod without a workload is a workload by itself.",
)
@time_options("24h")
@output_format("text", "csv", "json", help="json: one object, with integers as they are in gpu.usage.")
@PRICES
@option(
    "--focus-origin",
    "bill_file",
    type=READABLE_FILE,
    help=(
        "A bill, as CSV with the columns of FOCUS. Its charges for nodes and GPUs are divided by who had the GPUs. Its"
        " time is the time that is read, if no other is given."
    ),
)
@option(
    "--focus",
    "focus_file",
    type=FILE,
    help="Where the bill is written with its charges divided, with the columns of FOCUS 1.3 for allocated charges.",
)
@option(
    "--focus-nodes",
    "nodes_file",
    type=READABLE_FILE,
    help=(
        "A file that says what the bill calls each node: in each line a ResourceId and the name of a node. For most"
        " clouds, `kubectl get nodes --no-headers -o custom-columns=:.spec.providerID,:.metadata.name` writes it."
    ),
)
@option("--focus-label", "focus_label", help="The node label that holds what the bill has as ResourceId.")
@option(
    "--focus-sum",
    "focus_sum",
    multiple=True,
    help="A further column of the bill that can be summed, and so is divided, too, such as a cost of the cloud's own.",
)
@LOG_FORMAT
def usage(
    connection: Connection,
    by: By,
    since_s: float | None,
    first: When | None,
    last: When | None,
    form: Literal["text", "csv", "json"],
    prices_file: Path | None,
    bill_file: Path | None,
    focus_file: Path | None,
    nodes_file: Path | None,
    focus_label: str | None,
    focus_sum: tuple[str, ...],
) -> None:
    """Say who had how many GPU-hours, what of them was used, and what that costs. It reads in no group."""
    if any(one is not None and one.is_assumed for one in (first, last)):
        click.echo("times without a zone are taken as UTC", err=True)
    time_range = wanted(since_s, first, last, now_ms())
    try:
        table = Table(by, price_list.load(prices_file) if prices_file is not None else None)
        bill = None
        if bill_file is not None and focus_file is not None:
            nodes = Nodes(read_nodes(nodes_file) if nodes_file is not None else {}, focus_label)
            bill = Bill(bill_file, by, nodes, focus_sum)
        if bill is not None and bill.range is not None and since_s is None and first is None:
            time_range = bill.range.until(now_ms())
        found = answer(_count(connection, time_range, table, bill))
        for note in [*found.notes, *remarks(table)]:
            click.echo(note, err=True)
        if not found.range.is_some:
            raise SystemExit(FAILED)
        if bill is not None and focus_file is not None:
            _write(bill, found.range, focus_file)
    except (PricesError, BillError) as error:
        raise failed(error) from error
    if form == "json":
        click.echo(msgspec.json.encode(as_json(found.range, table)))
    elif form == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([CSV_COLUMNS, *as_csv(table)])
    else:
        click.echo("\n".join(as_text(found.range, table)))


async def _count(connection: Connection, time_range: Range, table: Table, bill: Bill | None) -> read.Answer:
    """Read what was used in a time, and count it."""
    async with read.opened(connection) as past:
        found = await read.plan(past, time_range, now_ms())
        if found.range.is_some:
            async for records in read.records(past, found):
                for record in records:
                    table.add(record)
                    if bill is not None:
                        bill.add(record)
                table.close()
    return found


def _write(bill: Bill, counted_range: Range, file: Path) -> None:
    """Write the bill, whole or not at all, and say what became of its charges. Raises BillError."""
    try:
        with written(file) as out:
            csv.writer(out, lineterminator="\n").writerows(bill.lines(counted_range))
    except OSError as error:
        raise BillError(f"{file}: it can't be written: {error}") from error
    click.echo(f"{file}: {counted(bill.divided, 'charge')} divided", err=True)
    if bill.partly:
        click.echo(
            f"of them, {counted(bill.partly, 'charge')} by a part of their time: the rest has no usage", err=True
        )
    for why, number in sorted(bill.unchanged.items()):
        click.echo(f"{counted(number, 'charge')} as before: {why}", err=True)


def remarks(table: Table) -> Iterator[str]:
    """What has to be known about a table."""
    if table.growing:
        yield (
            f"not final: {counted(len(table.growing), 'window')} from {utc(min(table.growing))} on may still change;"
            " rows that have some of them are marked with *"
        )
    if table.open_windows:
        yield f"the parts of {counted(table.open_windows, 'window')} of a GPU do not add up to the whole"
    for model, hours in sorted(table.unpriced.items()):
        yield f"no price for {model}: {rounded(hours, 2):,} GPU-hours of it are not in the cost"


# -- the forms


def as_json(time_range: Range, table: Table) -> dict[str, Any]:
    """The object of ``--format json``. Costs are decimals, in strings."""
    rows = [
        {
            "by": row.by,
            "held_ms": row.sums.device_ms,
            "used_us": row.sums.used_us,
            "idle_ms": row.sums.idle_ms,
            "energy_mj": row.sums.energy_mj,
            "cost": None if row.cost is None else f"{row.cost:f}",
        }
        for row in table.rows()
        if row.category == "held"
    ]
    whole: dict[str, Any] = {"from_ms": time_range.from_ms, "to_ms": time_range.to_ms, "rows": rows}
    whole["slice_ms"] = {name: sums.slice_ms for name, sums in table.categories.items()}
    if table.prices is not None:
        whole["currency"] = table.prices.currency
        whole["unpriced"] = sorted(table.unpriced)
    if table.growing:
        whole["not_final_ms"] = sorted(table.growing)
    return whole


def as_csv(table: Table) -> Iterator[Sequence[object]]:
    """The lines of ``--format csv``, below the columns: the holders, then what nobody held."""
    currency = "" if table.prices is None else table.prices.currency
    for by, category, sums, share, cost in table.rows():
        times = (sums.device_ms, sums.used_us, sums.idle_ms, sums.energy_mj)
        hours, part = f"{rounded(sums.gpu_hours, 6):f}", f"{rounded(share, 6):f}"
        final = "false" if sums.growing else "true"
        yield by, category, *times, hours, part, "" if cost is None else f"{cost:f}", currency, final


def as_text(time_range: Range, table: Table) -> Iterator[str]:
    """The table for people, at most 80 signs wide: the holders, and below them how all time of the GPUs was spent."""
    rows, prices = table.rows(), table.prices
    columns = ["GPU-hours", "used", "idle", "share", "kWh", *([f"cost {prices.currency}"] if prices else [])]
    held = [row for row in rows if row.category == "held"]
    costs = [row.cost for row in rows if row.cost is not None]
    of_held = sum((row.cost for row in held if row.cost is not None), Decimal(0)) if costs else None
    spent = [
        UsageRow("", "held", table.categories["held"], table.share(table.categories["held"]), of_held),
        *(row for row in rows if row.category != "held"),
        UsageRow("", "all", table.whole, table.share(table.whole), sum(costs, Decimal(0)) if costs else None),
    ]
    lines = [
        (table.by, "", columns),
        *((row.by, "*" * row.sums.growing, _cells(row)) for row in held),
        ("", "", [""] * len(columns)),
        *((row.category, "*" * row.sums.growing, _cells(row)) for row in spent),
    ]
    widths = [max(len(cells[place]) for _, _, cells in lines) for place in range(len(columns))]
    longest = max(len(name) + len(mark) for name, mark, _ in lines)
    room = min(longest, max(NARROWEST, WIDTH - sum(width + 2 for width in widths)))
    yield f"GPU usage by {table.by}, {utc(time_range.from_ms)} to {utc(time_range.to_ms)} (UTC)"
    yield ""
    for name, mark, cells in lines:
        yield (
            f"{fitting(name, room - len(mark)) + mark:<{room}}" + "".join(map("  {:>{}}".format, cells, widths))
        ).rstrip()
    hours, asked = table.gpu_hours, Fraction(time_range.to_ms - time_range.from_ms, HOUR_MS)
    there = f"{figure(asked)} hours" if hours == len(table.gpus) * asked else "the time that each was known"
    differ = "" if table.whole.gpu_hours == hours else ", which is not the sum above"
    yield ""
    yield f"{counted(len(table.gpus), 'GPU')} x {there} = {figure(hours)} GPU-hours{differ}"


def _cells(row: UsageRow) -> list[str]:
    sums = row.sums
    hours = map(figure, (sums.gpu_hours, sums.used_hours, sums.idle_hours))
    cost = [] if row.cost is None else [f"{row.cost:,f}"]
    return [*hours, f"{rounded(row.share * 100, 1)}%", figure(Fraction(sums.energy_mj, MJ_IN_KWH)), *cost]


def fitting(name: str, room: int) -> str:
    """A name in at most ``room`` characters, without those that a terminal would act on."""
    shown = printable(name)
    return shown if len(shown) <= room else f"{shown[: room - 1]}…"


def figure(value: Fraction) -> str:
    """A number for people."""
    return f"{rounded(value, 2):,f}"
