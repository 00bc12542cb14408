"""A file of counters: it is read as dcgm-exporter reads it, and each error has its line."""

import pytest

from sinks.series.counters_file import Counter, CountersError, parse

ONE_FIELD = b"version: 1\nmetrics:\n  fields:\n    - name: A\n      prometheusType: gauge\n      help: Of A.\n"


def rows(text: str) -> list[tuple[str, str, str]]:
    parsed_rows = parse(text.encode())
    assert not isinstance(parsed_rows, str)
    return [(counter.name, counter.type, counter.help) for counter in parsed_rows]


def errors_of(text: str | bytes) -> list[tuple[int, str]]:
    with pytest.raises(CountersError) as caught:
        parse(text if isinstance(text, bytes) else text.encode())
    return [*caught.value.errors]


@pytest.mark.parametrize(
    ("line", "columns"),
    [
        ("A, gauge, Of A.", ("A", "gauge", "Of A.")),
        ("A ,counter,  Of A (in %).  ", ("A", "counter", "Of A (in %).")),
        ("A,label,", ("A", "label", "")),
        ("A,untyped,Of A.\r", ("A", "untyped", "Of A.")),
        ('A,gauge,"Of A, and B."', ("A", "gauge", "Of A, and B.")),
        ('"A","gauge","Says ""A""."', ("A", "gauge", 'Says "A".')),
        ('A,gauge,"two\nlines # and no comment"', ("A", "gauge", "two\nlines # and no comment")),
        ("A,gauge,Of A. # no comment", ("A", "gauge", "Of A. # no comment")),
        ("A,summary,Of A.", ("A", "summary", "Of A.")),
    ],
)
def test_a_row_is_read_as_gos_csv_reads_it(line: str, columns: tuple[str, str, str]) -> None:
    assert rows(f"# Format\n\n{line}\n") == [columns]


def test_comments_and_empty_lines_are_left_out_and_rows_know_their_line() -> None:
    assert parse(b"# a\r\n\r\nA,gauge,x\r\n#B,gauge,x\nC,counter,y\r") == (
        Counter(3, "A", "gauge", "x"),
        Counter(5, "C", "counter", "y"),
    )


def test_every_error_of_a_csv_file_is_named_with_its_line() -> None:
    text = (
        'A,gauge\n  \n # c\nA,gauge,a,b\nA,\tgauge,x\nA, "gauge",x\nA,Gauge,x\n,gauge,x\nA,gauge,"x" y\nA,gauge,"open\n'
    )

    assert [(line, message[:24]) for line, message in errors_of(text)] == [
        (1, "has 2 columns, not name,"),
        (2, "has 1 column, not name, "),
        (3, "has 1 column, not name, "),
        (4, "has 4 columns, not name,"),
        (5, "has the type '\\tgauge', "),
        (6, "has a quote within colum"),
        (7, "has the type 'Gauge', wh"),
        (8, "has no name"),
        (9, "has more text after the "),
        (10, "has a quote in column 3 "),
    ]


def test_a_help_with_a_comma_is_refused_with_what_is_needed() -> None:
    assert errors_of("A,gauge,one, two\n") == [
        (1, "has 4 columns, not name, type and help: a help with a comma needs quotes around it")
    ]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "\n\n"])
def test_a_file_without_a_row_is_an_error(text: str) -> None:
    assert errors_of(text) == [(0, "has no row: nothing would be served")]


def test_a_file_that_is_no_text_names_the_line() -> None:
    assert errors_of(b"A,gauge,x\nB,gauge,\xff\n") == [(2, "is not UTF-8: save the file as UTF-8")]
    assert errors_of(b"\xef\xbb\xbfA,gauge,x\n") == [(1, "begins with a byte order mark: save the file without it")]


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_fields_of_a_yaml_file_are_its_rows(version: str) -> None:
    text = f"""# dcgm-exporter
version: {version}
metrics:
  fields:
    - name: " A "
      prometheusType: gauge
      help: Of A, and B.
    - {{name: B, prometheusType: label, help: Of B}}
collections:
  - {{name: slow, every: 10m, metrics: {{include: ["*"]}}}}
collection:
  interval: 30s
sources: {{dcgm: {{detectBindUnbind: {{enabled: true}}}}}}
"""

    assert parse(text.encode()) == (Counter(5, "A", "gauge", "Of A, and B."), Counter(8, "B", "label", "Of B"))


def test_a_yaml_file_may_name_a_csv_file() -> None:
    assert (
        parse(b"version: 2\nmetrics:\n  enableExporterMetrics: true\n  file: /etc/counters.csv\n")
        == "/etc/counters.csv"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 3\nmetrics: {file: a}", [(1, "needs `version: 1` or `version: 2`")]),
        ("metrics: {file: a}", [(0, "needs `version: 1` or `version: 2`")]),
        (
            "version: 1\nmetrics:\n  file: a\n  fields:\n  - {name: A, prometheusType: gauge, help: x}",
            [(3, "needs one of `metrics.file` and `metrics.fields`, and not both")],
        ),
        ("version: 1\nmetrics:\n  file: a\n  file: b", [(4, "has the key `file` twice")]),
        (
            "version: 1\nmetrics:\n  configMap: {name: a}\n  file: b",
            [(3, "`metrics` has no key `configMap`, only file, fields, enableExporterMetrics")],
        ),
        ("version: 1\nmetrics: {file: a}\n---\nversion: 1", [(0, "has 2 YAML documents, not one")]),
        ("version: " + "[" * 1000, [(0, "is nested too deeply")]),
        ("version: 1\n  metrics: [", [(2, "is no YAML: mapping values are not allowed here")]),
        (
            ONE_FIELD.decode() + "    - {name: A, prometheusType: counter, help: x}\n    - {name: B, help: x}\n",
            [(7, "names A again: line 4 has it"), (8, "a field without `prometheusType`")],
        ),
        (
            "version: 1\nmetrics: {fields: [{name: A, prometheusType: rate, help: x}]}",
            [(2, "has the type 'rate', which is none of gauge, counter, untyped, label")],
        ),
    ],
)
def test_every_error_of_a_yaml_file_is_named_with_its_line(text: str, expected: list[tuple[int, str]]) -> None:
    assert errors_of(text) == expected


def test_a_manifest_is_refused_with_what_the_file_must_be() -> None:
    errors = errors_of("apiVersion: v1\nkind: ConfigMap\ndata:\n  metrics: |\n    A,gauge,x\n")

    assert any("of a ConfigMap only the text of its key is the file" in message for _, message in errors)


@pytest.mark.parametrize("escape", ["\\ud800", "\\ud83e\\udd80", "\\U00110000", "\\Uffffffff"])
def test_an_escape_that_is_no_character_is_an_error_of_its_line(escape: str) -> None:
    text = ONE_FIELD.decode().replace("Of A.", f'"{escape}"')
    assert errors_of(text) == [(6, "is no YAML: a text in quotes has an escape that is no character")]
