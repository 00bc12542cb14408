"""Other labels for series: what Prometheus's relabelling makes of them, and external labels. Pure.

In: rules, and the labels of series, ``__name__`` among them. Out: other labels, or none if a rule drops the series.
This happens when a set of series is made, never for a value.
Source: Prometheus's configuration reference, and what its package ``model/relabel`` makes of any rules and labels:
expressions are RE2 and match the whole text; ``$1``, ``${1}`` and ``${name}`` expand as in Go; an empty value removes a
label; ``labelmap`` sees the labels by name, then those that rules before it have set, and the last of equal names wins.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import md5
from typing import Literal, NamedTuple

import re2

from sinks.series.labels import META
from sinks.series.model import Rows, SampleGroup, SeriesSet
from topics.metric import Labels

METRIC_NAME = "__name__"

Withheld = Literal["rule", "name", "collision"]
WITHHELD = (
    "rule: a rule of --relabel drops them. name: rules have left a name that is not valid, or none. collision: a series"
    " that is written already has the same labels."
)
"""Why a series is not written."""

Action = Literal[
    "replace",
    "keep",
    "drop",
    "hashmod",
    "labelmap",
    "labeldrop",
    "labelkeep",
    "lowercase",
    "uppercase",
    "keepequal",
    "dropequal",
]
Scheme = Literal["utf8", "legacy"]
"""Which names are valid: any text, or those of Prometheus 2."""

_LEGACY_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LEGACY_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ANY_BYTE = re.compile(r"(?<!\\)(?:\\\\)*\\C")
"""What RE2 takes in C++ and not in Go."""

_EXPRESSION_BYTES = 256 << 20
_REMEMBERED = 8192


Groups = tuple[str, ...]
"""What an expression matched, and each of its groups; empty if a group took no part."""


class Expression:
    """An expression of RE2 that is bound to the whole text. Raises ValueError if it is none."""

    def __init__(self, text: str) -> None:
        options = re2.Options()
        options.max_mem, options.log_errors = _EXPRESSION_BYTES, False
        if _ANY_BYTE.search(text):
            raise ValueError("\\C is none of it")
        try:
            self._compiled = re2.compile(f"^(?s:{text})$", options)
        except re2.error as error:
            raise ValueError(error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)) from error
        self.groups, self.names = self._compiled.groups, dict(self._compiled.groupindex)
        if unlike := [name for name in self.names if not (name.isascii() and re.fullmatch(r"\w+", name))]:
            raise ValueError(f"the name of a group is a word, not {unlike[0]!r}")
        self.match = lru_cache(_REMEMBERED)(self._match)

    def _match(self, text: str) -> Groups | None:
        found = self._compiled.search(text)
        return None if found is None else (found[0], *found.groups(""))

    def replaced(self, text: str, template: "Template") -> str:
        """The text with each match replaced, as Go does: none that is empty and follows another one."""
        pieces, end = [], 0
        for found in self._compiled.finditer(text):
            pieces.append(text[end : found.start()])
            if found.end() > end or found.start() == 0:
                pieces.append(template.expanded((found[0], *found.groups(""))))
            end = found.end()
        return "".join((*pieces, text[end:]))


class Template:
    """A text in which ``$1``, ``${1}`` and ``${name}`` are groups of an expression."""

    def __init__(self, text: str, of: Expression) -> None:
        self._pieces: list[str | int] = []
        before, *parts = text.split("$")
        self._pieces.append(before)
        parts.reverse()
        while parts:
            part = parts.pop()
            if not part and parts:  # $$ is a dollar
                self._pieces.append("$" + parts.pop())
                continue
            name, rest = _group_name(part)
            if not name:
                self._pieces.append("$" + part)
                continue
            number = int(name) if re.fullmatch("0|[1-9][0-9]{0,8}", name) else of.names.get(name, of.groups + 1)
            self._pieces += [number, rest] if number <= of.groups else [rest]

    def expanded(self, groups: Groups) -> str:
        """The text for a match."""
        return "".join([piece if isinstance(piece, str) else groups[piece] for piece in self._pieces])


def _group_name(text: str) -> tuple[str, str]:
    """The name of a group at the start of a text, and what follows it; no name if there is none."""
    start = 1 if text.startswith("{") else 0
    end = start
    while end < len(text) and (text[end].isalpha() or text[end].isdecimal() or text[end] == "_"):
        end += 1
    if start and not text.startswith("}", end):
        return "", text
    return text[start:end], text[end + start :]


class Rule(NamedTuple):
    """A rule; ``scheme`` says which names it may make."""

    action: Action
    source_labels: tuple[str, ...]
    separator: str
    regex: Expression
    modulus: int
    target_label: str
    target: Template
    replacement: Template
    scheme: Scheme


class Rules(NamedTuple):
    """Rules in their order, which names they may make, and whether one of them may speak of ``__meta_`` labels."""

    rules: tuple[Rule, ...] = ()
    scheme: Scheme = "utf8"
    with_meta: bool = False


# -- what rules make of labels


class _Labels:
    """Labels while rules change them: those that were given, by name, and those that were set, in that order."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.given = {name: value for name, value in sorted(labels.items()) if value}
        self.set: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self.set.get(name) or self.given.get(name, "")

    def __setitem__(self, name: str, value: str) -> None:
        self.given.pop(name, None)
        if value:
            self.set[name] = value
        else:
            self.set.pop(name, None)

    def items(self) -> list[tuple[str, str]]:
        return [*self.given.items(), *self.set.items()]


