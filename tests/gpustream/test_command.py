"""All configuration is checked at the start, and one message lists every error."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner, Result

from delivery.settings import DURATION, HEADER, ComponentSpec, KafkaSettings, Option
from delivery.values import Address
from gpustream import command
from gpustream.cli import main
from gpustream.command import Argument, Command, ProcessSettings, options
from gpustream.output import failed, show
from gpustream.serve import Component
from sinks import SINKS
from tests.gpustream.fakes import FakeSettings


@dataclass(frozen=True, kw_only=True)
class ThingSettings(KafkaSettings):
    """A thing's."""

    interval_s: Annotated[float, Option("--interval", DURATION, "How often.")] = 1.0
    headers: Annotated[tuple[tuple[str, str], ...], Option("--header", HEADER, "Sent.", repeatable=True)] = ()
    flag: Annotated[bool, Option("--flag", None, "Whether.")] = False


def _together(values: dict[str, Any]) -> list[str]:
    record = ThingSettings(**{field.name: values[field.name] for field in dataclasses.fields(ThingSettings)})
    return record.errors() + (["--interval must be at least 1 s"] if values["interval_s"] < 1 else [])


@click.command(cls=Command, check=_together, example="gpustream thing --kafka 127.0.0.1:9092")
@options(ThingSettings, ProcessSettings)
def thing(**values: Any) -> None:
    """A thing to run."""
    click.echo(repr(values))


def _run(*args: str, **env: str) -> Result:
    return CliRunner().invoke(thing, list(args), env={"GPUSTREAM_KAFKA": "127.0.0.1:9092", **env}, prog_name="thing")


def test_every_error_is_listed_in_one_message_with_exit_code_2() -> None:
    result = _run("--kafka", "nope", "--lisen", "off", "--cluster", GPUSTREAM_INTERVAL="soon")

    assert result.exit_code == 2
    assert "4 mistakes" in result.stderr
    for part in ("'--cluster' requires an argument", "'nope' is not HOST:PORT", "'soon' is not a duration"):
        assert part in result.stderr
    assert "No such option '--lisen'. Did you mean --listen?" in result.stderr


def test_an_error_in_the_environment_names_the_variable() -> None:
    result = _run(GPUSTREAM_LOG_FORMAT="xml")

    assert result.exit_code == 2
    assert "GPUSTREAM_LOG_FORMAT" in result.stderr


def test_an_error_names_a_misspelt_variable_that_was_not_read() -> None:
    result = _run(GPUSTREAM_KAFKA="", GPUSTREAM_KAKFA="127.0.0.1:9092", GPUSTREAM_REAL_DIR="/")

    assert result.exit_code == 2
    assert "2 mistakes" in result.stderr
    assert "GPUSTREAM_KAKFA is no variable of this command. Did you mean GPUSTREAM_KAFKA?" in result.stderr


def test_one_error_is_one_sentence() -> None:
    result = _run("--interval", "soon")

    assert "mistakes" not in result.stderr
    assert "Error: Invalid value for '--interval'" in result.stderr


def test_what_is_wrong_together_is_reported_with_the_rest() -> None:
    result = _run("--interval", "100ms", "--listen", "nowhere")

    assert "2 mistakes" in result.stderr
    assert "--interval must be at least 1 s" in result.stderr


def test_an_option_without_its_value_is_one_mistake() -> None:
    result = _run("--kafka", GPUSTREAM_KAFKA="")
    required = CliRunner().invoke(main, ["sink", "remote-write", "--kafka", "kafka-0:9092", "--url"])

    assert "Error: Option '--kafka' requires an argument." in result.stderr
    assert "Error: Option '--url' requires an argument." in required.stderr


def test_a_missing_option_does_not_hide_other_errors() -> None:
    result = _run("--interval", "soon", GPUSTREAM_KAFKA="")

    assert "--kafka: missing" in result.stderr
    assert "'soon' is not a duration" in result.stderr


def test_surplus_arguments_are_errors() -> None:
    result = _run("one", "two", "--flag=yes")

    assert "3 mistakes" in result.stderr
    assert "Got an unexpected argument 'two'" in result.stderr


