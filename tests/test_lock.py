"""The lock file: its versions are allowed by pyproject.toml, and it names nothing of the machine that made it."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK, RUNS = ((ROOT / f"{name}.lock").read_text() for name in ("requirements", "requirements-run"))


def direct_dependencies(*extras: str) -> Iterator[Requirement]:
    """The requirements in pyproject.toml: to build, to run, and of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    yield from map(Requirement, project["build-system"]["requires"])
    yield from map(Requirement, project["project"]["dependencies"])
    for extra in extras:
        yield from map(Requirement, project["project"]["optional-dependencies"][extra])


def pins(lock: str) -> dict[str, Version]:
    """The locked version of each package."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in pins}


def test_each_direct_dependency_is_locked_to_a_version_that_is_allowed() -> None:
    locked = pins(LOCK)
    for dependency in direct_dependencies("dev", "docs"):
        assert locked[canonicalize_name(dependency.name)] in dependency.specifier


def test_the_runtime_lock_has_the_same_versions_and_nothing_for_development() -> None:
    runs = pins(RUNS)
    needed = {canonicalize_name(requirement.name) for requirement in direct_dependencies()}
    assert runs.items() <= pins(LOCK).items()
    assert needed <= set(runs)
    assert not {"pytest", "mypy", "pyarrow", "duckdb", "mkdocs-material"} & set(runs)


def test_what_is_locked_can_be_installed_with_the_oldest_python_that_is_allowed() -> None:
    """The first 3.11, too: Debian 12 has 3.11.2."""
    locked = [package for package in distributions() if canonicalize_name(package.name) in pins(LOCK)]
    needs = {package.name: ",".join(package.metadata.get_all("Requires-Python") or ()) for package in locked}
    assert len(needs) > 100
    assert {name: needed for name, needed in needs.items() if "3.11.0" not in SpecifierSet(needed)} == {}


@pytest.mark.parametrize("lock", [LOCK, RUNS], ids=["all", "what runs"])
def test_every_package_has_hashes(lock: str) -> None:
    blocks = re.split(r"^(?=[A-Za-z0-9._-]+==)", lock, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins(lock))
    assert [block.split("==")[0] for block in blocks if "--hash=sha256:" not in block] == []


@pytest.mark.parametrize("lock", [LOCK, RUNS], ids=["all", "what runs"])
def test_the_lock_names_no_server_and_no_folder(lock: str) -> None:
    assert re.findall(r"https?:|file:/|^-|--(?:index|find|extra|trusted)|\s/\w", lock, re.MULTILINE) == []
