"""Prometheus text exposition of devices. Pure.

In:       devices, each with its labels, its series and their values.
Out:      text format 0.0.4: a family after the other, no timestamps (a scraper adds its own).
Source:   the exposition formats page of the Prometheus documentation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sinks.blocks import Row, Rows
from sinks.labels import Labels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Lines(NamedTuple):
    """The series of one device under one label set: what each line says before its value. Made once, used often."""

    labels: Labels
    rows: Rows
    heads: tuple[str, ...]


class Device(NamedTuple):
    """A device at one time: a value for each of its rows."""

    lines: Lines
    values: Sequence[float]


def lines(labels: Labels, rows: Rows) -> Lines:
    """The lines of a device's series but for their values."""
    common = _pairs(labels)
    return Lines(labels, rows, tuple(_head(row, common) for row in rows))


def expose(devices: Iterable[Device]) -> str:
    """The text. Of devices with the same labels the first is shown: a series has one value."""
    families: dict[str, list[str]] = {}
    shown: set[Labels] = set()
    for device in devices:
        if device.lines.labels in shown:
            continue
        shown.add(device.lines.labels)
        for row, head, value in zip(device.lines.rows, device.lines.heads, device.values, strict=True):
            family = families.get(row.name)
            if family is None:
                family = families[row.name] = [_about(row)]
            family.append(f"{head}{value!r}\n")
    return "".join(line for name in sorted(families) for line in families[name])


def _head(row: Row, common: str) -> str:
    pairs = ",".join(part for part in (common, _pairs(row.labels)) if part)
    return f"{row.name}{{{pairs}}} " if pairs else f"{row.name} "


def _pairs(labels: Labels) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels)


def _about(row: Row) -> str:
    help_text = f"# HELP {row.name} {row.help.translate(_HELP_ESCAPES)}\n" if row.help else ""
    return f"{help_text}# TYPE {row.name} {row.kind}\n"
