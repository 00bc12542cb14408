"""``gpustream compare``: what another exporter says of a GPU and a pod beside what gpustream says, and why they differ.

In:       a Prometheus that has the series of both: dcgm-exporter, pod-devices-exporter or l9gpu, and gpustream.
Out:      on standard output a row for each of their series that differs, and how many agree; or one JSON object.
On failure: what is wrong with Prometheus, on standard error. Exit code 1 for that, and if anything differs but in when
          it was read.
"""

import asyncio
import time
from collections import Counter
from typing import Any, Literal

import aiohttp
import click
import msgspec

from delivery.proxy import ProxyError, proxy_of
from delivery.settings import DURATION, URL
from delivery.values import counted
from gpustream.command import LOG_FORMAT, Command, option, options, output_format, record_of
from gpustream.comparison import FINE, Compared, Comparison, Reading, Sample, compared, is_ours
from gpustream.output import FAILED, failed, json_text, show
from sinks.receiver import Credentials
from sinks.settings import HttpSettings, url_errors
from topics.topic import UNDECODABLE

COLUMNS = ("gpu", "pod", "theirs", "their value", "ours", "our value", "verdict", "why")

SCHEMA = 1

_MAX_ERROR_CHARS = 300
_NAMES_PER_QUERY = 25
"""How many metric names one query has."""

_NAME_PATTERN = "DCGM_.+|dcgm_.+|gpu_.+"


# -- querying Prometheus


class PrometheusError(Exception):
    """Prometheus could not be queried; the message says why."""


class _VectorElement(msgspec.Struct):
    """A series in an answer, with one sample or those of a range. A native histogram has neither."""

    metric: dict[str, str]
    value: Sample | None = None
    values: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        if "__name__" not in self.metric:
            raise ValueError("a series has no name")


class _Data(msgspec.Struct):
    result: list[_VectorElement]


class _Response(msgspec.Struct):
    """An answer of Prometheus, which writes each value as a string."""

    status: str = ""
    error: str = ""
    data: _Data | None = None


class PrometheusClient:
    """Queries one Prometheus at one moment. Every query may raise PrometheusError."""

    def __init__(self, base: str, session: aiohttp.ClientSession, credentials: Credentials, at_s: float) -> None:
        self._url, self._session, self._credentials = f"{base.rstrip('/')}/api/v1/query", session, credentials
        self._at_s = at_s

    async def readings(self, matchers: str, window_s: float) -> list[Reading]:
        """Every series of GPUs that the matchers select: its samples in the window, else its last one before it."""
        matchers = matchers.strip()
        if matchers.startswith("{") and matchers.endswith("}"):
            matchers = matchers[1:-1]
        extra_matchers = f",{matchers}" if matchers else ""
        counts = await self._query(f'count by (__name__) ({{__name__=~"{_NAME_PATTERN}"{extra_matchers}}})')
        names = sorted(reading.name for reading in counts)
        readings: list[Reading] = []
        for start in range(0, len(names), _NAMES_PER_QUERY):
            selector = f'{{__name__=~"{"|".join(names[start : start + _NAMES_PER_QUERY])}"{extra_matchers}}}'
            current = {frozenset(reading.labels.items()): reading for reading in await self._query(selector)}
            for reading in await self._query(f"{selector}[{int(window_s * 1000)}ms]"):
                ended = current.pop(frozenset(reading.labels.items()), None) is None
                readings.append(reading._replace(ended=ended))
            readings += current.values()
        return readings

    async def _query(self, expression: str) -> list[Reading]:
        try:
            headers, context = self._credentials.current()
            form = {"query": expression, "time": f"{self._at_s:.3f}"}
            async with self._session.post(
                self._url, data=form, headers=headers, ssl=context or True, allow_redirects=False
            ) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise PrometheusError(f"{self._url} can't be asked: {str(error) or type(error).__name__}") from error
        try:
            response = msgspec.json.decode(text, type=_Response, strict=False)
        except UNDECODABLE:
            response = _Response()
        if response.status == "success" and response.data is not None:
            samples_of = [(row.metric, row.values or (row.value and (row.value,))) for row in response.data.result]
            return [Reading(labels, samples) for labels, samples in samples_of if samples]
        reason = response.error or " ".join(text[:_MAX_ERROR_CHARS].split())
        raise PrometheusError(f"{self._url} answered {reply.status}: {reason}")


async def gather(
    base: str, settings: HttpSettings, matchers: tuple[str | None, str | None], window_s: float
) -> tuple[list[Reading], list[Reading]]:
    """The readings of the other exporter and of gpustream.

    If only one side has matchers, the other side has all other series. Without any, :func:`is_ours` decides.
    Raises PrometheusError, and ProxyError.
    """
    theirs, ours = matchers
    timeout, proxy = aiohttp.ClientTimeout(total=settings.request_timeout_s), proxy_of(base)
    async with aiohttp.ClientSession(timeout=timeout, headers=settings.headers, proxy=proxy) as session:
        prometheus = PrometheusClient(base, session, Credentials(settings), time.time())
        their_readings = await prometheus.readings(theirs, window_s) if theirs else []
        our_readings = await prometheus.readings(ours, window_s) if ours else []
        all_readings = [] if theirs and ours else await prometheus.readings("", window_s)
    selected = {frozenset(reading.labels.items()) for reading in (*their_readings, *our_readings)}
    other_readings = [reading for reading in all_readings if frozenset(reading.labels.items()) not in selected]
    if not theirs:
        their_readings = [reading for reading in other_readings if ours or not is_ours(reading.labels)]
    if not ours:
        our_readings = [reading for reading in other_readings if theirs or is_ours(reading.labels)]
    return their_readings, our_readings


