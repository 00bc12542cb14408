"""Sets of series under rules and external labels; tests/real/test_relabel.py has what rules make of labels."""

import random
from collections.abc import Mapping

import pytest

from sinks.series import relabel
from sinks.series.labels import META
from sinks.series.model import Row, Rows, SeriesSet
from sinks.series.relabel import Relabelling, Withheld, relabelled
from sinks.series.relabel_file import BadRules, load, read
from sinks.series.relabel_presets import PRESETS
from tests.growth import kept
from tests.real.test_relabel import labels, question_of
from topics.metric import Labels

LABELS = (("gpu", "0"), ("pod", "bert-0"))
ROWS = (Row("util"), Row("clock", (("type", "sm"),)), Row("clock", (("type", "memory"),)))


def relabelled_by(
    text: str, labels: Labels = LABELS, rows: Rows = ROWS, meta: dict[str, str] | None = None, **external: str
) -> tuple[Labels, Rows, tuple[int, ...] | None, Mapping[Withheld, int]]:
    rules = Relabelling([load(text, "rules.yml")], tuple(external.items()))
    series, kept_rows, withheld = rules.relabel(SeriesSet(labels, rows), meta or {})
    return series.labels, series.rows, kept_rows, withheld


def test_a_label_that_all_series_of_a_set_get_is_the_sets() -> None:
    series_labels = relabelled_by("- {source_labels: [pod], target_label: exported_pod}")
    assert series_labels == ((("exported_pod", "bert-0"), *LABELS), ROWS, None, {})


def test_a_label_that_only_some_get_is_theirs() -> None:
    rules = "- {source_labels: [__name__], regex: util, target_label: kind, replacement: load}"
    assert relabelled_by(rules)[:2] == (LABELS, (Row("util", (("kind", "load"),)), *ROWS[1:]))
    assert relabelled_by(rules, rows=ROWS[:1])[0] == (("gpu", "0"), ("kind", "load"), ("pod", "bert-0"))


def test_a_series_may_get_another_name_or_none_and_what_is_not_written_is_counted() -> None:
    rules = """
- {source_labels: [__name__, type], regex: clock;sm, action: drop}
- {source_labels: [__name__], regex: clock, target_label: __name__, replacement: memory_clock}
- {source_labels: [__name__], regex: util, target_label: __name__, replacement: ""}
- {regex: type, action: labeldrop}
"""
    assert relabelled_by(rules) == (LABELS, (Row("memory_clock"),), (2,), {"rule": 1, "name": 1})
    assert relabelled_by("- {source_labels: [gpu], regex: '1', action: keep}") == ((), (), (), {"rule": 3})


def test_a_name_that_is_not_valid_keeps_its_series_out() -> None:
    rules = "metric_relabel_configs: [{regex: p(.*), action: labelmap, replacement: $1}]"
    assert relabelled_by(rules, (("p9", "x"),))[0] == (("9", "x"), ("p9", "x"))
    legacy = f"metric_name_validation_scheme: legacy\n{rules}"
    assert relabelled_by(legacy.replace("$1", "'${1}_'"), (("p9", "x"),)) == ((), (), (), {"name": 3})


def test_an_external_label_comes_where_its_name_is_free_and_after_the_rules() -> None:
    rules = "- {source_labels: [region], target_label: seen}"
    labels, rows, *_ = relabelled_by(rules, region="eu", gpu="9", type="x")
    assert labels == (("gpu", "0"), ("pod", "bert-0"), ("region", "eu"))
    assert rows == (Row("util", (("type", "x"),)), *ROWS[1:])


def test_rules_see_what_no_label_says_and_it_is_not_written() -> None:
    rules = f"- {{source_labels: [{META}pod_uid], target_label: uid}}"
    assert relabelled_by(rules, meta={f"{META}pod_uid": "1b6c"})[0] == (*LABELS, ("uid", "1b6c"))


def test_no_preset_takes_a_label_away_or_touches_what_is_not_known() -> None:
    all_presets, series = Relabelling([read(f"preset:{preset.name}") for preset in PRESETS]), SeriesSet(LABELS, ROWS)
    assert all_presets.relabel(series).series.labels == LABELS
    result = all_presets.relabel(series, {f"{META}node": "n1"}).series.labels
    assert set(result) == {*LABELS, ("Hostname", "n1"), ("node", "n1")}


@pytest.mark.slow
def test_a_set_is_relabelled_as_each_of_its_series_would_be() -> None:
    """Random rules, which may or may not read the labels that distinguish the series."""
    tried = {"one by one": 0, "at once": 0}
    for seed in range(700):
        question, rng = question_of(seed), random.Random(seed)
        try:
            rules = load(question["configs"], "rules.yml")
        except BadRules:
            continue
        set_labels = {name: value for name, value in labels(rng).items() if name != "__name__" and value}
        row_only = [name for name in ("a", "x", "type", "pod") if name not in set_labels]
        rows = tuple(
            [Row(name, tuple((label, name) for label in row_only[:n])) for n, name in enumerate(("up", "a_x", "b"))]
        )
        series, relabelling = (
            SeriesSet(tuple(sorted(set_labels.items())), rows),
            Relabelling([rules], (("region", "eu"),)),
        )
        expected = []
        for row in rows:
            new_labels = relabelled(rules.rules, {"__name__": row.name, **set_labels, **dict(row.labels)})
            if new_labels and all(new_labels) and new_labels.get("__name__"):
                expected.append(tuple(sorted(({"region": "eu"} | new_labels).items())))
        result = relabelling.relabel(series)
        assert result.series.series() == expected, question
        assert sum(result.withheld.values()) == len(rows) - len(expected)
        assert result.kept is None or len(result.kept) == len(expected)
        tried["at once" if relabelling._relabel_set(series, {}) else "one by one"] += 1
    assert min(tried.values()) > 100


def test_few_rows_are_kept_if_they_differ_from_pod_to_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relabel, "_SHARED_ROWS", 32)
    rule = "- {source_labels: [__name__, pod], regex: util;(.*), target_label: worker}"
    rules, sizes = Relabelling([load(rule, "rules.yml")]), list[int]()
    for number in range(150):
        rules.relabel(SeriesSet((("gpu", "0"), ("pod", f"bert-{number}")), ROWS))
        sizes.append(kept(rules._unique_rows))
    assert max(sizes[75:]) <= max(sizes[:75])
