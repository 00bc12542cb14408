"""The leader of a group distributes its partitions."""

from types import SimpleNamespace
from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from hypothesis import given
from hypothesis import strategies as st

from delivery.assignor import Claim, CoPartitioned, assign_numbers, claim_of

COUNT = 12
TOPICS = ("samples", "allocations", "workloads")


def cluster(**counts: int) -> Any:
    """A client's metadata: how many partitions each topic has."""
    return SimpleNamespace(partitions_for_topic=lambda topic: set(range(counts[topic])) or None)


class Group:
    """Members that join and leave, and the assignments that their leader makes."""

    def __init__(self, **counts: int) -> None:
        self.cluster = cluster(**counts)
        self.members: dict[str, CoPartitioned] = {}
        self.topics: dict[str, tuple[str, ...]] = {}

    def join(self, member: str, topics: tuple[str, ...] = TOPICS) -> None:
        self.members[member], self.topics[member] = CoPartitioned(), topics

    def rebalance(self) -> dict[str, dict[str, list[int]]]:
        """A generation: every member reports its previous partitions, and is assigned new ones."""
        metadata_by_member = {
            member: assignor.metadata(self.topics[member]) for member, assignor in self.members.items()
        }
        over_the_wire = {
            member: ConsumerProtocolMemberMetadata.decode(metadata.encode())
            for member, metadata in metadata_by_member.items()
        }
        assignments_by_member = next(iter(self.members.values())).assign(self.cluster, over_the_wire)
        for member, assignment in assignments_by_member.items():
            self.members[member].on_assignment(type(assignment).decode(assignment.encode()))
        return {member: dict(assignment.assignment) for member, assignment in assignments_by_member.items()}


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=12), st.integers(1, COUNT))
def test_equal_numbers_stay_together_and_are_distributed_evenly_with_the_fewest_moves(
    changes: list[tuple[str, bool]], count: int
) -> None:
    group = Group(**dict.fromkeys(TOPICS, count))
    group.join("first")
    before: dict[str, set[int]] = {}
    for member, stays in [("first", True), *changes]:
        if stays and member not in group.members:
            group.join(member)
        elif not stays and len(group.members) > 1:
            group.members.pop(member, None)
        assignments_by_member = group.rebalance()
        assert all(list(topics) == sorted(TOPICS) for topics in assignments_by_member.values())
        assignments = {
            member: {tuple(numbers) for numbers in topics.values()} for member, topics in assignments_by_member.items()
        }
        assert all(len(numbers) == 1 for numbers in assignments.values()), "topics apart"
        shares = {member: set(numbers.pop()) for member, numbers in assignments.items()}
        assert sorted(n for share in shares.values() for n in share) == list(range(count))
        sizes = sorted(map(len, shares.values()))
        assert sizes[-1] - sizes[0] <= 1
        unchanged = sum(len(before.get(member, set()) & share) for member, share in shares.items())
        most = _most_that_can_be_kept([len(before.get(member, ())) for member in shares], count)
        assert unchanged == most
        before = shares


def _most_that_can_be_kept(previous_counts: list[int], partitions: int) -> int:
    share, remainder = divmod(partitions, len(previous_counts))
    over = sum(count > share for count in previous_counts)
    return sum(min(count, share) for count in previous_counts) + min(remainder, over)


def test_a_member_that_comes_back_with_its_partitions_gets_them_back() -> None:
    group = Group(**dict.fromkeys(TOPICS, COUNT))
    for member in "abc":
        group.join(member)
    first = group.rebalance()
    former_member = group.members.pop("b")
    group.rebalance()
    group.members["b"] = CoPartitioned()  # a new process, without memory
    assert group.rebalance() == first
    assert former_member.claim.held["samples"] == first["b"]["samples"]


def test_if_two_claim_a_number_the_later_owner_keeps_it() -> None:
    assert assign_numbers(4, ["a", "b"], {"a": (3, [0, 1]), "b": (5, [1, 2])}) == {"a": [0, 3], "b": [1, 2]}


def test_a_member_that_missed_assignments_gets_nothing_that_others_may_keep() -> None:
    group = Group(**dict.fromkeys(TOPICS, COUNT))
    for member in "ab":
        group.join(member)
    group.rebalance()
    away = group.members.pop("a")
    group.rebalance()
    group.join("c")
    before = group.rebalance()
    group.members["a"] = away
    after = group.rebalance()
    assert all(set(after[member]["samples"]) < set(before[member]["samples"]) for member in "bc")


def test_members_keep_their_partitions_when_they_read_a_further_topic() -> None:
    group = Group(**dict.fromkeys(TOPICS, COUNT))
    for member in "abc":
        group.join(member, TOPICS[:2])
    group.rebalance()
    del group.members["b"]
    before = group.rebalance()
    group.topics = dict.fromkeys("ac", TOPICS)
    after = group.rebalance()
    assert all(after[member]["workloads"] == before[member]["samples"] for member in "ac")


def test_if_a_topic_is_created_again_with_fewer_partitions_the_others_are_no_longer_assigned() -> None:
    assert assign_numbers(2, ["a"], {"a": (1, [2, 0])}) == {"a": [0, 1]}


def test_topics_with_another_partition_count_are_distributed_separately() -> None:
    group = Group(samples=4, allocations=4, workloads=5)
    for member in "ab":
        group.join(member)
    assignments_by_member = group.rebalance()
    assert all(topics["samples"] == topics["allocations"] for topics in assignments_by_member.values())
    assert sorted(n for topics in assignments_by_member.values() for n in topics["workloads"]) == [0, 1, 2, 3, 4]


def test_a_topic_that_was_deleted_keeps_no_other_from_being_assigned() -> None:
    group = Group(samples=4, allocations=4, workloads=0)
    group.join("a")
    assert group.rebalance() == {"a": {"allocations": [0, 1, 2, 3], "samples": [0, 1, 2, 3], "workloads": []}}


def test_a_topic_that_only_some_members_read_goes_to_those() -> None:
    group = Group(**dict.fromkeys(TOPICS, 4))
    group.join("new")
    group.join("old", TOPICS[:2])
    assignments_by_member = group.rebalance()
    assert assignments_by_member["new"]["workloads"] == [0, 1, 2, 3]
    assert set(assignments_by_member["old"]) == set(TOPICS[:2])


def test_the_metadata_of_another_program_is_ignored() -> None:
    for content in (None, b"\x00\x01", b"[]", b'{"process": "\xff"}', b"[" * 100_000):
        assert claim_of(content) == Claim()
