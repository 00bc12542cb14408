"""``gpustream usage``: who had how many GPU-hours, what of them was used, and what that costs.

In:       gpu.usage and gpu.usage-minutes, in no group; a file of prices, a bill.
Out:      a table, CSV or JSON on standard output; a bill whose charges are divided, in a file. What has to be known
          about them is said on standard error.
On failure: what is wrong, in a sentence, and exit code 1; errors in the command line, and exit code 2.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from delivery import prices as price_list
from delivery import values
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.prices import PricesError
from delivery.settings import DATA_FILE, FILE, READABLE_FILE, Text
from delivery.values import counted, printable
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Command, Decorator, combined, option, output_format
from gpustream.history import utc
from gpustream.output import FAILED, aligned, answer, cell, csv_lines, failed, json_text, written
from gpustream.usage import read
from gpustream.usage.focus import Bill, BillError, Nodes, read_nodes
from gpustream.usage.read import Range
from gpustream.usage.table import NO_TEAM, By, Table, UsageRow, rounded
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES

TEXT_WIDTH = 80
DEFAULT_RANGE_S = 24 * 3600.0
CSV_COLUMNS = (
    "by", "category", "held_ms", "used_us", "idle_ms", "energy_mj", "gpu_hours", "share", "cost", "currency", "final",
)  # fmt: skip

MJ_IN_KWH = 3_600_000_000


class When(NamedTuple):
    """A time in an option, or how long ago it was. ``is_assumed``: the text names no zone, and UTC is taken."""

    ms: int
    is_ago: bool
    is_assumed: bool = False

    def at_ms(self, now_ms: int) -> int:
        """The time in ms, a whole minute."""
        return now_ms - self.ms if self.is_ago else self.ms


def parse_time(text: str) -> When:
    """Parses ``2026-11-01``, ``2026-11-01T08:00+01:00``, ``2026-11-01 08:00`` (UTC), or ``7d``: seven days ago.

    Raises ValueError.
    """
    at_ms = price_list.milliseconds(text)
    try:
        parsed = (
            When(values.milliseconds(text), is_ago=True)
            if at_ms is None
            else When(at_ms, is_ago=False, is_assumed=price_list.datetime_of(text).tzinfo is None)
        )
    except ValueError:
        raise ValueError(
            f"{text[:80]!r} is not a time: write 2026-11-01, 2026-11-01T08:00+01:00, or 7d for seven days ago"
        ) from None
    if parsed.ms < 0:
        raise ValueError(f"{text!r} is before 1970: write a later time")
    if parsed.ms % MINUTE_MS:
        raise ValueError(f"{text!r}: usage is counted by the minute: write a whole one")
    return parsed


_FOCUS_OPTIONS = {"--focus-nodes": "nodes_file", "--focus-label": "focus_label", "--focus-sum": "focus_sum"}
TIME = Text("TIME", parse_time, "2026-11-01")


def requested_range(since_s: float | None, start: When | None, end: When | None, now_ms: int) -> Range:
    """The time range that the options ask for. Raises ValueError if it is empty."""
    now_ms -= now_ms % MINUTE_MS
    if start is None:
        return Range(now_ms - round((since_s or DEFAULT_RANGE_S) * 1000), now_ms)
    time_range = Range(start.at_ms(now_ms), min(now_ms, now_ms if end is None else end.at_ms(now_ms)))
    if not time_range.is_nonempty:
        raise ValueError("--from: must be before --to, and in the past")
    return time_range


def _whole_minutes(text: str) -> float:
    seconds = values.duration(text)
    if seconds < 60 or seconds % 60:
        raise ValueError(f"{text!r}: usage is counted by the minute: write whole minutes, such as 90m")
    return seconds


def time_options(default: str) -> Decorator:
    """The options of a time range: ``since_s``, ``first`` and ``last``. ``default``: its length if none is given."""
    return combined(
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


PRICES = option(
    "--prices",
    "prices_file",
    type=READABLE_FILE,
    help=(
        "A YAML or TOML file of what a GPU-hour costs: by model, date and node labels. docs/how-to/chargeback.md has an"
        " example."
    ),
)


def time_option_errors(values: dict[str, Any]) -> Iterator[str]:
    """The errors of the options of a time range together."""
    since_s, first, last = values["since_s"], values["first"], values["last"]
    if since_s is not None and (first is not None or last is not None):
        yield "--since: not together with --from and --to"
    if last is not None and first is None:
        yield "--to: needs --from"
    try:
        requested_range(since_s, first, last, now_ms())
    except ValueError as error:
        yield str(error)


def _option_errors(values: dict[str, Any]) -> Iterator[str]:
    bill, output = values["bill_file"], values["focus_file"]
    if (bill is None) != (output is None):
        yield "--focus-origin and --focus go together: without a bill, --format csv is what there is"
    elif bill is None:
        yield from (f"{name}: needs --focus-origin" for name in _FOCUS_OPTIONS if values[_FOCUS_OPTIONS[name]])
    elif os.access(output, os.F_OK) and output.samefile(bill):
        yield "--focus: must not be the bill itself"
    yield from time_option_errors(values)


@click.command(
    cls=Command,
    check=_option_errors,
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
    type=DATA_FILE,
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
        "A file that says what the bill calls each node: in each line a ResourceId and the name of a node, or"
        " CLUSTER/NODE if several clusters have one of that name. For most clouds, `kubectl get nodes --no-headers -o"
        " custom-columns=:.spec.providerID,:.metadata.name` writes it."
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
    if any(time is not None and time.is_assumed for time in (first, last)):
        click.echo("times without a zone are taken as UTC", err=True)
    time_range = requested_range(since_s, first, last, now_ms())
    try:
        table = Table(by, price_list.load(prices_file) if prices_file is not None else None)
        bill = None
        if bill_file is not None and focus_file is not None:
            nodes = Nodes(read_nodes(nodes_file) if nodes_file is not None else {}, focus_label)
            bill = Bill(bill_file, by, nodes, focus_sum)
        if bill is not None and bill.range is not None and since_s is None and first is None:
            time_range = bill.range.until(now_ms())
        plan = answer(_count(connection, time_range, table, bill))
        for note in [*plan.notes, *(table_notes(table, form) if plan.range.is_nonempty else ())]:
            click.echo(printable(note), err=True)
        if not plan.range.is_nonempty:
            raise SystemExit(FAILED)
        if bill is not None and focus_file is not None:
            _write(bill, plan.range, focus_file)
    except (PricesError, BillError) as error:
        raise failed(error) from error
    if form == "json":
        click.echo(json_text(as_json(plan.range, table)))
    elif form == "csv":
        sys.stdout.writelines(csv_lines([CSV_COLUMNS, *as_csv(table)]))
    else:
        click.echo("\n".join(as_text(plan.range, table)))


async def _count(connection: Connection, time_range: Range, table: Table, bill: Bill | None) -> read.Plan:
    """Reads the usage of a time range into the table, and the bill if there is one. Raises BillError."""
    if not time_range.is_nonempty:  # that of a bill may be
        raise BillError("of the bill's time, no hour is over: a charge is divided when its last hour is")
    async with history.opened(connection, [HOURS.name, MINUTES.name]) as reader:
        plan = await read.plan(reader, time_range, now_ms())
        if plan.range.is_nonempty:
            async for records in read.records(reader, plan):
                for record in records:
                    table.add(record)
                    if bill is not None:
                        bill.add(record)
                table.close()
    return plan


def _write(bill: Bill, counted_range: Range, file: Path) -> None:
    """Writes the bill, whole or not at all, and reports what became of its charges. Raises BillError."""
    with written(file) as out:
        out.writelines(csv_lines(bill.lines(counted_range)))
    click.echo(f"{file}: {counted(bill.divided, 'charge')} divided", err=True)
    if bill.partly:
        click.echo(
            f"of them, {counted(bill.partly, 'charge')} by a part of their time: the rest has no usage", err=True
        )
    if bill.is_of_other_nodes:
        click.echo("--focus-nodes: no node of it has usage: first in a line is the bill's id, then the name", err=True)
    if shared := bill.shared_nodes:
        click.echo(
            f"nodes of one name in several clusters share their charges, such as {printable(shared[0])}:"
            " --focus-nodes with ids of CLUSTER/NODE tells them apart",
            err=True,
        )
    for reason, count in sorted(bill.unchanged.items()):
        click.echo(f"{counted(count, 'charge')} as before: {reason}", err=True)


_NOT_FINAL_SHOWN = {
    "text": "rows that have some of them are marked with *",
    "csv": "of rows that have some of them, final is false",
    "json": "not_final_ms has their beginnings",
}


def table_notes(table: Table, form: Literal["text", "csv", "json"] = "text") -> Iterator[str]:
    """Notes on a table: that it is empty or names no team, what is not final, does not add up, or has no price.
    ``form`` is how it is written."""
    if not table.gpus:
        yield "nothing is known of this time: does `gpustream stream usage` run?"
    if table.by == "team" and [row.by for row in table.rows() if row.category == "held"] == [NO_TEAM]:
        yield (
            "no pod has a team: is --team-label of `gpustream stream usage` the name of a label that pods or namespaces"
            " have, and does `produce cluster` publish it (--pod-labels, --namespace-labels)?"
        )
    if table.growing:
        yield (
            f"not final: {counted(len(table.growing), 'window')} from {utc(min(table.growing))} on may still change;"
            f" {_NOT_FINAL_SHOWN[form]}"
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
        yield cell(by), cell(category), *times, hours, part, "" if cost is None else f"{cost:f}", currency, final


def as_text(time_range: Range, table: Table) -> Iterator[str]:
    """The table for people, at most 80 characters wide: the holders, and below them all GPU time by category."""
    rows, prices = table.rows(), table.prices
    columns = ["GPU-hours", "used", "idle", "share", "kWh", *([f"cost {prices.currency}"] if prices else [])]
    held = [row for row in rows if row.category == "held"]
    costs = [row.cost for row in rows if row.cost is not None]
    held_cost = sum((row.cost for row in held if row.cost is not None), Decimal(0)) if costs else None
    by_category = [
        UsageRow("", "held", table.categories["held"], table.share(table.categories["held"]), held_cost),
        *(row for row in rows if row.category != "held"),
        UsageRow("", "all", table.whole, table.share(table.whole), sum(costs, Decimal(0)) if costs else None),
    ]
    lines: list[tuple[Sequence[str], str, Sequence[str]]] = [
        ([table.by], "", columns),
        *(([row.by], "*" * row.sums.growing, _cells(row)) for row in held),
        ([""], "", [""] * len(columns)),
        *(([row.category], "*" * row.sums.growing, _cells(row)) for row in by_category),
    ]
    yield f"GPU usage by {table.by}, {utc(time_range.from_ms)} to {utc(time_range.to_ms)} (UTC)"
    yield ""
    yield from aligned(lines, TEXT_WIDTH)
    hours, range_hours = table.gpu_hours, Fraction(time_range.to_ms - time_range.from_ms, HOUR_MS)
    time_text = (
        f"{format_number(range_hours)} hours"
        if hours == len(table.gpus) * range_hours
        else "the time that each was known"
    )
    difference_note = "" if table.whole.gpu_hours == hours else ", which is not the sum above"
    yield ""
    yield f"{counted(len(table.gpus), 'GPU')} x {time_text} = {format_number(hours)} GPU-hours{difference_note}"


def _cells(row: UsageRow) -> list[str]:
    sums = row.sums
    hours = map(format_number, (sums.gpu_hours, sums.used_hours, sums.idle_hours))
    cost = [] if row.cost is None else [f"{row.cost:,f}"]
    return [*hours, percent(row.share), format_number(Fraction(sums.energy_mj, MJ_IN_KWH)), *cost]


def format_number(value: Fraction) -> str:
    """A number for people: two digits after the point, and commas."""
    return f"{rounded(value, 2):,f}"


def percent(share: Fraction) -> str:
    """A share for people: ``12.5%``."""
    return f"{rounded(share * 100, 1)}%"
