"""The pages for those who come from another exporter name options, values and metrics that are there."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from gpustream.cli import commands
from sinks.series.relabel import relabelled
from sinks.series.relabel_file import load
from tests.command_line import parsed
from tests.docs.page import ROOT, blocks
from topics.profiles import PROFILES, Profile

PAGES = sorted((ROOT / "docs" / "how-to" / "migrate").glob("*.md"))
OPTIONS = {
    option
    for _, command in commands()
    for param in command.params
    if isinstance(param, click.Option)
    for option in param.opts
}


def ours(page: Path) -> str:
    """What a page says of gpustream: without the first column of its tables, which is the other exporter's."""
    return re.sub(r"^\|[^|]*\|", "|", page.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "names.md"], ids=lambda page: page.stem)
def test_every_option_and_profile_that_a_page_names_is_there(page: Path) -> None:
    text = ours(page)

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {
        "--replicas",
        "--selector",
        "--config-file",
        "--from-file",
    }
    profiles = {name for many in re.findall(r"--names ([\w.,-]+\w)", text) for name in many.split(",")}

    assert named - OPTIONS == set()
    assert profiles - set(PROFILES) == set()


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_the_page_of_names_has_every_name_of_a_profile(profile: Profile) -> None:
    page = (ROOT / "docs" / "how-to" / "migrate" / "names.md").read_text()
    names = {series.name for many in profile.series.values() for series in many}

    assert names - set(re.findall(r"`(\w+)[`{]", page)) == set()


def test_a_comparison_of_one_node_picks_the_node_on_both_sides() -> None:
    """With one side alone, the series of all other nodes are taken for the other side's."""
    lines = [" ".join(block.text.replace("\\\n", " ").split()) for block in blocks("how-to/migrate/README.md", "sh")]
    (line,) = [line for line in lines if "--theirs" in line]

    assert line in " ".join((ROOT / "docs" / "reference" / "options.md").read_text().split())
    params = parsed(shlex.split(line)[1:]).params
    assert 'ostname="gpu-node-1"' in params["theirs"]
    assert 'ostname="gpu-node-1"' in params["ours"]


def test_the_rule_for_a_models_name_replaces_one_blank_each_time_that_it_is_given() -> None:
    text = (ROOT / "docs" / "how-to" / "migrate" / "dcgm-exporter.md").read_text()
    (found,) = re.findall(r"`(regex: [^`]+)` and `(replacement: [^`]+)` replace one blank", text)
    rule = "- source_labels: [modelName]\n  target_label: modelName\n  " + "\n  ".join(found) + "\n"
    labels = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "modelName": "NVIDIA H100 80GB HBM3"}

    names = [relabelled(load(rule * times, "rules.yml").rules, labels) for times in (1, 3, 4)]

    assert [name and name["modelName"] for name in names] == ["NVIDIA H100 80GB-HBM3", *["NVIDIA-H100-80GB-HBM3"] * 2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", ["dcgm-exporter", "l9gpu", "pod-devices-exporter"])
def test_every_value_of_the_chart_that_a_page_names_is_there(page: str) -> None:
    chart = yaml.safe_load((ROOT / "k8s" / "helm" / "gpustream" / "values.yaml").read_text())
    text = ours(ROOT / "docs" / "how-to" / "migrate" / f"{page}.md")
    roots = "|".join(name for name in chart if name != "image")
    named = re.findall(rf"`((?:image|{roots})\.[\w.]+)`", text)

    assert named
    for name in named:
        root, *rest = name.split(".")
        options = {**chart["defaults"], **chart[root]} if "options" in chart[root] else chart[root]
        assert rest[0] in options, name


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_every_label_of_a_profile_is_on_the_page_of_names(profile: Profile) -> None:
    text = (ROOT / "docs" / "how-to" / "migrate" / "names.md").read_text()
    labels = profile.labels

    assert [label for label, _ in (*labels.device, *labels.holder) if f"| `{label}` |" not in text] == []
