"""A file of counters as dcgm-exporter takes it -> its rows, or every mistake with its line. Pure.

In: the text of a CSV file (name, type, help), or of the YAML file that dcgm-exporter has since 4.8.3 (``version`` 1 and
2), of which only ``metrics`` is looked at: how often what is read is for a producer to say. Which of both it is, the
text tells, not the file's name: a key of a ConfigMap has any name.
Out: the rows in their order, or the path that a YAML file gives for its CSV file.
On failure: :class:`CountersError` with every mistake; nothing of such a file is in force.
Source: dcgm-exporter 4.5.3-4.8.2 and 4.6.0-4.8.3, internal/pkg/counters/counter_config.go and
internal/pkg/appconfig/yaml_config.go; Go's encoding/csv. So a line is a comment only if ``#`` is its very first sign, a
line of spaces is a row of one column, spaces (no tabs) around a column are cut, a column is quoted only if the quote is
its very first sign, and a quoted one may hold commas, doubled quotes and line ends.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import yaml

TYPES = ("gauge", "counter", "untyped", "label")
"""The types of rows. Up to 4.8.2 dcgm-exporter takes the following as well, and has no ``untyped``."""

OLDER_TYPES = ("histogram", "summary")

_COLUMNS = 3
_YAML = re.compile(r"(---|%YAML|[A-Za-z]+[ \t]*:([ \t]|$)|\{)")
_YAML_KEYS = ("version", "metrics", "collection", "collections", "sources")
_FIELD_KEYS = ("name", "prometheusType", "help")


class Counter(NamedTuple):
    """A row: what it picks, and the type and the help that it is to have."""

    line: int
    name: str
    type: str
    help: str


class Mistake(NamedTuple):
    """What is wrong in a line; 0 is the whole file."""

    line: int
    text: str


class CountersError(ValueError):
    """A file that nothing can be taken from: all that is wrong with it, and the rows of it that can be read."""

    def __init__(self, mistakes: Iterable[Mistake], rows: Iterable[Counter] = ()) -> None:
        self.mistakes = tuple(sorted(mistakes))
        self.rows = tuple([one for one in rows if one.name and one.type in TYPES])
        super().__init__("; ".join(f"line {line}: {text}" if line else text for line, text in self.mistakes))


def parse(content: bytes) -> tuple[Counter, ...] | str:
    """The rows of a file, or the path of the CSV file that holds them. Raises CountersError."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CountersError([Mistake(line, "is not UTF-8: save the file as UTF-8")]) from error
    if text.startswith("\ufeff"):
        raise CountersError([Mistake(1, "begins with a byte order mark: save the file without it")])
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    return parse_yaml(text) if _YAML.match(first) else parse_csv(text)


# -- CSV


def parse_csv(text: str) -> tuple[Counter, ...]:
    """The rows of a CSV file. Raises CountersError."""
    mistakes: list[Mistake] = []
    counters: list[Counter] = []
    for line, columns in _records(text, mistakes):
        if len(columns) != _COLUMNS:
            surplus = ": a help with a comma needs quotes around it" if len(columns) > _COLUMNS else ""
            found = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
            mistakes.append(Mistake(line, f"has {found}, not name, type and help{surplus}"))
            continue
        name, kind, about = columns
        mistakes += [Mistake(line, text) for text in _mistakes_of(name, kind)]
        counters.append(Counter(line, name, kind, about))
    if not counters and not mistakes:
        mistakes.append(Mistake(0, "has no row: nothing would be served"))
    if mistakes:
        raise CountersError(mistakes, counters)
    return tuple(counters)


def _mistakes_of(name: str, kind: str) -> Iterator[str]:
    """What is wrong with a row of three columns."""
    if not name:
        yield "has no name"
    if kind not in TYPES + OLDER_TYPES:
        tab = ": only spaces around it are cut, tabs are not" if kind.strip() in TYPES else ""
        yield f"has the type {kind!r}, which is none of {', '.join(TYPES)}{tab}"


def _records(text: str, mistakes: list[Mistake]) -> Iterator[tuple[int, list[str]]]:
    """The columns of each row with the number of its first line; what can't be read is added to ``mistakes``."""
    lines = text.replace("\r\n", "\n").removesuffix("\r").split("\n")
    number = 0
    while number < len(lines):
        start = number
        number += 1
        if not lines[start] or lines[start].startswith("#"):
            continue
        try:
            columns, number = _columns(lines, start)
        except ValueError as error:
            mistakes.append(Mistake(start + 1, str(error)))
            continue
        yield start + 1, [column.strip(" ") for column in columns]


