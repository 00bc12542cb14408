"""Relabelling of series by Prometheus' rules, and external labels. Pure.

In: rules, and the labels of series, ``__name__`` among them. Out: the new labels, or none if a rule drops the series.
A set is relabelled when it is made, not for each value.
Source: Prometheus' configuration reference, and the behaviour of its package ``model/relabel``:
expressions are RE2 and match the whole text; ``$1``, ``${1}`` and ``${name}`` expand as in Go; an empty value removes a
label; ``labelmap`` sees the labels by name, then those that rules before it have set, and the last of equal names wins.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
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
"""Which names are valid: any text (utf8), or those of Prometheus 2 (legacy)."""

_LEGACY_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LEGACY_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ANY_BYTE = re.compile(r"(?<!\\)(?:\\\\)*\\C")
"""An escape that RE2 accepts in C++ and not in Go."""

_EXPRESSION_BYTES = 256 << 20
_REMEMBERED = 8192
_SHARED_ROWS = 256


Groups = tuple[str, ...]
"""The text that an expression matched, then each of its groups, empty if the group did not take part."""


class Expression:
    """An RE2 expression that is anchored at both ends. Raises ValueError if it is not valid."""

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
        if invalid := [name for name in self.names if not (name.isascii() and re.fullmatch(r"\w+", name))]:
            raise ValueError(f"the name of a group is a word, not {invalid[0]!r}")
        self.match = lru_cache(_REMEMBERED)(self._match)

    def _match(self, text: str) -> Groups | None:
        match = self._compiled.search(text)
        return None if match is None else (match[0], *match.groups(""))

    def replaced(self, text: str, template: "Template") -> str:
        """The text with each match replaced, as Go does it: an empty match right behind another one is skipped."""
        pieces, end = [], 0
        for match in self._compiled.finditer(text):
            pieces.append(text[end : match.start()])
            if match.end() > end or match.start() == 0:
                pieces.append(template.expanded((match[0], *match.groups(""))))
            end = match.end()
        return "".join((*pieces, text[end:]))


class Template:
    """A text in which ``$1``, ``${1}`` and ``${name}`` are groups of an expression."""

    def __init__(self, text: str, expression: Expression) -> None:
        self._pieces: list[str | int] = []
        before, *parts = text.split("$")
        self._pieces.append(before)
        parts.reverse()
        while parts:
            part = parts.pop()
            if not part and parts:  # $$ is a dollar
                self._pieces.append("$" + parts.pop())
                continue
            braces = int(part.startswith("{"))
            end = braces
            while end < len(part) and (part[end].isalpha() or part[end].isdecimal() or part[end] == "_"):
                end += 1
            if end == braces or (braces and not part.startswith("}", end)):  # it is no name of a group
                self._pieces.append("$" + part)
                continue
            name, rest = part[braces:end], part[end + braces :]
            if re.fullmatch("0|[1-9][0-9]{0,8}", name):
                number = int(name)
            else:
                number = expression.names.get(name, expression.groups + 1)
            self._pieces += [number, rest] if number <= expression.groups else [rest]

    def expanded(self, groups: Groups) -> str:
        """The text with the groups of a match filled in."""
        return "".join([piece if isinstance(piece, str) else groups[piece] for piece in self._pieces])


class Rule(NamedTuple):
    """A rule. ``scheme``: which label names are valid in it."""

    action: Action
    source_labels: tuple[str, ...]
    separator: str
    regex: Expression
    modulus: int
    target_label: str
    target: Template
    replacement: Template
    scheme: Scheme

    def touches(self, name: str) -> bool:
        """Whether it may read or change a label of this name. Labels that ``labelmap`` creates do not count."""
        match self.action:
            case "labelmap" | "labeldrop":
                return self.regex.match(name) is not None
            case "labelkeep":
                return self.regex.match(name) is None
            case "replace" if "$" in self.target_label:
                return True
            case _:
                return name in self.source_labels or name == self.target_label


class Rules(NamedTuple):
    """Rules in their order, the names that are valid in them, and whether one of them may use ``__meta_`` labels."""

    rules: tuple[Rule, ...] = ()
    scheme: Scheme = "utf8"
    with_meta: bool = False


# -- applying rules


class _Labels:
    """Labels while rules change them: the original ones by name, then those that rules have set, in that order."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.original = {name: value for name, value in sorted(labels.items()) if value}
        self.set: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self.set.get(name) or self.original.get(name, "")

    def __setitem__(self, name: str, value: str) -> None:
        self.original.pop(name, None)
        if value:
            self.set[name] = value
        else:
            self.set.pop(name, None)

    def items(self) -> list[tuple[str, str]]:
        return [*self.original.items(), *self.set.items()]


