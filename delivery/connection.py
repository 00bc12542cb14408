"""Consumers that are connected, for as long as that takes, and let go again without waiting for lost brokers."""

import asyncio
import logging
from typing import Any

from aiokafka.errors import KafkaError

from topics.clients import AIOKafkaConsumer
from topics.sender import describe

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_CLOSE_S = 2.0


async def connected(kafka: str, **options: Any) -> Any:
    """A consumer of ``HOST:PORT[,...]`` once a broker answers; cancel to give up.

    It reads committed records only, in which an aborted transaction's are not, and commits nothing by itself.
    """
    complained = False
    while True:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=kafka.split(","),
            enable_auto_commit=False,
            isolation_level="read_committed",
            **options,
        )
        try:
            await consumer.start()
        except KafkaError as error:
            await close(consumer)
            if not complained:
                log.warning("%s: %s, trying again", kafka, describe(error))
            complained = True
            await asyncio.sleep(_RETRY_S)
        except BaseException:
            await close(consumer)
            raise
        else:
            return consumer


async def close(consumer: Any) -> None:
    """Stop a consumer, but not for ever: one whose brokers are away waits for them."""
    stopping = asyncio.ensure_future(consumer.stop())
    done, _ = await asyncio.wait((stopping,), timeout=_CLOSE_S)
    if not done:
        stopping.cancel()
    elif not stopping.cancelled() and stopping.exception() is not None:
        log.warning("not closed in good order: %s", stopping.exception())
