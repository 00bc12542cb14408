"""What a scrape gets: which format, which families, rendered beside the event loop.

In:       a scraper's Accept headers; the series to show, taken on the loop when a rendering begins, which nobody
          changes.
Out:      Prometheus's text, compressed or not: families in the order of their names, each with the help and the type
          that its series have, without timestamps (a scraper adds its own). Only rules of relabelling make names with
          other characters than letters, digits and ``_``: they are written as they are for whoever asks for
          ``escaping=allow-utf-8``, else with ``_``.
State:    what is being rendered: one thing at a time, on one thread; scrapes that ask for the same meanwhile share it.
On failure: a rendering's error is that of every scrape that waits for it; the next scrape begins again.
Source:   RFC 9110, 12.4.2 and 12.5.1; Prometheus' content negotiation and its text format, in which a counter may have
          any name. OpenMetrics is not spoken: there, and in the client library, a counter's name ends in ``_total``,
          so that a counter that a profile calls otherwise would have no type.
"""

import asyncio
import gzip
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

from prometheus_client import utils

from sinks.series.model import Row, SampleGroup, SeriesSet
from topics.metric import Labels

_LEVEL = 6
"""Of gzip: a fleet's text is so repetitive that the best ratio costs a tenth of the rendering."""

_number: Callable[[float], str] = utils.floatToGoString
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_A_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_PLAIN = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9_:]")

Names = frozenset[str] | None
"""The names of the series that are wanted; None: all."""


class GivenUp(Exception):
    """Nobody waits for the rendering any more."""


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
    """The content type that an Accept header prefers of ours; text 0.0.4 if it names neither or makes no sense."""
    wanted: dict[str, float] = {}
    for media, given, quality in _ranges(accept):
        if (found := _BY_RANGE.get((media, given.get("version")))) is not None:
            utf8 = found == TEXT_1 and given.get("escaping") == "allow-utf-8"
            wanted.setdefault(TEXT_UTF8 if utf8 else found, quality)
    best = max(wanted, key=wanted.__getitem__, default=TEXT)
    return best if wanted.get(best) else TEXT


def gzip_accepted(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header wants gzip."""
    wanted = {coding: quality for coding, _, quality in _ranges(accept_encoding)}
    return wanted.get("gzip", wanted.get("*", 0.0)) > 0


def _ranges(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """What a header names: its parameters, and how much it is wanted, 0 to 1; 0 if that makes no sense."""
    for part in header.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        given = dict(text.partition("=")[::2] for text in parameters)
        try:
            quality = float(given.get("q", "1"))
        except ValueError:
            quality = 0.0
        yield name, given, quality if 0.0 <= quality <= 1.0 else 0.0


# -- families


def exposition(
    groups: Iterable[SampleGroup],
    given_up: Callable[[], bool] = lambda: False,
    names: Collection[str] | None = None,
    *,
    utf8: bool = False,
) -> bytes:
    """What a scrape shows: every family that has a series, once, and every series once, the first of equals.

    ``utf8``: names are written as they are, whatever is in them.

    :raises GivenUp: ``given_up``, asked between families, says so.
    """
    families: dict[str, tuple[Row, dict[str, float]]] = {}
    for series, _, values in groups:
        for row, text, value in zip(series.rows, _label_texts(series, utf8=utf8), values, strict=True):
            if names is None or row.name in names:
                families.setdefault(_shown(row.name, utf8=utf8), (row, {}))[1].setdefault(text, value)
    lines: list[str] = []
    for shown in sorted(families):
        if given_up():
            raise GivenUp
        row, samples = families[shown]
        lines.append(f"# HELP {shown} {row.help.translate(_IN_HELP)}\n# TYPE {shown} {row.kind}\n")
        if shown.startswith('"'):  # it stands among the labels
            lines += [f"{{{shown}{text and ','}{text[1:] or '}'} {_number(value)}\n" for text, value in samples.items()]
        else:
            lines += [f"{shown}{text} {_number(value)}\n" for text, value in samples.items()]
    return "".join(lines).encode()


def _label_texts(series: SeriesSet, *, utf8: bool) -> Sequence[str]:
    """All labels of each row, as text: made once, used often; rows with the same labels share them."""
    made: Sequence[str] | None = series.cache.get((_label_texts, utf8))
    if made is None:
        texts: dict[Labels, str] = {}
        for own in {row.labels for row in series.rows}:
            shown = {_shown(name, utf8=utf8): value for name, value in sorted((*series.labels, *own))}
            pairs = [f'{name}="{value.translate(_IN_A_VALUE)}"' for name, value in shown.items()]
            texts[own] = f"{{{','.join(pairs)}}}" if pairs else ""
        made = series.cache[_label_texts, utf8] = tuple([texts[row.labels] for row in series.rows])
    return made


@lru_cache(maxsize=4096)
def _shown(name: str, *, utf8: bool) -> str:
    """A name as it is written: as it is, in quotes, or with ``_`` in place of what only quotes allow."""
    if _PLAIN.fullmatch(name):
        return name
    if utf8:
        return f'"{name.translate(_IN_A_VALUE)}"'
    return _NOT_PLAIN.sub("_", name if not name[:1].isdigit() else f"_{name}")


# -- renderings


class Renderings:
    """Renders what ``series`` gives."""

    def __init__(self, series: Callable[[], Iterable[SampleGroup]]) -> None:
        self._series = series
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._under_way: dict[tuple[Names, bool, int | None], asyncio.Future[bytes]] = {}
        self._closed = False

    async def text(self, names: Names = None, *, utf8: bool = False) -> bytes:
        """The exposition now, or as it was when the rendering of it that is under way began."""

        def begin() -> Callable[[], bytes]:
            return partial(exposition, tuple(self._series()), lambda: self._closed, names, utf8=utf8)

        return await self._share((names, utf8, None), begin)

    async def compressed(self, names: Names = None, *, utf8: bool = False) -> bytes:
        """The same, compressed by gzip."""
        text = await self.text(names, utf8=utf8)
        return await self._share((names, utf8, id(text)), lambda: partial(gzip.compress, text, _LEVEL))

    def close(self) -> None:
        """Give up what is under way, and what waits for it."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _share(self, key: tuple[Names, bool, int | None], begin: Callable[[], Callable[[], bytes]]) -> bytes:
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
