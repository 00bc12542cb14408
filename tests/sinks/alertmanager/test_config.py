"""The settings' errors, all of them at once, and the groups of Alertmanagers."""

from pathlib import Path
from typing import Any

import pytest

from sinks.settings import AlertmanagerSettings

GOOD: dict[str, Any] = {"kafka": "127.0.0.1:9092", "urls": ("http://am-0:9093", "http://am-1:9093/prefix/")}


def test_good_settings_have_no_errors() -> None:
    assert AlertmanagerSettings(**GOOD).errors() == []


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({"urls": ()}, "--url: missing"),
        ({"urls": ("am:9093",)}, "--url"),
        ({"urls": ("http://user:pass@am:9093",)}, "--url: credentials"),
        ({"urls": ("http://am:9093/api/v2/alerts",)}, "--url: 'http://am:9093/api/v2/alerts': without"),
        ({"urls": ("http://am:9093/?a=b",)}, "--url: 'http://am:9093/?a=b': without a query"),
        ({"urls": ("http://am:9093", "http://am:9093/")}, "--url: 'http://am:9093' is given twice"),
        ({"resend_s": 0.5}, "--resend"),
        ({"resend_s": 3.6e13}, "--resend"),
        ({"kafka": ""}, "--kafka"),
        ({"session_timeout_s": 0.1}, "--session-timeout"),
        ({"headers": (("content-type", "text/plain"),)}, "--header"),
        ({"tls_ca": Path("/nowhere/ca")}, "--tls-ca"),
    ],
)
def test_an_error_names_its_option(changed: dict[str, Any], option: str) -> None:
    (error,) = AlertmanagerSettings(**{**GOOD, **changed}).errors()
    assert error.startswith(option)


def test_the_only_alertmanager_has_the_group_as_given_and_each_of_several_its_own() -> None:
    settings = AlertmanagerSettings(kafka="k:1", urls=("http://am-0:9093",))
    two = AlertmanagerSettings(**GOOD, group="mine")
    assert settings.group_of("http://am-0:9093") == "gpustream-sink-alertmanager"
    groups = [two.group_of(url) for url in two.urls]
    assert len(set(groups)) == 2
    assert all(group.startswith("mine-") for group in groups)
    turned = AlertmanagerSettings(kafka="k:1", urls=two.urls[::-1], group="mine")
    assert [turned.group_of(url) for url in two.urls] == groups, "whatever their order"
