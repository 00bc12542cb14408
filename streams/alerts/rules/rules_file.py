"""Reads the rules in force: a TOML file over the defaults.

In: a file of tables ``[rules.NAME]``. Out: :class:`Rules`.
On failure: :class:`RulesError` with all errors and their lines. A file with errors is not used at all.
"""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from delivery import files
from delivery.files import TooLarge
from delivery.policies import Bounds
from streams.alerts.rules.options import (
    BOUND_OVERRIDES,
    BOUNDS,
    BY_KEY,
    NAME,
    OF_PODS,
    SELECTORS_BY_KEY,
    STATES,
    Keys,
    Option,
    ValueErrors,
    did_you_mean,
    kind,
    prefix_errors,
)
from streams.alerts.rules.rule import Kind, Override, Rule, Rules

DEFAULTS = Path(__file__).with_name("defaults.toml")

_WHY_NOT_READ = {STATES: ": an XID error is an event, which fires at once", OF_PODS: ", which are about no pod"}
_XID_SEVERITIES = ("driver_severity", "application_severity", "recovered_severity", "unknown_severity")


class FileError(NamedTuple):
    file: str
    line: int
    path: str
    text: str

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}" if self.line else self.file
        return f"{location}: {self.path}: {self.text}" if self.path else f"{location}: {self.text}"


