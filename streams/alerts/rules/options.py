"""What a rule in the file may set, as a table: the docs are written from it, and the file is checked by it.

Each parser takes a TOML value and raises ValueError with a sentence, or Mistakes of what is within it.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_args

from delivery.values import milliseconds
from streams.alerts.rules.rule import KINDS, Kind
from topics.alerts import Severity

_SIZE = re.compile(r"([0-9]{1,15})\s*(B|KiB|MiB|GiB)?", re.ASCII)
_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}")
_LONGEST_TEXT = 4096
_RESERVED = ("alertname", "severity", "xid", "gpu_", "k8s_", "host_", "job_", "cloud_", "service_", "__")
"""The beginnings of names that labels of our own have."""

_FIGURES = ("gpu_share", "wasted_gpu_seconds")


Within = tuple[str | int, ...]
"""Where in a value something is: keys of tables, places in lists."""


class Mistakes(ValueError):
    """What is wrong within a table or a list, each with its place."""

    def __init__(self, found: Iterable[tuple[Within, str]]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(text for _, text in self.found))


class Option(NamedTuple):
    """A key of a rule's table: the field of Rule that it sets, for which kinds (none: all), and what it says."""

    key: str
    field: str
    parse: Callable[[Any], Any]
    kinds: tuple[Kind, ...]
    what: str


def duration(value: Any) -> int:
    """Milliseconds."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f'must be a duration such as "15m", not {_shown(value)}')
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'must be a duration such as "15m", not {value}')
    return milliseconds(value if isinstance(value, str) else f"{value:f}" if isinstance(value, float) else str(value))


def at_least_a_second(value: Any) -> int:
    """Milliseconds, of a duration that is not nothing."""
    ms = duration(value)
    if ms < 1000:
        raise ValueError("must be at least 1s")
    return ms


def ratio(value: Any) -> float:
    """A number above 0, up to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"must be a number above 0 and at most 1, not {_shown(value)}")
    return float(value)


def count(value: Any) -> int:
    """A whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 63:
        raise ValueError(f"must be a whole number of at least 1, not {_shown(value)}")
    return value


def size(value: Any) -> float:
    """Bytes."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        return float(int(match[1]) * _BYTES[match[2]])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f'must be a size such as "64MiB", not {_shown(value)}')
    return float(value)


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_shown(value)}")
    return value


def severity(value: Any) -> str:
    """One of the severities."""
    if value not in get_args(Severity):
        raise ValueError(f"must be one of {', '.join(get_args(Severity))}, not {_shown(value)}")
    return str(value)


def kind(value: Any) -> str:
    """One of the kinds."""
    if value not in KINDS:
        raise ValueError(f"must be one of {', '.join(KINDS)}, not {_shown(value)}")
    return str(value)


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, not {_shown(value)}")
    if len(value) > _LONGEST_TEXT:
        raise ValueError(f"must be at most {_LONGEST_TEXT} characters long")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """One text or several."""
    return _one_or_several(value, text)


def names(value: Any) -> tuple[str, ...]:
    """Several texts, or none."""
    return () if value == [] else texts(value)


def codes(value: Any) -> tuple[int, ...]:
    """One XID code or several."""
    return _one_or_several(value, count)


def globs_by_label(value: Any) -> dict[str, tuple[str, ...]]:
    """Globs for the values of labels."""
    return _by_name(_table(value, 'app = "vllm*"'), text, texts)


def labels(value: Any) -> dict[str, str]:
    """Labels that a rule adds."""
    return _by_name(_table(value, 'team = "platform"'), _label, text)


def annotations(value: Any) -> dict[str, str]:
    """Annotations that a rule adds, or puts in place of its own."""
    return _by_name(_table(value, 'runbook = "https://..."'), _annotation, text)


def _label(name: str) -> None:
    if not _LABEL.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of a label: use a-z, A-Z, 0-9 and _, and no digit first")
    if name.startswith(_RESERVED):
        raise ValueError(f"{name[:80]!r} is the name of a label that alerts have of their own")


