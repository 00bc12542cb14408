"""The command line: ``gpustream run | devices | produce | stream | sink | topics | alerts | rules``.

A command that runs a component has the options of the component's settings; the component itself is loaded only when
it is to run.
"""

import ctypes
import logging
import sys
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from delivery.settings import HOST_PORTS, START_FROM, Registered
from gpustream import components, logs
from gpustream import options as o
from gpustream.command import Argument, Command
from gpustream.config import ProcessSettings, RunSettings
from gpustream.options import option
from producers import PRODUCERS
from producers.node.config import NodeSettings, ReadingSettings
from sinks import SINKS
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


def _serve(row: Registered, given: dict[str, Any]) -> None:
    """Run a component until it is stopped."""
    from gpustream import serve

    logs.setup(given["log_format"])
    raise SystemExit(serve.serve(lambda: components.make(row, given), given["listen"], light=row.light))


def _add_component(group: click.Group, name: str, row: Registered) -> None:
    """A command that runs one component."""

    @group.command(
        name,
        cls=Command,
        check=lambda given: components.mistakes(row, given),
        help=row.help,
        example=row.example,
    )
    @o.options(components.load(row.settings), ProcessSettings)
    def serve(**given: Any) -> None:
        _serve(row, given)


for _group, _registry in ((produce, PRODUCERS), (sink, SINKS)):
    for _name, _row in _registry.items():
        _add_component(_group, _name, _row)


@main.command(
    cls=Command,
    check=lambda given: components.mistakes(STREAMS[given["name"]], given),
    help=" ".join(f"{name}: {row.help}" for name, row in STREAMS.items()),
    example="\n".join(row.example for row in STREAMS.values()),
)
@click.argument("name", cls=Argument, type=click.Choice(list(STREAMS)), default="attribution")
@o.options(*(components.load(row.settings) for row in STREAMS.values()), ProcessSettings)
def stream(name: str, **given: Any) -> None:
    """Runs one of the streams; the help is made of theirs."""
    _serve(STREAMS[name], given)


def _check_run(given: dict[str, Any]) -> list[str]:
    """What is wrong with ``run``'s options together."""
    simulate = given["simulate"]
    if simulate is None and not _driver_is_here():
        return [
            "Missing option '--simulate': this machine has no NVIDIA driver (no libnvidia-ml.so.1) whose GPUs could be"
            " read. To see a fleet that is not there: --simulate 4x8"
        ]
    producer = PRODUCERS["simulated" if simulate else "node"]
    return components.mistakes(producer, {**given, "kafka": given["kafka"] or HOST_PORTS.example, "fleet": simulate})


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
@o.options(RunSettings)
def run(**given: Any) -> None:
    """Everything in one process: GPUs, stream, sinks, and a broker where none is given.

    Samples until its time is over or Ctrl-C, lets everything arrive, and says what became of every tick. Exit code 1 if
    any was lost or dropped.
    """
    from gpustream.run import run as run_all

    logs.setup(given["log_format"], logging.WARNING if sys.stdout.isatty() else logging.INFO)
    raise SystemExit(run_all(RunSettings(**given, watched=sys.stdout.isatty())))


@main.command(
    cls=Command,
    check=lambda given: components.mistakes(PRODUCERS["node"], {**given, "kafka": HOST_PORTS.example}),
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
@o.options(NodeSettings, only=("interval_s", "node"))
@o.options(ReadingSettings)
@o.LOG_FORMAT
def devices(device: str | None, form: Literal["text", "json"], log_format: logs.Format, **given: Any) -> None:
    """What of this machine would be sampled now: GPUs, MIG devices, who holds them, their values.

    And what would be left out, by which call of NVML and which error. It takes two readings, an --interval apart, just
    as the node producer does, which may run beside it; it sends nothing. Exit code 1 without a driver or without a GPU.
    """
    from gpustream import devices as command

    logs.setup(log_format, logging.ERROR)
    settings = components.settings(PRODUCERS["node"], {**given, "kafka": HOST_PORTS.example})
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
@option(
    "--recreate-empty",
    is_flag=True,
    help="Delete topics that have another number of partitions and create them again, if they hold no record.",
)
@o.LOG_FORMAT
def create(kafka: str, partitions: int, replication_factor: int, recreate_empty: bool, log_format: logs.Format) -> None:
    """Create the topics that are missing, and mend the settings of those that are there. Partitions never change."""
    from gpustream import topic_commands

    logs.setup(log_format)
    raise SystemExit(topic_commands.create(kafka, partitions, replication_factor, recreate_empty=recreate_empty))


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
@option("--kafka", type=HOST_PORTS, help="Kafka's bootstrap brokers, to read gpu.attributed from.")
@option("--from", "start", type=START_FROM, default="24h", help="From when on to read Kafka.")
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
