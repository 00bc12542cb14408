"""The tables of the page ``docs/reference/alerts.md``: ``python -m streams.alerts.text.reference [--check]``.

In: the page; the default rules, the table of their options, and the table of XID errors. Out: the page with these as
Markdown, each below its mark; the rest of the page is as it was.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from delivery.values import duration_words
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import KINDS, Rule
from streams.alerts.rules.rules_file import OPTIONS, SELECTORS, Option
from streams.alerts.xids import XID_KINDS, XIDS
from topics.reference import generate

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "alerts.md"

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n\n)(?:\|.*\n)*")

_ABOUT = {
    "held_idle": "A pod holds a GPU and does nothing with it.",
    "stalled": "A pod's GPU says that it is busy, and does hardly any work, as in a collective that hangs.",
    "underused": "A pod's GPU works now and then, and hardly at all in some hours.",
    "memory_hoarded": "A pod holds much of a GPU's memory and hardly uses the GPU.",
    "straggler": "A GPU, or all those of a node, lag behind the others of their workload.",
    "crash_loop": "A pod whose containers crash again and again keeps its GPUs (CrashLoopBackOff).",
    "used_unallocated": "A GPU works, and no pod was given it.",
    "attribution_conflict": "What runs on a GPU is not what the kubelet gave it to.",
    "xid": "The driver reported an XID error; one alert a code.",
    "ecc_uncorrectable": "Memory errors that ECC could not correct.",
    "row_remap_failure": "A bad row of memory could not be replaced.",
    "row_remap_pending": "Bad memory is replaced at the next reset.",
    "thermal_slowdown": "Slowed down by its temperature.",
    "power_brake": "Slowed down by the machine's power brake.",
    "nvlink_errors": "NVLinks were trained again, or had many errors within a minute.",
    "lost": "NVML says that the GPU is lost.",
    "not_answering": "The GPU does not answer its driver.",
    "missing": "A GPU that the node had is not there any more.",
    "node_silent": "A node that sent ticks sends none.",
    "policy_invalid": "A pod's or namespace's policy can't be read.",
}


def markdown() -> str:
    same: dict[tuple[str, str, str], list[int]] = {}
    for code, xid in XIDS.items():
        same.setdefault((xid.kind, xid.meaning, xid.action), []).append(code)
    xids = sorted(same.items(), key=lambda row: (XID_KINDS.index(row[0][0]), row[1]))
    rules = [
        (
            f"[{rule.name}](../runbooks/{rule.name}.md)",
            _ABOUT[rule.kind],
            f"`{rule.kind}`",
            rule.severity,
            duration_words(rule.for_ms) if rule.for_ms else "at once",
            duration_words(rule.keep_firing_ms) if rule.keep_firing_ms else "",
            ", ".join([*([] if rule.enabled else ["off"]), *_further(rule)]),
        )
        for rule in rules_file.defaults().values()
    ]
    head = ("rule", "what it is about", "kind", "severity", "for", "keep_firing_for", "further")
    tables = {
        "rules": _table(head, rules),
        "options": _table(("key", "of kind", "meaning"), map(_option, OPTIONS)),
        "selectors": _table(("key", "of kind", "matches"), map(_option, SELECTORS)),
        "xids": _table(
            ("code", "kind", "meaning", "what to do"), [(", ".join(map(str, codes)), *row) for row, codes in xids]
        ),
    }
    return _MARKED.sub(lambda found: found[1] + tables[found[2]], PAGE.read_text(encoding="utf-8"))


def _further(rule: Rule) -> list[str]:
    return [f"`{option.key}` {option.shown(rule)}" for option in OPTIONS if _is_further(option, rule)]


def _is_further(option: Option, rule: Rule) -> bool:
    """Whether the row of a rule has an option that has no column."""
    if option.key == "critical_after":
        return rule.critical_ms > 0
    return rule.kind in option.kinds and option.key != "for"


def _option(option: Option) -> Sequence[str]:
    kinds = ", ".join(f"`{kind}`" for kind in option.kinds) if len(option.kinds) < len(KINDS) - 1 else "all but `xid`"
    return f"`{option.key}`", kinds or "any", option.what


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "streams.alerts.text.reference", sys.argv[1:]))
