"""A process belongs to the pod and the job that its control group names, in every form that runtimes write."""

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.node import cgroups
from producers.node.cgroups import ADOPTED_WITHIN_S, NO_OWNER, ProcessOwner, ProcessOwners, parse
from producers.node.jobs import Job, KnownJobs, Users
from tests.producers.node.procfs import Procfs

UID = "1b6c3f0a-90ab-4cde-8f01-23456789abcd"
SLICE_UID = UID.replace("-", "_")
STATIC_UID = "9f86d081884c7d659a2feaa0c55ad015"
ID = "9f2e" * 16
OUTER_ID = "abcd" * 16

POD = ProcessOwner(UID, ID, None)
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice"

FORMS = {
    "systemd, burstable": (f"0::{BURSTABLE}/cri-containerd-{ID}.scope", POD),
    "systemd, guaranteed": (f"0::/kubepods.slice/kubepods-pod{SLICE_UID}.slice/cri-containerd-{ID}.scope", POD),
    "systemd, docker": (f"0::{BURSTABLE}/docker-{ID}.scope", POD),
    "systemd, a group below the container's": (f"0::{BURSTABLE}/cri-containerd-{ID}.scope/init.scope", POD),
    "cgroupfs, burstable": (f"0::/kubepods/burstable/pod{UID}/{ID}", POD),
    "cgroupfs, guaranteed": (f"0::/kubepods/pod{UID}/{ID}", POD),
    "cgroupfs, CRI-O": (f"0::/kubepods/besteffort/pod{UID}/crio-{ID}", POD),
    "CRI-O": (f"0::{BURSTABLE}/crio-{ID}.scope", POD),
    "CRI-O with crun": (f"0::{BURSTABLE}/crio-{ID}.scope/container", POD),
    "CRI-O's monitor is not the workload": (f"0::{BURSTABLE}/crio-conmon-{ID}.scope", ProcessOwner(UID, None, None)),
    "kubelet on cgroupfs, containerd on systemd": (
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:{ID}",
        POD,
    ),
    "kind": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice/cri-containerd-{ID}.scope",
        POD,
    ),
    "kind, seen from outside": (
        f"0::/system.slice/docker-{OUTER_ID}.scope/kubelet.slice/kubelet-kubepods.slice/"
        f"kubelet-kubepods-pod{SLICE_UID}.slice/cri-containerd-{ID}.scope",
        POD,
    ),
    "a container engine inside a pod": (f"0::/kubepods/burstable/pod{UID}/{ID}/docker/{OUTER_ID}", POD),
    "static pod, systemd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice/cri-containerd-{ID}.scope",
        ProcessOwner(STATIC_UID, ID, None),
    ),
    "static pod, cgroupfs": (f"0::/kubepods/burstable/pod{STATIC_UID}/{ID}", ProcessOwner(STATIC_UID, ID, None)),
    "v1": (f"12:devices:/kubepods/burstable/pod{UID}/{ID}\n4:memory:/kubepods/burstable/pod{UID}/{ID}\n", POD),
    "v1, only some hierarchies": (f"12:devices:/\n4:cpu,cpuacct:/kubepods/pod{UID}/{ID}\n1:name=systemd:/\n", POD),
    "v1, a runtime's own hierarchy first": (f"9:misc:/docker/{OUTER_ID}\n4:cpu:/kubepods/pod{UID}/{ID}", POD),
    "hybrid": (f"11:devices:{BURSTABLE}/cri-containerd-{ID}.scope\n0::/\n", POD),
    "hybrid, unified first": (f"0::/\n11:devices:{BURSTABLE}/cri-containerd-{ID}.scope", POD),
    "another pod, seen from a namespace": (f"0::/../../kubepods-pod{SLICE_UID}.slice/cri-containerd-{ID}.scope", POD),
    "another container of the pod, seen from a namespace": (
        f"0::/../cri-containerd-{ID}.scope",
        ProcessOwner(None, ID, None),
    ),
    "itself, seen from a namespace": ("0::/", NO_OWNER),
    "the host's first, seen from a namespace": ("0::/../../../..", NO_OWNER),
    "docker without Kubernetes": (f"0::/system.slice/docker-{ID}.scope", ProcessOwner(None, ID, None)),
    "Slurm v1": ("4:memory:/slurm/uid_1000/job_4242/step_0/task_1", ProcessOwner(None, None, "4242")),
    "Slurm v1, several daemons": (
        "4:memory:/slurm_gpu-1/uid_1000/job_4242/step_batch",
        ProcessOwner(None, None, "4242"),
    ),
    "Slurm v2": ("0::/system.slice/slurmstepd.scope/job_4242/step_0/user/task_0", ProcessOwner(None, None, "4242")),
    "Slurm v2, several daemons": (
        "0::/system.slice/gpu-1_slurmstepd.scope/job_4242/step_extern/user/task_special",
        ProcessOwner(None, None, "4242"),
    ),
    "Slurm v2, the job itself": ("0::/system.slice/slurmstepd.scope/job_4242", ProcessOwner(None, None, "4242")),
    "a container in a Slurm job": (
        f"0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/libpod-{ID}.scope",
        ProcessOwner(None, ID, "7"),
    ),
    "a job that is not Slurm's": ("0::/system.slice/build.service/job_4242", NO_OWNER),
    "a login": ("0::/user.slice/user-1000.slice/session-2.scope", NO_OWNER),
    "a service that has pod in its name": ("0::/system.slice/podman.service", NO_OWNER),
    "hexadecimal that is too long": (f"0::/kubepods/pod{UID}/{ID}0", ProcessOwner(UID, None, None)),
    "nothing": ("", NO_OWNER),
    "no control groups at all": ("what is this\n::", NO_OWNER),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_names_its_pod_container_and_job(form: str) -> None:
    text, owner = FORMS[form]
    assert parse(text) == owner


