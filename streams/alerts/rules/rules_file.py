"""The rules in force, from a TOML file over the defaults, and the options that the file may set.

In: a file of tables ``[rules.NAME]``. Out: :class:`Rules`. The options are a table, from which the docs are written,
too: each parser takes a TOML value and raises ValueError with a sentence, or Mistakes of what is within it.
On failure: :class:`RulesError` with every mistake and its place; nothing of a file with mistakes is in force.
"""

import difflib
import math
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from delivery.policies import Bounds
from delivery.values import duration_words, milliseconds
from streams.alerts.rules.rule import KINDS, WINDOWED, Kind, Override, Rule, Rules
from streams.alerts.uses import STEP_MS
from topics.alerts import Severity

DEFAULTS = Path(__file__).with_name("defaults.toml")

_SIZE = re.compile(r"([0-9]{1,15})\s*(B|KiB|MiB|GiB)?", re.ASCII)
_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}")
_TEMPLATE = re.compile(r"\{\{|\$\{?[A-Za-z_]|\{[A-Za-z_][A-Za-z0-9_.]*\}")  # {{ .Labels }}, ${pod}, $labels, {pod}
_LONGEST_TEXT = 4096
_LARGEST_BYTES = 1 << 20
_LONGEST_WINDOW_MS = 24 * 3_600_000
_RESERVED = ("alertname", "severity", "xid", "gpu_", "k8s_", "host_", "job_", "cloud_", "service_", "__")
"""The beginnings of names that labels of our own have."""

_FIGURES = ("gpu_share", "wasted_gpu_seconds", "wasted_gpu_hours", "cost", "currency", "gpu_hour_price", "last_active")
_XID_SEVERITIES = ("driver_severity", "application_severity", "recovered_severity", "unknown_severity")

W = TypeVar("W", bound=str)
Keys = tuple[str | int, ...]  # where in a file or a value something is: keys of tables, places in lists
Wrong = list[tuple[Keys, str]]  # what is wrong, and where; the lines are looked up in the end


class Mistakes(ValueError):
    """What is wrong within a table or a list, each with its place."""

    def __init__(self, found: Wrong) -> None:
        self.found = found
        super().__init__("; ".join(text for _, text in found))


class Mistake(NamedTuple):
    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}: {self.text}" if self.path else f"{place}: {self.text}"


class RulesError(ValueError):
    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class Option(NamedTuple):
    """A key of a rule's table: the field of Rule that it sets, for which kinds (none: all), and what it says."""

    key: str
    field: str
    parse: Callable[[Any], Any]
    kinds: tuple[Kind, ...]
    what: str

    def shown(self, rule: Rule) -> str:
        value = getattr(rule, self.field)
        if self.field.endswith("_ms"):
            return duration_words(value)
        return f"{value / (1 << 20):g}MiB" if self.field.endswith("_bytes") else str(value)


# -- the values of options


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


def steps(value: Any) -> int:
    """Milliseconds, of a window that is some of the steps in which use is summed, and at most a day."""
    ms = duration(value)
    if ms % STEP_MS or not STEP_MS <= ms <= _LONGEST_WINDOW_MS:
        raise ValueError(
            f"must be a multiple of {duration_words(STEP_MS)}, and at most {duration_words(_LONGEST_WINDOW_MS)}"
        )
    return ms


def deviations(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
        raise ValueError(f"must be a number from 1 to 100, not {_shown(value)}")
    return float(value)


def ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"must be a number above 0 and at most 1, not {_shown(value)}")
    return float(value)


def count(value: Any) -> int:
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
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_shown(value)}")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text, not {_shown(value)}")
    if len(value) > _LONGEST_TEXT:
        raise ValueError(f"must be at most {_LONGEST_TEXT} characters long")
    return value


def glob(value: Any) -> str:
    """A pattern as fnmatch has it. One that can't match what it is meant for is a mistake."""
    given, rest = text(value), value
    while "[" in rest:
        rest = rest.partition("[")[2]
        end = rest.find("]", 2 if rest.startswith("!") else 1)
        if end < 0:
            raise ValueError(f"{given[:80]!r} has a [ without a ]: close it, or write [[] for the sign itself")
        rest = rest[end + 1 :]
    return given


def plain(value: Any) -> str:
    """Text in which nothing is expanded, and which does not look as if it were."""
    given = text(value)
    if _TEMPLATE.search(given):
        raise ValueError(f"{given[:80]!r} looks like a template, and nothing is expanded here: write the text itself")
    return given


def names(value: Any) -> tuple[str, ...]:
    return () if value == [] else texts(value)


