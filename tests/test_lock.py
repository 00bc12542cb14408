"""The lock file: what a fresh machine installs is what pyproject.toml allows, and says nothing about this one."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text()


def direct_dependencies() -> Iterator[Requirement]:
    """What pyproject.toml names: to run, to develop, to build; not what only users of a certain cloud install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    yield from map(Requirement, project["project"]["dependencies"])
    yield from map(Requirement, project["project"]["optional-dependencies"]["dev"])
    yield from map(Requirement, project["build-system"]["requires"])


def pins() -> dict[str, Version]:
    """The version that each package is locked to."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", LOCK, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


@pytest.mark.parametrize("dependency", list(direct_dependencies()), ids=lambda dependency: str(dependency.name))
def test_each_direct_dependency_is_locked_to_a_version_that_is_allowed(dependency: Requirement) -> None:
    assert pins()[canonicalize_name(dependency.name)] in dependency.specifier


def test_every_package_has_hashes() -> None:
    blocks = re.split(r"^(?=[A-Za-z0-9._-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins())
    assert [block.split("==")[0] for block in blocks if "--hash=sha256:" not in block] == []


def test_the_lock_names_no_server_and_no_folder() -> None:
    assert re.findall(r"https?:|file:/|^-|--(?:index|find|extra|trusted)|\s/\w", LOCK, re.MULTILINE) == []
