"""The owner of a process, from the path of its control group: a pod's container, a batch system's job, or neither.

In: process ids, and procfs. Out: the uid of the pod, the ids of the container and of the job, the user of the job, and
whether the process serves other processes.
State: the owners of the last processes, by process id and start time, because ids are used again; their jobs; and the
processes whose environment does not come.
On failure: a process that is missing in procfs has no owner (None). If it was there a moment ago, it ended after NVML
listed it, and keeps its last owner. A process whose control group names neither a pod nor a job has an empty owner. An
environment that can't be read without privileges is ignored. One that does not come in time is read again after 10 s.

If a process is in no pod and its control group names no job, the job is taken from its environment, where Slurm writes
it too. Users can change their environment. So the control group wins, and an environment that names another job than
the control group is ignored.

An MPS server, which computes for other processes, is recognised by its command name.

Source: Kubernetes names groups ``kubepods[...]-pod<uid>.slice/<runtime>-<id>.scope`` (systemd, ``_`` for ``-``) or
``kubepods/[burstable/]pod<uid>/<id>`` (cgroupfs), Slurm ``slurm/uid_<u>/job_<id>`` (v1) or
``slurmstepd.scope/job_<id>`` (v2). A reader in a namespace of its own sees only the part that differs from its own
path, so no pattern is anchored at the start. Groups may lie below a container's own, so none is anchored at the end.
"""

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from producers.node.jobs import Evidence, KnownJobs, cache_put, slurm_job
from producers.node.worker import ran_within

LARGEST_ENVIRON_BYTES = 256 * 1024
ENVIRON_WITHIN_S = 0.5  # the kernel waits for the lock of the process's memory, which a process that hangs may hold
ADOPTED_WITHIN_S = 10.0  # a process without an owner is read again after this: a batch system may adopt it
ENDED_WITHIN_S = 10.0  # for this long the id of an ended process still belongs to it
_MAX_OVERDUE = 4  # environments that do not come: each keeps a thread until it does
_MAX_CACHED = 16_384  # above the processes that a node has on its GPUs, or each tick would read all of them again
_START_TIME_INDEX = 19  # of field 22 of stat, counted from the parenthesis that closes field 2
_SERVICES = {"nvidia-cuda-mps": "mps"}  # by command, of which the kernel keeps 15 characters
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[/.:]|$)")
_CONTAINER = re.compile(r"(?:^|[/:-])(?<!/crio-conmon-)([0-9a-f]{64})(?=\.scope|/|$)")
_JOB = re.compile(r"/job_([0-9]+)(?=/|$)")
_UID = re.compile(r"^Uid:\s+([0-9]{1,10})\s", re.MULTILINE)  # the real user id, right for undumpable processes too


class ProcessOwner(NamedTuple):
    """The uid of a process's pod, and the ids of its container and its batch job, from its control group.
    ``service`` is "mps" for an MPS server."""

    pod_uid: str | None
    container_id: str | None
    job_id: str | None
    service: str | None = None


NO_OWNER = ProcessOwner(None, None, None)


def parse(text: str) -> ProcessOwner:
    """The owner in ``text``, which is all of ``/proc/<pid>/cgroup``; never raises.

    Each path gives the outermost pod, the container right below it, and the job if it is Slurm's. If there are several
    lines (one per hierarchy), those that name a pod win.
    """
    owners = []
    for path in (line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2):
        pod = _POD.search(path)
        container = _CONTAINER.search(path, pod.end() if pod else 0)
        job = _JOB.search(path) if "slurm" in path else None
        uid = pod[1].replace("_", "-") if pod else None
        owners.append(ProcessOwner(uid, container[1] if container else None, job[1] if job else None))
    if not owners:
        return NO_OWNER
    owners.sort(key=lambda owner: owner.pod_uid is None)
    return ProcessOwner(*(next(filter(None, values), None) for values in zip(*owners, strict=True)))


class _CachedProcess(NamedTuple):
    """The owner of a process that started at ``start_ticks``. It is read again at ``expires_s``; ``seen_s`` is when
    the process was last asked for."""

    start_ticks: int
    owner: ProcessOwner
    expires_s: float
    seen_s: float


