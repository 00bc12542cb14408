"""Rules of relabelling: which files are refused and why; tests/real/test_relabel.py has what rules make of labels."""

from pathlib import Path

import pytest

from sinks.series.relabel import relabelled
from sinks.series.relabel_file import BadRules, load, read

LABELS = {"__name__": "up", "pod": "bert-0"}


def errors_of(text: str) -> list[str]:
    with pytest.raises(BadRules) as bad:
        load(text, "rules.yml")
    return bad.value.errors


def test_a_file_is_a_list_of_rules_or_has_them_where_prometheus_has_them() -> None:
    rules = "- {source_labels: [pod], target_label: exported_pod}"
    expected = {"__name__": "up", "exported_pod": "bert-0", "pod": "bert-0"}
    for text in (rules, f"metric_relabel_configs:\n{rules}", f"write_relabel_configs:\n{rules}"):
        assert relabelled(load(text, "rules.yml").rules, LABELS) == expected
    assert load("[]", "rules.yml").rules == ()


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_bytes(b"#" * (1 << 20) + b"\n")

    with pytest.raises(BadRules, match=r"rules\.yml: larger than 1 MiB"):
        read(str(tmp_path / "rules.yml"))


def test_legacy_names_are_chosen_where_prometheus_chooses_them() -> None:
    text = "metric_relabel_configs:\n- {source_labels: [pod], target_label: k8s.pod}\n"
    assert relabelled(load(text, "rules.yml").rules, LABELS) == {**LABELS, "k8s.pod": "bert-0"}
    assert errors_of(f"metric_name_validation_scheme: legacy\n{text}") == [
        "rules.yml:3: rule 1: target_label 'k8s.pod' is not the name of a label"
    ]


def test_every_error_is_said_with_its_line_and_its_rule() -> None:
    text = """
- action: hashmod
  source_labels: [pod]
  target_label: shard
- source_labels: [pod]
  target_label: x
  colour: red
  colour: blue
- regex: a(
  action: drop
- action: dorp
- action: labeldrop
  source_labels: [pod]
  regex: x
- pod
- source_labels: pod
  target_label: [x]
- {action: hashmod, target_label: x, modulus: "8"}
"""
    fields = "source_labels, separator, regex, modulus, target_label, replacement, action"
    assert errors_of(text) == [
        "rules.yml:2: rule 1: hashmod needs a modulus above 0",
        f"rules.yml:7: rule 2: there is no field 'colour'; there are {fields}",
        f"rules.yml:8: rule 2: there is no field 'colour'; there are {fields}",
        "rules.yml:9: rule 3: regex 'a(' is not an expression of RE2: missing ): ^(?s:a()$",
        "rules.yml:11: rule 4: there is no action 'dorp'; there are replace, keep, drop, hashmod, labelmap, labeldrop,"
        " labelkeep, lowercase, uppercase, keepequal, dropequal",
        "rules.yml:12: rule 5: labeldrop takes only regex, not source_labels",
        "rules.yml:15: rule 6: a rule has fields, such as source_labels and action; this has none",
        "rules.yml:16: rule 7: source_labels is a list",
        "rules.yml:17: rule 7: target_label is a text",
        "rules.yml:18: rule 8: modulus is a whole number from 0 to 18446744073709551615, not '8'",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- a: [", "rules.yml:1: not YAML: expected the node content, but found '<stream end>'"),
        ("- a\x00", "rules.yml: not YAML: unacceptable character #x0000: special characters are not allowed"),
        ("", "rules.yml: a list of rules is expected, as under metric_relabel_configs"),
        ("up", "rules.yml: a list of rules is expected, as under metric_relabel_configs"),
        ("metric_relabel_configs: up", "rules.yml: a list of rules is expected, as under metric_relabel_configs"),
        ("{}", "rules.yml: it has to have one of metric_relabel_configs and write_relabel_configs"),
        (
            "scrape_configs: []",
            "rules.yml: only metric_relabel_configs, write_relabel_configs and metric_name_validation_scheme belong"
            " here, not scrape_configs",
        ),
        (
            "{metric_name_validation_scheme: utf, metric_relabel_configs: []}",
            "rules.yml:1: metric_name_validation_scheme is utf8 or legacy, not 'utf'",
        ),
        (
            "- {regex: '\\C', action: drop}",
            "rules.yml:1: rule 1: regex '\\C' is not an expression of RE2: \\C is none of it",
        ),
        pytest.param("[" * 1000, "rules.yml: not YAML: nested too deeply", id="nested"),
        (
            "? [a]\n: 1",
            "rules.yml: only metric_relabel_configs, write_relabel_configs and metric_name_validation_scheme belong"
            " here, not a list or a mapping",
        ),
        ("- [a, b]", "rules.yml:1: rule 1: a rule has fields, such as source_labels and action; this has none"),
        ("- {source_labels: [[a]], action: drop}", "rules.yml:1: rule 1: source_labels is a list of names"),
        (
            "- <<: text",
            "rules.yml:1: rule 1: expected a mapping or list of mappings for merging, but found scalar",
        ),
        (
            "- &drop {regex: a, action: drop}\n- <<: {colour: red}\n  action: drop",
            "rules.yml:2: rule 2: there is no field 'colour'; there are source_labels, separator, regex, modulus,"
            " target_label, replacement, action",
        ),
        (
            "- <<: {source_labels: pod}\n  action: drop",
            "rules.yml:1: rule 1: source_labels is a list",
        ),
    ],
)
def test_a_file_that_has_no_rules_is_refused_in_one_sentence(text: str, error: str) -> None:
    assert errors_of(text) == [error]


def test_a_number_of_thousands_of_digits_is_no_modulus() -> None:
    (error,) = errors_of(f"- {{action: hashmod, target_label: x, modulus: {'9' * 5000}}}")
    assert error.startswith("rules.yml:1: rule 1: modulus is a whole number from 0 to 18446744073709551615, not '999")


@pytest.mark.parametrize("escape", ["\\ud800", "\\Uffffffff"])
def test_an_escape_that_is_no_character_is_refused(escape: str) -> None:
    assert errors_of(f'- source_labels: [pod]\n  target_label: "{escape}"') == [
        "rules.yml:2: not YAML: a text in quotes has an escape that is no character"
    ]
