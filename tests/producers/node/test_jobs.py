"""A device has the jobs of its processes and of its file, each once, with its user and partition."""

from typing import Any

import msgspec
import pytest

from producers.node import jobs
from producers.node.jobs import Evidence, Job, KnownJobs, Users, file_name, jobs_of, merged, with_jobs
from topics.samples import Sample
from topics.topic import decoder

ALICES = Job("7", "alice", "gpu")


def job_by_id(job_id: str) -> Job:
    return ALICES if job_id == "7" else Job(job_id)


def device(*job_ids: str | None, index: int | None = 2, **rest: Any) -> dict[str, Any]:
    processes = [{"pid": pid, **({"job_id": job_id} if job_id else {})} for pid, job_id in enumerate(job_ids, 100)]
    return {"uuid": "GPU-1", "index": index, "metrics": {}, "processes": processes, **rest}


def mig(instance: int | None) -> dict[str, Any]:
    return {"uuid": "MIG-1", "parent_uuid": "GPU-1", **({} if instance is None else {"gpu_instance": instance})}


def test_a_device_has_the_job_of_its_process() -> None:
    assert jobs_of(device("7"), {}, job_by_id) == [{"id": "7", "user": "alice", "partition": "gpu"}]


def test_many_processes_of_one_job_are_one_job() -> None:
    assert [job["id"] for job in jobs_of(device("7", None, "8", "7"), {}, job_by_id)] == ["7", "8"]


def test_unknown_fields_of_a_job_are_left_out() -> None:
    assert jobs_of(device("8"), {}, job_by_id) == [{"id": "8"}]


def test_a_device_without_processes_has_the_jobs_of_its_file() -> None:
    assert jobs_of(device(), {"2": ("7",), "1": ("9",)}, job_by_id) == [
        {"id": "7", "user": "alice", "partition": "gpu"}
    ]


def test_jobs_of_the_file_and_of_processes_are_reported_once_each() -> None:
    assert [job["id"] for job in jobs_of(device("8", "7"), {"2": ("7", "9")}, job_by_id)] == ["7", "9", "8"]


@pytest.mark.parametrize(
    ("reported_device", "name"),
    [
        (device(index=0), "0"),
        (device(index=2, mig=None), "2"),
        (device(index=2, mig=mig(1)), "2.1"),
        (device(index=2, mig=mig(0)), "2.0"),
        (device(index=2, mig=mig(None)), None),
        (device(index=None), None),
        (device(index=None, mig=mig(1)), None),
        ({"uuid": "GPU-1"}, None),
    ],
)
def test_the_file_of_a_device_is_named_by_index_and_instance(reported_device: dict[str, Any], name: str | None) -> None:
    assert file_name(reported_device) == name


def test_the_file_of_a_gpu_is_not_that_of_its_mig_devices() -> None:
    mapped = {"2": ("7",), "2.1": ("8",)}
    assert [job["id"] for job in jobs_of(device(mig=mig(1)), mapped, job_by_id)] == ["8"]
    assert jobs_of(device(mig=mig(2)), mapped, job_by_id) == []
    assert jobs_of(device(index=None), mapped, job_by_id) == []


def test_only_devices_with_jobs_get_the_field_and_no_given_device_is_changed() -> None:
    devices = [device("7"), device(index=3), {"uuid": "GPU-3", "state": "timeout", "processes": None}]
    before = [dict(device) for device in devices]

    reported = with_jobs(devices, {}, job_by_id)

    assert ["jobs" in device for device in reported] == [True, False, False]
    assert devices == before


def test_a_device_without_jobs_has_an_empty_list_if_all_jobs_are_known() -> None:
    free = {"uuid": "GPU-a", "index": 0}
    assert with_jobs([free], {}, job_by_id) == [free]
    assert with_jobs([free], {}, job_by_id, all_known=lambda device: True) == [{**free, "jobs": []}]


def test_a_device_with_jobs_is_a_valid_record() -> None:
    tick = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": 1, "ts_ms": 1}
    (reported,) = with_jobs([device("7", "8")], {}, job_by_id)
    sample = decoder(Sample)(msgspec.json.encode({**tick, "devices": [reported]}))
    assert sample.devices[0].jobs is not None
    assert [(job.id, job.user, job.partition) for job in sample.devices[0].jobs] == [ALICES[:3], ("8", None, None)]


FROM_CGROUP, CLAIMED = Evidence(from_cgroup=True, uid=1000), Evidence(from_cgroup=False, uid=2000)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (None, CLAIMED, CLAIMED),
        (FROM_CGROUP, CLAIMED, FROM_CGROUP),
        (CLAIMED, FROM_CGROUP, FROM_CGROUP),
        (FROM_CGROUP, FROM_CGROUP._replace(user="alice", partition="gpu"), Evidence(True, "alice", "gpu", 1000)),
        (Evidence(True, "alice", "gpu", 1000), FROM_CGROUP, Evidence(True, "alice", "gpu", 1000)),
        (Evidence(True, "alice", "gpu", 1000), Evidence(True, "bob", "cpu", 1001), Evidence(True, "bob", "cpu", 1001)),
        (FROM_CGROUP, FROM_CGROUP._replace(uid=0), FROM_CGROUP),
        (FROM_CGROUP._replace(uid=0), FROM_CGROUP, FROM_CGROUP),
        (FROM_CGROUP._replace(uid=0), FROM_CGROUP._replace(uid=0), FROM_CGROUP._replace(uid=0)),
        (FROM_CGROUP._replace(uid=None), FROM_CGROUP._replace(uid=0), FROM_CGROUP._replace(uid=0)),
        (FROM_CGROUP._replace(uid=0), FROM_CGROUP._replace(uid=None), FROM_CGROUP._replace(uid=0)),
        (FROM_CGROUP, FROM_CGROUP._replace(uid=1001), FROM_CGROUP._replace(uid=1001)),
    ],
)
def test_a_control_group_wins_then_newer_evidence_and_root_last(
    first: Evidence | None, second: Evidence, expected: Evidence
) -> None:
    assert merged(first, second) == expected


def known_jobs_of(**names: str) -> KnownJobs:
    return KnownJobs(Users({int(uid.removeprefix("u")): name for uid, name in names.items()}.get, within_s=30.0))


def test_a_jobs_user_is_slurms_or_else_that_of_the_process_by_name_or_number() -> None:
    known_jobs = known_jobs_of(u1000="alice")
    known_jobs.learn("1", Evidence(True, "carol", "gpu", 1000))
    known_jobs.learn("2", Evidence(True, uid=1000))
    known_jobs.learn("3", Evidence(True, uid=1001))
    known_jobs.learn("4", Evidence(True))

    assert known_jobs.of("1") == Job("1", "carol", "gpu")
    assert [known_jobs.of(job_id).user for job_id in "2345"] == ["alice", "1001", None, None]


def test_the_cache_of_jobs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_MAX_CACHED", 2)
    known_jobs = known_jobs_of()
    known_jobs.learn("1", Evidence(True, "alice"))
    known_jobs.learn("2", Evidence(True, "bob"))
    known_jobs.of("1")
    known_jobs.learn("3", Evidence(True, "carol"))

    assert [known_jobs.of(job_id).user for job_id in "123"] == ["alice", None, "carol"]
