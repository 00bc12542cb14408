"""nvidia-smi as a second opinion: what it prints about each GPU, in the catalogue's keys and units.

In: ``nvidia-smi --query-gpu``, run once a second. Out: a :class:`Sample` for each run.
On failure: a field that this nvidia-smi does not know is left out; one that it has no value for ("[N/A]") is absent.
Source: ``nvidia-smi --help-query-gpu``.
"""

import contextlib
import csv
import io
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

WITHIN_S = 30.0
_UNKNOWN = re.compile(r'Field "([^"]+)" is not a valid field')
_ABSENT = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "")


class Field(NamedTuple):
    """A field of nvidia-smi. Its number times ``scale`` is in the catalogue's unit, and rounded to ``step``."""

    name: str
    scale: float = 1.0
    step: float = 1.0

    def value(self, text: str) -> float | None:
        """The value in the catalogue's unit; None if there is none."""
        text = text.strip()
        if text in _ABSENT:
            return None
        if text in ("Yes", "No"):
            return float(text == "Yes")
        number = int(text, 16) if text.startswith("0x") else float(text.removeprefix("P"))
        return number * self.scale


_RATIO, _MIB, _MHZ = (0.01, 0.01), (float(1 << 20), float(1 << 20)), (1e6, 1e6)

FIELDS: Mapping[str, Field] = {
    "gpu_utilization_ratio": Field("utilization.gpu", *_RATIO),
    "memory_controller_utilization_ratio": Field("utilization.memory", *_RATIO),
    "encoder_utilization_ratio": Field("utilization.encoder", *_RATIO),
    "decoder_utilization_ratio": Field("utilization.decoder", *_RATIO),
    "memory_used_bytes": Field("memory.used", *_MIB),
    "memory_free_bytes": Field("memory.free", *_MIB),
    "memory_total_bytes": Field("memory.total", *_MIB),
    "memory_reserved_bytes": Field("memory.reserved", *_MIB),
    "power_watts": Field("power.draw", step=0.01),
    "power_limit_watts": Field("enforced.power.limit", step=0.01),
    "max_power_limit_watts": Field("power.max_limit", step=0.01),
    "temperature_celsius": Field("temperature.gpu"),
    "memory_temperature_celsius": Field("temperature.memory"),
    "fan_speed_ratio": Field("fan.speed", *_RATIO),
    "performance_state": Field("pstate"),
    "graphics_clock_hz": Field("clocks.current.graphics", *_MHZ),
    "sm_clock_hz": Field("clocks.current.sm", *_MHZ),
    "memory_clock_hz": Field("clocks.current.memory", *_MHZ),
    "max_sm_clock_hz": Field("clocks.max.sm", *_MHZ),
    "max_memory_clock_hz": Field("clocks.max.memory", *_MHZ),
    "clock_event_reasons": Field("clocks_event_reasons.active"),
    "ecc_corrected_volatile_total": Field("ecc.errors.corrected.volatile.total"),
    "ecc_uncorrected_volatile_total": Field("ecc.errors.uncorrected.volatile.total"),
    "ecc_corrected_aggregate_total": Field("ecc.errors.corrected.aggregate.total"),
    "ecc_uncorrected_aggregate_total": Field("ecc.errors.uncorrected.aggregate.total"),
    "retired_pages_single_bit_total": Field("retired_pages.single_bit_ecc.count"),
    "retired_pages_double_bit_total": Field("retired_pages.double_bit.count"),
    "retired_pages_pending": Field("retired_pages.pending"),
}
"""The keys of the catalogue that nvidia-smi has an opinion about."""


class Sample(NamedTuple):
    """What one run printed: it was asked at ``began_ms`` and had answered at ``ended_ms``. By UUID, then key."""

    began_ms: int
    ended_ms: int
    values: Mapping[str, Mapping[str, float | None]]


class Failed(Exception):
    """nvidia-smi does not work here; the message says how."""


class NvidiaSmi:
    """That program. Raises :class:`Failed` from every method."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._fields = dict(FIELDS)

    @property
    def keys(self) -> Sequence[str]:
        """The keys that it has an opinion about."""
        return list(self._fields)

    def listed(self) -> str:
        """The GPUs and MIG devices that it lists, as it prints them."""
        return self._run("-L")

    def sample(self) -> Sample:
        """What it says now; the first run finds out which fields it knows."""
        while True:
            names = ",".join(["uuid", *(field.name for field in self._fields.values())])
            began_ms = _now_ms()
            try:
                printed = self._run(f"--query-gpu={names}", "--format=csv,noheader,nounits")
            except Failed as failed:
                unknown = _UNKNOWN.search(str(failed))
                known_fields = {
                    key: field for key, field in self._fields.items() if unknown is None or field.name != unknown[1]
                }
                if len(known_fields) == len(self._fields):
                    raise
                self._fields = known_fields
            else:
                return Sample(began_ms, _now_ms(), parsed(printed, self._fields))

    def _run(self, *arguments: str) -> str:
        try:
            completed = subprocess.run(
                [self._program, *arguments], capture_output=True, text=True, timeout=WITHIN_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(f"{self._program} does not run: {error}") from None
        if completed.returncode:
            raise Failed(f"{self._program} {arguments[0]} failed: {(completed.stdout + completed.stderr).strip()}")
        return completed.stdout


def parsed(printed: str, fields: Mapping[str, Field]) -> dict[str, dict[str, float | None]]:
    """What ``--query-gpu=uuid,...`` printed, by UUID and key. A value that is none of ours is absent."""
    by_uuid: dict[str, dict[str, float | None]] = {}
    for row in csv.reader(io.StringIO(printed)):
        uuid, *texts = (cell.strip() for cell in row)
        values: dict[str, float | None] = {}
        for (key, field), text in zip(fields.items(), texts, strict=False):
            try:
                values[key] = field.value(text)
            except ValueError:
                values[key] = None
        by_uuid[uuid] = values
    return by_uuid


@contextmanager
def sampling(smi: NvidiaSmi, every_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[list[Sample]]:
    """Samples it in a thread while inside; what it said is in the list, which grows."""
    samples: list[Sample] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            began_s = clock()
            with contextlib.suppress(Failed):  # as while a GPU is lost; the report says how often it ran
                samples.append(smi.sample())
            ended.wait(max(0.0, every_s - (clock() - began_s)))

    thread = threading.Thread(target=run, name="nvidia-smi")
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
