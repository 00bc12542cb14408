"""Identities look like NVIDIA's and Kubernetes', and are functions of what they identify."""

import re

from hypothesis import given
from hypothesis import strategies as st

from producers.simulated import names

identities = st.lists(st.text(max_size=5) | st.integers(), max_size=4).map(tuple)


@given(identities)
def test_a_device_uuid_is_lower_hex_in_five_groups(identity: tuple[object, ...]) -> None:
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", names.device_uuid("GPU", *identity))


@given(identities)
def test_a_pods_uid_is_a_version_4_uuid(identity: tuple[object, ...]) -> None:
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", names.object_uid(*identity)
    )


@given(identities)
def test_a_serial_number_has_13_digits(identity: tuple[object, ...]) -> None:
    assert re.fullmatch(r"[0-9]{13}", names.serial(*identity))


@given(identities)
def test_generated_names_have_no_vowels(identity: tuple[object, ...]) -> None:
    assert re.fullmatch(r"[bcdfghjklmnpqrstvwxz2456789]{5}", names.suffix(*identity))
    assert re.fullmatch(r"[bcdf456789]{1,10}", names.template_hash(*identity))


@given(identities, st.sets(st.integers(0, names.SUFFIXES - 1), max_size=100))
def test_numbered_objects_have_suffixes_of_their_own(identity: tuple[object, ...], numbers: set[int]) -> None:
    suffixes = {names.numbered_suffix(number, *identity) for number in numbers}

    assert len(suffixes) == len(numbers)
    assert all(re.fullmatch(r"[bcdfghjklmnpqrstvwxz2456789]{5}", suffix) for suffix in suffixes)


@given(identities)
def test_a_fraction_is_at_least_0_and_below_1(identity: tuple[object, ...]) -> None:
    assert 0 <= names.fraction(*identity) < 1


def test_identities_are_the_same_on_every_machine() -> None:
    assert names.suffix("pod", "default", 1, 0, 0, 0) == names.suffix("pod", "default", 1, 0, 0, 0)
    assert names.device_uuid("GPU", "default", 1, 0, 0) == "GPU-fe966c47-b25f-fc65-c52c-5d9037c4c0bd"
    assert names.suffix(1, 2) != names.suffix(12)
