"""What a worker of the usage stream costs: a tick of 8 GPUs, and the books of a node.

    python -m tests.bench.bookkeeping [NODES]

The ticks are those of a simulated fleet, joined, a second apart. Each node is counted for two minutes, and then every
ten seconds until its books are as large as they become. CPU is that of the process for the second minute: decoding and
counting, and encoding the records and the books of that minute. It leaves out Kafka's client. Memory is the resident
set with all nodes' books in it, less that without.
"""

import sys
import time
from pathlib import Path

import msgspec

from producers.simulated.fleet import Fleet
from streams.usage import books as bookkeeping
from streams.usage.bookkeeper import Bookkeeper
from streams.usage.books import Accounting, Books
from streams.usage.tick import decode
from tests.bench.score import joined

NODES, GPUS, MINUTES, COPIES = 50, 8, 100, 20


def main(nodes: int) -> None:
    """Prints a table."""
    values: dict[str, list[bytes]] = {}
    for _, sample in joined(Fleet(nodes, GPUS, pod_life_s=3600), 125):
        values.setdefault(sample.node, []).append(msgspec.json.encode(sample))
    books, spent_us = list[bytes](), dict[str, list[float]]()
    for name, encoded in values.items():
        keeper = Bookkeeper(Books(schema=1, cluster="default", node=name), Accounting())
        for value in encoded[:60]:
            keeper.book(decode(value), decode(value).ts_ms)
        began_s = time.process_time()
        for value in encoded[60:120]:
            tick = decode(value)
            for record in keeper.book(tick, tick.ts_ms).records:
                record.key.encode(), bookkeeping.encode(record)
        bookkeeping.encode(keeper.books)
        last = decode(encoded[-1])
        kind = "shared" if any(len(device.holders) > 1 for device in last.devices) else "whole GPUs"
        kind = "MIG" if any(device.mig for device in last.devices) else kind
        spent_us.setdefault(kind, []).append((time.process_time() - began_s) / 60 * 1e6)
        for number in range(MINUTES * 6):
            ts_ms = last.ts_ms + number * 10_000
            later = msgspec.structs.replace(last, ts_ms=ts_ms, seq=last.seq + number, offset=last.offset + number)
            keeper.book(msgspec.structs.replace(later, interval_ms=10_000), ts_ms)
        books.append(bookkeeping.encode(keeper.books))
    empty_kib = _resident_kib()
    keepers = [Bookkeeper(bookkeeping.decode(value), Accounting()) for value in books for _ in range(COPIES)]
    each_kib = (_resident_kib() - empty_kib) / len(keepers) + sum(map(len, books)) / nodes / 1024
    rows = [
        (f"CPU a tick, {kind}", f"{min(costs_us):.0f} to {max(costs_us):.0f} us")
        for kind, costs_us in sorted(spent_us.items())
    ]
    sizes = sorted(len(value) / 1024 for value in books)
    rows += [
        ("books of a node in Kafka", f"{sum(sizes) / nodes:.0f} KiB on average, {sizes[-1]:.0f} at most"),
        ("memory", f"{each_kib:.0f} KiB a node, {each_kib * 10_000 / 1024 / 1024:.1f} GiB for 10,000"),
    ]
    sys.stdout.write(f"| {nodes} nodes of {GPUS} GPUs | |\n| --- | --- |\n")
    sys.stdout.write("".join(f"| {title} | {value} |\n" for title, value in rows))


def _resident_kib() -> float:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(rows["VmRSS"].split()[0])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else NODES)