class RulesError(ValueError):
    def __init__(self, errors: Iterable[FileError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


# -- the file


def load(path: Path | None) -> Rules:
    """The rules of a file over the defaults; without a file the defaults. Raises RulesError."""
    return _in_force(defaults(), Bounds()) if path is None else parse(_text(path), str(path))


def every(path: Path) -> dict[str, Rule]:
    """All rules of a file and the defaults by name, also those that are off. Raises RulesError."""
    return _parse(_text(path), str(path))[0]


def _text(path: Path) -> str:
    """The text of a file. Raises RulesError."""
    try:
        data = files.read(path)
    except OSError as error:
        raise RulesError([FileError(str(path), 0, "", error.strerror or str(error))]) from None
    except TooLarge as error:
        raise RulesError([FileError(str(path), 0, "", f"is {error}")]) from None
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RulesError([FileError(str(path), line, "", "is not UTF-8")]) from None


def parse(text: str, file: str) -> Rules:
    """The rules of a file's text over the defaults. Raises RulesError."""
    return _in_force(*_parse(text, file))


def _parse(text: str, file: str) -> tuple[dict[str, Rule], Bounds]:
    document, errors = _document(text, file), list[tuple[Keys, str]]()
    bounds = _bounds(document.pop("policies", {}), errors)
    rules = _parsed(document, defaults(), errors)
    if errors:
        line_of = _lines(text)
        raise RulesError(FileError(file, line_of(keys), dotted(keys), message) for keys, message in errors)
    return rules, bounds


@cache
def defaults() -> dict[str, Rule]:
    return _parsed(_document(DEFAULTS.read_text(encoding="utf-8"), DEFAULTS.name), {}, [])


def _in_force(rules: Mapping[str, Rule], bounds: Bounds) -> Rules:
    enabled = [r for r in rules.values() if r.enabled or any(o.changes.get("enabled") for o in r.overrides)]
    return Rules(tuple(enabled), bounds=bounds)


def _document(text: str, file: str) -> dict[str, Any]:
    """The tables of a file's text. Raises RulesError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RulesError([FileError(file, 0, "", "is nested too deeply")]) from None
    except ValueError as error:
        match = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(match[1]) if match else text.count("\n") + 1
        raise RulesError([FileError(file, line, "", f"is not TOML: {error}")]) from None


def _parsed(document: Mapping[str, Any], base: Mapping[str, Rule], errors: ValueErrors) -> dict[str, Rule]:
    """The rules of a file's tables over base rules. Errors are added to ``errors``."""
    message = "is not known: rules are tables [rules.NAME]"
    errors += [((key,), f"{message}{did_you_mean(key, ['rules', 'policies'])}") for key in document if key != "rules"]
    rules, tables = dict(base), document.get("rules", {})
    if isinstance(tables, dict):
        rule_by_name = {name: rule(name, table, base, errors) for name, table in tables.items()}
        rules |= {name: rule for name, rule in rule_by_name.items() if rule is not None}
    else:
        errors.append((("rules",), "must be tables [rules.NAME]"))
    return rules


def _bounds(table: Any, errors: ValueErrors) -> Bounds:
    """The bounds for how long policies of pods and namespaces may silence alerts."""
    path: Keys = ("policies",)
    overrides = table.get("overrides", []) if isinstance(table, dict) else None
    if not isinstance(overrides, list):
        errors.append((path, 'must be a table such as [policies] with longest = "24h", and [[policies.overrides]]'))
        return Bounds()
    default_bounds = _values(
        path,
        {key: value for key, value in table.items() if key != "overrides"},
        BOUNDS,
        None,
        errors,
        also=("overrides",),
    )
    overrides_read: list[tuple[tuple[str, ...], int]] = []
    for number, override in enumerate(overrides):
        override_path: Keys = (*path, "overrides", number)
        values = _values(override_path, override, BOUND_OVERRIDES, None, errors) if isinstance(override, dict) else {}
        if {"namespace", "longest_ms"} <= values.keys():
            overrides_read.append((values["namespace"], values["longest_ms"]))
        elif not isinstance(override, dict) or not override.keys() >= {"namespace", "longest"}:
            errors.append((override_path, "must have namespace and longest"))
    return Bounds(**default_bounds, overrides=tuple(overrides_read))


def rule(name: str, table: Any, base: Mapping[str, Rule], errors: ValueErrors) -> Rule | None:
    """A rule: its table over the base rule of its name, or else over the first base rule of its kind."""
    path, existing = ("rules", name), base.get(name)
    if not isinstance(table, dict):
        errors.append((path, f"must be a table [rules.{name[:80]}]"))
        return None
    if not NAME.fullmatch(name):
        errors.append((path, "is not the name of a rule: use a-z, A-Z, 0-9 and _, and no digit first"))
    inherited = existing
    if "kind" in table:
        try:
            new_kind = kind(table["kind"])
            if existing is not None and existing.kind != new_kind:
                raise ValueError(f"is {existing.kind}: give a rule of another kind another name")
            default = existing or next((rule for rule in base.values() if rule.kind == new_kind), None)
            enabled = existing is None or existing.enabled  # a new rule is on, even if the default of its kind is off
            inherited = msgspec.structs.replace(default or Rule(name=name, kind=new_kind), name=name, enabled=enabled)
        except ValueError as error:
            errors.append(((*path, "kind"), str(error)))
            inherited = None
    elif existing is None:
        errors.append((path, f"is no rule that there is: a new one needs its kind{did_you_mean(name, base)}"))
    rule_kind = None if inherited is None else inherited.kind
    settings = {key: value for key, value in table.items() if key not in ("kind", "overrides")}
    changes = _values(path, settings, BY_KEY, rule_kind, errors, also=("kind", "overrides"))
    overrides = table.get("overrides", [])
    if not isinstance(overrides, list):
        errors.append(((*path, "overrides"), "must be a list of tables: write [[rules.NAME.overrides]]"))
    elif "overrides" in table:
        changes["overrides"] = tuple(
            [
                _override((*path, "overrides", index), override, rule_kind, errors)
                for index, override in enumerate(overrides)
            ]
        )
    return None if inherited is None else msgspec.structs.replace(inherited, **changes)


def _override(path: Keys, table: Any, rule_kind: Kind | None, errors: ValueErrors) -> Override:
    if not isinstance(table, dict):
        errors.append((path, "must be a table: write [[rules.NAME.overrides]]"))
        return Override()
    selecting = {key: value for key, value in table.items() if key in SELECTORS_BY_KEY}
    selectors = _values(path, selecting, SELECTORS_BY_KEY, rule_kind, errors)
    settings = {key: value for key, value in table.items() if key not in SELECTORS_BY_KEY}
    changes = _values(path, settings, BY_KEY, rule_kind, errors, also=SELECTORS_BY_KEY)
    misspelt = any(key not in BY_KEY for key in settings)
    if not misspelt and not any(key in table for key in SELECTORS_BY_KEY):
        errors.append((path, f"must say for what it is, by one of {', '.join(SELECTORS_BY_KEY)}"))
    if not misspelt and not any(key in table for key in BY_KEY):
        errors.append((path, "changes nothing"))
    if "severity" in changes:
        changes = dict.fromkeys(_XID_SEVERITIES, changes["severity"]) | {"critical_ms": 0} | changes
    return Override(**selectors, changes=changes)


def _values(
    path: Keys,
    table: Mapping[str, Any],
    options: Mapping[str, Option],
    rule_kind: Kind | None,
    errors: ValueErrors,
    *,
    also: Iterable[str] = (),
) -> dict[str, Any]:
    """The values of a table's keys, parsed by their options. ``also`` has more keys to suggest for an unknown one."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        option = options.get(key)
        if option is None:
            usable = [o.key for o in options.values() if not o.kinds or rule_kind is None or rule_kind in o.kinds]
            errors.append(((*path, key), f"is not known{did_you_mean(key, [*usable, *also])}"))
        elif option.kinds and rule_kind is not None and rule_kind not in option.kinds:
            message = _WHY_NOT_READ.get(option.kinds, "")
            errors.append(((*path, key), f"is not read by rules of kind {rule_kind}{message}"))
        else:
            try:
                values[option.field] = option.parse(value)
            except ValueError as error:
                errors += prefix_errors((*path, key), error)
    return values


# -- paths and lines


def dotted(keys: Keys) -> str:
    """``rules.GPUHeldIdle.overrides[1].for``; lists count from 1."""
    return "".join(f"[{key + 1}]" if isinstance(key, int) else f".{key[:80]}" for key in keys).removeprefix(".")


def _lines(text: str) -> Callable[[Keys], int]:
    """A function that finds the line at which the value of a path begins.

    The TOML parser does not report it. But the first lines of a file, up to the end of any value, are TOML too, and
    more lines never hold fewer values. So the value is the last one of the shortest such prefix that holds it.
    """
    lines = text.splitlines(keepends=True)

    @cache
    def parse_prefix(count: int) -> tuple[int, Any]:
        """The number of the first lines that are TOML, and their values. Lines of an unfinished value are left out."""
        for end in range(count, 0, -1):
            try:
                return end, tomllib.loads("".join(lines[:end]))
            except ValueError:
                continue
        return 0, {}

    def contains(count: int, path: Keys) -> bool:
        document = parse_prefix(count)[1]
        try:
            for key in path:
                document = document[key]
        except (LookupError, TypeError):
            return False
        return True

    def line_of(path: Keys) -> int:
        first = bisect_left(range(len(lines)), True, key=lambda i: contains(i + 1, path))
        return parse_prefix(first)[0] + 1

    return line_of
