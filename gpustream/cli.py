"""The command line: ``gpustream run | devices | produce | stream | sink | topics | alerts | doctor | ...``.

A subcommand is one module: its options, what it does, and its output. It is imported only when it is run. A command
that runs a component (``produce``, ``stream``, ``sink``) is built here from the component's settings.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
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

    @click.command(
        name, cls=Command, check=lambda values: command.errors(spec, values), help=spec.help, example=spec.example
    )
    @command.options(resolve_name(spec.settings), ProcessSettings)
    def run(**values: Any) -> None:
        from gpustream import logs, serve

        logs.setup(values["log_format"])
        raise SystemExit(serve.serve(lambda: command.component(spec, values), values["listen"], light=spec.light))

    return run


def _component_group(name: str, help: str, registry: Mapping[str, ComponentSpec]) -> CommandEntry:  # noqa: A002 - as in click
    entries = {
        key: CommandEntry(spec.help, partial(_component_command, key, spec)) for key, spec in sorted(registry.items())
    }
    return CommandEntry(help, lambda: LazyGroup(name, help=help, entries=entries))


# -- all commands


def _command(target: str, help: str) -> CommandEntry:  # noqa: A002 - as in click
    return CommandEntry(help, partial(resolve_name, target))


COMMANDS = {
    "run": _command(
        "gpustream.run:run", "Everything in one process: GPUs, stream, sinks, and a broker if none is given."
    ),
    "top": _command(
        "gpustream.top.command:top",
        "Look at the fleet live: nodes, GPUs, pods, workloads, alerts, and each GPU's last minutes.",
    ),
    "devices": _command(
        "gpustream.devices:devices",
        "What of this machine would be sampled now: GPUs, MIG devices, who holds them, their values.",
    ),
    "produce": _component_group("produce", "Read GPUs and pods, and send what they say to Kafka.", PRODUCERS),
    "stream": _component_group(
        "stream", "Make more of what producers sent: who holds each GPU, alerts, usage.", STREAMS
    ),
    "sink": _component_group("sink", "Take gpu.attributed from Kafka to where it is wanted.", SINKS),
    "topics": _command("gpustream.topics:topics", "Create the topics, or compare them with what they should be."),
    "alerts": _command(
        "gpustream.alerts:alerts", "List the alerts that fire: since when, where, whose, and what is wrong."
    ),
    "reclaim": _command(
        "gpustream.reclaim:reclaim", "What was decided about workloads that waste GPUs, and how to take it back."
    ),
    "usage": _command(
        "gpustream.usage.command:usage", "Say who had how many GPU-hours, what of them was used, and what that costs."
    ),
    "report": _command(
        "gpustream.report.command:report",
        "Report who had the GPUs, what was used and wasted, how that changed, and which alerts fired.",
    ),
    "doctor": _command(
        "gpustream.doctor.command:doctor",
        "Check a running pipeline, in an operator's order: what is wrong, why, what shows it, and what to do next.",
    ),
    "dead-letters": _command(
        "gpustream.dead_letters.command:dead_letters",
        "List what could not be used and why, show it, and send it again after a fix.",
    ),
    "replay": _command(
        "gpustream.replay:replay",
        "Make usage again from what gpu.attributed still has, for hours that were not booked.",
    ),
    "rules": _command(
        "gpustream.rules:rules", "Check a file of alert rules, show what holds by it, or try it on what was recorded."
    ),
    "counters": _command(
        "gpustream.counters:counters",
        "Check a file of counters, as dcgm-exporter has them, before --counters is given it.",
    ),
    "compare": _command(
        "gpustream.compare:compare",
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


def commands(
    group: click.Group = main, path: tuple[str, ...] = ("gpustream",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that run it."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        found_command = group.get_command(ctx, name)
        if isinstance(found_command, click.Group):
            yield from commands(found_command, (*path, name))
        elif found_command is not None:
            yield (*path, name), found_command
