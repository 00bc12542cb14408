"""What commands print: JSON is the same for programs, and safe on a terminal."""

import io
import json
import sys
from pathlib import Path

import pytest

from gpustream.output import failed, is_screen, json_text, written


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", True), ("UTF-8", True), ("ascii", False)])
def test_a_terminal_without_utf_8_gets_lines(monkeypatch: pytest.MonkeyPatch, encoding: str, expected: bool) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal(io.BytesIO(), encoding=encoding))

    assert is_screen() is expected


@pytest.mark.parametrize(
    "text", ["a\x1b[31mb", "\x9b31m", "\x7f", "\u202egpj", "\u2028", "\U000e0041", "é 中 \U0001f469"]
)
def test_json_has_no_character_on_which_a_terminal_acts_and_means_the_same(text: str) -> None:
    shown = json_text({"name": text, "count": 2**70})

    assert shown.isprintable()
    assert json.loads(shown) == {"name": text, "count": 2**70}


def test_a_failure_is_printed_without_the_password_of_a_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    failed("407, message='no', url='http://me:hunter2@proxy:3128'")

    assert capsys.readouterr().err == "407, message='no', url='http://***@proxy:3128'\n"


def test_a_file_is_not_written_through_a_link_that_somebody_else_put_beside_it(tmp_path: Path) -> None:
    file, other = tmp_path / "bill.csv", tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / ".bill.csv.tmp").symlink_to(other)
    with written(file) as out:
        out.write("ours")

    assert (file.read_text(), other.read_text(), file.is_symlink()) == ("ours", "theirs", False)


def test_a_link_that_leads_to_itself_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "week.html"
    loop.symlink_to(loop)
    with pytest.raises(SystemExit, match="1"), written(loop):
        pass

    assert "week.html: it can't be written: " in capsys.readouterr().err
