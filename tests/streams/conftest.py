"""What holds for the tests of all streams."""

import math
from collections.abc import Iterator

import pytest

from delivery import tasks


@pytest.fixture(autouse=True, scope="module")
def one_turn() -> Iterator[None]:
    """A turn does not end: how often the event loop runs must not depend on how busy the machine is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tasks, "TURN_S", math.inf)
        yield
