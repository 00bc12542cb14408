"""What does not fit into a record gives way in a fixed order."""

from collections.abc import Iterable
from typing import Any

import orjson

from producers.cluster.record_size import fit


def _row(name: str, *, ended: int | None = None, began: int = 0, size: int = 0) -> dict[str, Any]:
    return {"name": name, "ended_ms": ended, "started_ms": began, "labels": {"x": "a" * size}, "annotations": {}}


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [row["name"] + ("" if row["labels"] else "-") for row in rows]


def test_what_does_not_fit_gives_way_in_order() -> None:
    rows = [_row("a"), _row("old", ended=1), _row("older", ended=0), _row("big", size=500), _row("new", began=9)]
    sizes = {row["name"]: len(orjson.dumps(row)) + 1 for row in rows}
    whole = sum(sizes.values())

    def left(room: int) -> tuple[list[str], int]:
        kept, shed = fit(rows, room)
        return _names(kept), shed

    assert left(whole) == (["a", "old", "older", "big", "new"], 0)
    assert left(whole - 1) == (["a", "old", "big", "new"], 1)
    assert left(whole - sizes["older"] - 1) == (["a", "big", "new"], 2)
    assert left(whole - sizes["older"] - sizes["old"] - 1) == (["a", "big-", "new"], 3)
    assert left(150)[0] == ["a-", "big-"]
    assert left(0) == ([], 5)
    assert all(row["labels"] for row in rows)
