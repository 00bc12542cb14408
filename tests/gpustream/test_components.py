"""Components are found by name and configured by options."""

import pytest

from gpustream import components
from gpustream.components import Component
from sinks import SINKS
from tests.gpustream.fakes import FakeComponent, FakeSettings


def test_settings_take_the_options_of_their_names_with_or_without_the_unit() -> None:
    options = {"kafka": "a:1", "cluster": "c", "grace": 3.0, "instance_id": "x-0", "log_format": "text"}

    assert components.settings(FakeComponent, options) == FakeSettings("a:1", "c", grace_s=3.0, instance_id="x-0")


def test_an_option_that_was_not_given_leaves_the_default() -> None:
    options = {"kafka": "a:1", "cluster": "c", "grace": None, "instance_id": None}

    assert components.settings(FakeComponent, options) == FakeSettings("a:1", "c")


def test_off_is_given_to_a_field_that_may_be_none() -> None:
    scrape = components.load(SINKS["scrape"])

    assert components.settings(scrape, {"kafka": "a:1", "scrape_listen": None, "group": None}).scrape_listen is None
    assert components.settings(scrape, {"kafka": "a:1"}).scrape_listen == ("127.0.0.1", 9400)


def test_a_component_says_what_is_wrong_with_its_settings() -> None:
    options = {"kafka": "a:1", "cluster": "c", "grace": 100.0}

    assert components.mistakes(FakeComponent, options) == ["--grace must be below 100 s"]


@pytest.mark.parametrize("target", ["", "no.such:Thing", "topics.no_such:Thing"])
def test_what_is_not_there_does_not_exist(target: str) -> None:
    assert not components.exists(target)


def test_what_is_there_exists_and_loads() -> None:
    target = "tests.gpustream.fakes:FakeComponent"

    assert components.exists(target)
    assert components.load(target) is FakeComponent


def test_the_fake_is_a_component() -> None:
    assert isinstance(FakeComponent(FakeSettings("a:1", "c")), Component)
