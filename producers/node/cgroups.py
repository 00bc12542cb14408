"""Where a process belongs, as the path of its control group says: a pod's container, a batch system's job, or neither.

In: process ids, and procfs. Out: the pod's uid, the container's id, the job's id, whose that job is, and whether the
process serves others.
State: the places of the last processes, by process id and start time, because ids are used again; and their jobs.
On failure: a process that is not in procfs has no place (None). If it was there just before, it has ended since NVML
listed it, and keeps the place that it had. A process whose group names nothing has an empty place. The environment of a
process may be unreadable without privileges; then it says nothing.

If a process is in no pod and its group names no job, the job is taken from its environment, because Slurm writes it
there, too. A user can set that to anything. So the group counts first, and an environment that names another job than
the group does not count.

An MPS server, which computes for the processes of others, is known by the name of its command.

Source: Kubernetes names groups ``kubepods[...]-pod<uid>.slice/<runtime>-<id>.scope`` (systemd, ``_`` for ``-``) or
``kubepods/[burstable/]pod<uid>/<id>`` (cgroupfs), Slurm ``slurm/uid_<u>/job_<id>`` (v1) or
``slurmstepd.scope/job_<id>`` (v2). A reader in a namespace of its own sees only the part that differs from its own
path, so nothing is anchored at the start; and groups may lie below a container's own, so nothing is at the end.
"""

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from producers.node.jobs import Evidence, KnownJobs, remember, slurm_job

LARGEST_ENVIRON_BYTES = 256 * 1024
ADOPTED_WITHIN_S = 10.0  # when a process that belonged nowhere is looked at again: it may have been adopted
ENDED_WITHIN_S = 10.0  # for this long the id of a process that has ended still stands for it
_REMEMBERED = 4096  # far above the processes that a node has on its GPUs
_START_TIME = 19  # the place of field 22 of stat behind the parenthesis that closes field 2
_SERVICES = {"nvidia-cuda-mps": "mps"}  # by command, of which the kernel keeps 15 characters
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[/.:]|$)")
_CONTAINER = re.compile(r"(?:^|[/:-])(?<!/crio-conmon-)([0-9a-f]{64})(?=\.scope|/|$)")
_JOB = re.compile(r"/job_([0-9]+)(?=/|$)")
_UID = re.compile(r"^Uid:\s+([0-9]{1,10})\s", re.MULTILINE)  # the real user id: right also if it may not be dumped


class ProcessPlace(NamedTuple):
    """What a process's control group says: the uid of its pod, the id of its container, and of its batch job.
    ``service`` is "mps" for an MPS server."""

    pod_uid: str | None
    container_id: str | None
    job_id: str | None
    service: str | None = None


NOWHERE = ProcessPlace(None, None, None)


def parse(text: str) -> ProcessPlace:
    """The place that the whole of ``/proc/<pid>/cgroup`` names; never raises.

    Of each path: the outermost pod, the container right below it, and the job if it is Slurm's. Of several lines (one
    per hierarchy), one that names a pod goes before others.
    """
    places = []
    for path in (line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2):
        pod = _POD.search(path)
        container = _CONTAINER.search(path, pod.end() if pod else 0)
        job = _JOB.search(path) if "slurm" in path else None
        uid = pod[1].replace("_", "-") if pod else None
        places.append(ProcessPlace(uid, container[1] if container else None, job[1] if job else None))
    if not places:
        return NOWHERE
    places.sort(key=lambda place: place.pod_uid is None)
    return ProcessPlace(*(next(filter(None, found), None) for found in zip(*places, strict=True)))


class _KnownProcess(NamedTuple):
    """Where a process belongs, which began then, how long that is believed, and when it was last seen."""

    started: int
    place: ProcessPlace
    until_s: float
    seen_s: float


class Places:
    """Asks ``procfs`` for the places of processes, from any thread, and remembers them.

    A process in a pod or a job stays there. Any other is looked at again after 10 s, because a batch system may adopt
    it. ``jobs`` learns of each job.
    """

    def __init__(
        self, procfs: Path = Path("/proc"), jobs: KnownJobs | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._procfs, self._clock = procfs, clock
        self.jobs = jobs or KnownJobs()
        self._lock = threading.Lock()
        self._known: OrderedDict[int, _KnownProcess] = OrderedDict()

    def of(self, pid: int) -> ProcessPlace | None:
        """The place of a process that NVML lists; None if it ended unseen, or the host's ids can't be seen here."""
        started = self._started(pid)
        with self._lock:
            known, now_s = self._known.get(pid), self._clock()
            if started is None:
                if known is not None and now_s - known.seen_s <= ENDED_WITHIN_S:
                    return known.place
                self._known.pop(pid, None)
                return None
            if known is not None and known.started == started and known.until_s > now_s:
                self._known[pid] = known._replace(seen_s=now_s)
                self._known.move_to_end(pid)
                return known.place
        folder = self._procfs / str(pid)
        place = parse(_read(folder / "cgroup"))
        uid, sure = _UID.search(_read(folder / "status")), place.job_id is not None
        shown = Evidence(sure, uid=int(uid[1]) if uid else None)
        claimed = None if place.pod_uid else slurm_job(_read_bytes(folder / "environ", LARGEST_ENVIRON_BYTES))
        if claimed is not None and place.job_id in (None, claimed.id):
            place = place._replace(job_id=claimed.id)
            shown = Evidence(sure, claimed.user, claimed.partition, shown.uid)
        until_s = self._clock() + (ADOPTED_WITHIN_S if place == NOWHERE else math.inf)
        place = place._replace(service=_SERVICES.get(_read(folder / "comm").removesuffix("\n")))
        if self._started(pid) != started:
            return None
        if place.job_id is not None:
            self.jobs.learn(place.job_id, shown)
        with self._lock:
            remember(self._known, pid, _KnownProcess(started, place, until_s, self._clock()), most=_REMEMBERED)
        return place

    def _started(self, pid: int) -> int | None:
        """When a process began, in ticks since the boot: with its id, which process it is. That is field 22 of
        ``stat``; field 2, the command's name in parentheses, may hold anything, parentheses too."""
        fields = _read(self._procfs / str(pid) / "stat").rpartition(")")[2].split()
        return int(fields[_START_TIME]) if len(fields) > _START_TIME and fields[_START_TIME].isdecimal() else None


def _read(path: Path) -> str:
    return _read_bytes(path).decode("ascii", "replace")


def _read_bytes(path: Path, most: int = -1) -> bytes:
    """At most ``most`` bytes of a file of procfs; nothing if it is hidden, or its process ends just now."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""
