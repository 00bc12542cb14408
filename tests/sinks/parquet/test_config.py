"""What the Parquet sink says of settings that it can't work with."""

import importlib.util
from pathlib import Path

import pytest

from sinks.settings import ParquetSettings


def mistakes(path: Path) -> list[str]:
    return ParquetSettings(kafka="127.0.0.1:9092", path=path).errors()


def test_a_directory_need_not_be_there_yet(tmp_path: Path) -> None:
    assert mistakes(tmp_path / "usage") == mistakes(tmp_path) == []


def test_pyarrow_that_is_missing_is_said_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert mistakes(tmp_path) == ["sink parquet: run `pip install 'gpustream[parquet]'` first: it needs pyarrow"]


def test_a_path_that_can_not_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o444)
    assert mistakes(tmp_path / "file") == [f"--path: {tmp_path / 'file'} is no directory that can be written to"]
