"""Components are found by name and configured by what was given for their fields."""

from delivery.settings import Registered
from delivery.values import Address
from gpustream import components
from gpustream.components import Component
from sinks import SINKS
from tests.gpustream.fakes import FakeSettings

FAKE = Registered("tests.gpustream.fakes:FakeComponent", "tests.gpustream.fakes:FakeSettings", "A fake.", "gpustream")


def test_settings_take_what_was_given_for_their_fields() -> None:
    given = {"kafka": "a:1", "cluster": "c", "grace_s": 3.0, "instance_id": "x-0", "log_format": "text"}

    assert components.settings(FAKE, given) == FakeSettings("a:1", "c", grace_s=3.0, instance_id="x-0")


def test_what_was_not_given_has_its_default() -> None:
    assert components.settings(FAKE, {"kafka": "a:1", "cluster": "c"}) == FakeSettings("a:1", "c")


def test_off_is_given_to_a_field_that_may_be_none() -> None:
    scrape = SINKS["scrape"]

    assert components.settings(scrape, {"kafka": "a:1", "scrape_listen": None}).scrape_listen is None
    assert components.settings(scrape, {"kafka": "a:1"}).scrape_listen == Address("127.0.0.1", 9400)


def test_a_component_says_what_is_wrong_with_its_settings() -> None:
    given = {"kafka": "a:1", "cluster": "c", "grace_s": 100.0}

    assert components.mistakes(FAKE, given) == ["--grace must be below 100 s"]


def test_a_component_is_made_with_its_settings() -> None:
    made = components.make(FAKE, {"kafka": "a:1", "cluster": "c"})

    assert isinstance(made, Component)
    assert made.settings == FakeSettings("a:1", "c")  # type: ignore[attr-defined] # of the fake
