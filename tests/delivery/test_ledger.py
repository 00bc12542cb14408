"""The ledger has the offset that may be committed, in whatever order records are finished."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delivery.ledger import Ledger, Partition, Slot

TP = Partition("ticks", 0)
OTHER_TP = Partition("ticks", 1)
PARTITIONS = st.sampled_from([TP, OTHER_TP])


def ledger_at(offset: int = 0) -> Ledger:
    ledger = Ledger()
    ledger.begin({TP: offset, OTHER_TP: 0})
    return ledger


@given(st.permutations(range(12)), st.integers(0, 12), st.lists(st.integers(1, 5), min_size=12, max_size=12))
def test_the_position_is_the_offset_after_the_finished_prefix(
    order: list[int], finished: int, steps: list[int]
) -> None:
    ledger = ledger_at(5)
    offsets = [5 + sum(steps[:i]) for i in range(12)]
    slots = [ledger.admit(TP, offset, size=offset) for offset in offsets]
    finished_numbers = set(order[:finished])
    for index in order[:finished]:
        ledger.finish(slots[index])
    first_open = next((i for i in range(12) if i not in finished_numbers), 12)
    assert ledger.position(TP) == (offsets[first_open - 1] + 1 if first_open else 5)
    assert ledger.held["ticks"] == 12 - finished
    assert ledger.open_bytes == sum(offsets[i] for i in range(12) if i not in finished_numbers)
    assert ledger.position(OTHER_TP) == 0


def test_finishing_twice_counts_once() -> None:
    ledger = ledger_at()
    slot = ledger.admit(TP, 0, 10)
    ledger.finish(slot)
    ledger.finish(slot)
    assert (ledger.finished, ledger.open_bytes, ledger.position(TP)) == (1, 0, 1)


@given(st.lists(st.sampled_from(["read", "finish", "duplicate", "forget"]), max_size=40))
def test_every_record_that_was_read_is_finished_or_held_or_forgotten(actions: list[str]) -> None:
    ledger, slots = ledger_at(), list[Slot]()
    for offset, action in enumerate(actions):
        if action == "read":
            slots.append(ledger.admit(TP, offset, 1))
        elif action == "forget":
            ledger.begin({TP: 0})
        elif slots:
            slot = slots.pop(0)
            slot.outcome = ("delivered",) if action == "finish" else ("duplicate",)
            ledger.finish(slot)
        counts, open_count = ledger.counts, ledger.held["ticks"]
        assert open_count == sum(slot.epoch == ledger.epoch for slot in slots)
        assert counts["ticks", "read"] == open_count + sum(
            counts["ticks", end] for end in ("delivered", "duplicate", "released")
        )


class LedgerAndLists(RuleBasedStateMachine):
    """A ledger of two partitions beside lists of what was read of each, in the order of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.old = Ledger(), list[Slot]()
        self.restart([0, 0])

    def restart(self, begins: list[int]) -> None:
        self.begins = self.nexts = dict(zip((TP, OTHER_TP), begins, strict=True))
        self.read: dict[Partition, list[Slot]] = {TP: [], OTHER_TP: []}
        self.open: list[Slot] = []
        self.bytes = dict[Slot, int]()
        self.skipped: dict[Partition, int] = {TP: 0, OTHER_TP: 0}
        self.ledger.begin(self.begins)

    @rule(tp=PARTITIONS, gap=st.integers(0, 2), size=st.integers(0, 9))
    def admit(self, tp: Partition, gap: int, size: int) -> None:
        offset = self.nexts[tp] + gap
        slot = self.ledger.admit(tp, offset, size)
        self.nexts = {**self.nexts, tp: offset + 1}
        self.read[tp].append(slot)
        self.open.append(slot)
        self.bytes[slot] = size

    @precondition(lambda self: self.open)
    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        slot = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        for _ in range(1 + again):
            self.ledger.finish(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        slot = self.open[data.draw(st.integers(0, len(self.open) - 1))]
        self.ledger.set_aside(slot)
        self.bytes[slot] = 0

    @rule(tp=PARTITIONS, by=st.integers(-3, 3))
    def skip(self, tp: Partition, by: int) -> None:
        self.ledger.skip(tp, self.nexts[tp] + by)
        self.nexts = {**self.nexts, tp: self.nexts[tp] + max(0, by)}
        if not [slot for slot in self.read[tp] if slot in self.open]:
            self.skipped[tp] = self.nexts[tp]

    @rule(begins=st.lists(st.integers(0, 9), min_size=2, max_size=2))
    def begin(self, begins: list[int]) -> None:
        self.old += self.open
        self.restart(begins)

    @precondition(lambda self: self.old)
    @rule()
    def finish_what_is_given_back(self) -> None:
        self.ledger.set_aside(self.old[0])
        self.ledger.finish(self.old.pop(0))

    @invariant()
    def it_says_what_the_lists_say(self) -> None:
        for tp in (TP, OTHER_TP):
            unfinished = [slot.offset for slot in self.read[tp] if slot in self.open]
            last = self.read[tp][-1].offset + 1 if self.read[tp] else self.begins[tp]
            first_open = next((number for number, slot in enumerate(self.read[tp]) if slot in self.open), None)
            before = self.read[tp][:first_open]
            prefix = last if first_open is None else before[-1].offset + 1 if before else self.begins[tp]
            assert self.ledger.position(tp) == max(prefix, self.skipped[tp])
            assert self.ledger.expected(tp) == self.nexts[tp]
            if unfinished:
                assert self.ledger.last_unfinished(tp) >= unfinished[-1]
        assert self.ledger.open_bytes == sum(self.bytes[slot] for slot in self.open)
        assert self.ledger.held["ticks"] == len(self.open)


TestTheLedgerSaysWhatListsSay = LedgerAndLists.TestCase


def test_a_record_of_an_older_epoch_does_not_count() -> None:
    ledger = ledger_at()
    old = ledger.admit(TP, 0, 10)
    ledger.forget()
    ledger.finish(old)
    ledger.begin({TP: 0})
    new = ledger.admit(TP, 0, 10)
    ledger.finish(old)
    assert ledger.position(TP) == 0
    assert ledger.open_bytes == 10
    ledger.finish(new)
    assert ledger.position(TP) == 1


def test_a_record_that_is_set_aside_holds_its_offset_back_but_no_bytes() -> None:
    ledger = ledger_at()
    first_record, second_record = ledger.admit(TP, 0, 10), ledger.admit(TP, 1, 5)
    ledger.set_aside(first_record)
    ledger.finish(second_record)
    assert (ledger.open_bytes, ledger.position(TP), ledger.held.total()) == (0, 0, 1)
    ledger.finish(first_record)
    ledger.set_aside(second_record)
    assert (ledger.open_bytes, ledger.position(TP)) == (0, 2)


def test_setting_aside_a_record_of_an_older_epoch_changes_nothing() -> None:
    ledger = ledger_at()
    old = ledger.admit(TP, 0, 10)
    ledger.begin({TP: 0})
    ledger.admit(TP, 0, 10)
    ledger.set_aside(old)
    assert ledger.open_bytes == 10


def test_every_forget_and_every_begin_starts_a_new_epoch() -> None:
    ledger = Ledger()
    epochs = [ledger.epoch]
    for _ in range(3):
        ledger.begin({TP: 0})
        epochs.append(ledger.epoch)
        ledger.forget()
        epochs.append(ledger.epoch)
    assert len(set(epochs)) == 7


def test_forgetting_leaves_nothing_open_and_no_position() -> None:
    ledger = ledger_at()
    ledger.admit(TP, 0, 10)
    ledger.forget()
    assert (ledger.held.total(), ledger.open_bytes, ledger.ready, ledger.positions()) == (0, 0, False, {})
    assert ledger.expected(TP) is None


def test_a_slot_has_its_partition_and_offset() -> None:
    slot: Slot = ledger_at(7).admit(TP, 9, 3)
    assert (slot.tp, slot.offset, slot.size, slot.done) == (TP, 9, 3, False)
