"""A simulated GPU: its load, memory, power, temperature, clocks and counters.

In: the pods that work on a GPU, from when and until when. Out: the metrics and processes of a sample.
State: the GPU since its last redraw. Between two redraws everything is constant except three things: energy is
the integral of power, the time of lowered clocks adds up, and temperature follows power with a lag. A GPU is redrawn at
fixed times and when a pod's work begins or ends. So its values depend only on the time since the start, and not on when
they are read.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

from producers.simulated.behaviours import SW_THERMAL, Doing
from producers.simulated.hardware import MIB, REPLICAS, Model, SimulatedDevice
from producers.simulated.pods import PodContainer, SimulatedPod

REDRAW_MS = 1_000
LOADING_MS = 8_000  # how long a pod takes to fill its memory
GPU_IDLE, POWER_CAP = 0x1, 0x4  # bits of clock_event_reasons
SLOWDOWN_CELSIUS = 85  # a GPU lowers its clocks from here on
HOT_CELSIUS = 88.0  # of a GPU whose cooling is bad
SPIN_SMS, SPIN_POWER = 24 / 132, 0.03  # of a kernel that waits: its share of the SMs, and of the power above idle
XIDS = (13, 31, 43)  # caused by programs: an engine's exception, a page fault, a channel that was stopped
_HEAT_LAG_MS = 25_000.0
_PAGE = 2 * MIB


@dataclass(slots=True)
class Load:
    """A container on a device: its share of the device, and its work until the next redraw."""

    pod: SimulatedPod
    container_id: str
    pid: int
    share: float
    rank: int = 0
    activity: float = 0.0
    memory_bytes: int = 0
    doing: Doing | None = None

    def process(self, *, utilization: bool) -> dict[str, Any]:
        """Its process as NVML reports it, with its pod. NVML has no utilization of processes in MIG mode."""
        row = {
            "pid": self.pid,
            "pod_uid": self.pod.uid,
            "container_id": self.container_id,
            "memory_used_bytes": self.memory_bytes,
        }
        return {**row, "sm_utilization_ratio": self.activity} if utilization else row


class SimulatedInstance:
    """A GPU or MIG instance: its memory, its processes and their utilization, its XID errors."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.loads: list[Load] = []
        self.utilization = 0.0
        self.waiting = 0.0
        self.used_bytes = 0
        self.worked = False
        self.profile: dict[str, float] = {}
        self.xids: dict[str, int] = {}
        self._unread: list[tuple[int, int]] = []
        self.reserved_bytes = int(device.model.reserved_bytes * (device.memory_bytes / device.model.memory_bytes))

    def begin(self, pod: SimulatedPod, container: PodContainer, position: int) -> None:
        """``container`` of ``pod`` begins to work on the device at ``position``."""
        replicas = sum(unit.device == position for unit in container.units)
        shared = container.units[0].resource.endswith(".shared")
        pid = 2_000 + int(container.container_id[:6], 16) % 4_000_000
        share = replicas / REPLICAS if shared else 1.0
        self.loads.append(Load(pod, container.container_id, pid, share, pod.rank(container, position)))

    def end(self, pod: SimulatedPod) -> None:
        self.loads = [load for load in self.loads if load.pod is not pod]

    def redraw(self, now_ms: int, chance: random.Random) -> None:
        """Draw what each container does until the next redraw. If together they need too much, each gets less."""
        for load in self.loads:
            drawn, story = chance.random(), load.pod.story
            if story is None:
                load.activity = activity(load.pod, now_ms, drawn) * (1.0 if load.share == 1.0 else 0.5)
            else:
                load.doing = story.doing(load.rank, now_ms, now_ms - load.pod.works_ms, drawn)
                load.activity = load.doing.use if load.doing is not None else 0.0
            load.memory_bytes = memory(load, self.device.memory_bytes, now_ms)
        self.worked |= bool(self.running)
        demand = sum(load.activity for load in self.loads)
        for load in self.loads:
            load.activity = round(load.activity / max(demand, 1.0), 2)
        self.utilization = min(1.0, round(sum((load.activity for load in self.loads), 0.0), 2))
        self.waiting = sum((load.doing.use - load.doing.compute for load in self.loads if load.doing), 0.0)
        overhead = 3 * MIB + 12 * MIB * len(self.running)
        self.used_bytes = overhead + sum(load.memory_bytes for load in self.loads)
        if self.device.model.gpm:
            drawn = chance.random()
            is_synchronous = any(load.doing for load in self.loads)  # the ranks of a job do the same
            self.profile = active(self.utilization, 0.4 + 0.2 * drawn if is_synchronous else drawn, self.waiting)

    @property
    def running(self) -> list[Load]:
        """The containers that have a process."""
        return [load for load in self.loads if load.memory_bytes]

    def fail(self, now_ms: int, code: int) -> None:
        self.xids = {**self.xids, str(code): self.xids.get(str(code), 0) + 1}
        self._unread.append((now_ms, code))

    def events(self, start_ms: int) -> list[dict[str, Any]]:
        """The errors since the last call, with times since the epoch if ``start_ms`` is."""
        unread, self._unread = self._unread, []
        return [{"kind": "xid", "code": code, "ts_ms": start_ms + at_ms} for at_ms, code in unread]

    def video(self) -> float:
        return sum(load.activity for load in self.loads if load.pod.template.name == "video-edge")

    def memory(self) -> dict[str, int]:
        """The memory of the device; used, free and reserved add up to total."""
        total = self.device.memory_bytes
        return {
            "memory_used_bytes": self.used_bytes,
            "memory_free_bytes": total - self.used_bytes - self.reserved_bytes,
            "memory_total_bytes": total,
            "memory_reserved_bytes": self.reserved_bytes,
        }


