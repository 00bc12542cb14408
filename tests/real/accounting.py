"""Whether a process accounts for all that it received, by its own metrics: one claim, for any test at any moment."""

import re
from collections import Counter, defaultdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

_RECEIVED = {"records_read_total", "ticks_made_total"}
_ENDS = (
    "records_delivered_total",
    "records_duplicate_total",
    "records_dropped_total",
    "records_dead_lettered_total",
    "records_released_total",
    "records_held",
    "ticks_sent_total",
    "ticks_dropped_total",
    "ticks_held",
)
_NAME = re.compile(rf"gpustream_(\w+?)_({'|'.join((*_RECEIVED, *_ENDS))})")

Books = dict[tuple[str, str], Counter[str]]
"""By component and topic (empty if it tells no topics apart): how many records were received, ended in each way, are
held, or were given back."""


def books(metrics: str) -> Books:
    """The counts of a process's records, from the text of its ``/metrics``."""
    totals: Books = defaultdict(Counter)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if named := _NAME.fullmatch(sample.name):
                end = "received" if named[2] in _RECEIVED else named[2]
                totals[named[1], sample.labels.get("topic", "")][end] += int(sample.value)
    return totals


def unaccounted(totals: Books) -> list[str]:
    """The errors in these books: a negative count, or a topic whose outcomes do not add up to what it received."""
    return [
        f"{component} {topic}: {dict(ends)}"
        for (component, topic), ends in totals.items()
        if min(ends.values()) < 0 or ends["received"] != ends.total() - ends["received"]
    ]


def assert_accounted(metrics: str | CollectorRegistry) -> Books:
    """received = delivered + duplicate + dropped + dead-lettered + given back + held, for each topic that is read.

    ``metrics``: the text of ``/metrics``, or a registry. Returns the books, for a test that knows more of them. A
    process that has read nothing has none.
    """
    totals = books(metrics if isinstance(metrics, str) else generate_latest(metrics).decode())
    assert unaccounted(totals) == []
    return totals