def _columns(lines: Sequence[str], start: int) -> tuple[list[str], int]:
    """The columns of the row that begins in a line, and the line after it. Raises ValueError with a sentence."""
    columns: list[str] = []
    number, rest = start, lines[start]
    while True:
        if not rest.startswith('"'):
            column, comma, rest = rest.partition(",")
            if '"' in column:
                raise ValueError(
                    f"has a quote within column {len(columns) + 1}: a quoted column begins with its quote, without a"
                    " space before it, and doubles each quote within"
                )
        else:
            column, rest = "", rest[1:]
            while True:
                before, quote, rest = rest.partition('"')
                column += before
                if quote and not rest.startswith('"'):
                    break
                if quote:
                    column, rest = column + '"', rest[1:]
                elif number + 1 < len(lines):
                    number, rest, column = number + 1, lines[number + 1], column + "\n"
                else:
                    raise ValueError(f"has a quote in column {len(columns) + 1} that is never closed")
            if rest and not rest.startswith(","):
                raise ValueError(
                    f"has more text after the quote that ends column {len(columns) + 1}: a quote within it is doubled"
                )
            comma, rest = rest[:1], rest[1:]
        columns.append(column)
        if not comma:
            return columns, number + 1


# -- YAML


def parse_yaml(text: str) -> tuple[Counter, ...] | str:
    """The rows of ``metrics.fields``, or the path in ``metrics.file``. Raises CountersError."""
    try:
        documents = list(yaml.compose_all(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise CountersError([Mistake(line, f"is no YAML: {error.problem}")]) from error
    except yaml.YAMLError as error:
        raise CountersError([Mistake(0, f"is no YAML: {error}")]) from error
    if len(documents) != 1:
        raise CountersError([Mistake(0, f"has {len(documents)} YAML documents, not one")])
    mistakes: list[Mistake] = []
    top = _mapping(documents[0], "the file", _YAML_KEYS, mistakes)
    if "version" not in top or _text(top["version"]) not in ("1", "2"):
        line = top["version"].start_mark.line + 1 if "version" in top else 0
        mistakes.append(Mistake(line, "needs `version: 1` or `version: 2`"))
    if "metrics" not in top:
        mistakes.append(
            Mistake(0, "has no `metrics`, so nothing is picked: --names alone serves all that there is of a profile")
        )
        raise CountersError(mistakes)
    at = top["metrics"].start_mark.line + 1
    metrics = _mapping(top["metrics"], "`metrics`", ("file", "fields", "enableExporterMetrics"), mistakes)
    file = _text(metrics["file"]).strip() if "file" in metrics else ""
    fields = metrics.get("fields")
    rows = fields.value if isinstance(fields, yaml.SequenceNode) else []
    if bool(file) == bool(rows):
        mistakes.append(Mistake(at, "needs one of `metrics.file` and `metrics.fields`, and not both"))
    counters = [_field(row, mistakes) for row in rows]
    first: dict[str, Counter] = {}
    again = [one for one in counters if one.name and first.setdefault(one.name, one) is not one]
    mistakes += [Mistake(one.line, f"names {one.name} again: line {first[one.name].line} has it") for one in again]
    if mistakes:
        raise CountersError(mistakes, counters)
    return file or tuple(counters)


def _field(node: yaml.Node, mistakes: list[Mistake]) -> Counter:
    """A row of ``metrics.fields``."""
    line = node.start_mark.line + 1
    given = _mapping(node, "a field", _FIELD_KEYS, mistakes)
    name, kind, about = (_text(given[key]).strip() if key in given else "" for key in _FIELD_KEYS)
    missing = [f"`{key}`" for key, value in zip(_FIELD_KEYS, (name, kind, about), strict=True) if not value]
    if missing:
        mistakes.append(Mistake(line, f"a field without {' and '.join(missing)}"))
    elif wrong := list(_mistakes_of(name, kind)):
        mistakes += [Mistake(line, text) for text in wrong]
    return Counter(line, name, kind, about)


def _mapping(node: yaml.Node, what: str, keys: Sequence[str], mistakes: list[Mistake]) -> dict[str, yaml.Node]:
    """The values of a mapping by their keys; keys that are not known, and keys that are there twice, are mistakes."""
    if not isinstance(node, yaml.MappingNode):
        mistakes.append(Mistake(node.start_mark.line + 1, f"{what} must have keys: {', '.join(keys)}"))
        return {}
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name, line = _text(key), key.start_mark.line + 1
        if name in found:
            mistakes.append(Mistake(line, f"has the key `{name}` twice"))
        elif name not in keys:
            manifest = name in ("apiVersion", "kind", "data")
            of = "; of a ConfigMap only the text of its key is the file" if manifest else ""
            mistakes.append(Mistake(line, f"{what} has no key `{name}`, only {', '.join(keys)}{of}"))
        found[name] = value
    return found


def _text(node: yaml.Node) -> str:
    """A scalar as it is written."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
