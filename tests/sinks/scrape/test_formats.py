"""Which client gets which format."""

import pytest

from sinks.scrape.exposition import TEXT, TEXT_1, TEXT_UTF8, accepted

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "format_"),
    [
        (PROMETHEUS_3, TEXT_UTF8),
        ("application/openmetrics-text", TEXT),
        ("TEXT/Plain;Version=1.0.0", TEXT_1),
        ("text/plain;version=1.0.0;escaping=underscores", TEXT_1),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.1", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0,text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;version=2.0.0,text/plain;version=0.0.4;q=0.5", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("text/*", TEXT),
        ("", TEXT),
    ],
)
def test_a_scraper_gets_what_it_prefers(accept: str, format_: str) -> None:
    assert accepted(accept) == format_


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=banana",
        "application/openmetrics-text;version=",
        "application/openmetrics-text;q=much",
        "application/openmetrics-text;q=nan",
        "application/openmetrics-text;q=7",
        "application/openmetrics-text;q=-1",
        "image/png",
        "text/plain;q=0",
        ";;;,=,;q=,",
        "\x00",
    ],
)
def test_a_malformed_accept_header_gets_the_plain_text(accept: str) -> None:
    assert accepted(accept) == TEXT
