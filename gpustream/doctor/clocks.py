"""The check of the clocks: those of the nodes and of this machine, against the log times of the brokers. Pure."""

from delivery.values import counted, duration_words
from gpustream.doctor.evidence import Evidence, NodeName, SampledRun
from gpustream.doctor.situation import CheckResult, Finding, Findings, Situation

AHEAD_MS = 2_000
"""If a tick's time is later than its log time by this much, a clock is ahead."""

OLD_MS = 30_000
"""If a tick was this old when Kafka got it, it comes from a retry buffer, or its clock is behind."""

CLOCK_JITTER_MS = 5_000
"""If delays differ by less than this, a clock is wrong: ticks that come from a retry buffer are less and less late."""


def clocks(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks that each node's clock agrees with the log time of its ticks, and this machine's with the brokers'."""
    runs = {name: node.last_run[1] for name, node in evidence.nodes.items() if node.runs}
    offsets_ms = {name: -run.last_delay_ms for name, run in runs.items() if run.last_delay_ms < -AHEAD_MS}
    offsets_ms |= {name: -run.last_delay_ms for name, run in runs.items() if run.last_delay_ms > OLD_MS}
    findings = Findings()
    all_alike = (
        offsets_ms
        and max(offsets_ms.values()) - min(offsets_ms.values()) < CLOCK_JITTER_MS
        and len(offsets_ms) == len(runs) > 1
    )
    if all_alike:
        offset_ms = next(iter(offsets_ms.values()))
        findings.add(
            f"all {counted(len(runs), 'node')} are {_offset_text(offset_ms)} the brokers' clock",
            "the brokers' clock is wrong, or that from which the nodes have theirs",
            "their ticks and the log times of these differ by as much",
            "`chronyc tracking` on a broker and on a node",
        )
    else:
        findings += [_clock_finding(name, runs[name], offset_ms) for name, offset_ms in offsets_ms.items()]
    newest_ms = max((run.last_logged_ms for run in runs.values()), default=0)
    if newest_ms - situation.now_ms > AHEAD_MS:
        findings.add(
            f"this machine's clock is {duration_words(newest_ms - situation.now_ms)} behind the brokers'",
            "one of the two is wrong",
            "a tick was logged after now",
            "what is said here of ages is wrong by as much: `chronyc tracking` here and on a broker",
        )
    delays_ms = [run.last_delay_ms for name, run in runs.items() if name not in offsets_ms]
    return CheckResult(
        f"the newest ticks were {min(delays_ms)} to {max(delays_ms)} ms old when they came" if delays_ms else "-",
        findings,
    )


def _clock_finding(name: NodeName, run: SampledRun, offset_ms: int) -> Finding:
    direction = "later" if offset_ms > 0 else "earlier"
    shown_by = f"its newest tick says {duration_words(abs(offset_ms))} {direction} than its log time"
    if offset_ms > 0 or run.max_delay_ms - run.min_delay_ms < CLOCK_JITTER_MS:
        return Finding(
            f"{name}: its clock is {_offset_text(offset_ms)} the brokers'",
            "the node does not follow a time server, or another one",
            shown_by,
            "`chronyc tracking` on the node; receivers refuse samples that are too old or too far ahead",
        )
    return Finding(
        f"{name}: its ticks came {duration_words(-offset_ms)} late",
        "it still sends what it kept while Kafka was away, or its clock is behind",
        f"{shown_by}; others of this run came {duration_words(run.min_delay_ms)} to {duration_words(run.max_delay_ms)}"
        " after theirs",
        "look again in a minute; if it is as much then: `chronyc tracking` on the node",
    )


def _offset_text(offset_ms: int) -> str:
    return f"{duration_words(abs(offset_ms))} {'ahead of' if offset_ms > 0 else 'behind'}"
