"""The parts of a release: .ci/dist, and .github/workflows/release.yml, which a tag starts."""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_compose import violations

ROOT = Path(__file__).parent.parent
PACKAGES = ("delivery", "producers", "sinks", "streams", "topics")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text()
WORKFLOW: dict[str, Any] = yaml.load(TEXT, yaml.CSafeLoader)
STEPS: list[dict[str, Any]] = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The output of .ci/dist for the last commit, in two environments that differ in what builds often depend on."""
    if not (ROOT / ".git").exists():
        pytest.skip("NO CLONE: a release is made of a commit, and this tree has no .git")
    folders = []
    for umask, zone in (0o022, "UTC"), (0o077, "Asia/Tokyo"):
        folder = tmp_path_factory.mktemp("dist")
        command = [str(ROOT / ".ci" / "dist"), str(folder), "wheel", "chart", "notes", "sums"]
        environment = {**os.environ, "TZ": zone}
        subprocess.run(command, cwd=folder, env=environment, umask=umask, check=True, capture_output=True)
        folders.append(folder)
    return folders


@pytest.mark.slow
def test_two_environments_make_the_same_bytes(builds: list[Path]) -> None:
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in builds)
    assert first == second
    assert first.keys() == {
        f"gpustream-{VERSION}-py3-none-any.whl",
        f"gpustream-{VERSION}.tgz",
        "CHANGELOG.md",
        "SHA256SUMS",
    }


@pytest.mark.slow
def test_the_checksums_are_those_of_the_files(builds: list[Path]) -> None:
    folder = builds[0]
    files = [path for path in sorted(folder.iterdir()) if path.name != "SHA256SUMS"]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    assert sorted((folder / "SHA256SUMS").read_text().splitlines()) == sorted(sums)


@pytest.mark.slow
def test_the_wheel_has_every_package_and_no_test(builds: list[Path]) -> None:
    (wheel,) = builds[0].glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gpustream", f"gpustream-{VERSION}.dist-info"}
    inside = {name.removeprefix("gpustream/_packages/") for name in names}
    assert {f"{name}/__init__.py" for name in PACKAGES} <= inside
    assert {"streams/alerts/rules/defaults.toml", "topics/schemas/gpu.samples.json"} <= inside
    page = ROOT / "sinks" / "page" / "static"
    assert {f"sinks/page/static/{file.name}" for file in page.iterdir()} <= inside


@pytest.mark.slow
def test_an_sdist_has_no_test_and_makes_the_same_wheel(builds: list[Path], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as commit:
        commit.extractall(tree, filter="tar")
    with tarfile.open(tmp_path / _built("sdist", tree, tmp_path)) as sdist:
        sdist.extractall(tmp_path, filter="data")
        names = {name.partition("/")[2] for name in sdist.getnames()}
    again = zipfile.ZipFile(tmp_path / _built("wheel", tmp_path / f"gpustream-{VERSION}", tmp_path))
    (wheel,) = map(zipfile.ZipFile, builds[0].glob("*.whl"))

    assert not any(name.startswith("tests") for name in names)
    assert {"producers/node/pods.proto", "CHANGELOG.md", "SECURITY.md", "LICENSE"} <= names
    assert {name: again.read(name) for name in again.namelist()} == {
        name: wheel.read(name) for name in wheel.namelist()
    }


def _built(form: str, tree: Path, folder: Path) -> str:
    """The name of the file that a tree is built to. setuptools may have nothing to warn of."""
    program = f"from setuptools import build_meta; print(build_meta.build_{form}({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True, text=True)
    assert "Warning" not in result.stderr + result.stdout
    return result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_wheel_works_beside_distributions_with_the_names_of_its_packages(
    builds: list[Path], tmp_path: Path
) -> None:
    (wheel,) = builds[0].glob("*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, tmp_path], check=True)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit(3)")

    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-m", "gpustream", "run", "--simulate", "1x2", "--duration", "2s", "--listen", "off"]
    ports = ("--scrape-listen", "127.0.0.1:0", "--page-listen", "127.0.0.1:0")
    result = subprocess.run([*run, *ports], cwd=tmp_path, env=env, check=False)
    assert result.returncode == 0
    program = "import gpustream, topics; print(gpustream.__file__, topics.__file__)"
    files = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert [Path(file).is_relative_to(tmp_path / "gpustream") for file in files.stdout.decode().split()] == [True, True]


@pytest.mark.slow
def test_the_chart_has_the_dashboards_and_rules_themselves_and_no_links(builds: list[Path]) -> None:
    (archive,) = builds[0].glob("*.tgz")
    with tarfile.open(archive) as chart:
        members = {member.name: member for member in chart.getmembers()}
    assert [name for name, member in members.items() if member.issym()] == []
    assert {"gpustream/files/grafana/gpu-fleet.json", "gpustream/files/prometheus/gpus.yml"} <= members.keys()
    assert not any(name.startswith("gpustream/ci") for name in members)


def test_the_workflow_is_valid_and_a_tag_starts_it() -> None:
    assert violations(WORKFLOW, "github-workflows") == []
    assert WORKFLOW["on"] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+*"]}}
    wrong = {**WORKFLOW, "jobs": {**WORKFLOW["jobs"], "image": {**WORKFLOW["jobs"]["image"], "run-on": "x"}}}
    assert violations(wrong, "github-workflows") != []


def test_actions_of_others_are_pinned_by_commit_and_no_job_has_more_rights_than_it_needs() -> None:
    actions = [step["uses"] for step in STEPS if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)] == []
    assert WORKFLOW["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in WORKFLOW["jobs"].items() if "permissions" in job}
    assert rights == {"release": {"contents": "write"}}


def test_no_script_of_the_workflow_has_an_expression_in_it() -> None:
    assert [step["run"] for step in STEPS if "${{" in step.get("run", "")] == []  # a name of a tag could be a command


def test_the_release_has_the_image_for_both_platforms_and_the_output_of_make_dist() -> None:
    scripts = "\n".join(step["run"] for step in STEPS if "run" in step)
    assert "--platform linux/amd64,linux/arm64" in scripts
    assert {name for name in ("VERSION", "SOURCE", "REVISION") if f"--build-arg {name}=" in scripts} == {
        "VERSION",
        "SOURCE",
        "REVISION",
    }
    assert "make dist" in scripts
    assert "oci://" in scripts
    assert "gh release create" in scripts


def test_the_version_is_the_same_everywhere_that_the_workflow_reads_it() -> None:
    chart = yaml.safe_load((ROOT / "k8s" / "helm" / "gpustream" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    assert f"ARG VERSION={VERSION}\n" in (ROOT / "Dockerfile").read_text()
