"""Which GPUs a new process would see, and whether NVML is to be opened again for them: this process sees only those
that were there when it attached to the driver.

In: a short-lived child that loads NVML for itself. Out: the UUIDs of the GPUs that work, and why NVML is to be opened
again.
State: the child that runs, at most one; for each GPU, how often opening was in vain, and when it may be tried again.
On failure: a child that fails, is slow or says nonsense gives None, which changes nothing. One that can't even be
killed is left alone, and there is no other until it has ended.

Why a child: to attach again here, this process would have to detach first. Without persistence mode the driver would
take that for the end of the GPUs' use, and reset their volatile counters.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import pynvml

from producers.node.nvml.worker import Worker

LONGEST_S = 3600.0
"""Opening NVML for a GPU that does not work afterwards either is tried at least this often."""

_SCRIPT = """
import json, sys
sys.path.append(sys.argv[1])
import pynvml

def works(index):
    uuid = None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return uuid if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED else None
    return uuid

pynvml.nvmlInit()
print(json.dumps([uuid for uuid in map(works, range(pynvml.nvmlDeviceGetCount())) if uuid]))
"""


class Census:
    """Asks a child. ``command`` is for tests."""

    def __init__(self, *, within_s: float = 10.0, command: Sequence[str] | None = None) -> None:
        self._within_s = within_s
        self._command = command or (sys.executable, "-I", "-S", "-c", _SCRIPT, str(Path(pynvml.__file__).parent))
        self._worker = Worker("nvml-census")
        self._child: subprocess.Popen[bytes] | None = None

    async def take(self) -> frozenset[str] | None:
        """The UUIDs of the GPUs that work; None where that can't be found out now."""
        if self._worker.busy:
            return None
        return await self._worker.ask(self._count)

    def close(self) -> None:
        """End the child, without waiting for its end."""
        self._worker.stop()
        if (child := self._child) is not None:
            child.kill()

    def _count(self) -> frozenset[str] | None:
        if self._child is not None and self._child.poll() is None:
            return None
        devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            self._child = subprocess.Popen(self._command, stdin=devnull, stdout=pipe, stderr=devnull)  # noqa: S603 - ours
        except OSError:  # no process or no memory is to be had
            return None
        return self._heard(self._child)

    def _heard(self, child: "subprocess.Popen[bytes]") -> frozenset[str] | None:
        try:
            said, _ = child.communicate(timeout=self._within_s)
        except subprocess.TimeoutExpired:
            child.kill()
            if child.stdout is not None:
                child.stdout.close()
            return None
        return parse(said) if child.returncode == 0 else None


def parse(said: bytes) -> frozenset[str] | None:
    """The UUIDs that a child names; None where it says something else."""
    try:
        uuids = json.loads(said)
    except ValueError:
        return None
    if not isinstance(uuids, list) or not all(isinstance(uuid, str) and uuid for uuid in uuids):
        return None
    return frozenset(uuids)


class _Tried(NamedTuple):
    times: int
    again_s: float


class Reopening:
    """Opening NVML again for a GPU that does not work afterwards either is tried less and less often: it interrupts the
    others."""

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._clock = first_s, clock
        self._tried: dict[str, _Tried] = {}

    def worked(self, uuid: str) -> None:
        """The GPU answered."""
        self._tried.pop(uuid, None)

    def why(self, seen: Set[str], working: Set[str | None]) -> str | None:
        """Why NVML is to be opened again, where ``seen`` are the GPUs that work for a new process, and ``working``
        those that work for this one."""
        missing = sorted(uuid for uuid in seen - working if self._is_due(uuid))
        self._note(missing)
        return f"{', '.join(missing)} would answer a new process, and not this one" if missing else None

    def _is_due(self, uuid: str) -> bool:
        tried = self._tried.get(uuid)
        return tried is None or self._clock() >= tried.again_s

    def _note(self, missing: Iterable[str]) -> None:
        for uuid in missing:
            times = self._tried[uuid].times + 1 if uuid in self._tried else 0
            again_s = self._clock() + min(LONGEST_S, self._first_s * 2**times)
            self._tried[uuid] = _Tried(times, again_s)
