"""What the servers of a process send to whom."""

import pytest

from delivery.listening import gzip_accepted


@pytest.mark.parametrize(
    ("header", "is_gzip"),
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
def test_gzip_is_sent_to_clients_that_accept_it(header: str, is_gzip: bool) -> None:
    assert gzip_accepted(header) is is_gzip
