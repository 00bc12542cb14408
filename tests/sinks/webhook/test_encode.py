"""A transition as a request."""

from pathlib import Path
from typing import get_args

import msgspec
import pytest
from cloudevents.core.bindings import http

from sinks import webhook
from sinks.webhook import Form, Secret, request, signature
from tests.sinks.alerts import START_MS, alert, assert_says


def test_a_signature_is_hmac_sha256_as_others_compute_it() -> None:
    """RFC 4231, test case 2."""
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert signature(b"what do ya want for nothing?", b"Jefe") == f"sha256={expected}"


def test_a_request_is_the_record_under_the_transition_s_identity() -> None:
    transition = alert()
    body, headers = request(transition, b"{}", "record", b"key")
    assert body == b"{}"
    assert headers == {
        "Content-Type": "application/json",
        "Idempotency-Key": f"{transition.fingerprint}/{START_MS}/firing",
        "X-Gpustream-Signature": signature(b"{}", b"key"),
    }


@pytest.mark.parametrize("form", get_args(Form))
def test_no_alert_makes_a_header_that_can_not_be_sent(form: Form) -> None:
    transition = msgspec.structs.replace(alert(name="a\r\nb"), state="\0 later\n")
    headers = request(transition, msgspec.json.encode(transition), form, b"key").headers
    assert headers["Idempotency-Key"] == f"{transition.fingerprint}/{START_MS}/%00%20later%0A"
    assert all(text.isascii() and text.isprintable() for text in headers.values())


def test_an_http_request_in_binary_mode_is_a_cloud_event_to_the_official_sdk() -> None:
    transition = alert(name='Größe "100 %"')
    record = msgspec.json.encode(transition)
    body, headers = request(transition, record, "binary", b"key")
    assert all("!" <= sign <= "~" for name, value in headers.items() if name.startswith("ce-") for sign in value)
    event = http.from_http_event(http.HTTPMessage(dict(headers), body))
    assert_says(event, transition)
    assert (body, headers["X-Gpustream-Signature"]) == (record, signature(record, b"key"))


def test_an_http_request_in_structured_mode_is_a_cloud_event_to_the_official_sdk() -> None:
    transition = alert(ends_ms=START_MS + 1000)
    body, headers = request(transition, msgspec.json.encode(transition), "structured", b"key")
    assert headers["Content-Type"] == "application/cloudevents+json"
    assert_says(http.from_http_event(http.HTTPMessage(dict(headers), body)), transition)
    assert headers["X-Gpustream-Signature"] == signature(body, b"key")
    assert msgspec.json.encode(transition) in body


def test_without_a_secret_nothing_is_signed() -> None:
    assert "X-Gpustream-Signature" not in request(alert(), b"{}", "record", Secret(None).current()).headers


def test_a_secret_that_changes_in_its_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_CHECK_EVERY_S", 0.0)
    file = tmp_path / "secret"
    file.write_bytes(b"first\n")
    secret = Secret(file)
    assert secret.current() == b"first"
    file.write_bytes(b" the second ")
    assert secret.current() == b"the second"
    file.write_bytes(b"\n")
    with pytest.raises(ValueError, match="is empty"):
        secret.current()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        secret.current()
