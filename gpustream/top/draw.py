"""Lines of a terminal: cells, bars, sparklines and tables. Pure.

A line is a list of (text, style); a style is one of rich's with the terminal's own 16 colours, so that it fits dark and
light ones. Nothing is said by colour alone: a status is a word, or a sign of its own.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.cells import cell_len, set_cell_size

from delivery.values import printable
from gpustream.alerts import lasted
from gpustream.fleet import Device, Status, Tenure
from topics.times import MAX_TIME_MS

Line = list[tuple[str, str]]

STYLES: dict[Status, str] = {
    "busy": "green",
    "held": "cyan",
    "idle": "yellow",
    "free": "dim",
    "failing": "bold red",
    "silent": "magenta",
}
"""The style of each status."""

SIGNS: dict[Status, str] = {"busy": "█", "held": "h", "idle": "i", "free": "·", "failing": "X", "silent": "?"}
"""The sign of each status in the map of GPUs; a busy device has a block as high as its use."""

MEMORY, POWER, HEAT = "blue", "magenta", "red"
SEVERITIES = {"critical": "bold red", "warning": "yellow"}

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_BLOCKS = frozenset(_LEVELS + _EIGHTHS.strip())
_GIB = 1024.0**3
_GAP = 1


def bar(ratio: float | None, width: int, style: str) -> Line:
    """A bar, and the percentage at its right: ``████▌   57%``."""
    if ratio is None:
        return [(f"{'-':>{width}}", "dim")]
    bar_width = max(1, width - 5)
    eighths = round(min(1.0, max(0.0, ratio)) * bar_width * 8)
    full, remainder = divmod(eighths, 8)
    blocks = "█" * full + (_EIGHTHS[remainder] if remainder else "")
    return [(f"{blocks:<{bar_width}}", style), (f"{ratio:>5.0%}", "")]


def stacked(counts: dict[Status, int], width: int) -> Line:
    """One bar of all statuses, each as long as its share, and at least one cell long."""
    nonzero = [(status, count) for status, count in counts.items() if count]
    left_width, left_count = width, sum(count for _, count in nonzero)
    line: Line = []
    for number, (status, count) in enumerate(nonzero, 1):
        length = max(1, min(left_width - (len(nonzero) - number), round(left_width * count / left_count)))
        line.append((("█" if status == "busy" else SIGNS[status]) * length, STYLES[status]))
        left_width, left_count = left_width - length, left_count - count
    return line


def sign(device: Device) -> tuple[str, str]:
    """A device in one cell."""
    status = device.status
    if status == "busy" and (used_ratio := device.metrics.used_ratio) is not None:
        return _LEVELS[int(min(7.0, max(0.0, used_ratio) * 8))], STYLES[status]
    return SIGNS[status], STYLES[status]


def status(status: Status) -> Line:
    """What a device does, in its colour."""
    return [(status, STYLES[status])]


def spark(values: Sequence[float | None], maximum: float, height: int) -> list[str]:
    """One cell for each value, in lines from the top down; a gap if nothing was measured."""
    lines = []
    for row in range(height - 1, -1, -1):
        signs = []
        for value in values:
            level = 0.0 if value is None or maximum <= 0 else min(1.0, value / maximum) * height - row
            signs.append(" " if value is None or (level <= 0 and row > 0) else _LEVELS[min(7, int(max(0, level) * 8))])
        lines.append("".join(signs))
    return lines


def gib(size: float | None) -> str:
    """``64 GiB``."""
    return "-" if size is None else f"{size / _GIB:.0f} GiB"


def watts(power: float | None) -> str:
    """``350 W``, ``12.3 kW``."""
    if power is None:
        return "-"
    return f"{power:.0f} W" if power < 10_000 else f"{power / 1000:.1f} kW"


def ago(duration_ms: float) -> str:
    """``2h 5m``."""
    shown_ms = max(0, min(duration_ms, MAX_TIME_MS))  # a node's clock may say anything
    return lasted(timedelta(milliseconds=shown_ms)).removesuffix(" 0s")


def held_for(now_ms: int, since: Tenure) -> str:
    """``2h 5m``, or ``>2h 5m`` if it was held so at the first reading already."""
    return f"{'>' if since.or_before else ''}{ago(now_ms - since.from_ms)}"


def fit(line: Line, width: int, style: str = "") -> Line:
    """The line in exactly ``width`` cells, cut with an ellipsis or filled up. Bars do not get ``style``.

    What it is made of comes from records, so that characters on which a terminal would act are replaced.
    """
    fitted: Line = []
    left = width
    for raw_text, text_style in line:
        if left <= 0:
            break
        text = printable(raw_text)
        size = cell_len(text)
        cut = text if size <= left else set_cell_size(text, left - 1) + "…"
        fitted.append((cut, text_style if _BLOCKS.intersection(text) else f"{text_style} {style}".strip()))
        left -= min(size, left)
    return [*fitted, (" " * left, style)] if left > 0 else fitted


def text_of(line: Line) -> str:
    """The text of a line, without styles."""
    return "".join(text for text, _ in line)


def plain(text: str, style: str = "") -> Line:
    return [(text, style)]


# -- tables


@dataclass(frozen=True)
class Column:
    """A column: ``value`` gives a row's sort key, ``draw`` its cell in a given width.

    It is ``width`` cells wide, and gets ``share`` of the space left over. A terminal narrower than ``from_width`` does
    not show it.
    """

    title: str
    width: int
    value: Callable[[Any], Any]
    draw: Callable[[Any, int], Line]
    share: int = 0
    from_width: int = 0
    right: bool = False
    descending: bool = False
    """Whether sorting by this column puts the greatest value first."""


def text_column(
    title: str, width: int, value_of: Callable[[Any], str], style: str = "", *, share: int = 0, from_width: int = 0
) -> Column:
    """A column of words; rows without any come last."""
    return Column(
        title, width, lambda row: value_of(row) or None, lambda row, _: plain(value_of(row), style), share, from_width
    )


def amount_column(
    title: str,
    width: int,
    value_of: Callable[[Any], float | None],
    text_for: Callable[[Any], str] = "{:.0f}".format,
    *,
    from_width: int = 0,
) -> Column:
    """A column of numbers, the greatest first; one that is not known is a dash."""

    def draw_cell(row: Any, _: int) -> Line:
        value = value_of(row)
        return plain("-", "dim") if value is None else plain(text_for(value))

    return Column(title, width, value_of, draw_cell, from_width=from_width, right=True, descending=True)


def time_column(title: str, since_of: Callable[[Any], tuple[int, Tenure] | None], *, from_width: int = 0) -> Column:
    """A column of how long something has been held at a time, the longest first."""

    def lasted_ms(row: Any) -> int | None:
        since = since_of(row)
        return None if since is None else since[0] - since[1].from_ms

    def draw_cell(row: Any, _: int) -> Line:
        since = since_of(row)
        return plain("-", "dim") if since is None else plain(held_for(*since))

    return Column(title, 8, lasted_ms, draw_cell, from_width=from_width, right=True, descending=True)


def bar_column(title: str, width: int, value_of: Callable[[Any], float | None], style: Callable[[Any], str]) -> Column:
    """A column of shares, the greatest first."""
    return Column(title, width, value_of, lambda row, width: bar(value_of(row), width, style(row)), descending=True)


@dataclass(frozen=True)
class TableView:
    """A table: its rows at a moment, the key of each row, and the text that a filter searches."""

    name: str
    rows: Callable[[Any], list[Any]]
    key: Callable[[Any], Hashable]
    text: Callable[[Any], str]
    columns: tuple[Column, ...]
    sorted_by: str
    empty: str

    def column(self, title: str) -> Column:
        return next(column for column in self.columns if column.title == title)


def layout(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit into the width, each with its own width."""
    visible = [column for column in columns if column.from_width <= width]
    left = width - sum(column.width for column in visible) - _GAP * (len(visible) - 1)
    shares = sum(column.share for column in visible)
    columns_with_widths = []
    for column in visible:
        extra = max(0, left) * column.share // shares if column.share else 0
        left, shares = left - extra, shares - column.share
        columns_with_widths.append((column, column.width + extra))
    return columns_with_widths


