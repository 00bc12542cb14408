"""The batch jobs that use a device, with their users.

In: devices with their processes, the jobs that files name for devices, the control groups and environments of
processes, and the user names of the machine's name service. Out: ``jobs`` of gpu.samples.
State: the user and the partition of the jobs seen last, and the names of users.
On failure: a user whose name can't be found is reported by number, and looked up again with the next process. If a
directory service hangs, the name is missing, and the reading goes on.

Source: the output variables of sbatch and srun. Each task of an array has its own SLURM_JOB_ID, the same as in the
control group's path. All components of a heterogeneous job have the id of the first one. Users can set the environment
of their processes, and every child process inherits it.
"""

import os
import pwd
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from producers.node.worker import ran_within

LONGEST_NAME_BYTES = 256
USER_WITHIN_S = 0.05  # enough for a file or a local cache, so that a job has its user's name from its first tick on
_MAX_CACHED = 4096  # jobs, and users: far above those that a node has at a time
_MAX_LOOKUPS = 4
_ROOT = 0
_JOB_ID = re.compile(rb"[0-9]{1,20}")
_FIRST_ID, _FIRST_PARTITION = b"SLURM_JOB_ID_HET_GROUP_0", b"SLURM_JOB_PARTITION_HET_GROUP_0"
_VARIABLES = (b"SLURM_JOB_ID", b"SLURM_JOB_USER", b"SLURM_JOB_PARTITION", _FIRST_ID, _FIRST_PARTITION)

K = TypeVar("K")
V = TypeVar("V")


class Job(NamedTuple):
    id: str
    user: str | None = None
    partition: str | None = None
    account: str | None = None


class Evidence(NamedTuple):
    """What one process tells about its job. ``from_cgroup``: its control group, which users can't choose, names the
    job. ``user`` and ``partition`` are from its environment; ``uid`` is the user id of the process."""

    from_cgroup: bool
    user: str | None = None
    partition: str | None = None
    uid: int | None = None


def with_jobs(
    devices: Iterable[Mapping[str, Any]],
    job_ids_by_file: Mapping[str, Sequence[str]],
    job_by_id: Callable[[str], Job],
    *,
    all_known: Callable[[Mapping[str, Any]], bool] = lambda device: False,
) -> list[Mapping[str, Any]]:
    """The devices of a tick as in gpu.samples, each with its jobs.

    The file names of ``job_ids_by_file`` are UUIDs of devices, or those of :func:`file_name`. ``all_known`` returns
    whether every job of a device is known, so that it gets an empty list if it has none.
    """
    jobs_of_devices = [(device, jobs_of(device, job_ids_by_file, job_by_id)) for device in devices]
    return [{**device, "jobs": jobs} if jobs or all_known(device) else device for device, jobs in jobs_of_devices]


def jobs_of(
    device: Mapping[str, Any], job_ids_by_file: Mapping[str, Sequence[str]], job_by_id: Callable[[str], Job]
) -> list[dict[str, str]]:
    """The jobs of a device, each once: those of its files, then those of its processes."""
    of_files = (*job_ids_by_file.get(file_name(device) or "", ()), *job_ids_by_file.get(device.get("uuid") or "", ()))
    of_processes = (process.get("job_id") for process in device.get("processes") or ())
    ids = dict.fromkeys(job_id for job_id in (*of_files, *of_processes) if job_id)
    return [{key: value for key, value in job_by_id(job_id)._asdict().items() if value is not None} for job_id in ids]


def file_name(device: Mapping[str, Any]) -> str | None:
    """The name of a device's file: ``2`` for the GPU of index 2, ``2.1`` for its GPU instance 1; None if unknown."""
    index, mig = device.get("index"), device.get("mig")
    if index is None or mig is None:
        return None if index is None else str(index)
    instance = mig.get("gpu_instance")
    return None if instance is None else f"{index}.{instance}"


