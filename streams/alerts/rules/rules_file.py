"""The rules in force, from a TOML file over the defaults.

In: a file of tables ``[rules.NAME]``. Out: :class:`Rules`.
On failure: :class:`RulesError` with every mistake and its place; nothing of a file with mistakes is in force.
"""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from delivery.policies import Bounds
from streams.alerts.rules.options import (
    BOUND_OVERRIDES,
    BOUNDS,
    BY_KEY,
    NAME,
    SELECTORS_BY_KEY,
    STATES,
    Keys,
    Option,
    Wrong,
    did_you_mean,
    kind,
    within,
)
from streams.alerts.rules.rule import Kind, Override, Rule, Rules

DEFAULTS = Path(__file__).with_name("defaults.toml")

_LARGEST_BYTES = 1 << 20
_XID_SEVERITIES = ("driver_severity", "application_severity", "recovered_severity", "unknown_severity")


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
    wrong += [((key,), f"{why}{did_you_mean(key, ['rules', 'policies'])}") for key in document if key != "rules"]
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
        BOUNDS,
        None,
        wrong,
        also=("overrides",),
    )
    found: list[tuple[tuple[str, ...], int]] = []
    for number, one in enumerate(overrides):
        place: Keys = (*at, "overrides", number)
        given = _values(place, one, BOUND_OVERRIDES, None, wrong) if isinstance(one, dict) else {}
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
    if not NAME.fullmatch(name):
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
        wrong.append((at, f"is no rule that there is: a new one needs its kind{did_you_mean(name, base)}"))
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
            wrong.append(((*at, key), f"is not known{did_you_mean(key, [*usable, *also])}"))
        elif option.kinds and of is not None and of not in option.kinds:
            why = ": an XID error is an event, which fires at once" if option.kinds == STATES else ""
            wrong.append(((*at, key), f"is not read by rules of kind {of}{why}"))
        else:
            try:
                found[option.field] = option.parse(value)
            except ValueError as error:
                wrong += within((*at, key), error)
    return found


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
