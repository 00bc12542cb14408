"""Whether a stream may start: the topics that it uses are what the contract says, as soon as a broker answers."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from topics import broker

log = logging.getLogger(__name__)

_ASK_BROKER_EVERY_S = 1.0


async def checked(kafka: str, names: Sequence[str], stop: asyncio.Event, *, timeout_s: float) -> broker.Checked | None:
    """The topics, once the broker answers; None when stopped before.

    :raises topics.broker.ContractMismatch: they are not as they must be.
    :raises topics.broker.BrokerUnavailable: nobody has answered for ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while not stop.is_set():
        try:
            found = await broker.check(kafka, names)
        except broker.BrokerUnavailable as error:
            if time.monotonic() > deadline_s:
                raise
            log.info("waiting for Kafka: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _ASK_BROKER_EVERY_S)
        else:
            for mismatch in found.harmless:
                log.warning("%s", mismatch)
            return found
    return None
