"""``gpustream doctor``: what is wrong with a running pipeline, why, and what to do next.

In:       the topics of the last minutes, the consumer groups; if given, a Kubernetes namespace, components' /metrics,
          a Prometheus.
Out:      a line for each check and a paragraph for each finding, or one JSON object, on standard output; how far the
          reading has come, on standard error of a terminal.
On failure: whatever does not answer is a finding, and the rest is looked at.
Exit code 1 if anything was found.
"""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import click

from delivery.connection import Connection
from delivery.settings import DURATION, URL
from delivery.values import counted, printable
from gpustream.command import KAFKA, LOG_FORMAT, Command, option, options, output_format
from gpustream.doctor import checks
from gpustream.doctor.gather import Scope, gather
from gpustream.doctor.situation import CheckResult, Situation
from gpustream.output import FAILED, answer, json_text
from producers.cluster.config import ClusterSettings

SCHEMA = 1

MAX_SHOWN = 20
"""At most this many findings of a check are written out; JSON has them all."""

_WIDTH = 110
_MAX_CHARS = 400
"""A paragraph of a finding is cut after so many characters. A receiver's error may name hundreds of series."""

_CUT = "... (--format json has all of it)"

MAX_SINCE_S = 23 * 3600.0
"""Topics keep a day: older records may have been deleted, and would be reported as lost."""

_SINCE_ERROR = "--since: from above 0 to 23h: topics keep a day, and what is older may have been deleted"


@click.command(
    cls=Command,
    check=lambda values: [] if 0 < values["since_s"] <= MAX_SINCE_S else [_SINCE_ERROR],
    example=(
        "gpustream doctor --kafka kafka-0:9092\n"
        "gpustream doctor --kafka kafka-0:9092 --since 1h --metrics http://remote-write:9401 \\\n"
        "    --prometheus http://prometheus:9090\n"
        "gpustream doctor --kafka kafka-0:9092 --kube --namespace gpustream\n"
        "gpustream doctor --kafka kafka-0:9092 --format json | jq .nodes"
    ),
)
@KAFKA
@option("--since", "since_s", type=DURATION, default="10m", help="How much of the topics is looked at, from now back.")
@option("--metrics", type=URL, multiple=True, help="A component's own /metrics: what it dropped, why it is not ready.")
@option("--prometheus", type=URL, help="A Prometheus that should have every node's newest sample.")
@option("--kube", is_flag=True, show_default=False, help="Look at gpustream's pods in a Kubernetes cluster, too.")
@option("--namespace", default="gpustream", help="With --kube: the namespace that gpustream is in.")
@options(ClusterSettings, only=("kubeconfig",))
@output_format("text", "json", help="json: one object, on one line.")
@LOG_FORMAT
def doctor(
    connection: Connection,
    since_s: float,
    metrics: tuple[str, ...],
    prometheus: str | None,
    kube: bool,
    namespace: str,
    kubeconfig: Path | None,
    form: Literal["text", "json"],
) -> None:
    """Check a running pipeline, in an operator's order: what is wrong, why, what shows it, and what to do next.

    First its pods, Kafka, the topics and the rights, then what each node sent, what was attributed, and what each sink
    took.

    It reads the topics from --since to where they end when it starts, in no consumer group, and commits nothing. Exit
    code 1 if anything was found: each finding with its cause, what shows it, and what to do next.
    """
    scope = Scope(since_s, metrics, prometheus, namespace if kube else None, kubeconfig)
    situation = answer(gather(connection, scope))
    results = checks.run(situation)
    if form == "json":
        click.echo(json_text(report(situation, results)))
    else:
        click.echo("\n".join(text(situation, results)))
    raise SystemExit(FAILED if any(result.findings for result in results.values()) else 0)


def text(situation: Situation, results: Mapping[str, CheckResult]) -> Iterator[str]:
    """The report for people: a line for each check, and its findings below it."""
    width = max(map(len, results))
    for name, result in results.items():
        mark = "FOUND" if result.findings else "ok" if result.looked else "-"
        yield printable(f"{mark:5}  {name:{width}}  {result.summary}")
        for finding in result.findings[:MAX_SHOWN]:
            yield from textwrap.wrap(
                printable(finding.finding),
                _WIDTH,
                initial_indent="       ",
                subsequent_indent="         ",
                break_on_hyphens=False,
            )
            for label, paragraph in (("cause", finding.cause), ("shown by", finding.evidence), ("next", finding.next)):
                indent = f"{'':9}{label + ':':10}"
                cut = paragraph[:_MAX_CHARS] + _CUT if len(paragraph) > _MAX_CHARS else paragraph
                yield from textwrap.wrap(
                    printable(cut),
                    _WIDTH,
                    initial_indent=indent,
                    subsequent_indent=" " * len(indent),
                    break_on_hyphens=False,
                )
        if len(result.findings) > MAX_SHOWN:
            yield f"       and {len(result.findings) - MAX_SHOWN} more: --format json has them all"
    count = sum(len(result.findings) for result in results.values())
    yield f"{counted(count, 'finding')} in {situation.window}" if count else f"all is well in {situation.window}"


def report(situation: Situation, results: Mapping[str, CheckResult]) -> dict[str, Any]:
    """The report for programs: the checks with all findings, and the numbers of each node and group."""
    nodes = situation.evidence.nodes.items() if situation.evidence is not None else ()
    return {
        "schema": SCHEMA,
        "since_ms": situation.since_ms,
        "until_ms": situation.now_ms,
        "ok": not any(result.findings for result in results.values()),
        "checks": [
            {"check": name, "summary": result.summary, "looked": result.looked, "findings": result.findings}
            for name, result in results.items()
        ],
        "nodes": [
            {
                "cluster": name.cluster,
                "node": name.node,
                "replayed": node.replayed,
                "runs": [
                    {
                        "run_id": run_id,
                        "from_seq": next(iter(run.seqs))[0],
                        "to_seq": run.last_seq,
                        "ticks": len(run.seqs),
                        "gaps": checks.gaps_of(run_id, run, situation.since_ms),
                        "last_logged_ms": run.last_logged_ms,
                        **run.fates,
                    }
                    for run_id, run in node.runs.items()
                ],
            }
            for name, node in nodes
            if node.runs
        ],
        "groups": [
            {
                "group": group.name,
                "state": group.state,
                "members": group.members,
                "behind": [lag._asdict() for lag in group.lags],
            }
            for group in situation.groups or ()
        ],
    }
