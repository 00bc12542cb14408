"""``gpustream compare``: what another exporter says of a GPU and a pod beside what gpustream says, and why they differ.

In:       a Prometheus that has the series of both: dcgm-exporter, pod-devices-exporter or l9gpu, and gpustream.
Out:      on standard output a row for each of their series that differs, and how many agree; or one JSON object.
On failure: what is wrong with Prometheus, on standard error. Exit code 1 for that, and if anything differs but in when
          it was read.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
import click
import msgspec

from delivery import settings as schema
from delivery.settings import DURATION, URL
from gpustream.command import LOG_FORMAT, Command, counted, option, options, output_format
from gpustream.comparison import FINE, Compared, Comparison, Reading, Sample, compared, is_ours
from gpustream.output import FAILED, failed, show
from sinks.receiver import Credentials
from sinks.settings import HttpSettings, url_mistakes

COLUMNS = ("gpu", "pod", "theirs", "their value", "ours", "our value", "verdict", "why")

SCHEMA = 1

_SHOWN = 300
_AT_ONCE = 25
"""How many names are asked for at once."""

_ANY_NAME = "DCGM_.+|dcgm_.+|gpu_.+"


# -- asking Prometheus


class PrometheusError(Exception):
    """What is wrong with the answer, in a sentence."""


class Asker:
    """Asks one Prometheus about one moment. Every question may raise PrometheusError."""

    def __init__(self, base: str, session: aiohttp.ClientSession, credentials: Credentials, at_s: float) -> None:
        self._url, self._session, self._credentials = f"{base.rstrip('/')}/api/v1/query", session, credentials
        self._at_s = at_s

    async def readings(self, matchers: str, window_s: float) -> list[Reading]:
        """Every series of GPUs of the window that the matchers allow."""
        inner = matchers.strip()
        inner = inner[1:-1] if inner.startswith("{") and inner.endswith("}") else inner
        further = f",{inner}" if inner else ""
        counts = await self._ask(f'count by (__name__) ({{__name__=~"{_ANY_NAME}"{further}}})')
        names = sorted(one["metric"]["__name__"] for one in counts)
        found: list[Reading] = []
        for start in range(0, len(names), _AT_ONCE):
            some = f'{{__name__=~"{"|".join(names[start : start + _AT_ONCE])}"{further}}}'
            there = {frozenset(one["metric"].items()) for one in await self._ask(some)}
            for one in await self._ask(f"{some}[{int(window_s * 1000)}ms]"):
                samples = [Sample(float(at_s), float(value)) for at_s, value in one["values"]]
                ended = frozenset(one["metric"].items()) not in there
                found.append(Reading(one["metric"], tuple(samples), ended))
        return found

    async def _ask(self, expression: str) -> list[dict[str, Any]]:
        try:
            headers, context = self._credentials.now()
            form = {"query": expression, "time": f"{self._at_s:.3f}"}
            async with self._session.post(
                self._url, data=form, headers=headers, ssl=context or True, allow_redirects=False
            ) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise PrometheusError(f"{self._url} can't be asked: {str(error) or type(error).__name__}") from error
        try:
            said = msgspec.json.decode(text)
            if said["status"] == "success":
                result: list[dict[str, Any]] = said["data"]["result"]
                return result
            reason = said.get("error", text)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            reason = " ".join(text[:_SHOWN].split())
        raise PrometheusError(f"{self._url} answered {answer.status}: {reason}")


async def gather(
    base: str, settings: HttpSettings, matchers: tuple[str | None, str | None], window_s: float
) -> tuple[list[Reading], list[Reading]]:
    """What they and we have now. What only one side has matchers for is divided by them; without any, by who is who.
    Raises PrometheusError."""
    theirs, ours = matchers
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(settings.headers)) as session:
        prometheus = Asker(base, session, Credentials(settings), time.time())
        their_own = await prometheus.readings(theirs, window_s) if theirs else []
        our_own = await prometheus.readings(ours, window_s) if ours else []
        everything = [] if theirs and ours else await prometheus.readings("", window_s)
    taken = {frozenset(one.labels.items()) for one in (*their_own, *our_own)}
    rest = [one for one in everything if frozenset(one.labels.items()) not in taken]
    if not theirs:
        their_own = [one for one in rest if ours or not is_ours(one.labels)]
    if not ours:
        our_own = [one for one in rest if theirs or is_ours(one.labels)]
    return their_own, our_own


# -- the command


def _mistakes(given: dict[str, Any]) -> list[str]:
    found = [text.replace("--url", "--prometheus") for text in url_mistakes(given["prometheus"])]
    if given["window_s"] < 1:
        found.append("--window: must be at least 1 s")
    return [*found, *_http(given).errors()]


def _http(given: Mapping[str, Any]) -> HttpSettings:
    return HttpSettings(**{name: given[name] for name in _OF_HTTP})


_OF_HTTP = tuple(field.name for field in schema.fields(HttpSettings))


@click.command(
    cls=Command,
    check=_mistakes,
    example=(
        "gpustream compare --prometheus http://prometheus:9090\n"
        'gpustream compare --prometheus http://prometheus:9090 --theirs \'job="dcgm-exporter",Hostname="gpu-node-1"\'\n'
        "gpustream compare --prometheus http://prometheus:9090 --format json | jq .verdicts"
    ),
)
@option("--prometheus", type=URL, required=True, help="The Prometheus that has the series of both.")
@option(
    "--theirs",
    metavar="MATCHERS",
    help='Which series are theirs: matchers such as job="dcgm-exporter". They may pick a node or a GPU as well.'
    " Without them: all that is not gpustream's.",
)
@option(
    "--ours",
    metavar="MATCHERS",
    help='Which series are gpustream\'s. Without them: those with service_name="gpustream", those whose job has'
    " gpustream in its name, and those without a job, as remote write sends them.",
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
    **given: Any,
) -> None:
    """Compare what another exporter says of each GPU and pod with what gpustream says: what differs, and why.

    Both write to one Prometheus, each as it would alone. A value that both had, but at other times, agrees. Exit code
    1 if anything else differs, or if one of both is not there.
    """
    try:
        theirs_found, ours_found = asyncio.run(gather(prometheus, _http(given), (theirs, ours), window_s))
    except PrometheusError as error:
        raise failed(error) from error
    if not theirs_found or not ours_found:
        who, how = ("gpustream's", "--ours") if theirs_found else ("another exporter's", "--theirs")
        raise failed(f"no series of GPUs there are {who}: say with {how} which these are")
    found = compared(theirs_found, ours_found, tolerance)
    if form == "json":
        click.echo(msgspec.json.encode(report(found)))
    else:
        show(COLUMNS, [shown(row) for row in found.rows if everything or row.verdict not in FINE])
        click.echo(summary(found), err=True)
    raise SystemExit(FAILED if found.differing else 0)


def shown(row: Compared) -> tuple[str, ...]:
    """A row as text."""
    sides = [("-", "-") if side is None else (side.name, f"{side.value:.10g}") for side in (row.theirs, row.ours)]
    pods = dict.fromkeys(side.pod or "-" for side in (row.theirs, row.ours) if side is not None)
    return str(row.device), " / ".join(pods), *sides[0], *sides[1], row.verdict, row.why or "-"


def summary(found: Comparison) -> str:
    """How many series agree and why the others don't, in a sentence."""
    verdicts = Counter(row.verdict for row in found.rows)
    parts = [f"{number} {verdict}" for verdict, number in sorted(verdicts.items())]
    devices = len({row.device for row in found.rows})
    only = f"; only gpustream has {counted(len(found.only_ours), 'name')}" if found.only_ours else ""
    return f"{counted(len(found.rows), 'row')} of {counted(devices, 'GPU')}: {', '.join(parts)}{only}"


def report(found: Comparison) -> dict[str, Any]:
    """The comparison for programs: every row, also those that agree."""
    return {
        "schema": SCHEMA,
        "ok": not found.differing,
        "verdicts": Counter(row.verdict for row in found.rows),
        "only_ours": found.only_ours,
        "rows": [
            {
                "gpu": row.device.uuid,
                "gpu_instance": row.device.instance or None,
                "quantity": row.quantity,
                "theirs": row.theirs._asdict() if row.theirs else None,
                "ours": row.ours._asdict() if row.ours else None,
                "verdict": row.verdict,
                "why": row.why or None,
            }
            for row in found.rows
        ],
    }
