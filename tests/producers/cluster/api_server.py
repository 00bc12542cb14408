"""A fake API server: it keeps objects, serves them as Kubernetes does, and fails in any way that a test asks for.

It serves streaming lists, watches with bookmarks, pages, single objects, and writes that hold to resourceVersion.
A behaviour given to :meth:`ApiServer.next` replaces the answer to one later request.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Json = dict[str, Any]
Behaviour = Callable[["Request", "Reply"], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """A request, as it was read."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def lists(self) -> bool:
        """Whether it begins a list, streaming or in pages."""
        return "sendInitialEvents" in self.params or ("limit" in self.params and "continue" not in self.params)


class Reply:
    """The answer to a request, in every form, malformed ones too."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def answer(self, status: int, body: Json | bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """A whole answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(content))}
        await self.raw(_head(status, sent) + content)

    async def status(self, code: int, message: str = "", **headers: str) -> None:
        """A failure as the API server writes it."""
        await self.answer(code, status_object(code, message), {k.replace("_", "-"): v for k, v in headers.items()})

    async def begin(self) -> None:
        """The head of a chunked answer."""
        await self.raw(_head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}))

    async def piece(self, content: bytes) -> None:
        """A chunk of it."""
        await self.raw(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    async def event(self, kind: str, content: Json) -> None:
        """An event of a watch, on a line."""
        await self.piece(json.dumps({"type": kind, "object": content}).encode() + b"\n")

    async def bookmark(self, version: int | str, *, ends_list: bool = False) -> None:
        """A bookmark, or the one that ends a streaming list."""
        annotations = {"k8s.io/initial-events-end": "true"} if ends_list else None
        metadata = {"resourceVersion": str(version), "annotations": annotations}
        await self.event("BOOKMARK", {"kind": "Pod", "metadata": metadata, "spec": {"containers": None}})

    async def end(self) -> None:
        """The end of a chunked answer."""
        await self.raw(b"0\r\n\r\n")

    async def raw(self, content: bytes) -> None:
        """Bytes, sent as they are."""
        self._writer.write(content)
        await self._writer.drain()

    def reset(self) -> None:
        """Reset the connection."""
        if not self._writer.is_closing():
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._writer.transport.abort()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def status_object(code: int, message: str = "") -> Json:
    """The API's object for a failure."""
    reason = {410: "Expired", 403: "Forbidden", 409: "Conflict", 404: "NotFound"}.get(code, "")
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


@dataclass
class ApiServer:
    """Start it with ``async with``. ``objects`` are by the path of their collection, then by name.

    ``streaming`` False: it has no streaming lists, as before Kubernetes 1.32, and in 1.33.
    """

    streaming: bool = True
    page_size: int | None = None
    tokens: set[str] | None = None
    served: set[str] | None = None
    objects: dict[str, dict[str, Json]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._version = itertools.count(1000)
        self.version = next(self._version)
        self._faults: list[Behaviour] = []
        self._watchers: dict[str, set[asyncio.Queue[tuple[str, Json]]]] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The address that it serves at."""
        return f"http://127.0.0.1:{self.port}"

    def next(self, *behaviours: Behaviour) -> None:
        """Replace the answers to the next requests, one behaviour for each."""
        self._faults.extend(behaviours)

    def mend(self) -> None:
        """Forget the behaviours that are left."""
        self._faults.clear()

    @property
    def faults_left(self) -> int:
        """How many of these behaviours are still unused."""
        return len(self._faults)

    def requests_for(self, path: str) -> list[Request]:
        """The requests for that path so far."""
        return [request for request in self.requests if request.path == path]

    def put(self, collection: str, content: Json) -> Json:
        """Create or change an object, and notify the watches."""
        name = content["metadata"]["name"]
        collection_objects = self.objects.setdefault(collection, {})
        kind = "MODIFIED" if name in collection_objects else "ADDED"
        collection_objects[name] = self._stamped(content)
        self.notify(collection, kind, collection_objects[name])
        return collection_objects[name]

    def delete(self, collection: str, name: str) -> None:
        """Delete an object, and notify the watches."""
        self.notify(collection, "DELETED", self._stamped(self.objects[collection].pop(name)))

    def notify(self, collection: str, kind: str, content: Json) -> None:
        """Send an event to the watches of that collection."""
        for queue in self._watchers.get(collection, ()):
            queue.put_nowait((kind, content))

    def watchers(self, collection: str) -> int:
        """How many watches of that collection are open."""
        return len(self._watchers.get(collection, ()))

    async def drop(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            Reply(writer).reset()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Stop serving, until :meth:`start`."""
        if self._server is not None:
            self._server.close()
        await self.drop()

    async def start(self) -> None:
        """Serve, at the same port as before."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, reuse_address=True)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> "ApiServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _stamped(self, content: Json) -> Json:
        self.version = next(self._version)
        return {**content, "metadata": {**content["metadata"], "resourceVersion": str(self.version)}}

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._respond(await _request(reader), Reply(writer))
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _respond(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        if self._faults:
            return await self._faults.pop(0)(request, reply)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and token not in self.tokens:
            return await reply.status(401, "Unauthorized")
        if request.method in ("POST", "PUT"):
            return await self._write(request, reply)
        if request.path not in self.objects and self._single(request.path) is not None:
            return await reply.answer(200, self._single(request.path) or {})
        if request.path not in self.objects:
            gone = {
                **status_object(404, f"{request.path} not found"),
                "details": {"name": request.path.rpartition("/")[2]},
            }
            return await reply.answer(404, gone)
        if "watch" in request.params:
            return await self.watch(request, reply)
        return await self._list(request, reply)

    def _single(self, path: str) -> Json | None:
        collection, _, name = path.rpartition("/")
        return self.objects.get(collection, {}).get(name)

    async def _write(self, request: Request, reply: Reply) -> None:
        content = json.loads(request.body)
        collection = request.path if request.method == "POST" else request.path.rpartition("/")[0]
        existing = self.objects.setdefault(collection, {}).get(content["metadata"]["name"])
        if request.method == "PUT" and existing is None:
            return await reply.status(404, "not found")
        version = content["metadata"].get("resourceVersion")
        if existing is not None and existing["metadata"]["resourceVersion"] != version:
            return await reply.status(409, "the object has been modified")
        await reply.answer(201 if request.method == "POST" else 200, self.put(collection, content))
        return None

    async def _list(self, request: Request, reply: Reply) -> None:
        contents = list(self.objects[request.path].values())
        first, size = int(request.params.get("continue", 0)), self.page_size or int(request.params.get("limit", 500))
        rest = str(first + size) if first + size < len(contents) else ""
        metadata = {"resourceVersion": str(self.version), "continue": rest}
        await reply.answer(200, {"kind": "List", "metadata": metadata, "items": contents[first : first + size]})

    async def watch(self, request: Request, reply: Reply) -> None:
        """A watch, beginning with a streaming list if one is asked for."""
        lists = "sendInitialEvents" in request.params
        if lists and not self.streaming:
            return await reply.status(422, "sendInitialEvents is forbidden for watch unless the WatchList feature ...")
        async with self._watching(request.path) as queue:
            await reply.begin()
            for content in list(self.objects[request.path].values()) if lists else ():
                await reply.event("ADDED", content)
            if lists:
                await reply.bookmark(self.version, ends_list=True)
            while True:
                await reply.event(*await queue.get())

    @contextlib.asynccontextmanager
    async def _watching(self, collection: str) -> AsyncIterator[asyncio.Queue[tuple[str, Json]]]:
        queue: asyncio.Queue[tuple[str, Json]] = asyncio.Queue()
        self._watchers.setdefault(collection, set()).add(queue)
        try:
            yield queue
        finally:
            self._watchers[collection].discard(queue)


async def _request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Request(method, url.path, dict(parse_qsl(url.query)), headers, body)


async def hang(request: Request, reply: Reply) -> None:
    """A behaviour: accept the request and never answer."""
    await asyncio.Event().wait()


def answers(code: int, message: str = "", **headers: str) -> Behaviour:
    """A behaviour: a failure with this status, such as ``answers(429, Retry_After="1")``."""

    async def behave(request: Request, reply: Reply) -> None:
        await reply.status(code, message, **headers)

    return behave


def streams(*pieces: bytes, ends_with: str = "end") -> Behaviour:
    """A behaviour: a stream of these bytes, then its end (``end``), a reset (``reset``) or silence (``hang``)."""

    async def behave(request: Request, reply: Reply) -> None:
        await reply.begin()
        for piece in pieces:
            await reply.piece(piece)
        if ends_with == "end":
            await reply.end()
        elif ends_with == "reset":
            reply.reset()
        else:
            await hang(request, reply)

    return behave


def event(kind: str, content: Json) -> bytes:
    """A line of a watch."""
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"


def list_end(version: int | str) -> bytes:
    """The line that ends a streaming list."""
    metadata = {"resourceVersion": str(version), "annotations": {"k8s.io/initial-events-end": "true"}}
    return event("BOOKMARK", {"kind": "Pod", "metadata": metadata})


def kubeconfig(server: str, user: Json) -> str:
    """A kubeconfig for that server and user; JSON is YAML."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
    )
