"""``gpustream rules check``, ``gpustream rules show`` and ``gpustream rules test``.

In:       a file of rules; for a test gpu.attributed, from Kafka or as recorded lines.
Out:      on standard output the rules, or what would have fired, and when: a table on a terminal, tab-separated fields
          elsewhere, or the transitions as JSON lines.
On failure: errors of the file, each with its line, on standard error and exit code 1; lines and records that are no
          ticks are named there, left out, and make the exit code 1.
"""

import codecs
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
from click.core import ParameterSource

from delivery.connection import Connection
from delivery.settings import ConnectionSettings, Text
from delivery.values import counted, duration_words, start_from
from gpustream import alerts, history
from gpustream.command import LOG_FORMAT, Argument, Command, CommandGroup, connection, option, options, output_format
from gpustream.output import FAILED, answer, failed, json_lines, second, show
from streams.alerts import tick as ticks
from streams.alerts.node import Replay
from streams.alerts.rules import rules_file
from streams.alerts.rules.options import OPTIONS
from streams.alerts.rules.rule import Rules
from streams.alerts.rules.rules_file import RulesError
from topics import attributed
from topics.alerts import Alert

COLUMNS = ("fired", "resolved", "for", "severity", "alert", "where", "who", "why it ended", "summary")

R = TypeVar("R")
_MAX_NAMED = 20
"""At most this many lines that are no ticks are named; the rest is only counted."""


RULES_FILE = click.argument("file", cls=Argument, type=click.Path(path_type=Path))


@click.group(cls=CommandGroup)
def rules() -> None:
    """Check a file of alert rules, show what holds by it, or try it on what was recorded."""


@rules.command(cls=Command, example="gpustream rules check rules.toml")
@RULES_FILE
def check(file: Path) -> None:
    """Name every mistake of a file of alert rules, with its line. Exit code 1 if there is any.

    New rules without a runbook are named, too: their alerts link that of the default rule.
    """
    loaded, defaults = _or_exit(rules_file.load, file).rules, rules_file.defaults()
    click.echo(f"{file}: no mistakes; {counted(len(loaded), 'rule')} in force")
    for rule in [rule for rule in loaded if rule.name not in defaults and "runbook" not in rule.annotations]:
        default = next(candidate.name for candidate in defaults.values() if candidate.kind == rule.kind)
        hint = 'give it its own by annotations = { runbook = "https://..." }'
        click.echo(f"{file}: hint: rules.{rule.name} has no runbook, and links that of {default}: {hint}")


@rules.command(
    cls=Command, name="show", example="gpustream rules show rules.toml\ngpustream rules show | grep held_idle"
)
@click.argument("file", cls=Argument, required=False, type=click.Path(path_type=Path))
def show_rules(file: Path | None) -> None:
    """Show every rule as it is by a file, or by default: its kind, whether it is on, and all of its options."""
    all_rules = (_or_exit(rules_file.every, file) if file is not None else rules_file.defaults()).values()
    table_rows = []
    for rule in all_rules:
        options_of_kind = [
            option for option in OPTIONS if rule.kind in option.kinds and option.key not in ("for", "critical_after")
        ]
        further = [f"{option.key} {option.format_value(rule)}" for option in options_of_kind]
        further += [f"critical_after {duration_words(rule.critical_ms)}"] if rule.critical_ms else []
        further += [counted(len(rule.overrides), "override")] if rule.overrides else []
        times = [duration_words(ms) if ms else "-" for ms in (rule.for_ms, rule.keep_firing_ms)]
        enabled = "yes" if rule.enabled else "no"
        table_rows.append((rule.name, rule.kind, enabled, rule.severity, *times, ", ".join(further) or "-"))
    show(("rule", "kind", "on", "severity", "for", "keep_firing_for", "further"), table_rows)


def _start(text: str) -> str | float:
    """From when on Kafka is read: ``earliest``, or that many seconds ago. Raises ValueError."""
    if text == "latest":
        raise ValueError("from latest on there is nothing to judge: write earliest, or a duration such as 24h")
    return start_from(text)


_START = Text("earliest|DURATION", _start, "24h")


def _one_source(values: dict[str, Any]) -> list[str]:
    """Ticks come from one place. The environment's Kafka is for other commands too, so a file takes precedence."""
    source_of = click.get_current_context().get_parameter_source
    sources = [source_of(name) for name in ("kafka", "kafka_config") if values[name]]
    kafka = bool(sources) and (values["input"] is None or set(sources) != {ParameterSource.ENVIRONMENT})
    if kafka == (values["input"] is not None):
        return ["Give either '--kafka' or '--input': where the ticks are."]
    return []