def relabelled(rules: Iterable[Rule], labels: Mapping[str, str]) -> dict[str, str] | None:
    """What the rules make of a series' labels, sorted by name; None if one drops it."""
    now = _Labels(labels)
    for rule in rules:
        value = rule.separator.join([now[name] for name in rule.source_labels])
        match rule.action:
            case "keep" | "drop":
                if (rule.regex.match(value) is None) == (rule.action == "keep"):
                    return None
            case "keepequal" | "dropequal":
                if (now[rule.target_label] == value) == (rule.action == "dropequal"):
                    return None
            case "labelmap" | "labeldrop" | "labelkeep":
                _change_names(rule, now)
            case _:
                _set_target(rule, now, value)
    return dict(sorted(now.items()))


def _change_names(rule: Rule, now: _Labels) -> None:
    """Copy or remove labels by their names. What is copied to here is not looked at again."""
    for name, value in now.items():
        matches = rule.regex.match(name) is not None
        if rule.action == "labelmap" and matches:
            now[rule.regex.replaced(name, rule.replacement)] = value
        elif rule.action != "labelmap" and matches == (rule.action == "labeldrop"):
            now[name] = ""


def _set_target(rule: Rule, now: _Labels, value: str) -> None:
    """Give a label another value; an empty one removes it."""
    match rule.action:
        case "replace":
            groups = rule.regex.match(value)
            if groups is not None and is_label_name(target := rule.target.expanded(groups), rule.scheme):
                now[target] = rule.replacement.expanded(groups)
        case "hashmod":
            digest = md5(value.encode(), usedforsecurity=False).digest()
            now[rule.target_label] = str(int.from_bytes(digest[8:]) % rule.modulus)
        case "lowercase":
            now[rule.target_label] = lowercase(value)
        case "uppercase":
            now[rule.target_label] = uppercase(value)


def lowercase(text: str) -> str:
    """A text in lower case, each letter by itself."""
    return text.lower() if text.isascii() else "".join([letter.lower()[0] for letter in text])


def uppercase(text: str) -> str:
    """A text in upper case, each letter by itself; one that has no single capital stays."""
    if text.isascii():
        return text.upper()
    forms = [(letter.upper(), letter.title(), letter) for letter in text]
    return "".join([next(form for form in three if len(form) == 1) for three in forms])


def is_label_name(name: str, scheme: Scheme) -> bool:
    """Whether a label may have this name."""
    return bool(name) if scheme == "utf8" else _LEGACY_LABEL.fullmatch(name) is not None


def is_metric_name(name: str, scheme: Scheme) -> bool:
    """Whether a metric may have this name."""
    return bool(name) if scheme == "utf8" else _LEGACY_METRIC.fullmatch(name) is not None


# -- sets of series


def _touches(rule: Rule, name: str) -> bool:
    """Whether a rule may look at a label of this name, or change it; not whether ``labelmap`` makes one."""
    match rule.action:
        case "labelmap" | "labeldrop":
            return rule.regex.match(name) is not None
        case "labelkeep":
            return rule.regex.match(name) is None
        case "replace" if "$" in rule.target_label:
            return True
        case _:
            return name in rule.source_labels or name == rule.target_label


_ANY_NAME = "any_series_of_the_set"
_NO_META: Mapping[str, str] = {}
_NONE_WITHHELD: Mapping[Withheld, int] = {}


