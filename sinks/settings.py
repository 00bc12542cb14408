"""The settings of every sink, and what they have in common."""

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import click

from delivery import values
from delivery.settings import (
    DIRECTORY,
    DURATION,
    HEADER,
    LEASE,
    LISTEN,
    NAME,
    NAMES,
    READABLE_FILE,
    START_FROM,
    URL,
    KafkaSettings,
    Kubeconfig,
    MemberSettings,
    Option,
    Text,
)
from delivery.values import Address
from sinks.series.labels import MAX_LABELS
from sinks.series.relabel import Relabelling
from sinks.series.relabel_presets import PRESETS
from sinks.series.windows import Aggregate, Resolution, aggregates
from topics.alerts import CLOUD_EVENT
from topics.profiles import LABELS, PROFILES, LabelNames, LabelSet, Profile, ProfileName, profile_names

ALERTS_PATH = "/api/v2/alerts"
_RARELY_S = 24 * 3600
_LONGEST_WINDOW_S = 120
_LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")

Group = Annotated[str, Option("--group", NAME, "The consumer group.")]
From = Annotated[
    Literal["earliest", "latest"] | float,
    Option("--from", START_FROM, "Where a new group starts: that long ago, or an end."),
]
ScrapeListen = Annotated[
    Address | None,
    Option("--scrape-listen", LISTEN, "Where the GPUs' /metrics is served; --listen stays this process's own."),
]
SCRAPE_ADDRESS = Address("127.0.0.1", 9400)
METRICS_ADDRESS = Address("127.0.0.1", 8443)
PageListen = Annotated[
    Address | None,
    Option(
        "--page-listen",
        LISTEN,
        "Where the page is served, to whoever can connect: it knows no log-in and no TLS. Beyond loopback put a reverse"
        " proxy in front that brings both. --listen stays this process's own.",
    ),
]
PAGE_ADDRESS = Address("127.0.0.1", 9402)
_PREFIX = re.compile(r"/([A-Za-z0-9._~-]+/)*")
RELABEL = Text("FILE|preset:NAME", str, "preset:exported", lines=True)
EXTERNAL_LABEL = Text("NAME=VALUE", values.label, "region=eu", show="=".join, lines=True)
AGGREGATES = Text("NAME[,...]", aggregates, "min,mean,max", show=",".join)
HOST_NAMES = Text(
    "NAME[,...]", lambda text: tuple(map(str.strip, text.lower().split(","))), "gpus.example.com", show=",".join
)
ALERT_NAMES = Text("NAME[,...]", lambda text: tuple(map(str.strip, text.split(","))), "GPUHeldIdle", show=",".join)
NAMINGS = Text("NAME[,...]", profile_names, "otel,dcgm", show=",".join)


@dataclass(frozen=True, kw_only=True)
class SinkSettings(MemberSettings):
    """How a sink reads. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts."""

    group: Group
    from_: From

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = super().errors()
        if isinstance(self.from_, str) and self.from_ not in {"earliest", "latest"}:
            found.append(f"--from: {self.from_!r} is not earliest, latest or a duration")
        if not isinstance(self.from_, str) and self.from_ < 0:
            found.append("--from: a duration must not be below zero")
        return found


