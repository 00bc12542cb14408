"""Runs a remote-write sink as a process of its own, to be killed: ``python -m ... KAFKA URL PROTOCOL``."""

import asyncio
import sys

from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink

MAX_REQUEST_SAMPLES = 50
"""So few that there are many requests, between any two of which it may be killed."""


def main() -> None:
    """Runs until killed, as a static member, so that the next life has the partitions at once."""
    kafka, url, protocol = sys.argv[1:]
    settings = RemoteWriteSettings(
        kafka=kafka,
        url=url,
        protocol="2.0" if protocol == "2.0" else "1.0",
        from_="earliest",
        instance_id="only",
        session_timeout_s=6.0,
        max_request_samples=MAX_REQUEST_SAMPLES,
    )
    asyncio.run(RemoteWriteSink(settings).run(asyncio.Event()))


if __name__ == "__main__":
    main()
