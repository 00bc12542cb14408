"""Files that are written from tables: write them, or say which of them are stale."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Those of the files that are missing or whose text is another one."""
    return [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def main(files: Mapping[Path, str], module: str, arguments: Sequence[str]) -> int:
    """Write the files, or with ``--check`` only name those that are stale and return 1; 2 for wrong arguments."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write(f"usage: python -m {module} [--check]\n")
        return 2
    found = stale(files)
    if not arguments:
        for path in found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        return 0
    for path in found:
        sys.stderr.write(f"{path.name} is stale: run python -m {module}\n")
    return 1 if found else 0
