"""The reference of the rules."""

import re
from pathlib import Path

import pytest

from delivery.policies import ALERTS, IDLE_AFTER
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import KINDS
from streams.alerts.text import reference
from topics.reference import stale

PAGE = reference.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_current_tables() -> None:
    assert not stale({reference.PAGE: reference.markdown()})
    assert re.findall(r"<!-- written: (\w+) -->\n\n\| ", PAGE) == [
        "rules",
        "each",
        "sentences",
        "options",
        "selectors",
        "xids",
    ]


def test_a_changed_table_is_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference, "PAGE", tmp_path / "alerts.md")
    reference.PAGE.write_text(re.sub(r"\| `for` .*\n", "| `fur` | any | |\n", PAGE), encoding="utf-8")
    assert "`fur`" in reference.PAGE.read_text(encoding="utf-8")
    assert reference.markdown() == PAGE


def test_the_page_says_how_each_kind_is_judged_and_what_a_pod_may_say() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| [^|]* \| [^|]*\|$", PAGE, re.MULTILINE)) >= set(KINDS)
    assert f"| `{IDLE_AFTER}: 2h` |" in PAGE
    assert f'| `{ALERTS}: "off"` |' in PAGE


def test_the_file_on_the_page_is_a_valid_one() -> None:
    text = "\n".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    rules = rules_file.parse(text, "page")
    assert "GPUHeldIdleForHours" in {rule.name for rule in rules.rules}
    assert rules.bounds.overrides


def test_every_link_of_the_page_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert {Path(link).stem for link in links if link.startswith("../runbooks/")} == rules_file.defaults().keys()
    assert all((reference.PAGE.parent / link).is_file() for link in links)
