"""A file of counters as dcgm-exporter takes it -> its rows, or every error with its line. Pure.

In: the text of a CSV file (name, type, help), or of the YAML file that dcgm-exporter has since 4.8.3 (``version`` 1 and
2). Of the latter only ``metrics`` counts: how often GPUs are read is an option of the producer. The text decides which
of both it is, not the file's name, because a key of a ConfigMap may have any name.
Out: the rows in their order, or the path that a YAML file gives for its CSV file.
On failure: :class:`CountersError` with every error; nothing of such a file is in force.
Source: dcgm-exporter 4.5.3-4.8.2 and 4.6.0-4.8.3, internal/pkg/counters/counter_config.go and
internal/pkg/appconfig/yaml_config.go; Go's encoding/csv. So a line is a comment only if ``#`` is its first
character; a line of spaces is a row of one column; spaces around a column are cut, tabs are not; a column is quoted
only if the quote is its first character, and it may then contain commas, doubled quotes and line ends.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import yaml

from delivery.files import YamlLoader
from delivery.values import counted

TYPES = ("gauge", "counter", "untyped", "label")
"""The types of rows. Up to 4.8.2 dcgm-exporter takes the following as well, and has no ``untyped``."""

OLDER_TYPES = ("histogram", "summary")

_COLUMNS = 3
_YAML = re.compile(r"(---|%YAML|[A-Za-z]+[ \t]*:([ \t]|$)|\{)")
_YAML_KEYS = ("version", "metrics", "collection", "collections", "sources")
_FIELD_KEYS = ("name", "prometheusType", "help")


class Counter(NamedTuple):
    """A row: the name of a field or metric, and the type and help to serve it with."""

    line: int
    name: str
    type: str
    help: str


class LineError(NamedTuple):
    """What is wrong in a line. ``line`` 0: in the whole file."""

    line: int
    text: str


class CountersError(ValueError):
    """A file that can't be used: all errors in it, and the rows that could be read."""

    def __init__(self, errors: Iterable[LineError], rows: Iterable[Counter] = ()) -> None:
        self.errors = tuple(sorted(errors))
        self.rows = tuple([row for row in rows if row.name and row.type in TYPES])
        super().__init__("; ".join(f"line {line}: {text}" if line else text for line, text in self.errors))


