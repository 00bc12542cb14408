"""Where a process belongs, as the path of its control group says: a pod's container, a batch system's job, or neither.

In: process ids, and procfs. Out: the pod's uid, the container's id, the job's id, whose that job is, and whether the
process serves others.
State: the places of the processes asked for last, by process id and start time: ids are used again; and their jobs.
On failure: a process that can't be seen has no place (None), but for one that was seen just before: it has ended since
NVML listed it, and is where it was. One whose group says nothing has an empty place. Where the environment may not be
read, which is how it is without privileges, it says nothing.

Outside of pods a job that no group names is taken from the environment, where Slurm puts it too. A user can set that to
anything, so the group goes before it, and what it says of another job than the group's does not count.

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

from producers.node.jobs import Evidence, Job, KnownJobs
from producers.node.slurm import Claim, claim

LARGEST_ENVIRON_BYTES = 256 * 1024

ADOPTED_WITHIN_S = 10.0
"""After so long it is looked again whether a process that belonged nowhere has been put somewhere."""

ENDED_WITHIN_S = 10.0
"""So long after it was last seen an id without a process is still that of the one that was there."""

_REMEMBERED = 4096
"""Far above the processes that a node has on its GPUs."""

_START_TIME = 19
"""The place of field 22 of ``stat`` behind the parenthesis that closes field 2."""

_SERVICES = {"nvidia-cuda-mps": "mps"}
"""By command, of which the kernel keeps 15 characters: ``nvidia-cuda-mps-server`` and ``nvidia-cuda-mps-control``."""

_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[/.:]|$)")
_CONTAINER = re.compile(r"(?:^|[/:-])(?<!/crio-conmon-)([0-9a-f]{64})(?=\.scope|/|$)")
_JOB = re.compile(r"/job_([0-9]+)(?=/|$)")
_UID = re.compile(r"^Uid:\s+([0-9]{1,10})\s", re.MULTILINE)
"""The real one: unlike the folder's owner, it is right for processes that may not be dumped too."""


class Place(NamedTuple):
    """What a process's control group says: the uid of its pod, the id of its container, and of its batch job.

    ``service`` is "mps" for an MPS server.
    """

    pod_uid: str | None
    container_id: str | None
    job_id: str | None
    service: str | None = None


NOWHERE = Place(None, None, None)


def parse(text: str) -> Place:
    """The place that the whole of ``/proc/<pid>/cgroup`` names; never raises.

    Of several lines (one per hierarchy), one that names a pod goes before others.
    """
    paths = [line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2]
    places = sorted(map(_of_path, paths), key=lambda place: place.pod_uid is None)
    return Place(*(next(filter(None, found), None) for found in zip(*places, strict=True))) if places else NOWHERE


def _of_path(path: str) -> Place:
    """The outermost pod of a path, the container right below it, and the job if it is Slurm's."""
    pod = _POD.search(path)
    container = _CONTAINER.search(path, pod.end() if pod else 0)
    job = _JOB.search(path) if "slurm" in path else None
    return Place(
        pod[1].replace("_", "-") if pod else None, container[1] if container else None, job[1] if job else None
    )


class _Known(NamedTuple):
    """Where a process belongs, which began then, how long that is believed, and when it was last seen."""

    started: int
    place: Place
    until_s: float
    seen_s: float


class Places:
    """Asks ``procfs`` for the places of processes, from any thread, and remembers them: what names a pod or a job for
    good, else for 10 s, since a batch system may adopt a process after it began."""

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        jobs: KnownJobs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._procfs, self._clock = procfs, clock
        self._jobs = jobs or KnownJobs()
        self._lock = threading.Lock()
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def of(self, pid: int) -> Place | None:
        """The place of a process that NVML lists; None where it is not in procfs, and was not just before: it ended
        unseen, or the host's ids are not visible here."""
        started = self._started(pid)
        if started is None:
            return self._last_seen(pid)
        return self._recall(pid, started) or self._look(pid, started)

    def job(self, job_id: str) -> Job:
        """Whose job it is, as far as its processes showed."""
        return self._jobs.of(job_id)

    def _look(self, pid: int, started: int) -> Place | None:
        """Read a place; None where the process ended meanwhile: the id may be another's by now."""
        folder = self._procfs / str(pid)
        by_group = parse(_read(folder / "cgroup") or "")
        claimed = claim(_read_bytes(folder / "environ", LARGEST_ENVIRON_BYTES) or b"") if not by_group.pod_uid else None
        booked, shown = _booked(by_group, claimed, _uid(_read(folder / "status") or ""))
        place = booked._replace(service=_SERVICES.get((_read(folder / "comm") or "").removesuffix("\n")))
        if self._started(pid) != started:
            return None
        if place.job_id is not None:
            self._jobs.learn(place.job_id, shown)
        now_s = self._clock()
        believed_s = ADOPTED_WITHIN_S if booked == NOWHERE else math.inf
        self._remember(pid, _Known(started, place, now_s + believed_s, now_s))
        return place

    def _started(self, pid: int) -> int | None:
        """When a process began, in ticks since the boot: with its id, which process it is."""
        return _start_time(_read(self._procfs / str(pid) / "stat") or "")

    def _recall(self, pid: int, started: int) -> Place | None:
        with self._lock:
            known, now_s = self._known.get(pid), self._clock()
            if known is None or known.started != started or known.until_s <= now_s:
                return None
            self._known[pid] = known._replace(seen_s=now_s)
            self._known.move_to_end(pid)
            return known.place

    def _last_seen(self, pid: int) -> Place | None:
        """The place of a process that has ended; later its id may be another's."""
        with self._lock:
            known = self._known.get(pid)
            if known is not None and self._clock() - known.seen_s <= ENDED_WITHIN_S:
                return known.place
            self._known.pop(pid, None)
            return None

    def _remember(self, pid: int, known: "_Known") -> None:
        with self._lock:
            self._known[pid] = known
            self._known.move_to_end(pid)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)


def _start_time(stat: str) -> int | None:
    """Field 22 of ``stat``. Field 2, the command's name in parentheses, may hold anything, parentheses too."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[_START_TIME]) if len(fields) > _START_TIME and fields[_START_TIME].isdecimal() else None


def _booked(place: Place, claimed: Claim | None, uid: int | None) -> tuple[Place, Evidence]:
    """Where a process belongs by its group, else by its environment, and what it shows of its job."""
    if claimed is None or place.job_id not in (None, claimed.job_id):
        return place, Evidence(sure=place.job_id is not None, uid=uid)
    shown = Evidence(place.job_id is not None, claimed.user, claimed.partition, uid)
    return place._replace(job_id=claimed.job_id), shown


def _uid(status: str) -> int | None:
    """Who began a process."""
    found = _UID.search(status)
    return int(found[1]) if found else None


def _read(path: Path) -> str | None:
    content = _read_bytes(path)
    return None if content is None else content.decode("ascii", "replace")


def _read_bytes(path: Path, most: int = -1) -> bytes | None:
    """A file of procfs, at most so much of it; None where it can't be read: hidden, or its process ends just now."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return None
