"""A receiver over HTTP that needs no network: it answers as the test says, and keeps the requests."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sinks.receiver import Reply


class ReceivedRequest(NamedTuple):
    """A request, and the status of its answer."""

    url: str
    body: bytes
    headers: Mapping[str, str]
    status: int


class Scripted:
    """Answers with the statuses of the script, one after the other, then with ``default_status`` of the body.

    While ``hold`` is not set, nothing is answered.
    """

    def __init__(self, *script: int, default_status: Callable[[bytes], int] = lambda _: 200) -> None:
        self.script = list(script)
        self.default_status = default_status
        self.requests: list[ReceivedRequest] = []
        self.under_way = 0
        self.most = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked = asyncio.Event()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """One attempt."""
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.asked.set()
        try:
            await asyncio.sleep(0)
            await self.hold.wait()
        finally:
            self.under_way -= 1
        status = self.script.pop(0) if self.script else self.default_status(body)
        self.requests.append(ReceivedRequest(url, body, headers, status))
        return Reply(status, "away" if status == 0 else "said")

    def accepted(self) -> list[ReceivedRequest]:
        """The requests that were accepted."""
        return [request for request in self.requests if 200 <= request.status < 300]