def parse(content: bytes) -> tuple[Counter, ...] | str:
    """The rows of a file, or the path of the CSV file that holds them. Raises CountersError."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CountersError([LineError(line, "is not UTF-8: save the file as UTF-8")]) from error
    if text.startswith("\ufeff"):
        raise CountersError([LineError(1, "begins with a byte order mark: save the file without it")])
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    return parse_yaml(text) if _YAML.match(first) else parse_csv(text)


# -- CSV


def parse_csv(text: str) -> tuple[Counter, ...]:
    """The rows of a CSV file. Raises CountersError."""
    errors: list[LineError] = []
    counters: list[Counter] = []
    lines = text.replace("\r\n", "\n").removesuffix("\r").split("\n")
    number = 0
    while number < len(lines):
        line = number = number + 1
        if not lines[line - 1] or lines[line - 1].startswith("#"):
            continue
        try:
            columns, number = _columns(lines, line - 1)
        except ValueError as error:
            errors.append(LineError(line, str(error)))
            continue
        if len(columns) != _COLUMNS:
            surplus = ": a help with a comma needs quotes around it" if len(columns) > _COLUMNS else ""
            errors.append(LineError(line, f"has {counted(len(columns), 'column')}, not name, type and help{surplus}"))
            continue
        name, kind, help_text = (column.strip(" ") for column in columns)
        errors += [LineError(line, text) for text in _row_errors(name, kind)]
        counters.append(Counter(line, name, kind, help_text))
    if not counters and not errors:
        errors.append(LineError(0, "has no row: nothing would be served"))
    if errors:
        raise CountersError(errors, counters)
    return tuple(counters)


def _row_errors(name: str, kind: str) -> Iterator[str]:
    """The errors in a row of three columns."""
    if not name:
        yield "has no name"
    if kind not in TYPES + OLDER_TYPES:
        tab = ": only spaces around it are cut, tabs are not" if kind.strip() in TYPES else ""
        yield f"has the type {kind!r}, which is none of {', '.join(TYPES)}{tab}"


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
        documents = list(yaml.compose_all(text, YamlLoader))
    except RecursionError as error:
        raise CountersError([LineError(0, "is nested too deeply")]) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise CountersError([LineError(line, f"is no YAML: {error.problem}")]) from error
    except yaml.YAMLError as error:
        raise CountersError([LineError(0, f"is no YAML: {error}")]) from error
    if len(documents) != 1:
        raise CountersError([LineError(0, f"has {len(documents)} YAML documents, not one")])
    errors: list[LineError] = []
    top = _mapping(documents[0], "the file", _YAML_KEYS, errors)
    if "version" not in top or _text(top["version"]) not in ("1", "2"):
        line = top["version"].start_mark.line + 1 if "version" in top else 0
        errors.append(LineError(line, "needs `version: 1` or `version: 2`"))
    if "metrics" not in top:
        errors.append(
            LineError(0, "has no `metrics`, so nothing is picked: --names alone serves all that there is of a profile")
        )
        raise CountersError(errors)
    metrics = _mapping(top["metrics"], "`metrics`", ("file", "fields", "enableExporterMetrics"), errors)
    file = _text(metrics["file"]).strip() if "file" in metrics else ""
    fields = metrics.get("fields")
    rows = fields.value if isinstance(fields, yaml.SequenceNode) else []
    if bool(file) == bool(rows):
        line = top["metrics"].start_mark.line + 1
        errors.append(LineError(line, "needs one of `metrics.file` and `metrics.fields`, and not both"))
    counters = [_field(row, errors) for row in rows]
    first: dict[str, Counter] = {}
    repeated = [row for row in counters if row.name and first.setdefault(row.name, row) is not row]
    errors += [LineError(row.line, f"names {row.name} again: line {first[row.name].line} has it") for row in repeated]
    if errors:
        raise CountersError(errors, counters)
    return file or tuple(counters)


def _field(node: yaml.Node, errors: list[LineError]) -> Counter:
    """A row of ``metrics.fields``."""
    line = node.start_mark.line + 1
    field = _mapping(node, "a field", _FIELD_KEYS, errors)
    name, kind, help_text = (_text(field[key]).strip() if key in field else "" for key in _FIELD_KEYS)
    missing = [f"`{key}`" for key, value in zip(_FIELD_KEYS, (name, kind, help_text), strict=True) if not value]
    if missing:
        errors.append(LineError(line, f"a field without {' and '.join(missing)}"))
    else:
        errors += [LineError(line, text) for text in _row_errors(name, kind)]
    return Counter(line, name, kind, help_text)


def _mapping(node: yaml.Node, subject: str, keys: Sequence[str], errors: list[LineError]) -> dict[str, yaml.Node]:
    """The values of a mapping by key. Unknown and repeated keys are errors."""
    if not isinstance(node, yaml.MappingNode):
        errors.append(LineError(node.start_mark.line + 1, f"{subject} must have keys: {', '.join(keys)}"))
        return {}
    values: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name, line = _text(key), key.start_mark.line + 1
        if name in values:
            errors.append(LineError(line, f"has the key `{name}` twice"))
        elif name not in keys:
            manifest = name in ("apiVersion", "kind", "data")
            hint = "; of a ConfigMap only the text of its key is the file" if manifest else ""
            errors.append(LineError(line, f"{subject} has no key `{name}`, only {', '.join(keys)}{hint}"))
        values[name] = value
    return values


def _text(node: yaml.Node) -> str:
    """A scalar as it is written."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
