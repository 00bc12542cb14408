"""Renders /metrics in the text format of Prometheus, on a thread beside the event loop.

In: a scraper's Accept headers; the series to show, which are collected on the loop and never change afterwards. Out:
the text, compressed: families in the order of their names, with their help and type, without timestamps, because
scrapers add their own. Names with characters other than letters, digits and ``_``, which only relabelling makes, are
written as they are if the scraper asks for ``escaping=allow-utf-8``, otherwise with ``_``.
State: the current rendering. There is one at a time, on one thread; scrapes that ask for the same meanwhile share it.
On failure: every scrape that waits for a rendering gets its error; the next scrape starts a new one.
Source: RFC 9110, 12.4.2 and 12.5.1; Prometheus' content negotiation and its text format, in which a counter may have
any name. OpenMetrics is not supported: there, and in the client library, a counter's name must end in ``_total``, so
counters with other names, which some profiles have, would have no type.
"""

import asyncio
import re
import zlib
from collections import Counter as Count
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

from prometheus_client import utils

from delivery.listening import accepted_ranges
from sinks.series.model import Row, SampleGroup, SeriesSet
from sinks.series.relabel import is_label_name, is_metric_name
from topics.metric import Labels

_LEVEL = 6
"""The level of gzip: a fleet's text is so repetitive that this costs only a tenth of the rendering."""

PIECE_BYTES = 64 * 1024
"""So much of an answer waits in memory for a client that does not take it."""

_number: Callable[[float], str] = utils.floatToGoString
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_A_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9_]")
_NOT_PLAIN_METRIC = re.compile(r"[^a-zA-Z0-9_:]")

Names = frozenset[str] | None
"""The names of the requested series; None: all."""


class GivenUp(Exception):
    """No scrape waits for the rendering any more."""


# -- formats

TEXT = "text/plain; version=0.0.4; charset=utf-8"
TEXT_1 = "text/plain; version=1.0.0; charset=utf-8"
TEXT_UTF8 = f"{TEXT_1}; escaping=allow-utf-8"

_BY_RANGE = {
    ("text/plain", None): TEXT,
    ("text/plain", "0.0.4"): TEXT,
    ("text/plain", "1.0.0"): TEXT_1,
    ("text/*", None): TEXT,
    ("*/*", None): TEXT,
}


def accepted(accept: str) -> str:
    """The supported content type that an Accept header prefers; text 0.0.4 if it has none or is malformed."""
    qualities: dict[str, float] = {}
    for media, parameters, quality in accepted_ranges(accept):
        if (content_type := _BY_RANGE.get((media, parameters.get("version")))) is not None:
            utf8 = content_type == TEXT_1 and parameters.get("escaping") == "allow-utf-8"
            qualities.setdefault(TEXT_UTF8 if utf8 else content_type, quality)
    best = max(qualities, key=qualities.__getitem__, default=TEXT)
    return best if qualities.get(best) else TEXT


# -- families


def exposition(
    groups: Iterable[SampleGroup],
    given_up: Callable[[], bool] = lambda: False,
    names: Collection[str] | None = None,
    *,
    utf8: bool = False,
) -> Iterator[bytes]:
    """The text of a scrape, a family at a time: every family that has a series, and every series once; of equal series,
    the first.

    ``utf8``: names are written as they are, with any characters.

    :raises GivenUp: ``given_up``, which is called between families, returned true.
    """
    families: dict[str, tuple[Row, dict[str, float]]] = {}
    for series, _, values in groups:
        for row, text, value in zip(series.rows, _label_texts(series, utf8=utf8), values, strict=True):
            if names is None or row.name in names:
                families.setdefault(_shown(row.name, utf8=utf8, metric=True), (row, {}))[1].setdefault(text, value)
    for shown in sorted(families):
        if given_up():
            raise GivenUp
        row, samples = families.pop(shown)
        lines = [f"# HELP {shown} {row.help.translate(_IN_HELP)}\n# TYPE {shown} {row.kind}\n"]
        if shown.startswith('"'):  # a quoted name is written among the labels
            lines += [f"{{{shown}{text and ','}{text[1:] or '}'} {_number(value)}\n" for text, value in samples.items()]
        else:
            lines += [f"{shown}{text} {_number(value)}\n" for text, value in samples.items()]
        yield "".join(lines).encode()