def label_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of a label: use a-z, A-Z, 0-9 and _, and no digit first")
    if name.startswith(_RESERVED):
        raise ValueError(f"{name[:80]!r} is the name of a label that alerts have of their own")
    return name


def annotation_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of an annotation: use a-z, A-Z, 0-9 and _")
    if name in _FIGURES:
        raise ValueError(f"{name} is a figure that alerts have of their own")
    return name


def _one_of(words: tuple[W, ...], value: Any) -> W:
    if value not in words:
        close = _close(value, words) if isinstance(value, str) else ""
        raise ValueError(f"must be one of {', '.join(words)}, not {_shown(value)}{close}")
    return words[words.index(value)]


def _one_or_several(parse: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        return (parse(value),)
    if not value:
        raise ValueError("must not be empty")
    return tuple(_all(enumerate(value), parse).values())


def _by_name(example: str, name: Callable[[str], str], parse: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a table such as {{ {example} }}, not {_shown(value)}")
    return _all(((key, (key, item)) for key, item in value.items()), lambda pair: name(pair[0]) and parse(pair[1]))


def _all(items: Iterable[tuple[Any, Any]], parse: Callable[[Any], Any]) -> dict[Any, Any]:
    """Each item parsed, under its place. Raises Mistakes with those of all."""
    found: dict[Any, Any] = {}
    wrong: Wrong = []
    for at, item in items:
        try:
            found[at] = parse(item)
        except ValueError as error:
            wrong += _within((at,), error)
    if wrong:
        raise Mistakes(wrong)
    return found


def _within(at: Keys, error: ValueError) -> Wrong:
    """What a parser said of the value at a place."""
    if isinstance(error, Mistakes):
        return [((*at, *keys), text) for keys, text in error.found]
    return [(at, str(error))]


def _shown(value: Any) -> str:
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value)) or repr(value)[:80]


severity, kind = partial(_one_of, get_args(Severity)), partial(_one_of, KINDS)
texts, codes = partial(_one_or_several, text), partial(_one_or_several, count)
globs = partial(_one_or_several, glob)
globs_by_label = partial(_by_name, 'app = "vllm*"', text, globs)
labels = partial(_by_name, 'team = "platform"', label_name, plain)
annotations = partial(_by_name, 'runbook = "https://..."', annotation_name, text)

_STATES: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "xid")  # that last; an XID error is an event

OPTIONS = (
    Option("enabled", "enabled", switch, (), "Whether it is judged; an override may enable it for some."),
    Option("severity", "severity", severity, (), "`info`, `warning` or `critical`; of `GPUXid` that of hardware."),
    Option("for", "for_ms", duration, _STATES, "How long it must hold before it fires; an XID error fires at once."),
    Option("keep_firing_for", "keep_firing_ms", duration, (), "How long it must not hold before it resolves."),
    Option("critical_after", "critical_ms", duration, _STATES, "From so long on it is critical; 0s: never."),
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
    Option("window", "window_ms", steps, WINDOWED, "Over which time use is averaged; a multiple of 5m."),
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
    Option("forget", "forget_ms", at_least_a_second, ("missing",), "A GPU that is missing for longer is forgotten."),
    Option("driver_severity", "driver_severity", severity, ("xid",), "Of errors of driver or firmware."),
    Option("application_severity", "application_severity", severity, ("xid",), "Of errors of programs."),
    Option("recovered_severity", "recovered_severity", severity, ("xid",), "Of what the GPU has dealt with itself."),
    Option("unknown_severity", "unknown_severity", severity, ("xid",), "Of codes without a row."),
    Option("copy_labels", "copy_labels", names, (), "Labels of the pod and of its namespace that the alert has too."),
    Option("labels", "labels", labels, (), "Labels to add. None replaces one of the alert's own, such as `team`."),
    Option("annotations", "annotations", annotations, (), "Annotations to add, or to have in place of the rule's own."),
)  # fmt: skip

SELECTORS = (
    Option("namespace", "namespace", globs, (), "The pod's namespace."),
    Option("workload_kind", "workload_kind", globs, (), "The kind at the top of the pod's owner chain."),
    Option("workload", "workload", globs, (), "Its name."),
    Option("pod_labels", "pod_labels", globs_by_label, (), "Labels of the pod."),
    Option("namespace_labels", "namespace_labels", globs_by_label, (), "Labels of the pod's namespace."),
    Option("xid", "xid", codes, ("xid",), "Codes of XID errors."),
)

_BOUNDS = {"longest": Option("longest", "longest_ms", at_least_a_second, (), "For how long a policy may silence.")}
_BOUND_OVERRIDES = {"namespace": SELECTORS[0], **_BOUNDS}

BY_KEY = {option.key: option for option in OPTIONS}
SELECTORS_BY_KEY = {option.key: option for option in SELECTORS}


