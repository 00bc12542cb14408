"""Which GPUs a new process would see: this one sees only those that were there when it attached to the driver.

In: a short-lived child that loads NVML for itself. Out: the UUIDs of the GPUs that work.
State: the child that runs, at most one.
On failure: a child that fails, is slow or says nonsense gives None, which changes nothing. One that can't even be
killed is left alone, and there is no other until it has ended.

Why a child: to attach anew here, this process would have to detach first. Without persistence mode the driver would
take that for the end of the GPUs' use, and reset their volatile counters.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pynvml

from producers.node.nvml.worker import Worker

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
