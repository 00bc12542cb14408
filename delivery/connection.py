"""How Kafka is reached: one value, which everything that makes a Kafka client takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Connection:
    """``servers`` are the bootstrap brokers, ``HOST:PORT[,...]``; as text it is those.

    ``topic_prefix`` stands before each topic and consumer group in Kafka; in a process they have the contract's names.
    ``compression`` is that of the batches that are written, None for none; a batch that is read says its own.
    """

    servers: str
    topic_prefix: str = ""
    compression: str | None = "zstd"

    def __str__(self) -> str:
        return self.servers

    def prefixed(self, name: str) -> str:
        """The name by which Kafka knows a topic or a consumer group."""
        return self.topic_prefix + name

    def unprefixed(self, name: str) -> str:
        """The contract's name of a topic or a consumer group that Kafka knows."""
        return name.removeprefix(self.topic_prefix)
