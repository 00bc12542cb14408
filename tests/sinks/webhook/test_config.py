"""The settings' errors, all of them at once."""

from pathlib import Path
from typing import Any

import pytest

from sinks.settings import WebhookSettings

GOOD: dict[str, Any] = {"kafka": "127.0.0.1:9092", "url": "https://hooks.example/gpu"}


def test_good_settings_have_no_errors(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    assert WebhookSettings(**GOOD, unsigned=True).errors() == []
    assert WebhookSettings(**GOOD, secret_file=secret, headers=(("X-Team", "a"),)).errors() == []


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"url": "hooks:80"}, "--url"),
        ({"url": "https://user:pass@hooks/"}, "--url"),
        ({"unsigned": False}, "--secret-file: missing"),
        ({"unsigned": False, "secret_file": Path("/nowhere/secret")}, "--secret-file: no file"),
        ({"unsigned": False, "secret_file": Path("/dev/null")}, "--secret-file: no file"),
        ({"secret_file": Path(__file__)}, "--unsigned"),
        ({"content_mode": "structured"}, "--content-mode: it is of no use"),
        ({"kafka": ""}, "--kafka"),
        ({"session_timeout_s": 0.1}, "--session-timeout"),
        ({"headers": (("idempotency-key", "1"),)}, "--header"),
        ({"headers": (("X-Gpustream-Signature", "1"),)}, "--header"),
        ({"headers": (("Ce-Id", "1"),)}, "--header"),
        ({"bearer_token_file": Path("/nowhere/token")}, "--bearer-token-file"),
    ],
)
def test_an_error_names_its_option(changed: dict[str, Any], option: str) -> None:
    (error,) = WebhookSettings(**{**GOOD, "unsigned": True, **changed}).errors()
    assert error.startswith(option)


def test_an_empty_secret_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(" \n")
    (error,) = WebhookSettings(**GOOD, secret_file=tmp_path / "secret").errors()
    assert error.endswith("is empty")


def test_every_error_is_listed() -> None:
    errors = WebhookSettings(kafka="", url="nope").errors()
    assert [error.split(":")[0] for error in errors] == ["--url", "--secret-file", "--kafka"]
