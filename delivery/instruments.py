"""A component's own metrics as a table: the code, the exposition and the docs read the same rows."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Instrument(NamedTuple):
    """One metric of a component: its full name (counters end in ``_total``), kind, help, label names and buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def named(rows: Iterable[Instrument], *names: str) -> tuple[Instrument, ...]:
    """The rows that components have in common, under their full names in one component. ``names`` are in the order of
    the rows, and each ends with its row's name: grep finds a whole name in the source."""
    instruments = []
    for row, name in zip(rows, names, strict=True):
        if not name.endswith(f"_{row.name}"):
            raise ValueError(f"{name} stands where the name of {row.name} belongs")
        instruments.append(row._replace(name=name))
    return tuple(instruments)


class Instruments:
    """The instruments of one component, made from its table in a registry of its own."""

    def __init__(self, table: Iterable[Instrument]) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._labelled: dict[tuple[str, tuple[str, ...]], Counter] = {}  # labels() takes a microsecond
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, kind, text, labels, buckets in table:
            if kind == "counter":
                self._counters[name] = Counter(name, text, labels, registry=self.registry)
            elif kind == "gauge":
                self._gauges[name] = Gauge(name, text, labels, registry=self.registry)
            else:
                bounds = buckets or Histogram.DEFAULT_BUCKETS
                self._histograms[name] = Histogram(name, text, labels, registry=self.registry, buckets=bounds)

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter of that name, at those label values."""
        counter = self._labelled.get((name, labels))
        if counter is None:
            counter = self._counters[name].labels(*labels) if labels else self._counters[name]
            self._labelled[name, labels] = counter
        return counter

    def gauge(self, name: str, *labels: str) -> Gauge:
        """The gauge of that name, at those label values."""
        return self._gauges[name].labels(*labels) if labels else self._gauges[name]

    def remove_gauge(self, name: str, *labels: str) -> None:
        """Show the gauge of that name at those label values no longer. Its next use begins it again."""
        self._gauges[name].remove(*labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram of that name, at those label values."""
        return self._histograms[name].labels(*labels) if labels else self._histograms[name]
