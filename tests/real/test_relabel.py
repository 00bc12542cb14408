"""Relabelling against Prometheus's own package ``model/relabel``, which a small Go program asks: thousands of cases."""

import json
import random
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sinks.series.relabel import Scheme, lowercase, relabelled, uppercase
from sinks.series.relabel_file import BadRules, load
from tests.real.conftest import need
from tests.real.servers import Missing, real_dir

pytestmark = pytest.mark.real

RELABEL = "relabel-3.15.0"
CASES = 4000
Question = dict[str, Any]

NAMES = ["__name__", "pod", "Pod", "namespace", "a", "b", "c", "a_x", "b_x", "c_x", "x", "__tmp", "é", "k8s.pod", "9"]
VALUES = [
    "",
    "a",
    "A",
    "b",
    "a;b",
    ";",
    "x",
    "bert-0",
    "BERT-0",
    "dcgm_gpu_1",
    "ß",
    "İstanbul",
    "ΑΣ",
    "ᾳ",
    "日本",
    "$1",
    "a\nb",
]
EXPRESSIONS = [
    "(.*)",
    ".*",
    ".+",
    "",
    "a",
    "a|b",
    "(a)|b",
    "(a)(b)?",
    "[a-z]+",
    "([a-z]+)-([0-9]+)",
    "(?P<first>[^-]+)-(?P<last>.*)",
    "(?<word>\\w+)",
    "(.+)_x",
    "(.*)_?x?",
    "x*",
    "(?i)bert.*",
    "(?i)ÉÀß",
    "\\pL+",
    "\\d+",
    "a)|(b",
    "a)|(?:x",
    "x|)(",
    "(.)(.)(.)?",
    "a;b",
    "(.*);(.*)",
    "^a$",
    "a$|^b",
    "(?-s).+",
    "(?s).+",
    "(?m)^a$",
    "\\Qa.b\\E",
    "__(.*)",
    "(pod|namespace)",
    "((a)|(b))*",
    "\\x{65e5}.*",
    "[[:alpha:]]+",
    "(?U)(.+)(.*)",
    "\\b\\w+\\b",
    ".{0,3}",
    "(a{2}){3}",
    "(?P<_1>.)(?P<\\w>.)",
    "\\p{Greek}+",
]
BROKEN = [
    "(",
    "a**",
    "(?P<é>a)",
    "\\C",
    "(?=a)",
    "\\1",
    "a{1001}",
    "[z-a]",
    "(?P<a>x)(?P<a>y)",
    "\\8",
    "(?P=a)",
    "*",
    "\\pX",
]
TEMPLATES = [
    "$1",
    "${1}",
    "$1_x",
    "${1}_x",
    "x_$1",
    "$2$1",
    "$$",
    "$$1",
    "$",
    "${",
    "${}",
    "${1",
    "$first",
    "${first}-${last}",
    "$word",
    "$0",
    "$01",
    "$9",
    "$é",
    "$1é",
    "a",
    "",
    "x",
    "pod",
    "é",
    "__name__",
    "k8s.pod",
    "9a",
    "$x$",
    "a$$b",
    "$-1",
    "${word}_$1",
    "a b",
    "$100000000",
    "$1000000000",
    "${1}${1}",
    "$²",
    "$١",
]
ACTIONS = [
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


def rule(rng: random.Random) -> dict[str, Any] | None:
    """Any rule: as a rule one that goes together, sometimes one that does not."""
    action = rng.choice(ACTIONS)
    fields = {
        "replace": ("source_labels", "separator", "regex", "target_label", "replacement"),
        "keep": ("source_labels", "separator", "regex"),
        "drop": ("source_labels", "separator", "regex"),
        "hashmod": ("source_labels", "separator", "target_label", "modulus"),
        "labelmap": ("regex", "replacement"),
        "labeldrop": ("regex",),
        "labelkeep": ("regex",),
    }.get(action, ("source_labels", "target_label"))
    if rng.random() < 0.05:
        fields = (
            *fields,
            rng.choice(["source_labels", "separator", "regex", "target_label", "replacement", "modulus"]),
        )
    needed = {"target_label", "modulus"} & set(fields)
    base: dict[str, Any] = {} if action == "replace" and rng.random() < 0.5 else {"action": action}
    if rng.random() < 0.05:
        base["action"] = rng.choice(["Keep", "DROP", "none", None, "labelMap", ""])
    choices: dict[str, Any] = {
        "source_labels": lambda: [rng.choice(NAMES) for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 18]))],
        "separator": lambda: rng.choice([";", "", "-", "é", None, "::"]),
        "regex": lambda: rng.choice(BROKEN if rng.random() < 0.03 else EXPRESSIONS),
        "target_label": lambda: rng.choice(TEMPLATES if rng.random() < 0.3 else NAMES),
        "replacement": lambda: rng.choice(TEMPLATES),
        "modulus": lambda: rng.choice([1, 2, 7, 16, 1000, 2**63, 2**64 - 1, 0, -1, 4.0, 4.5, "4", None, True]),
    }
    for name in fields:
        if name in needed or rng.random() < 0.75:
            base[name] = choices[name]()
    if rng.random() < 0.01:
        base["colour"] = "red"
    return None if rng.random() < 0.003 else base


