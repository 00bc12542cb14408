"""The command line: ``gpustream run | devices | produce | stream | sink | topics | alerts | rules``.

A command that runs a component names it by import string, loads it only when it is wanted, and is absent where the
component does not exist.
"""

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from gpustream import components, logs
from gpustream import options as o
from gpustream.command import Argument, Command
from gpustream.options import option, stack
from gpustream.served import SERVED, Served
from producers import PRODUCERS
from streams import STREAMS
from topics.topic import PARTITIONS, REPLICATION_FACTOR

COMMANDS = ("run", "devices", "produce", "stream", "sink", "topics", "alerts", "rules")


class InOrder(click.Group):
    """A group that lists its commands in the order of the flow, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands that there are."""
        return [name for name in COMMANDS if name in self.commands]


@click.group("gpustream", cls=InOrder, epilog="gpustream COMMAND --help says more, with an example.")
@click.version_option(package_name="gpustream", prog_name="gpustream")
def main() -> None:
    """GPU telemetry as a stream: which pod, Job or team uses which GPU.

    Every option has one environment variable, whatever the command: --session-timeout is GPUSTREAM_SESSION_TIMEOUT.
    Durations are written 500ms, 30s, 15m, 2h (a bare number is seconds), sizes 64KiB, 4MiB.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 70 stopped itself to be restarted.
    """


@main.group()
def produce() -> None:
    """Read GPUs and pods, and send what they say to Kafka."""


@main.group()
def sink() -> None:
    """Take gpu.attributed from Kafka to where it is wanted."""


def _serving(
    target: Callable[[dict[str, Any]], str], *options: o.Decorator[Any], light: bool = False, **attributes: Any
) -> click.Command:
    """A command that runs the component that ``target`` names, given the options."""

    def check(given: dict[str, Any]) -> list[str]:
        return components.mistakes(components.load(target(given)), given)

    def callback(**given: Any) -> None:
        from gpustream import serve

        logs.setup(given["log_format"])
        component = components.load(target(given))
        settings = components.settings(component, given)
        raise SystemExit(serve.serve(lambda: component(settings), given["listen"], light=light))

    return click.command(cls=Command, check=check, **attributes)(stack(*options)(callback))


_GROUPS = {"produce": produce, "sink": sink}


def _add_served(row: Served) -> None:
    target = row.registry.get(row.name, "")
    if components.exists(target):
        options, about = (o.everywhere, *row.options), {"name": row.name, "help": row.help, "example": row.example}
        _GROUPS[row.group].add_command(_serving(lambda _: target, *options, light=row.light, **about))


def _add_stream() -> None:
    names = [name for name, target in STREAMS.items() if components.exists(target)]
    if not names:
        return
    command = _serving(
        lambda given: STREAMS[given["name"]],
        click.argument("name", cls=Argument, type=click.Choice(names), default="attribution"),
        o.everywhere,
        option(
            "--grace",
            type=o.DURATION,
            default="10s",
            help="attribution: how long a sample waits for the snapshot it names.",
        ),
        option(
            "--rules",
            type=o.READABLE,
            show_default="those that come with it",
            help="alerts: a TOML file of rules, laid over the defaults; see `gpustream rules check`.",
        ),
        o.membership,
        name="stream",
        help=(
            "attribution: join samples with the pods that held the GPUs, and send gpu.attributed. alerts: judge"
            " gpu.attributed by the alert rules, and send gpu.alerts."
        ),
        example=(
            "gpustream stream attribution --kafka 127.0.0.1:9092 --instance-id attribution-0\n"
            "gpustream stream alerts --kafka 127.0.0.1:9092 --rules rules.toml"
        ),
    )
    main.add_command(command)


for _row in SERVED:
    _add_served(_row)
_add_stream()
for _group in (produce, sink):
    if not _group.commands:
        main.commands.pop(str(_group.name))


