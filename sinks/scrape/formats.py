"""Which exposition a scraper gets, by its Accept and Accept-Encoding headers. Pure.

In:       the headers. Out: one of three formats, each the client library's own encoder and content type; gzip or not.
Names and labels here need no escaping, so that every escaping scheme that may be asked for gives the same bytes.
Source:   RFC 9110, 12.4.2 and 12.5.1; Prometheus' content negotiation.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector


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
    for media, given in _ranges(accept):
        found = _BY_RANGE.get((media, given.get("version")))
        if found is not None:
            wanted.setdefault(found, _quality(given))
    best = max(wanted, key=wanted.__getitem__, default=TEXT)
    return best if wanted.get(best) else TEXT


def gzip_accepted(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header wants gzip."""
    wanted = {coding: _quality(given) for coding, given in _ranges(accept_encoding)}
    return wanted.get("gzip", wanted.get("*", 0.0)) > 0


def _ranges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """What a header names, each with its parameters."""
    for part in header.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        yield name, dict(text.partition("=")[::2] for text in parameters)


def _quality(given: Mapping[str, str]) -> float:
    """How much something is wanted, 0 to 1; not at all if that is no such number."""
    try:
        quality = float(given.get("q", "1"))
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