@given(st.text() | st.lists(st.sampled_from([*"0:/.-_\npod8", UID, SLICE_UID, ID, "job_", "slurm"])).map("".join))
def test_any_text_can_be_parsed(text: str) -> None:
    owner = parse(text)
    assert owner.pod_uid is None or owner.pod_uid.replace("-", "_") in text.replace("-", "_")
    assert owner.container_id is None or owner.container_id in text
    assert owner.job_id is None or f"job_{owner.job_id}" in text


@pytest.fixture
def procfs(tmp_path: Path) -> Procfs:
    return Procfs(tmp_path)


def in_pod(uid: str) -> str:
    return f"0::/kubepods/pod{uid}/{ID}\n"


def test_a_process_belongs_to_the_pod_of_its_group(procfs: Procfs) -> None:
    procfs.begin(42, 1000, in_pod(UID))
    assert procfs.owners.of(42) == POD


def test_a_process_that_is_not_in_procfs_is_unknown(procfs: Procfs) -> None:
    assert procfs.owners.of(42) is None


def test_a_process_outside_of_pods_and_jobs_has_no_owner(procfs: Procfs) -> None:
    procfs.begin(42, 1000, "0::/user.slice\n")
    assert procfs.owners.of(42) == NO_OWNER


def test_the_group_of_a_known_process_is_not_read_again(procfs: Procfs) -> None:
    procfs.begin(42, 1000, in_pod(UID))
    procfs.owners.of(42)
    procfs.begin(42, 1000, None)
    assert procfs.owners.of(42) == POD


def test_a_process_id_that_is_used_again_is_another_process(procfs: Procfs) -> None:
    other_uid = UID.replace("1b6c", "2222")
    procfs.begin(42, 1000, in_pod(UID))
    procfs.owners.of(42)
    procfs.begin(42, 1001, in_pod(other_uid))
    assert procfs.owners.of(42) == ProcessOwner(other_uid, ID, None)


def test_a_process_that_a_batch_system_adopts_later_belongs_to_its_job(procfs: Procfs) -> None:
    now_s = 0.0
    owners = ProcessOwners(procfs.root, clock=lambda: now_s, environ_within_s=30.0)
    procfs.begin(42, 1000, "0::/user.slice\n")
    owners.of(42)
    procfs.begin(42, 1000, "0::/system.slice/slurmstepd.scope/job_7/step_extern\n")
    assert owners.of(42) == NO_OWNER
    now_s = ADOPTED_WITHIN_S
    assert owners.of(42) == ProcessOwner(None, None, "7")


@pytest.mark.parametrize(
    "comm", ["a b", "a) S 1 2 (b", ")", "((", "", "x\ny", "2) R 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9"]
)
def test_the_start_time_is_read_past_any_command_name(procfs: Procfs, comm: str) -> None:
    procfs.begin(42, 1000, in_pod(UID), comm)
    procfs.owners.of(42)
    procfs.begin(42, 1000, None, comm)
    assert procfs.owners.of(42) == POD
    procfs.begin(42, 1001, None, comm)
    assert procfs.owners.of(42) == NO_OWNER


