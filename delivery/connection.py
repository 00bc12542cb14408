"""How Kafka is reached: one value, which everything that makes a Kafka client takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Connection:
    """``servers`` are the bootstrap brokers, ``HOST:PORT[,...]``; as text it is those.

    ``compression`` is that of the batches that are written, None for none; a batch that is read says its own.
    """

    servers: str
    compression: str | None = "zstd"

    def __str__(self) -> str:
        return self.servers
