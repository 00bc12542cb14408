"""Files of counters as dcgm-exporter's own parser, Go's encoding/csv, reads them."""

import json
import random
import shutil
import subprocess
from pathlib import Path

from sinks.series.counters_file import OLDER_TYPES, TYPES, CountersError, parse_csv
from tests.real.conftest import need
from tests.real.servers import Missing

PROGRAM = Path(__file__).parent / "build" / "csv" / "main.go"
TEXTS = 4000
PIECES = ['"', '""', ",", ", ", "#", " ", "\t", "\n", "\r\n", "\r", "A", "é", "gauge", "counter", "\n\n", "\n#", "\n "]
COLUMNS = [
    "A",
    " A ",
    '"A"',
    '"A,B"',
    '"A ""B"""',
    "gauge",
    "  gauge",
    " label ",
    '"gauge"',
    ' "gauge"',
    '"A\nB"',
    "",
    'A"',
]


def find_go() -> Path:
    """What compiles the peer's parser; raises Missing."""
    found = shutil.which("go")
    if not found:
        raise Missing("no go on PATH: install Go, 1.21 or newer")
    return Path(found)


def texts() -> list[str]:
    """Some of random signs, some of random rows, most of which are right."""
    chance = random.Random(14)
    found = ["".join(chance.choices(PIECES, k=chance.randint(0, 12))) for _ in range(TEXTS // 2)]
    ends = ["\n"] * 4 + ["\r\n", "\n\n", "\n# A,\n"]
    for _ in range(TEXTS // 2):
        rows = []
        for _ in range(chance.randint(1, 4)):
            columns = ["A", chance.choice(["gauge", " counter", "label "]), chance.choice(COLUMNS)]
            if chance.random() < 0.1:
                columns[chance.randrange(3)] = chance.choice(COLUMNS)
            rows.append(",".join(columns) + chance.choice(ends))
        found.append("".join(rows))
    return found


def test_a_csv_file_is_taken_just_where_the_peers_parser_takes_it_and_as_the_same_rows() -> None:
    need(find_go)
    asked = texts()

    done = subprocess.run(
        [find_go(), "run", PROGRAM], input="\n".join(map(json.dumps, asked)), capture_output=True, text=True, check=True
    )

    taken = 0
    for text, line in zip(asked, done.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        columns = [[column.strip(" ") for column in record] for record in answer["records"] or ()]
        good = "error" not in answer and all(
            len(row) == 3 and row[0] and row[1] in TYPES + OLDER_TYPES for row in columns
        )
        try:
            ours = [[one.name, one.type, one.help] for one in parse_csv(text)]
        except CountersError:
            ours = []
        assert ours == (columns if good else []), repr(text)
        taken += bool(ours)
    assert taken > TEXTS / 4
