"""``gpustream report``: a week of GPUs by team and workload, and the alerts of that time.

In:       gpu.usage, gpu.usage-minutes and gpu.alerts, in no group; a file of prices.
Out:      a page of text or HTML, on standard output or in a file. It has what is to be known about it.
On failure: what is wrong, in a sentence, and exit code 1; mistakes in the command line, and exit code 2.
"""

from pathlib import Path
from typing import Literal

import click

from delivery import prices as price_list
from delivery.connection import Connection
from delivery.prices import Prices, PricesError
from delivery.settings import FILE
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Command, option, output_format
from gpustream.history import History
from gpustream.output import answer, failed, now_ms, written
from gpustream.report import forms
from gpustream.report.summary import DAY_MS, Firings, Summary
from gpustream.usage import read
from gpustream.usage.command import PRICES, When, remarks, time_mistakes, time_options, wanted
from gpustream.usage.read import Range, utc
from topics import alerts
from topics.usage import HOUR_MS, HOURS, MINUTES

WEEK_S = 7 * 24 * 3600.0


@click.command(
    cls=Command,
    check=time_mistakes,
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
    if any(one is not None and one.is_assumed for one in (first, last)):
        click.echo("times without a zone are taken as UTC", err=True)
    at_ms = now_ms()
    try:
        prices = price_list.load(prices_file) if prices_file is not None else None
    except PricesError as error:
        raise failed(error) from error
    found = answer(_gather(connection, wanted(since_s or WEEK_S, first, last, at_ms), prices, top, at_ms))
    lines = forms.as_html(found) if form == "html" else forms.as_text(found)
    text = "\n".join(lines) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with written(output) as file:
            file.write(text)
    except OSError as error:
        raise failed(f"{output}: it can't be written: {error}") from error


async def _gather(connection: Connection, time: Range, prices: Prices | None, top: int, at_ms: int) -> forms.Report:
    """Read all that a report says. A time that nothing can be said of is a sentence and exit code 1."""
    topics = [HOURS.name, MINUTES.name, alerts.TOPIC.name]
    async with history.opened(connection, topics) as past:
        now, found = Summary(prices), await read.plan(past, time, at_ms)
        if not found.range.is_some:
            raise failed("\n".join(found.notes))
        await _count(past, found, now)
        before, why = await _before(past, found.range, prices, at_ms)
        firings = Firings()
        async for records in past.records(await past.spans(alerts.TOPIC.name)):
            firings.take(records)
    nothing = [] if now.teams.gpus else ["nothing is known of this time: does `gpustream stream usage` run?"]
    notes = [*nothing, *found.notes, *remarks(now.teams), *why]
    return forms.report(found.range, now, before, firings.during(found.range), top, notes)


async def _count(past: History, plan: read.Answer, summary: Summary) -> None:
    async for records in read.records(past, plan):
        for record in records:
            summary.add(record)
        summary.close()


async def _before(past: History, time: Range, prices: Prices | None, at_ms: int) -> tuple[Summary | None, list[str]]:
    """The time before; None if it is not there. With what has to be known about it."""
    asked = time_before(time)
    plan = await read.plan(past, asked, at_ms)
    words = f"the time before, {utc(asked.from_ms)} to {utc(asked.to_ms)}"
    if plan.notes:
        return None, [f"{words}, is not compared: Kafka does not have all of it any more"]
    before = Summary(prices)
    await _count(past, plan, before)
    if not before.teams.gpus:
        return None, [f"{words}, is not compared: nothing is known of it"]
    return before, [f"before: {utc(asked.from_ms)} to {utc(asked.to_ms)}"]


def time_before(time: Range) -> Range:
    """The time before a time, just as long. For a day or more it is in whole hours: Kafka forgets minutes first."""
    length_ms, ends_ms = time.to_ms - time.from_ms, time.from_ms
    if length_ms >= DAY_MS:
        length_ms, ends_ms = round(length_ms / HOUR_MS) * HOUR_MS, ends_ms // HOUR_MS * HOUR_MS
    return Range(max(0, ends_ms - length_ms), ends_ms)
