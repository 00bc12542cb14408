"""The digests that identify alerts and actions."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.alerts import fingerprint
from topics.blake2 import blake2b, blake2b_in_python


@given(content=st.binary(max_size=400), size=st.integers(1, 64))
def test_it_is_the_same_without_pythons_own(content: bytes, size: int) -> None:
    expected = hashlib.blake2b(content, digest_size=size).digest()
    assert blake2b(content, size) == blake2b_in_python(content, size) == expected


@pytest.mark.parametrize("size", [127, 128, 129, 256])
def test_whole_blocks_are_digested_without_pythons_own(size: int) -> None:
    content = bytes(range(256))[:size]
    assert blake2b_in_python(content, 8) == hashlib.blake2b(content, digest_size=8).digest()


@pytest.mark.parametrize(
    "error", [TypeError("'digest_size' is an invalid keyword argument"), ValueError("unsupported")]
)
def test_an_alert_has_the_same_id_in_fips_mode(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fingerprint("GPULost", "prod", "gpu-node-1", "GPU-0f12ab34")

    def refused(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr("hashlib.blake2b", refused)

    assert fingerprint("GPULost", "prod", "gpu-node-1", "GPU-0f12ab34") == expected