def header_line(columns: Sequence[Column], width: int, sorted_by: str, *, descending: bool) -> Line:
    """The titles as a line; the title of the column that the rows are sorted by is marked."""
    line: Line = []
    for column, size in layout(columns, width):
        marked = column.title == sorted_by
        title = column.title + (("▼" if descending else "▲") if marked else "")
        cell = f"{title:>{size}}" if column.right else f"{title:<{size}}"
        line += [(cell[:size], "bold underline" if marked else "bold"), (" " * _GAP, "")]
    return line[:-1]


def row_line(columns: Sequence[Column], row: Any, width: int) -> Line:
    line: Line = []
    for column, size in layout(columns, width):
        cell = column.draw(row, size)
        if column.right:
            text = text_of(cell)
            cell = [(" " * (size - cell_len(text)), ""), *cell]
        line += [*fit(cell, size), (" " * _GAP, "")]
    return line[:-1]


def filtered_rows(
    table: TableView, rows: list[Any], filter_text: str, sorted_by: str, *, descending: bool
) -> list[Any]:
    """The rows whose text has every word of the filter and no ``!word``, sorted; rows without a value come last."""
    for word in filter_text.casefold().split():
        must_match, needle = not word.startswith("!"), word.lstrip("!")
        if needle:  # a ``!`` whose word is still to be typed hides nothing
            rows = [row for row in rows if (needle in table.text(row).casefold()) == must_match]
    value = table.column(sorted_by).value
    rows_by_value = [(value(row), row) for row in rows]
    with_value = [pair for pair in rows_by_value if pair[0] is not None]
    with_value.sort(key=lambda pair: pair[0], reverse=descending)
    return [row for _, row in with_value] + [row for row_value, row in rows_by_value if row_value is None]
