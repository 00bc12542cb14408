"""The options of a file of rules, as a table. The file is parsed by it, and its docs are written from it.

Each parser takes a TOML value. It raises ValueError with a sentence, or NestedErrors for errors within the value. Pure.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_args

from delivery.values import duration_words, milliseconds
from streams.alerts.rules.rule import KINDS, WINDOWED, Kind, Rule
from streams.alerts.uses import STEP_MS
from topics.alerts import Severity

_SIZE = re.compile(r"([0-9]{1,15})\s*(B|KiB|MiB|GiB)?", re.ASCII)
_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}")
_TEMPLATE = re.compile(r"\{\{|\$\{?[A-Za-z_]|\{[A-Za-z_][A-Za-z0-9_.]*\}")  # {{ .Labels }}, ${pod}, $labels, {pod}
_MAX_TEXT_LENGTH = 4096
_MAX_WINDOW_MS = 24 * 3_600_000
_RESERVED = ("alertname", "severity", "xid", "gpu_", "k8s_", "host_", "job_", "cloud_", "service_", "__")
"""The prefixes of the labels that alerts have of their own."""

_OWN_ANNOTATIONS = (
    "gpu_share", "wasted_gpu_seconds", "wasted_gpu_hours", "cost", "currency", "gpu_hour_price", "last_active", "since",
    "window",
)  # fmt: skip

W = TypeVar("W", bound=str)
Keys = tuple[str | int, ...]  # the path of a value in a file: keys of tables, indices of lists
ValueErrors = list[tuple[Keys, str]]  # the path and the message of each error; the line is found by the path


class NestedErrors(ValueError):
    """The errors within a table or a list, each with its path."""

    def __init__(self, errors: ValueErrors) -> None:
        self.errors = errors
        super().__init__("; ".join(text for _, text in errors))


class Option(NamedTuple):
    """A key of a rule's table: the field of Rule that it sets, its parser, the kinds of rules that have it (none: all),
    and its description."""

    key: str
    field: str
    parse: Callable[[Any], Any]
    kinds: tuple[Kind, ...]
    description: str

    def format_value(self, rule: Rule) -> str:
        value = getattr(rule, self.field)
        if self.field.endswith("_ms"):
            return duration_words(value)
        return f"{value / (1 << 20):g}MiB" if self.field.endswith("_bytes") else str(value)


# -- the values of options


def duration(value: Any) -> int:
    """Milliseconds."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f'must be a duration such as "15m", not {_show(value)}')
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'must be a duration such as "15m", not {value}')
    return milliseconds(value if isinstance(value, str) else f"{value:f}" if isinstance(value, float) else str(value))


def duration_from_1s(value: Any) -> int:
    """Milliseconds, of a duration of at least a second."""
    ms = duration(value)
    if ms < 1000:
        raise ValueError("must be at least 1s")
    return ms


def window(value: Any) -> int:
    """Milliseconds, of a window of whole steps in which use is summed, and of at most a day."""
    ms = duration(value)
    if ms % STEP_MS or not STEP_MS <= ms <= _MAX_WINDOW_MS:
        raise ValueError(
            f"must be a multiple of {duration_words(STEP_MS)}, and at most {duration_words(_MAX_WINDOW_MS)}"
        )
    return ms


def deviations(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
        raise ValueError(f"must be a number from 1 to 100, not {_show(value)}")
    return float(value)


def ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"must be a number above 0 and at most 1, not {_show(value)}")
    return float(value)


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 63:
        raise ValueError(f"must be a whole number of at least 1, not {_show(value)}")
    return value


