"""Series as the client library's metric families. Pure.

In:       sets of series, with their values.
Out:      ``Metric`` families in the order of their names, without timestamps (a scraper adds its own), for any of the
          library's expositions.
Source:   OpenMetrics 1.0 for the types: a counter's sample ends in ``_total`` and its family does not, so that a
          counter that a profile calls otherwise has no type (``unknown``, in the text format ``untyped``). An info's
          sample ends in ``_info`` likewise (in the text format it is a gauge).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sinks.series.labels import Labels
from sinks.series.model import Kind, SampleGroup, SeriesSet, Subject
from topics.catalogue import CATALOGUE, DERIVED, FURTHER, HOLDERS, POD_INFO
from topics.catalogue import series as catalogue_series
from topics.metric import Profile

_TOTAL = "_total"
_INFO = "_info"


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
    if name.endswith(_INFO):
        return About(name.removesuffix(_INFO), "info", text)
    if kind == "gauge":
        return About(name, "gauge", text)
    if name.endswith(_TOTAL):
        return About(name.removesuffix(_TOTAL), "counter", text)
    return About(name, "unknown", text)


class Families(Collector):
    """What a scrape shows: series as they were when this was made. ``given_up`` ends a rendering between families.

    ``names``: only the series with one of these names; None: all.
    """

    def __init__(
        self,
        known: Mapping[str, About],
        groups: Iterable[SampleGroup],
        given_up: Callable[[], bool] = lambda: False,
        names: Collection[str] | None = None,
    ) -> None:
        self._known = known
        self._groups = tuple(groups)
        self._given_up = given_up
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Every family that has a series, once."""
        samples = self._samples()
        for name in sorted(samples):
            if self._given_up():
                raise GivenUp
            about = self._known[name]
            metric = Metric(about.name, about.help, about.type)
            metric.samples = samples.pop(name)
            yield metric

    def _samples(self) -> dict[str, list[Sample]]:
        """The samples by name. Of those that are the same series the first is shown: a series has one value."""
        samples: dict[str, list[Sample]] = {}
        shown: set[tuple[Subject, Labels]] = set()
        for series, _, values in self._groups:
            if series.identity in shown:
                continue
            shown.add(series.identity)
            for row, pairs, value in zip(series.rows, _all_labels(series), values, strict=True):
                if self._names is None or row.name in self._names:
                    samples.setdefault(row.name, []).append(Sample(row.name, pairs, value))
        return samples


def _all_labels(series: SeriesSet) -> Sequence[dict[str, str]]:
    """All labels of each row: made once, used often, never changed; rows with the same labels share them."""
    made: Sequence[dict[str, str]] | None = series.cache.get(_all_labels)
    if made is None:
        pairs = {row.labels: dict(sorted((*series.labels, *row.labels))) for row in series.rows}
        made = series.cache[_all_labels] = tuple(pairs[row.labels] for row in series.rows)
    return made


class GivenUp(Exception):
    """Nobody waits for the rendering any more."""
