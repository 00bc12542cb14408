"""Files written from tables: written once, and never by the check."""

from pathlib import Path

import pytest

from topics import generated


def test_files_are_written_where_they_are_missing_or_stale(tmp_path: Path) -> None:
    fresh, old, missing = tmp_path / "fresh", tmp_path / "old", tmp_path / "folder" / "missing"
    fresh.write_text("1")
    old.write_text("0")
    files = {fresh: "1", old: "2", missing: "3"}

    assert generated.stale(files) == [old, missing]
    assert generated.main(files, "topics.schema", []) == 0
    assert generated.stale(files) == []
    assert [path.read_text() for path in files] == ["1", "2", "3"]


def test_the_check_names_what_is_stale_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {tmp_path / "gpu.samples.json": "new"}

    assert generated.main(files, "topics.schema", ["--check"]) == 1
    assert capsys.readouterr().err == "gpu.samples.json is stale: run python -m topics.schema\n"
    assert list(tmp_path.iterdir()) == []


def test_the_check_passes_where_nothing_is_stale(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")

    assert generated.main({tmp_path / "a": "a"}, "topics.schema", ["--check"]) == 0


def test_wrong_arguments_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert generated.main({}, "topics.schema", ["--fix"]) == 2
    assert "usage: python -m topics.schema [--check]" in capsys.readouterr().err
