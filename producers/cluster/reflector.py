"""Everything of one resource, and every change of it, correct through whatever the API server does.

In: a streaming list, or pages of 500 where the server has none, then a watch. Out: calls of a :class:`Listener`.
State: the resource version to go on from, which is opaque.
On failure: what was known stays, and the watch is begun again: from where it was, or with a new list where that is not
known to the server any more. After a wait that doubles from 0.2 s to 30 s unless it had gone well for 5 s.

Source: "Efficient detection of changes", "Streaming lists" and "410 Gone responses" of the Kubernetes API concepts.
Resource versions of a list's own events are in no order: only its end, later events and bookmarks say where to go on.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, NamedTuple, Protocol, TypeVar

import msgspec

from delivery.instruments import Instruments
from producers.cluster import instruments as names
from producers.cluster.client import SILENCE_S, Client, Status, Unreachable, message
from producers.cluster.condition import Condition

T = TypeVar("T")

log = logging.getLogger(__name__)

PAGE = 500
PAGE_WITHIN_S = 60.0
LIST_WITHIN_S = 120.0
PAGED_LIST_TAKES = 5
LARGEST_LINE_BYTES = 32 * 1024 * 1024
SHORTEST_WATCH_S, LONGEST_WATCH_S = 240, 480
BOOKMARK_WITHIN = 0.75
"""Bookmarks come every 60 s: the share of the 100 s of silence after which one is missing."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
ABSENT_WAIT_S = 300.0
WENT_WELL_S = 5.0

_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_LIST_ENDS = "k8s.io/initial-events-end"

LONGEST_RETRY_AFTER_S = 120.0