def active(utilization: float, chance: float, waiting: float = 0.0) -> dict[str, float]:
    """How busy the parts of a GPU were, as GPM reports it. The greater ``chance``, in [0, 1), the more tensor work.
    For the share ``waiting`` of the time a kernel only waited, on few SMs."""
    computing = max(0.0, utilization - waiting)
    sm = computing * (0.75 + 0.2 * chance)
    shares = {
        "graphics_engine_active_ratio": utilization,
        "sm_active_ratio": sm + waiting * SPIN_SMS,
        "sm_occupancy_ratio": sm * (0.3 + 0.3 * chance) + waiting * SPIN_SMS * 0.3,
        "tensor_active_ratio": sm * (0.1 + 0.5 * chance),
        "dram_active_ratio": computing * (0.2 + 0.4 * chance),
        "fp64_active_ratio": 0.0,
        "fp32_active_ratio": sm * 0.3 * (1.0 - chance),
        "fp16_active_ratio": sm * 0.2 * chance,
    }
    return {key: round(share, 4) for key, share in shares.items()}


def spread_of(stem: str, unit: str, mean: float, *, least: float, most: float, chance: float) -> dict[str, float]:
    """Mean, minimum and maximum of a second's samples, further apart the greater the chance; steady up to ``least``."""
    low = high = mean
    if least < mean < most:
        low, high = mean - 0.3 * chance * (mean - least), mean + 0.5 * chance * (most - mean)
    values = {"mean": mean, "min": low, "max": high}
    return {f"{stem}_{statistic}_{unit}": round(value, 3) for statistic, value in values.items()}


def activity(pod: SimulatedPod, now_ms: int, chance: float) -> float:
    """How busy a pod keeps its device, 0 to 1, by its kind of work, its age, and a ``chance`` in [0, 1).
    For pods with a story see :meth:`Story.doing`."""
    age_ms = now_ms - pod.works_ms
    if age_ms < LOADING_MS / 2:
        return 0.0
    match pod.template.activity:
        case "busy":
            return 0.97 - 0.12 * chance if chance > 0.04 else 0.15
        case "serving":
            wave = math.sin(2 * math.pi * (age_ms / 90_000 + pod.seed))
            return min(1.0, max(0.0, 0.5 + 0.3 * wave + 0.3 * (chance - 0.5)))
        case "bursty":
            period_ms = 20_000 + 40_000 * pod.seed
            return 0.75 + 0.25 * chance if age_ms % period_ms < 0.4 * period_ms else 0.02 * chance
        case "idle":
            period_ms = 1_200_000 + 2_400_000 * pod.seed
            return 0.05 if chance > 0.9 and age_ms % period_ms < 0.1 * period_ms else 0.0
        case _:
            return 0.0


