"""What Slurm told a process of its job, in the environment that the process began with.

In: the bytes of ``/proc/<pid>/environ``. Out: the job's id, its user, its partition.
On failure: never raises; what can't be a name is as if it were not there.

Source: the output variables of sbatch and srun. SLURM_JOB_ID is a number of its own for each task of an array, as in
the control group's path; the components of a heterogeneous job are told the first one's. The environment is the user's:
whatever is started inherits it, and anybody may set it.
"""

import re
from typing import NamedTuple

LONGEST_NAME_BYTES = 256

_JOB_ID = re.compile(rb"[0-9]{1,20}")
_VARIABLES = (b"SLURM_JOB_ID", b"SLURM_JOB_USER", b"SLURM_JOB_PARTITION")


class Claim(NamedTuple):
    """The job that a process says it is of."""

    job_id: str
    user: str | None
    partition: str | None


def claim(environ: bytes) -> Claim | None:
    """What an environment of ``NAME=value`` and a zero each says; None where it names no job.

    Of a variable that is there twice the first counts, as for getenv. The end may be cut off: what no zero follows does
    not count.
    """
    found: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0")[:-1]:
        name, _, value = entry.partition(b"=")
        if name in _VARIABLES:
            found.setdefault(name, value)
    job_id, user, partition = (found.get(name, b"") for name in _VARIABLES)
    if not _JOB_ID.fullmatch(job_id):
        return None
    return Claim(job_id.decode(), as_name(user), as_name(partition))


def as_name(raw: bytes) -> str | None:
    """The text of a name, as people gave it; None where it is empty, over 256 bytes, no UTF-8, or can't be printed."""
    if not 0 < len(raw) <= LONGEST_NAME_BYTES:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None
