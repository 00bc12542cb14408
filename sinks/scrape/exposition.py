"""What a scrape gets: which format, which families, rendered beside the event loop.

In:       a scraper's Accept headers; the series to show, taken on the loop when a rendering begins, which nobody
          changes.
Out:      one of three formats, each the client library's own encoder and content type, compressed or not; ``Metric``
          families in the order of their names, without timestamps (a scraper adds its own). Names and labels here need
          no escaping, so every escaping scheme that may be asked for gives the same bytes.
State:    what is being rendered: one thing at a time, on one thread; scrapes that ask for the same meanwhile share it.
On failure: a rendering's error is that of every scrape that waits for it; the next scrape begins again.
Source:   RFC 9110, 12.4.2 and 12.5.1; Prometheus' content negotiation. OpenMetrics 1.0 for the types: a counter's
          sample ends in ``_total`` and its family does not, so that a counter that a profile calls otherwise has no
          type (``unknown``, in the text format ``untyped``). An info's sample ends in ``_info`` likewise (in the text
          format it is a gauge).
"""

import asyncio
import gzip
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sinks.series.labels import Labels
from sinks.series.model import Kind, SampleGroup, SeriesSet, Subject
from topics.catalogue import CATALOGUE, DERIVED, FURTHER, HOLDERS, POD_INFO
from topics.catalogue import series as catalogue_series
from topics.metric import Profile

_LEVEL = 6
"""Of gzip: a fleet's text is so repetitive that the best ratio costs a tenth of the rendering."""

Names = frozenset[str] | None
"""The names of the series that are wanted; None: all."""


class GivenUp(Exception):
    """Nobody waits for the rendering any more."""


# -- formats


class Format(NamedTuple):
    """An exposition format."""

    encode: Callable[[Collector], bytes]
    content_type: str


TEXT = Format(*choose_encoder(""))
TEXT_1 = Format(*choose_encoder("text/plain;version=1.0.0"))
OPENMETRICS = Format(*choose_encoder("application/openmetrics-text;version=1.0.0"))

_BY_RANGE: dict[tuple[str, str | None], Format] = {
    ("application/openmetrics-text", None): OPENMETRICS,
    ("application/openmetrics-text", "1.0.0"): OPENMETRICS,
    ("text/plain", None): TEXT,
    ("text/plain", "0.0.4"): TEXT,
    ("text/plain", "1.0.0"): TEXT_1,
    ("text/*", None): TEXT,
    ("*/*", None): TEXT,
}


def accepted(accept: str) -> Format:
    """The format that an Accept header prefers among ours; text 0.0.4 if it names none of them or makes no sense."""
    wanted: dict[Format, float] = {}
    for media, version, quality in _ranges(accept):
        if (found := _BY_RANGE.get((media, version))) is not None:
            wanted.setdefault(found, quality)
    best = max(wanted, key=wanted.__getitem__, default=TEXT)
    return best if wanted.get(best) else TEXT


