"""The command line: ``gpustream run | devices | produce | stream | sink | topics | alerts | doctor | ...``.

A subcommand is one module: its options, what it does, and its output. It is imported only when it is run. A command
that runs a component (``produce``, ``stream``, ``sink``) is built here from the component's settings.
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


class CommandEntry(NamedTuple):
    """A command of a group. The list of commands shows the first sentence of its ``help``; ``load`` imports it."""

    help: str
    load: Callable[[], click.Command]


class LazyGroup(CommandGroup):
    """A group that lists its commands without loading them, in the order of its entries."""

    def __init__(self, *args: Any, entries: Mapping[str, CommandEntry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command. Returns None if there is none of this name."""
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


def _component_command(name: str, spec: ComponentSpec) -> click.Command:
    """The command that runs one component."""

    @click.command(
        name, cls=Command, check=lambda values: command.errors(spec, values), help=spec.help, example=spec.example
    )
    @command.options(command.load(spec.settings), ProcessSettings)
    def run(**values: Any) -> None:
        from gpustream import logs, serve

        logs.setup(values["log_format"])
        raise SystemExit(serve.serve(lambda: command.component(spec, values), values["listen"], light=spec.light))

    return run


def _component_group(name: str, help: str, registry: Mapping[str, ComponentSpec]) -> CommandEntry:  # noqa: A002 - as in click
    """The group of the commands that run the components of a registry."""
    entries = {
        key: CommandEntry(spec.help, partial(_component_command, key, spec)) for key, spec in sorted(registry.items())
    }
    return CommandEntry(help, lambda: LazyGroup(name, help=help, entries=entries))


# -- all commands


def _module_command(name: str, help: str) -> CommandEntry:  # noqa: A002 - as in click
    """A command that has the same name as its module."""
    return CommandEntry(help, lambda: command.load(f"gpustream.{name}:{name}"))


COMMANDS = {
    "run": _module_command("run", "Everything in one process: GPUs, stream, sinks, and a broker if none is given."),
    "top": CommandEntry(
        "Look at the fleet live: nodes, GPUs, pods, workloads, alerts, and each GPU's last minutes.",
        lambda: command.load("gpustream.top.command:top"),
    ),
    "devices": _module_command(
        "devices", "What of this machine would be sampled now: GPUs, MIG devices, who holds them, their values."
    ),
    "produce": _component_group("produce", "Read GPUs and pods, and send what they say to Kafka.", PRODUCERS),
    "stream": _component_group(
        "stream", "Make more of what producers sent: who holds each GPU, alerts, usage.", STREAMS
    ),
    "sink": _component_group("sink", "Take gpu.attributed from Kafka to where it is wanted.", SINKS),
    "topics": _module_command("topics", "Create the topics, or compare them with what they should be."),
    "alerts": _module_command("alerts", "List the alerts that fire: since when, where, whose, and what is wrong."),
    "reclaim": _module_command("reclaim", "What was decided about workloads that waste GPUs, and how to take it back."),
    "usage": CommandEntry(
        "Say who had how many GPU-hours, what of them was used, and what that costs.",
        lambda: command.load("gpustream.usage.command:usage"),
    ),
    "report": CommandEntry(
        "Report who had the GPUs, what was used and wasted, how that changed, and which alerts fired.",
        lambda: command.load("gpustream.report.command:report"),
    ),
    "doctor": CommandEntry(
        "Check a running pipeline, in an operator's order: what is wrong, why, what shows it, and what to do next.",
        lambda: command.load("gpustream.doctor.command:doctor"),
    ),
    "dead-letters": CommandEntry(
        "List what could not be used and why, show it, and send it again after a fix.",
        lambda: command.load("gpustream.dead_letters.command:dead_letters"),
    ),
    "replay": _module_command(
        "replay", "Make usage again from what gpu.attributed still has, for hours that were not booked."
    ),
    "rules": _module_command(
        "rules", "Check a file of alert rules, show what holds by it, or try it on what was recorded."
    ),
    "counters": _module_command(
        "counters", "Check a file of counters, as dcgm-exporter has them, before --counters is given it."
    ),
    "compare": _module_command(
        "compare",
        "Compare what another exporter says of each GPU and pod with what gpustream says: what differs, and why.",
    ),
}


@click.group(
    "gpustream",
    cls=LazyGroup,
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
