"""The settings of a component are one frozen record, and the record is the schema of its options.

    @dataclass(frozen=True, kw_only=True)
    class ScrapeSettings(KafkaSettings):
        stale_after_s: Annotated[float, Option("--stale-after", DURATION, "How long ...")] = 60.0

The command line, the environment variable, the documentation and the default all come from the field. A field without
an :class:`Option` can only be set by code. A record's ``errors()`` lists wrong values and wrong combinations of values.
This module imports nothing heavy, because the command's help imports the settings of every component.
"""

import dataclasses
import inspect
import logging
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import click

from delivery import kafka_config, values
from delivery.connection import Connection, CredentialsError
from delivery.kafka_config import Mechanism, Security

log = logging.getLogger(__name__)

DEAD_LETTERS = "gpu.dead-letters"


class TopicAccess(NamedTuple):
    """What a component must be allowed to do with topics. Those that it ``describes`` it neither reads nor writes.

    ``optional`` topics may be missing or hidden from this client. If it sees them, they must have as many partitions as
    the others.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    describes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class ComponentSpec(NamedTuple):
    """A row of a registry of components: import strings ``module:name`` of the component and of its settings.

    ``reads`` and ``writes`` are its topics in the flow. It writes the topics that it ``keeps``, and reads them back at
    a start. ``describes`` and ``optional`` are those of :class:`TopicAccess`. ``help`` and ``example`` are shown by the
    command. A ``light`` component runs in little memory. A component without ``dead_letters`` leaves what it can't
    decode to the other readers of the topic. With ``group_of_each_receiver`` it may read in several consumer groups,
    whose names begin with that of its group.
    """

    component: str
    settings: str
    help: str
    example: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    describes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    light: bool = False
    dead_letters: bool = True
    group_of_each_receiver: bool = False

    @property
    def uses(self) -> TopicAccess:
        """The topic access that it needs. A component that reads topics also writes dead letters."""
        letters = (DEAD_LETTERS,) if self.reads and self.dead_letters else ()
        writes = tuple(dict.fromkeys((*self.writes, *self.keeps, *letters)))
        return TopicAccess((*self.reads, *self.keeps), writes, self.describes, self.optional)


class Text(click.ParamType):
    """The type of an option that is parsed from text.

    ``parse`` raises ValueError with a sentence; ``example`` is a valid text; ``show`` writes a value as a user would
    type it. With ``lines``, the environment variable has one value a line, because a value may have spaces.
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
        """The parsed value; a value that is no text was parsed before."""
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
        """The value's name in the help."""
        return self.name


