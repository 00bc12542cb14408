"""The reference page ``docs/alerts.md``: ``python -m streams.alerts.text.reference [--check]``.

In: the default rules, the table of their options, and the table of XID errors. Out: Markdown.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from delivery.values import duration_words
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import ALERTS, IDLE_AFTER, Rule
from streams.alerts.rules.rules_file import OPTIONS, SELECTORS, Option
from streams.alerts.xids import XID_KINDS, XIDS
from topics.reference import generate

PAGE = Path(__file__).parents[3] / "docs" / "alerts.md"
MARK = "<!-- Written by `python -m streams.alerts.text.reference`: change the tables in `streams/alerts/` instead. -->"

_ABOUT = {
    "held_idle": "A pod holds a GPU and does nothing with it.",
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

_INTRODUCTION = """\
`gpustream stream alerts` judges every tick of gpu.attributed by rules, in the time of the ticks, and writes what
fires and what is resolved to gpu.alerts. A rule fires when its condition has held for `for`, and resolves when it has
not held for `keep_firing_for`. Where a tick is no evidence (a GPU that does not answer, a device without activity
metrics, a node without a snapshot), it neither fires nor resolves. Only `NodeSilent` goes by the worker's clock, and
is reported half a minute after the last tick at the soonest.

```sh
gpustream stream alerts --kafka kafka-0:9092 --rules rules.toml
gpustream rules check rules.toml
gpustream rules test rules.toml --kafka kafka-0:9092 --from 24h
```

## Rules

Without `--rules` these are in force. A file is laid over them: what it does not name stays as it is here."""

_JUDGING = """\
## How a rule is judged

The time is that of the ticks, which is the clock of their node. In each tick a condition holds, or does not, or it is
not known. Each device has its own, each pod on it (`held_idle`), each kind of error or conflict, each XID code."""

_HOLDS = {
    "held_idle": (
        "a pod that was given the device does nothing (below), and has had it for `grace`",
        "within the grace; if nothing tells what the pod does",
    ),
    "used_unallocated": (
        "the device works `used_above` or more, no pod was given it, and no job of a batch system has it",
        "without a snapshot; if it is not measured",
    ),
    "attribution_conflict": (
        "`conflict` is in the record",
        "without a snapshot; if the processes are not known or not visible",
    ),
    "ecc_uncorrectable": ("at least `at_least` errors within a minute (below), volatile or aggregate", ""),
    "nvlink_errors": ("at least `at_least` CRC errors, or replays, or `recoveries` within a minute", ""),
    "row_remap_failure": ("the value is not 0", "if it is not there"),
    "row_remap_pending": ("a row waits to be remapped, or a page to be retired", "if neither value is there"),
    "thermal_slowdown": ("bit 0x20 or 0x40 of `clock_event_reasons` is set", "if it is not there"),
    "power_brake": ("bit 0x80 is set", "if it is not there"),
    "lost": ("the state is `lost`", "while it is `timeout`"),
    "not_answering": ("the state is `timeout`", ""),
    "missing": ("an earlier tick had the GPU and this one has not", ""),
    "node_silent": (
        "no tick was logged for `for`, by the worker's clock, while all that was logged is read",
        "while the log or the attribution stands still",
    ),
    "policy_invalid": ("a pod that holds a device of the node, or its namespace, has a policy that can't be read", ""),
    "xid": ("there were errors of the code since the last tick: it is over with that tick", ""),
}
"""By kind: when a condition holds, and when it is not known."""

_LIFE = """\
A device that does not answer (`lost`, `timeout`) says nothing of itself, but for its XID errors, these states and its
holders' policies. Nor does a device that is not in the tick, for ten minutes; after that, none of it holds. A MIG
device that is gone while its GPU is well is not missing, and none of it holds. A GPU is no longer missing after
`forget`, or if another is in its place on the PCI bus; it is then forgotten. A tick without a snapshot
(`"attribution": "none"`) says nothing about pods.

- **Firing.** A condition that holds is pending from that tick on, and fires in the first tick in which it has held
  for `for`. It ends with a tick in which it does not hold. If it has not been known for more than a minute, or no
  tick came for more than a minute, or the clock was set back, it begins again. A pod's idleness begins when its grace
  is over. XID errors fire at once, whatever `for` is.
