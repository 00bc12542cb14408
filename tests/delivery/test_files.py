"""Files that users write, as they are read."""

import os
from pathlib import Path

from delivery import files


def test_a_pipe_says_the_same_each_time_it_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"[rules.GPUHeldIdle]")
    os.close(writing)
    path = Path(f"/dev/fd/{reading}")

    assert [files.read(path), files.read(path)] == [b"[rules.GPUHeldIdle]"] * 2


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    for content in (b"a", b"b"):
        path.write_bytes(content)

        assert files.read(path) == content
