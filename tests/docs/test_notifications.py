"""docs/how-to/notifications.md: its excerpts work, and its table is what the code does."""

import re
from typing import Any

import msgspec
import pytest
import yaml

from sinks.receiver import meaning
from sinks.webhook import signature
from tests.command_line import parsed
from tests.docs.page import ROOT, blocks
from topics.alerts import TOPIC, Alert, cloud_event

PAGE = "how-to/notifications.md"


def test_the_check_of_a_signature_takes_ours_and_no_other() -> None:
    names: dict[str, object] = {}
    (code,) = blocks(PAGE, "python")
    exec(code.text, names)  # noqa: S102 - our own page
    is_ours = names["is_ours"]
    assert callable(is_ours)
    assert is_ours(b"body", signature(b"body", b"key"), b"key")
    assert not is_ours(b"body", signature(b"body", b"another"), b"key")
    assert not is_ours(b"changed", signature(b"body", b"key"), b"key")


@pytest.mark.parametrize("header", ["", "sha256=", "sha256=\u00e9", "sha256=\udce9"], ids=ascii)
def test_the_check_of_a_signature_refuses_a_header_of_any_characters(header: str) -> None:
    names: dict[str, Any] = {}
    (code,) = blocks(PAGE, "python")
    exec(code.text, names)  # noqa: S102 - our own page
    assert not names["is_ours"](b"body", header, b"key")


@pytest.mark.parametrize("command", [block.text for block in blocks(PAGE, "sh")])
def test_its_commands_have_no_error_but_the_file_that_is_not_here(command: str) -> None:
    arguments = command.replace("--secret-file /etc/gpustream/webhook-key", "--unsigned").split()[1:]
    params = parsed(arguments).params
    assert params.get("url") or params["urls"]


def test_what_knative_reads_and_filters_by_is_what_an_alert_says() -> None:
    (block,) = blocks(PAGE, "yaml", "CloudEvents")
    source, trigger = yaml.safe_load_all(block.text)
    assert source["spec"]["topics"] == [TOPIC.name]
    says = cloud_event(msgspec.convert(TOPIC.example, Alert))
    assert trigger["spec"]["filter"]["attributes"].items() <= says.items()


def test_its_table_of_answers_is_the_code_s() -> None:
    page = (ROOT / "docs" / PAGE).read_text()
    rows = re.findall(r"^\| ([^|]*\d{3}[^|]*|any other 4xx|2xx) \|", page, flags=re.MULTILINE)
    again, misconfigured = ({int(number) for number in re.findall(r"\d{3}", row)} for row in rows[1:3])
    by_meaning = {
        means: {status for status in range(400, 500) if meaning(status) == means}
        for means in ("again", "misconfigured")
    }
    assert by_meaning == {"again": again, "misconfigured": misconfigured}


def test_what_it_links_to_is_there() -> None:
    page = ROOT / "docs" / PAGE
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