@pytest.mark.parametrize("stat", ["", "42", "42 (python) S 1 2 3", "42 (python) S" + " x" * 30, ")" * 100])
def test_a_malformed_stat_is_no_process(procfs: Procfs, stat: str) -> None:
    procfs.begin(42, 1000, in_pod(UID))
    (procfs.root / "42" / "stat").write_text(stat)
    assert procfs.owners.of(42) is None


def test_a_process_whose_group_is_hidden_has_no_owner(procfs: Procfs) -> None:
    procfs.begin(42, 1000, None)
    (procfs.root / "42" / "cgroup").mkdir()  # reading it fails, even as root
    assert procfs.owners.of(42) == NO_OWNER


def test_a_process_that_may_not_be_read_is_unknown(procfs: Procfs) -> None:
    procfs.begin(42, 1000, in_pod(UID))
    (procfs.root / "42" / "stat").unlink()
    (procfs.root / "42" / "stat").mkdir()
    assert procfs.owners.of(42) is None


@pytest.mark.parametrize("successor", [None, 2000])
def test_a_process_that_ends_between_two_reads_is_unknown(
    procfs: Procfs, monkeypatch: pytest.MonkeyPatch, successor: int | None
) -> None:
    procfs.begin(42, 1000, in_pod(UID))
    read = cgroups._read

    def ending(path: Path) -> str | None:
        if path.name == "cgroup":
            procfs.end(42)
            if successor is not None:
                procfs.begin(42, successor, in_pod(UID))
        return read(path)

    monkeypatch.setattr(cgroups, "_read", ending)
    assert procfs.owners.of(42) is None


def test_a_process_that_ended_after_its_listing_keeps_its_owner_and_is_forgotten_soon_after(procfs: Procfs) -> None:
    now_s = 0.0
    owners = ProcessOwners(procfs.root, clock=lambda: now_s, environ_within_s=30.0)
    procfs.begin(42, 1000, in_pod(UID))
    assert owners.of(42) == POD
    now_s = 3600
    assert owners.of(42) == POD
    procfs.end(42)
    now_s = 3609
    assert owners.of(42) == POD
    now_s = 3611
    assert owners.of(42) is None
    assert not owners._cache


def test_a_process_with_an_old_id_does_not_get_the_owner_of_the_first_process(procfs: Procfs) -> None:
    procfs.begin(42, 1000, in_pod(UID))
    procfs.owners.of(42)
    procfs.end(42)
    procfs.begin(42, 2000, LOGIN)
    assert procfs.owners.of(42) == NO_OWNER


def test_of_five_thousand_processes_each_is_read_once(procfs: Procfs) -> None:
    procfs.begin(0, started=1, cgroup=FORMS["CRI-O"][0])
    for pid in range(1, 5_000):
        (procfs.root / str(pid)).symlink_to("0")
    assert all(procfs.owners.of(pid) == POD for pid in range(5_000))
    (procfs.root / "0" / "cgroup").unlink()
    assert all(procfs.owners.of(pid) == POD for pid in range(5_000))