class Restart(Exception):
    """Why a watch has to begin again; ``anew``: with a new list. ``reason`` is one of RESTART_REASONS."""

    def __init__(self, reason: str, message: str, *, anew: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.anew, self.wait_s = reason, anew, wait_s


class Resource(NamedTuple):
    """What a path names: ``/apis/apps/v1/replicasets`` is replicasets of the group apps."""

    group: str
    name: str

    @classmethod
    def of(cls, path: str) -> "Resource":
        """The resource of an API path."""
        parts = path.strip("/").split("/")
        return cls(parts[1] if parts[0] == "apis" else "", parts[-1])

    def rule(self, *verbs: str) -> str:
        """The RBAC rule that allows these verbs, as it is written in a role."""
        return f'{{apiGroups: ["{self.group}"], resources: [{self.name}], verbs: [{", ".join(verbs)}]}}'


def refused(resource: Resource, status: int, body: bytes, retry_after_s: float | None = None) -> Restart:
    """What a status that is no success means: how it is counted, said, and when it is worth asking again."""
    said = message(body)
    wait_s = min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
    if status in (400, 422) and ("sendInitialEvents" in said or "resourceVersionMatch" in said):
        return Restart("unsupported", f"no streaming lists: {said}", anew=True)
    if status == 410:
        return Restart("expired", said, anew=True)
    if status == 401:
        return Restart("unauthorized", f"our credentials are not accepted (401): {said}", wait_s=wait_s)
    if status == 403:
        rule = resource.rule("list", "watch")
        return Restart("forbidden", f"not allowed (403); our ClusterRole lacks {rule}: {said}", wait_s=wait_s)
    if status == 404:
        return Restart("absent", f"the API server has no such resource (404): {said}", anew=True, wait_s=wait_s)
    if status == 429:
        return Restart("throttled", f"the API server is too busy for us (429): {said}", wait_s=wait_s)
    if status >= 500:
        return Restart("server_error", f"the API server fails ({status}): {said}", wait_s=wait_s)
    return Restart("refused", f"an answer that makes no sense here ({status}): {said}", anew=True, wait_s=wait_s)


class Listener(Protocol):
    """Who is told, on the event loop; never blocks. What it raises ends the watch, and with it the process."""

    def begin(self) -> None:
        """A full list begins: what is not put until it is complete is gone then. It may begin again before."""

    def put(self, raw: bytes) -> None:
        """An object as it is now, as JSON."""

    def remove(self, raw: bytes) -> None:
        """An object that is gone, as it was at last, as JSON."""

    def complete(self) -> None:
        """The full list was put."""


Version = Annotated[str, msgspec.Meta(min_length=1)]


class _Metadata(msgspec.Struct):
    version: Version = msgspec.field(name="resourceVersion")


class _BookmarkMetadata(_Metadata):
    annotations: dict[str, str] | None = None


class _PageMetadata(_Metadata):
    next_page: str | None = msgspec.field(name="continue", default=None)


class _Object(msgspec.Struct):
    metadata: _Metadata


class _Bookmark(msgspec.Struct):
    metadata: _BookmarkMetadata


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Page(msgspec.Struct):
    metadata: _PageMetadata
    items: list[msgspec.Raw] | None


_event = msgspec.json.Decoder(_Event)
_object = msgspec.json.Decoder(_Object)
_bookmark = msgspec.json.Decoder(_Bookmark)
_page = msgspec.json.Decoder(_Page)
_status = msgspec.json.Decoder(Status)


class Reflector:
    """Watches ``path``, such as ``/api/v1/pods``, for ``listener``; ``name`` is what metrics and the log call it.

    ``optional``: a resource that the API server does not have is an empty one, looked for again every 5 minutes.
    """

    def __init__(
        self,
        api: Client,
        path: str,
        listener: Listener,
        instruments: Instruments,
        *,
        name: str,
        optional: bool = False,
        silence_s: float = SILENCE_S,
        list_within_s: float = LIST_WITHIN_S,
        largest_line_bytes: int = LARGEST_LINE_BYTES,
    ) -> None:
        self._api, self._path, self._listener, self._instruments, self._name = api, path, listener, instruments, name
        self._optional, self._silence_s, self._list_within_s = optional, silence_s, list_within_s
        self._largest_line_bytes = largest_line_bytes
        self._resource = Resource.of(path)
        self._version: str | None = None
        self._streaming = True
        self._heard_s = time.monotonic()
        self._well_since_s: float | None = None
        self._wait_s = 0.0
        self._last_end = ""
        self._condition = Condition(name, log)
        self.synced = False
        instruments.gauge(names.AGE, name).set_function(lambda: time.monotonic() - self._heard_s)

    async def run(self) -> None:
        """Watch for ever; nothing that the API does ends it."""
        while True:
            restart = await self._attempt()
            self._instruments.counter(names.RESTARTS, self._name, restart.reason).inc()
            await asyncio.sleep(self._settle(restart))

    def not_ready(self) -> list[str]:
        """Why it is not ready: the first list is not complete, or the API server has been away for 30 s."""
        if self.synced:
            return self._condition.lasting()
        problem = self._condition.problem
        return [f"{self._name}: the list is not complete yet" + (f": {problem}" if problem else "")]

    async def _attempt(self) -> Restart:
        """List where there is nothing to go on from, and watch for as long as it goes well; how that ended."""
        self._well_since_s = None
        try:
            if self._version is None and not self._streaming:
                await self._list_pages()
            return await self._watch()
        except Unreachable as error:
            return Restart(error.reason, str(error))
        except Restart as restart:
            return restart

    def _settle(self, restart: Restart) -> float:
        """Take in how an attempt ended; how long to wait before the next one, in seconds."""
        if restart.anew:
            self._version = None
        lapsed, self._last_end = restart.reason == "expired" != self._last_end, restart.reason
        if restart.reason in ("unsupported", "slow"):
            self._streaming = False
        if restart.reason == "absent" and self._optional:
            self._be_empty(str(restart))
            return ABSENT_WAIT_S * random.uniform(0.8, 1.2)
        if self._well_since_s is None and restart.reason not in ("unsupported", "expired"):
            self._condition.bad(restart.reason, str(restart))
        if lapsed:  # the API server is back and told us to list anew: not to be waited for, but once
            return FIRST_WAIT_S * random.uniform(0.5, 1)
        self._wait_s = 0.0 if self._went_well() else min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        return restart.wait_s + max(self._wait_s, FIRST_WAIT_S) * random.uniform(0.5, 1)

    def _be_empty(self, why: str) -> None:
        """There is no such resource, and so none of its objects."""
        self._listener.begin()
        self._complete(None)
        self._condition.good(f"there are none: {why}")

    async def _list_pages(self) -> None:
        self._listener.begin()
        params = {"limit": str(PAGE)}
        async with self._ends_within(PAGED_LIST_TAKES * self._list_within_s):
            while True:
                page = await self._page(params)
                for item in page.items or ():
                    self._count("listed")
                    self._listener.put(bytes(item))
                if not page.metadata.next_page:
                    return self._complete(page.metadata.version)
                params["continue"] = page.metadata.next_page

    async def _page(self, params: Mapping[str, str]) -> _Page:
        answer = await self._api.request("GET", self._path, params=params, timeout_s=PAGE_WITHIN_S)
        if answer.status != 200:
            raise refused(self._resource, *answer)
        self._heard_s = time.monotonic()
        try:
            return _page.decode(answer.body)
        except msgspec.DecodeError as error:
            raise _garbage("a list that is none", answer.body, error) from error

    async def _watch(self) -> Restart:
        began_s = time.monotonic()
        try:
            await self._read_stream()
            end = self._ended()
        except Unreachable as error:
            end = Restart(error.reason, str(error))
        went_silent = self._well_since_s is not None and self._heard_s < began_s
        if went_silent and time.monotonic() - began_s > BOOKMARK_WITHIN * self._silence_s:
            end.anew = True  # so is a server that does not know our version yet, or never will: one that was restored
        return end

    def _ended(self) -> Restart:
        """The server ended the watch in good order."""
        if self._version is None:
            return Restart("empty", "the list ended before it was complete")
        if self._went_well():
            return Restart("ended", "the watch ended in good order")
        return Restart("empty", "the watch ended as soon as it began")

    async def _read_stream(self) -> None:
        async with self._api.stream(self._path, self._params(), silence_s=self._silence_s) as stream:
            if stream.status != 200:
                raise refused(self._resource, stream.status, await stream.error_body(), stream.retry_after_s)
            async with contextlib.aclosing(stream.lines(self._largest_line_bytes)) as lines:
                if self._version is not None or await self._read_list(lines):
                    self._is_well()
                    async for line in lines:
                        self._take(line)

    def _params(self) -> dict[str, str]:
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(SHORTEST_WATCH_S, LONGEST_WATCH_S)),
        }
        if self._version is not None:
            return {**params, "resourceVersion": self._version}
        return {**params, "sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}

    async def _read_list(self, lines: AsyncIterator[bytes | None]) -> bool:
        """The beginning of a streaming list; whether it is complete, and not only over."""
        self._listener.begin()
        async with self._ends_within(self._list_within_s):
            async for line in lines:
                if line is None:
                    self._count("too_long")
                elif self._take_listed(line):
                    return True
        return False

    @contextlib.asynccontextmanager
    async def _ends_within(self, seconds: float) -> AsyncIterator[None]:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Restart("slow", f"the list did not end within {seconds:g} s") from error

    def _take_listed(self, line: bytes) -> bool:
        """One event of a streaming list; whether it was its end. No version but the end's says where to go on."""
        event = self._decoded(line)
        if event.type != "BOOKMARK":
            self._tell(event)
            return False
        metadata = _read(_bookmark, event.object).metadata
        if (metadata.annotations or {}).get(_LIST_ENDS) != "true":
            return False
        self._complete(metadata.version)
        return True

    def _take(self, line: bytes | None) -> None:
        """One event after the list."""
        if line is None:
            self._count("too_long")
            raise Restart("too_long", f"an event of more than {self._largest_line_bytes} bytes was dropped", anew=True)
        event = self._decoded(line)
        if event.type in _CHANGES:
            version = _read(_object, event.object).metadata.version
            self._tell(event)
            self._version = version
        elif event.type == "BOOKMARK":
            self._version = _read(_object, event.object).metadata.version
        else:
            self._tell(event)

    def _decoded(self, line: bytes) -> _Event:
        try:
            event = _event.decode(line)
        except msgspec.DecodeError as error:
            raise _garbage("a line that is no event", line, error) from error
        self._heard_s = time.monotonic()
        self._count(event.type if event.type in names.EVENT_TYPES else "other")
        return event

    def _tell(self, event: _Event) -> None:
        """Pass a change on; an event of an unknown type says nothing to us."""
        if event.type == "ERROR":
            status = _read(_status, event.object)
            raise refused(self._resource, status.code, bytes(event.object))
        if event.type == "DELETED":
            self._listener.remove(bytes(event.object))
        elif event.type in _CHANGES:
            self._listener.put(bytes(event.object))

    def _complete(self, version: str | None) -> None:
        self._listener.complete()
        self._version, self.synced = version, True

    def _is_well(self) -> None:
        self._well_since_s = time.monotonic()
        self._condition.good("watching")

    def _went_well(self) -> bool:
        return self._well_since_s is not None and time.monotonic() - self._well_since_s >= WENT_WELL_S

    def _count(self, kind: str) -> None:
        self._instruments.counter(names.EVENTS, self._name, kind).inc()


def _read(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise _garbage("an event's object that is none", bytes(raw), error) from error


def _garbage(what: str, body: bytes, error: Exception) -> Restart:
    return Restart("garbage", f"{what} ({error}): {message(body)}", anew=True)
