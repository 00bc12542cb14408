"""Options of the command: each has one environment variable, ``GPUSTREAM_`` and its name, whatever the subcommand."""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gpustream import values
from gpustream.command import Option
from producers.cluster import defaults

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]


class Parsed(click.ParamType):
    """An option's type made from a pure parser, with one value that is right, which help and errors can show."""

    def __init__(self, metavar: str, parse: Callable[[str], Any], example: str, *, lines: bool = False) -> None:
        self.name = metavar
        self.parse = parse
        self.example = example
        self.lines = lines

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The parsed value; what is no text was parsed before."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """The values of a repeatable option in its environment variable: one a line where a value may hold spaces."""
        return [line for line in rv.splitlines() if line.strip()] if self.lines else rv.split()

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """How help calls the value."""
        return self.name


DURATION = Parsed("DURATION", values.duration, "30s")
SIZE = Parsed("SIZE", values.size, "64KiB")
HOST_PORTS = Parsed("HOST:PORT[,...]", values.host_ports, "127.0.0.1:9092")
FLEET_SIZE = Parsed("NODESxGPUS", values.fleet_size, "4x8")
NAME = Parsed("NAME", values.name, "default")
URL = Parsed("URL", values.url, "http://127.0.0.1:9090/api/v1/write")
LISTEN = Parsed("HOST:PORT|off", values.listen, "127.0.0.1:9401")
HEADER = Parsed("'NAME: VALUE'", values.header, "X-Scope-OrgID: team-a", lines=True)
SOCKET = Parsed("PATH|off", values.socket_path, "/var/lib/kubelet/pod-resources/kubelet.sock")
NAMES = Parsed("NAME|PREFIX/*[,...]", values.names, "app,app.kubernetes.io/*")
LEASE = Parsed("NAMESPACE/NAME|off", values.lease, "gpustream/gpustream-cluster")
PREFIXES = Parsed("PREFIX[,...]", values.prefixes, "nvidia.com/")
START_FROM = Parsed("earliest|latest|DURATION", values.start_from, "1h")


def envvar(option_name: str) -> str:
    """The environment variable of an option: ``--session-timeout`` is ``GPUSTREAM_SESSION_TIMEOUT``."""
    return "GPUSTREAM_" + option_name.lstrip("-").replace("-", "_").upper()


def option(name: str, *declarations: str, **attributes: Any) -> Decorator[Any]:
    """A click option with its environment variable, both shown in the help with the default."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(name, *declarations, cls=Option, envvar=envvar(name), show_envvar=True, **attributes)


def stack(*decorators: Decorator[Any]) -> Decorator[Any]:
    """The decorators as one, in the order in which help lists them."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def default_node() -> str:
    """The node's name: NODE_NAME (which a DaemonSet gets from its pod), else the host's."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


CLUSTER = option(
    "--cluster", type=NAME, default="default", help="The cluster's name; it is in every record and every series."
)
LISTEN_OPTION = option(
    "--listen",
    type=LISTEN,
    default="127.0.0.1:9401",
    help="Where this process serves its own /metrics, /healthz and /readyz.",
)
LOG_FORMAT = option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="How log lines on standard error are written.",
)
KAFKA = option("--kafka", type=HOST_PORTS, required=True, help="Kafka's bootstrap brokers.")

everywhere = stack(KAFKA, CLUSTER, LISTEN_OPTION, LOG_FORMAT)
"""The options of every long-running command."""

membership = stack(
    option("--instance-id", type=NAME, help="Static membership: a stable, unique id, such as the pod's name."),
    option(
        "--session-timeout",
        type=DURATION,
        default="10s",
        help="After this long without a heartbeat, another member takes over.",
    ),
)
"""The options of a member of a consumer group."""

NODE = option(
    "--node", type=NAME, default=default_node, show_default="NODE_NAME, else the host's name", help="The node."
)

INTERVAL = option("--interval", type=DURATION, default="1s", help="Time between two readings of a node.")

BUFFER = option("--buffer", type=DURATION, default="15m", help="How long ticks are kept while Kafka is away.")

RESOURCE_PREFIXES = option(
    "--resource-prefixes",
    type=PREFIXES,
    default="nvidia.com/",
    help="A resource whose name begins with one of these is a GPU's.",
)

reading_a_node = stack(
    option(
        "--pod-resources-socket",
        type=SOCKET,
        default="/var/lib/kubelet/pod-resources/kubelet.sock",
        help="Where the kubelet tells which container has which GPU. Mount its folder, not the socket. off: there is "
        "no kubelet on this machine.",
    ),
    RESOURCE_PREFIXES,
    option(
        "--procfs",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        default="/proc",
        help="The host's procfs, where the pod of a GPU's process is found: /proc in a pod with hostPID, else where "
        "the host's is mounted.",
    ),
    option(
        "--hpc-job-mapping-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="A directory in which a batch system's prolog tells the jobs of each GPU: a file named 0 (its index) or "
        "2.1 (index and GPU instance), a job id a line.",
    ),
)
"""How a node is read, but for its name and how often."""

