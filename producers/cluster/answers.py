"""What the API server answers: whole, line by line, or not at all.

In: HTTP responses. Out: :class:`Answer`, :class:`Stream`.
On failure: whatever goes wrong on the way is an :class:`Unreachable` that says why; every status is an answer.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Iterator
from typing import Literal, NamedTuple

import aiohttp

LARGEST_ERROR_BYTES = 64 * 1024
ERROR_WITHIN_S = 10.0

NoAnswer = Literal["connection", "tls", "timeout", "cut"]


class Unreachable(Exception):
    """There was no answer, or not all of it; the message says why. Ask again later."""

    def __init__(self, reason: NoAnswer, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer(NamedTuple):
    """What the API server answered, whatever its status."""

    status: int
    body: bytes
    retry_after_s: float | None


class Stream:
    """An answer that is read line by line."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.retry_after_s = retry_after_s(response)

    async def error_body(self) -> bytes:
        """The beginning of the body. Raises :class:`Unreachable`."""
        with reaching():
            async with asyncio.timeout(ERROR_WITHIN_S):
                return await read_body(self._response, LARGEST_ERROR_BYTES)

    async def lines(self, cap: int) -> AsyncGenerator[bytes | None]:
        """The lines as they come, without empty ones; None for each that was longer than ``cap`` and is dropped.

        Raises :class:`Unreachable`, also where the stream ends in the middle of a line.
        """
        lines = Lines(cap)
        chunks = self._response.content.iter_any()
        while True:
            with reaching():
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            for line in lines.feed(chunk):
                yield line
        if lines.unfinished:
            raise Unreachable("cut", "the stream ended in the middle of a line")


class Lines:
    """Splits a stream of bytes into lines. A list of parts, because a line may come in thousands of them."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun that has not ended."""
        return self._size > 0

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """The lines that end in this chunk."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._keep(end)
            if self._size:
                yield None if self._size > self._cap else b"".join(self._parts)
            self._parts, self._size = [], 0
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._cap:
            self._parts = []
        elif part:
            self._parts.append(part)


def retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """The Retry-After header; the API server writes whole seconds."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or the first ``most`` bytes of it."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) >= most:
            break
    return bytes(content[:most])


@contextlib.contextmanager
def reaching(late: str = "no answer in time") -> Iterator[None]:
    """Everything that goes wrong on the way, as :class:`Unreachable`; ``late`` is what a timeout means."""
    try:
        yield
    except TimeoutError as error:
        raise Unreachable("timeout", f"{late} ({said(error)})") from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise Unreachable("tls", f"TLS: {said(error)}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unreachable("connection", said(error)) from error


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")
