"""What all handlers of the sink share, between records and a receiver, with all its counters."""

import asyncio
import time
from collections.abc import Callable

from delivery.dead_letters import DeadLetters
from delivery.instruments import Instruments
from delivery.tasks import Turns
from sinks.outcomes import OnOutcome, Outcomes
from sinks.remote_write.partition import RemoteWriteShared
from sinks.remote_write.policy import Protocol
from sinks.remote_write.refusals import Deliverer
from sinks.remote_write.send import RemoteWriteSender
from sinks.remote_write.sink import COMPONENT, INSTRUMENTS
from tests.sinks.records import FakeSender
from tests.sinks.remote_write.receivers import Receiver

ENDS = ("delivered", "duplicate", "dropped", "dead_lettered")


class SharedSetup:
    """The receiver, the sender of dead letters, and what counts. Nothing waits before a retry."""

    def __init__(
        self,
        receiver: Receiver | None = None,
        protocol: Protocol = "1.0",
        max_samples: int = 1000,
        *,
        probe_s: float = 0.0,
        stale_after_s: float = 0.0,
        on_outcome: OnOutcome | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.receiver, self.sender = receiver or Receiver(), FakeSender()
        self.instruments = Instruments(INSTRUMENTS)
        self.counted = Outcomes(COMPONENT, self.instruments, on_outcome)
        self.abandon = asyncio.Event()
        self.transmitter = RemoteWriteSender(
            self.receiver.post, protocol, self.instruments, first_s=0.0, probe_s=probe_s
        )
        self.shared = RemoteWriteShared(
            deliverer=Deliverer(self.transmitter, self.instruments, clock_s),
            letters=DeadLetters(self.sender, "sink remote-write"),  # type: ignore[arg-type] # a fake
            outcomes=self.counted,
            instruments=self.instruments,
            slots=asyncio.Semaphore(2),
            max_samples=max_samples,
            stale_after_s=stale_after_s,
            turns=Turns(),
        )

    def count(self, name: str, **labels: str) -> int:
        """A counter; without labels, the sum of all that it has."""
        samples = [sample for family in self.instruments.registry.collect() for sample in family.samples]
        named = [sample for sample in samples if sample.name == f"gpustream_remote_write_{name}"]
        return int(sum(sample.value for sample in named if labels.items() <= sample.labels.items()))

    def ends(self) -> dict[str, int]:
        """How many records ended in which way."""
        counts = {end: self.count(f"records_{end}_total") for end in ENDS}
        return {end: number for end, number in counts.items() if number}
