"""ClickHouse in this process, with the tables and the view of a page; what is inserted stands for Kafka's."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def statements(text: str) -> list[str]:
    """The statements of a file, without its comments."""
    bare = "\n".join(line.partition("--")[0] for line in text.splitlines())
    return [statement.strip() for statement in bare.split(";") if statement.strip()]


class ClickHouse:
    """The ``tables`` of a page, of which the first reads Kafka."""

    def __init__(self, directory: Path, tables: str) -> None:
        chdb = pytest.importorskip("chdb.session", reason="OPTIONAL: ClickHouse in a process, pip install chdb")
        self._session = chdb.Session(str(directory / "clickhouse"))
        kafka_table, *others = statements(tables)
        queue = re.match(r"CREATE TABLE (\w+) \(record String\)", kafka_table)
        assert queue is not None
        self._queue = queue[1]
        for statement in ("CREATE DATABASE consumers", "USE consumers", f"{queue[0]} ENGINE = Null", *others):
            self._session.query(statement)

    def insert(self, lines: Iterable[str]) -> None:
        """Insert values of records."""
        values = ",".join("('" + line.replace("\\", "\\\\").replace("'", "\\'") + "')" for line in lines)
        self._session.query(f"INSERT INTO {self._queue} VALUES " + values)  # noqa: S608 - the lines are escaped

    def answer(self, query: str) -> list[dict[str, Any]]:
        """The rows that a query gives."""
        return [json.loads(line) for line in str(self._session.query(query, "JSONEachRow")).splitlines()]