def _annotation(name: str) -> None:
    if not _LABEL.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of an annotation: use a-z, A-Z, 0-9 and _")
    if name in _FIGURES:
        raise ValueError(f"{name} is a figure that alerts have of their own")


def _one_or_several(value: Any, parse: Callable[[Any], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        return (parse(value),)
    if not value:
        raise ValueError("must not be empty")
    return tuple(_all(enumerate(value), parse).values())


def _by_name(table: dict[str, Any], name: Callable[[str], Any], parse: Callable[[Any], Any]) -> dict[str, Any]:
    def named(pair: tuple[str, Any]) -> Any:
        name(pair[0])
        return parse(pair[1])

    return _all(((key, (key, item)) for key, item in table.items()), named)


def _all(items: Iterable[tuple[Any, Any]], parse: Callable[[Any], Any]) -> dict[Any, Any]:
    """Each item parsed, under its place. Raises Mistakes with those of all."""
    found, wrong = {}, list[tuple[Within, str]]()
    for at, item in items:
        try:
            found[at] = parse(item)
        except Mistakes as error:
            wrong += [((at, *within), words) for within, words in error.found]
        except ValueError as error:
            wrong.append(((at,), str(error)))
    if wrong:
        raise Mistakes(wrong)
    return found


def _table(value: Any, example: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a table such as {{ {example} }}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value)) or repr(value)[:80]


OPTIONS = (
    Option("enabled", "enabled", switch, (), "Whether it is judged; an override may enable it for some."),
    Option("severity", "severity", severity, (), "`info`, `warning` or `critical`; of `GPUXid` that of hardware."),
    Option("for", "for_ms", duration, (), "How long it must hold before it fires."),
    Option("keep_firing_for", "keep_firing_ms", duration, (), "How long it must not hold before it resolves."),
    Option("grace", "grace_ms", duration, ("held_idle",), "After a pod got the GPU, for how long it does not count."),
    Option("idle_below", "idle_below", ratio, ("held_idle",), "What is less than this ratio is no work."),
    Option("memory_held", "memory_held_bytes", size, ("held_idle",), "Memory counts as held from so many bytes on."),
    Option("used_above", "used_above", ratio, ("used_unallocated",), "Work is this ratio or more."),
    Option(
        "at_least", "at_least", count, ("ecc_uncorrectable", "nvlink_errors"),
        "So many errors within a minute; of NVLink, CRC errors or replays.",
    ),
    Option("recoveries", "recoveries", count, ("nvlink_errors",), "So many recoveries of a link within a minute."),
    Option("forget", "forget_ms", at_least_a_second, ("missing",), "A GPU that is missing for longer is forgotten."),
    Option("driver_severity", "driver_severity", severity, ("xid",), "Of errors of driver or firmware."),
    Option("application_severity", "application_severity", severity, ("xid",), "Of errors of programs."),
    Option("recovered_severity", "recovered_severity", severity, ("xid",), "Of what the GPU has dealt with itself."),
    Option("unknown_severity", "unknown_severity", severity, ("xid",), "Of codes without a row."),
    Option("copy_labels", "copy_labels", names, (), "Labels of the pod and of its namespace that the alert has too."),
    Option("labels", "labels", labels, (), "Labels to add."),
    Option("annotations", "annotations", annotations, (), "Annotations to add, or to have in place of the rule's own."),
)  # fmt: skip

SELECTORS = (
    Option("namespace", "namespace", texts, (), "The pod's namespace."),
    Option("workload_kind", "workload_kind", texts, (), "The kind at the top of the pod's owner chain."),
    Option("workload", "workload", texts, (), "Its name."),
    Option("pod_labels", "pod_labels", globs_by_label, (), "Labels of the pod."),
    Option("namespace_labels", "namespace_labels", globs_by_label, (), "Labels of the pod's namespace."),
    Option("xid", "xid", codes, ("xid",), "Codes of XID errors."),
)

BY_KEY = {option.key: option for option in OPTIONS}
SELECTORS_BY_KEY = {option.key: option for option in SELECTORS}
