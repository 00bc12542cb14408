"""Which jobs of a batch system use a device, and whose they are.

In: devices with their processes, the jobs that files name for devices, and what processes show of their jobs.
Out: ``jobs`` of gpu.samples. State: the user and the partition of the jobs seen last.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.users import Users

_REMEMBERED = 4096
"""Far above the jobs that a node has at a time."""

_ROOT = 0

JobDict = dict[str, str]


class Job(NamedTuple):
    """A job, as far as it is known."""

    id: str
    user: str | None = None
    partition: str | None = None


class Evidence(NamedTuple):
    """What one process shows of its job. ``sure``: its control group, which a user can't choose, says that it is of it.

    ``user`` and ``partition`` are as its environment names them, ``uid`` is who began it.
    """

    sure: bool
    user: str | None = None
    partition: str | None = None
    uid: int | None = None


def with_jobs(
    devices: Iterable[Mapping[str, Any]], mapped: Mapping[str, Sequence[str]], known: Callable[[str], Job]
) -> list[Mapping[str, Any]]:
    """The devices of a tick as in gpu.samples, each with its jobs if it has any. ``mapped``: see :func:`file_name`."""
    found = [(device, jobs_of(device, mapped, known)) for device in devices]
    return [{**device, "jobs": jobs} if jobs else device for device, jobs in found]


def jobs_of(
    device: Mapping[str, Any], mapped: Mapping[str, Sequence[str]], known: Callable[[str], Job]
) -> list[JobDict]:
    """The jobs of a device, each once: those of its file, then those of its processes. ``known`` tells whose one is."""
    of_file = mapped.get(file_name(device) or "", ())
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


def merged(known: Evidence | None, new: Evidence) -> Evidence:
    """What two processes show of one job: what is sure wins, then what is newer; any other user goes before root."""
    if known is None or new.sure != known.sure:
        return new if known is None or new.sure else known
    uid = known.uid if new.uid in (None, _ROOT) and known.uid is not None else new.uid
    return Evidence(new.sure, new.user or known.user, new.partition or known.partition, uid)


class KnownJobs:
    """Remembers, from any thread and of so many jobs, whose they are."""

    def __init__(self, users: Users | None = None) -> None:
        self._users = users or Users()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Evidence] = OrderedDict()

    def learn(self, job_id: str, shown: Evidence) -> None:
        """Take what a process shows of its job."""
        if shown.user is None and shown.uid is not None:
            self._users.ask(shown.uid)
        with self._lock:
            self._known[job_id] = merged(self._known.get(job_id), shown)
            self._known.move_to_end(job_id)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def of(self, job_id: str) -> Job:
        """All that is known of a job. The user is who Slurm says, else who began its processes, by name or number."""
        with self._lock:
            known = self._known.get(job_id)
            if known is None:
                return Job(job_id)
            self._known.move_to_end(job_id)
        user = known.user or (None if known.uid is None else self._users.name(known.uid))
        return Job(job_id, user, known.partition)
