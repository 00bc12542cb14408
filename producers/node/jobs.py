"""Which jobs of a batch system use a device, and whose they are.

In: devices with their processes, the jobs that files name for devices, what processes show of their jobs, and what the
machine's name service knows of users. Out: ``jobs`` of gpu.samples.
State: the user and the partition of the jobs seen last, and the names of users.
On failure: a user without a name is called by number, and looked up again with the next process. If a directory service
hangs, a name is missing, and the reading goes on.

Source: the output variables of sbatch and srun. Each task of an array has a SLURM_JOB_ID of its own, the same as in the
control group's path; all components of a heterogeneous job have the first one's. The environment belongs to the user:
every process that is started inherits it, and anybody may set it.
"""

import os
import pwd
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

LONGEST_NAME_BYTES = 256
USER_WITHIN_S = 0.05  # enough for a file or a local cache, so that a job has its user's name from its first tick on
_REMEMBERED = 4096  # jobs, and users: far above those that a node has at a time
_MOST_LOOKUPS = 4
_ROOT = 0
_JOB_ID = re.compile(rb"[0-9]{1,20}")
_VARIABLES = (b"SLURM_JOB_ID", b"SLURM_JOB_USER", b"SLURM_JOB_PARTITION")

K = TypeVar("K")
V = TypeVar("V")

JobDict = dict[str, str]


class Job(NamedTuple):
    id: str
    user: str | None = None
    partition: str | None = None
    account: str | None = None


class Evidence(NamedTuple):
    """What one process shows of its job. ``sure``: its control group, which a user can't choose, says that it is of it.
    ``user`` and ``partition`` are as its environment names them, ``uid`` is who began it."""

    sure: bool
    user: str | None = None
    partition: str | None = None
    uid: int | None = None


def with_jobs(
    devices: Iterable[Mapping[str, Any]],
    mapped: Mapping[str, Sequence[str]],
    known: Callable[[str], Job],
    *,
    all_known: bool = False,
) -> list[Mapping[str, Any]]:
    """The devices of a tick as in gpu.samples, each with its jobs. ``mapped`` has the jobs by the names of files: a
    device's UUID, or see :func:`file_name`. ``all_known``: a device without a job has none; else it is not known."""
    found = [(device, jobs_of(device, mapped, known)) for device in devices]
    return [{**device, "jobs": jobs} if jobs or all_known else device for device, jobs in found]


def jobs_of(
    device: Mapping[str, Any], mapped: Mapping[str, Sequence[str]], known: Callable[[str], Job]
) -> list[JobDict]:
    """The jobs of a device, each once: those of its file, then those of its processes. ``known`` gives each by id."""
    of_file = (*mapped.get(file_name(device) or "", ()), *mapped.get(device.get("uuid") or "", ()))
    of_processes = (process.get("job_id") for process in device.get("processes") or ())
    ids = dict.fromkeys(job_id for job_id in (*of_file, *of_processes) if job_id)
    return [{key: value for key, value in known(job_id)._asdict().items() if value is not None} for job_id in ids]


def file_name(device: Mapping[str, Any]) -> str | None:
    """What a device's file is called: ``2`` is the GPU of index 2, ``2.1`` its GPU instance 1."""
    index, mig = device.get("index"), device.get("mig")
    if index is None or mig is None:
        return None if index is None else str(index)
    instance = mig.get("gpu_instance")
    return None if instance is None else f"{index}.{instance}"


def slurm_job(environ: bytes) -> Job | None:
    """The job that a process's ``/proc/<pid>/environ`` names, ``NAME=value`` and a zero each; None if it names none.
    Never raises; what can't be a name is as if it were not there.

    Of a variable that is there twice the first counts, as for getenv. The end may be cut off: what no zero follows does
    not count.
    """
    found: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0")[:-1]:
        name, _, value = entry.partition(b"=")
        if name in _VARIABLES:
            found.setdefault(name, value)
    job_id, user, partition = (found.get(name, b"") for name in _VARIABLES)
    return Job(job_id.decode(), as_name(user), as_name(partition)) if _JOB_ID.fullmatch(job_id) else None


def as_name(raw: bytes) -> str | None:
    """The text of a name, as people gave it; None if it is empty, over 256 bytes, no UTF-8, or can't be printed."""
    if not 0 < len(raw) <= LONGEST_NAME_BYTES:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def user_of_this_machine(uid: int) -> str | None:
    """What the machine calls a user; None if it knows none, or calls it what can't be printed."""
    try:
        return as_name(os.fsencode(pwd.getpwuid(uid).pw_name))
    except (KeyError, OverflowError):
        return None


def merged(known: Evidence | None, new: Evidence) -> Evidence:
    """What two processes show of one job: what is sure wins, then the later one; any other user wins over root."""
    if known is None or new.sure != known.sure:
        return new if known is None or new.sure else known
    uid = known.uid if new.uid in (None, _ROOT) and known.uid is not None else new.uid
    return Evidence(new.sure, new.user or known.user, new.partition or known.partition, uid)


def remember(known: OrderedDict[K, V], key: K, value: V, *, most: int) -> None:
    """Keep the value as the newest one, and at most ``most`` of them."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


class Users:
    """The names of users, for any thread. ``lookup`` gives a name, and may take for ever."""

    def __init__(
        self, lookup: Callable[[int], str | None] = user_of_this_machine, *, within_s: float = USER_WITHIN_S
    ) -> None:
        self._lookup, self._within_s = lookup, within_s
        self._lock = threading.Lock()
        self._names: OrderedDict[int, str] = OrderedDict()
        self._asked: set[int] = set()

    def ask(self, uid: int) -> None:
        """Find a name out; waits a moment for it, once."""
        with self._lock:
            if uid in self._names or uid in self._asked or len(self._asked) >= _MOST_LOOKUPS:
                return
            self._asked.add(uid)

        def find() -> None:
            name = None
            try:
                name = self._lookup(uid)
            finally:
                with self._lock:
                    self._asked.discard(uid)
                    if name is not None:
                        remember(self._names, uid, name, most=_REMEMBERED)

        lookup = threading.Thread(target=find, name=f"user-{uid}", daemon=True)
        lookup.start()
        lookup.join(self._within_s)

    def name(self, uid: int) -> str:
        """The name if it has been found, else the number. Never waits."""
        with self._lock:
            if uid in self._names:
                self._names.move_to_end(uid)
            return self._names.get(uid, str(uid))


class KnownJobs:
    """Remembers whose the last jobs are. For any thread."""

    def __init__(self, users: Users | None = None) -> None:
        self._users = users or Users()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Evidence] = OrderedDict()

    def learn(self, job_id: str, shown: Evidence) -> None:
        if shown.user is None and shown.uid is not None:
            self._users.ask(shown.uid)
        with self._lock:
            remember(self._known, job_id, merged(self._known.get(job_id), shown), most=_REMEMBERED)

    def any(self) -> bool:
        """Whether a process of a job was ever seen: there is a batch system on this machine."""
        return bool(self._known)

    def of(self, job_id: str) -> Job:
        """All that is known of a job. The user is who Slurm says, else who began its processes, by name or number."""
        with self._lock:
            known = self._known.get(job_id)
            if known is None:
                return Job(job_id)
            self._known.move_to_end(job_id)
        user = known.user or (None if known.uid is None else self._users.name(known.uid))
        return Job(job_id, user, known.partition)
