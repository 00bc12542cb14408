"""``gpustream compare``: what another exporter says of a GPU and a pod beside what gpustream says, and why they differ.

In:       a Prometheus that has the series of both: dcgm-exporter, pod-devices-exporter or l9gpu, and gpustream.
Out:      on standard output a row for each of their series that differs, and how many agree; or one JSON object.
On failure: what is wrong with Prometheus, on standard error. Exit code 1 for that, and if anything differs but in when
          it was read.

A value is compared in the unit of the catalogue, whatever each side's name says. Theirs is of some moment before their
scrape, so that ours of a whole ``--window`` is looked at: if it was theirs once, or below and above it, the two were
only read at different times.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import aiohttp
import click
import msgspec

from delivery import settings as schema
from delivery.settings import DURATION, URL
from gpustream.command import LOG_FORMAT, Command, counted, option, options, output_format
from gpustream.output import FAILED, failed, show
from sinks.receiver import Credentials
from sinks.series import counters
from sinks.settings import HttpSettings, url_mistakes
from topics.profiles import PROFILES, Profile

Verdict = Literal["same", "timing", "unit", "value", "holder", "missing", "unknown"]
FINE: frozenset[Verdict] = frozenset({"same", "timing"})

COLUMNS = ("gpu", "pod", "theirs", "their value", "ours", "our value", "verdict", "why")

SCHEMA = 1

_SHOWN = 300
_AT_ONCE = 25
"""So many names are asked for in a question."""

_ANY_NAME = "DCGM_.+|dcgm_.+|gpu_.+"
_UUIDS, _INDEXES = ("UUID", "uuid", "gpu_uuid"), ("gpu", "gpu_index")
_NODES = ("Hostname", "hostname", "k8s_node_name", "host_name", "node", "instance")
_NAMESPACES = ("exported_namespace", "pod_namespace", "k8s_namespace_name", "namespace")
_PODS = ("exported_pod", "pod_name", "k8s_pod_name", "pod")
"""Where a scrape's own labels win, those of the holder are ``exported_``, and ``pod`` is the exporter's own."""
_FACTORS = (100.0, 1e3, 1e6, 1e9, 1024.0, 1024.0**2, 1e6 / 1024**2)

Labels = Mapping[str, str]


# -- what Prometheus has


class Sample(NamedTuple):
    """A value, and when it is from, in seconds since the epoch."""

    at_s: float
    value: float


class Reading(NamedTuple):
    """A series of one side: all its labels, its samples of the window, oldest first, and whether it has ended since."""

    labels: Labels
    samples: tuple[Sample, ...]
    ended: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return self.labels["__name__"]

    @property
    def pod(self) -> str | None:
        """``namespace/pod`` of the pod that its labels name."""
        pod, namespace = _first(self.labels, _PODS), _first(self.labels, _NAMESPACES)
        return f"{namespace or ''}/{pod}" if pod else None


class ComparedDevice(NamedTuple):
    """A GPU, or a GPU instance of one: its UUID, or where that is not said, its node and index."""

    uuid: str
    instance: str = ""

    def __str__(self) -> str:
        return f"{self.uuid}/{self.instance}" if self.instance else self.uuid


class _Quantity(NamedTuple):
    """What a series measures: a key of the catalogue, several of them, or its own name. ``scale`` takes that to the
    series' unit."""

    key: str
    scale: float = 1.0