def relabelled(rules: Iterable[Rule], labels: Mapping[str, str]) -> dict[str, str] | None:
    """The labels of a series after the rules, sorted by name; None if a rule drops it."""
    current = _Labels(labels)
    for rule in rules:
        value = rule.separator.join([current[name] for name in rule.source_labels])
        match rule.action:
            case "keep" | "drop":
                if (rule.regex.match(value) is None) == (rule.action == "keep"):
                    return None
            case "keepequal" | "dropequal":
                if (current[rule.target_label] == value) == (rule.action == "dropequal"):
                    return None
            case "labelmap" | "labeldrop" | "labelkeep":
                _change_names(rule, current)
            case _:
                _set_target(rule, current, value)
    return dict(sorted(current.items()))


def _change_names(rule: Rule, current: _Labels) -> None:
    """Copy or remove labels by their names. The copies are not matched again."""
    for name, value in current.items():
        matches = rule.regex.match(name) is not None
        if rule.action == "labelmap" and matches:
            current[rule.regex.replaced(name, rule.replacement)] = value
        elif rule.action != "labelmap" and matches == (rule.action == "labeldrop"):
            current[name] = ""


def _set_target(rule: Rule, current: _Labels, value: str) -> None:
    """Set the target label; an empty value removes it."""
    match rule.action:
        case "replace":
            groups = rule.regex.match(value)
            if groups is not None and is_label_name(target := rule.target.expanded(groups), rule.scheme):
                current[target] = rule.replacement.expanded(groups)
        case "hashmod":
            digest = md5(value.encode(), usedforsecurity=False).digest()
            current[rule.target_label] = str(int.from_bytes(digest[8:]) % rule.modulus)
        case "lowercase":
            current[rule.target_label] = lowercase(value)
        case "uppercase":
            current[rule.target_label] = uppercase(value)


def lowercase(text: str) -> str:
    """A text in lower case, letter by letter, as Go does it."""
    return text.lower() if text.isascii() else "".join([letter.lower()[0] for letter in text])


def uppercase(text: str) -> str:
    """A text in upper case, letter by letter, as Go does it; a letter without a single capital stays."""
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


_ANY_NAME = "any_series_of_the_set"
_NO_META: Mapping[str, str] = {}
_NONE_WITHHELD: Mapping[Withheld, int] = {}


class Relabelled(NamedTuple):
    """A set after relabelling. ``kept``: the numbers of the original rows that are still in it, None for all.
    ``withheld`` counts the others, by reason."""

    series: SeriesSet
    kept: tuple[int, ...] | None
    withheld: Mapping[Withheld, int]


