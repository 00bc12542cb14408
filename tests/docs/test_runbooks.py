"""Each runbook has commands of its own, and each command of gpustream in one is a command line that is right."""

import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.command_line import parsed
from tests.docs.page import ROOT, blocks
from tests.eventually import LIMIT_S

WORDS = (ROOT / "docs" / "runbooks" / "README.md").read_text()
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("[!R]*.md"))
OF_OTHERS = {
    *("ECC", "ROW_REMAPPER", "PERFORMANCE", "POWER", "CLOCK", "TEMPERATURE"),  # nvidia-smi's
    *("NVIDIA_VISIBLE_DEVICES", "GET", "SERVICE"),  # a container's, HTTP's, and Compose's, which it lists just before
}
OURS = [
    (path.stem, command)
    for path in RUNBOOKS
    for block in blocks(f"runbooks/{path.name}", "sh", indented=True)
    for command in re.findall(r"^ *(?:kubectl .* exec .* -- )?(gpustream .*)$", block.text, re.MULTILINE)
]


def test_a_runbook_has_commands() -> None:
    assert [path.stem for path in RUNBOOKS if not blocks(f"runbooks/{path.name}", "sh", indented=True)] == []


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_word_that_the_reader_has_to_put_in_is_explained(path: Path) -> None:
    code = " ".join(block.text for block in blocks(f"runbooks/{path.name}", "sh", indented=True))
    words = set(re.findall(r"(?<![\w-])[A-Z_]+\b(?::PORT)?", code)) - OF_OTHERS
    assert [word for word in words if not re.search(rf"^\|[^|]*\b{word}\b", WORDS, re.MULTILINE)] == []
    assert ("](README.md)" in path.read_text()) == bool(words)


@pytest.mark.parametrize(("name", "line"), OURS)
def test_a_command_of_a_runbook_is_right(name: str, line: str) -> None:
    arguments = shlex.split(line.replace("HOST:PORT", "127.0.0.1:9092"), comments=True)[1:]
    options = {option for param in parsed(arguments).command.params for option in param.opts}
    assert ("--kafka" in options) == ("--kafka" in arguments), name


class _NotReady(BaseHTTPRequestHandler):
    """Answers like /readyz of a component that is not ready."""

    def do_GET(self) -> None:
        """503, and the reasons."""
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b"attribution: no Kafka broker answers\n")


def test_the_runbook_of_a_component_that_is_not_ready_shows_its_reasons_without_curl_in_the_pod() -> None:
    (block,) = blocks("runbooks/GpustreamNotReady.md", "sh", indented=True)
    (command,) = re.findall(r"kubectl .* -- (python .*)$", block.text, re.MULTILINE)
    with HTTPServer(("127.0.0.1", 0), _NotReady) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = shlex.split(command.replace("9401", str(server.server_port)))[1:]
        ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        server.shutdown()
    assert (ran.stdout.strip(), ran.stderr) == ("attribution: no Kafka broker answers", "")
