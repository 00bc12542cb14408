"""Sets of series under rules and external labels; tests/real/test_relabel.py has what rules make of labels."""

from collections import Counter

from sinks.series.model import Row
from sinks.series.relabel import META, Relabelling
from sinks.series.relabel_file import PRESETS, load, read

LABELS = (("gpu", "0"), ("pod", "bert-0"))
ROWS = (Row("util"), Row("clock", (("type", "sm"),)), Row("clock", (("type", "memory"),)))


def relabelling(rules: str, **external: str) -> Relabelling:
    return Relabelling([load(rules, "rules.yml")], tuple(external.items()))


def test_a_label_that_all_series_of_a_set_get_is_the_sets() -> None:
    made = relabelling("- {source_labels: [pod], target_label: exported_pod}").relabel(LABELS, ROWS, {})
    assert made == ((("exported_pod", "bert-0"), *LABELS), ROWS, None, {})


def test_a_label_that_only_some_get_is_theirs() -> None:
    rules = "- {source_labels: [__name__], regex: util, target_label: kind, replacement: load}"
    made = relabelling(rules).relabel(LABELS, ROWS, {})
    assert made.labels == LABELS
    assert made.rows == (Row("util", (("kind", "load"),)), *ROWS[1:])
    assert relabelling(rules).relabel(LABELS, ROWS[:1], {}).labels == (
        ("gpu", "0"),
        ("kind", "load"),
        ("pod", "bert-0"),
    )


def test_a_series_may_get_another_name_or_none_and_what_is_not_written_is_counted() -> None:
    rules = """
- {source_labels: [__name__, type], regex: clock;sm, action: drop}
- {source_labels: [__name__], regex: clock, target_label: __name__, replacement: memory_clock}
- {source_labels: [__name__], regex: util, target_label: __name__, replacement: ""}
- {regex: type, action: labeldrop}
"""
    made = relabelling(rules).relabel(LABELS, ROWS, {})
    assert made == (LABELS, (Row("memory_clock"),), (2,), Counter(rule=1, name=1))
    assert relabelling("- {regex: gpu|pod, action: keep}").relabel(LABELS, ROWS, {}) == ((), (), (), Counter(rule=3))


def test_a_name_that_is_not_valid_keeps_its_series_out() -> None:
    rules = "metric_relabel_configs: [{regex: p(.*), action: labelmap, replacement: $1}]"
    assert relabelling(rules).relabel((("p9", "x"),), ROWS, {}).labels == (("9", "x"), ("p9", "x"))
    legacy = f"metric_name_validation_scheme: legacy\n{rules}"
    assert relabelling(legacy).relabel((("p9", "x"),), ROWS, {}) == ((), (), (), Counter(name=3))
    assert relabelling(legacy).relabel((("p", "x"),), ROWS, {}).withheld == Counter(name=3)


def test_an_external_label_comes_where_its_name_is_free_and_after_the_rules() -> None:
    rules = "- {source_labels: [region], target_label: seen}"
    made = relabelling(rules, region="eu", gpu="9", type="x").relabel(LABELS, ROWS, {})
    assert made.labels == (("gpu", "0"), ("pod", "bert-0"), ("region", "eu"))
    assert made.rows == (Row("util", (("type", "x"),)), *ROWS[1:])


def test_rules_see_what_no_label_says_and_it_is_not_written() -> None:
    rules = f"- {{source_labels: [{META}pod_uid], target_label: uid}}"
    assert relabelling(rules).relabel(LABELS, ROWS, {f"{META}pod_uid": "1b6c"}).labels == (*LABELS, ("uid", "1b6c"))


def test_no_preset_takes_a_label_away_or_touches_what_is_not_known() -> None:
    every = Relabelling([read(f"preset:{preset.name}") for preset in PRESETS])
    assert every.relabel(LABELS, ROWS, {}) == (LABELS, ROWS, None, {})
    assert set(every.relabel(LABELS, ROWS, {f"{META}node": "n1"}).labels) == {
        *LABELS,
        ("Hostname", "n1"),
        ("node", "n1"),
    }