class ProcessOwners:
    """Reads the owners of processes from ``procfs``, and caches them. For any thread.

    A process keeps its pod or job. A process without either is read again after 10 s, because a batch system may adopt
    it. Every job that is seen is added to ``jobs``. ``environ_within_s`` is how long an environment may take.
    """

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        jobs: KnownJobs | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        environ_within_s: float = ENVIRON_WITHIN_S,
    ) -> None:
        self._procfs, self._clock, self._environ_within_s = procfs, clock, environ_within_s
        self.jobs = jobs or KnownJobs()
        self._lock = threading.Lock()
        self._overdue: set[int] = set()
        self._cache: OrderedDict[int, _CachedProcess] = OrderedDict()

    def of(self, pid: int) -> ProcessOwner | None:
        """The owner of a process that NVML lists; None if it ended unseen, or the host's ids can't be seen here."""
        start_ticks = self._start_ticks(pid)
        with self._lock:
            cached, now_s = self._cache.get(pid), self._clock()
            if start_ticks is None:
                if cached is not None and now_s - cached.seen_s <= ENDED_WITHIN_S:
                    return cached.owner
                self._cache.pop(pid, None)
                return None
            if cached is not None and cached.start_ticks == start_ticks and cached.expires_s > now_s:
                self._cache[pid] = cached._replace(seen_s=now_s)
                self._cache.move_to_end(pid)
                return cached.owner
        directory = self._procfs / str(pid)
        owner = parse(_read(directory / "cgroup"))
        uid, from_cgroup = _UID.search(_read(directory / "status")), owner.job_id is not None
        evidence = Evidence(from_cgroup, uid=int(uid[1]) if uid else None)
        environ = b"" if owner.pod_uid else self._environ(pid)
        claimed = slurm_job(environ or b"")
        if claimed is not None and owner.job_id in (None, claimed.id):
            owner = owner._replace(job_id=claimed.id)
            evidence = Evidence(from_cgroup, claimed.user, claimed.partition, evidence.uid)
        expires_s = self._clock() + (ADOPTED_WITHIN_S if owner == NO_OWNER or environ is None else math.inf)
        owner = owner._replace(service=_SERVICES.get(_read(directory / "comm").removesuffix("\n")))
        if self._start_ticks(pid) != start_ticks:  # the id is another process's now
            return None
        if owner.job_id is not None:
            self.jobs.learn(owner.job_id, evidence)
        process = _CachedProcess(start_ticks, owner, expires_s, self._clock())
        with self._lock:
            cache_put(self._cache, pid, process, limit=_MAX_CACHED)
        return owner

    def _environ(self, pid: int) -> bytes | None:
        """The first part of the environment of a process; None if it does not come in time."""
        with self._lock:
            if pid in self._overdue or len(self._overdue) >= _MAX_OVERDUE:
                return None
        content: bytes | None = None

        def read() -> None:
            nonlocal content
            environ = _read_bytes(self._procfs / str(pid) / "environ", LARGEST_ENVIRON_BYTES)
            with self._lock:
                content = environ
                self._overdue.discard(pid)

        if ran_within(read, self._environ_within_s, name=f"environ-{pid}"):
            with self._lock:
                if content is None:
                    self._overdue.add(pid)
        return content

    def _start_ticks(self, pid: int) -> int | None:
        """When a process started, in clock ticks since the boot: together with its id this identifies the process.
        It is field 22 of ``stat``. Field 2, the command name in parentheses, may contain anything, parentheses too."""
        fields = _read(self._procfs / str(pid) / "stat").rpartition(")")[2].split()
        start_time = fields[_START_TIME_INDEX] if len(fields) > _START_TIME_INDEX else ""
        return int(start_time) if start_time.isdecimal() else None


def _read(path: Path) -> str:
    return _read_bytes(path).decode("ascii", "replace")


def _read_bytes(path: Path, size: int = -1) -> bytes:
    """At most ``size`` bytes of a file of procfs; empty if the file is hidden, or its process has just ended."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""