def labels(rng: random.Random) -> dict[str, str]:
    chosen = {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.choice([0, 1, 3, 6, 9]))}
    return chosen if rng.random() < 0.1 else {"__name__": rng.choice(["DCGM_FI_DEV_GPU_UTIL", "a_x", "up"]), **chosen}


def question_of(seed: int) -> Question:
    rng = random.Random(seed)
    rules = [rule(rng) for _ in range(rng.choice([0, 1, 1, 2, 3, 6]))]
    style = rng.choice([None, False, True])
    text = yaml.dump(rules, Dumper=yaml.CSafeDumper, allow_unicode=True, sort_keys=False, default_flow_style=style)
    return {
        "configs": text,
        "scheme": rng.choice(["utf8", "utf8", "legacy"]),
        "labels": [labels(rng) for _ in range(4)],
    }


def reference_answers(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prometheus's answers."""
    lines = "".join([json.dumps(question) + "\n" for question in questions])
    done = subprocess.run([find_relabel()], input=lines, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def find_relabel() -> Path:
    """The program that asks Prometheus's package; raises Missing."""
    path = shutil.which(str(real_dir() / RELABEL / "relabel"))
    if not path:
        raise Missing(f"no relabel in {real_dir() / RELABEL}: run `make real-servers`")
    return Path(path)


def our_answer(question: Mapping[str, Any]) -> list[dict[str, str] | None] | str:
    """What this says: other labels, or why the rules can't be used."""
    scheme: Scheme = question["scheme"]
    text = question["configs"]
    under = f"metric_name_validation_scheme: {scheme}\nmetric_relabel_configs:\n" + "".join(
        [f"  {line}\n" for line in text.splitlines()]
    )
    try:
        rules = load(text if scheme == "utf8" else under, "rules.yml").rules
    except BadRules as bad:
        return str(bad)
    return [relabelled(rules, labels) for labels in question["labels"]]


def test_thousands_of_random_rules_make_of_random_labels_what_prometheus_makes_of_them() -> None:
    need(find_relabel)
    questions = [question_of(seed) for seed in range(CASES)]
    applied = 0
    for question, reference in zip(questions, reference_answers(questions), strict=True):
        our_result = our_answer(question)
        if isinstance(our_result, str):
            assert reference.get("error"), (question, our_result)
            continue
        assert "error" not in reference, (question, reference)
        assert our_result == reference["results"], question
        applied += our_result != question["labels"]
    assert applied > CASES / 4, "the cases have to do something"


def test_every_letter_has_the_same_other_case() -> None:
    """But for letters that this Python's Unicode does not have yet."""
    need(find_relabel)
    assigned = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) not in ("Cs", "Cn")]
    ((answer),) = reference_answers([{"texts": assigned}])
    assert [[lowercase(letter), uppercase(letter)] for letter in assigned] == answer["cases"]