@rules.command(
    cls=Command,
    check=_one_source,
    example=(
        "gpustream rules test rules.toml --kafka 127.0.0.1:9092 --from 24h\n"
        "gpustream rules test rules.toml --input ticks.jsonl --format json | jq .annotations.summary"
    ),
)
@click.argument("file", cls=Argument, required=False, type=click.Path(path_type=Path))
@options(ConnectionSettings)
@option("--from", "start", type=_START, default="24h", help="From when on to read Kafka.")
@option(
    "--input",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A file with records of gpu.attributed, one a line; - is standard input.",
)
@output_format("table", "json", help="json: the transitions as records of gpu.alerts, one a line.")
@LOG_FORMAT
def test(
    file: Path | None,
    start: str | float,
    input: Path | None,  # noqa: A002 - the option's name
    form: Literal["table", "json"],
    **values: Any,
) -> None:
    """Judge recorded ticks by a file of alert rules, or by the defaults, and show what would have fired, and when.

    Nothing is written to Kafka. Nodes that were silent are found by the gaps between their ticks. Exit code 1 if the
    file has mistakes, or something that was read is no tick.
    """
    trial = Trial(rules_file.load(None) if file is None else _or_exit(rules_file.load, file))
    if input is None:
        answer(_read(connection(values), start, trial))
    else:
        for line, source in _lines(input):
            trial.evaluate(line, source)
    trial.end()
    if form == "json":
        json_lines(sorted(trial.transitions, key=lambda alert: (alert.ends_at or alert.starts_at, alert.fingerprint)))
    else:
        show(COLUMNS, rows(trial.transitions), nothing="nothing would have fired")
    click.echo(trial.summary(), err=True)
    raise SystemExit(FAILED if trial.malformed else 0)


def _or_exit(read: Callable[[Path], R], path: Path) -> R:
    """What is read from a file of rules. Errors are named, and end the command."""
    try:
        return read(path)
    except RulesError as error:
        for line_error in error.errors:
            click.echo(str(line_error), err=True)
        if len(error.errors) > 1:
            click.echo(f"{len(error.errors)} mistakes", err=True)
        raise SystemExit(FAILED) from error


class Trial:
    """A test of rules: evaluates records, and keeps the transitions that they cause."""

    def __init__(self, rules: Rules) -> None:
        self._replay = Replay(rules)
        self.transitions: list[Alert] = []
        self.malformed = 0

    def evaluate(self, value: bytes, source: str, logged_ms: int | None = None) -> None:
        """Evaluates a record, with its log time if that is known. The first few that are no ticks are named on standard
        error by their ``source``."""
        try:
            self.transitions += self._replay.judge(ticks.decode(value), logged_ms)
        except msgspec.DecodeError as error:
            self.malformed += 1
            if self.malformed <= _MAX_NAMED:
                click.echo(f"{source}: not a record of gpu.attributed: {error}", err=True)

    def end(self) -> None:
        self.transitions += self._replay.end()

    def summary(self) -> str:
        """What was read, in a sentence."""
        fired = sum(alert.state == "firing" and not alert.revision for alert in self.transitions)
        read = f"{counted(self._replay.ticks, 'tick')} of {counted(self._replay.nodes, 'node')}"
        again = f", {self._replay.repeats} more were there twice" if self._replay.repeats else ""
        malformed = f", {self.malformed} were none" if self.malformed else ""
        return f"{read}{again}{malformed}: {counted(fired, 'alert')} would have fired"


def _lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """The lines of a file, each with its place. A file that can't be read ends the command."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with click.open_file(str(path), "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield line.removeprefix(codecs.BOM_UTF8), f"{name}:{number}"
    except OSError as error:
        raise failed(f"{path}: {error.strerror}") from error


async def _read(connection: Connection, start: str | float, trial: Trial) -> None:
    """Evaluates the records from a time on, to the current end of each partition."""
    from_ms = 0 if isinstance(start, str) else int((time.time() - start) * 1000)
    async with history.opened(connection, [attributed.TOPIC.name]) as reader:
        spans = await reader.spans(attributed.TOPIC.name, from_ms)
        with history.progress(attributed.TOPIC.name, spans) as advanced:
            async for records in reader.records(spans, advanced):
                for record in records:
                    if record.timestamp >= from_ms and record.value is not None:
                        source = f"{record.topic}[{record.partition}]@{record.offset}"
                        trial.evaluate(record.value, source, record.timestamp)


def rows(transitions: Iterable[Alert]) -> list[tuple[str, ...]]:
    """A row for each firing, in order of time, with its end if it has one."""
    latest: dict[tuple[str, str], Alert] = {}
    for alert in transitions:
        latest[alert.fingerprint, alert.starts_at.isoformat()] = alert
    table_rows: list[tuple[str, ...]] = []
    for alert in sorted(latest.values(), key=lambda alert: (alert.starts_at, alert.name, alert.fingerprint)):
        cells, ended = alerts.row(alert, alert.starts_at), ("-", "-", "-")
        if alert.ends_at is not None:
            ended = (second(alert.ends_at), cells.lasted, alert.resolved_because or "-")
        table_rows.append((cells.since, *ended[:2], *cells[2:6], ended[2], cells.summary))
    return table_rows