def test_the_cache_is_bounded(procfs: Procfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_MAX_CACHED", 3)
    for pid in (1, 2, 3):
        procfs.begin(pid, 1000, in_pod(UID))
        procfs.owners.of(pid)
    procfs.owners.of(1)
    procfs.begin(4, 1000, in_pod(UID))
    procfs.owners.of(4)
    assert set(procfs.owners._cache) == {3, 1, 4}


def test_many_threads_may_look_up_at_once(procfs: Procfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_MAX_CACHED", 8)
    for pid in range(16):
        procfs.begin(pid, 1000, f"0::/slurm/job_{pid}\n")
    wrong: list[object] = []

    def ask() -> None:
        owners = [(pid, procfs.owners.of(pid)) for _ in range(20) for pid in range(16)]
        wrong.extend(pair for pair in owners if pair[1] != ProcessOwner(None, None, str(pair[0])))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(procfs.owners._cache) <= 8


@pytest.mark.parametrize(
    ("comm", "service"),
    [
        ("nvidia-cuda-mps", "mps"),
        ("nvidia-cuda-mp", None),
        ("nvidia-cuda-mps2", None),
        (" nvidia-cuda-mps", None),
        ("nvidia-cuda-mps\n", None),
        ("python", None),
        ("", None),
    ],
)
def test_an_mps_server_is_known_by_its_command(procfs: Procfs, comm: str, service: str | None) -> None:
    procfs.begin(42, 1000, in_pod(UID), comm)
    assert procfs.owners.of(42) == POD._replace(service=service)


def test_a_process_whose_command_is_hidden_is_no_server(procfs: Procfs) -> None:
    procfs.begin(42, 1000, in_pod(UID), "nvidia-cuda-mps")
    (procfs.root / "42" / "comm").unlink()
    (procfs.root / "42" / "comm").mkdir()  # reading it fails, even as root
    assert procfs.owners.of(42) == POD


def test_an_mps_server_that_a_batch_system_adopts_later_belongs_to_its_job(procfs: Procfs) -> None:
    now_s = 0.0
    owners = ProcessOwners(procfs.root, clock=lambda: now_s, environ_within_s=30.0)
    procfs.begin(42, 1000, LOGIN, "nvidia-cuda-mps")
    assert owners.of(42) == NO_OWNER._replace(service="mps")
    procfs.begin(42, 1000, IN_JOB, "nvidia-cuda-mps")
    now_s = ADOPTED_WITHIN_S
    assert owners.of(42) == ProcessOwner(None, None, "7", "mps")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no procfs here")
def test_the_command_of_a_real_process_is_read_as_long_as_the_kernel_keeps_it(tmp_path: Path) -> None:
    server = tmp_path / "nvidia-cuda-mps-server"
    server.symlink_to(shutil.which("sleep") or "sleep")
    with subprocess.Popen([server, "60"]) as process:
        try:
            owner = ProcessOwners().of(process.pid)
        finally:
            process.kill()
    assert owner is not None
    assert owner.service == "mps"


BATCH = b"HOME=/\0SLURM_JOB_ID=7\0SLURM_JOB_USER=carol\0SLURM_JOB_PARTITION=gpu\0"
IN_JOB = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
LOGIN = "0::/user.slice/user-1000.slice/session-2.scope\n"


def test_a_process_in_no_group_of_a_job_is_of_the_job_that_its_environment_names(procfs: Procfs) -> None:
    procfs.begin(42, 1000, LOGIN, environ=BATCH)
    assert procfs.owners.of(42) == ProcessOwner(None, None, "7")
    assert procfs.owners.jobs.of("7") == Job("7", "carol", "gpu")


def test_a_container_that_is_no_pods_keeps_its_id_beside_the_job_of_its_environment(procfs: Procfs) -> None:
    procfs.begin(42, 1000, f"0::/system.slice/docker-{ID}.scope", environ=BATCH)
    assert procfs.owners.of(42) == ProcessOwner(None, ID, "7")


def test_the_environment_of_a_pods_process_does_not_count(procfs: Procfs) -> None:
    procfs.begin(42, 1000, in_pod(UID), environ=BATCH)
    assert procfs.owners.of(42) == POD
    assert procfs.owners.jobs.of("7") == Job("7")


def test_the_group_goes_before_the_environment(procfs: Procfs) -> None:
    procfs.begin(42, 1000, IN_JOB, environ=BATCH.replace(b"=7", b"=8"), uid=1000)
    assert procfs.owners.of(42) == ProcessOwner(None, None, "7")
    assert procfs.owners.jobs.of("7") == Job("7", "alice"), "who it is of is not taken from another job's environment"
    assert procfs.owners.jobs.of("8") == Job("8")


def test_a_job_in_a_group_has_the_user_and_partition_of_its_environment(procfs: Procfs) -> None:
    procfs.begin(42, 1000, IN_JOB, environ=BATCH, uid=1000)
    procfs.owners.of(42)
    assert procfs.owners.jobs.of("7") == Job("7", "carol", "gpu")


@pytest.mark.parametrize(("uid", "user"), [(1000, "alice"), (1001, "1001"), (None, None)])
def test_if_no_environment_may_be_read_the_user_is_that_of_the_process(
    procfs: Procfs, uid: int | None, user: str | None
) -> None:
    procfs.begin(42, 1000, IN_JOB, uid=uid)
    (procfs.root / "42" / "environ").mkdir()  # reading it fails, even as root
    assert procfs.owners.of(42) == ProcessOwner(None, None, "7")
    assert procfs.owners.jobs.of("7") == Job("7", user)


def test_a_process_that_claims_anothers_job_does_not_change_its_user(procfs: Procfs) -> None:
    procfs.begin(42, 1000, IN_JOB, uid=1000)
    procfs.begin(43, 1000, LOGIN, environ=BATCH, uid=2000)
    for pid in (42, 43):
        procfs.owners.of(pid)
    assert procfs.owners.jobs.of("7") == Job("7", "alice")


def test_an_environment_is_read_once(procfs: Procfs) -> None:
    procfs.begin(42, 1000, LOGIN, environ=BATCH)
    procfs.owners.of(42)
    procfs.begin(42, 1000, LOGIN, environ=b"")
    assert procfs.owners.of(42) == ProcessOwner(None, None, "7")


def test_an_environment_is_read_up_to_a_bound(procfs: Procfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "LARGEST_ENVIRON_BYTES", len(b"HOME=/\0SLURM_JOB_ID=7"))
    procfs.begin(42, 1000, LOGIN, environ=BATCH.replace(b"=7", b"=77"))
    assert procfs.owners.of(42) == NO_OWNER, "half a number is none"


def test_an_environment_that_does_not_come_holds_up_nobody_and_is_read_again_later(procfs: Procfs) -> None:
    """The kernel does not give it while a process that hangs has its memory locked."""
    now_s = 0.0
    owners = ProcessOwners(procfs.root, clock=lambda: now_s, environ_within_s=0.01)
    hanging = range(42, 50)
    for pid in hanging:
        procfs.begin(pid, 1000, IN_JOB if pid == 42 else LOGIN)
        os.mkfifo(procfs.root / str(pid) / "environ")
    assert owners.of(42) == ProcessOwner(None, None, "7")
    assert {owners.of(pid) for pid in hanging if pid != 42} == {NO_OWNER}
    reading = [thread for thread in threading.enumerate() if thread.name.startswith("environ-")]
    assert len(reading) == 4
    for pid in hanging[: len(reading)]:
        (procfs.root / str(pid) / "environ").write_bytes(b"SLURM_JOB_ID=7\0SLURM_JOB_PARTITION=gpu\0")
    for thread in reading:
        thread.join(30.0)
    for pid in hanging:
        (procfs.root / str(pid) / "environ").unlink()
        (procfs.root / str(pid) / "environ").write_bytes(b"SLURM_JOB_ID=7\0SLURM_JOB_PARTITION=gpu\0")
    now_s = ADOPTED_WITHIN_S + 1
    owners._environ_within_s = 30.0
    assert {owners.of(pid) for pid in hanging} == {ProcessOwner(None, None, "7")}
    assert owners.jobs.of("7").partition == "gpu"


@pytest.mark.parametrize(
    "status", ["", "Uid:", "Uid:\tx\t0\t0\t0\n", "Name:\tUid:\t1000\t\n", "Uid:\t99999999999\t0\n"]
)
def test_a_status_that_reports_no_user_leaves_the_job_without(procfs: Procfs, status: str) -> None:
    procfs.begin(42, 1000, IN_JOB)
    (procfs.root / "42" / "status").write_text(status)
    assert procfs.owners.of(42) == ProcessOwner(None, None, "7")
    assert procfs.owners.jobs.of("7") == Job("7")


def test_a_process_that_ends_during_its_lookup_adds_nothing_to_its_job(
    procfs: Procfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    procfs.begin(42, 1000, LOGIN, environ=BATCH)
    read = cgroups._read_bytes

    def ending(path: Path, most: int = -1) -> bytes | None:
        content = read(path, most)
        if path.name == "environ":
            procfs.end(42)
            procfs.begin(42, 2000, LOGIN)
        return content

    monkeypatch.setattr(cgroups, "_read_bytes", ending)
    assert procfs.owners.of(42) is None
    assert procfs.owners.jobs.of("7") == Job("7")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no procfs here")
def test_the_environment_and_the_user_of_a_real_process_are_read() -> None:
    variables = {"SLURM_JOB_ID": "4242", "SLURM_JOB_PARTITION": "gpu"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **variables}) as process:
        try:
            environ = Path(f"/proc/{process.pid}/environ")
            while not environ.read_bytes():  # a process has started before it has an environment
                time.sleep(0.01)
            jobs = KnownJobs(Users({os.getuid(): "alice"}.get, within_s=30.0))
            owners = ProcessOwners(jobs=jobs, environ_within_s=30.0)
            owner = owners.of(process.pid)
        finally:
            process.kill()
    own = parse(Path("/proc/self/cgroup").read_text())
    if own.pod_uid is not None or own.job_id is not None:
        pytest.skip("the test itself is in a pod or in a job")
    assert owner is not None
    assert owner.job_id == "4242"
    assert owners.jobs.of("4242") == Job("4242", "alice", "gpu")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no procfs here")
def test_the_procfs_of_this_machine_is_read() -> None:
    owners = ProcessOwners()
    assert owners.of(os.getpid()) == parse(Path("/proc/self/cgroup").read_text())
    assert owners.of(2**22 + 1) is None
