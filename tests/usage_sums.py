"""An oracle of gpu.usage: the usage of ticks by the rules of docs/reference/usage.md, without the stream's code.

Each tick is cut at the starts of minutes, and each piece is counted for the holders of its GPU. Time without a piece is
unobserved. Largest remainders are computed with fractions.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import floor
from typing import Any, NamedTuple

from topics.usage import HOUR_MS, MINUTE_MS, Usage

Json = dict[str, Any]
FIELDS = (
    "device_ms", "slice_ms", "used_us", "idle_ms", "tensor_us", "energy_mj", "memory_byte_ms", "exact_ms", "late_ms",
    "none_ms",
)  # fmt: skip
BUSY = ("gpu_utilization_ratio", "gpu_utilization_max_ratio", "graphics_engine_active_ratio", "sm_active_ratio")
VIDEO = ("encoder_utilization_ratio", "decoder_utilization_ratio")


class Row(NamedTuple):
    """The key of a row of a window. A field that a row does not have is empty."""

    start_ms: int
    node: str
    gpu_uuid: str
    uuid: str
    category: str
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""


class Node:
    """A node: its counted ticks, the time up to which all is counted, and the last energy counter of each GPU."""

    def __init__(self) -> None:
        self.counted_ticks: set[tuple[int, int]] = set()
        self.run_id, self.last_ms, self.counted_ms = -1, 0, 0
        self.counters: dict[str, tuple[int, int] | None] = {}


class UsageSums:
    """The sums of ticks. Add ticks in the order of their log; a repeated tick is ignored."""

    def __init__(self, split: str = "used") -> None:
        self.ticks = 0
        self._split = split
        self._nodes: dict[str, Node] = defaultdict(Node)
        self._rows: dict[Row, Counter[str]] = defaultdict(Counter)
        self._slices_of_gpu: dict[tuple[str, str, int], int] = {}  # by node, GPU and hour
        self._observed_ms: Counter[tuple[str, str, int]] = Counter()  # by node, GPU and minute
        self._unobserved_mj: Counter[tuple[str, str]] = Counter()  # by node and GPU, drawn in unobserved time

    def add(self, tick: Json, logged_ms: int) -> None:
        """Count a tick."""
        name = f"{tick['cluster']}/{tick['node']}"
        node, ts_ms, run_id = self._nodes[name], tick["ts_ms"], tick["run_id"]
        if (run_id, tick["seq"]) in node.counted_ticks:
            return
        self.ticks += 1
        node.counted_ticks.add((run_id, tick["seq"]))
        before_ms = node.last_ms if node.run_id == run_id else ts_ms
        node.run_id, node.last_ms = run_id, before_ms
        if ts_ms > logged_ms + 60_000:
            return
        node.last_ms = ts_ms
        interval_ms = min(tick.get("interval_ms") or 10_000, HOUR_MS)
        since_ms = min(ts_ms, max(before_ms, ts_ms - 3 * interval_ms, node.counted_ms))
        for uuid, devices in by_gpu(tick["devices"]).items():
            last = node.counters.get(uuid)
            if ts_ms <= node.counted_ms and last is not None and last[1] < node.counted_ms:
                continue
            drawn = self._drawn(node, devices[-1], since_ms, max(ts_ms, node.counted_ms))
            if ts_ms <= node.counted_ms:
                continue
            gpu_slices = devices[-1].get("compute_slices") or 1
            self._slices_of_gpu.setdefault((name, uuid, since_ms // HOUR_MS), gpu_slices)
            pieces = list(minutes(since_ms, ts_ms))
            energies = parts_of(drawn, [since_ms, *[end_ms for _, end_ms in pieces]])
            self._unobserved_mj[name, uuid] += drawn[0] - sum(energies)
            for (start_ms, end_ms), energy_mj in zip(pieces, energies, strict=True):
                self._slices_of_gpu.setdefault((name, uuid, start_ms // HOUR_MS), gpu_slices)
                self._observed_ms[name, uuid, start_ms // MINUTE_MS] += end_ms - start_ms
                slice_counts = slices(devices, self._slices_of_gpu[name, uuid, start_ms // HOUR_MS])
                energy_by_device = shared(energy_mj, slice_counts)
                for device, count, device_mj in zip(devices, slice_counts, energy_by_device, strict=True):
                    if count:
                        span = (start_ms // MINUTE_MS * MINUTE_MS, start_ms - since_ms, end_ms - since_ms)
                        attribution = device.get("attribution") or tick["attribution"]
                        self._add_device(span, name, uuid, (device, count, device_mj), devices, attribution)
        node.counted_ms = max(node.counted_ms, ts_ms)

    def _drawn(self, node: Node, device: Json, since_ms: int, ts_ms: int) -> tuple[int, int, int]:
        """The energy in mJ that a GPU drew until its tick, and the start and end of that time."""
        counter, power = device["metrics"].get("energy_joules_total"), device["metrics"].get("power_watts")
        last = node.counters.get(device["uuid"])
        if counter is not None:
            counter_mj = round(counter * 1000)
            node.counters[device["uuid"]] = counter_mj, ts_ms
            if last is not None and last[1] < ts_ms:
                drawn_mj = counter_mj - last[0] if counter_mj >= last[0] else counter_mj
                if drawn_mj <= 20_000 * (ts_ms - last[1]):
                    return drawn_mj, last[1], ts_ms
        elif power is not None:
            node.counters[device["uuid"]] = None
        return round((power or 0) * (ts_ms - since_ms)), since_ms, ts_ms

    def _add_device(
        self,
        span: tuple[int, int, int],
        node: str,
        gpu: str,
        share: tuple[Json, int, int],
        devices: list[Json],
        attribution: str,
    ) -> None:
        """Count a piece of a tick for the holders of a device. ``span``: the start of its minute, and its start and end
        since the beginning of the tick's time. ``share``: the device, its slices and its energy."""
        (start_ms, since_ms, until_ms), (device, slices, energy_mj) = span, share
        ms, metrics, holders = until_ms - since_ms, device["metrics"], device.get("holders") or []
        lost, is_rest = not is_ok(device), device is devices[-1] and len(devices) > 1
        used = 0 if is_rest or lost else millionths(first(metrics, (BUSY[0], *BUSY[2:])))
        tensor = 0 if is_rest or lost else millionths(metrics.get("tensor_active_ratio"))
        memory = 0 if lost else round(metrics.get("memory_used_bytes") or 0)
        if is_rest and not lost:
            of_mig = (mig["metrics"].get("memory_used_bytes") or 0 for mig in devices[:-1] if is_ok(mig))
            memory = max(0, memory - sum(map(round, of_mig)))
        whole = Counter(
            device_ms=ms, energy_mj=energy_mj, memory_byte_ms=memory * ms,
            used_us=used * until_ms // 1000 - used * since_ms // 1000,
            tensor_us=tensor * until_ms // 1000 - tensor * since_ms // 1000,
        )  # fmt: skip
        rows = [Row(start_ms, node, gpu, device["uuid"], "lost" if lost else "free")]
        split: dict[str, list[int]] = {field: [whole[field]] for field in whole}
        idle = [False]
        if holders and not lost:
            rows = [Row(start_ms, node, gpu, device["uuid"], "held", *identity_of(holder)) for holder in holders]
            parts = [holder.get("parts") or {} for holder in holders]
            used_parts = [millionths(of_holder.get("utilization_ratio") or 0) for of_holder in parts]
            memory_parts = [round(of_holder.get("memory_used_bytes") or 0) for of_holder in parts]
            device_memory = round(metrics.get("memory_used_bytes") or 0)
            equal, by_use = equal_parts(holders), filled(used_parts, 1_000_000, holders)
            weights = {"device_ms": equal if self._split == "equal" else by_use, "energy_mj": by_use}
            weights |= dict.fromkeys(("used_us", "tensor_us"), filled(used_parts, millionths_of(metrics), holders))
            weights["memory_byte_ms"] = filled(memory_parts, device_memory, holders)
            split = {field: shared(whole[field], weights[field]) for field in whole}
            idle = [is_idle(device, holder) for holder in holders]
        for index, row in enumerate(rows):
            amounts = Counter({field: split[field][index] for field in whole})
            row_ms = amounts["device_ms"]
            how = attribution if attribution in ("exact", "none") else "late"
            amounts.update({"slice_ms": row_ms * slices, "idle_ms": row_ms * idle[index], f"{how}_ms": row_ms})
            self._rows[row].update(amounts)

    def windows(self, length_ms: int) -> dict[Row, Json]:
        """The rows of all windows of a length that are not zero. The energy of unobserved time is not in them."""
        sums: dict[Row, Counter[str]] = defaultdict(Counter)
        for row, amounts in self._rows.items():
            sums[row._replace(start_ms=row.start_ms // length_ms * length_ms)].update(amounts)
        for (node, uuid, hour), gpu_slices in self._slices_of_gpu.items():
            for minute in range(hour * 60, hour * 60 + 60):
                unobserved_ms = MINUTE_MS - self._observed_ms[node, uuid, minute]
                row = Row(minute * MINUTE_MS // length_ms * length_ms, node, uuid, uuid, "unobserved")
                sums[row].update(device_ms=unobserved_ms, slice_ms=unobserved_ms * gpu_slices)
        nonzero = {row: amounts for row, amounts in sums.items() if any(amounts.values())}
        return {row: {field: amounts[field] for field in FIELDS} for row, amounts in nonzero.items()}

    def differences(self, records: Sequence[Usage], length_ms: int, until_ms: int | None = None) -> list[str]:
        """The differences of records from these sums, in windows of a length; ``until_ms``: only in those before it.

        Unobserved energy is compared only if ``until_ms`` is None, as one sum for each GPU.
        """
        actual, unobserved_mj, totals_ms = dict[Row, Json](), Counter[tuple[str, str]](), Counter[tuple[Any, ...]]()
        expected = {
            row: amounts
            for row, amounts in self.windows(length_ms).items()
            if until_ms is None or row.start_ms < until_ms
        }
        errors = [f"not final: {record.key}" for record in records if not record.final]
        for record in records:
            node = f"{record.cluster}/{record.node}"
            holder = (record.namespace or "", record.pod or "", record.pod_uid or "", record.container or "")
            row = Row(record.start_ms, node, record.gpu_uuid, record.uuid, record.category, *holder)
            totals_ms[row.node, row.gpu_uuid, record.start_ms, record.of] += record.slice_ms
            amounts = {field: getattr(record, field) for field in FIELDS}
            if record.category == "unobserved":
                unobserved_mj[row.node, row.gpu_uuid] += amounts["energy_mj"]
                amounts["energy_mj"] = 0
            if any(amounts.values()):
                actual[row] = amounts
        errors += [
            f"{row} has {actual.get(row)}, but by its ticks {expected.get(row)}"
            for row in actual.keys() | expected.keys()
            if actual.get(row) != expected.get(row)
        ]
        errors += [f"{window} adds up to {ms}" for window, ms in totals_ms.items() if ms != length_ms * window[3]]
        for gpu in unobserved_mj.keys() | self._unobserved_mj.keys() if until_ms is None else ():
            if unobserved_mj[gpu] != self._unobserved_mj[gpu]:
                errors.append(f"{gpu}: {unobserved_mj[gpu]} mJ unobserved, but by its ticks {self._unobserved_mj[gpu]}")
        return errors


def by_gpu(devices: Sequence[Json]) -> dict[str, list[Json]]:
    """The devices of each physical GPU: its MIG devices, then the GPU itself."""
    devices_by_gpu: dict[str, list[Json]] = {}
    for device in devices:
        devices_by_gpu.setdefault(device["mig"]["parent_uuid"] if device.get("mig") else device["uuid"], []).append(
            device
        )
    return {uuid: sorted(of_gpu, key=lambda device: not device.get("mig")) for uuid, of_gpu in devices_by_gpu.items()}


def slices(devices: Sequence[Json], gpu_slices: int) -> list[int]:
    """The compute slices of each device of a GPU: by the profile of a MIG device, and the rest for the GPU itself."""
    counts = list[int]()
    for device in devices[:-1]:
        name = device["mig"]["profile"]
        counts.append(min(gpu_slices - sum(counts), int(name.partition("c." if "c." in name else "g.")[0])))
    return [*counts, gpu_slices - sum(counts)]


def minutes(since_ms: int, until_ms: int) -> Iterator[tuple[int, int]]:
    edges = [since_ms, *range(-(-(since_ms + 1) // MINUTE_MS) * MINUTE_MS, until_ms, MINUTE_MS), until_ms]
    yield from (pair for pair in itertools.pairwise(edges) if pair[0] < pair[1])


def parts_of(drawn: tuple[int, int, int], edges_ms: Sequence[int]) -> list[int]:
    """The energy of each piece of a time, over which it was drawn evenly: what was drawn until an edge is rounded down.

    ``drawn``: the energy in mJ, and the start and end of its time.
    """
    mj, from_ms, to_ms = drawn
    until_mj = [mj * (at_ms - from_ms) // (to_ms - from_ms) if mj else 0 for at_ms in edges_ms]
    return [end - start for start, end in itertools.pairwise(until_mj)]


def shared(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Integer parts of a total by weights: each rounded down, and one more for the largest remainders."""
    weights = weights if any(weights) else [1] * len(weights)
    exact = [Fraction(total) * weight / sum(weights) for weight in weights]
    by_remainder = sorted(range(len(exact)), key=lambda index: (floor(exact[index]) - exact[index], index))
    rounded_up = set(by_remainder[: total - sum(map(floor, exact))])
    return [floor(part) + (index in rounded_up) for index, part in enumerate(exact)]


def equal_parts(holders: Sequence[Json]) -> list[Fraction]:
    """Equal parts for each pod that was given the device, and of a pod's part for each of its containers."""
    allocated = [holder for holder in holders if not holder.get("observed")] or list(holders)
    pods = Counter(pod_of(holder) for holder in allocated)
    return [Fraction(1, len(pods) * pods[pod_of(holder)]) if holder in allocated else Fraction(0) for holder in holders]


def filled(parts: Sequence[int], whole: int, holders: Sequence[Json]) -> list[Fraction]:
    """Each holder's own part, plus an equal part of what is left of the whole."""
    rest = max(0, whole - sum(parts))
    return [used_part + rest * equal for used_part, equal in zip(parts, equal_parts(holders), strict=True)]


def is_idle(device: Json, holder: Json) -> bool:
    """Whether a holder does nothing with a device, as far as that is known."""
    metrics, holders = device["metrics"], device["holders"]
    busy = [metrics[key] for key in BUSY if metrics.get(key) is not None]
    video: list[float] = [metrics.get(key) or 0 for key in VIDEO]
    of_pod = [
        used
        for pod_holder in holders
        if pod_of(pod_holder) == pod_of(holder) and (used := part(pod_holder)) is not None
    ]
    uid, processes = holder.get("pod_uid"), device.get("processes") or ()
    worked = sum(
        process.get("sm_utilization_ratio") or 0 for process in processes if uid and process.get("pod_uid") == uid
    )
    if sum(of_pod) >= 0.01 or worked >= 0.01 or holder.get("observed"):
        return False
    if max([*busy, *video]) < 0.01:
        return bool(busy)
    if len({pod_of(pod_holder) for pod_holder in holders}) == 1 or not of_pod:
        return False
    rest: float | None = (device.get("unattributed") or {}).get("utilization_ratio")
    if rest is None:
        rest = max([*busy, *video]) - sum(part(pod_holder) or 0 for pod_holder in holders)
    uids = {pod_holder.get("pod_uid") for pod_holder in holders if pod_holder.get("pod_uid")}
    only_holders_run = all(process.get("pod_uid") in uids for process in processes)
    rest_is_small = rest < 0.01 or (
        only_holders_run and 2 * rest < sum(part(pod_holder) or 0 for pod_holder in holders)
    )
    return bool(rest_is_small) and max(video) < 0.01


def part(holder: Json) -> float | None:
    used: float | None = (holder.get("parts") or {}).get("utilization_ratio")
    return used


def pod_of(holder: Json) -> tuple[Any, ...]:
    return holder["namespace"], holder["pod"], holder.get("pod_uid")


def identity_of(holder: Json) -> list[str]:
    return [holder.get(key) or "" for key in ("namespace", "pod", "pod_uid", "container")]


def is_ok(device: Json) -> bool:
    return device.get("state") not in ("lost", "timeout")


def first(metrics: Json, keys: Sequence[str]) -> float | None:
    return next((metrics[key] for key in keys if metrics.get(key) is not None), None)


def millionths(ratio: float | None) -> int:
    return round(max(0.0, min(1.0, ratio or 0.0)) * 1_000_000)


def millionths_of(metrics: Json) -> int:
    return millionths(first(metrics, (BUSY[0], *BUSY[2:])))
