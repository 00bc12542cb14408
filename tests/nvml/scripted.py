"""The scripted NVML library: built with the system's compiler, and steered while the real bindings use it.

    nvml = ScriptedNvml(tmp_path, gpus=2)
    process = subprocess.Popen([...], env=os.environ | nvml.environment())
    nvml.set(0, utilization_gpu=93)
    nvml.lose(1)

What it answers by default differs by GPU and stays as it is; only the energy and PCIe counters run.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from producers.node.nvml.driver import ENDS_WITHIN_S

SOURCE = Path(__file__).with_name("nvml.c")
SONAME = "libnvidia-ml.so.1"
NO_INSTANCE = 0xFFFFFFFF
NOT_AVAILABLE = 0xFFFFFFFF_FFFFFFFF
EMPTY = 10000
DRIVER = {"ok": 0, "absent": 9, "mismatch": 18}
"""What nvmlInit answers: success, ERROR_DRIVER_NOT_LOADED, ERROR_LIB_RM_VERSION_MISMATCH."""

NAMES = """
uuid name serial vbios pci_bus_id minor persistence_mode mig_mode driver_version cuda_driver_version utilization_gpu
utilization_memory utilization_encoder utilization_decoder memory_total memory_reserved memory_used memory_free
power_mw power_instant_mw power_limit_mw power_default_limit_mw energy_mj energy_rate_mw temperature
memory_temperature graphics_clock_mhz sm_clock_mhz memory_clock_mhz video_clock_mhz clock_event_reasons fan_speed
performance_state pcie_replays pcie_tx_bytes pcie_rx_bytes pcie_tx_rate pcie_rx_rate ecc_corrected_volatile
ecc_uncorrected_volatile ecc_corrected_aggregate ecc_uncorrected_aggregate rows_correctable rows_uncorrectable
row_remap_pending row_remap_failure retired_single_bit retired_double_bit retired_pending throttled_power_ns
throttled_thermal_ns throttled_ns gpm_supported sample_period_us utilization_samples power_samples_mw
throttled_thermal_ns throttled_ns event_types
nvlink_crc_errors nvlink_replay_errors nvlink_recovery_errors nvlink_tx_kib nvlink_rx_kib nvlink_tx_rate nvlink_rx_rate
power_min_limit_mw power_max_limit_mw max_graphics_clock_mhz max_sm_clock_mhz max_memory_clock_mhz max_video_clock_mhz
vgpu_supported vgpu_licensed process_v3_bytes
"""
KEYS = frozenset(NAMES.split())
"""What :meth:`ScriptedNvml.set` takes, in NVML's own units. Samples are a list in turn, as text: "10 90".

