"""How consumers are connected, wherever they are."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("delivery", "docs/consumers", "gpustream", "producers", "sinks", "streams", "topics")


def consumers() -> Iterator[tuple[str, ast.Call]]:
    """Each place where a consumer is made."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AIOKafkaConsumer"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_consumer_reads_committed_records_but_the_one_that_looks_whether_there_are_any() -> None:
    isolation = {
        where: [ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "isolation_level"]
        for where, call in consumers()
    }
    assert len(isolation) >= 4
    others = {where: levels for where, levels in isolation.items() if levels != ["read_committed"]}
    assert list(others.values()) == [["read_uncommitted"]]
    assert next(iter(others)).startswith("delivery/kafka_admin.py")  # whether a topic is empty
