"""aiokafka's clients, which never make a topic: import them from here.

A client asks for metadata of the topics that it uses by name, and a broker with ``auto.create.topics.enable``, which is
Kafka's default, makes a topic that is asked for, with the broker's own number of partitions and settings. Only the
request itself can forbid that, and aiokafka has no option for it: so the request is replaced in every module that
makes one, for the whole process, Faust's consumer included.

Source: Kafka's protocol, Metadata from version 4 on (``allow_auto_topic_creation``).
"""

import aiokafka.admin.client
import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.metadata import MetadataRequest

__all__ = ["AIOKafkaAdminClient", "AIOKafkaConsumer", "AIOKafkaProducer"]


class _MakesNoTopic(MetadataRequest):  # type: ignore[misc] # aiokafka has no types
    """A request for metadata that leaves a topic missing that is missing."""

    def __init__(self, topics: list[str] | None = None) -> None:
        super().__init__(topics, allow_auto_topic_creation=False)


for _module in (aiokafka.client, aiokafka.admin.client):
    _module.MetadataRequest = _MakesNoTopic
