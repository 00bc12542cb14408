"""Dockerfile and .dockerignore: checks of the image without building it."""

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()
PACKAGES = ["gpustream", "delivery", "producers", "sinks", "streams", "topics"]


class Instruction(NamedTuple):
    """One instruction of a Dockerfile: its name in capitals, and the rest of its lines as one."""

    name: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())
STARTS = [number for number, instruction in enumerate(DOCKERFILE) if instruction.name == "FROM"]
BUILD, FINAL = DOCKERFILE[STARTS[0] : STARTS[1]], DOCKERFILE[STARTS[1] :]


def arguments_of(stage: list[Instruction], name: str) -> list[str]:
    """The arguments of all instructions with a name."""
    return [instruction.rest for instruction in stage if instruction.name == name]


def sources() -> list[str]:
    """The paths that are copied from the build's context."""
    copies = [rest.split() for rest in arguments_of(BUILD, "COPY") + arguments_of(FINAL, "COPY")]
    return [source for copy in copies if not copy[0].startswith("--from=") for source in copy[:-1]]


def test_there_are_two_stages_of_one_slim_base_that_is_pinned_by_its_digest() -> None:
    (base,) = arguments_of(DOCKERFILE[: STARTS[0]], "ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", base)
    assert [DOCKERFILE[start].rest for start in STARTS] == ["${BASE} AS build", "${BASE}"]


def test_the_base_is_a_python_that_the_project_supports() -> None:
    (base,) = arguments_of(DOCKERFILE[: STARTS[0]], "ARG")
    minor = int(base.split(".")[1])
    assert minor >= int(PROJECT["project"]["requires-python"].removeprefix(">=3."))


def test_every_dependency_comes_from_the_lock_file_with_its_hash() -> None:
    fetch, install = arguments_of(BUILD, "RUN")
    assert "--require-hashes --no-deps" in fetch
    assert "-r requirements.lock" in fetch
    assert "--no-index --find-links /wheels" in install


def test_packages_may_come_from_another_index_of_which_the_image_says_nothing() -> None:
    names = [instruction.name for instruction in BUILD]
    index = next(number for number, start in enumerate(BUILD) if start.rest == "PIP_INDEX_URL")
    assert BUILD[index].name == "ARG"
    assert index < names.index("RUN"), "an argument is a variable of the lines after it"
    assert not any("PIP_INDEX_URL" in instruction.rest for instruction in FINAL)


def test_the_final_stage_only_takes_what_was_built() -> None:
    assert arguments_of(FINAL, "COPY") == ["--from=build /opt/gpustream /opt/gpustream"]
    assert arguments_of(FINAL, "RUN") == []


def test_the_built_environment_has_no_pip() -> None:
    assert "venv --without-pip /opt/gpustream" in arguments_of(BUILD, "RUN")[1]


def test_it_runs_as_an_unprivileged_user() -> None:
    (user,) = arguments_of(FINAL, "USER")
    assert min(map(int, user.split(":"))) > 0


def test_its_entry_point_is_the_command() -> None:
    assert arguments_of(FINAL, "ENTRYPOINT") == ['["gpustream"]']
    assert "gpustream" in PROJECT["project"]["scripts"]


def test_the_image_holds_every_package_of_the_distribution() -> None:
    assert set(PACKAGES) <= set(sources())
    assert {line.split()[1] for line in arguments_of(BUILD, "COPY") if line.split()[0] in PACKAGES} == set(PACKAGES)


def test_everything_copied_is_in_the_tree_and_in_the_context() -> None:
    assert [source for source in sources() if not (ROOT / source).exists()] == []
    included = {line.removeprefix("!").rstrip("/") for line in IGNORED if line.startswith("!")}
    assert included == set(sources())


def test_the_context_has_nothing_else() -> None:
    assert IGNORED[0] == "*"
    assert any(fnmatch.fnmatch("streams/reader/__pycache__", line.rstrip("/")) for line in IGNORED if "!" not in line)


def test_the_labels_have_the_licence_the_version_and_the_source() -> None:
    (labels,) = arguments_of(FINAL, "LABEL")
    values = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    arguments = dict(argument.split("=") for argument in arguments_of(FINAL, "ARG"))
    assert values["licenses"] == PROJECT["project"]["license"]
    assert {name: values[name] for name in ("version", "source", "revision")} == {
        "version": "${VERSION}",
        "source": "${SOURCE}",
        "revision": "${REVISION}",
    }
    assert arguments["VERSION"] == PROJECT["project"]["version"]


def test_nothing_needs_a_shell() -> None:
    assert [
        rest for name in ("ENTRYPOINT", "CMD") for rest in arguments_of(FINAL, name) if not rest.startswith("[")
    ] == []
    assert arguments_of(FINAL, "RUN") == arguments_of(FINAL, "SHELL") == []
