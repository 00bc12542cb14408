"""Lists and watches one resource: all of its objects, and every change, whatever the API server does.

In: a streaming list, or pages of 500 if the server has none, then a watch. Out: the objects, to a :class:`Listener`.
State: the resource version to go on from, which is opaque.
On failure: what was known stays, and the watch is begun again: from where it was, or with a new list if the server no
longer knows that version. It waits before, from 0.2 s up to 30 s, twice as long each time unless the watch had gone
well for 5 s. An object that can't be read is counted and skipped, and what was known of it stays.

Source: "Efficient detection of changes", "Streaming lists" and "410 Gone responses" of the Kubernetes API concepts.
Resource versions of a list's own events are in no order: only its end, later events and bookmarks say where to go on.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from operator import attrgetter
from typing import Annotated, Generic, TypeVar

import msgspec

from delivery.instruments import Instruments
from delivery.kubernetes.client import SILENCE_S, ApiHealth, Client, Status, Unreachable, message
from producers.cluster import instruments as names
from producers.cluster.objects import Identity, UndecodableObject, decode

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)

PAGE = 500
PAGE_WITHIN_S = 60.0
LIST_WITHIN_S = 120.0
PAGED_LIST_TAKES = 5
LARGEST_LINE_BYTES = 32 * 1024 * 1024
SHORTEST_WATCH_S, LONGEST_WATCH_S = 240, 480
BOOKMARK_WITHIN = 0.75  # bookmarks come every 60 s: the share of the 100 s of silence after which one is missing
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
ABSENT_WAIT_S = 300.0
WENT_WELL_S = 5.0
LONGEST_RETRY_AFTER_S = 120.0

_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_LIST_ENDS = "k8s.io/initial-events-end"


class Listener(Generic[T]):
    """Brings what is known of one resource up to date with what a reflector hears of it.

    ``known`` are the keys of the known objects, as they are at any time, and ``key`` says which part of an object's
    metadata they are. ``apply`` takes an object as it is now, and raises ValueError if it can't be taken; ``drop``
    takes the key of one that is gone. ``wake`` is called after whatever may have changed something. None of them
    blocks; anything else that they raise ends the watch, and with it the process.
    """

    def __init__(
        self,
        resource: str,
        kind: type[T],
        instruments: Instruments,
        wake: Callable[[], None],
        *,
        known: Collection[str],
        apply: Callable[[T], object],
        drop: Callable[[str], object],
        key: str = "uid",
    ) -> None:
        self._known, self._apply, self._drop, self._wake = known, apply, drop, wake
        self._key: Callable[[msgspec.Struct], str] = attrgetter(f"metadata.{key}")
        self._whole, self._identity = msgspec.json.Decoder(kind), msgspec.json.Decoder(Identity)
        self._unlisted: dict[str, None] = {}
        self._undecodable = instruments.counter(names.UNDECODABLE, resource)
        self._objects = instruments.gauge(names.OBJECTS, resource)

    def begin(self) -> None:
        """A full list begins: what is not put until it is complete is gone then. It may begin again before."""
        self._unlisted = dict.fromkeys(self._known)

    def put(self, raw: bytes) -> None:
        """An object as it is now, as JSON. One that can't be read is there nevertheless, if it says which it is."""
        try:
            found = decode(self._whole, raw)
            self._apply(found)
            self._unlisted.pop(self._key(found), None)
        except (UndecodableObject, ValueError):
            self._undecodable.inc()
            with contextlib.suppress(UndecodableObject):
                self._unlisted.pop(self._key(decode(self._identity, raw)), None)
        self._changed()

    def remove(self, raw: bytes) -> None:
        """An object that is gone, as it was last, as JSON."""
        try:
            self._drop(self._key(decode(self._identity, raw)))
        except UndecodableObject:
            self._undecodable.inc()
        self._changed()

    def complete(self) -> None:
        missing, self._unlisted = self._unlisted, {}
        for key in missing:
            self._drop(key)
        self._changed()

    def _changed(self) -> None:
        self._objects.set(len(self._known))
        self._wake()


