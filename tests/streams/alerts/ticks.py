"""Helpers that make ticks of one node, and find what is wrong in them."""

from typing import Any

from streams.alerts.conditions.evaluate import evaluate
from streams.alerts.conditions.finding import Finding
from streams.alerts.memory import Memory
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Device, Metrics, Tick
from topics.attributed import Attribution, Holder, Parts, Workload
from topics.samples import Mig

DEFAULTS = rules_file.load(None)
START_MS = 1_795_219_152_000
GRACE_S = 300
"""Of GPUHeldIdle, by default."""


def gpu(number: int = 0) -> str:
    """The UUID of a GPU."""
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def device(number: int = 0, *holders: Holder, busy: float | None = None, **fields: Any) -> Device:
    """A GPU. Keyword arguments that are metrics become metrics, all others become fields."""
    metrics = {name: fields.pop(name) for name in list(fields) if name in Metrics.__struct_fields__}
    if busy is not None:
        metrics["gpu_utilization_ratio"] = busy
    defaults = {"uuid": gpu(number), "index": number, "pci_bus_id": f"00000000:{number:02x}:00.0", "holders": holders}
    return Device(**{**defaults, **fields}, metrics=Metrics(**metrics))


def mig(number: int, *holders: Holder, parent: int = 0, profile: str | None = "1g.10gb", **fields: Any) -> Device:
    """A MIG device of a GPU."""
    mig_device = Mig(f"MIG-{number}", gpu(parent), number, 0, profile)
    return device(parent, *holders, uuid=f"MIG-{number}", mig=mig_device, **fields)


def holder(pod: str = "bert-0", *, busy: float | None = None, **fields: Any) -> Holder:
    """A container that holds a device; ``busy`` is its part of a shared one."""
    parts = {"parts": Parts(busy, 1 << 30, 100.0)} if busy is not None else {}
    defaults = {"namespace": "ml", "pod": pod, "pod_uid": f"uid-{pod}", "container": "main", **parts}
    return Holder(**{"workload": Workload("Job", "bert"), **defaults, **fields})


def tick(
    second: float,
    *devices: Device,
    run_id: int = 1,
    attribution: Attribution = "exact",
    node: str = "n",
    interval_ms: int | None = None,
) -> Tick:
    """A node's tick, so many seconds after the first."""
    return Tick(
        schema=1,
        cluster="c",
        node=node,
        run_id=run_id,
        seq=int(second) + 1,
        ts_ms=START_MS + round(second * 1000),
        interval_ms=interval_ms,
        offset=int(second),
        attribution=attribution,
        devices=devices,
    )


def findings_in(*ticks: Tick, rule_name: str = "", by: Rules = DEFAULTS) -> list[Finding]:
    """The findings in the last of some ticks, of one rule or of all."""
    memory, findings = Memory(), list[Finding]()
    for moment in ticks:
        findings, memory = evaluate(by, moment, memory)
    return [finding for finding in findings if not rule_name or finding.rule.name == rule_name]


def verdict(findings: list[Finding], uuid: str = gpu()) -> bool | None:
    """Whether a condition of a device holds; None if that is not known."""
    holds = {finding.holds for finding in findings if finding.device == uuid}
    assert len(holds) < 2, findings
    return holds.pop() if holds else False


def overlay(text: str) -> Rules:
    """The defaults with a file over them."""
    return rules_file.parse(text, "rules.toml")