- **Resolving.** An alert is resolved in the first tick in which its condition does not hold, and has not for
  `keep_firing_for` since the first such tick after it last held. While it is not known, the alert fires on. It is
  resolved at once if the pod that it is about is gone by an exact tick (an XID error outlives its pod), if the pod
  has silenced it, or if the rule is gone.
- **Again.** It can fire again from the next tick on. Two of its firings never start at the same millisecond.

**Errors within a minute.** A tick shows the errors by which a counter has risen since its last reading, all of it if
it fell, and none by its first reading. The minute begins on a multiple of five seconds of the node's clock, so that
it is 60 to 65 s long: errors that come within any 60 s always count together, and those that are 65 s apart never do.
If the clock was set back, errors that were seen before count as shown by the first tick after that has the device.

**Work.** What a device does is the largest of `gpu_utilization_ratio`, `gpu_utilization_max_ratio`,
`graphics_engine_active_ratio`, `sm_active_ratio`, `encoder_utilization_ratio` and `decoder_utilization_ratio`; it is
measured if one of the first four is there. Less than `idle_below` is no work. A pod works if its part of the device
is work, or what its processes do is. Else, if the device does not work, the pod is idle, or not known if that is not
measured. If it works, a pod that holds it alone works; of pods that share it, one whose part is known is idle if
neither what is nobody's nor what the video engines do is work, for that might be its own. Anything else is not known.
A pod that only its processes show, and one with `gpustream.dev/alerts: "off"`, is not judged. If a tick without a
snapshot shows no holder and the device works, that ends the idleness of those who held it.

**Whose grace.** It begins with the first tick in which the pod holds the device, and again if the pod comes back
after another tick that did not have it, or if the clock was set back to before.

**XID errors** are what the producer's count of the code has risen by since the last tick that had it, within a run of
the producer, and all of it if it was not there before. In the first tick of a node, and for what no count tells, they
are the events in the tick. An error of a program is an alert about the pod that alone held the device then."""

_FILE = """\
## The file

TOML, a table for each rule. A name that is here changes that rule, `enabled = false` takes it away; a new name needs
its `kind`, and begins as the default of that kind, so that there may be several of one kind.

```toml
[rules.GPUHeldIdle]
for = "30m"
labels = { pager = "no" }

[[rules.GPUHeldIdle.overrides]]
namespace = "notebooks-*"
for = "2h"
severity = "info"

[[rules.GPUHeldIdle.overrides]]
workload_kind = ["Deployment", "StatefulSet"]
pod_labels = { "app.kubernetes.io/component" = "inference*" }
enabled = false

[[rules.GPUXid.overrides]]
xid = [43, 45]
enabled = false

[rules.GPUHeldIdleForHours]
kind = "held_idle"
for = "4h"
severity = "critical"
```

Durations are `500ms`, `30s`, `15m`, `2h`, `7d` (a bare number is seconds), sizes `64MiB`."""

_OVERRIDES = """\
### Overrides

An override is for what matches all that it gives, each by any of its globs (`*`, `?`, `[abc]`; case counts). All that
match apply, a later one over an earlier one. They go by the pod that the alert is about; where it is about a device, by
the one pod that holds it. An override may set every option of its rule; its `labels` and `annotations` are added to the
rule's, its `severity` is for XIDs of all kinds."""

_POLICY = f"""\
## What pods and namespaces say themselves

| annotation of a pod or its namespace | meaning |
|---|---|
| `{IDLE_AFTER}: 2h` | for how long its GPUs may be idle, in place of every rule's `for` of kind `held_idle` |
| `{ALERTS}: "off"` | no alerts about its own doing: idle GPUs, and XID errors of its programs |

A pod's goes before its namespace's, and both before the file; a namespace may say it by a label, too. Alerts about the
state of a GPU can't be silenced so. What can't be read is as if it were not there, and an alert of its own says so
(`GPUPolicyInvalid`)."""

