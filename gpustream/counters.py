"""``gpustream counters check``: which rows of a file for dcgm-exporter can be served, and why the others can't.

In:       a file of counters, CSV or YAML.
Out:      on standard output a line for each row that can't be served, and how many can.
On failure: errors of the file, each with its line, on standard error. Exit code 1 for these, and for rows that can't
          be served.
"""

from pathlib import Path

import click

from delivery.values import counted
from gpustream.command import Argument, Command, CommandGroup
from gpustream.output import FAILED
from sinks.series.counters import load, pick
from sinks.series.counters_file import CountersError, LineError


@click.group(cls=CommandGroup)
def counters() -> None:
    """Check a file of counters, as dcgm-exporter has them, before --counters is given it."""


@counters.command(cls=Command, example="gpustream counters check /etc/dcgm-exporter/default-counters.csv")
@click.argument("file", cls=Argument, type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Name each line of a file of counters that can't be served, and why.

    The file is dcgm-exporter's CSV or YAML, with names of any version. Exit code 1 if a line can't be served; the
    others of such a file are. A file with a mistake, such as a row without a help, is not taken at all, as
    dcgm-exporter does not take it; then, too, all lines that can't be served are named.
    """
    try:
        picked = load(file)
    except CountersError as error:
        errors = set(error.errors)
        try:
            left_out = pick(error.rows).left_out
            errors |= {LineError(counter.line, f"{counter.name}: {reason}") for counter, reason in left_out}
        except CountersError as none_served:
            errors |= {line_error for line_error in none_served.errors if line_error.line}
        for line, text in sorted(errors):
            click.echo(f"{file}:{line}: {text}" if line else f"{file}: {text}", err=True)
        raise SystemExit(FAILED) from error
    for counter, reason in picked.left_out:
        click.echo(f"{file}:{counter.line}: {counter.name}: {reason}")
    rows = len(picked.served) + len(picked.left_out)
    click.echo(f"{file}: {len(picked.served)} of {counted(rows, 'row')} can be served")
    raise SystemExit(FAILED if picked.left_out else 0)