class NewPath(click.Path):
    """A path that need not exist. An empty text is none: it would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: write a path", param, ctx)
        return super().convert(value, param, ctx)


class ReadableFile(click.Path):
    """A file or a pipe that is read whole. A device may never end; nor may a file have more than ``max_bytes``."""

    def __init__(self, max_bytes: int | None = None) -> None:
        super().__init__(exists=True, dir_okay=False, readable=True, path_type=Path)
        self._max_bytes = max_bytes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. It is an error if it can't be what is read."""
        path = cast("Path", super().convert(value, param, ctx))
        if not (path.is_file() or path.is_fifo() or path.samefile(os.devnull)):
            self.fail(f"{str(path)!r} is a device or a socket: write the path of a file", param, ctx)
        if self._max_bytes is not None and path.stat().st_size > self._max_bytes:
            self.fail(
                f"{str(path)!r} has more than {values.size_text(self._max_bytes)}: is it another file?", param, ctx
            )
        return path


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
READABLE_FILE = ReadableFile(max_bytes=64 << 20)
DATA_FILE = ReadableFile()
FILE = NewPath(dir_okay=False, path_type=Path)
DIRECTORY = NewPath(file_okay=False, path_type=Path)
EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Option:
    """The option by which a field is set.

    ``type`` None is derived from the annotation: the choices of a Literal, a flag for bool, a number for int. ``shown``
    describes the default in the help if the value itself says little, such as "the host's name".
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
    """The fields of a record that have options: the required ones first, then its own, then those of its bases."""
    hints = typing.get_type_hints(record, include_extras=True)
    by_name = {field.name: field for field in dataclasses.fields(record)}
    names = [name for base in record.__mro__ for name in inspect.get_annotations(base) if name in by_name]
    option_fields = []
    for name in dict.fromkeys(names):
        option = next((extra for extra in getattr(hints[name], "__metadata__", ()) if isinstance(extra, Option)), None)
        if option is None:
            continue
        kinds = list(_alternatives(hints[name].__origin__))
        if choices := [kind for kind in kinds if isinstance(kind, str)]:
            kind: click.ParamType = click.Choice(choices)
        else:
            kind = click.BOOL if bool in kinds else click.INT if int in kinds else click.STRING
        field = by_name[name]
        default = field.default if field.default is not REQUIRED else field.default_factory
        option_fields.append(Field(name, option, option.type or kind, default, is_flag=kinds == [bool]))
    return sorted(option_fields, key=lambda field: field.default is not REQUIRED)


def _alternatives(hint: Any) -> Iterator[Any]:
    """The types, or the values of a Literal, that an annotation allows, without None."""
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    elif arguments := typing.get_args(hint):
        for argument in arguments:
            yield from _alternatives(argument)
    elif hint is not type(None):
        yield hint


# -- options of several components


Cluster = Annotated[str, Option("--cluster", NAME, "The cluster's name; it is in every record and every series.")]
TopicPrefix = Annotated[str, Option(
    "--topic-prefix", TOPIC_PREFIX,
    "What stands before the names of topics and consumer groups, if pipelines share a Kafka. The same for all.",
    shown="none",
)]  # fmt: skip
Kubeconfig = Annotated[Path | None, Option(
    "--kubeconfig", READABLE_FILE, "How to reach the API server.",
    shown="the pod's service account, else KUBECONFIG, else ~/.kube/config",
)]  # fmt: skip
Compression = Annotated[Literal["zstd", "lz4", "gzip", "none"], Option(
    "--compression", None, "How records are compressed in Kafka. Readers need no setting.",
)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Kafka's address, and the client's security and login; what is not given comes from ``--kafka-config``."""

    kafka: Annotated[
        str | None, Option("--kafka", HOST_PORTS, "Kafka's bootstrap brokers.", shown="those of --kafka-config")
    ] = None
    topic_prefix: TopicPrefix = ""
    kafka_config: Annotated[Path | None, Option(
        "--kafka-config", READABLE_FILE,
        "A file of client settings as a cloud's console hands it out, for librdkafka or Java: brokers, security,"
        " user and password. The log says which lines are of no use here; an option wins over its line.",
    )] = None  # fmt: skip
    kafka_security: Annotated[Security | None, Option(
        "--kafka-security", None,
        "How to connect: ssl is TLS, sasl a login. A broker's certificate and its name are always verified.",
        shown="plaintext",
    )] = None  # fmt: skip
    kafka_ca: Annotated[Path | None, Option(
        "--kafka-ca", READABLE_FILE, "Certificates of the CAs that sign the brokers', PEM.",
        shown="this machine's CAs",
    )] = None  # fmt: skip
    kafka_cert: Annotated[
        Path | None, Option("--kafka-cert", READABLE_FILE, "The client's own certificate for mutual TLS, PEM.")
    ] = None
    kafka_key: Annotated[Path | None, Option(
        "--kafka-key", READABLE_FILE, "The private key of --kafka-cert, PEM, not encrypted.",
        shown="in the file of --kafka-cert",
    )] = None  # fmt: skip
    kafka_sasl_mechanism: Annotated[Mechanism | None, Option(
        "--kafka-sasl-mechanism", None,
        "How the client logs in: with --kafka-username and --kafka-password-file, by an OAuth token, or by the AWS"
        " role of its machine (it needs `pip install gpustream[msk]`).",
    )] = None  # fmt: skip
    kafka_username: Annotated[str | None, Option("--kafka-username", None, "The user, or the id of an API key.")] = None
    kafka_password_file: Annotated[Path | None, Option(
        "--kafka-password-file", READABLE_FILE,
        "A file with the user's password. It is read again for each connection: a new password needs no restart.",
    )] = None  # fmt: skip
    kafka_oauth_token_endpoint: Annotated[str | None, Option(
        "--kafka-oauth-token-endpoint", URL, "oauthbearer: where tokens are had, by client credentials.",
    )] = None  # fmt: skip
    kafka_oauth_client_id: Annotated[
        str | None, Option("--kafka-oauth-client-id", None, "oauthbearer: the id of this client.")
    ] = None
    kafka_oauth_client_secret_file: Annotated[Path | None, Option(
        "--kafka-oauth-client-secret-file", READABLE_FILE,
        "oauthbearer: a file with the client's secret. It is read again for each token.",
    )] = None  # fmt: skip
    kafka_oauth_scope: Annotated[str | None, Option(
        "--kafka-oauth-scope", None, "oauthbearer: the scope that is asked for.",
    )] = None  # fmt: skip

    def connection(self) -> Connection:
        """The connection with these settings. Logs the unused lines of ``--kafka-config``. Raises CredentialsError."""
        connection, unused = self._connection()
        if self.kafka_config is not None:
            _log_unused(self.kafka_config, unused)
        return connection

    def _connection(self) -> tuple[Connection, tuple[str, ...]]:
        path = self.kafka_config
        config, unused = kafka_config.read(path) if path is not None else kafka_config.KafkaConfig({}, ())
        ca, cert, key = (Path(config[name]) if name in config else None for name in ("ca", "cert", "key"))
        connection = Connection(
            self.kafka or config.get("servers", ""),
            security=self.kafka_security or config.get("security", "plaintext"),
            mechanism=self.kafka_sasl_mechanism or config.get("mechanism"),
            username=self.kafka_username,
            password_file=self.kafka_password_file,
            ca=self.kafka_ca or ca,
            cert=self.kafka_cert or cert,
            key=self.kafka_key or (key if self.kafka_cert is None else None),
            token_endpoint=self.kafka_oauth_token_endpoint or config.get("token_endpoint"),
            oauth_client_id=self.kafka_oauth_client_id,
            oauth_client_secret_file=self.kafka_oauth_client_secret_file,
            oauth_scope=self.kafka_oauth_scope or config.get("oauth_scope"),
            client_id=config.get("client_id"),
            config=self.kafka_config,
            topic_prefix=self.topic_prefix,
        )
        return connection, unused

    def errors(self) -> list[str]:
        """Every error in the values, one sentence for people each; empty if there is none."""
        try:
            connection, _ = self._connection()  # it is too early to log anything
        except CredentialsError as error:
            return [str(error)]
        errors = []
        if not connection.servers:
            errors.append("--kafka: missing: give Kafka's bootstrap brokers, or a --kafka-config that has them")
        tls_options = {"--kafka-ca": self.kafka_ca, "--kafka-cert": self.kafka_cert, "--kafka-key": self.kafka_key}
        login_options = {
            "--kafka-sasl-mechanism": self.kafka_sasl_mechanism,
            "--kafka-username": self.kafka_username,
            "--kafka-password-file": self.kafka_password_file,
            "--kafka-oauth-token-endpoint": self.kafka_oauth_token_endpoint,
        }
        for feature, security, enabled, options in (
            ("TLS", "ssl or sasl-ssl", connection.has_tls, tls_options),
            ("a login", "sasl-ssl or sasl-plaintext", connection.has_login, login_options),
        ):
            useless = [name for name, value in options.items() if value is not None and not enabled]
            errors += [f"{name}: it is of no use without {feature}: --kafka-security {security}" for name in useless]
        return errors + connection.errors()


