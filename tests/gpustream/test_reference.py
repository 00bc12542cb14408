"""The generated pages say what the code does."""

import click

from gpustream import acls, reference
from gpustream.cli import commands
from topics.reference import stale


def test_the_pages_are_fresh() -> None:
    assert stale(reference.files()) == []


def test_every_option_of_every_command_is_in_the_page() -> None:
    text = reference.options_markdown()
    of_all = text.split("## How Kafka is reached\n")[1].split("\n## ")[0]
    for path, command in commands():
        section = text.split(f"## {' '.join(path)}\n")[1].split("\n## ")[0]
        section += of_all if "`--kafka " in section else ""
        for param in command.params:
            if isinstance(param, click.Option):
                assert f"`{param.opts[0]}" in section
                assert f"`{param.envvar}`" in section


def test_every_command_that_reaches_a_broker_has_its_rights_listed_but_run_which_does_what_its_parts_do() -> None:
    reaching = {
        " ".join(path[1:]) for path, command in commands() if any("--kafka" in param.opts for param in command.params)
    }

    assert reaching - {"run"} == set(acls.of_commands())


def test_every_metric_is_listed_once_under_our_prefix() -> None:
    names = [row.name for _, rows in reference.sections() for row in rows]

    assert len(names) == len(set(names))
    assert {name.split("_")[0] for name in names} == {"gpustream"}


def test_the_metrics_of_all_producers_are_in_a_section_of_their_own() -> None:
    of = {row.name: package for package, rows in reference.sections() for row in rows}

    assert of["gpustream_producer_ticks_dropped_total"] == "producers"
    assert len({package for package, _ in reference.sections()}) == len(list(reference.sections()))


def test_an_option_with_a_default_shows_it_whatever_its_type() -> None:
    compare = reference.options_markdown().split("## gpustream compare\n")[1]

    assert "| `--tolerance FLOAT` | `GPUSTREAM_TOLERANCE` | `0.02` |" in compare


def test_an_argument_is_in_brackets_if_it_may_be_left_out() -> None:
    text = reference.options_markdown()

    assert "\ngpustream rules check FILE [OPTIONS]\n" in text
    assert "\ngpustream rules show [FILE] [OPTIONS]\n" in text


def test_counters_end_in_total_and_nothing_else_does() -> None:
    rows = [row for _, rows in reference.sections() for row in rows]

    assert [row.name for row in rows if (row.kind == "counter") != row.name.endswith("_total")] == []
    assert [row.name for row in rows if not row.help.endswith(".")] == []