def _label_texts(series: SeriesSet, *, utf8: bool) -> Sequence[str]:
    """The text of all labels of each row, which the set keeps; rows with the same labels share it."""
    row_texts: Sequence[str] | None = series.cache.get((_label_texts, utf8))
    if row_texts is None:
        texts: dict[Labels, str] = {}
        for row_labels in {row.labels for row in series.rows}:
            shown = {_shown(name, utf8=utf8): value for name, value in sorted((*series.labels, *row_labels))}
            pairs = [f'{name}="{value.translate(_IN_A_VALUE)}"' for name, value in shown.items()]
            texts[row_labels] = f"{{{','.join(pairs)}}}" if pairs else ""
        row_texts = series.cache[_label_texts, utf8] = tuple([texts[row.labels] for row in series.rows])
    return row_texts


@lru_cache(maxsize=4096)
def _shown(name: str, *, utf8: bool, metric: bool = False) -> str:
    """A name as it is written: unchanged, in quotes, or with ``_`` for characters that need quotes.

    ``metric``: it is a metric's, which may have colons; a label's may not.
    """
    if (is_metric_name if metric else is_label_name)(name, "legacy"):
        return name
    if utf8:
        return f'"{name.translate(_IN_A_VALUE)}"'
    return (_NOT_PLAIN_METRIC if metric else _NOT_PLAIN).sub("_", name if not name[:1].isdigit() else f"_{name}")


# -- renderings


class Renderings:
    """Renders what ``series`` gives, compressed by gzip: a scraper that takes its answer slowly keeps little of it."""

    def __init__(self, series: Callable[[], Iterable[SampleGroup]]) -> None:
        self._series = series
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._under_way: dict[tuple[Names, bool], asyncio.Future[bytes]] = {}
        self._scrapes: Count[asyncio.Future[bytes]] = Count()  # that wait for each
        self._closed = False

    async def compressed(self, names: Names = None, *, utf8: bool = False) -> bytes:
        """The exposition now, or as it was when the rendering of it that is under way began.

        A rendering for which no scrape waits any more is given up: it keeps nobody waiting.
        """
        if self._closed:
            raise GivenUp
        key = names, utf8

        def end(done: "asyncio.Future[bytes]") -> None:
            if self._under_way.get(key) is done:
                del self._under_way[key]
            if not done.cancelled():
                done.exception()  # whoever waited has it; nobody may have

        under_way = self._under_way.get(key)
        if under_way is None or under_way.done():
            render = partial(self._render, tuple(self._series()), names, utf8=utf8)
            under_way = asyncio.get_running_loop().run_in_executor(self._thread, render)
            self._under_way[key] = under_way
            under_way.add_done_callback(end)
        self._scrapes[under_way] += 1
        try:
            return await asyncio.shield(under_way)
        finally:
            self._scrapes[under_way] -= 1
            if not self._scrapes[under_way]:
                del self._scrapes[under_way]
                under_way.cancel()

    def close(self) -> None:
        """Give up what is under way, and what waits for it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _render(self, groups: Sequence[SampleGroup], names: Names, *, utf8: bool) -> bytes:
        packer = zlib.compressobj(_LEVEL, wbits=31)
        families = exposition(groups, lambda: self._closed, names, utf8=utf8)
        return b"".join([*map(packer.compress, families), packer.flush()])


def pieces(compressed: bytes, *, packed: bool) -> Iterator[bytes]:
    """A rendering in pieces, as it is or as text."""
    if packed:
        yield from (compressed[start : start + PIECE_BYTES] for start in range(0, len(compressed), PIECE_BYTES))
        return
    unpacker, rest = zlib.decompressobj(wbits=31), compressed
    while not unpacker.eof:
        yield unpacker.decompress(rest, PIECE_BYTES)
        rest = unpacker.unconsumed_tail
