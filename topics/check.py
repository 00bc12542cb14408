"""Waits for the topics that a component uses to be what the contract says, and says what is missing meanwhile.

In: a broker's topics. Out: word that they may be used. State: what was wrong with them when they were last asked for.
On failure: missing topics, topics that are not as they must be, and a broker that does not answer are waited for, for
as long as it takes: nothing is read from them or written to them, and none is made.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from topics import broker

log = logging.getLogger(__name__)

ASK_AFTER_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""When to ask again; the last of them again and again, for a fleet may wait."""

COMMAND = "`gpustream topics create`"
"""What mends most of it, and says how to mend the rest."""


class TopicCheck:
    """Asks whether the topics called ``names`` may be used, until they may.

    Topics ``beside`` them may be missing; where they are there, they must have as many partitions.
    """

    def __init__(self, kafka: str, names: Iterable[str], *, beside: Iterable[str] = ()) -> None:
        self._kafka, self._names, self._beside = kafka, tuple(names), tuple(beside)
        self._wrong: list[str] = [f"no Kafka broker has answered at {kafka} yet"]

    def not_ready(self) -> list[str]:
        """Why they may not be used, one reason a mistake; empty once they may."""
        return list(self._wrong)

    async def passed(self, stop: asyncio.Event) -> broker.Checked | None:
        """The topics, once they may be used; None where ``stop`` is set before."""
        asked = 0
        while not stop.is_set():
            try:
                found = await broker.check(self._kafka, self._names, self._beside)
            except broker.ContractMismatch as error:
                self._tell([f"{mistake}: run {COMMAND}" for mistake in error.mistakes])
            except broker.BrokerError as error:
                self._tell(str(error).splitlines())
            else:
                self._pass(found)
                return found
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), ASK_AFTER_S[min(asked, len(ASK_AFTER_S) - 1)])
            asked += 1
        return None

    def _tell(self, wrong: list[str]) -> None:
        """Say what is wrong, when that has changed."""
        if wrong != self._wrong:
            log.warning("waiting for topics that can be used: %s", "; ".join(wrong))
        self._wrong = wrong

    def _pass(self, found: broker.Checked) -> None:
        for mismatch in found.harmless:
            log.warning("%s", mismatch)
        if self._wrong:
            log.info("the topics can be used: %s", ", ".join(self._names))
        self._wrong = []
