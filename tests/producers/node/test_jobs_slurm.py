"""The job of a process is read from its environment, whatever bytes that has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.node.jobs import LONGEST_NAME_BYTES, Job, as_name, slurm_job

BATCH = b"PATH=/usr/bin\0SLURM_JOB_ID=4242\0SLURM_JOB_USER=alice\0SLURM_JOB_PARTITION=gpu\0HOME=/home/alice\0"
NAMES = [b"SLURM_JOB_ID", b"SLURM_JOB_USER", b"SLURM_JOB_PARTITION", b"=", b"\0", b"7", b"\xff", b"alice", b"\n"]


def test_a_batch_job_names_itself_its_user_and_its_partition() -> None:
    assert slurm_job(BATCH) == Job("4242", "alice", "gpu")


def test_the_number_of_an_array_task_is_its_own_and_not_the_arrays() -> None:
    environ = b"SLURM_ARRAY_JOB_ID=4240\0SLURM_ARRAY_TASK_ID=2\0SLURM_JOB_ID=4242\0SLURM_JOBID=4242\0"
    assert slurm_job(environ) == Job("4242", None, None)


def test_the_partition_of_a_heterogeneous_job_is_that_of_the_component_with_its_number() -> None:
    environ = (  # of a step of 24.11.5, in the component 4242 as in 4243
        b"SLURM_JOB_PARTITION_HET_GROUP_1=gpu\0SLURM_JOB_ID_HET_GROUP_0=4242\0SLURM_HET_SIZE=2\0SLURM_JOB_PARTITION=gpu\0"
        b"SLURM_JOB_PARTITION_HET_GROUP_0=cpu\0SLURM_JOB_ID_HET_GROUP_1=4243\0SLURM_JOB_ID=4242\0SLURM_JOB_USER=bob\0"
    )
    assert slurm_job(environ) == Job("4242", "bob", "cpu")
    submitted_from_there = environ.replace(b"SLURM_JOB_ID=4242\0", b"SLURM_JOB_ID=4300\0")
    assert slurm_job(submitted_from_there) == Job("4300", "bob", "gpu")


@pytest.mark.parametrize(
    "environ",
    [
        b"",
        b"\0",
        b"PATH=/usr/bin\0",
        b"SLURM_JOB_USER=alice\0SLURM_JOB_PARTITION=gpu\0",
        b"SLURM_JOB_ID\0",
        b"SLURM_JOB_ID=\0",
        b"SLURM_JOB_ID=4242 \0",
        b"SLURM_JOB_ID=4242_1\0",
        b"SLURM_JOB_ID=-1\0",
        b"SLURM_JOB_ID=" + "٣".encode() + b"\0",
        b"SLURM_JOB_ID=" + b"1" * 21 + b"\0",
        b"XSLURM_JOB_ID=4242\0",
        b"slurm_job_id=4242\0",
        b"=SLURM_JOB_ID=4242\0",
    ],
)
def test_an_environment_without_a_job_id_names_no_job(environ: bytes) -> None:
    assert slurm_job(environ) is None


def test_a_variable_that_was_cut_off_does_not_count() -> None:
    assert slurm_job(b"SLURM_JOB_ID=42") is None
    assert slurm_job(b"SLURM_JOB_ID=42\0SLURM_JOB_USER=ali") == Job("42", None, None)


def test_if_a_variable_occurs_twice_the_first_counts() -> None:
    assert slurm_job(b"SLURM_JOB_ID=1\0SLURM_JOB_ID=2\0") == Job("1", None, None)
    assert slurm_job(b"SLURM_JOB_ID=x\0SLURM_JOB_ID=2\0") is None


@pytest.mark.parametrize("user", [b"", b"a\nb", b"a\x1b[31m", b"\xff\xfe", b"a" * 257, b"a\x7f"])
def test_an_impossible_name_is_left_out(user: bytes) -> None:
    assert slurm_job(b"SLURM_JOB_USER=" + user + b"\0SLURM_JOB_ID=7\0SLURM_JOB_PARTITION=gpu\0") == Job(
        "7", None, "gpu"
    )


def test_a_name_may_hold_any_letters_and_an_equals_sign() -> None:
    assert slurm_job("SLURM_JOB_ID=7\0SLURM_JOB_USER=zoë=b\0".encode()) == Job("7", "zoë=b", None)


@given(st.binary() | st.lists(st.sampled_from(NAMES)).map(b"".join))
def test_any_environment_can_be_read(environ: bytes) -> None:
    job = slurm_job(environ)
    if job is None:
        return
    assert b"SLURM_JOB_ID=" + job.id.encode() + b"\0" in environ
    for name in (job.user, job.partition):
        assert name is None or (name.isprintable() and name.encode() in environ)


@given(
    st.binary(max_size=LONGEST_NAME_BYTES + 2) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace"))
)
def test_a_name_is_its_exact_bytes_or_none(raw: bytes) -> None:
    name = as_name(raw)
    assert name is None or (name.encode() == raw and name.isprintable() and 0 < len(raw) <= LONGEST_NAME_BYTES)