_TRYING = """\
## Trying rules

`gpustream rules check` names every mistake of a file with its line; a stream does not start with one.
`gpustream rules test` judges what was recorded as the stream would have, and lists what would have fired, when, whose
it is, and why it ended; nothing is written. It reads gpu.attributed from Kafka (which keeps 24 hours), or a file of its
records, one a line, as any consumer writes them:

```sh
kafka-console-consumer.sh --bootstrap-server kafka-0:9092 --topic gpu.attributed > ticks.jsonl
gpustream rules test rules.toml --input ticks.jsonl
```

It begins without what a live stream remembers: the grace of every pod begins with the first tick, and a GPU that was
gone before is not missed. `NodeSilent` is found by the gaps between a node's ticks, by its own clock and, from Kafka,
by the time of the log as well, and at the end by how far the other nodes have come. In a file a clock that was set
forward looks like a gap."""

_LABELS = """\
## Labels and annotations

Labels are frozen when an alert fires: `alertname`, `severity`, `k8s_cluster_name`, `k8s_node_name`; of a device
`gpu_uuid` (the physical GPU's), `gpu_index`, `gpu_model`, `gpu_mig_uuid`, `gpu_mig_profile`; of a pod
`k8s_namespace_name`, `k8s_pod_name`, `k8s_pod_uid`, `k8s_container_name`, `k8s_workload_kind`, `k8s_workload_name`,
`k8s_job_name`, `k8s_statefulset_name`, `k8s_deployment_name`, and `k8s_pod_label_NAME` and `k8s_namespace_label_NAME`
of `copy_labels`; of XID errors `xid` and `xid_kind`. An alert that is not about a pod names one only where it holds
the device alone; an XID error is of who held it when the error came, which may be another than at the tick.

Annotations are `summary`, `description` (with figures) and `runbook`; of GPUHeldIdle also `gpu_share`, the part of a
GPU that the pod holds (compute slices of a MIG device, divided equally among the pods on it), and
`wasted_gpu_seconds`, until it fired and, when it is resolved, in all; of XID errors `action`."""

_XIDS = """\
## XID errors

What they mean and what to do, after NVIDIA's XID catalogue. The kind gives the severity: `severity` for hardware, and
`driver_severity`, `application_severity`, `recovered_severity` and `unknown_severity` for the others."""


def markdown() -> str:
    """The page."""
    same: dict[tuple[str, str, str], list[int]] = {}
    for code, xid in XIDS.items():
        same.setdefault((xid.kind, xid.meaning, xid.action), []).append(code)
    xids = sorted(same.items(), key=lambda row: (XID_KINDS.index(row[0][0]), row[1]))
    head = ("rule", "what it is about", "kind", "severity", "for", "keep_firing_for", "further")
    parts = [
        "# Alerts",
        MARK,
        _INTRODUCTION,
        _table(head, map(_rule, rules_file.defaults().values())),
        _JUDGING,
        _table(("kind", "holds", "is not known"), [(f"`{kind}`", *texts) for kind, texts in _HOLDS.items()]),
        _LIFE,
        _FILE,
        "### Options",
        _table(("key", "of kind", "meaning"), map(_option, OPTIONS)),
        _OVERRIDES,
        _table(("key", "of kind", "matches"), map(_option, SELECTORS)),
        _POLICY,
        _TRYING,
        _LABELS,
        _XIDS,
        _table(("code", "kind", "meaning", "what to do"), [(", ".join(map(str, codes)), *row) for row, codes in xids]),
    ]
    return "\n\n".join(parts) + "\n"


def _rule(rule: Rule) -> Sequence[str]:
    further: list[str] = []
    for option in OPTIONS:
        if rule.kind in option.kinds:
            value = getattr(rule, option.field)
            if option.field.endswith("_ms"):
                value = duration_words(value)
            elif option.field.endswith("_bytes"):
                value = f"{value / (1 << 20):g}MiB"
            further.append(f"`{option.key}` {value}")
    return (
        f"[{rule.name}](runbooks/{rule.name}.md)",
        _ABOUT[rule.kind],
        f"`{rule.kind}`",
        rule.severity,
        duration_words(rule.for_ms) if rule.for_ms else "at once",
        duration_words(rule.keep_firing_ms) if rule.keep_firing_ms else "",
        ", ".join(further),
    )


def _option(option: Option) -> Sequence[str]:
    return f"`{option.key}`", ", ".join(f"`{kind}`" for kind in option.kinds) or "any", option.what


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "streams.alerts.text.reference", sys.argv[1:]))