# -- the file


def load(path: Path | None) -> Rules:
    """The rules of a file over the defaults; None: the defaults alone. Raises RulesError."""
    return _in_force(defaults()) if path is None else parse(_text(path), str(path))


def every(path: Path) -> dict[str, Rule]:
    """All rules by a file, those that are off, too. Raises RulesError."""
    return _parse(_text(path), str(path))[0]


def _text(path: Path) -> str:
    """The text of a file. Raises RulesError."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise RulesError([Mistake(str(path), 0, "", error.strerror or str(error))]) from None
    if len(data) > _LARGEST_BYTES:
        raise RulesError([Mistake(str(path), 0, "", f"is larger than {_LARGEST_BYTES >> 20} MiB")])
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RulesError([Mistake(str(path), line, "", "is not UTF-8")]) from None


def parse(text: str, file: str) -> Rules:
    """The rules of a file's text over the defaults. Raises RulesError."""
    rules, bounds = _parse(text, file)
    return msgspec.structs.replace(_in_force(rules), bounds=bounds)


def _parse(text: str, file: str) -> tuple[dict[str, Rule], Bounds]:
    document, wrong = _document(text, file), list[tuple[Keys, str]]()
    bounds = _bounds(document.pop("policies", {}), wrong)
    rules = _parsed(document, defaults(), wrong)
    if wrong:
        line_of = _lines(text)
        raise RulesError(Mistake(file, line_of(keys), dotted(keys), why) for keys, why in wrong)
    return rules, bounds


@cache
def defaults() -> dict[str, Rule]:
    return _parsed(_document(DEFAULTS.read_text(encoding="utf-8"), DEFAULTS.name), {}, [])


def _in_force(rules: Mapping[str, Rule]) -> Rules:
    enabled = [r for r in rules.values() if r.enabled or any(o.changes.get("enabled") for o in r.overrides)]
    return Rules(tuple(enabled))


def _document(text: str, file: str) -> dict[str, Any]:
    """The tables of a file's text. Raises RulesError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RulesError([Mistake(file, 0, "", "is nested too deeply")]) from None
    except ValueError as error:
        place = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        raise RulesError([Mistake(file, line, "", f"is not TOML: {error}")]) from None


def _parsed(document: Mapping[str, Any], base: Mapping[str, Rule], wrong: Wrong) -> dict[str, Rule]:
    """The rules of a file's tables over others."""
    why = "is not known: rules are tables [rules.NAME]"
    wrong += [((key,), f"{why}{_close(key, ['rules', 'policies'])}") for key in document if key != "rules"]
    rules, tables = dict(base), document.get("rules", {})
    if isinstance(tables, dict):
        found = {name: rule(name, table, base, wrong) for name, table in tables.items()}
        rules |= {name: rule for name, rule in found.items() if rule is not None}
    else:
        wrong.append((("rules",), "must be tables [rules.NAME]"))
    return rules


def _bounds(table: Any, wrong: Wrong) -> Bounds:
    """For how long policies of pods and namespaces may silence alerts."""
    at: Keys = ("policies",)
    overrides = table.get("overrides", []) if isinstance(table, dict) else None
    if not isinstance(overrides, list):
        wrong.append((at, 'must be a table such as [policies] with longest = "24h", and [[policies.overrides]]'))
        return Bounds()
    read = _values(
        at,
        {key: value for key, value in table.items() if key != "overrides"},
        _BOUNDS,
        None,
        wrong,
        also=("overrides",),
    )
    found: list[tuple[tuple[str, ...], int]] = []
    for number, one in enumerate(overrides):
        place: Keys = (*at, "overrides", number)
        given = _values(place, one, _BOUND_OVERRIDES, None, wrong) if isinstance(one, dict) else {}
        if {"namespace", "longest_ms"} <= given.keys():
            found.append((given["namespace"], given["longest_ms"]))
        elif not isinstance(one, dict) or not one.keys() >= {"namespace", "longest"}:
            wrong.append((place, "must have namespace and longest"))
    return Bounds(**read, overrides=tuple(found))