And ``type_N``, the value type that field N says it has; ``gpm_N``, what GPM says for metric N, as text or number;
``gpm_N_giM``, what it says of GPU instance M.
"""
_NUMBERED = re.compile(r"type_\d+|gpm_\d+(_gi\d+)?")


class NoCompiler(Exception):
    """There is no C compiler to build the library with; the message says how to get one."""


class Process(NamedTuple):
    """A process on a GPU. ``bytes`` None: not available. Percentages are what process utilization says."""

    pid: int
    bytes: int | None
    sm: int = 10
    memory: int = 5
    encoder: int = 0
    decoder: int = 0
    gpu_instance: int = NO_INSTANCE
    compute_instance: int = NO_INSTANCE
    kind: Literal["compute", "graphics", "mps"] = "compute"


class Mig(NamedTuple):
    """A MIG device. ``uuid`` None: one made of the GPU and the instances."""

    gpu_instance: int
    compute_instance: int = 0
    profile: str = "1g.10gb"
    memory_bytes: int = 10 << 30
    used_bytes: int = 1 << 30
    uuid: str | None = None


class Call(NamedTuple):
    """One call that was made: ``gpu`` and ``mig`` (its slot) None where it was about none. ``at_s``: monotonic."""

    function: str
    gpu: int | None
    mig: int | None
    thread: int
    at_s: float


@functools.cache
def library(*, old: bool = False) -> Path:
    """The built library, once per process; raises :class:`NoCompiler`. ``old``: without the newer symbols."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise NoCompiler("no C compiler on PATH: install gcc or clang, or name one with CC")
    directory = Path(tempfile.mkdtemp(prefix="scripted-nvml-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    options = ["-std=gnu11", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    link = [f"-Wl,-soname,{SONAME}", "-o", str(directory / SONAME)]
    build = [compiler, *options, *(["-DOLD"] if old else []), str(SOURCE), *link]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory / SONAME


class ScriptedNvml:
    """One machine's NVML, as a script in ``directory`` says. ``old``: a driver without the newer symbols.

    GPUs are named by index; None as a GPU means all of them, and in :meth:`hang` and :meth:`fail` what is about no GPU
    as well. A function is named as in NVML, with or without its ``_v2``; ``*`` is every one. ``log``: keep
    :meth:`calls`.
    """

    def __init__(self, directory: Path, *, gpus: int = 8, old: bool = False, log: bool = False) -> None:
        self._library, self._old = library(old=old), old
        directory.mkdir(parents=True, exist_ok=True)
        self._script, self._log = directory / "nvml.script", directory / "nvml.log" if log else None
        self._gpus, self._driver, self._written_ns = gpus, 0, 0
        self._values: dict[tuple[int, str], float | str] = {}
        self._lost: set[int] = set()
        self._hangs: dict[tuple[int, str], float] = {}
        self._failures: dict[tuple[int, str], int] = {}
        self._processes: dict[int, list[Process]] = {}
        self._mig: dict[int, list[Mig | None]] = {}
        self._xids: list[tuple[int, int, int, int]] = []
        self._no_process_is_success = False
        self._holding_back = False
        self._write()

    def environment(self) -> dict[str, str]:
        """What a child needs in its environment to find the library and the script."""
        paths = [str(self._library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        log = {"NVML_LOG": str(self._log)} if self._log else {}
        return {"LD_LIBRARY_PATH": ":".join(paths), "NVML_SCRIPT": str(self._script), **log}

    def load(self) -> None:
        """Loads the library into this process, where pynvml finds it by its name, as if just started with this script.

        A process has one NVML: another one that was loaded before is not answered any more.
        """
        if self._old:
            raise ValueError("a process loads only one library of that name: give the old one to a child")
        for thread in threading.enumerate():
            if thread.name == "nvml-driver":  # of an earlier test: it would close NVML when it is open again
                thread.join(2 * ENDS_WITHIN_S)
        loaded = ctypes.CDLL(str(self._library))
        loaded.scripted_open(os.fsencode(self._script), os.fsencode(self._log) if self._log else None)

    @property
    def gpus(self) -> int:
        """How many GPUs there are: new ones are seen by the next first nvmlInit, and missing ones lost until then."""
        return self._gpus

    @gpus.setter
    def gpus(self, count: int) -> None:
        self._gpus = count
        self._write()

    def set(self, gpu: int | None, **values: float | str | None) -> None:
        """Sets values by the names of :data:`KEYS`, in NVML's own units; None: the default one again."""
        for key, value in values.items():
            if key not in KEYS and not _NUMBERED.fullmatch(key):
                raise ValueError(f"no such value: {key}")
            if value is None:
                self._values.pop((_number(gpu), key), None)
            else:
                self._values[_number(gpu), key] = value
        self._write()

    def lose(self, gpu: int) -> None:
        """The GPU falls off the bus: all that is asked of it answers ERROR_GPU_IS_LOST."""
        self._lost.add(gpu)
        self._write()

    def recover(self, gpu: int) -> None:
        """The GPU is back."""
        self._lost.discard(gpu)
        self._write()

    def hang(self, gpu: int | None, function: str, seconds: float) -> None:
        """Calls take that long from now on, and answer then; ``nvmlInit`` may be one."""
        self._hangs[_number(gpu), function] = seconds
        self._write()

    def release(self) -> None:
        """Nothing hangs any more; calls that hang return."""
        self._hangs.clear()
        self._write()

    def fail(self, gpu: int | None, function: str, code: int) -> None:
        """Calls answer this code from now on, 0 what they did before. ``field:82`` is one of GetFieldValues'
        fields, ``gpm:2`` one of GPM's metrics."""
        self._failures[_number(gpu), function] = code
        self._write()

    def leave_empty(self, gpu: int | None, function: str) -> None:
        """Calls succeed from now on, and fill nothing in; :meth:`fail` with 0 ends it."""
        self.fail(gpu, function, EMPTY)

    def processes(self, gpu: int, processes: Iterable[tuple[int, int | None] | Process]) -> None:
        """The processes on the GPU, and on its MIG devices where they name the instances."""
        self._processes[gpu] = [Process(*process) for process in processes]
        self._write()

    def empty_processes(self, *, succeed: bool) -> None:
        """Whether process utilization without anything new is a success, and not ERROR_NOT_FOUND."""
        self._no_process_is_success = succeed
        self._write()

    def mig(self, gpu: int, devices: Sequence[Mig | None] | None) -> None:
        """Cuts the GPU into MIG devices, by slot, None being a hole; None as ``devices``: it is whole, MIG is off."""
        self._mig[gpu] = list(devices or ())
        self.set(gpu, mig_mode=None if devices is None else 1)

    def driver(self, state: Literal["ok", "absent", "mismatch"]) -> None:
        """What nvmlInit finds from now on; who has initialised it is answered as before."""
        self._driver = DRIVER[state]
        self._write()

    def xid(
        self,
        gpu: int,
        code: int,
        gpu_instance: int = NO_INSTANCE,
        compute_instance: int = NO_INSTANCE,
        *,
        times: int = 1,
    ) -> None:
        """An XID error, of the GPU or of an instance of it, for those who wait for events now."""
        self._xids += [(gpu, code, gpu_instance, compute_instance)] * times
        self._write()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """What is changed inside is seen when it ends, all of it at once."""
        self._holding_back = True
        try:
            yield
        finally:
            self._holding_back = False
            self._write()

    def calls(self) -> list[Call]:
        """Every call so far; needs ``log``. A line that is being written is not one yet."""
        assert self._log is not None, "made without log=True"
        lines = self._log.read_text().splitlines(keepends=True) if self._log.exists() else []
        return [_call(line) for line in lines if line.endswith("\n")]

    def _write(self) -> None:
        """Replaces the script; the time of its change differs each time, since that is how the change is seen."""
        if self._holding_back:
            return
        self._written_ns = max(self._written_ns + 1, time.time_ns())
        new = self._script.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in self._lines()))
        os.utime(new, ns=(self._written_ns, self._written_ns))
        new.replace(self._script)

    def _lines(self) -> Iterable[str]:
        yield f"gpus {self._gpus}"
        yield f"driver {self._driver}"
        yield f"no_process_is_success {self._no_process_is_success:d}"
        yield from (f"lost {gpu}" for gpu in self._lost)
        yield from (f"set {gpu} {key} {value}" for (gpu, key), value in self._values.items())
        yield from (f"hang {gpu} {function} {seconds}" for (gpu, function), seconds in self._hangs.items())
        yield from (f"fail {gpu} {function} {code}" for (gpu, function), code in self._failures.items() if code)
        yield from (_process_line(gpu, process) for gpu, found in self._processes.items() for process in found)
        yield from _mig_lines(self._mig)
        yield from (f"xid {' '.join(map(str, xid))}" for xid in self._xids)


def _number(gpu: int | None) -> int:
    return -1 if gpu is None else gpu


def _process_line(gpu: int, process: Process) -> str:
    held = NOT_AVAILABLE if process.bytes is None else process.bytes
    percentages = f"{process.sm} {process.memory} {process.encoder} {process.decoder}"
    instances = f"{process.gpu_instance} {process.compute_instance}"
    return f"process {gpu} {process.kind} {process.pid} {held} {percentages} {instances}"


def _mig_lines(migs: Mapping[int, list[Mig | None]]) -> Iterable[str]:
    for gpu, slots in migs.items():
        for slot, mig in enumerate(slots):
            if mig is not None:
                gi, ci = mig.gpu_instance, mig.compute_instance
                uuid = mig.uuid or f"MIG-5c41b7ed-{gpu:04x}-5000-8000-{gi:06x}{ci:06x}"
                yield f"mig {gpu} {slot} {gi} {ci} {mig.profile} {mig.memory_bytes} {mig.used_bytes} {uuid}"


def _call(line: str) -> Call:
    function, gpu, mig, thread, at_ms = line.split()
    return Call(function, _index(gpu), _index(mig), int(thread), float(at_ms) / 1000)


def _index(text: str) -> int | None:
    return None if text == "-1" else int(text)
