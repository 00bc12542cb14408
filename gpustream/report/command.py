"""``gpustream report``: a week of GPUs by team and workload, and the alerts of that time.

In:       gpu.usage, gpu.usage-minutes and gpu.alerts, in no group; a file of prices.
Out:      a page of text or HTML with its notes, on standard output or in a file.
On failure: what is wrong, in a sentence, and exit code 1; errors in the command line, and exit code 2.
"""

from pathlib import Path
from typing import Literal

import click

from delivery import prices as price_list
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.prices import Prices, PricesError
from delivery.settings import FILE
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Command, option, output_format
from gpustream.history import History, utc
from gpustream.output import answer, failed, written
from gpustream.report import forms
from gpustream.report.summary import DAY_MS, Firings, Summary
from gpustream.usage import read
from gpustream.usage.command import PRICES, When, requested_range, table_notes, time_option_errors, time_options
from gpustream.usage.read import Range
from topics import alerts
from topics.usage import HOUR_MS, HOURS, MINUTES

WEEK_S = 7 * 24 * 3600.0


@click.command(
    cls=Command,
    check=time_option_errors,
    example=(
        "gpustream report --kafka kafka-0:9092 --prices prices.yaml --format html --output week.html\n"
        "gpustream report --kafka kafka-0:9092 --from 2026-11-09 --to 2026-11-16"
    ),
)
@KAFKA
@time_options("7d")
@output_format("text", "html", help="html: one file that needs no other, without scripts.")
@option("--output", type=FILE, show_default="standard output", help="The file that the report is written to.")
@PRICES
@option("--top", type=click.IntRange(min=1), default=10, help="How many workloads are listed.")
@LOG_FORMAT
def report(
    connection: Connection,
    since_s: float | None,
    first: When | None,
    last: When | None,
    form: Literal["text", "html"],
    output: Path | None,
    prices_file: Path | None,
    top: int,
) -> None:
    """Report who had the GPUs, what was used and wasted, how that changed, and which alerts fired."""
    if any(time is not None and time.is_assumed for time in (first, last)):
        click.echo("times without a zone are taken as UTC", err=True)
    current_ms = now_ms()
    try:
        prices = price_list.load(prices_file) if prices_file is not None else None
    except PricesError as error:
        raise failed(error) from error
    built = answer(
        _build_report(connection, requested_range(since_s or WEEK_S, first, last, current_ms), prices, top, current_ms)
    )
    lines = forms.as_html(built) if form == "html" else forms.as_text(built)
    text = "\n".join(lines) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    with written(output) as file:
        file.write(text)


async def _build_report(
    connection: Connection, time_range: Range, prices: Prices | None, top: int, current_ms: int
) -> forms.Report:
    """Reads everything for a report. Fails with a sentence if Kafka has nothing of the time range."""
    topics = [HOURS.name, MINUTES.name, alerts.TOPIC.name]
    async with history.opened(connection, topics) as reader:
        current, plan = Summary(prices), await read.plan(reader, time_range, current_ms)
        if not plan.range.is_nonempty:
            raise failed("\n".join(plan.notes))
        await _add_usage(reader, plan, current)
        before = previous_range(plan.range)
        before_text = f"{utc(before.from_ms)} to {utc(before.to_ms)}"
        previous_plan, previous, reason = await read.plan(reader, before, current_ms), Summary(prices), ""
        if not previous_plan.notes:
            await _add_usage(reader, previous_plan, previous)
        if previous_plan.notes:  # or some of it was deleted while it was read
            reason = "Kafka does not have all of it any more"
        elif not previous.teams.gpus:
            reason = "nothing is known of it"
        firings = Firings()
        async for records in reader.records(await reader.spans(alerts.TOPIC.name)):
            firings.add(records)
    before_note = f"the time before, {before_text}, is not compared: {reason}" if reason else f"before: {before_text}"
    notes = [*plan.notes, *table_notes(current.teams), before_note]
    return forms.report(plan.range, current, None if reason else previous, firings.during(plan.range), top, notes)


async def _add_usage(reader: History, plan: read.Plan, summary: Summary) -> None:
    async for records in read.records(reader, plan):
        for record in records:
            summary.add(record)
        summary.close()


def previous_range(time_range: Range) -> Range:
    """The range before a range, of the same length. A day or more is in whole hours: minutes are deleted first."""
    length_ms, ends_ms = time_range.to_ms - time_range.from_ms, time_range.from_ms
    if length_ms >= DAY_MS:
        length_ms, ends_ms = round(length_ms / HOUR_MS) * HOUR_MS, ends_ms // HOUR_MS * HOUR_MS
    return Range(max(0, ends_ms - length_ms), ends_ms)