def _check_run(given: dict[str, Any]) -> list[str]:
    """What is wrong with ``run``'s options together."""
    simulate = given["simulate"]
    if simulate is None and not _driver_is_here():
        return [
            "Missing option '--simulate': this machine has no NVIDIA driver (no libnvidia-ml.so.1) whose GPUs could be"
            " read. To see a fleet that is not there: --simulate 4x8"
        ]
    producer = components.load(PRODUCERS["simulated" if simulate else "node"])
    options = {**given, "kafka": given["kafka"] or o.HOST_PORTS.example, "fleet": simulate, "duration": None}
    return components.mistakes(producer, options)


def _driver_is_here() -> bool:
    """Whether NVML's library can be loaded; its driver may still be away."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@main.command(
    cls=Command,
    check=_check_run,
    example=(
        "gpustream run                      # the GPUs of this machine\n"
        "gpustream run --simulate 4x8\n"
        "gpustream run --simulate 4x8 --remote-write http://127.0.0.1:9090/api/v1/write --duration 1m --summary json"
    ),
)
@option(
    "--simulate",
    type=o.FLEET_SIZE,
    show_default="this machine's GPUs",
    help="Simulate so many nodes of so many GPUs.",
)
@option("--kafka", type=o.HOST_PORTS, show_default="a broker inside this process", help="Kafka's bootstrap brokers.")
@o.CLUSTER
@option(
    "--scrape-listen",
    type=o.LISTEN,
    default="127.0.0.1:9400",
    help="Where the GPUs' /metrics is served; --listen stays this process's own.",
)
@option("--remote-write", type=o.URL, help="Write every value to this remote-write receiver too.")
@option("--duration", type=o.DURATION, show_default="on a terminal until Ctrl-C, else 30s", help="How long to sample.")
@option(
    "--summary", type=click.Choice(["text", "json"]), default="text", help="How the end is told on standard output."
)
@o.naming
@o.INTERVAL
@o.NODE
@o.reading_a_node
@o.simulation
@o.LISTEN_OPTION
@o.LOG_FORMAT
def run(log_format: logs.Format, **given: Any) -> None:
    """Everything in one process: GPUs, stream, sinks, and a broker where none is given.

    Samples until its time is over or Ctrl-C, lets everything arrive, and says what became of every tick. Exit code 1 if
    any was lost or dropped.
    """
    from gpustream.run import RunSettings
    from gpustream.run import run as run_all

    logs.setup(log_format, logging.WARNING if sys.stdout.isatty() else logging.INFO)
    raise SystemExit(run_all(RunSettings(**given, watched=sys.stdout.isatty())))


def _check_devices(given: dict[str, Any]) -> list[str]:
    """What is wrong with the settings of the node that is to be read."""
    return components.mistakes(components.load(PRODUCERS["node"]), {**given, "kafka": o.HOST_PORTS.example})


@main.command(
    cls=Command,
    check=_check_devices,
    example=(
        "gpustream devices\n"
        "gpustream devices --device 3 --interval 5s\n"
        "gpustream devices --pod-resources-socket off --format json    # a machine without Kubernetes"
    ),
)
@option(
    "--device", show_default="all", help="Only the GPU of this index or UUID, with its MIG devices, or one of them."
)
@option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="json: one object, on one line.")
@o.INTERVAL
@o.NODE
@o.reading_a_node
@o.LOG_FORMAT
def devices(device: str | None, form: Literal["text", "json"], log_format: logs.Format, **given: Any) -> None:
    """What of this machine would be sampled now: GPUs, MIG devices, who holds them, their values.

    And what would be left out, by which call of NVML and which error. It takes two readings, an --interval apart, just
    as the node producer does, which may run beside it; it sends nothing. Exit code 1 without a driver or without a GPU.
    """
    from gpustream import devices as command

    logs.setup(log_format, logging.ERROR)
    node = components.load(PRODUCERS["node"])
    settings = components.settings(node, {**given, "kafka": o.HOST_PORTS.example})
    raise SystemExit(command.show(settings, form, device))


@main.group()
def topics() -> None:
    """Create the topics, or compare them with what they should be."""


@topics.command(cls=Command, example="gpustream topics create --kafka 127.0.0.1:9092 --replication-factor 1")
@o.KAFKA
@option("--partitions", type=click.IntRange(min=1), default=PARTITIONS, help="Of every topic; can't grow later.")
@option(
    "--replication-factor", type=click.IntRange(min=1), default=REPLICATION_FACTOR, help="Copies of every partition."
)
@o.LOG_FORMAT
def create(kafka: str, partitions: int, replication_factor: int, log_format: logs.Format) -> None:
    """Create the topics that are missing, and mend the settings of those that are there. Partitions never change."""
    from gpustream import topic_commands

    logs.setup(log_format)
    raise SystemExit(topic_commands.create(kafka, partitions, replication_factor))


@topics.command("list", cls=Command, example="gpustream topics list --kafka 127.0.0.1:9092")
@o.KAFKA
@o.LOG_FORMAT
def list_(kafka: str, log_format: logs.Format) -> None:
    """Compare the broker's topics with what they should be. Exit code 1 if any differs or is missing."""
    from gpustream import topic_commands

    logs.setup(log_format)
    raise SystemExit(topic_commands.compare(kafka))