class Relabelled(NamedTuple):
    """A set of series with other labels. ``kept`` are the numbers of its rows among those that there were, None for all
    of them; ``withheld`` counts the others."""

    series: SeriesSet
    kept: tuple[int, ...] | None
    withheld: Mapping[Withheld, int]


class Relabelling:
    """What is done to the labels of every series: the rules, then the external labels whose names are free."""

    def __init__(self, rules: Sequence[Rules] = (), external: Labels = ()) -> None:
        self._rules, self._external = tuple(rules), external
        self.with_meta = any(some.with_meta for some in rules)
        targets = {rule.target_label for some in rules for rule in some.rules if rule.target_label}
        self.more_labels = len(targets) + len(external)
        """About so many labels it adds."""
        self._same: dict[Rows, Rows] = {}
        self._touched: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._rules or self._external)

    @property
    def may_collide(self) -> bool:
        """Whether different series may become the same."""
        return bool(self._rules)

    def relabel(self, series: SeriesSet, meta: Mapping[str, str] = _NO_META) -> Relabelled:
        """A set with its new labels; ``meta`` are those that only rules see. What all series share are the set's."""
        if not self:
            return Relabelled(series, None, _NONE_WITHHELD)
        return self._at_once(series, meta) or self._one_by_one(series, meta)

    def _at_once(self, series: SeriesSet, meta: Mapping[str, str]) -> Relabelled | None:
        """All series of a set together, if no rule looks at what tells them apart, or changes it."""
        apart = {name for row in series.rows for name, _ in row.labels}
        if any(self._touches(name) for name in (METRIC_NAME, *apart)):
            return None
        made = self._one({METRIC_NAME: _ANY_NAME, **meta, **dict(series.labels)})
        if isinstance(made, str):
            return Relabelled(SeriesSet((), (), series.subject), (), {made: len(series.rows)})
        if made.pop(METRIC_NAME) != _ANY_NAME or not apart.isdisjoint(made):
            return None
        return Relabelled(SeriesSet(tuple(made.items()), series.rows, series.subject), None, _NONE_WITHHELD)

    def _touches(self, name: str) -> bool:
        """Whether a rule may look at a label of this name, or change it."""
        if name not in self._touched:
            rules = [rule for some in self._rules for rule in some.rules]
            self._touched[name] = any(_touches(rule, name) for rule in rules)
        return self._touched[name]

    def _one_by_one(self, series: SeriesSet, meta: Mapping[str, str]) -> Relabelled:
        found: dict[int, dict[str, str]] = {}
        withheld: Counter[Withheld] = Counter()
        for number, row in enumerate(series.rows):
            made = self._one({METRIC_NAME: row.name, **meta, **dict(series.labels), **dict(row.labels)})
            if isinstance(made, str):
                withheld[made] += 1
            else:
                found[number] = made
        shared = set.intersection(*[set(one.items()) for one in found.values()]) if found else set()
        shared = {pair for pair in shared if pair[0] != METRIC_NAME}
        made_rows = []
        for number, one in found.items():
            name = one.pop(METRIC_NAME)
            own = tuple([pair for pair in one.items() if pair not in shared])
            made_rows.append(series.rows[number]._replace(name=name, labels=own))
        if len(self._same) > _REMEMBERED:
            self._same.clear()
        rows = self._same.setdefault(tuple(made_rows), tuple(made_rows))
        kept = tuple(found) if withheld else None
        return Relabelled(SeriesSet(tuple(sorted(shared)), rows, series.subject), kept, withheld)

    def group(self, group: SampleGroup) -> SampleGroup | None:
        """Samples of a set under its new labels; None if none is to be written."""
        made = self.relabel(group.series)
        if not made.series.rows:
            return None
        values = group.values if made.kept is None else [group.values[row] for row in made.kept]
        return SampleGroup(made.series, group.ts_ms, values)

    def _one(self, labels: Mapping[str, str]) -> dict[str, str] | Withheld:
        """The new labels of a series, sorted by name, or why it is not written."""
        made = dict(labels)
        for some in self._rules:
            left = relabelled(some.rules, made)
            if not left:
                return "rule"
            names_are_valid = all(is_label_name(name, some.scheme) for name in left)
            if not names_are_valid or not is_metric_name(left.get(METRIC_NAME, ""), some.scheme):
                return "name"
            made = left
        for name, value in self._external:
            made.setdefault(name, value)
        return {name: value for name, value in sorted(made.items()) if not name.startswith(META)}
