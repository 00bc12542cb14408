"""Which member of a group reads which partitions: the same numbers of all its topics, and as few moves as possible.

With each join a member sends which numbers it has had until now (its :class:`Claim`). The leader of the group deals the
numbers. Each member keeps its own up to its share, and the rest goes to those who have the least.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

_VERSION = 0


class Claim(msgspec.Struct, frozen=True):
    """What a member says of itself when it joins.

    ``held`` is its last assignment, by topic, what it has had for longest first, and ``round`` counts assignments: of
    two that claim a number, the one of the later round had it last. ``process`` and ``started_ms`` tell two processes
    with one ``instance`` id apart.
    """

    round: int = 0
    held: dict[str, list[int]] = {}
    instance: str | None = None
    process: str = ""
    started_ms: int = 0


def claim_of(user_data: bytes | None) -> Claim:
    """What a member said of itself; nothing if that can't be read."""
    try:
        return msgspec.json.decode(user_data or b"{}", type=Claim)
    except msgspec.DecodeError:
        return Claim()


class CoPartitioned(AbstractPartitionAssignor):  # type: ignore[misc] # aiokafka has no types
    """Deals partition numbers, all topics alike that the same members read and that have as many partitions.

    One for each consumer, because it remembers what its member has.
    """

    name = "gpustream"

    def __init__(self, instance_id: str | None = None) -> None:
        self.claim = Claim(instance=instance_id, process=uuid.uuid4().hex, started_ms=time.time_ns() // 1_000_000)

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """What this member sends with a join."""
        return ConsumerProtocolMemberMetadata(_VERSION, sorted(topics), msgspec.json.encode(self.claim))

    def assign(
        self, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        """Of the group's leader: every member's partitions."""
        claims = {member: claim_of(metadata.user_data) for member, metadata in members.items()}
        readers: dict[str, set[str]] = defaultdict(set)
        for member, metadata in members.items():
            for topic in metadata.subscription:
                readers[topic].add(member)
        alike: dict[tuple[int, frozenset[str]], list[str]] = defaultdict(list)
        for topic in sorted(readers):
            alike[len(cluster.partitions_for_topic(topic) or ()), frozenset(readers[topic])].append(topic)
        dealt: dict[str, dict[str, list[int]]] = {member: {} for member in members}
        for (count, who), topics in alike.items():
            # of topics that are dealt alike, one that was added lately has nothing to say
            held = {member: max((claims[member].held.get(topic, []) for topic in topics), key=len) for member in who}
            had = {member: (claims[member].round, held[member]) for member in who}
            for member, numbers in deal(count, who, had).items():
                dealt[member] |= dict.fromkeys(topics, numbers)
        this_round = msgspec.json.encode(1 + max((claim.round for claim in claims.values()), default=0))
        return {
            member: ConsumerProtocolMemberAssignment(_VERSION, sorted(share.items()), this_round)
            for member, share in dealt.items()
        }

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        """Remember what this member was given."""
        held = {topic: list(numbers) for topic, numbers in assignment.assignment}
        this_round = msgspec.json.decode(assignment.user_data, type=int) if assignment.user_data else 0
        self.claim = msgspec.structs.replace(self.claim, round=this_round, held=held)


def deal(count: int, who: Collection[str], had: Mapping[str, tuple[int, list[int]]]) -> dict[str, list[int]]:
    """Deal the numbers from 0 to ``count`` among the members ``who``; nobody has two more than another.

    ``had`` is each one's last round and numbers. Who has too many gives up what it has had for the shortest time, so
    that a member that comes back gets the numbers it had before.
    """
    owner: dict[int, str] = {}
    for member in sorted(who, key=lambda member: (-had[member][0], member)):
        for number in had[member][1]:
            owner.setdefault(number, member)
    have = {member: [n for n in had[member][1] if owner[n] == member and n < count] for member in who}
    share, more = divmod(count, len(who))
    for member in sorted(who, key=lambda member: (-len(have[member]), member)):
        takes_one_more = more > 0 and len(have[member]) > share
        more -= takes_one_more
        del have[member][share + takes_one_more :]
    for number in sorted(set(range(count)).difference(*have.values())):
        have[min(who, key=lambda member: (len(have[member]), member))].append(number)
    return have