@click.command(cls=Command)
@click.argument("path", cls=Argument)
def reading(path: str) -> None:
    """A command that reads a file."""
    click.echo(path)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("--no-such", "--no-such"),
        ("--no-such=1", "--no-such"),
        ("-x", "-x"),
        ("-path", "-path"),
        ("-hx=1", "-hx"),
    ],
)
@pytest.mark.parametrize("others", [["rules.toml"], []])
def test_an_unknown_option_is_not_taken_for_an_argument(written: str, said: str, others: list[str]) -> None:
    result = CliRunner().invoke(reading, [written, *others])

    assert result.exit_code == 2
    assert f"No such option '{said}'." in result.stderr
    assert "unexpected" not in result.stderr


def test_an_argument_may_begin_with_a_hyphen_after_two_of_them() -> None:
    assert CliRunner().invoke(reading, ["--", "--no-such"]).stdout == "--no-such\n"
    assert CliRunner().invoke(reading, ["-"]).stdout == "-\n"


def test_help_wins_over_errors() -> None:
    result = _run("--help", "--kafka", "nope", "--lisen")

    assert result.exit_code == 0


@pytest.mark.parametrize("part", ["GPUSTREAM_INTERVAL", "default: 1s", "gpustream thing --kafka", "A thing to run."])
def test_help_teaches(part: str) -> None:
    assert part in " ".join(_run("--help").output.split())


def test_a_variable_sets_its_option() -> None:
    result = _run(GPUSTREAM_INTERVAL="1500ms", GPUSTREAM_LISTEN="off")

    assert "'interval_s': 1.5" in result.output
    assert "'listen': None" in result.output


def test_an_argument_wins_over_its_variable() -> None:
    assert "'interval_s': 2.0" in _run("--interval", "2s", GPUSTREAM_INTERVAL="500ms").output


def test_a_repeatable_option_takes_a_line_each_from_its_variable() -> None:
    result = _run(GPUSTREAM_HEADER="A: b c\nD: e")

    assert "'headers': (('A', 'b c'), ('D', 'e'))" in result.output


# -- settings and components, from what was given


FAKE = ComponentSpec(
    "tests.gpustream.fakes:FakeComponent", "tests.gpustream.fakes:FakeSettings", "A fake.", "gpustream"
)


def test_settings_take_what_was_given_for_their_fields() -> None:
    values = {"kafka": "a:1", "cluster": "c", "grace_s": 3.0, "instance_id": "x-0", "log_format": "text"}

    assert command.settings(FAKE, values) == FakeSettings("a:1", "c", grace_s=3.0, instance_id="x-0")


def test_what_was_not_given_has_its_default() -> None:
    assert command.settings(FAKE, {"kafka": "a:1", "cluster": "c"}) == FakeSettings("a:1", "c")


def test_off_is_given_to_a_field_that_may_be_none() -> None:
    scrape = SINKS["scrape"]

    assert command.settings(scrape, {"kafka": "a:1", "scrape_listen": None}).scrape_listen is None
    assert command.settings(scrape, {"kafka": "a:1"}).scrape_listen == Address("127.0.0.1", 9400)


def test_a_component_says_what_is_wrong_with_its_settings() -> None:
    values = {"kafka": "a:1", "cluster": "c", "grace_s": 100.0}

    assert command.errors(FAKE, values) == ["--grace must be below 100 s"]


def test_a_component_is_made_with_its_settings() -> None:
    fake = command.component(FAKE, {"kafka": "a:1", "cluster": "c"})

    assert isinstance(fake, Component)
    assert fake.settings == FakeSettings("a:1", "c")  # type: ignore[attr-defined] # of the fake


def test_what_a_server_answers_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(("name",), [("a\x1b[2Jb\n",)])
    failed("it answers \x1b]0;title\x07\nsecond line")

    assert capsys.readouterr() == ("name\na?[2Jb?\n", "it answers ?]0;title?\nsecond line\n")


@pytest.mark.parametrize(
    "args",
    [
        ["sink", "alertmanager", "--kafka", "k:9092", "--url", "https://me:hunter2@alerts:9093/api/v2/alerts"],
        ["sink", "alertmanager", "--kafka", "k:9092", *["--url", "https://me:hunter2@alerts:9093/?a=b"] * 2],
        ["topics", "list", "--kafka", "sasl://me:hunter2@kafka:9092"],
        ["topics", "list", "--kafka", "me:hunter2@kafka:9092"],
    ],
)
def test_an_error_of_the_command_line_repeats_no_password(args: list[str]) -> None:
    result = CliRunner().invoke(main, args)

    assert result.exit_code == 2
    assert "***@" in result.output
    assert "hunter2" not in result.output
