"""What keeps a member of a consumer group from its work: an error, a coordinator that is silent, a commit that waits,
or another process with the same instance id.

In: errors, commits, and whether the group's coordinator is known; the claims of the other members. Out: the reason, for
`/readyz` and the log.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from delivery import clients, opening
from delivery.assignor import Claim, claim_of
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.kafka_errors import describe
from delivery.log_throttle import LogThrottle

log = logging.getLogger(__name__)

_SILENT_S = 5.0
_DESCRIBE_TIMEOUT_S = 3.0


class MemberHealth:
    """What is wrong with a member of the group ``name``.

    ``failed_ms``: when the last error came; None if it has passed. ``throttle`` has what was logged since the member
    joined.
    """

    def __init__(self, name: str, connection: Connection) -> None:
        self._name, self._connection = name, connection
        self._silent_since_s: float | None = None
        self._silence_logged = False
        self._commits_since_s: list[float] = []  # when each commit that is under way was begun
        self.joined()

    def joined(self) -> None:
        """The member has joined: what was wrong before has passed."""
        self._error: str | None = None
        self._commit_error: str | None = None
        self.failed_ms: float | None = None
        self.throttle = LogThrottle()

    def report(self, error: Exception) -> None:
        """Note an error, and log it, and again each minute while it lasts."""
        self._error, self.failed_ms = describe(error), now_ms()
        if self.throttle.is_due(self._error):
            log.warning("group %s: %s; trying again", self._name, self._error)

    def passed(self) -> None:
        """The last error has passed."""
        self._error = self.failed_ms = None

    def note_coordinator(self, now_s: float, *, known: bool) -> None:
        """Note whether the client knows the group's coordinator. Log when it is silent, and when it answers again."""
        self._silent_since_s = None if known else self._silent_since_s or now_s
        silence = self._silence(now_s)
        if silence is not None and not self._silence_logged:
            log.warning("group %s: no Kafka broker answers at %s; trying again", self._name, self._connection)
        elif known and self._silence_logged:
            log.info("group %s: a Kafka broker answers again", self._name)
        self._silence_logged = silence is not None

    @contextmanager
    def committing(self) -> Iterator[None]:
        """The block commits: note how long that takes and, if it raises, why. That a member has lost its partitions is
        no error."""
        self._commits_since_s.append(begun_s := time.monotonic())
        try:
            yield
            self._commit_error = None
        except (CommitFailedError, IllegalStateError):
            raise
        except KafkaError as error:
            self._commit_error = f"offsets of the group {self._name} are not committed: {describe(error)}"
            raise
        finally:
            self._commits_since_s.remove(begun_s)

    def problem(self) -> str | None:
        """What is wrong now: a connection's trouble, else the broker's last error, else what it does not answer."""
        now_s = time.monotonic()
        no_answer = self._silence(now_s)
        waited_s = now_s - min(self._commits_since_s, default=now_s)
        waiting = f"a commit of the group {self._name} has waited {waited_s:.0f} s" if waited_s >= _SILENT_S else None
        return opening.trouble(self._connection) or self._error or no_answer or self._commit_error or waiting

    def _silence(self, now_s: float) -> str | None:
        """What to say if the coordinator has been silent for long."""
        if self._silent_since_s is None or now_s - self._silent_since_s < _SILENT_S:
            return None
        return f"no Kafka broker answers for the group {self._name} at {self._connection}"


async def evicted_by(claim: Claim, group: str, connection: Connection) -> str | None:
    """The host of a process that joined the group with the instance id of this member's claim, and started later.

    None: there is none. The broker gives a static member's place to whichever process joined last with its id. The
    evicted process would take the place back by joining again.
    """
    if claim.instance is None:
        return None
    admin = clients.admin(connection, client_id=group)
    try:
        async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
            await admin.start()
            responses = await admin.describe_consumer_groups([group])
    except (KafkaError, OSError, TimeoutError) as error:
        log.info("who else is in the group %s is not known: %s", group, describe(error))
        return None
    finally:
        await clients.close(admin)
    for *_, members in (group for response in responses for group in response.groups):
        for _, _, host, metadata, *_ in members:
            if not metadata:  # it is empty during a rebalance
                continue
            other = claim_of(ConsumerProtocolMemberMetadata.decode(metadata).user_data)
            same_id = other.instance == claim.instance and other.process != claim.process
            if same_id and (other.started_ms, other.process) > (claim.started_ms, claim.process):
                return str(host)
    return None
