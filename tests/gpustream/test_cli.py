"""The command line as a whole."""

import inspect
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest
from click.testing import CliRunner, Result

from delivery import settings
from delivery.settings import ComponentSpec
from gpustream import command
from gpustream.cli import COMMANDS as LISTED
from gpustream.cli import commands, main
from gpustream.reference import options_markdown
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS

EVERYWHERE = {"kafka", "cluster", "listen", "log_format"}


def _invoke(*args: str, **env: str) -> Result:
    return CliRunner().invoke(main, list(args), env=env)


COMMANDS = dict(commands(path=()))


def test_every_option_has_its_one_variable_and_a_help_text() -> None:
    for path, found in COMMANDS.items():
        for param in found.params:
            if isinstance(param, click.Option):
                assert param.envvar == command.envvar(param.opts[0]), path
                assert param.help, (path, param.opts)


def test_what_is_not_given_is_a_value_that_each_option_takes() -> None:
    for found in COMMANDS.values():
        context = click.Context(found)
        for option in found.params:
            if not option.required:
                option.process_value(context, option.get_default(context))


@cache
def _help(*path: str) -> Result:
    return _invoke(*path, "--help")


@pytest.mark.parametrize("path", [(), *COMMANDS], ids=" ".join)
def test_help_breaks_no_line_after_a_hyphen(path: tuple[str, ...]) -> None:
    """An option or a group that is cut in two is neither found nor copied."""
    assert not re.search(r"\w-$", _help(*path).output, re.MULTILINE)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_an_example_that_the_command_takes(path: tuple[str, ...]) -> None:
    result = _help(*path)

    example = result.output.split("Example:")[1].split()
    options = {name for param in COMMANDS[path].params for name in param.opts}
    assert result.exit_code == 0
    assert example[: 1 + len(path)] == ["gpustream", *path]
    assert {word for word in example if word.startswith("--")} <= options


def test_a_command_takes_what_its_options_of_kafka_make_of_it() -> None:
    for path, found in COMMANDS.items():
        callback = inspect.unwrap(found.callback or pytest.fail(f"{path} does nothing"))
        parameters = inspect.signature(callback).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        has_kafka = any("--kafka" in param.opts for param in found.params)
        assert takes_any or ("connection" in {parameter.name for parameter in parameters}) == has_kafka, path


@pytest.mark.parametrize(("group", "registry"), [("produce", PRODUCERS), ("sink", SINKS), ("stream", STREAMS)])
def test_every_option_of_a_component_is_its_command_s(group: str, registry: dict[str, ComponentSpec]) -> None:
    for name, row in registry.items():
        path = (group, name)
        options = {param.name for param in COMMANDS[path].params if isinstance(param, click.Option)}
        fields = {field.name for field in settings.fields(resolve_name(row.settings))}

        assert fields | EVERYWHERE == options


