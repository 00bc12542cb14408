"""Rules files: what they set, and every error with its place."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.rules import rules_file
from streams.alerts.rules.options import OPTIONS, ValueErrors
from streams.alerts.rules.rule import KINDS, Rule, Rules
from streams.alerts.rules.rules_file import RulesError


def parsed(text: str) -> Rules:
    return rules_file.parse(text, "rules.toml")


def errors_of(text: str) -> list[tuple[int, str, str]]:
    """Line, path and words of every error of a file."""
    with pytest.raises(RulesError) as caught:
        parsed(text)
    return [(error.line, error.path, error.text) for error in caught.value.errors]


def rule(by: Rules, name: str = "GPUHeldIdle") -> Rule:
    (match,) = [rule for rule in by.rules if rule.name == name]
    return match


def test_an_empty_file_leaves_the_defaults() -> None:
    assert parsed("") == rules_file.load(None)
    assert parsed("# nothing\n[rules]\n") == rules_file.load(None)


def test_what_a_file_does_not_name_stays() -> None:
    by = parsed('[rules.GPUHeldIdle]\nfor = "2h"\nlabels = { team = "platform" }')
    assert (rule(by).for_ms, rule(by).severity, rule(by).labels) == (7_200_000, "warning", {"team": "platform"})
    assert len(by.rules) == len(rules_file.load(None).rules)


def test_a_rule_may_be_disabled() -> None:
    by = parsed("[rules.GPUHeldIdle]\nenabled = false")
    assert "GPUHeldIdle" not in {rule.name for rule in by.rules}


def test_a_new_rule_of_a_kind_begins_as_the_default_of_that_kind() -> None:
    by = parsed('[rules.GPUHeldIdleForLong]\nkind = "held_idle"\nfor = "4h"\nseverity = "critical"')
    new = rule(by, "GPUHeldIdleForLong")
    assert (new.for_ms, new.severity, new.grace_ms) == (14_400_000, "critical", rule(by).grace_ms)
    assert by.of("held_idle") == (rule(by), new)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("for = 90", "for_ms", 90_000),
        ("for = 0", "for_ms", 0),
        ("for = 1.5", "for_ms", 1_500),
        ('for = "500ms"', "for_ms", 500),
        ('for = "7d"', "for_ms", 604_800_000),
        ('grace = "0"', "grace_ms", 0),
        ("idle_below = 1", "idle_below", 1.0),
        ("idle_below = 0.001", "idle_below", 0.001),
        ('memory_held = "2GiB"', "memory_held_bytes", 2.0 * (1 << 30)),
        ("memory_held = 0", "memory_held_bytes", 0.0),
        ('severity = "info"', "severity", "info"),
        ("copy_labels = []", "copy_labels", ()),
        ('copy_labels = "app"', "copy_labels", ("app",)),
        ('annotations = { summary = "idle" }', "annotations", {"summary": "idle"}),
    ],
)
def test_a_setting_is_read(line: str, field: str, value: object) -> None:
    assert getattr(rule(parsed(f"[rules.GPUHeldIdle]\n{line}")), field) == value


NEGATIVE = "is not a duration: write 500ms, 30s, 15m, 2h, 7d or 1h30m (a bare number is seconds)"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('for = "soon"', f"'soon' {NEGATIVE}"),
        ('for = "-5m"', f"'-5m' {NEGATIVE}"),
        ("for = -5", f"'-5' {NEGATIVE}"),
        ("for = 1e300", "is not a duration"),
        ("for = nan", "not nan"),
        ("for = inf", "not inf"),
        ("for = true", "not true"),
        ("for = 2026-11-20", "must be a duration"),
        ('for = "5000d"', "longer than ten years"),
        ("for = []", "not a list"),
        ("for = {}", "not a table"),
        ("grace = '1w'", "is not a duration"),
        ("idle_below = 0", "must be a number above 0 and at most 1, not 0"),
        ("idle_below = 1.1", "not 1.1"),
        ("idle_below = nan", "not nan"),
        ('idle_below = "1%"', "not '1%'"),
        ("idle_below = true", "not true"),
        ('memory_held = "1 TB"', "must be a size"),
        ("memory_held = -1", "must be a size"),
        ("memory_held = 9999999999999999999999", "must be a size"),
        ('severity = "page"', "must be one of info, warning, critical, not 'page'"),
        ("severity = []", "must be one of"),
        ("enabled = 1", "must be true or false, not 1"),
        ('enabled = "false"', "must be true or false"),
        ('labels = "team"', "must be a table such as"),
        ("labels = { team = 3 }", "must be text, not 3"),
        ('labels = { team = "" }', "must be text"),
        ('labels = { "te-am" = "a" }', "'te-am' is not the name of a label"),
        ('labels = { alertname = "a" }', "alerts have of their own"),
        ('labels = { k8s_pod_name = "a" }', "alerts have of their own"),
        ('labels = { severity = "a" }', "alerts have of their own"),
        ('annotations = { "1" = "a" }', "is not the name of an annotation"),
        ('annotations = { gpu_share = "1" }', "is a figure that alerts have of their own"),
        ('annotations = { since = "May" }', "is a figure that alerts have of their own"),
        ('annotations = { window = "Sundays" }', "is a figure that alerts have of their own"),
        ("copy_labels = [1]", "must be text, not 1"),
        (f'annotations = {{ a = "{"x" * 5000}" }}', "at most 4096 characters"),
        ("at_least = 1", "is not read by rules of kind held_idle"),
        ('kind = "xid"', "is held_idle: give a rule of another kind another name"),
        ('kind = "idle"', "must be one of held_idle,"),
        ("kind = {}", "must be one of held_idle,"),
        ('after = "5m"', "is not known"),
        ('idle_bellow = "5m"', "is not known; did you mean idle_below?"),
        ('severity = "warn"', "not 'warn'; did you mean warning?"),
        ('kind = "held_idel"', "not 'held_idel'; did you mean held_idle?"),
        ("overides = []", "is not known; did you mean overrides?"),
        ("overrides = 1", "must be a list of tables"),
        ("overrides = [1]", "must be a table"),
        ("overrides = [{}]", "must say for what it is"),
        ('overrides = [{ namespace = "a" }]', "changes nothing"),
        ('overrides = [{ for = "1m" }]', "must say for what it is"),
        ('overrides = [{ namespace = [], for = "1m" }]', "must not be empty"),
        ('overrides = [{ namespace = "ml-[ab", for = "1m" }]', "has a [ without a ]"),
        ('overrides = [{ namespace = [1], for = "1m" }]', "must be text, not 1"),
        ('overrides = [{ namespace = "a", kind = "xid" }]', "is not known"),
        ('overrides = [{ xid = 31, for = "1m" }]', "is not read by rules of kind held_idle"),
        ('overrides = [{ pod_labels = "app=x", for = "1m" }]', "must be a table such as"),
        ('overrides = [{ namespace = "a", for = "soon" }]', "is not a duration"),
        ('overrides = [{ namspace = "a", for = "1m" }]', "is not known"),
    ],
)
def test_an_error_is_named_at_its_line(line: str, expected: str) -> None:
    errors = errors_of(f"# a comment\n\n[rules.GPUHeldIdle]\n{line}\n")
    assert {number for number, _, _ in errors} == {4}
    assert all(path.startswith("rules.GPUHeldIdle.") for _, path, _ in errors)
    assert any(expected in text for _, _, text in errors), errors


@pytest.mark.parametrize(
    ("text", "location", "expected"),
    [
        ("rules = 1", (1, "rules"), "must be tables [rules.NAME]"),
        ("[[rules]]", (1, "rules"), "must be tables [rules.NAME]"),
        ("\n[rule.GPUHeldIdle]", (2, "rule"), "is not known: rules are tables [rules.NAME]; did you mean rules?"),
        ("[rules]\nGPUHeldIdle = 3", (2, "rules.GPUHeldIdle"), "must be a table"),
        ("[rules.GPUHeldIdel]\nfor = 1", (1, "rules.GPUHeldIdel"), "did you mean GPUHeldIdle?"),
        ('[rules."a b"]\nkind = "lost"', (1, "rules.a b"), "is not the name of a rule"),
        (
            '[rules.GPUXid]\noverrides = [{ xid = "79", enabled = false }]',
            (2, "rules.GPUXid.overrides[1].xid"),
            "whole",
        ),
        (
            "[rules.GPUXid]\noverrides = [{ xid = 0, enabled = false }]",
            (2, "rules.GPUXid.overrides[1].xid"),
            "at least",
        ),
        ("[rules.GPUXid]\nfor = '1m'", (2, "rules.GPUXid.for"), "an XID error is an event, which fires at once"),
        ("[rules.GPULost]\nlabels = { who = '{{ .Pod }}' }", (2, "rules.GPULost.labels.who"), "looks like a template"),
        (
            '[[rules.NodeSilent.overrides]]\nnamespace = "ml"\nenabled = true',
            (2, "rules.NodeSilent.overrides[1].namespace"),
            "is not read by rules of kind node_silent, which are about no pod",
        ),
        (
            '[rules.GPUUsedUnallocated]\noverrides = [{ pod_labels = { app = "x" }, enabled = false }]',
            (2, "rules.GPUUsedUnallocated.overrides[1].pod_labels"),
            "which are about no pod",
        ),
        (
            '[rules.GPUMissing]\noverrides = [{ workload = "x", for = "5m" }]',
            (2, "rules.GPUMissing.overrides[1].workload"),
            "which are about no pod",
        ),
        ("[rules.GPUMissing]\nforget = 0", (2, "rules.GPUMissing.forget"), "must be at least 1s"),
        ("[rules.GPUNvlinkErrors]\nat_least = 0.5", (2, "rules.GPUNvlinkErrors.at_least"), "a whole number"),
        ("for = 5", (1, "for"), "is not known"),
    ],
)
def test_an_error_in_the_tables_is_named(text: str, location: tuple[int, str], expected: str) -> None:
    ((line, path, message),) = errors_of(text)
    assert (line, path) == location
    assert expected in message


def test_the_other_errors_of_a_rule_whose_kind_is_not_known_are_named_too() -> None:
    text = '[rules.Mine]\nkind = "idle"\nfor = "x"\nwhat = 1\n[[rules.Mine.overrides]]\nnamespace = 3\nfor = 1'
    assert [line for line, _, _ in errors_of(text)] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("setting", "paths"),
    [
        (
            'labels = { alertname = "a", ok = "b", "te-am" = "c", n = 3 }',
            ["labels.alertname", "labels.te-am", "labels.n"],
        ),
        ('annotations = { summary = "", gpu_share = "1" }', ["annotations.summary", "annotations.gpu_share"]),
        ('copy_labels = ["a", "", 3]', ["copy_labels[2]", "copy_labels[3]"]),
        (
            'overrides = [{ pod_labels = { a = ["x", ""], b = [], "" = "x" }, for = 1 }]',
            ["overrides[1].pod_labels.a[2]", "overrides[1].pod_labels.b", "overrides[1].pod_labels."],
        ),
    ],
)
def test_every_error_within_a_setting_is_named(setting: str, paths: list[str]) -> None:
    errors = errors_of(f"[rules.GPUHeldIdle]\n{setting}\n")
    assert [path for _, path, _ in errors] == [f"rules.GPUHeldIdle.{path}" for path in paths]
    assert {number for number, _, _ in errors} == {2}


def test_all_errors_are_named_each_at_its_own_line() -> None:
    text = '''
[rules.GPUHeldIdle]
for = "soon"
description = """
for = "later"
"""
labels = {
}

[[rules.GPUHeldIdle.overrides]]
namespace = "ok"
for = "1h"

[[rules.GPUHeldIdle.overrides]]
namespace = [
  "a",
  "b",
]
severity = "high"

[rules.GPUXid]
keep_firing_for = 1
idle_below = 0.5

[other]
'''
    assert [(line, path) for line, path, _ in errors_of(text.replace("labels = {\n}", "labels = { }"))] == [
        (24, "other"),
        (3, "rules.GPUHeldIdle.for"),
        (4, "rules.GPUHeldIdle.description"),
        (18, "rules.GPUHeldIdle.overrides[2].severity"),
        (22, "rules.GPUXid.idle_below"),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[rules", 1),
        ("a = 1\nb = \n", 2),
        ("a = 1\na = 2", 2),
        ('a = "x', 1),
        ("[rules.GPUHeldIdle]\n[rules.GPUHeldIdle]\n", 2),
        ("\ufeffa = 1", 1),
        ("a = 1\n\x00", 2),
        (f"a = {'9' * 5000}", 1),
        ("a = 1979-13-40", 1),
    ],
)
def test_what_is_not_toml_is_named_at_its_line(text: str, line: int) -> None:
    ((error_line, path, message),) = errors_of(text)
    assert (error_line, path) == (line, "")
    assert message.startswith("is not TOML: ")


def test_what_is_nested_too_deeply_is_an_error() -> None:
    ((_, _, message),) = errors_of(f"a = {'[' * 20_000}{']' * 20_000}")
    assert message == "is nested too deeply"


@pytest.mark.parametrize(
    ("content", "line", "text"),
    [(b"a = 1\nb = '\xff'\n", 2, "is not UTF-8"), (b"#" * ((1 << 20) + 1), 0, "is larger than 1 MiB")],
)
def test_what_can_not_be_read_is_an_error(tmp_path: Path, content: bytes, line: int, text: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(content)
    with pytest.raises(RulesError) as caught:
        rules_file.load(path)
    assert caught.value.errors == (rules_file.FileError(str(path), line, "", text),)


def test_the_mark_that_some_editors_put_before_a_file_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[rules.GPUHeldIdle]\nfor = "3h"\n', encoding="utf-8-sig")
    assert rule(rules_file.load(path)).for_ms == 10_800_000


def test_a_file_that_is_not_there_or_is_a_folder_is_an_error(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(RulesError, match=text):
            rules_file.load(path)


def test_a_file_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.touch(mode=0o000)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(RulesError, match="Permission denied"):
        rules_file.load(path)


def test_an_error_reads_as_a_compiler_writes_it() -> None:
    with pytest.raises(RulesError, match=r"^rules.toml:2: rules.GPUHeldIdle.for: 'x' is not a duration"):
        parsed("[rules.GPUHeldIdle]\nfor = 'x'")


def test_every_option_is_a_field_of_rules_and_names_kinds_that_there_are() -> None:
    fields = set(Rule.__struct_fields__)
    for option in OPTIONS:
        assert option.field in fields
        assert set(option.kinds) <= set(KINDS)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
keys = st.sampled_from([option.key for option in OPTIONS] + ["kind", "overrides", "namespace", "xid", "what"])


@given(st.dictionaries(st.sampled_from(["GPUHeldIdle", "GPUXid", "mine"]), st.dictionaries(keys, values, max_size=4)))
def test_whatever_a_table_holds_it_is_a_rule_or_an_error(tables: dict[str, dict[str, object]]) -> None:
    errors: ValueErrors = []
    for name, table in tables.items():
        parsed = rules_file.rule(name, table, rules_file.defaults(), errors)
        assert errors or (parsed is not None and parsed.name == name)


@given(st.text(max_size=60))
def test_whatever_a_file_holds_it_is_rules_or_errors(text: str) -> None:
    with suppress(RulesError):
        assert parsed(text).rules


def test_how_long_a_policy_may_silence_is_set_by_namespace() -> None:
    text = '[policies]\nlongest = "12h"\n[[policies.overrides]]\nnamespace = "notebooks-*"\nlongest = "3d"'
    bounds = rules_file.parse(text, "rules.toml").bounds
    assert [bounds.longest(namespace) // 3_600_000 for namespace in ("ml", "notebooks-a")] == [12, 72]
    assert rules_file.load(None).bounds.longest("ml") == 24 * 3_600_000


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("policies = 1", "policies"),
        ('[policies]\nlongest = "soon"', "policies.longest"),
        ('[policies]\nlongst = "1h"', "policies.longst"),
        ('[[policies.overrides]]\nnamespace = "a"', "policies.overrides[1]"),
        ('[[policies.overrides]]\nnamespace = "a["\nlongest = "1h"', "policies.overrides[1].namespace"),
    ],
)
def test_an_error_in_the_bounds_of_policies_is_named(text: str, path: str) -> None:
    assert [error_path for _, error_path, _ in errors_of(text)] == [path]