def _first(labels: Labels, names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def device(labels: Labels, uuids: Mapping[tuple[str, str], str]) -> ComparedDevice | None:
    """What a series is of; ``uuids``: of GPUs, by node and index. None: of no GPU."""
    uuid, index = _first(labels, _UUIDS), _first(labels, _INDEXES)
    if uuid is None and index is not None:
        node = (_first(labels, _NODES) or "").partition(":")[0]
        uuid = uuids.get((node, index)) or f"{node}/{index}"
    if uuid is None:
        return None
    return ComparedDevice(labels.get("gpu_mig_uuid") or uuid, labels.get("GPU_I_ID", ""))


def _quantities(profile: Profile) -> Iterator[tuple[str, Labels, _Quantity]]:
    """What each name of a profile measures, with the labels that tell it from others of that name."""
    for key, many in profile.series.items():
        yield from [(one.name, dict(one.labels), _Quantity(key, one.scale)) for one in many if one.bits is None]
    for ratio in profile.ratios:
        key = "/".join("+".join(keys) for keys in (ratio.numerators, ratio.denominators) if keys)
        yield ratio.name, dict(ratio.labels), _Quantity(key, ratio.scale)


@cache
def _known() -> dict[str, list[tuple[Labels, _Quantity]]]:
    """What each name of any profile measures."""
    found: dict[str, list[tuple[Labels, _Quantity]]] = {}
    for name, own, of in [one for profile in PROFILES.values() for one in _quantities(profile)]:
        found.setdefault(name, []).append((own, of))
    return found


def quantity(labels: Labels) -> _Quantity:
    """What a series measures, by its name and labels."""
    for own, found in _known().get(labels["__name__"], ()):
        if own.items() <= labels.items():
            return found
    told = sorted((name, labels[name]) for name in ("xid", "gpu_throttle_cause", "gpu_task_type") if name in labels)
    return _Quantity(labels["__name__"] + "".join(f" {name}={value}" for name, value in told))


def is_ours(labels: Labels) -> bool:
    """Whether a series is gpustream's: by its service or its job. What remote write sends of it has no job at all."""
    return labels.get("service_name") == "gpustream" or "gpustream" in labels.get("job", "gpustream")


# -- what differs, and why


class Side(NamedTuple):
    """What one side says."""

    name: str
    value: float
    pod: str | None
    at_s: float


class Compared(NamedTuple):
    """A series of theirs beside ours of the same GPU and quantity."""

    device: ComparedDevice
    quantity: str
    theirs: Side | None
    ours: Side | None
    verdict: Verdict
    why: str


class Comparison(NamedTuple):
    """All rows; the names that only ours has."""

    rows: tuple[Compared, ...]
    only_ours: tuple[str, ...]

    @property
    def differing(self) -> int:
        """How many rows differ but in when they were read."""
        return sum(row.verdict not in FINE for row in self.rows)


def compared(theirs: Sequence[Reading], ours: Sequence[Reading], tolerance: float) -> Comparison:
    """Each of their series beside ours; GPUs that only one side has. ``tolerance`` is a share of the value."""
    uuids = {
        ((_first(one.labels, _NODES) or "").partition(":")[0], index): uuid
        for one in (*theirs, *ours)
        if (index := _first(one.labels, _INDEXES)) and (uuid := _first(one.labels, _UUIDS))
    }
    theirs, ours = _with_holders(theirs), _with_holders(ours)
    of_theirs = _grouped([one for one in theirs if not one.ended], uuids)
    of_ours = _grouped([one for one in ours if not one.ended], uuids)
    ended = _grouped([one for one in ours if one.ended], uuids)
    devices = {found for found, _ in of_ours}
    known = {key for _, key in of_ours}
    rows: list[Compared] = []
    for (found, key), readings in of_theirs.items():
        pods = {reading.pod for reading in readings}
        for reading in readings:
            if found not in devices:
                why = "gpustream has no such GPU"
                rows.append(Compared(found, key, _side(reading), None, "missing", why))
            elif (found, key) not in of_ours:
                verdict, why = _absent(reading.name, key, known)
                rows.append(Compared(found, key, _side(reading), None, verdict, why))
            else:
                there, before = of_ours[found, key], ended.get((found, key), ())
                rows.append(_beside(found, key, reading, (there, before), tolerance, shared=len(pods) > 1))
    for found in devices - {found for found, _ in of_theirs}:
        some = next(readings[0] for (of, _), readings in of_ours.items() if of == found)
        rows.append(Compared(found, "", None, _side(some), "missing", "they have no such GPU"))
    theirs_too = {key for _, key in of_theirs}
    only = {one.name for (_, key), readings in of_ours.items() if key not in theirs_too for one in readings}
    return Comparison(tuple(sorted(rows, key=lambda row: (row.device, row.quantity))), tuple(sorted(only)))


def _with_holders(readings: Sequence[Reading]) -> Sequence[Reading]:
    """The same without the exporter's own pod, where a side says that it has its holders in other labels."""
    if not any("exported_pod" in one.labels for one in readings):
        return readings
    own = ("pod", "namespace", "container")
    return [one._replace(labels={k: v for k, v in one.labels.items() if k not in own}) for one in readings]


def _grouped(
    readings: Iterable[Reading], uuids: Mapping[tuple[str, str], str]
) -> dict[tuple[ComparedDevice, str], list[Reading]]:
    """The series of each GPU and quantity."""
    found: dict[tuple[ComparedDevice, str], list[Reading]] = {}
    for one in readings:
        if (of := device(one.labels, uuids)) is not None:
            found.setdefault((of, quantity(one.labels).key), []).append(one)
    return found


def _side(reading: Reading) -> Side:
    last = reading.samples[-1]
    return Side(reading.name, last.value, reading.pod, last.at_s)


def _absent(name: str, key: str, known: Iterable[str]) -> tuple[Verdict, str]:
    """Why ours lacks what they have of a GPU."""
    if name not in _known():
        return "unknown", f"gpustream has no {name}: {counters.why_not_served(name)}"
    if key in known:
        return "missing", "gpustream has it of other GPUs: NVML does not say it of this one"
    having = [name for name, profile in PROFILES.items() if any(of.key == key for _, _, of in _quantities(profile))]
    return "missing", f"gpustream has it with --names {' or '.join(having)}, if NVML says it"


def _beside(
    found: ComparedDevice,
    key: str,
    theirs: Reading,
    ours: tuple[Sequence[Reading], Sequence[Reading]],
    tolerance: float,
    *,
    shared: bool,
) -> Compared:
    """Their series beside that of ours, which are there and which have ended, that is most like it: of its name, else
    of its pod."""
    there, ended = ours
    our = max(there, key=lambda one: (one.name == theirs.name, one.pod == theirs.pod, one.samples[-1].at_s))
    before = [sample for one in ended if one.name == our.name for sample in one.samples]
    scales = quantity(theirs.labels).scale, quantity(our.labels).scale
    verdict, why = judged(theirs, scales[0], sorted([*before, *our.samples]), scales[1], tolerance)
    if verdict in FINE and theirs.pod != our.pod:
        verdict, why = "holder", _holder(theirs.pod, our.pod, shared=shared)
    elif verdict in FINE and theirs.name != our.name:
        why = "; ".join(filter(None, ["another name for the same", why]))
    return Compared(found, key, _side(theirs), _side(our), verdict, why)


def _holder(theirs: str | None, ours: str | None, *, shared: bool) -> str:
    if theirs is None:
        return "they name no pod: the kubelet told them of none when they were scraped"
    if ours is None and shared:
        return "several pods hold the GPU: they give each of them the whole, gpustream each its part (gpu_pod_...)"
    if ours is None:
        return "gpustream names no pod: several hold the GPU, or none held it when the value was read"
    return "another pod: theirs is who held the GPU at the scrape, ours who held it when the value was read"


def judged(
    theirs: Reading, their_scale: float, ours: Sequence[Sample], our_scale: float, tolerance: float
) -> tuple[Verdict, str]:
    """Whether two series of one quantity agree, and if not, why. ``ours``: the samples of the window, oldest first."""
    last = theirs.samples[-1]
    value = last.value / their_scale
    step = 1.0 / their_scale if last.value == int(last.value) and their_scale != 1.0 else 0.0
    history = [Sample(at_s, value / our_scale) for at_s, value in ours]

    def is_close(one: float, other: float) -> bool:
        return abs(one - other) <= step + tolerance * max(abs(one), abs(other)) + 1e-9

    nearest = min(history, key=lambda sample: abs(sample.at_s - last.at_s))
    if is_close(value, nearest.value):
        return "same", ""
    once = [sample for sample in history if is_close(value, sample.value)]
    if once:
        then = min(once, key=lambda sample: abs(sample.at_s - last.at_s))
        later = last.at_s - then.at_s
        return "timing", f"theirs is what gpustream said {abs(later):.0f} s {'before' if later >= 0 else 'after'}"
    low, high = min(sample.value for sample in history), max(sample.value for sample in history)
    if low <= value <= high:
        return "timing", "theirs is between the lowest and the highest of gpustream's in the window"
    for factor in (one for way in _FACTORS for one in (way, 1.0 / way)):
        if value and low and (is_close(value / factor, nearest.value) or low <= value / factor <= high):
            return "unit", f"theirs is {factor:g} times gpustream's: another unit than its name has in gpustream"
    return "value", f"theirs is {value - nearest.value:+.6g} from gpustream's {nearest.value:.6g}, in base units"


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
    return [*found, *_http(given).mistakes()]


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
