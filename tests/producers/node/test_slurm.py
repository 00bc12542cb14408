"""Slurm's prolog and epilog write the job files that the node producer reads, and never drain a node."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from producers.node.job_files import Directory
from producers.node.jobs import Job, with_jobs

SCRIPTS = Path(__file__).parents[3] / "producers" / "node" / "slurm"
MIG = "MIG-00000001-0000-4000-8000-000000000000"
ANA = {"SLURM_JOB_USER": "ana", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_ACCOUNT": "vision"}


class Node:
    """A node's job files, and Slurm's scripts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job_files = Directory(directory)

    def run(self, script: str, job: int | str, **environment: str) -> str:
        """Run a script as slurmd does, and return its standard error. It must not fail."""
        environment = {**ANA, "SLURM_JOB_ID": str(job), "GPUSTREAM_JOB_DIR": str(self.directory), **environment}
        process = subprocess.run([SCRIPTS / script], env=environment, capture_output=True, text=True, check=False)
        assert (process.returncode, process.stdout) == (0, "")
        return process.stderr

    def jobs(self) -> dict[str, tuple[str, ...]]:
        """The jobs by file, as the node producer reads them."""
        mapping = self.job_files.read()
        assert not mapping.problems
        return mapping.job_ids_by_file


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "jobs")


@pytest.mark.parametrize("gpus", ["0,2,3", "0,2-3"])
def test_a_job_is_named_for_each_of_its_gpus_until_it_ends(node: Node, gpus: str) -> None:
    assert node.run("prolog", 4242, SLURM_JOB_GPUS=gpus) == ""
    assert node.jobs() == {"0": ("4242",), "2": ("4242",), "3": ("4242",)}
    assert node.job_files.read().jobs_by_id == {"4242": Job("4242", "ana", "gpu", "vision")}
    assert node.run("epilog", 4242) == ""
    assert node.jobs() == {}
    assert sorted(path.name for path in node.directory.rglob("*")) == [".lock", "jobs"]


def test_a_mig_device_is_named_by_its_uuid(node: Node) -> None:
    node.run("prolog", 4242, SLURM_JOB_GPUS="5", CUDA_VISIBLE_DEVICES=MIG)
    assert node.jobs() == {MIG: ("4242",)}
    device = {"uuid": MIG, "index": 1, "mig": {"gpu_instance": 7}}
    (mapping,) = with_jobs([device], node.jobs(), lambda job_id: Job(job_id, "ana"))
    assert mapping["jobs"] == [{"id": "4242", "user": "ana"}]


def test_without_slurm_job_gpus_the_visible_devices_count(node: Node) -> None:
    node.run("prolog", 4242, CUDA_VISIBLE_DEVICES="1")
    assert node.jobs() == {"1": ("4242",)}


def test_jobs_share_a_gpu_and_each_removes_only_itself(node: Node) -> None:
    for job in (42, 4242):
        node.run("prolog", job, SLURM_JOB_GPUS="0")
    assert node.jobs() == {"0": ("42", "4242")}
    node.run("epilog", 42, SLURM_JOB_GPUS="0")
    assert node.jobs() == {"0": ("4242",)}


def test_a_job_that_is_requeued_is_named_once_and_may_get_another_gpu(node: Node) -> None:
    for gpus in ("0", "0"):
        node.run("prolog", 4242, SLURM_JOB_GPUS=gpus)
    assert node.jobs() == {"0": ("4242",)}
    for _ in range(2):
        node.run("epilog", 4242)
    node.run("prolog", 4242, SLURM_JOB_GPUS="1")
    assert node.jobs() == {"1": ("4242",)}


def test_a_job_without_gpus_is_named_nowhere(node: Node) -> None:
    node.run("prolog", 4242)
    assert node.jobs() == {}


@pytest.mark.slow
def test_prologs_at_the_same_time_lose_no_job(node: Node) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: node.run("prolog", job, SLURM_JOB_GPUS="0,1"), range(1, 17)))
    ids = tuple(sorted(map(str, range(1, 17))))
    assert {name: tuple(sorted(jobs)) for name, jobs in node.jobs().items()} == {"0": ids, "1": ids}


@pytest.mark.parametrize("script", ["prolog", "epilog"])
def test_neither_script_fails_on_any_error(tmp_path: Path, script: str) -> None:
    (tmp_path / "file").touch()
    broken = Node(tmp_path / "file" / "jobs")
    content = broken.run(script, 4242, SLURM_JOB_GPUS="0")
    assert bool(content) == (script == "prolog")
    assert Node(tmp_path / "jobs").run(script, "", SLURM_JOB_GPUS="0") == ""
    assert Node(tmp_path / "jobs").run(script, "../4242", SLURM_JOB_GPUS="../0,x,-1") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("script", "said"), [("prolog", "could not be written"), ("epilog", "could not be taken out")])
def test_what_a_script_can_not_do_is_in_the_systems_log(tmp_path: Path, script: str, said: str) -> None:
    logger, log = tmp_path / "logger", tmp_path / "log"
    logger.write_text(f'#!/bin/sh\necho "$*" >> {log}\n')
    logger.chmod(0o755)
    (tmp_path / ".lock").mkdir()
    text = (SCRIPTS / script).read_text().replace("PATH=", f"PATH={tmp_path}:", 1)
    environment = {**ANA, "SLURM_JOB_ID": "4242", "SLURM_JOB_GPUS": "0", "GPUSTREAM_JOB_DIR": str(tmp_path)}
    process = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert said in process.stderr
    assert log.read_text().startswith("-t gpustream -p daemon.err -- ")
    assert said in log.read_text()


@pytest.mark.parametrize("content", [b"user=ana\nuser", b"\xff\nuser=ana", b"user = x\nuser=ana\npartition=\n"])
def test_invalid_names_in_a_jobs_own_file_do_not_count(node: Node, content: bytes) -> None:
    node.run("prolog", 4242, SLURM_JOB_GPUS="0")
    (node.directory / "jobs" / "4242").write_bytes(content)
    assert node.job_files.read().jobs_by_id == {"4242": Job("4242", "ana")}