_FILE = click.Path(dir_okay=False, path_type=Path)
READABLE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


def _allowed(name: str, what: str, default: tuple[str, ...]) -> Decorator[Any]:
    return option(name, type=NAMES, default=",".join(default), help=f"{what} are published; the rest is not read on.")


reading_a_cluster = stack(
    option(
        "--kubeconfig",
        type=READABLE,
        show_default="the pod's service account, else KUBECONFIG, else ~/.kube/config",
        help="How to reach the API server.",
    ),
    RESOURCE_PREFIXES,
    _allowed("--pod-labels", "Which labels of pods", defaults.POD_LABELS),
    option(
        "--pod-annotations",
        type=NAMES,
        show_default="none",
        help=f"Which annotations of pods are published beside {', '.join(defaults.POD_ANNOTATIONS)}.",
    ),
    _allowed("--namespace-labels", "Which labels of namespaces", defaults.NAMESPACE_LABELS),
    option(
        "--node-labels",
        type=NAMES,
        show_default="none",
        help=f"Which labels of nodes are published beside {', '.join(defaults.NODE_LABELS)}.",
    ),
    option(
        "--lease",
        type=LEASE,
        default=defaults.lease,
        show_default=f"{defaults.LEASE_NAME} in the pod's namespace",
        help="By which Lease several replicas agree on the one that publishes. off: this is the only one.",
    ),
    option(
        "--identity",
        type=NAME,
        default=defaults.identity,
        show_default="POD_NAME, else the host's name and a random part",
        help="What this replica is called in the Lease.",
    ),
)
"""How the API server is read, and by whom."""

simulation = stack(
    option("--seed", type=int, default=1, help="What the fleet is made from: the same seed is the same fleet."),
    option("--pod-life", type=DURATION, default="5m", help="How long a pod lives, on average."),
    option("--truth", type=_FILE, help="Write who really held each GPU to this file, one JSON object a line."),
)
"""The options of a simulated fleet, but for its size."""

naming = stack(
    option(
        "--names", type=click.Choice(["otel", "dcgm", "dcgm-legacy"]), default="otel", help="Metric names and units."
    ),
    option(
        "--labels",
        type=click.Choice(["otel", "dcgm", "pod-devices"]),
        show_default="those of --names",
        help="The label names.",
    ),
)
"""What a sink calls metrics and labels."""

MAX_LABELS = option(
    "--max-labels",
    type=click.IntRange(min=1),
    default=30,
    help="What is written on pods and namespaces never makes more labels than this on a series; gpu_pod_info has "
    "the rest.",
)

in_a_group = stack(
    option("--group", type=NAME, show_default="gpustream-sink-NAME", help="The consumer group."),
    membership,
)
"""The options of a sink's consumer group."""

consuming = stack(
    in_a_group,
    option(
        "--stale-after",
        type=DURATION,
        default="60s",
        help="The series of a node end when it has been silent for this long.",
    ),
)
"""The options of a sink of samples, which is a consumer group of its own."""

over_http = stack(
    option(
        "--header",
        type=HEADER,
        multiple=True,
        help="Sent with every request. Repeatable; in the variable, one a line.",
    ),
    option("--basic-auth-user", help="The user name of basic authentication."),
    option("--basic-auth-password-file", type=READABLE, help="The file that holds its password."),
    option("--bearer-token-file", type=READABLE, help="The file that holds a bearer token."),
    option("--tls-ca", type=READABLE, show_default="the system's", help="The certificates to trust (PEM)."),
    option("--tls-cert", type=READABLE, help="The client's certificate (PEM)."),
    option("--tls-key", type=READABLE, help="The client's private key (PEM)."),
)
"""How a receiver over HTTP is spoken to."""

PROTOCOL = option(
    "--protocol", type=click.Choice(["auto", "1.0", "2.0"]), default="auto", help="Which remote write to speak."
)

SIGNED = stack(
    option(
        "--secret-file",
        type=READABLE,
        help="The file that holds the key with which X-Gpustream-Signature signs each body (HMAC-SHA256).",
    ),
    option("--unsigned", is_flag=True, help="Bodies are not signed."),
)
"""Whether a webhook is signed, of which one must be said."""


def start_from(default: str) -> Decorator[Any]:
    """``--from`` of a sink."""
    return option(
        "--from", "from_", type=START_FROM, default=default, help="Where a new group starts: that long ago, or an end."
    )
