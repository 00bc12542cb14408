"""Notes for how long quotas of Kafka hold up this process, and logs it.

In: the delays that brokers impose, by their answers. Out: a line of the log, once a minute; a reason for `/readyz`.
State: how much each client was held up since that was logged.

A broker answers a request that is past a quota at once, and then reads nothing from that connection for some time. It
says for how long, but nothing else tells this from a broker that is slow, or from a network that is.
Source: Kafka's KIP-219, and its quotas producer_byte_rate, consumer_byte_rate, controller_mutation_rate (KIP-599) and
request_percentage.
"""

import logging
import time
from collections.abc import Callable

from delivery.log_throttle import LogThrottle

log = logging.getLogger(__name__)

LEAST_S = 1.0
"""Less than this is not logged: a client that keeps to its quota may be held up for some milliseconds now and then."""

_RECENT_S = 60.0
_EVERY_REQUEST = "request_percentage"
_OWN_QUOTAS = {
    "ProduceRequest": "producer_byte_rate",
    "FetchRequest": "consumer_byte_rate",
    "CreateTopicsRequest": "controller_mutation_rate",
    "DeleteTopicsRequest": "controller_mutation_rate",
}


class Quotas:
    """What the quotas of Kafka have cost this process. ``clock`` gives seconds and never steps back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._throttle = LogThrottle(clock)
        self._held_up_s: dict[tuple[str, str], float] = {}
        self._problem, self._problem_s = "", -_RECENT_S

    def note(self, client_id: str, request: str, delay_s: float) -> None:
        """A broker reads nothing from a connection of this client for ``delay_s``, after a request of that name."""
        if delay_s <= 0:
            return
        quotas = f"{_OWN_QUOTAS[request]} or {_EVERY_REQUEST}" if request in _OWN_QUOTAS else _EVERY_REQUEST
        held_up_s = self._held_up_s[client_id, quotas] = self._held_up_s.get((client_id, quotas), 0.0) + delay_s
        if held_up_s < LEAST_S:
            return
        self._problem, self._problem_s = f"a quota of Kafka holds it up: raise its {quotas}", self._clock()
        if self._throttle.is_due((client_id, quotas)):
            log.warning("client %s: %s (%.1f s since this was last logged)", client_id, self._problem, held_up_s)
            del self._held_up_s[client_id, quotas]

    def problem(self) -> str | None:
        """Which quota has held this process up in the last minute, by a second or more; None if none has."""
        return self._problem if self._clock() - self._problem_s < _RECENT_S else None


QUOTAS = Quotas()
"""Those of all clients of this process."""
