"""Each runbook has commands of its own, and each command of gpustream in one is a command line that is right."""

import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import parsed
from tests.docs.page import ROOT, blocks

RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
OURS = [
    (path.stem, command)
    for path in RUNBOOKS
    for block in blocks(f"runbooks/{path.name}", "sh", indented=True)
    for command in re.findall(r"^ *(?:kubectl .* exec .* -- )?(gpustream .*)$", block.text, re.MULTILINE)
]


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_has_commands(path: Path) -> None:
    assert blocks(f"runbooks/{path.name}", "sh", indented=True)


@pytest.mark.parametrize(("name", "line"), OURS)
def test_a_command_of_a_runbook_is_right(name: str, line: str) -> None:
    arguments = shlex.split(line.replace("HOST:PORT", "127.0.0.1:9092"), comments=True)[1:]
    options = {option for param in parsed(arguments).command.params for option in param.opts}
    assert ("--kafka" in options) == ("--kafka" in arguments), name
