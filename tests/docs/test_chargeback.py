"""docs/how-to/chargeback.md: its example, run as it stands there, on a broker that has the hour that it is about."""

import asyncio
import csv
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result

from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from gpustream.usage.focus import id_forms, read_nodes
from sinks.parquet import HourFiles
from tests.docs.page import ROOT, blocks
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES

HOUR: dict[str, Any] = {"node": "gpu-node-1", "start_ms": START_MS + 13 * HOUR_MS}
SECOND: dict[str, Any] = {**HOUR, "gpu_uuid": "GPU-2"}
RECORDS = [
    usage("ml-team", used_us=54 * 60 * 10**6, energy_mj=2_340_000_000, team="vision", **HOUR),
    usage("serving", device_ms=20 * MINUTE_MS, used_us=540_000_000, idle_ms=300_000, energy_mj=420_000_000, **SECOND),
    usage(device_ms=39 * MINUTE_MS, energy_mj=234_000_000, **SECOND),
    usage(device_ms=MINUTE_MS, category="unobserved", **SECOND),
]  # fmt: skip


@pytest.fixture(scope="module")
def kafka() -> Iterator[str]:
    async def write(address: str) -> None:
        async with AIOKafkaProducer(bootstrap_servers=address) as producer:
            for record in RECORDS:
                await producer.send_and_wait(
                    HOURS.name, msgspec.json.encode(record), key=record.key.encode(), partition=0
                )

    with EmbeddedBroker() as running:
        running.start({HOURS.name: 1, MINUTES.name: 1})
        asyncio.run(write(running.address))
        yield running.address


def run(kafka: str, section: str) -> Result:
    """Runs the command of a section."""
    (command,) = blocks("how-to/chargeback.md", "sh", section)
    arguments = shlex.split(command.text.replace("$KAFKA", kafka))
    return CliRunner().invoke(main, arguments[1:])


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page has, in the directory where the commands run."""
    monkeypatch.chdir(tmp_path)
    Path("prices.yaml").write_text(blocks("how-to/chargeback.md", "yaml", "Prices")[0].text)
    Path("bill.csv").write_text(blocks("how-to/chargeback.md", "csv", "On a bill")[0].text)
    Path("nodes.txt").write_text("aws:///eu-west-1a/i-0abc  gpu-node-1\n")


def test_the_table_is_what_the_command_prints(kafka: str) -> None:
    result = run(kafka, "The table")
    (expected,) = blocks("how-to/chargeback.md", "text", "The table")
    assert result.exit_code == 0
    assert result.stdout == expected.text


def test_the_bill_is_divided_as_the_page_says(kafka: str) -> None:
    result = run(kafka, "On a bill")
    expected = blocks("how-to/chargeback.md", "csv", "On a bill")[1].text
    columns = expected.splitlines()[0].split(",")
    rows = list(csv.DictReader(io.StringIO(Path("allocated.csv").read_text())))
    exported = "\n".join([",".join(columns), *(",".join(row[name] for name in columns) for row in rows)]) + "\n"
    assert result.exit_code == 0
    assert exported == expected


def test_a_node_has_the_id_of_its_scale_set_by_what_the_page_adds_to_the_command(tmp_path: Path) -> None:
    (command,) = re.findall(r"`\| (sed [^`]*)`", (ROOT / "docs" / "how-to" / "chargeback.md").read_text())
    scale_set = "/subscriptions/a/resourceGroups/b/providers/Microsoft.Compute/virtualMachineScaleSets/gpus"
    nodes = "".join(f"azure://{scale_set}/virtualMachines/{number}   gpus-{number}\n" for number in (0, 12))
    cut = subprocess.run(shlex.split(command), input=nodes, capture_output=True, text=True, check=True)
    (tmp_path / "cut.txt").write_text(cut.stdout)
    ids = read_nodes(tmp_path / "cut.txt")
    assert ids == {"gpus-0": [f"azure://{scale_set}"], "gpus-12": [f"azure://{scale_set}"]}
    assert id_forms(f"azure://{scale_set}") == id_forms(scale_set)


def test_the_query_of_the_files_is_answered(tmp_path: Path) -> None:
    HourFiles(tmp_path, 7).merge(HOUR["start_ms"], RECORDS)
    assert [path.name for path in tmp_path.glob("date=2026-11-20/*.parquet")] == ["usage-13-p7.parquet"]
    (query,) = blocks("how-to/chargeback.md", "sql", "Files that you keep")
    rows = duckdb.execute(query.text.replace("/var/lib/gpustream/usage", str(tmp_path))).fetchall()
    assert [(str(date), team, hours) for date, team, hours in rows] == [
        ("2026-11-20", "vision", 1.0),
        ("2026-11-20", None, pytest.approx(1 / 3)),
    ]
