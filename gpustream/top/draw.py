"""Lines of a terminal: cells, bars, sparklines and tables. Pure.

A line is a list of (text, style); a style is one of rich's with the terminal's own 16 colours, so that it fits dark and
light ones. Nothing is said by colour alone: a status is a word, or a sign of its own.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.cells import cell_len, set_cell_size

from gpustream.alerts import lasted
from gpustream.fleet import Device, Status

Line = list[tuple[str, str]]

STYLES: dict[Status, str] = {
    "busy": "green",
    "held": "cyan",
    "idle": "yellow",
    "free": "dim",
    "failing": "bold red",
    "silent": "magenta",
}
"""How each status is drawn, wherever it is."""

SIGNS: dict[Status, str] = {"busy": "█", "held": "h", "idle": "i", "free": "·", "failing": "X", "silent": "?"}
"""Its sign in a map; a busy device's is as high as it is used."""

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
    long = max(1, width - 5)
    eighths = round(min(1.0, max(0.0, ratio)) * long * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[rest] if rest else "")
    return [(f"{drawn:<{long}}", style), (f"{ratio:>5.0%}", "")]


def stacked(counts: dict[Status, int], width: int) -> Line:
    """One bar of all statuses, each as long as its share, and at least one cell long."""
    shown = [(status, count) for status, count in counts.items() if count]
    left, still = width, sum(count for _, count in shown)
    line: Line = []
    for number, (status, count) in enumerate(shown, 1):
        length = max(1, min(left - (len(shown) - number), round(left * count / still)))
        line.append((("█" if status == "busy" else SIGNS[status]) * length, STYLES[status]))
        left, still = left - length, still - count
    return line


def sign(device: Device) -> tuple[str, str]:
    """A device in one cell."""
    status = device.status
    if status == "busy" and device.used_ratio is not None:
        return _LEVELS[min(7, int(max(0.0, device.used_ratio) * 8))], STYLES[status]
    return SIGNS[status], STYLES[status]


def spark(values: Sequence[float | None], most: float, height: int) -> list[str]:
    """One cell for each value, in lines from the top down; a gap if nothing was measured."""
    lines = []
    for row in range(height - 1, -1, -1):
        signs = []
        for value in values:
            level = 0.0 if value is None or most <= 0 else min(1.0, value / most) * height - row
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
    return lasted(timedelta(milliseconds=duration_ms)).removesuffix(" 0s")


def fit(line: Line, width: int, style: str = "") -> Line:
    """The line in exactly ``width`` cells, cut with an ellipsis or filled up. Bars do not get ``style``."""
    fitted: Line = []
    left = width
    for text, own in line:
        if left <= 0:
            break
        size = cell_len(text)
        cut = text if size <= left else set_cell_size(text, left - 1) + "…"
        fitted.append((cut, own if _BLOCKS.intersection(text) else f"{own} {style}".strip()))
        left -= min(size, left)
    return [*fitted, (" " * left, style)] if left > 0 else fitted


def text_of(line: Line) -> str:
    """What a line says, without colour."""
    return "".join(text for text, _ in line)


def plain(text: str, style: str = "") -> Line:
    """A text in one style."""
    return [(text, style)]


# -- tables


@dataclass(frozen=True)
class Column:
    """A column: what it is sorted by, and how a cell is drawn in a given width.

    It is ``width`` cells wide, and has ``share`` of what is left over. It is shown from a terminal of ``from_width``.
    """

    title: str
    width: int
    value: Callable[[Any], Any]
    draw: Callable[[Any, int], Line]
    share: int = 0
    from_width: int = 0
    right: bool = False
    falling: bool = False
    """Whether the greatest come first when it is sorted by."""


def words_column(
    title: str, width: int, of: Callable[[Any], str], style: str = "", *, share: int = 0, from_width: int = 0
) -> Column:
    """A column of words; rows without any come last."""
    return Column(title, width, lambda one: of(one) or None, lambda one, _: plain(of(one), style), share, from_width)


def amount_column(
    title: str, width: int, of: Callable[[Any], float | None], words: Callable[[Any], str] = "{:.0f}".format, *,
    from_width: int = 0,
) -> Column:  # fmt: skip
    """A column of numbers, the greatest first; one that is not known is a dash."""

    def drawn(one: Any, _: int) -> Line:
        value = of(one)
        return plain("-", "dim") if value is None else plain(words(value))

    return Column(title, width, of, drawn, from_width=from_width, right=True, falling=True)


def bar_column(title: str, width: int, of: Callable[[Any], float | None], style: Callable[[Any], str]) -> Column:
    """A column of shares, the greatest first."""
    return Column(title, width, of, lambda one, wide: bar(of(one), wide, style(one)), falling=True)


@dataclass(frozen=True)
class TableView:
    """A view: its rows of what there is now, the key of each row, and the text that a filter searches."""

    name: str
    rows: Callable[[Any], list[Any]]
    key: Callable[[Any], Hashable]
    text: Callable[[Any], str]
    columns: tuple[Column, ...]
    sorted_by: str
    empty: str

    def column(self, title: str) -> Column:
        """The column of that title."""
        return next(column for column in self.columns if column.title == title)


def layout(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that there is room for, each with its width."""
    shown = [column for column in columns if column.from_width <= width]
    left = width - sum(column.width for column in shown) - _GAP * (len(shown) - 1)
    shares = sum(column.share for column in shown)
    found = []
    for column in shown:
        more = max(0, left) * column.share // shares if column.share else 0
        left, shares = left - more, shares - column.share
        found.append((column, column.width + more))
    return found


def head(columns: Sequence[Column], width: int, sorted_by: str, *, falling: bool) -> Line:
    """The titles; the one that is sorted by is marked."""
    line: Line = []
    for column, size in layout(columns, width):
        marked = column.title == sorted_by
        title = column.title + (("▼" if falling else "▲") if marked else "")
        cell = f"{title:>{size}}" if column.right else f"{title:<{size}}"
        line += [(cell[:size], "bold underline" if marked else "bold"), (" " * _GAP, "")]
    return line[:-1]


def row(columns: Sequence[Column], one: Any, width: int) -> Line:
    """A row of a table."""
    line: Line = []
    for column, size in layout(columns, width):
        cell = column.draw(one, size)
        if column.right:
            text = text_of(cell)
            cell = [(" " * (size - cell_len(text)), ""), *cell]
        line += [*fit(cell, size), (" " * _GAP, "")]
    return line[:-1]


def chosen(table: TableView, rows: list[Any], words: str, sorted_by: str, *, falling: bool) -> list[Any]:
    """The rows that have every word and none after a ``!``, sorted; what has no value comes last."""
    for word in words.casefold().split():
        wanted, needle = not word.startswith("!"), word.lstrip("!")
        rows = [one for one in rows if (needle in table.text(one).casefold()) == wanted]
    value = table.column(sorted_by).value
    keyed = [(value(one), one) for one in rows]
    with_value = [pair for pair in keyed if pair[0] is not None]
    with_value.sort(key=lambda pair: pair[0], reverse=falling)
    return [one for _, one in with_value] + [one for found, one in keyed if found is None]
