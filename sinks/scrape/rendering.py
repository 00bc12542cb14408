"""What a scrape gets, rendered beside the event loop.

In:       the series to show, taken on the loop when a rendering begins: tuples that nobody changes.
Out:      bytes, compressed or not.
State:    what is being rendered: one thing at a time, on one thread; scrapes that ask for the same meanwhile share it.
On failure: a rendering's error is that of every scrape that waits for it; the next scrape begins again.
"""

import asyncio
import gzip
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sinks.scrape.families import Families, GivenUp, abouts
from sinks.scrape.formats import Format
from sinks.series.model import SampleGroup
from topics.metric import Profile

_LEVEL = 6
"""Of gzip: a fleet's text is so repetitive that the best ratio costs a tenth of the rendering."""

Names = frozenset[str] | None
"""The names of the series that are wanted; None: all."""

_Key = tuple[Format, Names, int | None]
"""A format, the names, and the text that is being compressed, if any."""


class Renderings:
    """Renders what ``series`` gives, in a naming profile."""

    def __init__(self, names: Profile, series: Callable[[], Iterable[SampleGroup]]) -> None:
        self._known = abouts(names)
        self._series = series
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._under_way: dict[_Key, asyncio.Future[bytes]] = {}
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

    async def _share(self, key: _Key, begin: Callable[[], Callable[[], bytes]]) -> bytes:
        """The result of what is under way under that key, else of what ``begin`` gives to do."""
        if self._closed:
            raise GivenUp
        if key not in self._under_way:
            doing = asyncio.get_running_loop().run_in_executor(self._thread, begin())
            self._under_way[key] = doing
            doing.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(self._under_way[key])

    def _end(self, key: _Key, done: "asyncio.Future[bytes]") -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; nobody may have
