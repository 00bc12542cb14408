"""aiokafka's clients, which never make a topic (import them from here), and consumers that are connected and let go.

A client asks for metadata of the topics that it uses by name, and a broker with ``auto.create.topics.enable``, which is
Kafka's default, makes a topic that is asked for, with the broker's own number of partitions and settings. Only the
request itself can forbid that, and aiokafka has no option for it: so the request is replaced in every module that
makes one, for the whole process, Faust's consumer included.

Source: Kafka's protocol, Metadata from version 4 on (``allow_auto_topic_creation``).
"""

import asyncio
import logging
from typing import Any

import aiokafka.admin.client
import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

__all__ = ["AIOKafkaAdminClient", "AIOKafkaConsumer", "AIOKafkaProducer", "close", "connected", "describe"]

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_CLOSE_S = 2.0


class _MakesNoTopic(MetadataRequest):  # type: ignore[misc] # aiokafka has no types
    """A request for metadata that leaves a topic missing that is missing."""

    def __init__(self, topics: list[str] | None = None) -> None:
        super().__init__(topics, allow_auto_topic_creation=False)


for _module in (aiokafka.client, aiokafka.admin.client):
    _module.MetadataRequest = _MakesNoTopic


def describe(error: BaseException) -> str:
    """One line that names an error, once, and what it says."""
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}".strip(": ")


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
