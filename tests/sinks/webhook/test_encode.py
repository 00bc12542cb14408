"""A transition as a request."""

from pathlib import Path

import pytest

from sinks import webhook
from sinks.webhook import Secret, request, signature
from tests.sinks.alerts import START_MS, alert


def test_a_signature_is_hmac_sha256_as_others_compute_it() -> None:
    """RFC 4231, test case 2."""
    wanted = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert signature(b"what do ya want for nothing?", b"Jefe") == f"sha256={wanted}"


def test_a_request_is_the_record_under_the_transition_s_identity() -> None:
    one = alert()
    body, headers = request(one, b"{}", b"key")
    assert body == b"{}"
    assert headers == {
        "Content-Type": "application/json",
        "Idempotency-Key": f"{one.fingerprint}/{START_MS}/firing",
        "X-Gpustream-Signature": signature(b"{}", b"key"),
    }


def test_without_a_secret_nothing_is_signed() -> None:
    assert "X-Gpustream-Signature" not in request(alert(), b"{}", Secret(None).now()).headers


def test_a_secret_that_changes_in_its_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_LOOK_EVERY_S", 0.0)
    file = tmp_path / "secret"
    file.write_bytes(b"first\n")
    secret = Secret(file)
    assert secret.now() == b"first"
    file.write_bytes(b" the second ")
    assert secret.now() == b"the second"
    file.write_bytes(b"\n")
    with pytest.raises(ValueError, match="is empty"):
        secret.now()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        secret.now()
