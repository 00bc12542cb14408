"""The settings of a component are one frozen record, and the record is the schema of its options.

    @dataclass(frozen=True, kw_only=True)
    class ScrapeSettings(KafkaSettings):
        stale_after_s: Annotated[float, Option("--stale-after", DURATION, "How long ...")] = 60.0

The command line, the environment variable, the documentation and the default all come from the field. A field without
an :class:`Option` can only be set by code. ``mistakes()`` of a record names what is wrong with its values together.
Nothing here is heavy: the command's help imports the settings of every component.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import click

from delivery import values
from delivery.connection import Connection

DEAD_LETTERS = "gpu.dead-letters"


class Uses(NamedTuple):
    """What a component must be allowed to do with topics. Those that it ``sees`` it neither reads nor writes.

    Topics ``beside`` may be missing, and this client need not see them; if it does, they must have as many partitions.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


class Registered(NamedTuple):
    """A row of a registry of components: import strings ``module:name`` of the component and of its settings.

    ``reads`` and ``writes`` are its topics in the flow. What it ``keeps`` it writes, and reads back at a start; the
    others are as in :class:`Uses`. ``help`` and ``example`` are what the command says of it. A ``light`` component runs
    in little memory.
    """

    component: str
    settings: str
    help: str
    example: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    light: bool = False

    @property
    def uses(self) -> Uses:
        """What it must be allowed to do. Whoever reads a flow writes dead letters."""
        letters = (DEAD_LETTERS,) if self.reads else ()
        writes = tuple(dict.fromkeys((*self.writes, *self.keeps, *letters)))
        return Uses((*self.reads, *self.keeps), writes, self.sees, self.beside)


class Text(click.ParamType):
    """The type of an option that is parsed from text.

    ``parse`` raises ValueError with a sentence; ``example`` is a text that is right; ``show`` writes a value as it
    would be typed. If a value may hold spaces, its variable has one value a line (``lines``).
    """

    def __init__(
        self,
        metavar: str,
        parse: Callable[[str], Any],
        example: str,
        *,
        show: Callable[[Any], str] = str,
        lines: bool = False,
    ) -> None:
        self.name, self.parse, self.example, self.show, self.lines = metavar, parse, example, show, lines

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The parsed value; what is no text was parsed before."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """The values of a repeatable option in its environment variable."""
        return [line for line in rv.splitlines() if line.strip()] if self.lines else rv.split()

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """How help calls the value."""
        return self.name


def _or_off(value: Any) -> str:
    return "off" if value is None else str(value)


DURATION = Text("DURATION", values.duration, "30s", show=values.duration_text)
SIZE = Text("SIZE", values.size, "64KiB", show=values.size_text)
HOST_PORTS = Text("HOST:PORT[,...]", values.host_ports, "127.0.0.1:9092")
FLEET_SIZE = Text("NODESxGPUS", values.fleet_size, "4x8")
TOPIC_PREFIX = Text("PREFIX", values.topic_prefix, "team-a.")
NAME = Text("NAME", values.name, "default")
URL = Text("URL", values.url, "http://127.0.0.1:9090/api/v1/write")
LISTEN = Text("HOST:PORT|off", values.listen, "127.0.0.1:9401", show=_or_off)
HEADER = Text("'NAME: VALUE'", values.header, "X-Scope-OrgID: team-a", lines=True)
SOCKET = Text("PATH|off", values.socket_path, "/var/lib/kubelet/pod-resources/kubelet.sock", show=_or_off)
NAMES = Text("NAME|PREFIX/*[,...]", values.names, "app,app.kubernetes.io/*", show=",".join)
LEASE = Text("NAMESPACE/NAME|off", values.lease, "gpustream/gpustream-cluster", show=_or_off)
PREFIXES = Text("PREFIX[,...]", values.prefixes, "nvidia.com/", show=",".join)
START_FROM = Text(
    "earliest|latest|DURATION",
    values.start_from,
    "1h",
    show=lambda start: start if isinstance(start, str) else values.duration_text(start),
)
READABLE_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Option:
    """How a field is set from outside.

    ``type`` None is found from the annotation: the choices of a Literal, a flag for bool, a number for int. ``shown``
    is what help says of the default if the value says little, such as "the host's name".
    """

    name: str
    type: click.ParamType | None
    help: str
    shown: str | None = None
    repeatable: bool = False


class Field(NamedTuple):
    """A field of a record that has an option. ``default`` is a value, a function that makes one, or ``REQUIRED``."""

    name: str
    option: Option
    type: click.ParamType
    default: Any
    is_flag: bool


REQUIRED: Any = dataclasses.MISSING


def fields(record: type[Any]) -> list[Field]:
    """The fields of a record that have options: those that must be given first, then its own, then its bases'."""
    hints = typing.get_type_hints(record, include_extras=True)
    known = {field.name: field for field in dataclasses.fields(record)}
    names = [name for base in record.__mro__ for name in inspect.get_annotations(base) if name in known]
    found = []
    for name in dict.fromkeys(names):
        option = next((extra for extra in getattr(hints[name], "__metadata__", ()) if isinstance(extra, Option)), None)
        if option is None:
            continue
        kinds = list(_alternatives(hints[name].__origin__))
        if choices := [kind for kind in kinds if isinstance(kind, str)]:
            kind: click.ParamType = click.Choice(choices)
        else:
            kind = click.BOOL if bool in kinds else click.INT if int in kinds else click.STRING
        default = known[name].default if known[name].default is not REQUIRED else known[name].default_factory
        found.append(Field(name, option, option.type or kind, default, is_flag=kinds == [bool]))
    return sorted(found, key=lambda field: field.default is not REQUIRED)


