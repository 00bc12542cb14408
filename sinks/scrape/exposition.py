"""What a scrape gets: which format, which families, rendered beside the event loop.

In:       a scraper's Accept headers; the series to show, taken on the loop when a rendering begins, which nobody
          changes.
Out:      Prometheus's text, compressed or not: families in the order of their names, each with the help and the type
          that its series have, without timestamps (a scraper adds its own). Names and labels here need no escaping, so
          version 1.0.0 and every escaping scheme that may be asked for have the same bytes as 0.0.4.
State:    what is being rendered: one thing at a time, on one thread; scrapes that ask for the same meanwhile share it.
On failure: a rendering's error is that of every scrape that waits for it; the next scrape begins again.
Source:   RFC 9110, 12.4.2 and 12.5.1; Prometheus' content negotiation and its text format, in which a counter may have
          any name. OpenMetrics is not spoken: there, and in the client library, a counter's name ends in ``_total``,
          so that a counter that a profile calls otherwise would have no type.
"""

import asyncio
import gzip
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prometheus_client import utils

from sinks.series.model import Row, SampleGroup, SeriesSet, Subject
from topics.metric import Labels

_LEVEL = 6
"""Of gzip: a fleet's text is so repetitive that the best ratio costs a tenth of the rendering."""

_number: Callable[[float], str] = utils.floatToGoString
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_A_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Names = frozenset[str] | None
"""The names of the series that are wanted; None: all."""


class GivenUp(Exception):
    """Nobody waits for the rendering any more."""


# -- formats

TEXT = "text/plain; version=0.0.4; charset=utf-8"
TEXT_1 = "text/plain; version=1.0.0; charset=utf-8"

_BY_RANGE = {
    ("text/plain", None): TEXT,
    ("text/plain", "0.0.4"): TEXT,
    ("text/plain", "1.0.0"): TEXT_1,
    ("text/*", None): TEXT,
    ("*/*", None): TEXT,
}


def accepted(accept: str) -> str:
    """The content type that an Accept header prefers of ours; text 0.0.4 if it names neither or makes no sense."""
    wanted: dict[str, float] = {}
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


def exposition(
    groups: Iterable[SampleGroup],
    given_up: Callable[[], bool] = lambda: False,
    names: Collection[str] | None = None,
) -> bytes:
    """What a scrape shows: every family that has a series, once, and every series once, the first of equals.

    :raises GivenUp: ``given_up``, asked between families, says so.
    """
    families: dict[str, tuple[Row, dict[str, float]]] = {}
    shown: set[tuple[Subject, Labels]] = set()
    for series, _, values in groups:
        if series.identity in shown:
            continue
        shown.add(series.identity)
        for row, text, value in zip(series.rows, _label_texts(series), values, strict=True):
            if names is None or row.name in names:
                families.setdefault(row.name, (row, {}))[1].setdefault(text, value)
    lines: list[str] = []
    for name in sorted(families):
        if given_up():
            raise GivenUp
        row, samples = families[name]
        lines.append(f"# HELP {name} {row.help.translate(_IN_HELP)}\n# TYPE {name} {row.kind}\n")
        lines += [f"{name}{text} {_number(value)}\n" for text, value in samples.items()]
    return "".join(lines).encode()


def _label_texts(series: SeriesSet) -> Sequence[str]:
    """All labels of each row, as text: made once, used often; rows with the same labels share them."""
    made: Sequence[str] | None = series.cache.get(_label_texts)
    if made is None:
        texts: dict[Labels, str] = {}
        for own in {row.labels for row in series.rows}:
            pairs = [f'{name}="{value.translate(_IN_A_VALUE)}"' for name, value in sorted((*series.labels, *own))]
            texts[own] = f"{{{','.join(pairs)}}}" if pairs else ""
        made = series.cache[_label_texts] = tuple([texts[row.labels] for row in series.rows])
    return made


# -- renderings


class Renderings:
    """Renders what ``series`` gives."""

    def __init__(self, series: Callable[[], Iterable[SampleGroup]]) -> None:
        self._series = series
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._under_way: dict[tuple[Names, int | None], asyncio.Future[bytes]] = {}
        self._closed = False

    async def text(self, names: Names = None) -> bytes:
        """The exposition now, or as it was when the rendering of it that is under way began."""

        def begin() -> Callable[[], bytes]:
            return partial(exposition, tuple(self._series()), lambda: self._closed, names)

        return await self._share((names, None), begin)

    async def compressed(self, names: Names = None) -> bytes:
        """The same, compressed by gzip."""
        text = await self.text(names)
        return await self._share((names, id(text)), lambda: partial(gzip.compress, text, _LEVEL))

    def close(self) -> None:
        """Give up what is under way, and what waits for it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _share(self, key: tuple[Names, int | None], begin: Callable[[], Callable[[], bytes]]) -> bytes:
        """The result of what is under way for these names and the text that is being compressed, if any; else of what
        ``begin`` gives to do."""
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