@dataclass(frozen=True, kw_only=True)
class NamingSettings:
    """What metrics and labels are called. ``labels`` None is the label set of each of ``names``."""

    names: Annotated[
        tuple[ProfileName, ...] | None,
        Option(
            "--names",
            NAMINGS,
            f"Metric names, units and labels: {', '.join(PROFILES)}. Several, after commas, are written beside each"
            " other, what two of them call alike once: so the new names can fill while the old ones still answer.",
            shown="otel; with --counters, its file alone",
        ),
    ] = None
    labels: Annotated[
        LabelSet | None,
        Option("--labels", click.Choice(["otel", "dcgm", "pod-devices"]), "The label names.", shown="those of --names"),
    ] = None

    counters: Annotated[
        Path | None,
        Option(
            "--counters",
            READABLE_FILE,
            "A file of dcgm-exporter, CSV or YAML: just its metrics are written, with its types and help. It stands for"
            " the dcgm profiles of --names; others are written beside it. A change of it is in force in seconds.",
        ),
    ] = None

    relabel: Annotated[
        tuple[str, ...],
        Option(
            "--relabel",
            RELABEL,
            "Other labels for all series: a file of Prometheus's metric_relabel_configs, or preset:NAME, of"
            f" {', '.join(preset.name for preset in PRESETS)}. Repeatable; in the variable, one a line.",
            repeatable=True,
        ),
    ] = ()
    external_labels: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "--external-label",
            EXTERNAL_LABEL,
            "A label for all series, after --relabel, where a series has none of its name. Repeatable; in the variable,"
            " one a line.",
            repeatable=True,
        ),
    ] = ()
    parts_by_pod: Annotated[
        bool,
        Option(
            "--parts-by-pod",
            None,
            "A device that several pods share is written for each pod with its part of utilization, memory and power,"
            " and the device keeps the rest: sums stay right, and queries by pod see every pod. MIG devices get a"
            " utilization.",
        ),
    ] = False

    def relabelling(self) -> Relabelling:
        """What is done to the labels of every series. Raises BadRules."""
        from sinks.series.relabel_file import read

        return Relabelling([read(source) for source in self.relabel], tuple(sorted(self.external_labels)))

    def profiles(self, picked: Profile | None = None) -> tuple[Profile, ...]:
        """What a device is written in; ``picked``: what --counters picks, if not as its file is now.

        Raises CountersError: that file can't be used.
        """
        from sinks.series.counters import OF_DCGM, load  # it reads YAML, which help has no use for

        if self.counters is None:
            names: Iterable[ProfileName] = self.names or ("otel",)
            file: tuple[Profile, ...] = ()
        else:
            names = [name for name in self.names or () if name not in OF_DCGM]
            file = (picked or load(self.counters, self.label_names()).profile,)
        profiles = [PROFILES[name] for name in names]
        return (*file, *[replace(one, labels=LABELS[self.labels]) if self.labels else one for one in profiles])

    def label_names(self) -> LabelNames | None:
        """The labels that were chosen; None: those of the names."""
        return LABELS[self.labels] if self.labels else None

    def naming_errors(self) -> list[str]:
        """What is wrong with how series are to be called."""
        found = [
            f"--names: {name!r} is not one of {', '.join(PROFILES)}"
            for name in self.names or ()
            if name not in PROFILES
        ]
        names = [name for name, _ in self.external_labels]
        found += [
            f"--external-label: {name} is given twice" for name in sorted({n for n in names if names.count(n) > 1})
        ]
        return [*found, *self._counters_errors(), *self._relabel_errors()]

    def _counters_errors(self) -> list[str]:
        """What is wrong with the file of ``--counters``."""
        if self.counters is None:
            return []
        from sinks.series.counters import load
        from sinks.series.counters_file import CountersError

        try:
            load(self.counters)
        except CountersError as error:
            return [f"--counters: {self.counters}{f':{line}' if line else ''}: {text}" for line, text in error.errors]
        return []

    def _relabel_errors(self) -> list[str]:
        """What is wrong with the files of ``--relabel``."""
        from sinks.series.relabel_file import BadRules, read

        found: list[str] = []
        for source in self.relabel:
            try:
                read(source)
            except BadRules as bad:
                found += [f"--relabel: {error}" for error in bad.errors]
        return found


