"""How Kafka is reached: one value, which everything that makes a Kafka client takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Connection:
    """``servers`` are the bootstrap brokers, ``HOST:PORT[,...]``; as text it is those."""

    servers: str

    def __str__(self) -> str:
        return self.servers