def gzip_accepted(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header wants gzip."""
    wanted = {coding: quality for coding, _, quality in _ranges(accept_encoding)}
    return wanted.get("gzip", wanted.get("*", 0.0)) > 0


def _ranges(header: str) -> Iterator[tuple[str, str | None, float]]:
    """What a header names: its version if it says one, and how much it is wanted, 0 to 1; 0 if that makes no sense."""
    for part in header.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        given = dict(text.partition("=")[::2] for text in parameters)
        try:
            quality = float(given.get("q", "1"))
        except ValueError:
            quality = 0.0
        yield name, given.get("version"), quality if 0.0 <= quality <= 1.0 else 0.0


# -- families


class About(NamedTuple):
    """What a family says of itself: its name, its type and its help."""

    name: str
    type: str
    help: str


def abouts(names: Profile) -> dict[str, About]:
    """The family of each series name of a profile. One that several keys share says what each of them is."""
    found: dict[str, tuple[Kind, dict[str, None]]] = {}
    for key, many in catalogue_series(names).items():
        metric = CATALOGUE[key]
        for one in many:
            kind = metric.kind if one.bits is None else "gauge"
            found.setdefault(one.name, (kind, {}))[1][metric.help] = None
    for ratio in DERIVED[names]:
        found.setdefault(ratio.name, ("gauge", {}))[1][ratio.help] = None
    known = {name: _about(name, kind, " ".join(texts)) for name, (kind, texts) in found.items()}
    return known | {one.name: _about(one.name, one.kind, one.help) for one in (HOLDERS, POD_INFO, *FURTHER)}


def _about(name: str, kind: Kind, text: str) -> About:
    if name.endswith("_info"):
        return About(name.removesuffix("_info"), "info", text)
    if kind == "gauge":
        return About(name, "gauge", text)
    if name.endswith("_total"):
        return About(name.removesuffix("_total"), "counter", text)
    return About(name, "unknown", text)


class Families(Collector):
    """What a scrape shows: series as they were when this was made. ``given_up`` ends a rendering between families."""

    def __init__(
        self,
        known: Mapping[str, About],
        groups: Iterable[SampleGroup],
        given_up: Callable[[], bool] = lambda: False,
        names: Collection[str] | None = None,
    ) -> None:
        self._known, self._groups, self._given_up, self._names = known, tuple(groups), given_up, names

    def collect(self) -> Iterator[Metric]:
        """Every family that has a series, once. Of what is the same series the first is shown: it has one value."""
        samples: dict[str, list[Sample]] = {}
        shown: set[tuple[Subject, Labels]] = set()
        for series, _, values in self._groups:
            if series.identity in shown:
                continue
            shown.add(series.identity)
            for row, pairs, value in zip(series.rows, _all_labels(series), values, strict=True):
                if self._names is None or row.name in self._names:
                    samples.setdefault(row.name, []).append(Sample(row.name, pairs, value))
        for name in sorted(samples):
            if self._given_up():
                raise GivenUp
            about = self._known[name]
            metric = Metric(about.name, about.help, about.type)
            metric.samples = samples.pop(name)
            yield metric


def _all_labels(series: SeriesSet) -> Sequence[dict[str, str]]:
    """All labels of each row: made once, used often, never changed; rows with the same labels share them."""
    made: Sequence[dict[str, str]] | None = series.cache.get(_all_labels)
    if made is None:
        pairs = {row.labels: dict(sorted((*series.labels, *row.labels))) for row in series.rows}
        made = series.cache[_all_labels] = tuple(pairs[row.labels] for row in series.rows)
    return made


# -- renderings


class Renderings:
    """Renders what ``series`` gives, in a naming profile."""

    def __init__(self, names: Profile, series: Callable[[], Iterable[SampleGroup]]) -> None:
        self._known = abouts(names)
        self._series = series
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._under_way: dict[tuple[Format, Names, int | None], asyncio.Future[bytes]] = {}
        self._closed = False

    async def text(self, format_: Format, names: Names = None) -> bytes:
        """The exposition now, or as it was when the rendering of it that is under way began."""

        def begin() -> Callable[[], bytes]:
            return partial(format_.encode, Families(self._known, self._series(), lambda: self._closed, names))

        return await self._share((format_, names, None), begin)

    async def compressed(self, format_: Format, names: Names = None) -> bytes:
        """The same, compressed by gzip."""
        text = await self.text(format_, names)
        return await self._share((format_, names, id(text)), lambda: partial(gzip.compress, text, _LEVEL))

    def close(self) -> None:
        """Give up what is under way, and what waits for it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _share(self, key: tuple[Format, Names, int | None], begin: Callable[[], Callable[[], bytes]]) -> bytes:
        """The result of what is under way for a format, names and the text that is being compressed, if any; else of
        what ``begin`` gives to do."""
        if self._closed:
            raise GivenUp

        def end(done: "asyncio.Future[bytes]") -> None:
            del self._under_way[key]
            if not done.cancelled():
                done.exception()  # whoever waited has it; nobody may have

        if key not in self._under_way:
            doing = asyncio.get_running_loop().run_in_executor(self._thread, begin())
            self._under_way[key] = doing
            doing.add_done_callback(end)
        return await asyncio.shield(self._under_way[key])
