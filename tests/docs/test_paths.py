"""The pages for contributors name files that are there."""

import re
import shlex
from collections.abc import Callable, Iterable

import click
import pytest

from docs import flow
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS
from tests.command_line import parsed
from tests.docs.page import ROOT
from tests.docs.test_migrate import OPTIONS
from topics.reference import stale

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/architecture.md",
    "docs/guarantees.md",
    "docs/glossary.md",
)
FOLDERS = "gpustream|producers|topics|delivery|streams|sinks|tests|docs|k8s"
NAMED = (
    rf"`((?:{FOLDERS})/[\w./*-]+|\.ci/run|\.pre-commit-config\.yaml"
    r"|[\w./-]+\.(?:py|toml|lock|md|yml|c|csv))`"
)


EVERY_PAGE = (
    *PAGES[:3],
    *(str(page.relative_to(ROOT)) for folder in ("docs", "k8s") for page in sorted((ROOT / folder).rglob("*.md"))),
)
OF_OTHERS = {
    "--ca-dir",  # KEDA's
    "--event-ttl",  # the API server's
    "--gpu-memory-utilization",  # vLLM's
    "--kubernetes-virtual-gpus",  # dcgm-exporter's
    "--metric-labels-allowlist",  # kube-state-metrics's
    "--tsdb",  # Prometheus's
    "--web",
    "--help",
    "--reset-then-reuse-values",  # Helm's
    "--reuse-values",
    "--set",
    "--force-conflicts",
    "--wait",
    "--atomic",
    "--rollback-on-failure",
    "--kube-version",
    "--build-arg",  # Docker's
    "--command-config",  # Kafka's
    "--resource-pattern-type",
    "--cascade",  # kubectl's
    "--hot",  # of benchmarks
    "--sink",
}


def pages_with(wrong: Callable[[str], Iterable[str]], pages: Iterable[str] = EVERY_PAGE) -> dict[str, list[str]]:
    """What is wrong with the text of each page, without the pages of which nothing is."""
    found = {page: sorted(wrong((ROOT / page).read_text())) for page in pages}
    return {page: mistakes for page, mistakes in found.items() if mistakes}


def test_every_option_that_a_page_names_is_there() -> None:
    pages = [page for page in EVERY_PAGE if not re.search("decisions/|migrate/", page)]
    assert pages_with(unknown_options, pages) == {}


def unknown_options(page: str) -> set[str]:
    """The options in the text of a page that no command of ours has, nor one of others."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    codes = re.findall(r"`((?:--|gpustream |produce |stream |sink )[^`]*)`", text)
    named = {option for code in codes for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)}
    return named - OPTIONS - OF_OTHERS


def test_every_command_of_a_page_is_right_but_for_files_and_gpus_that_are_not_here() -> None:
    assert pages_with(wrong_commands, [page for page in EVERY_PAGE if page != "docs/reference/options.md"]) == {}


def wrong_commands(page: str) -> list[str]:
    """What is wrong with the command lines in the text of a page."""
    text = page.replace("\\\n", " ")
    shell = "".join(re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL))
    wrong = []
    for line in re.findall(r"^ *(?:kubectl .* -- |\.venv/bin/)?gpustream (.+)$", shell, re.MULTILINE):
        given = re.sub(r'"?\$\w+"?|HOST:PORT', "kafka-0:9092", line.replace("$URL", "http://receiver"))
        try:
            parsed(shlex.split(given, comments=True))
        except click.UsageError as error:
            mistakes = error.message.splitlines()
            wrong += [mistake for mistake in mistakes if not re.search(r"not exist|no NVIDIA|^\d mistakes:", mistake)]
    return wrong


def test_no_page_installs_gpustream_from_an_index_which_does_not_have_it() -> None:
    """With an extra, as in ``gpustream[parquet]``, pip takes the one that is installed."""
    assert pages_with(re.compile(r"pip install gpustream\b(?!\[)").findall) == {}


def test_a_kcat_command_says_that_it_reads_since_without_a_terminal_it_would_write() -> None:
    assert pages_with(kcat_commands_that_may_write) == {}


def kcat_commands_that_may_write(page: str) -> list[str]:
    """The kcat commands in the text of a page that have neither -C nor -L."""
    commands = re.findall(r"kcat -.*?(?=[`|>\n])", page)
    return [command for command in commands if not re.search(" -[CL]\\b", command)]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    """A name without its folder is in the folder of the last one before it. NAME stands for one of the reader's."""
    missing, folder, text = [], ROOT, (ROOT / page).read_text()
    named = [name.rstrip("/") for name in re.findall(NAMED, text) if "NAME" not in name]
    assert len(named) > 3 or page != "CONTRIBUTING.md"
    for name in named:
        if not (list(ROOT.glob(name)) or (folder / name).exists()):
            missing.append(name)
        elif "/" in name and "*" not in name:
            folder = (ROOT / name).parent
    assert missing == []


def test_the_picture_has_every_component_and_is_fresh() -> None:
    assert stale({flow.PATH: flow.svg()}) == []
    assert all(f">{name}</text>" in flow.svg() for name in (*PRODUCERS, *STREAMS, *SINKS))