# -- the command


def _option_errors(values: dict[str, Any]) -> list[str]:
    messages = [text.replace("--url", "--prometheus") for text in url_errors(values["prometheus"])]
    if values["window_s"] < 1:
        messages.append("--window: must be at least 1 s")
    return [*messages, *record_of(HttpSettings, values).errors()]


@click.command(
    cls=Command,
    check=_option_errors,
    example=(
        "gpustream compare --prometheus http://prometheus:9090\n"
        'gpustream compare --prometheus http://prometheus:9090 --theirs \'job="dcgm-exporter",Hostname="gpu-node-1"\''
        ' --ours \'job="",hostname="gpu-node-1"\'\n'
        "gpustream compare --prometheus http://prometheus:9090 --format json | jq .verdicts"
    ),
)
@option("--prometheus", type=URL, required=True, help="The Prometheus that has the series of both.")
@option(
    "--theirs",
    metavar="MATCHERS",
    help='Which series are theirs: matchers such as job="dcgm-exporter". To pick a node or a GPU, give --ours, too.'
    " Without them: all that is not gpustream's.",
)
@option(
    "--ours",
    metavar="MATCHERS",
    help="Which series are gpustream's. Without them: with --theirs all others, else those with"
    ' service_name="gpustream", those whose job has gpustream in its name, and those without a job, as remote write'
    " sends them.",
)
@option(
    "--window",
    "window_s",
    type=DURATION,
    default="2m",
    help="How far back gpustream's values are looked through for theirs: their interval of collecting and of scraping.",
)
@option(
    "--tolerance",
    type=click.FloatRange(min=0, max=1),
    default=0.02,
    help="The share of a value by which both may differ and are the same.",
)
@option("--all", "everything", is_flag=True, help="Show what agrees, too.")
@output_format("text", "json", help="json: one object, on one line.")
@options(HttpSettings)
@LOG_FORMAT
def compare(
    prometheus: str,
    theirs: str | None,
    ours: str | None,
    window_s: float,
    tolerance: float,
    everything: bool,
    form: Literal["text", "json"],
    **values: Any,
) -> None:
    """Compare what another exporter says of each GPU and pod with what gpustream says: what differs, and why.

    Both write to one Prometheus, each as it would alone. A value that both had, but at other times, agrees. Exit code
    1 if anything else differs, or if one of both is not there.
    """
    try:
        their_readings, our_readings = asyncio.run(gather(prometheus, HttpSettings(**values), (theirs, ours), window_s))
    except (PrometheusError, ProxyError) as error:
        raise failed(error) from error
    if not their_readings or not our_readings:
        owner, option_name = ("gpustream's", "--ours") if their_readings else ("another exporter's", "--theirs")
        raise failed(f"no series of GPUs there are {owner}: say with {option_name} which these are")
    comparison = compared(their_readings, our_readings, tolerance)
    if form == "json":
        click.echo(json_text(report(comparison)))
    else:
        show(COLUMNS, [row_text(row) for row in comparison.rows if everything or row.verdict not in FINE])
        click.echo(summary(comparison), err=True)
    raise SystemExit(FAILED if comparison.differing else 0)


def row_text(row: Compared) -> tuple[str, ...]:
    sides = [("-", "-") if side is None else (side.name, f"{side.value:.10g}") for side in (row.theirs, row.ours)]
    pods = dict.fromkeys(side.pod or "-" for side in (row.theirs, row.ours) if side is not None)
    return str(row.device), " / ".join(pods), *sides[0], *sides[1], row.verdict, row.reason or "-"


def summary(comparison: Comparison) -> str:
    """How many series agree and why the others don't, in a sentence."""
    verdicts = Counter(row.verdict for row in comparison.rows)
    parts = [f"{number} {verdict}" for verdict, number in sorted(verdicts.items())]
    devices = len({row.device for row in comparison.rows})
    only = f"; only gpustream has {counted(len(comparison.only_ours), 'name')}" if comparison.only_ours else ""
    return f"{counted(len(comparison.rows), 'row')} of {counted(devices, 'GPU')}: {', '.join(parts)}{only}"


def report(comparison: Comparison) -> dict[str, Any]:
    """The comparison for programs: every row, also those that agree."""
    return {
        "schema": SCHEMA,
        "ok": not comparison.differing,
        "verdicts": Counter(row.verdict for row in comparison.rows),
        "only_ours": comparison.only_ours,
        "rows": [
            {
                "gpu": row.device.uuid,
                "gpu_instance": row.device.instance or None,
                "quantity": row.quantity,
                "theirs": row.theirs._asdict() if row.theirs else None,
                "ours": row.ours._asdict() if row.ours else None,
                "verdict": row.verdict,
                "why": row.reason or None,
            }
            for row in comparison.rows
        ],
    }
