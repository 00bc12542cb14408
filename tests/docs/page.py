"""A page of the documentation, as tests read it: its code blocks, by section and language."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONSUMERS = ROOT / "docs" / "consumers"

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IN_A_LIST = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block, and the title of the section it is in."""

    section: str
    language: str
    text: str


def blocks(page: str, language: str, section: str | None = None, *, indented: bool = False) -> list[Block]:
    """The blocks of `docs/PAGE` in one language, of one section or all; ``indented``: those in lists, too."""
    blocks = []
    for part in re.split(r"^## ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE):
        title = part.partition("\n")[0]
        blocks += [Block(title, *match) for match in (_IN_A_LIST if indented else _FENCE).findall(part)]
    return [block for block in blocks if block.language == language and section in (None, block.section)]
