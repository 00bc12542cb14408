"""Identities look like NVIDIA's and Kubernetes', and stand for what they identify."""

import re

from hypothesis import given
from hypothesis import strategies as st

from producers.simulated import names

parts = st.lists(st.text(max_size=5) | st.integers(), max_size=4).map(tuple)


@given(parts)
def test_a_device_uuid_is_lower_hex_in_five_groups(of: tuple[object, ...]) -> None:
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", names.device_uuid("GPU", *of))


@given(parts)
def test_a_pods_uid_is_a_version_4_uuid(of: tuple[object, ...]) -> None:
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", names.object_uid(*of))


@given(parts)
def test_a_serial_number_has_13_digits(of: tuple[object, ...]) -> None:
    assert re.fullmatch(r"[0-9]{13}", names.serial(*of))


@given(parts)
def test_generated_names_have_no_vowels(of: tuple[object, ...]) -> None:
    assert re.fullmatch(r"[bcdfghjklmnpqrstvwxz2456789]{5}", names.suffix(*of))
    assert re.fullmatch(r"[bcdf456789]{1,10}", names.template_hash(*of))


@given(parts, st.sets(st.integers(0, names.SUFFIXES - 1), max_size=100))
def test_numbered_objects_have_suffixes_of_their_own(of: tuple[object, ...], numbers: set[int]) -> None:
    found = {names.numbered_suffix(number, *of) for number in numbers}

    assert len(found) == len(numbers)
    assert all(re.fullmatch(r"[bcdfghjklmnpqrstvwxz2456789]{5}", suffix) for suffix in found)


@given(parts)
def test_a_fraction_is_at_least_0_and_below_1(of: tuple[object, ...]) -> None:
    assert 0 <= names.fraction(*of) < 1


def test_identities_are_the_same_on_every_machine() -> None:
    assert names.suffix("pod", "default", 1, 0, 0, 0) == names.suffix("pod", "default", 1, 0, 0, 0)
    assert names.device_uuid("GPU", "default", 1, 0, 0) == "GPU-fe966c47-b25f-fc65-c52c-5d9037c4c0bd"
    assert names.suffix(1, 2) != names.suffix(12)