class Relabelling:
    """The relabelling of every series: the rules, then those external labels whose names the series does not have."""

    def __init__(self, rules: Sequence[Rules] = (), external: Labels = ()) -> None:
        self._rules, self._external = tuple(rules), external
        self.with_meta = any(group.with_meta for group in rules)
        all_rules = [rule for group in rules for rule in group.rules]
        self.more_labels = len({rule.target_label for rule in all_rules if rule.target_label}) + len(external)
        """At most about so many labels it adds."""
        self._is_touched = cache(lambda name: any(rule.touches(name) for rule in all_rules))
        """Whether any rule may read or change a label of this name."""
        self._unique_rows: dict[Rows, Rows] = {}

    def __bool__(self) -> bool:
        return bool(self._rules or self._external)

    @property
    def may_collide(self) -> bool:
        """Whether different series may become equal."""
        return bool(self._rules)

    def relabel(self, series: SeriesSet, meta: Mapping[str, str] = _NO_META) -> Relabelled:
        """Relabel a set. ``meta``: the labels that only rules see. Labels that all series share become the set's."""
        if not self:
            return Relabelled(series, None, _NONE_WITHHELD)
        if (together := self._relabel_set(series, meta)) is not None:
            return together
        labels_by_row: dict[int, dict[str, str]] = {}
        withheld: Counter[Withheld] = Counter()
        for number, row in enumerate(series.rows):
            new = self._new_labels({METRIC_NAME: row.name, **meta, **dict(series.labels), **dict(row.labels)})
            if isinstance(new, str):
                withheld[new] += 1
            else:
                labels_by_row[number] = new
        pairs_by_row = [set(labels.items()) for labels in labels_by_row.values()]
        shared = set.intersection(*pairs_by_row) if pairs_by_row else set()
        shared = {pair for pair in shared if pair[0] != METRIC_NAME}
        new_rows = []
        for number, labels in labels_by_row.items():
            name = labels.pop(METRIC_NAME)
            row_labels = tuple([pair for pair in labels.items() if pair not in shared])
            new_rows.append(series.rows[number]._replace(name=name, labels=row_labels))
        if len(self._unique_rows) > _SHARED_ROWS:
            self._unique_rows.clear()
        rows = self._unique_rows.setdefault(tuple(new_rows), tuple(new_rows))
        kept = tuple(labels_by_row) if withheld else None
        return Relabelled(SeriesSet(tuple(sorted(shared)), rows, series.subject), kept, withheld)

    def _relabel_set(self, series: SeriesSet, meta: Mapping[str, str]) -> Relabelled | None:
        """Relabel all series of a set together; None if a rule may read or change a label in which they differ."""
        row_names = {name for row in series.rows for name, _ in row.labels}
        if any(self._is_touched(name) for name in (METRIC_NAME, *row_names)):
            return None
        new = self._new_labels({METRIC_NAME: _ANY_NAME, **meta, **dict(series.labels)})
        if isinstance(new, str):
            return Relabelled(SeriesSet((), (), series.subject), (), {new: len(series.rows)})
        if new.pop(METRIC_NAME) != _ANY_NAME or not row_names.isdisjoint(new):
            return None
        return Relabelled(SeriesSet(tuple(new.items()), series.rows, series.subject), None, _NONE_WITHHELD)

    def group(self, group: SampleGroup) -> SampleGroup | None:
        """Relabel the samples of a set; None if all of them are dropped."""
        relabelled = self.relabel(group.series)
        if not relabelled.series.rows:
            return None
        values = group.values if relabelled.kept is None else [group.values[row] for row in relabelled.kept]
        return SampleGroup(relabelled.series, group.ts_ms, values)

    def _new_labels(self, labels: Mapping[str, str]) -> dict[str, str] | Withheld:
        """The new labels of a series, sorted by name, or the reason why it is not written."""
        new = dict(labels)
        for group in self._rules:
            after = relabelled(group.rules, new)
            if not after:
                return "rule"
            names_are_valid = all(is_label_name(name, group.scheme) for name in after)
            if not names_are_valid or not is_metric_name(after.get(METRIC_NAME, ""), group.scheme):
                return "name"
            new = after
        for name, value in self._external:
            new.setdefault(name, value)
        return {name: value for name, value in sorted(new.items()) if not name.startswith(META)}


NO_RELABELLING = Relabelling()
