"""Who gets which format."""

import pytest

from sinks.scrape.exposition import OPENMETRICS, TEXT, TEXT_1, Format, accepted, gzip_accepted

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "format_"),
    [
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OPENMETRICS),
        ("APPLICATION/OpenMetrics-Text;Version=1.0.0", OPENMETRICS),
        ("text/plain;version=1.0.0;escaping=underscores", TEXT_1),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.1", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0,text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;version=2.0.0,text/plain;version=0.0.4;q=0.5", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("text/*", TEXT),
        ("", TEXT),
    ],
)
def test_a_scraper_gets_what_it_prefers(accept: str, format_: Format) -> None:
    assert accepted(accept) is format_


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
def test_what_makes_no_sense_gets_the_plain_text(accept: str) -> None:
    assert accepted(accept) is TEXT


def test_formats_say_what_they_are() -> None:
    assert TEXT.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert OPENMETRICS.content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert TEXT_1.content_type.startswith("text/plain; version=1.0.0; charset=utf-8")


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("identity", False),
        ("x-gzipped", False),
        ("", False),
    ],
)
def test_gzip_is_for_who_wants_it(header: str, wanted: bool) -> None:
    assert gzip_accepted(header) is wanted
