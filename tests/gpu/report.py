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
        + ("\n".join(f"- {one}" for one in not_ready) or "nothing"),
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
    told = f"Not of one opinion: {', '.join(bad)}." if bad else f"Of one opinion about all {len(outcomes)} values."
    return f"**{told}** States of devices: {', '.join(sorted(states)) or 'there were none'}."


def _devices(ticks: Sequence[Mapping[str, Any]]) -> str:
    last = {device["uuid"]: device for tick in ticks for device in tick["devices"]}
    rows = [
        (uuid, one.get("model", ""), (one.get("mig") or {}).get("profile", ""), one["state"], len(one["metrics"]))
        for uuid, one in last.items()
    ]
    return _table(("UUID", "model", "MIG profile", "state", "values"), rows)


def _outcomes(outcomes: Mapping[str, Outcome]) -> str:
    ordered = sorted(outcomes.items(), key=lambda one: (one[1].is_good, one[0]))
    return _table(
        ("key", "compared", "agree", "farthest off: node, nvidia-smi", "only node", "only nvidia-smi"),
        [(key, one.compared, one.agreed, _pair(one.worst_pair), one.only_node, one.only_smi) for key, one in ordered],
    )


def _pair(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:g}, {pair[1]:g}"


def _alone(ticks: Sequence[Mapping[str, Any]], outcomes: Mapping[str, Outcome]) -> str:
    """The range of each key, over all devices."""
    seen: dict[str, list[float]] = {}
    for tick in ticks:
        for device in tick["devices"]:
            for key, value in device["metrics"].items():
                if key not in outcomes:
                    seen.setdefault(key, []).append(value)
    rows = [(key, len(seen[key]), f"{min(seen[key]):g}", f"{max(seen[key]):g}") for key in sorted(seen)]
    absent = sorted(set(CATALOGUE) - seen.keys() - outcomes.keys())
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
        (one["longest_s"], uuid, call, one)
        for uuid, calls in recorded.items()
        for call, one in calls.items()
        if "longest_s" in one
    ]
    rows = [
        (
            call,
            uuid or "-",
            one["calls"],
            f"{one['mean_s'] * 1e3:.2f}",
            f"{longest_s * 1e3:.2f}",
            _errors(one["errors"]),
        )
        for longest_s, uuid, call, one in sorted(timed, key=lambda row: -row[0])[:40]
    ]
    return _table(("call", "of", "calls", "mean ms", "longest ms", "errors"), rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in errors.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
