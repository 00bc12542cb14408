"""The errors of settings with which the Parquet sink can't work."""

import importlib.util
from pathlib import Path

import pytest

from sinks.settings import ParquetSettings


def errors_of(path: Path) -> list[str]:
    return ParquetSettings(kafka="127.0.0.1:9092", path=path).errors()


def test_a_directory_need_not_be_there_yet(tmp_path: Path) -> None:
    assert errors_of(tmp_path / "usage") == errors_of(tmp_path) == []


def test_a_missing_pyarrow_is_reported_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert errors_of(tmp_path) == ["sink parquet: run `pip install 'gpustream[parquet]'` first: it needs pyarrow"]


def test_a_path_that_can_not_be_written_to_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o444)
    assert errors_of(tmp_path / "file") == [f"--path: {tmp_path / 'file'} is no directory that can be written to"]


def test_a_path_that_no_disk_can_have_is_reported(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    assert errors_of(path) == [f"--path: {path} is no directory that can be written to"]
