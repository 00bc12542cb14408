"""The pages ``options.md`` and ``own-metrics.md`` of ``docs/reference``: ``python -m gpustream.reference [--check]``.

In:       the commands as click knows them, and every table of instruments.
Out:      Markdown.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import gpustream
import producers
import sinks
import streams
from delivery.instruments import Instrument
from delivery.settings import Text
from gpustream.cli import commands, main
from gpustream.command import OF_CONNECTION
from topics.reference import generate, table

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
MARK = "<!-- Written by `python -m gpustream.reference`: change the code that it describes, not this file. -->"

_PACKAGES = (producers, streams, sinks, gpustream)
_UNSET = "-"
_COLUMNS = ("option", "variable", "default", "meaning")


def options_markdown() -> str:
    """The reference of the command and its options."""
    parts = [
        "# Options",
        MARK,
        "Every option has one environment variable, whatever the command; the option wins. All is checked at the "
        "start, and one message lists every mistake. Durations are written `500ms`, `30s`, `15m`, `2h` (a bare number "
        "is seconds), sizes `64KiB`, `4MiB`. Exit codes: 0 done, 1 failed, 2 wrong usage, 70 stopped itself to be "
        "restarted.",
        "`-h` is `--help`. A word that is misspelt is answered with the one that was probably meant.",
        "## Shell completion",
        "A line in the shell's own file makes Tab complete commands, options and the words that an option takes:",
        table(("shell", "file", "line"), _COMPLETION),
        "## How Kafka is reached",
        "Every command that has `--kafka` has these too. [kafka.md](../how-to/kafka.md#connect) says which of "
        "them a broker wants.",
        table(_COLUMNS, _option_rows(main.entries["alerts"].load(), shared=True)),
    ]
    for path, command in commands():
        title = " ".join(path)
        context = click.Context(command)
        arguments = [f" {param.make_metavar(context)}" for param in command.params if isinstance(param, click.Argument)]
        options = _option_rows(command, shared=False)
        parts += [
            f"## {title}",
            *(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")),
            f"```\n{title}{''.join(arguments)} [OPTIONS]\n```",
            *([table(_COLUMNS, options)] if options else []),
            f"```sh\n{getattr(command, 'example', '').strip()}\n```",
        ]
    return "\n\n".join(parts) + "\n"


_COMPLETION = [
    ("bash 4.4 or newer", "`~/.bashrc`", '`eval "$(_GPUSTREAM_COMPLETE=bash_source gpustream)"`'),
    ("zsh", "`~/.zshrc`", '`eval "$(_GPUSTREAM_COMPLETE=zsh_source gpustream)"`'),
    ("fish", "`~/.config/fish/completions/gpustream.fish`", r"`_GPUSTREAM_COMPLETE=fish_source gpustream | source`"),
]

_OUTCOMES = [
    ("It was delivered: the receiver has it, or the broker has what came of it.", "`records_delivered_total`"),
    ("It said nothing new.", "`records_duplicate_total`"),
    ("It was refused for its time, or nothing was left to send. Streams drop nothing.", "`records_dropped_total`"),
    ("It is in `gpu.dead-letters`, with the reason.", "`records_dead_lettered_total`"),
    ("It was given back unfinished, when its partition went.", "`records_released_total`"),
    ("It was read, and none of these yet.", "`records_held`"),
]


def metrics_markdown() -> str:
    """The reference of the components' own metrics."""
    parts = [
        "# What gpustream says of itself",
        MARK,
        "Each process serves these on its `--listen` address at `/metrics`, beside `/healthz` and `/readyz` (503 with "
        "the reasons while it is not ready). The metrics of the GPUs are in [metrics.md](metrics.md).",
        "A stream or sink accounts for every record that it read. At any moment of a process's life, for each topic "
        "if there is such a label, `records_read_total` is the sum of the other six:",
        table(("what became of a record", "metric, after `gpustream_NAME_`"), _OUTCOMES),
        "A producer does the same: `gpustream_producer_ticks_made_total` is the sum of `ticks_sent_total`, "
        "`ticks_dropped_total` and `ticks_held`. What one process releases, and what it held when it was killed, the "
        "next one reads. So across lives it is the tick that counts: the set of (cluster, node, run_id, seq).",
    ]
    for package, instruments in sections():
        rows = [
            (f"`{row.name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels) or _UNSET, row.help)
            for row in instruments
        ]
        parts += [f"## {package}", table(("metric", "kind", "labels", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """The files as they should be."""
    return {FOLDER / "options.md": options_markdown(), FOLDER / "own-metrics.md": metrics_markdown()}


def sections() -> Iterator[tuple[str, list[Instrument]]]:
    """The import path of every package and its instruments, each once, in the order of the flow.

    In a package the module ``instruments`` comes first: other modules repeat instruments that several components have.
    """
    seen: set[str] = set()
    for package in _PACKAGES:
        names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        runnable = [name for name in names if not name.endswith("__main__")]
        for name in sorted(runnable, key=lambda name: (not name.endswith(".instruments"), name)):
            instruments = getattr(importlib.import_module(name), "INSTRUMENTS", ())
            rows = [row for row in instruments if row.name not in seen]
            seen.update(row.name for row in rows)
            if rows:
                parent = name.rpartition(".")[0]
                yield name if parent == sinks.__name__ else parent, rows  # a sink may be one module


def _option_rows(command: click.Command, *, shared: bool) -> list[tuple[str, str, str, str]]:
    """The options of a command; ``shared``: only those of the connection, which are in a table of their own."""
    shared_names = [name for name in OF_CONNECTION if name.startswith("kafka_")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    return [_option(option) for option in options if (option.name in shared_names) == shared]


def _option(option: click.Option) -> tuple[str, str, str, str]:
    if isinstance(option.type, click.Choice):
        value = "|".join(option.type.choices)
    else:
        value = option.type.name if isinstance(option.type, Text | click.Tuple) else option.type.name.split()[0].upper()
    value_text = "" if option.is_flag else f" {value}"
    default: Any = option.default
    if option.required:
        default_text = "required"
    elif isinstance(option.show_default, str):
        default_text = option.show_default
    else:
        default_text = (
            f"`{default}`" if isinstance(default, str | int | float) and not isinstance(default, bool) else _UNSET
        )
    repeatable = " ..." if option.multiple else ""
    return f"`{option.opts[0]}{value_text}`{repeatable}", f"`{option.envvar}`", default_text, option.help or ""


if __name__ == "__main__":
    sys.exit(generate(files(), "gpustream.reference", sys.argv[1:]))
