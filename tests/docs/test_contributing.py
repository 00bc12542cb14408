"""What contributors read is true: files, targets, options and links are there, and the examples are taken."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from producers.node.nvml import table
from tests.docs.page import ROOT
from topics import metric

PAGES = ("CONTRIBUTING.md", "SECURITY.md", "docs/decisions/README.md")
CONTRIBUTING, SECURITY, DECISIONS = ((ROOT / page).read_text() for page in PAGES)
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]

    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_decision_is_in_the_index_once_by_its_title() -> None:
    notes = [path for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md"]
    titles = {path.name: path.read_text().partition("\n")[0].removeprefix("# ") for path in notes}
    listed = [(name, title) for title, name in re.findall(r"^- \[(.+)\]\((\S+\.md)\)", DECISIONS, re.MULTILINE)]

    assert sorted(listed) == sorted(titles.items())


def test_every_target_is_explained_and_no_other() -> None:
    explained = re.findall(r"^\| `make ([\w-]+)` \|", CONTRIBUTING, re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)

    assert sorted([*explained, "help"]) == sorted(targets)
    assert set(re.findall(r"^make ([\w-]+)", CONTRIBUTING, re.MULTILINE)) <= set(targets)


def test_a_folder_may_have_a_space_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    folder.joinpath("Makefile").write_text(MAKEFILE)
    command = ["make", "--no-print-directory", "--dry-run", "--assume-old=install", "test"]
    (line,) = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()

    assert f"PYTHONPYCACHEPREFIX={folder}/.venv/pycache" in shlex.split(line)


def test_make_format_formats_what_lint_complains_of(tmp_path: Path) -> None:
    tmp_path.joinpath("Makefile").write_text(MAKEFILE)
    tmp_path.joinpath("ruff.toml").write_text('lint.select = ["E501"]\n')
    tmp_path.joinpath("long.py").write_text(f"numbers = [{', '.join(['1234567'] * 20)}]\n")
    variables = [f"BIN={Path(sys.executable).parent}", "GENERATORS="]
    subprocess.run(["make", "--assume-old=install", "format", *variables], cwd=tmp_path, check=True)

    assert max(map(len, tmp_path.joinpath("long.py").read_text().splitlines())) < 20


def test_the_example_of_a_metric_is_two_rows_that_fit_each_other() -> None:
    first, second = re.findall(r"^ *```python\n(.*?)^ *```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    row = eval(first.strip(), vars(metric))  # noqa: S307 - the rows of our own page
    source = eval(second.strip(), vars(table))  # noqa: S307 - likewise

    assert isinstance(row, metric.Metric)
    assert row.key == source.key
    assert source.sources[0].question.name in row.nvml


def test_the_test_that_it_names_is_there() -> None:
    for name, path in re.findall(r"`(test_\w+)` in\s+`([\w/.]+)`", CONTRIBUTING):
        assert f"def {name}(" in (ROOT / path).read_text()


def test_every_option_that_is_named_is_one() -> None:
    options = (ROOT / "docs" / "reference" / "options.md").read_text()

    assert [name for name in re.findall(r"`(--[\w-]+)`", SECURITY) if f"| `{name}" not in options] == []


def test_security_names_all_that_the_cluster_producer_lists() -> None:
    role = yaml.safe_load((ROOT / "k8s" / "base" / "cluster" / "clusterrole.yaml").read_text())
    listed = {resource for rule in role["rules"] if "list" in rule["verbs"] for resource in rule["resources"]}
    (row,) = [line for line in SECURITY.splitlines() if line.startswith("| `produce cluster` ")]
    named = row.split("|")[2].partition("(`list`")[0].replace(" and ", ", ").split(",")

    assert {name.replace(" ", "") for name in named} == listed


def test_the_hooks_run_the_linter_and_every_generator_of_make() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (wildcard,) = re.findall(r"^GENERATORS :=.*\$\(wildcard ([^)]*)\)", MAKEFILE, re.MULTILINE)
    generators = [str(Path(path).with_suffix("")).replace("/", ".") for path in wildcard.split()]

    assert [hook["entry"] for hook in local["hooks"]] == [
        ".venv/bin/ruff check --force-exclude",
        ".venv/bin/ruff format --check --force-exclude",
        *(f".venv/bin/python -m {generator} --check" for generator in generators),
    ]
