"""Assigns partitions to the members of a group: the same numbers of all topics, with as few moves as possible.

With each join a member sends the partition numbers that it had until then (its :class:`Claim`). The group's leader
assigns the numbers. Each member keeps its own up to its share, and the rest goes to those with the fewest.
"""

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from delivery.clock import now_ms
from topics.topic import UNDECODABLE

_VERSION = 0


class Claim(msgspec.Struct, frozen=True):
    """What a member sends about itself when it joins.

    ``held`` is its last assignment by topic, the numbers that it has had for longest first. ``round`` counts
    assignments: if two members claim a number, the one with the later round had it last. ``process`` and ``started_ms``
    distinguish processes with the same ``instance`` id.
    """

    round: int = 0
    held: dict[str, list[int]] = {}
    instance: str | None = None
    process: str = ""
    started_ms: int = 0


def claim_of(user_data: bytes | None) -> Claim:
    """The claim of a member; an empty one if it can't be decoded."""
    try:
        return msgspec.json.decode(user_data or b"{}", type=Claim)
    except UNDECODABLE:
        return Claim()


class CoPartitioned(AbstractPartitionAssignor):  # type: ignore[misc] # aiokafka has no types
    """Assigns partition numbers, the same ones of all topics with the same readers and as many partitions.

    Each consumer has its own, because it remembers the member's assignment.
    """

    name = "gpustream"

    def __init__(self, instance_id: str | None = None) -> None:
        self.claim = Claim(instance=instance_id, process=uuid.uuid4().hex, started_ms=now_ms())

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """What this member sends with a join."""
        return ConsumerProtocolMemberMetadata(_VERSION, sorted(topics), msgspec.json.encode(self.claim))

    def assign(
        self, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        """Called at the group's leader: the assignment of every member."""
        claims = {member: claim_of(metadata.user_data) for member, metadata in members.items()}
        readers: dict[str, set[str]] = defaultdict(set)
        for member, metadata in members.items():
            for topic in metadata.subscription:
                readers[topic].add(member)
        topic_groups: dict[tuple[int, frozenset[str]], list[str]] = defaultdict(list)
        for topic in sorted(readers):
            topic_groups[len(cluster.partitions_for_topic(topic) or ()), frozenset(readers[topic])].append(topic)
        assignments: dict[str, dict[str, list[int]]] = {member: {} for member in members}
        for (count, subscribers), topics in topic_groups.items():
            # a topic that was added lately is in no claim: take the longest claim of the topics
            previous = {
                member: (claims[member].round, max((claims[member].held.get(topic, []) for topic in topics), key=len))
                for member in subscribers
            }
            for member, numbers in assign_numbers(count, subscribers, previous).items():
                assignments[member] |= dict.fromkeys(topics, numbers)
        this_round = msgspec.json.encode(1 + max(claim.round for claim in claims.values()))
        return {
            member: ConsumerProtocolMemberAssignment(_VERSION, sorted(topics.items()), this_round)
            for member, topics in assignments.items()
        }

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        """Remember this member's assignment."""
        held = {topic: list(numbers) for topic, numbers in assignment.assignment}
        this_round = msgspec.json.decode(assignment.user_data, type=int) if assignment.user_data else 0
        self.claim = msgspec.structs.replace(self.claim, round=this_round, held=held)


def assign_numbers(
    count: int, members: Collection[str], previous: Mapping[str, tuple[int, list[int]]]
) -> dict[str, list[int]]:
    """Divide the numbers from 0 to ``count`` among the members: nobody gets two more than another.

    ``previous`` is each member's last round and its numbers. A member with too many gives up those that it has had for
    the shortest time, so that a member that comes back gets the numbers it had before.
    """
    owner: dict[int, str] = {}
    for member in sorted(members, key=lambda member: (-previous[member][0], member)):
        for number in previous[member][1]:
            owner.setdefault(number, member)
    assigned = {member: [n for n in previous[member][1] if owner[n] == member and n < count] for member in members}
    share, remainder = divmod(count, len(members))
    for place, member in enumerate(sorted(members, key=lambda member: (-len(assigned[member]), member))):
        del assigned[member][share + (place < remainder) :]
    for number in sorted(set(range(count)).difference(*assigned.values())):
        assigned[min(members, key=lambda member: (len(assigned[member]), member))].append(number)
    return assigned
