"""The keys of usage records, and which of two records counts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.usage import HOURS, MINUTES, Key, Usage

MINUTE, HOUR = msgspec.convert(MINUTES.example, Usage), msgspec.convert(HOURS.example, Usage)
parts = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=9)


def test_a_key_names_the_device_the_window_the_holder_and_the_category() -> None:
    assert MINUTE.key.encode().decode() == (
        "prod-us-east-1/gpu-node-1/GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b/1795219140000/"
        "ml-team/bert-0/1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10/pytorch/held"
    )


def test_parts_that_a_record_does_not_have_are_empty() -> None:
    free = msgspec.structs.replace(MINUTE, category="free", namespace=None, pod=None, pod_uid=None, container=None)
    assert free.key.encode().endswith(b"/1795219140000/////free")


@given(st.builds(Key, parts, parts, parts, st.integers(0, 2**63 - 1), parts, parts, parts, parts, parts))
def test_the_parts_of_a_key_can_be_read_from_it(key: Key) -> None:
    assert key.encode().decode().split("/") == [str(part) for part in key]


def test_a_replay_counts_before_any_revision() -> None:
    replayed = msgspec.structs.replace(MINUTE, generation=1, revision=0)
    assert max((MINUTE, replayed), key=lambda record: record.order) is replayed


def test_zeros_are_written_and_unknown_values_are_left_out() -> None:
    free = msgspec.structs.replace(MINUTE, namespace=None, workload=None, labels={}, idle_ms=0, generation=0)
    encoded = msgspec.json.decode(msgspec.json.encode(free))
    assert (encoded["idle_ms"], encoded["generation"], encoded["final"]) == (0, 0, True)
    assert not {"namespace", "workload", "labels"} & encoded.keys()


@pytest.mark.parametrize("example", [MINUTE, HOUR], ids=["minute", "hour"])
def test_the_examples_follow_the_contract(example: Usage) -> None:
    assert example.start_ms % (example.end_ms - example.start_ms) == 0
    assert example.slice_ms == example.device_ms * example.of
    assert example.exact_ms + example.late_ms + example.none_ms == example.device_ms