@lru_cache
def _log_unused(path: Path, unused: tuple[str, ...]) -> None:
    """Log the lines of a file that can't be used, once for each file."""
    if unused:
        log.info("%s: not used here: %s", path, "; ".join(unused))


@dataclass(frozen=True, kw_only=True)
class KafkaSettings(ConnectionSettings):
    """Kafka's connection, this cluster's name, and the compression of what is written."""

    cluster: Cluster = "default"
    compression: Compression = "zstd"

    def connection(self) -> Connection:
        return dataclasses.replace(super().connection(), compression=self.compression)


@dataclass(frozen=True, kw_only=True)
class MemberSettings(KafkaSettings):
    """The membership of a stream or a sink in its consumer group; with an instance id it is a static one."""

    group: str
    instance_id: Annotated[
        str | None, Option("--instance-id", NAME, "Static membership: a stable, unique id, such as the pod's name.")
    ] = None
    session_timeout_s: Annotated[
        float, Option("--session-timeout", DURATION, "After this long without a heartbeat, another member takes over.")
    ] = 10.0
    leave_on_stop: Annotated[bool, Option(
        "--leave-on-stop", None,
        "When this process is stopped, the others take over at once, although there is an --instance-id; when it"
        " comes back, it has its partitions again. Without this they wait for it, for --session-timeout.",
    )] = False  # fmt: skip

    def errors(self) -> list[str]:
        errors = super().errors()
        if self.session_timeout_s < 1:
            errors.append("--session-timeout: must be at least 1 s")
        return errors