def slurm_job(environ: bytes) -> Job | None:
    """The job that a process's ``/proc/<pid>/environ`` names; None if it names none. Never raises.

    ``environ`` has entries ``NAME=value``, each ended by a zero byte. A last entry without it was cut off, and is
    ignored. If a variable is there twice, the first one counts, as for getenv. A user or partition that can't be a
    name is None.
    """
    variables: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0")[:-1]:
        name, _, value = entry.partition(b"=")
        if name in _VARIABLES:
            variables.setdefault(name, value)
    job_id, user, partition, first_id, first_partition = (variables.get(name, b"") for name in _VARIABLES)
    if first_id == job_id:  # in a step of a heterogeneous job, SLURM_JOB_PARTITION is the last component's
        partition = first_partition or partition
    return Job(job_id.decode(), as_name(user), as_name(partition)) if _JOB_ID.fullmatch(job_id) else None


def as_name(raw: bytes) -> str | None:
    """The text of a name that a person chose; None if it is empty, over 256 bytes, not UTF-8, or not printable."""
    if not 0 < len(raw) <= LONGEST_NAME_BYTES:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def user_of_this_machine(uid: int) -> str | None:
    """The name of a user on this machine; None if there is no such user, or its name can't be printed."""
    try:
        return as_name(os.fsencode(pwd.getpwuid(uid).pw_name))
    except (KeyError, OverflowError):
        return None


def merged(old: Evidence | None, new: Evidence) -> Evidence:
    """The evidence of two processes for one job. A control group's wins, then the newer. Any user wins over root."""
    if old is None or new.from_cgroup != old.from_cgroup:
        return new if old is None or new.from_cgroup else old
    uid = old.uid if new.uid in (None, _ROOT) and old.uid is not None else new.uid
    return Evidence(new.from_cgroup, new.user or old.user, new.partition or old.partition, uid)


def cache_put(cache: OrderedDict[K, V], key: K, value: V, *, limit: int) -> None:
    """Store a value as the newest one; if there are more than ``limit``, the oldest is removed."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)


class Users:
    """The names of users, for any thread. ``lookup`` gives a name, and may never return."""

    def __init__(
        self, lookup: Callable[[int], str | None] = user_of_this_machine, *, within_s: float = USER_WITHIN_S
    ) -> None:
        self._lookup, self._within_s = lookup, within_s
        self._lock = threading.Lock()
        self._names: OrderedDict[int, str] = OrderedDict()
        self._lookups: set[int] = set()

    def look_up(self, uid: int) -> None:
        """Begin to look up a name, unless it is known, and wait a moment for it."""
        with self._lock:
            if uid in self._names or uid in self._lookups or len(self._lookups) >= _MAX_LOOKUPS:
                return
            self._lookups.add(uid)

        def look_up() -> None:
            name = None
            try:
                name = self._lookup(uid)
            finally:
                with self._lock:
                    self._lookups.discard(uid)
                    if name is not None:
                        cache_put(self._names, uid, name, limit=_MAX_CACHED)

        if not ran_within(look_up, self._within_s, name=f"user-{uid}"):
            with self._lock:
                self._lookups.discard(uid)

    def name(self, uid: int) -> str:
        """The name if it was found, else the number. Never waits."""
        with self._lock:
            if uid in self._names:
                self._names.move_to_end(uid)
            return self._names.get(uid, str(uid))


class KnownJobs:
    """The user and partition of the jobs seen last. For any thread."""

    def __init__(self, users: Users | None = None) -> None:
        self._users = users or Users()
        self._lock = threading.Lock()
        self._evidence: OrderedDict[str, Evidence] = OrderedDict()

    def learn(self, job_id: str, evidence: Evidence) -> None:
        if evidence.user is None and evidence.uid is not None:
            self._users.look_up(evidence.uid)
        with self._lock:
            cache_put(self._evidence, job_id, merged(self._evidence.get(job_id), evidence), limit=_MAX_CACHED)

    def any(self) -> bool:
        """Whether a process of a job was ever seen, so that this machine has a batch system."""
        return bool(self._evidence)

    def of(self, job_id: str) -> Job:
        """A job with all that is known of it. Its user is the one that Slurm names, else the user of its processes, by
        name or number."""
        with self._lock:
            evidence = self._evidence.get(job_id)
            if evidence is None:
                return Job(job_id)
            self._evidence.move_to_end(job_id)
        user = evidence.user or (None if evidence.uid is None else self._users.name(evidence.uid))
        return Job(job_id, user, evidence.partition)
