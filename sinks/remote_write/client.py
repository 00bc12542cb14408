"""The receiver of remote write over HTTP: one attempt at a time."""

from sinks.http import Http, Reply
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.policy import Answer, Protocol

WRITTEN = "X-Prometheus-Remote-Write-Samples-Written"

_HEADERS: dict[Protocol, dict[str, str]] = {
    "1.0": {
        "Content-Type": "application/x-protobuf",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    },
    "2.0": {
        "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "2.0.0",
    },
}


class Client:
    """A receiver. Use :meth:`close` when done."""

    def __init__(self, settings: RemoteWriteSettings) -> None:
        self._url = settings.url
        self._http = Http(settings)

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        """Make one attempt at sending a compressed request."""
        return _answer(await self._http.post(self._url, body, _HEADERS[protocol]))

    async def close(self) -> None:
        """Close what is open."""
        await self._http.close()


def _answer(reply: Reply) -> Answer:
    written = reply.headers.get(WRITTEN, "")
    return Answer(reply.status, reply.text, int(written) if written.isdigit() else None, reply.retry_after_s)