def test_every_error_of_a_file_of_rules_is_named_before_the_stream_starts(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[rules.GPUHeldIdle]\nfor = "soon"\nseverity = "bad"\n')
    result = _invoke("stream", "alerts", "--kafka", "127.0.0.1:1", "--rules", str(rules))

    assert result.exit_code == 2
    assert "2 mistakes" in result.stderr
    assert "rules.toml:2" in result.stderr
    assert "rules.toml:3" in result.stderr


REQUIRED = {
    path: names
    for path, found in COMMANDS.items()
    if (names := [param.opts[0] for param in found.params if param.required and isinstance(param, click.Option)])
}


@pytest.mark.parametrize("path", REQUIRED, ids=" ".join)
def test_every_required_option_that_is_missing_is_named(path: tuple[str, ...]) -> None:
    result = _invoke(*path)

    assert result.exit_code == 2
    assert [name for name in REQUIRED[path] if f"Missing option '{name}'" not in result.stderr] == []


def test_a_component_s_own_errors_are_listed_with_the_others() -> None:
    result = _invoke(
        "sink", "remote-write", "--kafka", "nope", "--url", "http://127.0.0.1:1/", "--basic-auth-user", "me"
    )

    assert result.exit_code == 2
    assert "2 mistakes" in result.stderr
    assert "--basic-auth-password-file" in result.stderr


def test_several_alertmanagers_are_in_one_variable() -> None:
    two_servers = _invoke(
        "sink", "alertmanager", "--kafka", "k:1", GPUSTREAM_URL="http://a:1  http://b:1/api/v2/alerts"
    )
    twice = _invoke("sink", "alertmanager", "--kafka", "k:1", GPUSTREAM_URL="http://a:1 http://a:1/")

    assert (two_servers.exit_code, twice.exit_code) == (2, 2)
    assert "--url: 'http://b:1/api/v2/alerts': without /api/v2/alerts" in two_servers.stderr
    assert "--url: 'http://a:1' is given twice" in twice.stderr


def test_a_webhook_is_signed_or_said_to_be_unsigned() -> None:
    result = _invoke("sink", "webhook", "--kafka", "k:1", "--url", "http://a:1")

    assert result.exit_code == 2
    assert "--secret-file: missing; or say --unsigned" in result.stderr


def test_an_unknown_stream_is_an_error() -> None:
    result = _invoke("stream", "nonsense", "--kafka", "127.0.0.1:1")

    assert result.exit_code == 2
    assert "No such command 'nonsense'. The commands are: alerts, attribution, usage." in result.stderr


@pytest.mark.parametrize(("group", "registry"), [("produce", PRODUCERS), ("sink", SINKS), ("stream", STREAMS)])
def test_a_group_without_a_name_lists_what_there_is_with_a_line_each(
    group: str, registry: dict[str, ComponentSpec]
) -> None:
    result = _invoke(group)

    lines = [line.split() for line in result.stderr.partition("Commands:\n")[2].splitlines()]
    assert result.exit_code == 2
    assert [line[0] for line in lines] == sorted(registry)
    assert all(len(line) > 3 for line in lines)


@pytest.mark.parametrize(
    ("typed", "intended"),
    [
        (["strem"], "stream"),
        (["sink", "remotewrite"], "remote-write"),
        (["topics", "lst"], "list"),
        (["rules", "tset"], "test"),
        (["--verison"], "--version"),
        (["sink", "scrape", "--kafk", "k:1"], "--kafka"),
        (["devices", "--formt=json"], "--format"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_that_was_meant(typed: list[str], intended: str) -> None:
    result = _invoke(*typed)

    assert result.exit_code == 2
    assert f"Did you mean {intended}?" in result.stderr


def test_an_option_before_the_command_is_answered_with_the_commands() -> None:
    result = _invoke("stream", "--kafka", "k:1", "alerts")

    assert result.exit_code == 2
    assert "No such option '--kafka' before a command. The commands are: alerts, attribution, usage." in result.stderr


@pytest.mark.parametrize("path", [(), ("sink",), *COMMANDS], ids=" ".join)
def test_h_is_help(path: tuple[str, ...]) -> None:
    assert _invoke(*path, "-h").output == _help(*path).output


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("gpustream st", "plain,stream"),
        ("gpustream stream al", "plain,alerts"),
        ("gpustream sink scrape --scrape-l", "plain,--scrape-listen"),
        ("gpustream sink scrape --log-format js", "plain,json"),
    ],
)
def test_the_shell_completes_commands_options_and_words(typed: str, completed: str) -> None:
    completion = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(main, prog_name="gpustream", env={"_GPUSTREAM_COMPLETE": "bash_complete", **completion})

    assert result.output.splitlines() == [completed]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_of_the_docs_makes_a_shell_complete(shell: str) -> None:
    line = f"_GPUSTREAM_COMPLETE={shell}_source gpustream"
    result = CliRunner().invoke(main, prog_name="gpustream", env={"_GPUSTREAM_COMPLETE": f"{shell}_source"})

    assert line in options_markdown()
    assert "_GPUSTREAM_COMPLETE" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("foreign", ["{}/__init__.py", "{}/notes.txt", "{}.py"])
@pytest.mark.parametrize("by_path", [False, True], ids=["python -m", "the command, by PYTHONPATH"])
def test_folders_of_other_programs_with_the_names_of_its_packages_are_not_in_its_way(
    tmp_path: Path, foreign: str, by_path: bool
) -> None:
    for package in ("delivery", "producers", "sinks", "streams", "topics"):
        path = tmp_path / foreign.format(package)
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit(3)")
    start = [str(Path(sys.executable).parent / "gpustream")] if by_path else [sys.executable, "-m", "gpustream"]
    env = {**os.environ, **({"PYTHONPATH": str(tmp_path)} if by_path else {})}
    result = subprocess.run(
        [*start, "run", "--help"], cwd=tmp_path, env=env, check=False, capture_output=True, text=True
    )

    assert (result.returncode, result.stderr) == (0, "")


def test_run_without_a_fleet_or_a_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpustream.run.driver_is_here", lambda: False)
    result = _invoke("run")

    assert result.exit_code == 2
    assert "--simulate 4x8" in result.stderr


def test_what_a_list_says_of_a_command_is_how_its_own_help_begins() -> None:
    for name, entry in LISTED.items():
        help_ = " ".join((entry.load().help or "").split())
        assert help_.startswith(" ".join(entry.help.split())), name


def test_the_version_is_the_package_s() -> None:
    assert _invoke("--version").output == "gpustream, version 0.1.0\n"


def _loaded(*args: str) -> set[str]:
    """The modules, and their packages, that are loaded once the command has given its help."""
    code = (
        f"import sys; from gpustream.cli import main; main({[*args, '--help']!r}, standalone_mode=False);"
        "print(*{name.partition('.')[0] for name in sys.modules}, *sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(result.stdout.split())


def test_help_loads_no_command_and_nothing_heavy() -> None:
    loaded = _loaded()

    assert "gpustream.cli" in loaded
    assert loaded & {"faust", "aiokafka", "rich", "asyncio", "msgspec", "prometheus_client"} == set()
    assert loaded & {f"gpustream.{name}" for name in LISTED} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [("produce", "node"), ("produce", "simulated"), ("stream", "alerts"), ("sink", "remote-write")]
)
def test_the_help_of_a_component_loads_its_settings_and_no_component(path: tuple[str, ...]) -> None:
    assert _loaded(*path) & {"faust", "aiokafka", "rich", "aiohttp", "pynvml"} == set()


def test_it_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "gpustream", "--help"], check=True, capture_output=True, text=True)

    assert "Usage: gpustream" in result.stdout