def size(value: Any) -> float:
    """Bytes."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        return float(int(match[1]) * _BYTES[match[2]])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f'must be a size such as "64MiB", not {_show(value)}')
    return float(value)


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_show(value)}")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, not {_show(value)}")
    if len(value) > _MAX_TEXT_LENGTH:
        raise ValueError(f"must be at most {_MAX_TEXT_LENGTH} characters long")
    return value


def glob(value: Any) -> str:
    """A pattern of fnmatch. A [ without a ] is an error: it would match the sign itself only."""
    pattern, rest = text(value), value
    while "[" in rest:
        rest = rest.partition("[")[2]
        end = rest.find("]", 2 if rest.startswith("!") else 1)
        if end < 0:
            raise ValueError(f"{pattern[:80]!r} has a [ without a ]: close it, or write [[] for the sign itself")
        rest = rest[end + 1 :]
    return pattern


def plain(value: Any) -> str:
    """Text that does not look like a template: nothing is expanded in it."""
    plain_text = text(value)
    if _TEMPLATE.search(plain_text):
        raise ValueError(
            f"{plain_text[:80]!r} looks like a template, and nothing is expanded here: write the text itself"
        )
    return plain_text


def names(value: Any) -> tuple[str, ...]:
    return () if value == [] else texts(value)


def label_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of a label: use a-z, A-Z, 0-9 and _, and no digit first")
    if name.startswith(_RESERVED):
        raise ValueError(f"{name[:80]!r} is the name of a label that alerts have of their own")
    return name


def annotation_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of an annotation: use a-z, A-Z, 0-9 and _")
    if name in _OWN_ANNOTATIONS:
        raise ValueError(f"{name} is a figure that alerts have of their own")
    return name


def _parse_one_of(choices: tuple[W, ...], value: Any) -> W:
    if value not in choices:
        suggestion = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"must be one of {', '.join(choices)}, not {_show(value)}{suggestion}")
    return choices[choices.index(value)]


def _parse_one_or_several(parse: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        return (parse(value),)
    if not value:
        raise ValueError("must not be empty")
    return tuple(_parse_all(enumerate(value), parse).values())


def _parse_table(example: str, name: Callable[[str], str], parse: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a table such as {{ {example} }}, not {_show(value)}")
    return _parse_all(
        ((key, (key, item)) for key, item in value.items()), lambda pair: name(pair[0]) and parse(pair[1])
    )


def _parse_all(items: Iterable[tuple[Any, Any]], parse: Callable[[Any], Any]) -> dict[Any, Any]:
    """Parse each item, under its key. Raises NestedErrors with the errors of all items."""
    parsed: dict[Any, Any] = {}
    errors: ValueErrors = []
    for key, item in items:
        try:
            parsed[key] = parse(item)
        except ValueError as error:
            errors += prefix_errors((key,), error)
    if errors:
        raise NestedErrors(errors)
    return parsed


def prefix_errors(path: Keys, error: ValueError) -> ValueErrors:
    """The errors of a parser for the value at a path."""
    if isinstance(error, NestedErrors):
        return [((*path, *keys), text) for keys, text in error.errors]
    return [(path, str(error))]


def _show(value: Any) -> str:
    descriptions = {dict: "a table", list: "a list", bool: str(value).lower()}
    return descriptions.get(type(value)) or repr(value)[:80]


severity, kind = partial(_parse_one_of, get_args(Severity)), partial(_parse_one_of, KINDS)
texts, codes = partial(_parse_one_or_several, text), partial(_parse_one_or_several, count)
globs = partial(_parse_one_or_several, glob)
globs_by_label = partial(_parse_table, 'app = "vllm*"', text, globs)
labels = partial(_parse_table, 'team = "platform"', label_name, plain)
annotations = partial(_parse_table, 'runbook = "https://..."', annotation_name, text)

STATES: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "xid")  # an XID error is an event
OF_PODS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ("used_unallocated", "missing", "node_silent"))
"""The kinds that are about a pod, or about a device that a pod may hold."""

OPTIONS = (
    Option("enabled", "enabled", switch, (), "Whether it is judged; an override may enable it for some."),
    Option("severity", "severity", severity, (), "`info`, `warning` or `critical`; of `GPUXid` that of hardware."),
    Option("for", "for_ms", duration, STATES, "How long it must hold before it fires; an XID error fires at once."),
    Option("keep_firing_for", "keep_firing_ms", duration, (), "How long it must not hold before it resolves."),
    Option("critical_after", "critical_ms", duration, STATES, "From so long on it is critical; 0s: never."),
    Option("grace", "grace_ms", duration, ("held_idle",), "After a pod got the GPU, for how long it does not count."),
    Option("idle_below", "idle_below", ratio, ("held_idle",), "What is less than this ratio is no work."),
    Option("memory_held", "memory_held_bytes", size, ("held_idle",), "Memory counts as held from so many bytes on."),
    Option("used_above", "used_above", ratio, ("used_unallocated", "stalled"), "Work is this ratio or more."),
    Option("power_below", "power_below", ratio, ("stalled",), "Less of the power limit than this ratio is little."),
    Option("sm_active_below", "sm_active_below", ratio, ("stalled",), "Less SM activity than this ratio is little."),
    Option(
        "tensor_active_below", "tensor_active_below", ratio, ("stalled",),
        "Less activity of tensor cores than this ratio is little.",
    ),
    Option("window", "window_ms", window, WINDOWED, "Over which time use is averaged; a multiple of 5m."),
    Option("used_below", "used_below", ratio, WINDOWED, "Less use than this ratio of the window is hardly any."),
    Option("memory_above", "memory_above", ratio, ("memory_hoarded",), "This ratio of the device's memory or more."),
    Option("peers", "peers", count, ("straggler",), "A GPU is compared with so many others of its workload, or more."),
    Option(
        "deviations", "deviations", deviations, ("straggler",),
        "An outlier is further from the median than this many deviations (1.4826 times the MAD).",
    ),
    Option("restarts", "restarts", count, ("crash_loop",), "A container that waits has restarted so often or more."),
    Option(
        "at_least", "at_least", count, ("ecc_uncorrectable", "nvlink_errors"),
        "So many errors within a minute; of NVLink, CRC errors or replays.",
    ),
    Option("recoveries", "recoveries", count, ("nvlink_errors",), "So many recoveries of a link within a minute."),
    Option("forget", "forget_ms", duration_from_1s, ("missing",), "A GPU that is missing for longer is forgotten."),
    Option("driver_severity", "driver_severity", severity, ("xid",), "Of errors of driver or firmware."),
    Option("application_severity", "application_severity", severity, ("xid",), "Of errors of programs."),
    Option("recovered_severity", "recovered_severity", severity, ("xid",), "Of what the GPU has dealt with itself."),
    Option("unknown_severity", "unknown_severity", severity, ("xid",), "Of codes without a row."),
    Option("copy_labels", "copy_labels", names, (), "Labels of the pod and of its namespace that the alert has too."),
    Option("labels", "labels", labels, (), "Labels to add. None replaces one of the alert's own, such as `team`."),
    Option("annotations", "annotations", annotations, (), "Annotations to add, or to have in place of the rule's own."),
)  # fmt: skip

SELECTORS = (
    Option("namespace", "namespace", globs, OF_PODS, "The pod's namespace."),
    Option("workload_kind", "workload_kind", globs, OF_PODS, "The kind at the top of the pod's owner chain."),
    Option("workload", "workload", globs, OF_PODS, "Its name."),
    Option("pod_labels", "pod_labels", globs_by_label, OF_PODS, "Labels of the pod."),
    Option("namespace_labels", "namespace_labels", globs_by_label, OF_PODS, "Labels of the pod's namespace."),
    Option("xid", "xid", codes, ("xid",), "Codes of XID errors."),
)

BOUNDS = {"longest": Option("longest", "longest_ms", duration_from_1s, (), "For how long a policy may silence.")}
BOUND_OVERRIDES = {"namespace": SELECTORS[0], **BOUNDS}

BY_KEY = {option.key: option for option in OPTIONS}
SELECTORS_BY_KEY = {option.key: option for option in SELECTORS}


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known_names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
