"""The figures of the pages on sizing and benchmarks, and the plot of growth: ``python -m docs.figures [--check]``.

In: what the benchmarks wrote beside themselves, ``tests/bench/*.json``; the pages. Out: the pages with tables made of
these figures, each between its marks; the rest of a page stays. An SVG.
"""

import json
import sys
from collections.abc import Callable, Mapping
from math import ceil, log2, log10
from pathlib import Path
from typing import Any, NamedTuple

from topics.reference import filled, generate, table

OPERATIONS, BENCH = Path(__file__).parent / "operations", Path(__file__).parents[1] / "tests" / "bench"

GPUS, FLEETS, PARTITIONS = 8, (1_000, 3_000, 10_000, 30_000, 100_000), 32
USED, BROKER_CORES, BROKER_USED, BROKER_DISK, REPLICAS, DAY_S = 0.7, 4, 0.5, 2e12, 3, 86_400
LINK_BYTES, DISTRIBUTOR, RESOLUTION_S = 125e6, 25_000, 15


def figures(name: str) -> dict[str, dict[str, Any]]:
    """What a benchmark has measured: each figure by its name."""
    return {figure["what"]: figure for figure in json.loads((BENCH / f"{name}.json").read_text())}


AIMS, LIVE, GROWTH, LARGE = (figures(name) for name in ("aims", "live", "growth", "large"))

# -- sizing


class Part(NamedTuple):
    """What one node costs: its name in formulas, what it is, and the figure in the unit given."""

    name: str
    title: str
    value: float
    unit: str


def _aim(title: str) -> float:
    return float(AIMS[title]["value"])


def _live(title: str) -> float:
    return float(LIVE[title]["value"])


KEEPING_UP = _live("attribution") / _aim("attribution")
"""How much more a tick costs a worker that keeps up than one with a backlog, whose batches are larger."""


S = Part("S", "`gpu.samples` on disk, one replica", _aim("gpu.samples on disk"), "bytes a tick")
A = Part("A", "`gpu.attributed` on disk, one replica", _aim("gpu.attributed on disk"), "bytes a tick")
V = Part("V", "samples that Prometheus is sent", _aim("samples written"), "a tick")
W = Part("W", "remote write 2.0 on the wire", _aim("remote write 2.0 on the wire"), "bytes a tick")
K = Part("K", "Kafka, while workers are busy", _live("Kafka"), "us of a core a tick")
CPU = {
    "attribution": Part("a", "the attribution stream", _live("attribution"), "us of a core a tick"),
    "remote write": Part("w", "remote write 1.0", _live("remote write"), "us of a core a tick"),
    "alerts": Part("r", "the alert stream", _aim("alerts") * KEEPING_UP, "us of a core a tick"),
    "usage": Part("u", "the usage stream", _aim("usage") * KEEPING_UP, "us of a core a tick"),
}
M = Part("M", "memory of attribution, all workers", _aim("a worker with 10,000 nodes") / 10_000 * 1024, "KiB a node")
Q = Part("Q", "memory of remote write", _aim("a sink with 2,000,000 series") / 2e6 * 1024 * V.value, "KiB a node")


class Need(NamedTuple):
    """What a fleet needs: a formula, and the same as a function of its nodes."""

    title: str
    formula: str
    demand: Callable[[float], float]


def pods(part: Part, nodes: float) -> int:
    """How many pods of one core each, of which some is left free."""
    return ceil(nodes * part.value / 1e6 / USED)


def partitions(nodes: float) -> int:
    """Twice as many as the most pods of a stream or a sink, a power of two."""
    most = max(pods(part, nodes) for part in CPU.values())
    return max(PARTITIONS, int(2 ** ceil(log2(2 * most))))


NEEDS = (
    Need("nodes, and ticks a second", "n = GPUs / 8", lambda n: n),
    *(
        Need(f"pods of {name}", f"n {part.name} / 700,000", lambda n, part=part: pods(part, n))  # type: ignore[misc]
        for name, part in CPU.items()
    ),
    Need("partitions", "2 x the most pods, 32 or more", partitions),
    Need("memory of attribution, all pods, GiB", "n M + 0.06 GiB a pod", lambda n: memory(M, "attribution", n)),
    Need("memory of remote write, all pods, GiB", "n Q + 0.06 GiB a pod", lambda n: memory(Q, "remote write", n)),
    Need("disk of the brokers, 24 h, TB", "3 n (S + A) 86,400", lambda n: disk(n) / 1e12),
    Need("written by the brokers, MB/s", "3 n (S + A)", lambda n: disk(n) / DAY_S / 1e6),
    Need("read from the brokers, MB/s", "n (S + 3 A)", lambda n: n * (S.value + 3 * A.value) / 1e6),
    Need("brokers of 4 cores, half used, and 2 TB", "3 n K / 2,000,000 or by disk, 3 or more", lambda n: brokers(n)),
    Need("to the receiver, MB/s", "n W", lambda n: n * W.value / 1e6),
    Need("samples a second at the receiver", "n V", lambda n: n * V.value),
    Need("with `--resolution 15s`", "n V / 15", lambda n: n * V.value / RESOLUTION_S),
    Need("cores of Mimir's distributors", "n V / 25,000", lambda n: ceil(n * V.value / DISTRIBUTOR)),
    Need("with `--resolution 15s`", "n V / 375,000", lambda n: ceil(n * V.value / RESOLUTION_S / DISTRIBUTOR)),
)


def memory(part: Part, name: str, nodes: float) -> float:
    """GiB of all pods."""
    return nodes * part.value / (1 << 20) + 0.06 * pods(CPU[name], nodes)