def _alternatives(hint: Any) -> Iterator[Any]:
    """The types, or the values of a Literal, that an annotation allows, but for None."""
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    elif arguments := typing.get_args(hint):
        for argument in arguments:
            yield from _alternatives(argument)
    elif hint is not type(None):
        yield hint


# -- what the settings of several components have


Cluster = Annotated[str, Option("--cluster", NAME, "The cluster's name; it is in every record and every series.")]
TopicPrefix = Annotated[
    str,
    Option(
        "--topic-prefix",
        TOPIC_PREFIX,
        "What stands before the names of topics and consumer groups, where a Kafka is shared. The same everywhere.",
        shown="none",
    ),
]
Compression = Annotated[
    Literal["zstd", "lz4", "gzip", "none"],
    Option("--compression", None, "How what is written to Kafka is compressed. Whoever reads it needs no setting."),
]


@dataclass(frozen=True, kw_only=True)
class KafkaSettings:
    """Where Kafka is, and which cluster this one is."""

    kafka: Annotated[str, Option("--kafka", HOST_PORTS, "Kafka's bootstrap brokers.")]
    cluster: Cluster = "default"
    topic_prefix: TopicPrefix = ""
    compression: Compression = "zstd"

    def connection(self) -> Connection:
        """How Kafka is reached with these settings."""
        compression = None if self.compression == "none" else self.compression
        return Connection(self.kafka, topic_prefix=self.topic_prefix, compression=compression)

    def mistakes(self) -> list[str]:
        """Every mistake in the values, in words for whoever wrote them; empty if there is none."""
        found = [] if self.kafka else ["--kafka: missing"]
        for field in fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(field.type, click.Choice) and value is not None and value not in field.type.choices:
                found.append(f"{field.option.name}: {value!r} is not one of {', '.join(field.type.choices)}")
        return found


@dataclass(frozen=True, kw_only=True)
class MemberSettings(KafkaSettings):
    """How a stream or a sink is a member of its consumer group. With an instance id it is a static one."""

    group: str
    instance_id: Annotated[
        str | None, Option("--instance-id", NAME, "Static membership: a stable, unique id, such as the pod's name.")
    ] = None
    session_timeout_s: Annotated[
        float, Option("--session-timeout", DURATION, "After this long without a heartbeat, another member takes over.")
    ] = 10.0

    def mistakes(self) -> list[str]:
        """See :meth:`KafkaSettings.mistakes`."""
        found = super().mistakes()
        if not self.group:
            found.append("--group: empty")
        if self.session_timeout_s < 1:
            found.append("--session-timeout: must be at least 1 s")
        return found
