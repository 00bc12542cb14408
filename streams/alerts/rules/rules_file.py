"""The rules in force, from a TOML file over the defaults.

In: a file of tables ``[rules.NAME]``. Out: :class:`Rules`.
On failure: :class:`RulesError` with every mistake and its place; nothing of a file with mistakes is in force.
"""

import difflib
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streams.alerts.rules.options import BY_KEY, SELECTORS_BY_KEY, Mistakes, Option, kind
from streams.alerts.rules.rule import Kind, Override, Rule, Rules

__all__ = ["DEFAULTS", "Mistake", "Rule", "Rules", "RulesError", "defaults", "load", "parse"]

DEFAULTS = Path(__file__).with_name("defaults.toml")

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}")
_LARGEST_BYTES = 1 << 20
_XID_SEVERITIES = ("driver_severity", "application_severity", "recovered_severity", "unknown_severity")

Path_ = tuple[str | int, ...]
"""Where in a file something is: keys of tables, places in lists."""


class Mistake(NamedTuple):
    """What is wrong, and where."""

    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}: {self.text}" if self.path else f"{place}: {self.text}"


class RulesError(ValueError):
    """Every mistake of a file of rules."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class _Wrong(NamedTuple):
    """A mistake whose line has not been looked up yet."""

    path: Path_
    text: str


def load(path: Path | None) -> Rules:
    """The rules of a file over the defaults; None: the defaults alone. Raises RulesError."""
    if path is None:
        return _in_force(defaults())
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise RulesError([Mistake(str(path), 0, "", error.strerror or str(error))]) from None
    if len(data) > _LARGEST_BYTES:
        raise RulesError([Mistake(str(path), 0, "", f"is larger than {_LARGEST_BYTES >> 20} MiB")])
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RulesError([Mistake(str(path), line, "", "is not UTF-8")]) from None
    return parse(text, str(path))


def parse(text: str, file: str) -> Rules:
    """The rules of a file's text over the defaults. Raises RulesError."""
    return _in_force(_parsed(text, file, defaults()))


@cache
def defaults() -> dict[str, Rule]:
    """The defaults by name."""
    return _parsed(DEFAULTS.read_text(encoding="utf-8"), DEFAULTS.name, {})


def _in_force(rules: Mapping[str, Rule]) -> Rules:
    enabled = [r for r in rules.values() if r.enabled or any(o.changes.get("enabled") for o in r.overrides)]
    return Rules(tuple(enabled))


# -- the file


def _parsed(text: str, file: str, base: Mapping[str, Rule]) -> dict[str, Rule]:
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise RulesError([Mistake(file, 0, "", "is nested too deeply")]) from None
    except ValueError as error:
        place = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        raise RulesError([Mistake(file, line, "", f"is not TOML: {error}")]) from None
    wrong: list[_Wrong] = []
    rules = _rules(document, base, wrong)
    if wrong:
        line_of = _lines(text)
        raise RulesError(Mistake(file, line_of(at), _dotted(at), why) for at, why in wrong)
    return rules


def _lines(text: str) -> Callable[[Path_], int]:
    """Gives the line at which a path begins.

    The TOML parser does not say. But the lines up to the end of any value are TOML too, and longer beginnings have no
    less in them: the path is in the first value that ends where the beginning of the file has it.
    """
    lines = text.splitlines(keepends=True)

    @cache
    def beginning(count: int) -> tuple[int, Any]:
        """What the file is by so many lines; within a value of several lines, by those before it, and their number."""
        for end in range(count, 0, -1):
            try:
                return end, tomllib.loads("".join(lines[:end]))
            except ValueError:
                continue
        return 0, {}

    def has(count: int, path: Path_) -> bool:
        document = beginning(count)[1]
        try:
            for key in path:
                document = document[key]
        except (LookupError, TypeError):
            return False
        return True

    def line_of(path: Path_) -> int:
        first = bisect_left(range(len(lines)), True, key=lambda i: has(i + 1, path))
        return beginning(first)[0] + 1

    return line_of


def _dotted(path: Path_) -> str:
    """``rules.GPUHeldIdle.overrides[1].for``; lists count from 1."""
    found = ""
    for key in path:
        found += f"[{key + 1}]" if isinstance(key, int) else ("." if found else "") + key[:80]
    return found


# -- its tables


def _rules(document: Mapping[str, Any], base: Mapping[str, Rule], wrong: list[_Wrong]) -> dict[str, Rule]:
    rules = dict(base)
    strange = [key for key in document if key != "rules"]
    wrong += [_Wrong((key,), f"is not known: rules are tables [rules.NAME]{_close(key, ['rules'])}") for key in strange]
    tables = document.get("rules", {})
    if not isinstance(tables, dict):
        wrong.append(_Wrong(("rules",), "must be tables [rules.NAME]"))
        return rules
    found = {name: _rule(name, table, base, wrong) for name, table in tables.items()}
    return rules | {name: rule for name, rule in found.items() if rule is not None}


