"""The table of XID errors."""

import pytest

from streams.alerts.xids import UNKNOWN, XID_KINDS, XIDS, XidKind, of_code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (13, "application"),
        (31, "application"),
        (43, "application"),
        (45, "application"),
        (48, "hardware"),
        (57, "hardware"),
        (58, "hardware"),
        (59, "driver"),
        (62, "hardware"),
        (63, "recovered"),
        (64, "hardware"),
        (74, "hardware"),
        (79, "hardware"),
        (92, "recovered"),
        (94, "hardware"),
        (95, "hardware"),
        (119, "hardware"),
        (145, "hardware"),
        (156, "hardware"),
        (173, "hardware"),
        (38, "driver"),
    ],
)
def test_each_code_says_who_caused_the_error(code: int, kind: XidKind) -> None:
    assert of_code(code).kind == kind


def test_an_error_that_newer_drivers_report_is_not_called_one_of_older_drivers() -> None:
    assert [code for code, xid in XIDS.items() if "older drivers" in xid.meaning] == [59]


@pytest.mark.parametrize("code", [None, 0, -1, 1, 999, 10**9])
def test_a_code_without_a_row_is_unknown(code: int | None) -> None:
    assert of_code(code) == UNKNOWN


def test_what_is_said_of_an_unknown_code_can_be_read_where_no_table_is() -> None:
    assert "table" not in of_code(999).meaning


def test_every_row_has_a_cause_a_meaning_and_an_action() -> None:
    assert len(XIDS) > 90
    assert {xid.kind for xid in XIDS.values()} == set(XID_KINDS) - {"unknown"}
    assert all(xid.meaning and xid.action and not xid.meaning.endswith(".") for xid in XIDS.values())
    assert list(XIDS) == sorted(XIDS)
