"""The table of what each step costs, or benchmarks by name: ``python -m tests.bench [--write | all | NAME ...]``.

docs/operations/benchmarks.md has what they say.
"""

import subprocess
import sys

from tests.bench import aims

BENCHMARKS = (
    "latency",
    "remote_write",
    "node",
    "compression",
    "rescheduling",
    "score",
    "idle",
    "noise",
    "usage",
    "bookkeeping",
    "alerts",
    "cluster",
    "workloads",
    "autoscaling",
    "page",
    "top",
)


def main(names: list[str]) -> int:
    """Prints the table, or runs each benchmark in a process of its own; returns how many failed."""
    if not names or names == ["--write"]:
        aims.report(aims.figures(), aims.LAST, write=bool(names))
        return 0
    failed = 0
    for name in BENCHMARKS if names == ["all"] else names:
        sys.stdout.write(f"\n## {name}\n\n")
        sys.stdout.flush()
        failed += subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