def disk(nodes: float) -> float:
    """Bytes that a day takes on the brokers."""
    return REPLICAS * nodes * (S.value + A.value) * DAY_S


def brokers(nodes: float) -> int:
    """How many brokers have the cores and the disk."""
    cores = REPLICAS * nodes * K.value / 1e6 / (BROKER_CORES * BROKER_USED)
    return max(REPLICAS, ceil(cores), ceil(disk(nodes) / BROKER_DISK))


def first() -> list[tuple[str, float, str]]:
    """What becomes full, at how many GPUs, and what to do then; the first one first."""
    gpus_of_one_pod = {name: USED * 1e6 / part.value * GPUS for name, part in CPU.items()}
    limits = [
        *((f"one pod of {name}", gpus, "more pods") for name, gpus in gpus_of_one_pod.items()),
        (
            "a pod of remote write for each of 32 partitions",
            PARTITIONS * gpus_of_one_pod["remote write"],
            "more partitions",
        ),
        ("10 cores of Mimir's distributors", 10 * DISTRIBUTOR / V.value * GPUS, "`--resolution`, or more of them"),
        ("the same with `--resolution 15s`", 10 * DISTRIBUTOR * RESOLUTION_S / V.value * GPUS, "more of them"),
        ("1 Gbit/s to the receiver", USED * LINK_BYTES / W.value * GPUS, "pods on several machines"),
        ("the cores of three brokers", BROKER_CORES * BROKER_USED * 1e6 / K.value * GPUS, "more brokers"),
        ("the disk of three brokers, 24 h", REPLICAS * BROKER_DISK / disk(1) * GPUS, "more brokers, or less retention"),
    ]
    return sorted(limits, key=lambda row: row[1])


# -- tables and the plot


def number(value: float) -> str:
    """Three digits."""
    digits = max(0, 2 - int(log10(abs(value)))) if value else 0
    return f"{round(value, 2 - int(log10(value)) if value >= 1 else 2):,.{digits}f}" if value % 1 else f"{value:,.0f}"


def run_table(run: Mapping[str, dict[str, Any]]) -> str:
    """The table of a run: each figure, its aim, and how many times its yardsticks it is."""
    rows = []
    for title, figure in run.items():
        aim = number(figure["aim"]) if "aim" in figure else ""
        times = ", ".join(
            f"{number(figure['value'] / run[name]['value'])} x {name}"
            for name in figure.get("beside", ())
            if name in run
        )
        rows.append((title, f"{number(figure['value'])} {figure['unit']}", aim, times))
    return table(("what", "figure", "aim", "in the same run"), rows)


def tables() -> dict[str, dict[str, str]]:
    """The tables of each page, by their marks."""
    parts = [S, A, V, W, *CPU.values(), K, M, Q]
    fleets = [(need.title, need.formula, *(number(need.demand(gpus / GPUS)) for gpus in FLEETS)) for need in NEEDS]
    limits = [(limit, f"{round(gpus, -2):,.0f}", remedy) for limit, gpus, remedy in first()]
    return {
        "sizing.md": {
            "node": table(
                ("", "of a node", "figure"), [(p.name, p.title, f"{number(p.value)} {p.unit}") for p in parts]
            ),
            "fleets": table(("", "formula", *(f"{gpus:,} GPUs" for gpus in FLEETS)), fleets),
            "first": table(("what is full", "at so many GPUs", "then"), limits),
        },
        "benchmarks.md": {
            "aims": run_table(AIMS),
            "live": run_table(LIVE),
            "growth": run_table(GROWTH),
            "large": run_table(LARGE),
        },
    }


def plot() -> str:
    """What a tick costs by the number of nodes: a line for each process."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for title, figure in GROWTH.items():
        name, _, size = title.partition(", ")
        if size.endswith(" nodes"):
            lines.setdefault(name, []).append((int(size.split()[0]), figure["value"]))
    top = max(us for points in lines.values() for _, us in points) * 1.15
    lowest, highest = (log10(pick(nodes for points in lines.values() for nodes, _ in points)) for pick in (min, max))
    width, height, left, right, below = 620, 300, 60, 490, 40

    def position(nodes: float, us: float) -> tuple[int, int]:
        x = left + (log10(nodes) - lowest) / (highest - lowest) * (right - left)
        return round(x), round(height - below - us / top * (height - below - 20))

    parts = []
    for (name, points), colour in zip(lines.items(), ("#1f77b4", "#d62728"), strict=True):
        positions = [position(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in positions)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in positions]
        parts.append(f'<text x="{positions[-1][0] + 8}" y="{positions[-1][1] + 4}" fill="{colour}">{name}</text>')
    for nodes, _ in next(iter(lines.values())):
        x, y = position(nodes, 0)
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{nodes:,}</text>')
    for quarter in range(5):
        x, y = position(10**lowest, top * quarter / 4)
        parts.append(f'<line x1="{x}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{top * quarter / 4:.0f}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            f'<text x="{left}" y="14">CPU us a node tick</text>',
            f'<text x="{(left + right) // 2}" y="{height - 6}" text-anchor="middle">nodes</text>',
            "</svg>\n",
        ]
    )


def pages() -> dict[Path, str]:
    """The pages and the plot as they should be."""
    files = {OPERATIONS / page: filled(OPERATIONS / page, parts) for page, parts in tables().items()}
    return {OPERATIONS / "growth.svg": plot(), **files}


if __name__ == "__main__":
    sys.exit(generate(pages(), "docs.figures", sys.argv[1:]))
