"""Files of counters: as dcgm-exporter's own parser, Go's encoding/csv, reads them, and followed by a sink at work."""

import asyncio
import json
import random
import shutil
import subprocess
from itertools import count
from pathlib import Path

from delivery import topic_admin
from delivery.values import Address
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.exposition import exposition
from sinks.scrape.sink import ScrapeSink
from sinks.series.counters_file import OLDER_TYPES, TYPES, CountersError, parse_csv
from tests.eventually import LIMIT_S, eventually
from tests.real.conftest import need
from tests.real.servers import KafkaServer, Missing
from tests.real.test_scrape import send, tick

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
    """The Go compiler, for the peer's parser; raises Missing."""
    path = shutil.which("go")
    if not path:
        raise Missing("no go on PATH: install Go, 1.21 or newer")
    return Path(path)


def texts() -> list[str]:
    """Texts of random characters, and texts of random rows, most of which are valid."""
    chance = random.Random(14)
    samples = ["".join(chance.choices(PIECES, k=chance.randint(0, 12))) for _ in range(TEXTS // 2)]
    ends = ["\n"] * 4 + ["\r\n", "\n\n", "\n# A,\n"]
    for _ in range(TEXTS // 2):
        rows = []
        for _ in range(chance.randint(1, 4)):
            columns = ["A", chance.choice(["gauge", " counter", "label "]), chance.choice(COLUMNS)]
            if chance.random() < 0.1:
                columns[chance.randrange(3)] = chance.choice(COLUMNS)
            rows.append(",".join(columns) + chance.choice(ends))
        samples.append("".join(rows))
    return samples


def test_a_csv_file_is_taken_just_where_the_peers_parser_takes_it_and_as_the_same_rows() -> None:
    need(find_go)
    samples = texts()

    result = subprocess.run(
        [find_go(), "run", PROGRAM],
        input="\n".join(map(json.dumps, samples)),
        capture_output=True,
        text=True,
        check=True,
    )

    served = 0
    for text, line in zip(samples, result.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        columns = [[column.strip(" ") for column in record] for record in answer["records"] or ()]
        good = "error" not in answer and all(
            len(row) == 3 and row[0] and row[1] in TYPES + OLDER_TYPES for row in columns
        )
        try:
            our_rows = [[row.name, row.type, row.help] for row in parse_csv(text)]
        except CountersError:
            our_rows = []
        assert our_rows == (columns if good else []), repr(text)
        served += bool(our_rows)
    assert served > TEXTS / 4


async def test_a_changed_file_is_in_force_without_a_restart(empty_kafka: KafkaServer, tmp_path: Path) -> None:
    """A ConfigMap's way: the folder of the file is a link, which is swapped."""
    for name, row in (("..1", "DCGM_FI_DEV_GPU_TEMP,gauge,T"), ("..2", "DCGM_FI_DEV_POWER_USAGE,gauge,In watts")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "counters.csv").write_text(f"{row}\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "counters.csv").symlink_to("..data/counters.csv")
    await topic_admin.create(empty_kafka.connection, 4, 1)
    sink = ScrapeSink(
        ScrapeSettings(
            kafka=empty_kafka.address,
            scrape_listen=Address("127.0.0.1", 0),
            counters=tmp_path / "counters.csv",
            from_="earliest",
            group="counters",
        )
    )
    stop, ticks = asyncio.Event(), count(1)
    running = asyncio.ensure_future(sink.run(stop))

    async def families() -> list[str]:
        await send(empty_kafka, tick("n-0", next(ticks), "bert"))
        text = b"".join(exposition(sink.series())).decode()
        return [line for line in text.splitlines() if line.startswith("#")]

    async def shows(*names: str) -> bool:
        return await families() == list(names)

    try:
        await eventually(lambda: shows("# HELP DCGM_FI_DEV_GPU_TEMP T", "# TYPE DCGM_FI_DEV_GPU_TEMP gauge"))
        (tmp_path / "new").symlink_to("..2")
        (tmp_path / "new").replace(tmp_path / "..data")
        await eventually(
            lambda: shows("# HELP DCGM_FI_DEV_POWER_USAGE In watts", "# TYPE DCGM_FI_DEV_POWER_USAGE gauge")
        )
    finally:
        stop.set()
        await asyncio.wait_for(running, LIMIT_S)