class Restart(Exception):
    """Why a watch has to begin again; ``relist``: with a new list. The instrument of restarts lists the reasons."""

    def __init__(self, reason: str, message: str, *, relist: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.relist, self.wait_s = reason, relist, wait_s


def rule(path: str) -> str:
    """The RBAC rule to list and watch a path, as a role has it; the group is in the path: ``/apis/apps/v1/...``."""
    parts = path.strip("/").split("/")
    group = parts[1] if parts[0] == "apis" else ""
    return f'{{apiGroups: ["{group}"], resources: [{parts[-1]}], verbs: [list, watch]}}'


def refused(path: str, status: int, body: bytes, retry_after_s: float | None = None) -> Restart:
    """What a status other than success means: how it is counted, the sentence for the log, and when to ask again."""
    said = message(body)
    wait_s = min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
    if status in (400, 422) and ("sendInitialEvents" in said or "resourceVersionMatch" in said):
        return Restart("unsupported", f"no streaming lists: {said}", relist=True)
    if status == 410:
        return Restart("expired", said, relist=True)
    if status == 401:
        return Restart("unauthorized", f"our credentials are not accepted (401): {said}", wait_s=wait_s)
    if status == 403:
        return Restart("forbidden", f"not allowed (403); our ClusterRole lacks {rule(path)}: {said}", wait_s=wait_s)
    if status == 404:
        return Restart("absent", f"the API server has no such resource (404): {said}", relist=True, wait_s=wait_s)
    if status == 429:
        return Restart("throttled", f"the API server is too busy for us (429): {said}", wait_s=wait_s)
    if status >= 500:
        return Restart("server_error", f"the API server fails ({status}): {said}", wait_s=wait_s)
    return Restart("refused", f"an answer that makes no sense here ({status}): {said}", relist=True, wait_s=wait_s)


class _Metadata(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(min_length=1)] = msgspec.field(name="resourceVersion")
    annotations: dict[str, str] | None = None
    next_page: str | None = msgspec.field(name="continue", default=None)


class _Versioned(msgspec.Struct):
    metadata: _Metadata


class _Page(_Versioned):
    items: list[msgspec.Raw] | None


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


_event, _versioned = msgspec.json.Decoder(_WatchEvent), msgspec.json.Decoder(_Versioned)
_page, _status = msgspec.json.Decoder(_Page), msgspec.json.Decoder(Status)


def _read(
    decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, what: str = "an event's object that is none"
) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise Restart("garbage", f"{what} ({error}): {message(bytes(raw))}", relist=True) from error


class Reflector:
    """Watches ``path``, such as ``/api/v1/pods``, for ``listener``; ``name`` is its name in metrics and the log.
    ``optional``: a resource that the API server does not have is an empty one, looked for again every 5 minutes.
    ``older`` are paths where it may be instead."""

    def __init__(
        self,
        api: Client,
        path: str,
        listener: Listener[T],
        instruments: Instruments,
        *,
        name: str,
        optional: bool = False,
        older: Sequence[str] = (),
        silence_s: float = SILENCE_S,
        list_within_s: float = LIST_WITHIN_S,
        largest_line_bytes: int = LARGEST_LINE_BYTES,
    ) -> None:
        self._api, self._path, self._listener, self._instruments, self._name = api, path, listener, instruments, name
        self._paths, self._at = (path, *older), 0
        self._optional, self._silence_s, self._list_within_s = optional, silence_s, list_within_s
        self._largest_line_bytes = largest_line_bytes
        self._version: str | None = None
        self._streaming = True
        self._heard_s = time.monotonic()
        self._well_since_s: float | None = None
        self._wait_s = 0.0
        self._last_end = ""
        self._health = ApiHealth(name, log)
        self.synced = False
        instruments.gauge(names.AGE, name).set_function(lambda: time.monotonic() - self._heard_s)

    async def run(self) -> None:
        """Watch for ever; nothing that the API does ends it."""
        while True:
            self._well_since_s = None
            try:
                if self._version is None and not self._streaming:
                    await self._list_pages()
                restart = await self._watch()
            except Unreachable as error:
                restart = Restart(error.reason, str(error))
            except Restart as why:
                restart = why
            self._instruments.counter(names.RESTARTS, self._name, restart.reason).inc()
            await asyncio.sleep(self.settle(restart))

    def not_ready(self) -> list[str]:
        """Why it is not ready: the first list is not complete, or the API server has been away for 30 s."""
        if self.synced:
            return self._health.lasting()
        problem = self._health.problem
        return [f"{self._name}: the list is not complete yet" + (f": {problem}" if problem else "")]

    def settle(self, restart: Restart) -> float:
        """Take in how a watch ended; how long to wait before the next one, in seconds."""
        if restart.relist:
            self._version = None
        lapsed, self._last_end = restart.reason == "expired" != self._last_end, restart.reason
        if restart.reason in ("unsupported", "slow"):
            self._streaming = False
        if restart.reason == "absent":
            self._at = (self._at + 1) % len(self._paths)
            self._path = self._paths[self._at]
            if self._at:
                return 0.0
        if restart.reason == "absent" and self._optional:  # no such resource, and so none of its objects
            self._listener.begin()
            self._complete(None)
            self._health.good(f"there are none: {restart}")
            return ABSENT_WAIT_S * random.uniform(0.8, 1.2)
        if self._well_since_s is None and restart.reason not in ("unsupported", "expired"):
            self._health.bad(restart.reason, str(restart))
        if lapsed:  # the API server is back and asks for a new list: once without a wait
            return FIRST_WAIT_S * random.uniform(0.5, 1)
        self._wait_s = 0.0 if self._went_well() else min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        return restart.wait_s + max(self._wait_s, FIRST_WAIT_S) * random.uniform(0.5, 1)

    async def _list_pages(self) -> None:
        self._listener.begin()
        params = {"limit": str(PAGE)}
        async with self._ends_within(PAGED_LIST_TAKES * self._list_within_s):
            while True:
                answer = await self._api.request("GET", self._path, params=params, timeout_s=PAGE_WITHIN_S)
                if answer.status != 200:
                    raise refused(self._path, *answer)
                self._heard_s = time.monotonic()
                page = _read(_page, answer.body, "a list that is none")
                for item in page.items or ():
                    self._count("listed")
                    self._listener.put(bytes(item))
                if not page.metadata.next_page:
                    return self._complete(page.metadata.version)
                params["continue"] = page.metadata.next_page

    async def _watch(self) -> Restart:
        """Watch, from the version that is known or after a streaming list; why that ended."""
        params = {"watch": "1", "allowWatchBookmarks": "true"}
        params["timeoutSeconds"] = str(random.randint(SHORTEST_WATCH_S, LONGEST_WATCH_S))
        if self._version is not None:
            params["resourceVersion"] = self._version
        else:
            params |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        began_s = time.monotonic()
        try:
            async with self._api.stream(self._path, params, silence_s=self._silence_s) as stream:
                if stream.status != 200:
                    raise refused(self._path, stream.status, await stream.error_body(), stream.retry_after_s)
                async with contextlib.aclosing(stream.lines(self._largest_line_bytes)) as lines:
                    if self._version is not None or await self._read_list(lines):
                        self._well_since_s = time.monotonic()
                        self._health.good("watching")
                        async for line in lines:
                            self._take(line)
            if self._version is None:
                end = Restart("empty", "the list ended before it was complete")
            elif self._went_well():
                end = Restart("ended", "the watch ended in good order")
            else:
                end = Restart("empty", "the watch ended as soon as it began")
        except Unreachable as error:
            end = Restart(error.reason, str(error))
        went_silent = self._well_since_s is not None and self._heard_s < began_s
        if went_silent and time.monotonic() - began_s > BOOKMARK_WITHIN * self._silence_s:
            end.relist = True  # a server that never will know our version is silent too: one that was restored
        return end

    async def _read_list(self, lines: AsyncIterator[bytes | None]) -> bool:
        """The beginning of a streaming list; whether it is complete. Only its end's version says where to go on."""
        self._listener.begin()
        async with self._ends_within(self._list_within_s):
            async for line in lines:
                if line is None:
                    self._count("too_long")
                    continue
                event = self._decoded(line)
                if event.type != "BOOKMARK":
                    self._pass_on(event)
                    continue
                metadata = _read(_versioned, event.object).metadata
                if (metadata.annotations or {}).get(_LIST_ENDS) == "true":
                    self._complete(metadata.version)
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

    def _take(self, line: bytes | None) -> None:
        if line is None:
            self._count("too_long")
            why = f"an event of more than {self._largest_line_bytes} bytes was dropped"
            raise Restart("too_long", why, relist=True)
        event = self._decoded(line)
        version = self._version
        if event.type in _CHANGES or event.type == "BOOKMARK":
            version = _read(_versioned, event.object).metadata.version
        self._pass_on(event)
        self._version = version

    def _decoded(self, line: bytes) -> _WatchEvent:
        event = _read(_event, line, "a line that is no event")
        self._heard_s = time.monotonic()
        self._count(event.type if event.type in names.EVENT_TYPES else "other")
        return event

    def _pass_on(self, event: _WatchEvent) -> None:
        """A change, to the listener; bookmarks and events of an unknown type are none."""
        if event.type == "ERROR":
            raise refused(self._path, _read(_status, event.object).code, bytes(event.object))
        if event.type == "DELETED":
            self._listener.remove(bytes(event.object))
        elif event.type in _CHANGES:
            self._listener.put(bytes(event.object))

    def _complete(self, version: str | None) -> None:
        self._listener.complete()
        self._version, self.synced = version, True

    def _went_well(self) -> bool:
        return self._well_since_s is not None and time.monotonic() - self._well_since_s >= WENT_WELL_S

    def _count(self, kind: str) -> None:
        self._instruments.counter(names.EVENTS, self._name, kind).inc()
