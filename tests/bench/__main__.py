"""Every benchmark in turn, ``python -m tests.bench [NAME ...]``; docs/operations/benchmarks.md has what they say."""

import subprocess
import sys

BENCHMARKS = (
    "attribution",
    "latency",
    "sink",
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
    """Runs each benchmark in a process of its own; returns how many failed."""
    failed = 0
    for name in names or BENCHMARKS:
        sys.stdout.write(f"\n## {name}\n\n")
        sys.stdout.flush()
        failed += subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
