"""The reference of the rules."""

import re

from streams.alerts.rules import rules_file
from streams.alerts.text import reference
from topics.reference import stale


def test_the_page_is_what_the_tables_say() -> None:
    assert not stale({reference.PAGE: reference.markdown()})


def test_the_file_on_the_page_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", reference.markdown(), re.DOTALL)
    assert "GPUHeldIdleForHours" in {rule.name for rule in rules_file.parse(text, "page").rules}


def test_every_link_of_the_page_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", reference.markdown())
    assert len(links) == len(rules_file.defaults())
    assert all((reference.PAGE.parent / link).is_file() for link in links)
