"""The report of ``make gpu``, as Markdown. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.gpu.comparison import Outcome
from topics.catalogue import CATALOGUE


def markdown(
    *,
    seconds: float,
    ticks: Sequence[Mapping[str, Any]],
    samples: int,
    listed: str,
    outcomes: Mapping[str, Outcome],
    recorded: Mapping[str, Mapping[str, Any]],
    not_ready: Sequence[str],
) -> str:
    """All that was seen, the worst first."""
    parts = [
        "# The node producer beside nvidia-smi",
        f"{seconds:.0f} s, {len(ticks)} ticks, {samples} runs of nvidia-smi.",
        _verdict(outcomes, ticks),
        "## Devices\n\n" + _devices(ticks) + "\n\nnvidia-smi -L:\n\n```\n" + listed.rstrip() + "\n```",
        "## Values of whole GPUs beside nvidia-smi's\n\n" + _outcomes(outcomes),
        "## Values of which nvidia-smi has no opinion\n\n" + _alone(ticks, outcomes),
        "## XID errors that came\n\n" + (_events(ticks) or "none"),
        "## What the producer said was wrong at the end\n\n"
        + ("\n".join(f"- {reason}" for reason in not_ready) or "nothing"),
        "## The slowest calls\n\n" + _calls(recorded),
        "What NVML answered is in nvml.json, the ticks in ticks.jsonl. Both name UUIDs and serial numbers.",
    ]
    return "\n\n".join(parts) + "\n"


def disagreements(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The keys about which the two are not of one opinion."""
    return [key for key, outcome in outcomes.items() if not outcome.is_good]


def _verdict(outcomes: Mapping[str, Outcome], ticks: Sequence[Mapping[str, Any]]) -> str:
    bad = disagreements(outcomes)
    states = {device["state"] for tick in ticks for device in tick["devices"]}
    verdict = f"Not of one opinion: {', '.join(bad)}." if bad else f"Of one opinion about all {len(outcomes)} values."
    return f"**{verdict}** States of devices: {', '.join(sorted(states)) or 'there were none'}."


def _devices(ticks: Sequence[Mapping[str, Any]]) -> str:
    last = {device["uuid"]: device for tick in ticks for device in tick["devices"]}
    rows = [
        (
            uuid,
            device.get("model", ""),
            (device.get("mig") or {}).get("profile", ""),
            device["state"],
            len(device["metrics"]),
        )
        for uuid, device in last.items()
    ]
    return _table(("UUID", "model", "MIG profile", "state", "values"), rows)


def _outcomes(outcomes: Mapping[str, Outcome]) -> str:
    ordered = sorted(outcomes.items(), key=lambda item: (item[1].is_good, item[0]))
    return _table(
        ("key", "compared", "agree", "farthest off: node, nvidia-smi", "only node", "only nvidia-smi"),
        [
            (key, outcome.compared, outcome.agreed, _pair(outcome.worst_pair), outcome.only_node, outcome.only_smi)
            for key, outcome in ordered
        ],
    )


def _pair(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:g}, {pair[1]:g}"


def _alone(ticks: Sequence[Mapping[str, Any]], outcomes: Mapping[str, Outcome]) -> str:
    """The range of each key, over all devices."""
    values_by_key: dict[str, list[float]] = {}
    for tick in ticks:
        for device in tick["devices"]:
            for key, value in device["metrics"].items():
                if key not in outcomes:
                    values_by_key.setdefault(key, []).append(value)
    rows = [
        (key, len(values_by_key[key]), f"{min(values_by_key[key]):g}", f"{max(values_by_key[key]):g}")
        for key in sorted(values_by_key)
    ]
    absent = sorted(set(CATALOGUE) - values_by_key.keys() - outcomes.keys())
    return _table(("key", "values", "least", "most"), rows) + f"\n\nNever had: {', '.join(absent) or 'none'}."


def _events(ticks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (device["uuid"], event.get("code"), event.get("ts_ms"))
        for tick in ticks
        for device in tick["devices"]
        for event in device.get("events", ())
    ]
    return _table(("UUID", "XID", "ms since 1970"), rows) if rows else ""


def _calls(recorded: Mapping[str, Mapping[str, Any]]) -> str:
    timed = [
        (record["longest_s"], uuid, call, record)
        for uuid, calls in recorded.items()
        for call, record in calls.items()
        if "longest_s" in record
    ]
    rows = [
        (
            call,
            uuid or "-",
            record["calls"],
            f"{record['mean_s'] * 1e3:.2f}",
            f"{longest_s * 1e3:.2f}",
            _errors(record["errors"]),
        )
        for longest_s, uuid, call, record in sorted(timed, key=lambda row: -row[0])[:40]
    ]
    return _table(("call", "of", "calls", "mean ms", "longest ms", "errors"), rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in errors.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
