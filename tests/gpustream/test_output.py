"""What commands print: JSON is the same for programs, and safe on a terminal."""

import json

import pytest

from gpustream.output import json_text


@pytest.mark.parametrize(
    "text", ["a\x1b[31mb", "\x9b31m", "\x7f", "\u202egpj", "\u2028", "\U000e0041", "é 中 \U0001f469"]
)
def test_json_has_no_character_on_which_a_terminal_acts_and_means_the_same(text: str) -> None:
    shown = json_text({"name": text, "count": 2**70})

    assert shown.isprintable()
    assert json.loads(shown) == {"name": text, "count": 2**70}
