"""The picture of the components and their topics, ``docs/flow.svg``: ``python -m docs.flow [--check]``.

In: the registries of producers, streams and sinks. Out: SVG.
"""

import sys
from html import escape
from pathlib import Path

from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS
from topics.reference import generate

PATH = Path(__file__).with_name("flow.svg")

WIDTH, HEIGHT, ROW, TOP = 124, 26, 44, 46
COLUMNS = (20, 190, 370, 540, 710)
TITLES = ("producers/", "topics/", "streams/", "topics/", "sinks/")
FILL = {"component": "#e6f0fa", "topic": "#fdf3d8"}


def svg() -> str:
    """Producers, their topics, streams, their topics, sinks: a column each; an arrow from each to what it writes."""
    raw = [topic for row in PRODUCERS.values() for topic in row.writes]
    produced = [topic for row in STREAMS.values() for topic in row.writes]
    columns = [list(PRODUCERS), list(dict.fromkeys(raw)), list(STREAMS), list(dict.fromkeys(produced)), list(SINKS)]
    position: dict[str, tuple[int, int]] = {}
    boxes: list[str] = []
    rows = max(map(len, columns))
    for x, title, names in zip(COLUMNS, TITLES, columns, strict=True):
        boxes.append(f'<text x="{x + WIDTH // 2}" y="22" class="title">{title}</text>')
        for index, name in enumerate(names):
            y = TOP + ROW * index + (rows - len(names)) * ROW // 2
            position[name] = x, y
            kind = "topic" if title == "topics/" else "component"
            boxes.append(
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="{3 if kind == "topic" else 12}"'
                f' fill="{FILL[kind]}" stroke="#667"/>'
                f'<text x="{x + WIDTH // 2}" y="{y + 17}">{escape(name)}</text>'
            )
    arrows = [
        _arrow(position[source], position[target])
        for name, row in [*PRODUCERS.items(), *STREAMS.items(), *SINKS.items()]
        for source, target in [*((topic, name) for topic in row.reads), *((name, topic) for topic in row.writes)]
    ]
    size = COLUMNS[-1] + WIDTH + 20, TOP + ROW * rows
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif"'
            ' font-size="12" text-anchor="middle">',
            "<style>.title{font-weight:bold;fill:#445}</style>",
            '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
            '<path d="M0,0 L7,3 L0,6 z" fill="#667"/></marker></defs>',
            f'<rect width="{size[0]}" height="{size[1]}" fill="#fff"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    """From the right of one box to the left of another; back if a stream reads what another one wrote."""
    x1, y1, x2, y2 = source[0] + WIDTH, source[1] + HEIGHT // 2, target[0], target[1] + HEIGHT // 2
    if x2 < x1:
        x1, x2, y2 = source[0], target[0] + WIDTH, y2 - 6
    middle = (x1 + x2) // 2
    path = f"M{x1},{y1} C{middle},{y1} {middle},{y2} {x2},{y2}"
    return f'<path d="{path}" fill="none" stroke="#889" marker-end="url(#end)"/>'


if __name__ == "__main__":
    sys.exit(generate({PATH: svg()}, "docs.flow", sys.argv[1:]))
