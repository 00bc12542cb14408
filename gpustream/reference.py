"""The reference pages ``docs/options.md`` and ``docs/own-metrics.md``: ``python -m gpustream.reference [--check]``.

In:       the commands as click knows them, and every table of instruments.
Out:      Markdown.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click

import gpustream
import producers
import sinks
import streams
from delivery.instruments import Instrument
from delivery.settings import Text
from gpustream.cli import main
from topics import generated

FOLDER = Path(__file__).parent.parent / "docs"
MARK = "<!-- Written by `python -m gpustream.reference`: change the code that it describes, not this file. -->"

_PACKAGES = (producers, streams, sinks, gpustream)
_UNSET = "-"


class Section(NamedTuple):
    """The instruments of one package: its import path, and the rows that no section before it has."""

    package: str
    rows: list[Instrument]


def options_markdown() -> str:
    """The reference of the command and its options."""
    parts = [
        "# Options",
        MARK,
        "Every option has one environment variable, whatever the command; the option wins. All is checked at the "
        "start, and one message lists every mistake. Durations are written `500ms`, `30s`, `15m`, `2h` (a bare number "
        "is seconds), sizes `64KiB`, `4MiB`. Exit codes: 0 done, 1 failed, 2 wrong usage, 70 stopped itself to be "
        "restarted.",
        *(_command(path, command) for path, command in commands(main, ("gpustream",))),
    ]
    return "\n\n".join(parts) + "\n"


def metrics_markdown() -> str:
    """The reference of what the components say of themselves."""
    parts = [
        "# What gpustream says of itself",
        MARK,
        "Each process serves these on its `--listen` address at `/metrics`, beside `/healthz` and `/readyz` (503 with "
        "the reasons while it is not ready). The metrics of the GPUs are in [metrics.md](metrics.md).",
        *(_section(section) for section in sections()),
    ]
    return "\n\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """The files as they should be."""
    return {FOLDER / "options.md": options_markdown(), FOLDER / "own-metrics.md": metrics_markdown()}


def commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that can be run, with the words that run it."""
    for name in group.list_commands(click.Context(group)):
        command = group.commands[name]
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def sections() -> Iterator[Section]:
    """Every package's instruments, each once: where several components have the same, with the first."""
    known: set[str] = set()
    for module in _modules():
        rows = [row for row in getattr(module, "INSTRUMENTS", ()) if row.name not in known]
        known.update(row.name for row in rows)
        if rows:
            yield Section(module.__name__.rpartition(".")[0], rows)


def _modules() -> Iterator[ModuleType]:
    """Every module of ours, in the order of the flow; those named ``instruments`` first, as others repeat theirs."""
    for package in _PACKAGES:
        names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        runnable = [name for name in names if not name.endswith("__main__")]
        for name in sorted(runnable, key=lambda name: (not name.endswith(".instruments"), name)):
            yield importlib.import_module(name)


def _command(path: tuple[str, ...], command: click.Command) -> str:
    title = " ".join(path)
    arguments = [f" [{param.human_readable_name}]" for param in command.params if isinstance(param, click.Argument)]
    options = [param for param in command.params if isinstance(param, click.Option)]
    return "\n\n".join(
        [
            f"## {title}",
            _paragraphs(command.help or ""),
            f"```\n{title}{''.join(arguments)} [OPTIONS]\n```",
            _table(("option", "variable", "default", "meaning"), [_option(option) for option in options]),
            f"```sh\n{getattr(command, 'example', '').strip()}\n```",
        ]
    )


def _option(option: click.Option) -> tuple[str, str, str, str]:
    taken = "" if option.is_flag else f" {_value(option.type)}"
    repeatable = " ..." if option.multiple else ""
    return f"`{option.opts[0]}{taken}`{repeatable}", f"`{option.envvar}`", _default(option), option.help or ""


def _value(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(kind.choices)
    return kind.name if isinstance(kind, Text) else kind.name.split()[0].upper()


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    default: Any = option.default
    return f"`{default}`" if isinstance(default, str | int) and not isinstance(default, bool) else _UNSET


def _section(section: Section) -> str:
    rows = [
        (f"`{row.name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels) or _UNSET, row.help)
        for row in section.rows
    ]
    return f"## {section.package}\n\n{_table(('metric', 'kind', 'labels', 'meaning'), rows)}"


def _paragraphs(text: str) -> str:
    """The text with each of its paragraphs on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(generated.main(files(), "gpustream.reference", sys.argv[1:]))
