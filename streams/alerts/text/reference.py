"""Writes the tables of the page ``docs/reference/alerts.md``: ``python -m streams.alerts.text.reference [--check]``.

In: the page; the default rules, the table of their options, and the table of XID errors. Out: the page with these as
Markdown, each below its mark; the rest of the page is as it was.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delivery.values import duration_words
from streams.alerts import groups
from streams.alerts.conditions.finding import Facts, Finding
from streams.alerts.memory import DeviceMemory, Memory, PodMemory
from streams.alerts.rules import rules_file
from streams.alerts.rules.options import BY_KEY, OPTIONS, SELECTORS, Option
from streams.alerts.rules.rule import ALL_GPUS_KINDS, KINDS, WASTE, WINDOWED, Kind, Rule, Rules
from streams.alerts.text.describe import describe, describe_silence
from streams.alerts.tick import Device, Metrics, Tick
from streams.alerts.xids import XID_KINDS, XIDS
from topics.alerts import Alert, AlertReport, AlertState
from topics.attributed import Holder, Workload
from topics.reference import filled, generate, table
from topics.times import rfc3339, time_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "alerts.md"

_SUBJECTS = {
    "held_idle": "A pod holds a GPU and does nothing with it.",
    "stalled": "A pod's GPU says that it is busy, and does hardly any work, as in a collective that hangs.",
    "underused": "A pod's GPU works now and then, and hardly at all in some hours.",
    "memory_hoarded": "A pod holds much of a GPU's memory and hardly uses the GPU.",
    "straggler": "A GPU, or all those of a node, lag behind the others of their workload.",
    "crash_loop": "A pod whose containers crash again and again keeps its GPUs (CrashLoopBackOff).",
    "used_unallocated": "A GPU works, and nobody was given it.",
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


_MEASURED = {
    "held_idle": "154 of 181 alerts useful, 27 say it again, none false; of 324 spells 302 found, 17 "
    "min after they began (21 of the others: MIG of an A100, of which no activity is measured)",
    "stalled": "10 of 10 useful; all 63 GPUs that hung found, 10 min after that",
    "underused": "4 of 4 useful; all 10 GPUs found, 6 of them as idle",
    "memory_hoarded": "no alert: both GPUs found as idle",
    "straggler": "7 of 7 useful; all 7 found, 9 min after they got slow",
    "crash_loop": "2 of 2 useful; all 8 pods found, 2 min after they began",
    "used_unallocated": "no alert, and no reason for one",
    "attribution_conflict": "no alert, and no reason for one",
    "thermal_slowdown": "11 of 11 useful; all 10 found, 110 s after cooling failed",
    "power_brake": "7 of 7 useful; all 7 found, 10 s after it began",
}
"""Results of ``python -m tests.bench.noise``, for the kinds whose true state a simulated fleet has."""

_FAULT = "a fault that a GPU or a node reports itself"
_EVIDENCE = {
    "held_idle": "utilization, activity and processes of each pod",
    "stalled": "utilization, power, SM and tensor activity of all the workload's GPUs",
    "underused": "mean use in a window",
    "memory_hoarded": "memory held, mean use in a window",
    "straggler": "clock, violations, activity and power, beside the other GPUs of the workload",
    "crash_loop": "what the API server says of the containers",
    "used_unallocated": "utilization, and what the kubelet says",
    "attribution_conflict": "processes, and what the kubelet says",
    "policy_invalid": "annotations and labels",
    "missing": "the devices of earlier ticks",
    "node_silent": "that no tick comes",
}


def markdown() -> str:
    """The page with its tables filled in."""
    codes_by_xid: dict[tuple[str, str, str], list[int]] = {}
    for code, xid in XIDS.items():
        codes_by_xid.setdefault((xid.kind, xid.meaning, xid.action), []).append(code)
    xids = sorted(codes_by_xid.items(), key=lambda row: (XID_KINDS.index(row[0][0]), row[1]))
    rule_rows, evidence_rows = list[Sequence[str]](), list[Sequence[str]]()
    for rule in rules_file.defaults().values():
        options = [BY_KEY["critical_after"]] if rule.critical_ms else []
        options += [o for o in OPTIONS if rule.kind in o.kinds and o.key not in ("for", "critical_after")]
        further = [] if rule.enabled else ["off"]
        further += [f"`{option.key}` {option.format_value(rule)}" for option in options]
        rule_rows.append(
            (
                f"[{rule.name}](../runbooks/{rule.name}.md)",
                _SUBJECTS[rule.kind],
                f"`{rule.kind}`",
                rule.severity,
                duration_words(rule.for_ms) if rule.for_ms else "at once",
                duration_words(rule.keep_firing_ms) if rule.keep_firing_ms else "",
                ", ".join(further),
            )
        )
        is_on, measured = "on" if rule.enabled else "off", _MEASURED.get(rule.kind, "")
        evidence_rows.append((f"`{rule.name}`", _EVIDENCE.get(rule.kind, _FAULT), is_on, measured))
    head = ("rule", "what it is about", "kind", "severity", "for", "keep_firing_for", "further")
    tables = {
        "rules": table(head, rule_rows),
        "each": table(("rule", "by what it judges", "default", "on the simulated fleet"), evidence_rows),
        "sentences": table(("rule", "summary", "description"), map(_example_sentences, rules_file.defaults().values())),
        "options": table(("key", "of kind", "meaning"), map(_option_row, OPTIONS)),
        "selectors": table(("key", "of kind", "matches"), map(_option_row, SELECTORS)),
        "xids": table(
            ("code", "kind", "meaning", "what to do"), [(", ".join(map(str, codes)), *row) for row, codes in xids]
        ),
    }
    return filled(PAGE, tables)


_SINCE_MS = 1_795_219_152_000
_EXAMPLES: dict[Kind, dict[str, Any]] = {
    "used_unallocated": {"value": 0.93},
    "attribution_conflict": {"key": "no_pod"},
    "xid": {"text": "79", "value": 1.0},
    "ecc_uncorrectable": {"value": 2.0},
    "nvlink_errors": {"key": "crc", "value": 140.0},
    "thermal_slowdown": {"value": 91.0},
    "power_brake": {"value": 212.0},
    "underused": {"value": 0.043},
    "memory_hoarded": {"value": 0.012},
    "crash_loop": {"text": "7"},
    "policy_invalid": {"text": "the annotation gpustream.dev/idle-after is malformed: 'soon' is no duration"},
}
"""The finding in the example of a kind."""


def _example_sentences(rule: Rule) -> Sequence[str]:
    """The rule's name, and the summary and description of an example of its alert."""
    holder = Holder("ml-team", "bert-0", pod_uid="uid", container="main", workload=Workload("Job", "bert"))
    metrics = Metrics(
        gpu_utilization_ratio=1.0, sm_active_ratio=0.1, tensor_active_ratio=0.0, power_watts=140.0,
        power_limit_watts=700.0, memory_used_bytes=70 * 2**30, memory_total_bytes=80 * 2**30,
    )  # fmt: skip
    device, example = Device("GPU-1", 3, "H100", holders=(holder,), metrics=metrics), _EXAMPLES.get(rule.kind, {})
    fired_ms = _SINCE_MS + max(rule.for_ms, 60_000)
    tick = Tick(
        schema=1, cluster="prod", node="gpu-node-1", run_id=1, seq=1, ts_ms=fired_ms, offset=1, attribution="exact",
        devices=(device,),
    )  # fmt: skip
    holders = () if rule.kind == "used_unallocated" else (holder,)
    facts = Facts(device, None, holders, text=example.get("text", ""))
    finding = Finding(rule, "GPU-1", "uid", example.get("key", ""), value=example.get("value"), facts=facts)
    if rule.kind != "node_silent":
        labels, annotations = describe(finding, tick, _SINCE_MS)
    else:
        remembered = DeviceMemory(3, pods=(PodMemory("ml-team", "bert-0", _SINCE_MS),))
        state = AlertState(
            schema=1, cluster="prod", node="gpu-node-1", offset=1, position=1, last_ts_ms=fired_ms, logged_ms=fired_ms
        )
        labels, annotations = describe_silence(rule, state, Memory(devices={"GPU-1": remembered}))
    if rule.kind in WASTE:
        annotations |= {"since": rfc3339(time_of(_SINCE_MS))}
        if rule.kind == "straggler":
            annotations |= {"evidence": "SM clock 1200 MHz (its peers SM clock 1980 MHz)"}
        window_s = rule.window_ms / 1000 if rule.kind in WINDOWED else 0.0
        part = Alert(
            schema=1, name=rule.name, state="firing", fingerprint="0" * 16, cluster="prod", node="gpu-node-1",
            starts_at=time_of(fired_ms), severity=rule.severity, value=(fired_ms - _SINCE_MS) / 1000 + window_s,
            labels=labels, annotations=annotations,
        )  # fmt: skip
        report = AlertReport(
            schema=1, group="0" * 16, scope="workload", cluster="prod", node="gpu-node-1", ts_ms=fired_ms,
            held=1 if rule.kind in ALL_GPUS_KINDS else 8, alerts=(part,),
        )  # fmt: skip
        group_alert = groups.step(None, report, 0, Rules((rule,))).group.alert
        annotations = group_alert.annotations if group_alert is not None else annotations
    summary, description = annotations["summary"], annotations["description"]
    return f"`{rule.name}`", summary, description.removeprefix(f"{summary}. ")


def _option_row(option: Option) -> Sequence[str]:
    others = [kind for kind in KINDS if kind not in option.kinds]
    words, kinds = ("all but ", others) if len(others) < len(option.kinds) else ("", option.kinds)
    return f"`{option.key}`", words + ", ".join(f"`{kind}`" for kind in kinds) or "any", option.description


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "streams.alerts.text.reference", sys.argv[1:]))
