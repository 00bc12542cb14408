"""The settings' errors, all of them at once."""

from pathlib import Path
from typing import Any

import pytest

from sinks.remote_write.config import RemoteWriteSettings

GOOD: dict[str, Any] = {"kafka": "127.0.0.1:9092", "url": "https://mimir.example/api/v1/push"}


def test_good_settings_have_no_errors(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret")
    assert RemoteWriteSettings(**GOOD).errors() == []
    assert (
        RemoteWriteSettings(**GOOD, bearer_token_file=secret, tls_ca=secret, headers=(("X-Scope-OrgID", "a"),)).errors()
        == []
    )


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"url": "mimir:9009"}, "--url"),
        ({"url": "https://user:pass@mimir/push"}, "--url"),
        ({"names": ("nope",)}, "--names"),
        ({"kafka": ""}, "--kafka"),
        ({"basic_auth_user": "me"}, "--basic-auth-user"),
        ({"bearer_token_file": Path("/nowhere/token")}, "--bearer-token-file"),
        ({"tls_cert": Path("/nowhere/cert")}, "--tls-cert"),
        ({"tls_key": Path("/nowhere/key")}, "--tls-key"),
        ({"headers": (("Content-Encoding", "gzip"),)}, "--header"),
        ({"stale_after_s": 0}, "--stale-after"),
        ({"relabel": ("preset:nope",)}, "--relabel: there is no preset 'nope'"),
        ({"relabel": ("/nowhere/rules.yml",)}, "--relabel: /nowhere/rules.yml: No such file"),
        ({"external_labels": (("region", "eu"), ("region", "us"))}, "--external-label: region is given twice"),
        ({"session_timeout_s": 0.1}, "--session-timeout"),
        ({"resolution_s": 0.5}, "--resolution"),
        ({"resolution_s": 300.0}, "--resolution"),
        ({"aggregate": ("min",)}, "--aggregate"),
    ],
)
def test_an_error_names_its_option(changed: dict[str, Any], option: str) -> None:
    errors = RemoteWriteSettings(**{**GOOD, **changed}).errors()
    assert errors
    assert all(error.startswith(option) or option == "--tls-key" for error in errors)


def test_every_error_is_listed() -> None:
    errors = RemoteWriteSettings(kafka="", url="nope", stale_after_s=-1).errors()
    assert [error.split(":")[0] for error in errors] == ["--url", "--kafka", "--stale-after"]
