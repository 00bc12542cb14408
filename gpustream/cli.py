"""The command line: ``gpustream run | devices | produce | stream | sink | topics | alerts | doctor | ...``.

A subcommand is one module: its options, what it does, how that is shown. It is loaded when it is wanted. A command that
runs a component (``produce``, ``stream``, ``sink``) has the options of the component's settings, and is made here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import click

from delivery.settings import ComponentSpec
from gpustream import command
from gpustream.command import Command, CommandGroup, ProcessSettings
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS


class Entry(NamedTuple):
    """A command in a list of commands. ``help`` begins with the sentence that is listed."""

    help: str
    load: Callable[[], click.Command]


class Listed(CommandGroup):
    """A group that lists its commands without loading them, in the order of its entries."""

    def __init__(self, *args: Any, entries: Mapping[str, Entry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, loaded."""
        return self.entries[cmd_name].load() if cmd_name in self.entries else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command with the beginning of its help, as click writes it."""
        limit = formatter.width - 6 - max(map(len, self.entries))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, click.Command(name, help=entry.help).get_short_help_str(limit))
                    for name, entry in self.entries.items()
                ]
            )


# -- the commands that run one component


def _runs(name: str, row: ComponentSpec) -> click.Command:
    """The command that runs one component."""

    @click.command(
        name,
        cls=Command,
        check=lambda given: command.mistakes(row, given),
        help=row.help,
        example=row.example,
    )
    @command.options(command.load(row.settings), ProcessSettings)
    def run(**given: Any) -> None:
        from gpustream import logs, serve

        logs.setup(given["log_format"])
        raise SystemExit(serve.serve(lambda: command.component(row, given), given["listen"], light=row.light))

    return run


def _group(name: str, help: str, registry: Mapping[str, ComponentSpec]) -> Entry:  # noqa: A002 - as in click
    """The group of the commands that run the components of a registry."""
    entries = {key: Entry(row.help, partial(_runs, key, row)) for key, row in sorted(registry.items())}
    return Entry(help, lambda: Listed(name, help=help, entries=entries))


# -- all commands


def _module(name: str, help: str) -> Entry:  # noqa: A002 - as in click
    """The command of that name in the module of that name."""
    return Entry(help, lambda: command.load(f"gpustream.{name}:{name}"))


COMMANDS = {
    "run": _module("run", "Everything in one process: GPUs, stream, sinks, and a broker where none is given."),
    "top": Entry(
        "Look at the fleet live: nodes, GPUs, pods, workloads, alerts, and each GPU's last minutes.",
        lambda: command.load("gpustream.top.command:top"),
    ),
    "devices": _module(
        "devices", "What of this machine would be sampled now: GPUs, MIG devices, who holds them, their values."
    ),
    "produce": _group("produce", "Read GPUs and pods, and send what they say to Kafka.", PRODUCERS),
    "stream": _group("stream", "Make more of what producers sent: who holds each GPU, alerts, usage.", STREAMS),
    "sink": _group("sink", "Take gpu.attributed from Kafka to where it is wanted.", SINKS),
    "topics": _module("topics", "Create the topics, or compare them with what they should be."),
    "alerts": _module("alerts", "List the alerts that fire: since when, where, whose, and what is wrong."),
    "reclaim": _module("reclaim", "What was decided about workloads that waste GPUs, and how to take it back."),
    "usage": Entry(
        "Say who had how many GPU-hours, what of them was used, and what that costs.",
        lambda: command.load("gpustream.usage.command:usage"),
    ),
    "report": Entry(
        "Report who had the GPUs, what was used and wasted, how that changed, and which alerts fired.",
        lambda: command.load("gpustream.report.command:report"),
    ),
    "doctor": Entry(
        "Check a running pipeline, in an operator's order: what is wrong, why, what shows it, and what to do next.",
        lambda: command.load("gpustream.doctor.command:doctor"),
    ),
    "dead-letters": Entry(
        "List what could not be used and why, show it, and send it again after a fix.",
        lambda: command.load("gpustream.dead_letters.command:dead_letters"),
    ),
    "replay": _module("replay", "Make usage again from what gpu.attributed still has, for hours that were not booked."),
    "rules": _module("rules", "Check a file of alert rules, show what holds by it, or try it on what was recorded."),
    "counters": _module(
        "counters", "Check a file of counters, as dcgm-exporter has them, before --counters is given it."
    ),
    "compare": _module(
        "compare",
        "Compare what another exporter says of each GPU and pod with what gpustream says: what differs, and why.",
    ),
}


@click.group(
    "gpustream",
    cls=Listed,
    entries=COMMANDS,
    epilog="gpustream COMMAND --help says more, with an example.",
    context_settings=command.HELP_BY,
)
@click.version_option(package_name="gpustream", prog_name="gpustream")
def main() -> None:
    """GPU telemetry as a stream: which pod, Job or team uses which GPU.

    Every option has one environment variable, whatever the command: --session-timeout is GPUSTREAM_SESSION_TIMEOUT.
    Durations are written 500ms, 30s, 15m, 2h (a bare number is seconds), sizes 64KiB, 4MiB.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 70 stopped itself to be restarted.
    """
