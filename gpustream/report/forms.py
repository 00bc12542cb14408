"""A report as text and as HTML: both are made of the same sections. Nothing in it says when it was made.

Names come from labels that tenants write: in both forms, signs that do not print are replaced, and in HTML all is
escaped.
"""

import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from html import escape
from typing import NamedTuple

from delivery.values import counted, printable
from gpustream.alerts import lasted
from gpustream.history import utc
from gpustream.output import aligned
from gpustream.report.summary import AlertSums, Summary, ratio, shares
from gpustream.usage.command import MJ_IN_KWH, format_number, percent
from gpustream.usage.read import Range
from gpustream.usage.table import CATEGORIES, Sums, Table, UsageRow, rounded

WIDTH = 100


class Row(NamedTuple):
    """A row: its names and figures. ``sums``: the usage that its bar shows, if it has one. ``mark``: * if not final."""

    names: tuple[str, ...]
    cells: Sequence[str]
    sums: Sums | None = None
    mark: str = ""


class Section(NamedTuple):
    """A table with a title. ``note``: a remark below it."""

    title: str
    names: tuple[str, ...]
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""


class Report(NamedTuple):
    """A report. ``facts`` and ``notes`` are sentences."""

    title: str
    facts: Sequence[str]
    sections: Sequence[Section]
    notes: Sequence[str]


def report(
    time_range: Range,
    current: Summary,
    previous: Summary | None,
    alerts: tuple[list[AlertSums], dict[int, int]],
    top: int,
    notes: Sequence[str],
) -> Report:
    """The report of a time range. ``previous``: the usage of the range before it; None if that is not known.
    ``top``: how many workloads are listed."""
    held, unobserved, used, idle = (percent(share) for share in shares(current.teams))
    facts = [
        f"{counted(len(current.teams.gpus), 'GPU')}, {format_number(current.teams.whole.gpu_hours)} GPU-hours:"
        f" {held} held, {unobserved} unobserved (no tick says anything of that time).",
        f"Of what was held, {used} was used, and for {idle} the holder did nothing with it.",
    ]
    workloads = [row for row in current.workloads.rows() if row.category == "held"]
    sections = [
        _totals(current, previous),
        _teams(current, previous),
        _workloads(current, workloads, top),
        _idle_workloads(current, workloads, top),
        _trend(current, previous, alerts[1]),
        _alerts(alerts[0]),
    ]
    return Report(f"GPU report, {utc(time_range.from_ms)} to {utc(time_range.to_ms)} (UTC)", facts, sections, notes)


def _cost_column(current: Summary, title: str = "cost") -> list[str]:
    return [] if current.teams.prices is None else [f"{title} {current.teams.prices.currency}"]


def _cost_cells(cost: Decimal | None) -> list[str]:
    return [] if cost is None else [f"{cost:,f}"]


def _totals(current: Summary, previous: Summary | None) -> Section:
    usage_rows, categories, whole = current.teams.rows(), current.teams.categories, current.teams.whole
    costs = {"all": [row.cost or Decimal(0) for row in usage_rows]}
    for row in usage_rows:
        costs.setdefault(row.category, []).append(row.cost or Decimal(0))
    rows = []
    previous_categories = {} if previous is None else previous.teams.categories
    unknown_categories = sorted({*categories, *previous_categories} - {*CATEGORIES})  # written by a later version
    for name in (*CATEGORIES, *unknown_categories, "all"):
        sums = whole if name == "all" else categories.get(name, Sums())
        cells = [format_number(sums.gpu_hours), percent(current.teams.share(sums))]
        cells += map(format_number, (sums.used_hours, sums.idle_hours, Fraction(sums.energy_mj, MJ_IN_KWH)))
        cells += _cost_cells(sum(costs.get(name, ()), Decimal("0.00")) if current.teams.prices else None)
        if previous is not None:
            previous_sums = previous.teams.whole if name == "all" else previous_categories.get(name, Sums())
            cells.append(format_number(previous_sums.gpu_hours))
        rows.append(Row((name,), cells, mark="*" * sums.growing))
    columns = ["GPU-hours", "share", "used", "idle", "kWh", *_cost_column(current), *(["before"] if previous else [])]
    return Section("All time of the GPUs", ("time is",), columns, rows)


