"""Lists and watches one resource: all of its objects, and every change, whatever the API server does.

In: a streaming list, or pages of 500 if the server has none or an object is too large, then a watch. Out: the objects,
to a :class:`Listener`.
State: the resource version to continue from, which is opaque.
On failure: the store stays as it is, and the watch is restarted: from its last version, or with a new list if the
server no longer has that version. Before a restart it waits, from 0.2 s up to 30 s, twice as long each time unless the
watch was healthy for 5 s. An object that can't be decoded is counted and skipped, and its last state stays. If a page
is too large for the memory, the next list has pages of half as many objects.

Source: "Efficient detection of changes", "Streaming lists" and "410 Gone responses" of the Kubernetes API concepts.
The events of a list have resource versions in no order: only its end, later events and bookmarks say where to go on.
"""

import asyncio
import contextlib
import logging
import math
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
LARGEST_PAGE_BYTES = 64 * 1024 * 1024  # a page is in memory twice while it is read
PAGE_WITHIN_S = 60.0
LIST_WITHIN_S = 120.0
PAGED_LIST_FACTOR = 5  # a paged list may take so many times as long as a streaming one
LARGEST_LINE_BYTES = 32 * 1024 * 1024
SHORTEST_WATCH_S, LONGEST_WATCH_S = 240, 480
BOOKMARK_WITHIN = 0.75  # bookmarks come every 60 s: one is missing if watches were silent for this share of 100 s
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
ABSENT_WAIT_S = 300.0
GONE_AFTER_S = 60.0  # a 404 of what was there before counts after so long: a proxy may answer it for a moment
HEALTHY_AFTER_S = 5.0

_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_LIST_ENDS = "k8s.io/initial-events-end"


