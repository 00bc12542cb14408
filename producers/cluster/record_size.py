"""What of a node's pods fits into one record.

In: the pods as a record has them, and the bytes that there are. Out: those that fit, and how many gave way.
All of it is pure.
"""

from typing import Any

import orjson

JsonDict = dict[str, Any]


def fit(rows: list[JsonDict], room: int) -> tuple[list[JsonDict], int]:
    """As many of a node's pods as fit into so many bytes, and how many are not told of, or not in full.

    First the pods that ended give way, the earliest end first; then annotations and labels of those that have the most;
    then the pods that began last, for it is the first ones that got the GPUs.
    """
    sizes = [size(row) + 1 for row in rows]
    over = sum(sizes) - room
    if over <= 0:
        return rows, 0
    kept: dict[int, JsonDict] = dict(enumerate(rows))
    shed = set()
    for i in sorted((i for i, row in kept.items() if row["ended_ms"] is not None), key=lambda i: rows[i]["ended_ms"]):
        if over > 0:
            over -= sizes[i]
            del kept[i]
            shed.add(i)
    for i in sorted(kept, key=lambda i: -sizes[i]):
        if over > 0:
            kept[i] = {**rows[i], "labels": {}, "annotations": {}}
            over -= sizes[i] - size(kept[i]) - 1
            shed.add(i)
    for i in sorted(kept, key=lambda i: -(rows[i]["started_ms"] or 0)):
        if over > 0:
            over -= size(kept.pop(i)) + 1
            shed.add(i)
    return list(kept.values()), len(shed)


def size(row: object) -> int:
    """The bytes of it in a record."""
    return len(orjson.dumps(row))