def _teams(current: Summary, previous: Summary | None) -> Section:
    previous_rows = {} if previous is None else {row.by: row for row in previous.teams.rows() if row.category == "held"}
    rows = []
    for row in (row for row in current.teams.rows() if row.category == "held"):
        cells = _cells_of(row)
        if previous is not None:
            before = previous_rows.get(row.by)
            cells.append(format_number(before.sums.gpu_hours if before is not None else Fraction(0)))
        rows.append(Row((row.by,), cells, row.sums, "*" * row.sums.growing))
    zero = _usage_cells((Fraction(0),) * 3, Decimal("0.00") if current.teams.prices else None)
    ended = sorted(previous_rows.keys() - {row.by for row in current.teams.rows()})
    rows += [Row((name,), [*zero, format_number(previous_rows[name].sums.gpu_hours)]) for name in ended]
    columns = ["GPU-hours", "used", "idle", "idle %", *_cost_column(current), *(["before"] if previous else [])]
    return Section("By team", ("team",), columns, rows)


def _cells_of(row: UsageRow) -> list[str]:
    return _usage_cells((row.sums.gpu_hours, row.sums.used_hours, row.sums.idle_hours), row.cost)


def _usage_cells(hours: Sequence[Fraction], cost: Decimal | None) -> list[str]:
    """The cells of hours held, used and idle, with the share of the idle ones."""
    held, _, idle = hours
    return [*map(format_number, hours), percent(ratio(idle, held)), *_cost_cells(cost)]


def _workloads(current: Summary, usage_rows: Sequence[UsageRow], top: int) -> Section:
    rows = [
        Row((row.by, current.team_of(row.by)), _cells_of(row), row.sums, "*" * row.sums.growing)
        for row in usage_rows[:top]
    ]
    if others := usage_rows[top:]:
        hours = [
            sum((getattr(row.sums, name) for row in others), Fraction(0))
            for name in ("gpu_hours", "used_hours", "idle_hours")
        ]
        costs = [row.cost for row in others if row.cost is not None]
        cost = None if current.teams.prices is None else sum(costs, Decimal(0))
        rows.append(Row((f"({counted(len(others), 'other')})", ""), _usage_cells(hours, cost)))
    columns = ["GPU-hours", "used", "idle", "idle %", *_cost_column(current)]
    return Section("By workload", ("workload", "team"), columns, rows)


def _idle_workloads(current: Summary, usage_rows: Sequence[UsageRow], top: int) -> Section:
    idle = sorted((row for row in usage_rows if row.sums.idle_ms), key=lambda row: (-row.sums.idle_hours, row.by))
    rows = []
    for row in idle[:top]:
        cost = None if current.teams.prices is None else rounded(row.sums.idle_cost, 2)
        share = ratio(row.sums.idle_hours, row.sums.gpu_hours)
        cells = [format_number(row.sums.idle_hours), percent(share), *_cost_cells(cost)]
        rows.append(Row((row.by, current.team_of(row.by)), cells, row.sums, "*" * row.sums.growing))
    columns = ["idle GPU-hours", "of held", *_cost_column(current, "idle cost")]
    return Section("Worst offenders", ("workload", "team"), columns, rows, "" if rows else "Nobody left a GPU idle.")


def _trend(current: Summary, previous: Summary | None, fired: dict[int, int]) -> Section:
    def row(name: str, table: Table, alerts: str, *, has_bar: bool = False) -> Row:
        cells = [format_number(table.whole.gpu_hours), *map(percent, shares(table)), alerts]
        return Row((name,), cells, table.categories["held"] if has_bar else None)

    rows = []
    for day in sorted(current.days.keys() | fired.keys()):
        name, table = f"{datetime.fromtimestamp(day / 1000, UTC):%Y-%m-%d}", current.days.get(day, Table("team"))
        rows.append(row(name, table, str(fired.get(day, 0)), has_bar=True))
    rows.append(row("all", current.teams, str(sum(fired.values()))))
    if previous is not None:
        hours, previous_hours = current.teams.whole.gpu_hours, previous.teams.whole.gpu_hours
        changes = [a - b for a, b in zip(shares(current.teams), shares(previous.teams), strict=True)]
        cells = [
            f"{rounded(ratio(hours - previous_hours, previous_hours) * 100, 1):+}%",
            *(f"{rounded(change * 100, 1):+}" for change in changes),
        ]
        rows += [row("before", previous.teams, ""), Row(("change",), [*cells, ""])]
    note = "Used and idle are parts of what was held."
    note += " A change of a share is in percentage points." if previous is not None else ""
    columns = ["GPU-hours", "held", "unobserved", "used", "idle", "alerts fired"]
    return Section("Trend", ("day (UTC)",), columns, rows, note)