class Listener(Generic[T]):
    """Applies the events of one resource to its store.

    ``known`` is a live view of the keys in the store, and ``key`` names the field of an object's metadata that is its
    key. ``apply`` adds or updates an object; it raises ValueError if it can't. ``drop`` removes the object with a key.
    ``wake`` is called after each event that may have changed the store. None of them blocks; any other error that they
    raise ends the watch, and with it the process.
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
        key: str,
    ) -> None:
        self._known, self._apply, self._drop, self._wake = known, apply, drop, wake
        self._key: Callable[[msgspec.Struct], str] = attrgetter(f"metadata.{key}")
        self._object, self._identity = msgspec.json.Decoder(kind), msgspec.json.Decoder(Identity)
        self._unlisted: dict[str, None] = {}
        self._undecodable = instruments.counter(names.UNDECODABLE, resource)
        self._objects = instruments.gauge(names.OBJECTS, resource)

    def begin(self) -> None:
        """Begin a full list: ``complete`` drops every object that was not put since. It may begin again before that."""
        self._unlisted = dict.fromkeys(self._known)

    def put(self, raw: bytes) -> None:
        """Add or update an object, given as JSON. If only its key can be decoded, it still counts as present."""
        try:
            content = decode(self._object, raw)
            self._apply(content)
            self._unlisted.pop(self._key(content), None)
        except (UndecodableObject, ValueError):
            self._undecodable.inc()
            with contextlib.suppress(UndecodableObject):
                self._unlisted.pop(self._key(decode(self._identity, raw)), None)
        self._changed()

    def remove(self, raw: bytes) -> None:
        """Remove an object, given as JSON in its last state."""
        try:
            self._drop(self._key(decode(self._identity, raw)))
        except UndecodableObject:
            self._undecodable.inc()
        self._changed()

    def complete(self) -> None:
        """End a full list: drop the objects that it did not have."""
        missing, self._unlisted = self._unlisted, {}
        for key in missing:
            self._drop(key)
        self._changed()

    def _changed(self) -> None:
        self._objects.set(len(self._known))
        self._wake()


class Restart(Exception):
    """Why a watch has to restart. ``relist``: with a new list. The restarts metric documents the reasons."""

    def __init__(self, reason: str, message: str, *, relist: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.relist, self.wait_s = reason, relist, wait_s


def rbac_rule(path: str) -> str:
    """The RBAC rule that allows to list and watch a path, as a ClusterRole has it."""
    parts = path.strip("/").split("/")
    group = parts[1] if parts[0] == "apis" else ""
    return f'{{apiGroups: ["{group}"], resources: [{parts[-1]}], verbs: [list, watch]}}'


def restart_for_status(path: str, status: int, body: bytes, retry_after_s: float | None = None) -> Restart:
    """The restart after a status other than success: its reason, the sentence for the log, and the pause before it."""
    text = message(body)
    wait_s = retry_after_s or 0.0
    if status in (400, 422) and ("sendInitialEvents" in text or "resourceVersionMatch" in text):
        return Restart("unsupported", f"no streaming lists: {text}", relist=True)
    if status == 410:
        return Restart("expired", text, relist=True)
    if status == 401:
        return Restart("unauthorized", f"our credentials are not accepted (401): {text}", wait_s=wait_s)
    if status == 403:
        problem = f"not allowed (403); our ClusterRole lacks {rbac_rule(path)}: {text}"
        return Restart("forbidden", problem, wait_s=wait_s)
    if status == 404:
        return Restart("absent", f"the API server has no such resource (404): {text}", relist=True, wait_s=wait_s)
    if status == 429:
        return Restart("throttled", f"the API server is too busy for us (429): {text}", wait_s=wait_s)
    if status >= 500:
        return Restart("server_error", f"the API server fails ({status}): {text}", wait_s=wait_s)
    return Restart("refused", f"an answer that makes no sense here ({status}): {text}", relist=True, wait_s=wait_s)


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


def _parse(
    decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, problem: str = "an event's object that is none"
) -> T:
    try:
        return decode(decoder, raw)
    except UndecodableObject as error:
        raise Restart("garbage", f"{problem} ({error}): {message(bytes(raw))}", relist=True) from error


class Reflector:
    """Lists and watches ``path``, such as ``/api/v1/pods``, for ``listener``; ``name`` is its name in metrics and logs.
    ``optional``: a resource that the API server lacks counts as empty, and is tried again every 5 minutes; if it was
    there before, only after a minute. ``older`` are paths of older API versions, tried in turn if the server lacks
    ``path``."""

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
        self._paths, self._path_index = (path, *older), 0
        self._optional, self._silence_s, self._list_within_s = optional, silence_s, list_within_s
        self._largest_line_bytes, self._page = largest_line_bytes, PAGE
        self._version: str | None = None
        self._streaming = True
        self._last_event_s = time.monotonic()
        self._healthy_since_s: float | None = None
        self._silent_s = 0.0
        self._wait_s = 0.0
        self._last_reason = ""
        self._served = False
        self._absent_since_s = math.inf
        self._health = ApiHealth(name, log)
        self.synced = False
        instruments.gauge(names.AGE, name).set_function(lambda: time.monotonic() - self._last_event_s)

    async def run(self) -> None:
        """List and watch until it is cancelled, whatever the API server does."""
        while True:
            self._healthy_since_s = None
            try:
                if self._version is None and not self._streaming:
                    await self._list_pages()
                restart = await self._watch()
            except Unreachable as error:
                restart = Restart(error.reason, str(error))
            except Restart as error:
                restart = error
            self._instruments.counter(names.RESTARTS, self._name, restart.reason).inc()
            await asyncio.sleep(self.prepare_restart(restart))

    def not_ready(self) -> list[str]:
        """Why it is not ready: the first list is not complete, or the API server has been away for 30 s."""
        if self.synced:
            return self._health.lasting()
        problem = self._health.problem
        return [f"{self._name}: the list is not complete yet" + (f": {problem}" if problem else "")]

    def prepare_restart(self, restart: Restart) -> float:
        """Choose version, path and mode of the next watch; returns how long to wait before it, in seconds."""
        if restart.relist:
            self._version = None
        newly_expired, self._last_reason = restart.reason == "expired" != self._last_reason, restart.reason
        if restart.reason in ("unsupported", "slow", "too_long"):
            self._streaming = False
        now_s = time.monotonic()
        self._absent_since_s = min(self._absent_since_s, now_s) if restart.reason == "absent" else math.inf
        if restart.reason == "absent":
            self._path_index = (self._path_index + 1) % len(self._paths)
            self._path = self._paths[self._path_index]
            if self._path_index:
                return 0.0
        gone = not self._served or now_s - self._absent_since_s >= GONE_AFTER_S
        if restart.reason == "absent" and self._optional and gone:  # no such resource, so it has no objects
            self._listener.begin()
            self._complete(None)
            self._health.good(f"there are none: {restart}")
            return ABSENT_WAIT_S * random.uniform(0.8, 1.2)
        failed = self._healthy_since_s is None and restart.reason not in ("unsupported", "expired")
        if failed or (self._wait_s > 0 and not self._was_healthy()):  # one short watch, as at a restart, is no problem
            self._health.bad(restart.reason, str(restart))
        if newly_expired:  # the API server is back and wants a new list: the first time without the long wait
            return FIRST_WAIT_S * random.uniform(0.5, 1)
        self._wait_s = 0.0 if self._was_healthy() else min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        return restart.wait_s + max(self._wait_s, FIRST_WAIT_S) * random.uniform(0.5, 1)

    async def _list_pages(self) -> None:
        """Read the list in pages. Raises Restart and Unreachable."""
        self._listener.begin()
        params = {"limit": str(self._page)}
        async with self._limit_list(PAGED_LIST_FACTOR * self._list_within_s):
            while True:
                try:
                    answer = await self._api.request(
                        "GET", self._path, params=params, timeout_s=PAGE_WITHIN_S, largest_bytes=LARGEST_PAGE_BYTES
                    )
                except Unreachable as error:
                    if error.reason == "cut":
                        self._page = max(1, self._page // 2)
                    raise
                if answer.status != 200:
                    raise restart_for_status(self._path, *answer)
                self._last_event_s = time.monotonic()
                page = _parse(_page, answer.body, "a list that is none")
                for item in page.items or ():
                    self._count("listed")
                    self._listener.put(bytes(item))
                if not page.metadata.next_page:
                    return self._complete(page.metadata.version)
                if page.metadata.next_page == params.get("continue"):  # a cache that ignores the query, for instance
                    raise Restart("garbage", "a list whose pages all name the same next one", relist=True)
                params["continue"] = page.metadata.next_page

    async def _watch(self) -> Restart:
        """Watch from the last version, or after a streaming list; returns why the watch ended."""
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
                    raise restart_for_status(self._path, stream.status, await stream.error_body(), stream.retry_after_s)
                async with contextlib.aclosing(stream.lines(self._largest_line_bytes)) as lines:
                    if self._version is not None or await self._receive_list(lines):
                        self._healthy_since_s = time.monotonic()
                        mended_s = HEALTHY_AFTER_S if self._health.problem else 0.0
                        mended = asyncio.get_running_loop().call_later(mended_s, self._health.good, "watching")
                        try:
                            async for line in lines:
                                self._handle(line)
                        finally:
                            mended.cancel()
            if self._version is None:
                end = Restart("empty", "the list ended before it was complete")
            elif self._was_healthy():
                end = Restart("ended", "the watch ended in good order")
            else:
                end = Restart("empty", "the watch ended as soon as it began")
        except Unreachable as error:
            end = Restart(error.reason, str(error))
        if self._healthy_since_s is None or self._last_event_s >= began_s:
            self._silent_s = 0.0
        else:
            self._silent_s += time.monotonic() - self._healthy_since_s
        if self._silent_s > BOOKMARK_WITHIN * self._silence_s:
            end.relist = True  # a server that was restored may never reach our version, and is silent, too
            self._silent_s = 0.0
        return end

    async def _receive_list(self, lines: AsyncIterator[bytes | None]) -> bool:
        """Read a streaming list; returns whether it is complete. Only its end has a version to continue from."""
        self._listener.begin()
        async with self._limit_list(self._list_within_s):
            async for line in lines:
                event = self._decode_event(line)
                if event.type != "BOOKMARK":
                    self._dispatch(event)
                    continue
                metadata = _parse(_versioned, event.object).metadata
                if (metadata.annotations or {}).get(_LIST_ENDS) == "true":
                    self._complete(metadata.version)
                    return True
        return False

    @contextlib.asynccontextmanager
    async def _limit_list(self, seconds: float) -> AsyncIterator[None]:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Restart("slow", f"the list did not end within {seconds:g} s") from error

    def _handle(self, line: bytes | None) -> None:
        event = self._decode_event(line)
        version = self._version
        if event.type in _CHANGES or event.type == "BOOKMARK":
            version = _parse(_versioned, event.object).metadata.version
        self._dispatch(event)
        self._version = version

    def _decode_event(self, line: bytes | None) -> _WatchEvent:
        """The event of a line; None: a line that was too long, whose object is in a page, which may be larger. Raises
        Restart."""
        if line is None:
            self._count("too_long")
            problem = f"an event of more than {self._largest_line_bytes} bytes; its object is listed in pages"
            raise Restart("too_long", problem, relist=True)
        event = _parse(_event, line, "a line that is no event")
        self._last_event_s = time.monotonic()
        self._count(event.type if event.type in names.EVENT_TYPES else "other")
        return event

    def _dispatch(self, event: _WatchEvent) -> None:
        """Pass a change to the listener; ignore bookmarks and events of an unknown type."""
        if event.type == "ERROR":
            raise restart_for_status(self._path, _parse(_status, event.object).code, bytes(event.object))
        if event.type == "DELETED":
            self._listener.remove(bytes(event.object))
        elif event.type in _CHANGES:
            self._listener.put(bytes(event.object))

    def _complete(self, version: str | None) -> None:
        self._listener.complete()
        self._version, self._served, self.synced = version, version is not None, True

    def _was_healthy(self) -> bool:
        return self._healthy_since_s is not None and time.monotonic() - self._healthy_since_s >= HEALTHY_AFTER_S

    def _count(self, kind: str) -> None:
        self._instruments.counter(names.EVENTS, self._name, kind).inc()