@main.command(
    cls=Command,
    example=(
        "gpustream alerts --kafka 127.0.0.1:9092\n"
        "gpustream alerts --kafka kafka-0:9092 --follow --format json | jq .annotations.summary"
    ),
)
@o.KAFKA
@option("--follow", is_flag=True, help="Go on, with each alert that begins or ends, until interrupted.")
@option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    help="json: the records of gpu.alerts, one a line.",
)
@o.LOG_FORMAT
def alerts(kafka: str, follow: bool, form: Literal["table", "json"], log_format: logs.Format) -> None:
    """List the alerts that fire: since when, where, whose, and what is wrong."""
    from gpustream import alerts_command

    logs.setup(log_format)
    raise SystemExit(alerts_command.alerts(kafka, form, follow=follow))


@main.group("rules")
def rules_() -> None:
    """Check a file of alert rules, or try it on what was recorded."""


RULES_FILE = click.argument("file", cls=Argument, type=click.Path(path_type=Path))


@rules_.command(cls=Command, example="gpustream rules check rules.toml")
@RULES_FILE
def check(file: Path) -> None:
    """Name every mistake of a file of alert rules, with its line. Exit code 1 if there is any."""
    from gpustream import rules_command

    raise SystemExit(rules_command.check(file))


def _check_source(given: dict[str, Any]) -> list[str]:
    """Ticks come from one place; the environment's Kafka is there for other commands too, and gives way to a file."""
    source = click.get_current_context().get_parameter_source("kafka")
    kafka = given["kafka"] is not None and (given["input"] is None or source is not ParameterSource.ENVIRONMENT)
    if kafka == (given["input"] is not None):
        return ["Give either '--kafka' or '--input': where the ticks are."]
    return []


@rules_.command(
    cls=Command,
    check=_check_source,
    example=(
        "gpustream rules test rules.toml --kafka 127.0.0.1:9092 --from 24h\n"
        "gpustream rules test rules.toml --input ticks.jsonl --format json | jq .annotations.summary"
    ),
)
@RULES_FILE
@option("--kafka", type=o.HOST_PORTS, help="Kafka's bootstrap brokers, to read gpu.attributed from.")
@option("--from", "start", type=o.START_FROM, default="24h", help="From when on to read Kafka.")
@option(
    "--input",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A file with records of gpu.attributed, one a line; - is standard input.",
)
@option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    help="json: the transitions as records of gpu.alerts, one a line.",
)
@o.LOG_FORMAT
def test(
    file: Path,
    kafka: str | None,
    start: str | float,
    input: Path | None,  # noqa: A002 - the option's name
    form: Literal["table", "json"],
    log_format: logs.Format,
) -> None:
    """Judge recorded ticks by a file of alert rules, and show what would have fired, and when.

    Nothing is written to Kafka. Nodes that were silent are found by the gaps between their ticks. Exit code 1 if the
    file has mistakes, or something that was read is no tick.
    """
    from gpustream import rules_command

    logs.setup(log_format)
    if input is not None:
        raise SystemExit(rules_command.replay_lines(file, input, form))
    raise SystemExit(rules_command.replay_kafka(file, str(kafka), start, form))