def memory(load: Load, total_bytes: int, now_ms: int) -> int:
    """The device memory of a container's process in bytes. It grows while the process loads, and then stays."""
    loaded = min(1.0, 0.02 + (now_ms - load.pod.works_ms) / LOADING_MS)
    if load.pod.story is None:
        full_share = {"busy": 0.7, "serving": 0.8, "bursty": 0.35, "idle": 0.05}[load.pod.template.activity]
        share = (full_share + 0.15 * load.pod.seed) * loaded * load.share
    elif load.doing is None:
        return 0
    else:
        share = load.doing.memory * loaded
    return max(1, int(total_bytes * share) // _PAGE) * _PAGE


class SimulatedGpu:
    """A physical GPU: itself, or, in MIG mode, its instances with what they have in common."""

    def __init__(self, devices: list[SimulatedDevice], chance: random.Random) -> None:
        self.device = devices[0]
        self.parts = [SimulatedInstance(device) for device in (devices[1:] if self.device.mig_mode else devices)]
        self._chance = chance
        self._model: Model = self.device.model
        self._drawn_ms = 0
        self._warmth = 26.0 + 4.0 * chance.random()
        self._fragile = chance.random() < 0.05
        self.power_watts = self._model.idle_watts
        self._energy_joules = float(chance.randrange(10**8))
        self._violations_s = {"power": 0.0, "thermal": 0.0, "low_utilization": 0.0}
        self._clock, self._reasons, self._hot = 1.0, 0, False
        self._temperature = self._warmth
        self._drawn = False
        self.load = self.computing = self.video = 0.0
        self.corrected = self.replays = self.link_errors = 0
        self.repaired = int(chance.random() < 0.02)
        self._spread = 0.5
        self._profile: dict[str, float] = {}

    def redraw(self, now_ms: int) -> None:
        """Add up the time since the last redraw, and draw what the GPU does from now on."""
        self._energy_joules, self._temperature = self.energy_joules(now_ms), self.temperature(now_ms)
        self._violations_s = self.violations_s(now_ms)
        first, self._drawn = not self._drawn, True
        self._drawn_ms = now_ms
        for part in self.parts:
            part.redraw(now_ms, self._chance)
        self._spread = spread = self._chance.random()
        whole = self._model.memory_bytes
        self.load = min(1.0, sum(part.utilization * part.device.memory_bytes for part in self.parts) / whole)
        self.computing = max(0.0, self.load - sum(part.waiting for part in self.parts))
        self.video = sum(part.video() for part in self.parts)
        doing = next((load.doing for part in self.parts for load in part.loads if load.doing), None)
        self._hot = doing is not None and doing.hot
        slowed = self._temperature >= SLOWDOWN_CELSIUS
        self._reasons = (doing.reasons if doing is not None else 0) | (SW_THERMAL if slowed else 0)
        self._clock = doing.clock if doing is not None and (slowed or not self._hot) else 1.0
        power_share = (0.06 if self.occupied() else 0.0) + self.computing * (0.80 + 0.18 * spread) * self._clock**2
        power_share += (self.load - self.computing) * SPIN_POWER
        range_watts = self._model.power_limit_watts - self._model.idle_watts
        self.power_watts = round(
            self._model.idle_watts * (0.97 + 0.06 * spread) + range_watts * min(0.97, power_share), 3
        )
        if first:
            self._temperature = self._target()
        self._profile = self._profiled(self._chance.random())
        if self._fragile and spread > 0.999:  # if programs run on it, one fails
            self.corrected += 1
            self.replays += 1
            self.link_errors += 1
            if working := [part for part in self.parts if part.loads]:
                self._chance.choice(working).fail(now_ms, self._chance.choice(XIDS))

    def _profiled(self, chance: float) -> dict[str, float]:
        """The driver's samples of the second, and GPM. In MIG mode there is no utilization and no NVLink traffic."""
        model, power = self._model, self.power_watts
        idle, limit = 1.03 * model.idle_watts, model.power_limit_watts
        metrics = spread_of("power", "watts", power, least=idle, most=limit, chance=chance)
        if self.device.mig_mode:
            return metrics | (active(self.load, chance) if model.gpm else {})  # a GPU that is cut has no story
        busy = self.parts[0].utilization
        metrics |= spread_of("gpu_utilization", "ratio", busy, least=0.0, most=1.0, chance=chance)
        metrics |= self.parts[0].profile
        if model.nvlink_bytes_per_second:
            sent = int(model.nvlink_bytes_per_second * 0.3 * self.computing * chance)
            metrics["nvlink_tx_bytes_per_second"] = sent
            metrics["nvlink_rx_bytes_per_second"] = int(sent * (0.95 + 0.05 * chance))
        return metrics

    def occupied(self) -> bool:
        return any(part.running for part in self.parts)

    def energy_joules(self, now_ms: int) -> float:
        """The energy since the driver was loaded: the integral of power."""
        return self._energy_joules + self.power_watts * (now_ms - self._drawn_ms) / 1000

    def violations_s(self, now_ms: int) -> dict[str, float]:
        """How long each cause has lowered the clocks since the driver was loaded, in seconds."""
        active_causes = {"power": self._capped(), "low_utilization": self._drawn and self.load == 0}
        active_causes["thermal"] = bool(self._reasons & SW_THERMAL)
        since_s = (now_ms - self._drawn_ms) / 1000
        return {cause: before_s + since_s * active_causes[cause] for cause, before_s in self._violations_s.items()}

    def _capped(self) -> bool:
        return self.power_watts > 0.95 * self._model.power_limit_watts

    def temperature(self, now_ms: int) -> float:
        """The temperature in degrees Celsius: it follows the power with a lag."""
        target = self._target()
        return target + (self._temperature - target) * math.exp((self._drawn_ms - now_ms) / _HEAT_LAG_MS)

    def _target(self) -> float:
        if self._hot:
            return HOT_CELSIUS
        return self._warmth + 48.0 * self.power_watts / self._model.power_limit_watts

    def common(self, now_ms: int) -> dict[str, float]:
        """The metrics that a GPU has in every mode."""
        model, spread = self._model, self._spread
        heat, idle = int(self.temperature(now_ms)), not self.occupied()
        megahertz = int(model.boost_mhz * self._clock * (1.0 - 0.12 * self.load * spread)) // 15 * 15
        clock = 1_000_000 * (model.idle_mhz if idle else megahertz)
        capped = POWER_CAP if self._capped() else 0
        rate = model.pcie_bytes_per_second * self.computing
        metrics: dict[str, float] = {
            "power_watts": self.power_watts,
            "power_limit_watts": model.power_limit_watts,
            "energy_joules_total": round(self.energy_joules(now_ms), 3),
            "temperature_celsius": heat,
            "graphics_clock_hz": clock,
            "sm_clock_hz": clock,
            "memory_clock_hz": (405 if idle and model.idle_pstate > 0 else model.memory_mhz) * 1_000_000,
            "pcie_tx_bytes_per_second": int(rate * 0.04 * spread + 40_000 * (1 + spread)),
            "pcie_rx_bytes_per_second": int(rate * 0.10 * spread + 150_000 * (1 + spread)),
            "pcie_replays_total": self.replays,
            "ecc_corrected_volatile_total": self.corrected,
            "ecc_uncorrected_volatile_total": 0,
            "clock_event_reasons": (GPU_IDLE if self.load == 0 else capped) | self._reasons,
            "performance_state": model.idle_pstate if idle else 0,
        }
        if model.memory_sensor:
            metrics["memory_temperature_celsius"] = heat + 6 + int(6 * self.load)
        if model.fan:
            metrics["fan_speed_ratio"] = round(min(1.0, max(0.3, (heat - 20) / 65)), 2)
        return {**metrics, **self._profile, **self._counted(now_ms)}

    def _counted(self, now_ms: int) -> dict[str, float]:
        """The limits of the GPU, and the driver's further counters."""
        model, lasted_s = self._model, self.violations_s(now_ms)
        causes = ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
        metrics: dict[str, float] = {
            "max_power_limit_watts": model.power_limit_watts,
            "max_sm_clock_hz": model.boost_mhz * 1_000_000,
            "max_memory_clock_hz": model.memory_mhz * 1_000_000,
            "ecc_corrected_aggregate_total": self.repaired + self.corrected,
            "ecc_uncorrected_aggregate_total": 0,
            **{f"{cause}_violation_seconds_total": round(lasted_s.get(cause, 0.0), 3) for cause in causes},
        }
        if model.retires_pages:
            metrics["retired_pages_single_bit_total"] = self.repaired
            metrics |= {"retired_pages_double_bit_total": 0, "retired_pages_pending": 0}
        if model.nvlink_bytes_per_second and not self.device.mig_mode:
            metrics |= {f"nvlink_{kind}_errors_total": self.link_errors for kind in ("crc", "replay")}
            metrics["nvlink_recovery_errors_total"] = 0
        if model.vgpu:
            metrics["vgpu_licensed"] = 0
        return metrics

    def unshared(self) -> dict[str, float]:
        """The metrics that NVML refuses in MIG mode."""
        metrics: dict[str, float] = {
            "gpu_utilization_ratio": self.parts[0].utilization,
            "memory_controller_utilization_ratio": round(self.computing * (0.3 + 0.3 * self._spread), 2),
            "encoder_utilization_ratio": min(1.0, round(0.5 * self.video, 2)),
            "decoder_utilization_ratio": min(1.0, round(0.7 * self.video, 2)),
        }
        if not self._model.retires_pages:
            metrics["remapped_rows_correctable_total"] = self.repaired
            metrics |= {"remapped_rows_uncorrectable_total": 0, "row_remap_pending": 0, "row_remap_failure": 0}
        return metrics