def _rule(name: str, table: Any, base: Mapping[str, Rule], wrong: list[_Wrong]) -> Rule | None:
    """A rule, from its table over what it is laid over."""
    at = ("rules", name)
    if not isinstance(table, dict):
        wrong.append(_Wrong(at, f"must be a table [rules.{name[:80]}]"))
        return None
    if not _NAME.fullmatch(name):
        wrong.append(_Wrong(at, "is not the name of a rule: use a-z, A-Z, 0-9 and _, and no digit first"))
    beneath = _beneath(name, table, base, wrong)
    of = None if beneath is None else beneath.kind
    changes = _settings(at, table, of, ("kind", "overrides"), wrong)
    overrides = table.get("overrides", [])
    if not isinstance(overrides, list):
        wrong.append(_Wrong((*at, "overrides"), "must be a list of tables: write [[rules.NAME.overrides]]"))
    elif "overrides" in table:
        each = enumerate(overrides)
        changes["overrides"] = tuple([_override((*at, "overrides", i), one, of, wrong) for i, one in each])
    return None if beneath is None else msgspec.structs.replace(beneath, **changes)


def _beneath(name: str, table: Mapping[str, Any], base: Mapping[str, Rule], wrong: list[_Wrong]) -> Rule | None:
    """What a rule is laid over: the default of its name, else the default of its kind."""
    known = base.get(name)
    if "kind" not in table:
        if known is None:
            hint = _close(name, base)
            wrong.append(_Wrong(("rules", name), f"is no rule that there is: a new one needs its kind{hint}"))
        return known
    try:
        of: Kind = kind(table["kind"])  # type: ignore[assignment]
    except ValueError as error:
        wrong.append(_Wrong(("rules", name, "kind"), str(error)))
        return None
    if known is not None and known.kind != of:
        wrong.append(_Wrong(("rules", name, "kind"), f"is {known.kind}: give a rule of another kind another name"))
        return None
    default = known or next((rule for rule in base.values() if rule.kind == of), None)
    return msgspec.structs.replace(default, name=name) if default is not None else Rule(name=name, kind=of)


def _override(at: Path_, table: Any, of: Kind | None, wrong: list[_Wrong]) -> Override:
    """For what the override is, and what it changes."""
    if not isinstance(table, dict):
        wrong.append(_Wrong(at, "must be a table: write [[rules.NAME.overrides]]"))
        return Override()
    selectors = _values(at, {k: v for k, v in table.items() if k in SELECTORS_BY_KEY}, SELECTORS_BY_KEY, of, wrong)
    changes = _settings(at, table, of, tuple(SELECTORS_BY_KEY), wrong)
    if not any(key in table for key in SELECTORS_BY_KEY):
        wrong.append(_Wrong(at, f"must say for what it is, by one of {', '.join(SELECTORS_BY_KEY)}"))
    if not any(key in table for key in BY_KEY):
        wrong.append(_Wrong(at, "changes nothing"))
    if "severity" in changes:
        changes = dict.fromkeys(_XID_SEVERITIES, changes["severity"]) | changes
    return Override(**selectors, changes=changes)


def _settings(
    at: Path_, table: Mapping[str, Any], of: Kind | None, others: tuple[str, ...], wrong: list[_Wrong]
) -> dict[str, Any]:
    """The settings of a rule or an override; ``others`` are the keys that are none."""
    return _values(at, {k: v for k, v in table.items() if k not in others}, BY_KEY, of, wrong)


def _values(
    at: Path_, table: Mapping[str, Any], options: Mapping[str, Option], of: Kind | None, wrong: list[_Wrong]
) -> dict[str, Any]:
    """The values of a table's keys, each as its option reads it."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        option = options.get(key)
        if option is None:
            usable = [o.key for o in options.values() if not o.kinds or of is None or of in o.kinds]
            wrong.append(_Wrong((*at, key), f"is not known{_close(key, usable)}"))
        elif option.kinds and of is not None and of not in option.kinds:
            wrong.append(_Wrong((*at, key), f"is not read by rules of kind {of}"))
        else:
            try:
                found[option.field] = option.parse(value)
            except Mistakes as error:
                wrong += [_Wrong((*at, key, *within), text) for within, text in error.found]
            except ValueError as error:
                wrong.append(_Wrong((*at, key), str(error)))
    return found


def _close(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
