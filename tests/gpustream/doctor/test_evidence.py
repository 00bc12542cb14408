"""What became of each tick is found from the records, in any amount, in little memory."""

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpustream.doctor.evidence import MAX_REASONS, OTHERS, Evidence, NodeEvidence, NodeName, SampledRun
from gpustream.tally import Ranges
from tests.gpustream.doctor.records import RUN, Record, attributed, letter, receipt, sample, snapshot, workloads

NODE = NodeName("c", "n")
Numbers = st.lists(st.integers(1, 30))


@given(Numbers)
def test_ranges_are_a_set(numbers: list[int]) -> None:
    ranges = Ranges()
    new = [ranges.add(number) for number in numbers]

    assert new == [number not in numbers[:i] for i, number in enumerate(numbers)]
    assert [n for first, last in ranges for n in range(first, last + 1)] == sorted(set(numbers))
    assert len(ranges) == len(set(numbers))
    assert {n for n in range(32) if n in ranges} == set(numbers)


@given(Numbers)
def test_gaps_are_what_is_missing_between_the_first_and_the_last(numbers: list[int]) -> None:
    ranges = Ranges()
    for number in numbers:
        ranges.add(number)
    missing = [n for first, last in ranges.gaps() for n in range(first, last + 1)]

    assert missing == sorted(set(range(min(numbers, default=0), max(numbers, default=0))) - set(numbers))


def test_a_run_in_order_is_one_range() -> None:
    ranges = Ranges()
    for number in range(100_000):
        ranges.add(number)

    assert list(ranges) == [(0, 99_999)]


def folded(records: Iterable[Record], finished: Mapping[int, int] | None = None) -> Evidence:
    evidence = Evidence(finished or {})
    for record in records:
        evidence.add(record)
    return evidence


def run_of(evidence: Evidence) -> SampledRun:
    return evidence.nodes[NODE].runs[RUN]


def node_of(evidence: Evidence) -> NodeEvidence:
    return evidence.nodes[NODE]


FATES = ("exact", "late", "none", "dead_lettered", "waiting", "lost")


@given(st.lists(st.sampled_from(FATES), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_every_tick_has_the_fate_that_its_records_show(fates: list[str], random: Random) -> None:
    finished = len(fates)  # what waits comes after all that is finished
    fates = sorted(fates, key=lambda fate: fate == "waiting")
    samples = [
        sample(seq, offset=seq - 1 if fate != "waiting" else finished + seq) for seq, fate in enumerate(fates, 1)
    ]
    letters = [letter(record) for record, fate in zip(samples, fates, strict=True) if fate == "dead_lettered"]
    outputs = [attributed(seq, fate) for seq, fate in enumerate(fates, 1) if fate in FATES[:3]]
    outputs += outputs[:3]  # replays
    random.shuffle(outputs)
    evidence = folded([*letters, *outputs, *samples, *samples[:2]], {0: finished})

    assert run_of(evidence).fates == Counter(fates)
    assert run_of(evidence).duplicates == len(samples[:2])
    assert node_of(evidence).replayed == len(outputs) - len({record.value for record in outputs})


def test_without_a_kubelet_a_tick_has_no_snapshot_and_nothing_is_amiss() -> None:
    evidence = folded([attributed(1, "none"), sample(1, named=None)])

    assert run_of(evidence).fates == {"no_kubelet": 1}


def test_an_attribution_that_only_a_later_version_knows_is_not_taken_for_exact_nor_for_late() -> None:
    evidence = folded([snapshot(1), attributed(1, "guessed"), sample(1)])

    assert (run_of(evidence).fates, run_of(evidence).without_snapshot) == ({"other": 1}, 0)


def test_a_late_tick_is_distinguished_by_whether_its_snapshot_is_in_the_log() -> None:
    evidence = folded(
        [snapshot(1), attributed(1, "late"), attributed(2, "late"), sample(1, named=1), sample(2, named=2)]
    )

    assert (run_of(evidence).fates, run_of(evidence).without_snapshot) == ({"late": 2}, 1)


def test_a_tick_that_is_late_and_names_no_snapshot_has_none_in_the_log() -> None:
    evidence = folded([snapshot(1), attributed(1, "late"), sample(1, named=None)])

    assert (run_of(evidence).fates, run_of(evidence).without_snapshot) == ({"late": 1}, 1)


def test_a_letter_that_was_sent_again_and_attributed_is_no_gap() -> None:
    first = sample(1)
    dead = letter(first)
    evidence = folded(
        [dead, receipt(dead), attributed(2), attributed(1), first, sample(2), sample(1, offset=3)], {0: 4}
    )

    assert run_of(evidence).fates == {"exact": 2}
    assert list(evidence.open_dead_letters().values()) == [0]


def test_a_run_that_goes_on_after_another_began_is_counted_and_a_tick_that_is_sent_again_is_not() -> None:
    turns = [sample(1), sample(1, run_id=RUN + 1), sample(2), sample(2, run_id=RUN + 1), sample(1), sample(3)]

    assert node_of(folded(turns)).interleavings == 3


def test_records_that_cannot_be_read_are_counted_by_what_became_of_them() -> None:
    broken = [sample(n)._replace(value=value) for n, value in enumerate((b"{", b'{"seq": -1}', None))]
    evidence = folded([letter(broken[0]), *broken], {0: 2})

    assert evidence.unreadable == {"dead_lettered": 1, "lost": 1, "waiting": 1}
    assert evidence.nodes == {}


def test_reasons_without_end_become_one() -> None:
    letters = [letter(sample(n), offset=n, error=f"reason {n}: x") for n in range(MAX_REASONS + 50)]
    evidence = folded(letters)

    assert len(evidence.dead_letters) == MAX_REASONS + 1
    assert evidence.open_dead_letters()[OTHERS] == 50


def test_a_leader_that_another_one_has_replaced_can_not_say_that_a_node_is_gone() -> None:
    evidence = Evidence({})
    for record in (workloads(epoch=2), workloads(epoch=1, removed=True)):
        evidence.add(record)
    node = evidence.nodes[NODE]

    assert (node.removed, node.epoch, node.outdated_epochs) == (False, 2, 1)