def _alerts(sums: Sequence[AlertSums]) -> Section:
    rows = [
        Row(
            (row.rule, row.team), [str(row.fired), str(row.still_firing), lasted(timedelta(milliseconds=row.firing_ms))]
        )
        for row in sums
    ]
    note = (
        "gpu.alerts has the last firing of each alert, until 7 days after its end, and of earlier ones what is not yet"
        " compacted. The others are not counted."
    )
    return Section("Alerts", ("rule", "team"), ["fired", "still firing", "time firing"], rows, note)


# -- the two forms


def as_text(report: Report) -> Iterator[str]:
    """The report as lines of text, at most 100 characters wide, unless a cell is wider."""
    yield report.title
    yield ""
    yield from (line for fact in report.facts for line in _wrap(fact))
    for section in report.sections:
        yield ""
        yield section.title
        yield ""
        if section.rows:
            lines = [Row(section.names, section.columns), *section.rows]
            yield from aligned([(line.names, line.mark, line.cells) for line in lines], WIDTH)
        elif not section.note:
            yield "none"
        yield from _wrap(section.note)
    if report.notes:
        yield ""
    yield from (line for note in report.notes for line in _wrap(f"note: {note}"))


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(printable(text), WIDTH)


_STYLE = """
:root { color-scheme: light dark; --used: #2da44e; --idle: #e5534b; --rest: #8b949e }
body { font: 15px/1.5 system-ui, sans-serif; color: CanvasText; background: Canvas; max-width: 70em; margin: 2em auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25em .6em; border-bottom: 1px solid #8b949e80; text-align: right; white-space: nowrap }
.name { text-align: left; white-space: normal; overflow-wrap: anywhere }
svg { width: 8em; height: .7em }
.used { fill: var(--used) } .idle { fill: var(--idle) } .rest { fill: var(--rest) }
section { overflow-x: auto }
"""


def as_html(report: Report) -> Iterator[str]:
    """The report as lines of one HTML page, without scripts or anything that is fetched."""
    title = _escape(report.title)
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield from (f"<p>{_escape(fact)}</p>" for fact in report.facts)
    yield "<p>Bars: of the time that was held, what was used (green), idle (red), neither (grey).</p>"
    for section in report.sections:
        yield f"<section>\n<h2>{_escape(section.title)}</h2>"
        has_bars = any(row.sums is not None for row in section.rows)
        if section.rows:
            yield "<table>\n<thead>"
            yield _table_row("th", Row(section.names, section.columns), has_bars=has_bars)
            yield "</thead>\n<tbody>"
            yield from (_table_row("td", row, has_bars=has_bars) for row in section.rows)
            yield "</tbody>\n</table>"
        elif not section.note:
            yield "<p>none</p>"
        if section.note:
            yield f"<p>{_escape(section.note)}</p>"
        yield "</section>"
    yield from (f"<p>Note: {_escape(note)}</p>" for note in report.notes)
    yield "</body>\n</html>"


def _escape(text: str) -> str:
    return escape(printable(text))


def _table_row(tag: str, row: Row, *, has_bars: bool) -> str:
    """A row. One with a bar has its integers as attributes, as ``gpustream usage --format json`` has them."""
    sums, attributes, bar = row.sums, "", ""
    if sums is not None:
        attributes = f' data-held-ms="{sums.device_ms}" data-used-us="{sums.used_us}" data-idle-ms="{sums.idle_ms}"'
    if sums is not None and sums.gpu_hours:
        used, idle = (min(Fraction(1), ratio(hours, sums.gpu_hours)) for hours in (sums.used_hours, sums.idle_hours))
        idle = min(idle, 1 - used)
        bar = (
            f'<svg viewBox="0 0 100 8" preserveAspectRatio="none" role="img"'
            f' aria-label="used {percent(used)}, idle {percent(idle)}"><rect class="rest" width="100" height="8"/>'
            f'<rect class="used" width="{rounded(used * 100, 2)}" height="8"/>'
            f'<rect class="idle" x="{rounded(used * 100, 2)}" width="{rounded(idle * 100, 2)}" height="8"/></svg>'
        )
    marked_names = row.names[0] + row.mark, *row.names[1:]
    names = "".join(f'<{tag} class="name">{_escape(name)}</{tag}>' for name in marked_names)
    cells = "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in row.cells)
    bar_cell = f"<{tag}>{bar}</{tag}>" if has_bars else ""
    return f"<tr{attributes}>{names}{cells}{bar_cell}</tr>"