def rule(name: str, table: Any, base: Mapping[str, Rule], wrong: Wrong) -> Rule | None:
    """A rule, from its table over what it is laid over: the default of its name, else the default of its kind."""
    at, known = ("rules", name), base.get(name)
    if not isinstance(table, dict):
        wrong.append((at, f"must be a table [rules.{name[:80]}]"))
        return None
    if not _NAME.fullmatch(name):
        wrong.append((at, "is not the name of a rule: use a-z, A-Z, 0-9 and _, and no digit first"))
    beneath = known
    if "kind" in table:
        try:
            given = kind(table["kind"])
            if known is not None and known.kind != given:
                raise ValueError(f"is {known.kind}: give a rule of another kind another name")
            default = known or next((rule for rule in base.values() if rule.kind == given), None)
            on = known is None or known.enabled  # a new rule is on, though the default of its kind may be off
            beneath = msgspec.structs.replace(default or Rule(name=name, kind=given), name=name, enabled=on)
        except ValueError as error:
            wrong.append(((*at, "kind"), str(error)))
            beneath = None
    elif known is None:
        wrong.append((at, f"is no rule that there is: a new one needs its kind{_close(name, base)}"))
    of = None if beneath is None else beneath.kind
    settings = {key: value for key, value in table.items() if key not in ("kind", "overrides")}
    changes = _values(at, settings, BY_KEY, of, wrong, also=("kind", "overrides"))
    overrides = table.get("overrides", [])
    if not isinstance(overrides, list):
        wrong.append(((*at, "overrides"), "must be a list of tables: write [[rules.NAME.overrides]]"))
    elif "overrides" in table:
        each = enumerate(overrides)
        changes["overrides"] = tuple([_override((*at, "overrides", i), one, of, wrong) for i, one in each])
    return None if beneath is None else msgspec.structs.replace(beneath, **changes)


def _override(at: Keys, table: Any, of: Kind | None, wrong: Wrong) -> Override:
    if not isinstance(table, dict):
        wrong.append((at, "must be a table: write [[rules.NAME.overrides]]"))
        return Override()
    selecting = {key: value for key, value in table.items() if key in SELECTORS_BY_KEY}
    selectors = _values(at, selecting, SELECTORS_BY_KEY, of, wrong)
    settings = {key: value for key, value in table.items() if key not in SELECTORS_BY_KEY}
    changes = _values(at, settings, BY_KEY, of, wrong, also=SELECTORS_BY_KEY)
    misspelt = any(key not in BY_KEY for key in settings)
    if not misspelt and not any(key in table for key in SELECTORS_BY_KEY):
        wrong.append((at, f"must say for what it is, by one of {', '.join(SELECTORS_BY_KEY)}"))
    if not misspelt and not any(key in table for key in BY_KEY):
        wrong.append((at, "changes nothing"))
    if "severity" in changes:
        changes = dict.fromkeys(_XID_SEVERITIES, changes["severity"]) | {"critical_ms": 0} | changes
    return Override(**selectors, changes=changes)


def _values(
    at: Keys,
    table: Mapping[str, Any],
    options: Mapping[str, Option],
    of: Kind | None,
    wrong: Wrong,
    *,
    also: Iterable[str] = (),
) -> dict[str, Any]:
    """The values of a table's keys, each as its option reads it; ``also``: keys that may have been meant."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        option = options.get(key)
        if option is None:
            usable = [o.key for o in options.values() if not o.kinds or of is None or of in o.kinds]
            wrong.append(((*at, key), f"is not known{_close(key, [*usable, *also])}"))
        elif option.kinds and of is not None and of not in option.kinds:
            why = ": an XID error is an event, which fires at once" if option.kinds == _STATES else ""
            wrong.append(((*at, key), f"is not read by rules of kind {of}{why}"))
        else:
            try:
                found[option.field] = option.parse(value)
            except ValueError as error:
                wrong += _within((*at, key), error)
    return found


def _close(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# -- where in the file


def dotted(keys: Keys) -> str:
    """``rules.GPUHeldIdle.overrides[1].for``; lists count from 1."""
    return "".join(f"[{key + 1}]" if isinstance(key, int) else f".{key[:80]}" for key in keys).removeprefix(".")


def _lines(text: str) -> Callable[[Keys], int]:
    """Gives the line at which a path begins.

    The TOML parser does not say. But the lines up to the end of any value are TOML too, and a longer beginning of the
    file never has less in it. So the path is in the last value of the shortest beginning that has it.
    """
    lines = text.splitlines(keepends=True)

    @cache
    def beginning(count: int) -> tuple[int, Any]:
        """How many of the first lines are TOML, and what they hold. The lines of an unfinished value are left out."""
        for end in range(count, 0, -1):
            try:
                return end, tomllib.loads("".join(lines[:end]))
            except ValueError:
                continue
        return 0, {}

    def has(count: int, path: Keys) -> bool:
        document = beginning(count)[1]
        try:
            for key in path:
                document = document[key]
        except (LookupError, TypeError):
            return False
        return True

    def line_of(path: Keys) -> int:
        first = bisect_left(range(len(lines)), True, key=lambda i: has(i + 1, path))
        return beginning(first)[0] + 1

    return line_of