@pytest.mark.slow
def test_ctrl_c_while_it_loads_is_no_traceback() -> None:
    interrupted = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
sys.meta_path.insert(0, Interrupt())
runpy.run_module("gpustream", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_process_of_a_container_ends_by_a_signal_while_it_loads(number: signal.Signals) -> None:
    first = f"""
import os, runpy, signal, sys
class Signal:
    def find_spec(self, name, *_):
        if name == "click":
            signal.raise_signal({number:d})
os.getpid = lambda: 1
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Signal())
runpy.run_module("gpustream", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, check=False)

    # a negative one would say that it was left to the kernel, which does nothing to the first process
    assert (result.returncode, result.stdout, result.stderr) == (128 + number, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["rules", "show"], ["--version"], ["produce", "node", "--help"]], ids=" ".join)
def test_a_full_disk_is_an_error_of_one_line(arguments: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "gpustream", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert (result.returncode, result.stderr) == (1, "gpustream: can't write: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "latin-1:surrogateescape"])  # the second as in the locale POSIX
def test_what_the_encoding_of_the_output_lacks_is_a_question_mark(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "r…gles.toml").write_text("")
    command = [sys.executable, "-m", "gpustream", "rules", "check", str(tmp_path / "r…gles.toml")]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run(command, env=environment, capture_output=True, check=False)

    assert (result.returncode, result.stderr) == (0, b"")
    assert b"/r?gles.toml: no mistakes" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0, 2), (0, 1, 2)], ids=str)
def test_it_works_without_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Whoever starts a process may have closed them."""
    summary = tmp_path / "summary.json"
    ports = ["--scrape-listen", "127.0.0.1:0", "--page-listen", "127.0.0.1:0", "--listen", "off"]
    run = [sys.executable, "-m", "gpustream", "run", "--simulate", "1x1", *ports, "--duration", "1s"]
    run += ["--summary", "json"]
    closing = " ".join(f"{number}>&-" for number in closed)
    redirected = "" if 1 in closed else f'>"{summary}"'
    result = subprocess.run(["sh", "-c", f'exec "$@" {redirected} {closing}', "sh", *run], check=False)

    assert result.returncode == 0
    assert 1 in closed or '"lost":0' in summary.read_text()


def test_every_command_that_reaches_kafka_does_so_in_the_same_ways() -> None:
    names = {path: {param.name for param in found.params} for path, found in COMMANDS.items()}

    assert [path for path in names if "kafka" in names[path] and not names[path] >= set(command.OF_CONNECTION)] == []


def test_no_option_takes_a_password_itself() -> None:
    params = [(path, param) for path, found in COMMANDS.items() for param in found.params]
    secrets = [
        (path, param)
        for path, param in params
        if isinstance(param, click.Option) and {"password", "secret"} & set(param.opts[0].split("-"))
    ]

    assert secrets
    assert [(path, param.opts[0]) for path, param in secrets if not isinstance(param.type, click.Path)] == []


def test_errors_in_how_kafka_is_reached_are_listed_together_by_a_command_that_only_asks() -> None:
    result = _invoke(
        "topics", "list", "--kafka", "k:1", "--kafka-security", "sasl-plaintext", "--kafka-sasl-mechanism", "plain"
    )

    assert result.exit_code == 2
    assert "2 mistakes" in result.stderr
    for name in ("--kafka-username: missing", "--kafka-password-file: missing"):
        assert name in result.stderr