@dataclass(frozen=True, kw_only=True)
class SeriesSettings(SinkSettings, NamingSettings):
    """How a sink turns ticks into series. Tenants' labels never make more than ``max_labels`` on a series."""

    max_labels: Annotated[
        int,
        Option(
            "--max-labels",
            click.IntRange(min=1),
            "What is written on pods and namespaces never makes more labels than this on a series; gpu_pod_info has"
            " the rest.",
        ),
    ] = MAX_LABELS
    stale_after_s: Annotated[
        float,
        Option("--stale-after", DURATION, "The series of a node end when it has been silent for this long."),
    ] = 60.0
    resolution_s: Annotated[
        float | None,
        Option(
            "--resolution",
            DURATION,
            "Write each series once in so long, with the last value that it had then; alerts and usage see every tick"
            " all the same. A window is written with the node's first tick past it, so that it is late by one.",
            shown="every tick",
        ),
    ] = None
    aggregate: Annotated[
        tuple[Aggregate, ...],
        Option(
            "--aggregate",
            AGGREGATES,
            "With --resolution: what is written of a window of each gauge beside its last value, of min, mean, max:"
            " under its name with _min, _mean or _max, before the unit that a name may end in.",
            shown="only the last value",
        ),
    ] = ()

    def resolution(self) -> Resolution | None:
        """The windows in which ticks are written; None: each for itself."""
        return Resolution(round(self.resolution_s * 1000), self.aggregate) if self.resolution_s else None

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = super().errors()
        if self.stale_after_s <= 0:
            found.append("--stale-after: must be above zero")
        if self.resolution_s is not None and not 1 <= self.resolution_s <= _LONGEST_WINDOW_S:
            found.append("--resolution: must be at least 1s and at most 2m: Prometheus forgets a series after 5m")
        if self.resolution_s is None and self.aggregate:
            found.append("--aggregate: it is of no use without --resolution")
        return [*found, *self.naming_errors()]


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """How a server is spoken to over HTTP. ``headers`` are sent with each request; ``request_timeout_s`` bounds an
    attempt. ``RESERVED_HEADERS``, in lower case, are the client's own."""

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset({"content-type", "content-length"})

    headers: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "--header",
            HEADER,
            "Sent with every request. Repeatable; in the variable, one a line: a secret belongs there, because everyone"
            " on the machine can read a command line.",
            repeatable=True,
        ),
    ] = ()
    basic_auth_user: Annotated[
        str | None, Option("--basic-auth-user", None, "The user name of basic authentication.")
    ] = None
    basic_auth_password_file: Annotated[
        Path | None, Option("--basic-auth-password-file", READABLE_FILE, "The file that holds its password.")
    ] = None
    bearer_token_file: Annotated[
        Path | None, Option("--bearer-token-file", READABLE_FILE, "The file that holds a bearer token.")
    ] = None
    tls_ca: Annotated[
        Path | None, Option("--tls-ca", READABLE_FILE, "The certificates to trust (PEM).", shown="the system's")
    ] = None
    tls_cert: Annotated[Path | None, Option("--tls-cert", READABLE_FILE, "The client's certificate (PEM).")] = None
    tls_key: Annotated[Path | None, Option("--tls-key", READABLE_FILE, "The client's private key (PEM).")] = None
    request_timeout_s: float = 30.0

    def errors(self) -> list[str]:
        """What is wrong with these settings together."""
        found: list[str] = []
        basic = (self.basic_auth_user, self.basic_auth_password_file)
        if (basic[0] is None) != (basic[1] is None):
            found.append("--basic-auth-user and --basic-auth-password-file go together")
        if self.bearer_token_file is not None and basic != (None, None):
            found.append("--bearer-token-file: not together with --basic-auth-user")
        if self.tls_key is not None and self.tls_cert is None:
            found.append("--tls-key: needs --tls-cert")
        for name in ("basic_auth_password_file", "bearer_token_file", "tls_ca", "tls_cert", "tls_key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                found.append(f"--{name.replace('_', '-')}: no file {path}")
        for name, value in self.headers:
            if name.lower() in self.RESERVED_HEADERS:
                found.append(f"--header: {name} is the sink's own")
            if not name or any(sign in name + value for sign in "\r\n\0"):
                found.append(f"--header: {name!r} is not a header")
        return found


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings(HttpSettings, SinkSettings):
    """How a sink's receiver is spoken to over HTTP."""

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        return [*SinkSettings.errors(self), *HttpSettings.errors(self)]


def url_errors(url: str) -> list[str]:
    """What is wrong with a receiver's address."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return [f"--url: {url!r} is not http://... or https://..."]
    if parts.username is not None or parts.password is not None:
        return ["--url: credentials belong in --basic-auth-user and --basic-auth-password-file"]
    return []


@dataclass(frozen=True, kw_only=True)
class RemoteWriteSettings(SeriesSettings, ReceiverSettings):
    """Where to write, how, and what. ``max_request_samples`` and ``max_in_flight`` bound a request and how many
    there are at a time."""

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset(
        {"content-type", "content-encoding", "x-prometheus-remote-write-version", "content-length"}
    )

    url: Annotated[str, Option("--url", URL, "Where to write to, as given.")]
    protocol: Annotated[Literal["auto", "1.0", "2.0"], Option("--protocol", None, "Which remote write to speak.")] = (
        "auto"
    )
    group: Group = "gpustream-sink-remote-write"
    from_: From = 3600.0
    max_request_samples: int = 10_000
    max_in_flight: int = 8

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = [*url_errors(self.url), *super().errors()]
        if min(self.max_request_samples, self.max_in_flight, self.request_timeout_s) <= 0:
            found.append("limits of requests must be above zero")
        return found


@dataclass(frozen=True, kw_only=True)
class ScrapeSettings(SeriesSettings):
    """Where the series are served (port 0: any free one; None: nowhere), and what they are called."""

    scrape_listen: ScrapeListen = SCRAPE_ADDRESS
    group: Group = "gpustream-sink-scrape"
    from_: From = "latest"


@dataclass(frozen=True, kw_only=True)
class AlertmanagerSettings(ReceiverSettings):
    """Which Alertmanagers there are; each gets all alerts that are open, whenever they began. ``max_alerts`` bounds a
    request."""

    urls: Annotated[
        tuple[str, ...],
        Option(
            "--url",
            URL,
            "An Alertmanager, without /api/v2/alerts. Repeatable; in the variable, separated by spaces.",
            repeatable=True,
        ),
    ]
    resend_s: Annotated[
        float,
        Option(
            "--resend",
            DURATION,
            "How often what is open is sent again. If this sink is gone, alerts end after four times that.",
        ),
    ] = 60.0
    generator_url: Annotated[
        str | None, Option("--generator-url", URL, "Where notifications link to as the source of an alert.")
    ] = None
    group: Group = "gpustream-sink-alertmanager"
    from_: From = 3600.0
    max_alerts: int = 256

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        given = [url.rstrip("/") for url in self.urls]
        found = [error for url in given for error in url_errors(url)]
        found += [f"--url: {url!r}: without {ALERTS_PATH}" for url in given if url.endswith(ALERTS_PATH)]
        found += [f"--url: {url!r}: without a query" for url in given if urlsplit(url).query or urlsplit(url).fragment]
        found += [f"--url: {url!r} is given twice" for url in sorted({url for url in given if given.count(url) > 1})]
        if not given:
            found.append("--url: missing")
        found += super().errors()
        if not 1 <= self.resend_s <= _RARELY_S:
            found.append("--resend: must be at least 1 s and at most 24 h")
        return found

    def group_of(self, url: str) -> str:
        """The consumer group of one Alertmanager: the given one if there is only one, else its own."""
        if len(self.urls) == 1:
            return self.group
        return f"{self.group}-{blake2b(url.encode(), digest_size=4).hexdigest()}"


@dataclass(frozen=True, kw_only=True)
class WebhookSettings(ReceiverSettings):
    """Where to post, and with which signature: ``secret_file`` holds its key, ``unsigned`` says that there is none.

    ``max_in_flight`` bounds how many requests are under way.
    """

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset(
        {"content-type", "content-length", "idempotency-key", "x-gpustream-signature"}
        | {f"ce-{attribute.name}" for attribute in CLOUD_EVENT}
    )

    url: Annotated[str, Option("--url", URL, "Where to post to, as given.")]
    secret_file: Annotated[
        Path | None,
        Option(
            "--secret-file",
            READABLE_FILE,
            "The file that holds the key with which X-Gpustream-Signature signs each body (HMAC-SHA256).",
        ),
    ] = None
    unsigned: Annotated[bool, Option("--unsigned", None, "Bodies are not signed.")] = False
    format: Annotated[
        Literal["record", "cloudevents"],
        Option(
            "--format",
            None,
            "What is posted: the record of gpu.alerts as it is, or a CloudEvent, as Knative and its like take it.",
        ),
    ] = "record"
    content_mode: Annotated[
        Literal["binary", "structured"],
        Option(
            "--content-mode",
            None,
            "How a CloudEvent is posted: binary has the record as the body and the rest in headers, structured has all"
            " in one JSON body.",
        ),
    ] = "binary"
    group: Group = "gpustream-sink-webhook"
    from_: From = 3600.0
    max_in_flight: int = 8

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found, file = url_errors(self.url), self.secret_file
        if self.content_mode == "structured" and self.format == "record":
            found.append("--content-mode: it is of no use without --format cloudevents")
        if file is None:
            found += [] if self.unsigned else ["--secret-file: missing; or say --unsigned"]
        elif self.unsigned:
            found.append("--unsigned: not together with --secret-file")
        elif not file.is_file():
            found.append(f"--secret-file: no file {file}")
        elif not file.read_bytes().strip():
            found.append(f"--secret-file: {file} is empty")
        return [*found, *super().errors()]


@dataclass(frozen=True, kw_only=True)
class MetricsApiSettings(KafkaSettings):
    """Where autoscalers' questions are answered, and to whom. ``custom_metrics`` None: only as plain JSON."""

    metrics_listen: Annotated[
        Address | None,
        Option("--metrics-listen", LISTEN, "Where questions are answered; --listen stays this process's own."),
    ] = METRICS_ADDRESS
    serving_cert: Annotated[
        Path | None,
        Option(
            "--serving-cert",
            READABLE_FILE,
            "The server's certificate, PEM, for SERVICE.NAMESPACE.svc. It and --serving-key are read again when they"
            " change. Without them: HTTP without TLS, on a loopback address only.",
        ),
    ] = None
    serving_key: Annotated[
        Path | None, Option("--serving-key", READABLE_FILE, "The private key of --serving-cert, PEM, not encrypted.")
    ] = None
    client_ca: Annotated[
        Path | None,
        Option(
            "--client-ca",
            READABLE_FILE,
            "The CA whose certificates clients must show, PEM; read again when it changes.",
            shown="with --custom-metrics the API server's front-proxy CA, as kube-system has it; else none, on a"
            " loopback address only",
        ),
    ] = None
    client_names: Annotated[
        tuple[str, ...],
        Option(
            "--client-names",
            NAMES,
            "The common names of the front proxies, which alone may ask for custom.metrics.k8s.io.",
            shown="those of kube-system",
        ),
    ] = ()
    client_token_file: Annotated[
        Path | None,
        Option(
            "--client-token-file",
            READABLE_FILE,
            "A file with a bearer token: who shows it may ask for plain JSON without a certificate. It is read at each"
            " request.",
        ),
    ] = None
    custom_metrics: Annotated[
        str | None,
        Option(
            "--custom-metrics",
            LEASE,
            "Serve custom.metrics.k8s.io too: the NAMESPACE/NAME of the Service by which the API server finds this"
            " process, as its APIService has it. Refused if the group belongs to another Service.",
            shown="off",
        ),
    ] = None
    kubeconfig: Kubeconfig = None

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = super().errors()
        tls = self.serving_cert is not None and self.serving_key is not None
        if (self.serving_cert is None) != (self.serving_key is None):
            found.append("--serving-cert and --serving-key go together")
        if self.client_ca is not None and not tls:
            found.append("--client-ca: it is of no use without TLS: --serving-cert and --serving-key")
        if self.client_names and self.custom_metrics is None:
            found.append("--client-names: it is of no use without --custom-metrics")
        if any("*" in name for name in self.client_names):
            found.append("--client-names: names without *")
        return found + self._listening_errors(tls=tls)

    def _listening_errors(self, *, tls: bool) -> list[str]:
        if self.metrics_listen is None:
            return ["--metrics-listen: off is not possible: it is all that this sink does"]
        if self.metrics_listen.host in _LOOPBACK:
            return []
        known = self.client_ca is not None or self.custom_metrics is not None or self.client_token_file is not None
        return [
            *([] if tls else ["--metrics-listen: beyond loopback only with TLS: --serving-cert and --serving-key"]),
            *([] if known else ["--metrics-listen: beyond loopback only with --client-ca, or everybody may ask"]),
        ]


@dataclass(frozen=True, kw_only=True)
class PageSettings(KafkaSettings):
    """Where the page is served, and what it calls a team."""

    page_listen: PageListen = PAGE_ADDRESS
    page_prefix: Annotated[
        str,
        Option(
            "--page-prefix",
            None,
            "The path below which the page is served, such as /gpus/, for a reverse proxy that hands paths on as they"
            " are. One that takes its prefix away needs none: all addresses in the page are relative.",
        ),
    ] = "/"
    page_host: Annotated[
        tuple[str, ...],
        Option(
            "--page-host",
            HOST_NAMES,
            "The names by which browsers may ask for the page, for a reverse proxy that hands on the name that it was"
            " asked for. Addresses and localhost always may. Any other is refused, so that no web site can read the"
            " page through a name of its own.",
            shown="localhost only on loopback, else every name",
        ),
    ] = ()
    team_label: Annotated[
        str, Option("--team-label", None, "The label that names a pod's team: the pod's own, else its namespace's.")
    ] = "team"

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = super().errors()
        if self.page_listen is None:
            found.append("--page-listen: off is not possible: it is all that this sink does")
        if not _PREFIX.fullmatch(self.page_prefix):
            found.append(f"--page-prefix: {self.page_prefix!r} does not begin and end with a slash, such as /gpus/")
        return found

    @property
    def is_public(self) -> bool:
        """Whether other machines may reach it."""
        return self.page_listen is not None and self.page_listen.host not in _LOOPBACK


@dataclass(frozen=True, kw_only=True)
class ParquetSettings(SinkSettings):
    """Where files are written, and how soon."""

    path: Annotated[
        Path,
        Option(
            "--path",
            DIRECTORY,
            "The directory below which files are written: of one Kafka, and the same for all workers of the group.",
        ),
    ]
    write_every_s: Annotated[
        float,
        Option(
            "--write-every",
            DURATION,
            "How long records are held before they are written, so that a file is not written again for each.",
        ),
    ] = 60.0
    group: Group = "gpustream-sink-parquet"
    from_: From = "earliest"

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = super().errors()
        if importlib.util.find_spec("pyarrow") is None:
            found.append("sink parquet: run `pip install 'gpustream[parquet]'` first: it needs pyarrow")
        if self.path.exists() and not (self.path.is_dir() and os.access(self.path, os.W_OK | os.X_OK)):
            found.append(f"--path: {self.path} is no directory that can be written to")
        if self.write_every_s < 0:
            found.append("--write-every: must not be below zero")
        return found


@dataclass(frozen=True, kw_only=True)
class ReclaimSettings(SinkSettings):
    """What may be done about alerts, beside what namespaces say. A dry run unless ``act``."""

    act: Annotated[
        bool,
        Option(
            "--act",
            None,
            "Do it: write Events, and stop workloads, of namespaces whose annotation gpustream.dev/reclaim says so.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Option("--dry-run", None, "Change nothing, and write what would be done to gpu.actions. It is the default."),
    ] = False
    alert_names: Annotated[
        tuple[str, ...], Option("--alert-names", ALERT_NAMES, "Which alerts are acted on, by their rules' names.")
    ] = ("GPUHeldIdle",)
    least_s: Annotated[
        float,
        Option(
            "--least",
            DURATION,
            "No workload is stopped before its alert has fired for this long, however soon its namespace wants it. If"
            " the namespace does not say when, it is then.",
        ),
    ] = 3600.0
    budget: Annotated[
        int,
        Option(
            "--budget",
            click.IntRange(min=0),
            "So many workloads are stopped within any hour, over all replicas of this sink.",
        ),
    ] = 10
    event_budget: Annotated[
        int, Option("--event-budget", click.IntRange(min=0), "Of so many workloads Events are written within any hour.")
    ] = 60
    alert_age_s: Annotated[
        float,
        Option(
            "--alert-age",
            DURATION,
            "An alert that was not written again for this long is not acted on. The alert stream renews an alert of a"
            " workload each hour.",
        ),
    ] = 7200.0
    kubeconfig: Kubeconfig = None
    group: Annotated[
        str,
        Option("--group", NAME, "The consumer group. The sinks of several clusters on one Kafka need one each."),
    ] = "gpustream-sink-reclaim"
    from_: From = "earliest"

    def errors(self) -> list[str]:
        """See :meth:`KafkaSettings.errors`."""
        found = super().errors()
        if self.act and self.dry_run:
            found.append("--act and --dry-run: one or the other")
        if self.alert_age_s <= 0:
            found.append("--alert-age: must be above zero")
        if not all(self.alert_names):
            found.append("--alert-names: an empty name")
        return found
