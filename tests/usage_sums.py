"""What gpu.usage must say of ticks: sums by the rules of docs/reference/usage.md, without the stream's code.

Each tick is cut where minutes begin, and each piece goes to whoever has the GPU then. What no piece covers is
unobserved. Largest remainders are found in fractions.
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
    """What tells the rows of a window apart. A part that a row does not have is empty."""

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
    """What is kept of a node: its ticks, the time up to which all is counted, and what each GPU's counter said when."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.run_id, self.last_ms, self.counted_ms = -1, 0, 0
        self.counters: dict[str, tuple[int, int] | None] = {}


class UsageSums:
    """The sums of ticks, which are taken in the order of their log; a tick may come again."""

    def __init__(self, split: str = "used") -> None:
        self.ticks = 0
        self._split = split
        self._nodes: dict[str, Node] = defaultdict(Node)
        self._rows: dict[Row, Counter[str]] = defaultdict(Counter)
        self._of: dict[tuple[str, str, int], int] = {}  # by node, GPU and hour
        self._seen_ms: Counter[tuple[str, str, int]] = Counter()  # by node, GPU and minute
        self._beside_mj: Counter[tuple[str, str]] = Counter()  # by node and GPU, drawn while no tick stood for it

    def take(self, tick: Json, logged_ms: int) -> None:
        """Count a tick."""
        name = f"{tick['cluster']}/{tick['node']}"
        node, ts_ms, run_id = self._nodes[name], tick["ts_ms"], tick["run_id"]
        if (run_id, tick["seq"]) in node.seen:
            return
        self.ticks += 1
        node.seen.add((run_id, tick["seq"]))
        before_ms = node.last_ms if node.run_id == run_id else ts_ms
        node.run_id, node.last_ms = run_id, before_ms
        if ts_ms > logged_ms + 60_000:
            return
        node.last_ms = ts_ms
        interval_ms = min(tick.get("interval_ms") or 10_000, HOUR_MS)
        since_ms = min(ts_ms, max(before_ms, ts_ms - 3 * interval_ms, node.counted_ms))
        for uuid, devices in by_gpu(tick["devices"]).items():
            drawn = self._drawn(node, devices[-1], since_ms, max(ts_ms, node.counted_ms))
            if ts_ms <= node.counted_ms:
                continue
            of = devices[-1].get("compute_slices") or 1
            self._of.setdefault((name, uuid, since_ms // HOUR_MS), of)
            pieces = list(minutes(since_ms, ts_ms))
            energies = parts_of(drawn, node.counted_ms, [end_ms - start_ms for start_ms, end_ms in pieces])
            self._beside_mj[name, uuid] += drawn[0] - sum(energies)
            for (start_ms, end_ms), energy_mj in zip(pieces, energies, strict=True):
                self._of.setdefault((name, uuid, start_ms // HOUR_MS), of)
                self._seen_ms[name, uuid, start_ms // MINUTE_MS] += end_ms - start_ms
                each = slices(devices, self._of[name, uuid, start_ms // HOUR_MS])
                for device, its, mj in zip(devices, each, shared(energy_mj, each), strict=True):
                    if its:
                        span = (start_ms // MINUTE_MS * MINUTE_MS, start_ms - since_ms, end_ms - since_ms)
                        self._device(span, name, uuid, (device, its, mj), devices, tick["attribution"])
        node.counted_ms = max(node.counted_ms, ts_ms)

    def _drawn(self, node: Node, device: Json, since_ms: int, ts_ms: int) -> tuple[int, int, int]:
        """How many mJ a GPU drew, and from when to when, until its tick."""
        counter, power = device["metrics"].get("energy_joules_total"), device["metrics"].get("power_watts")
        last = node.counters.get(device["uuid"])
        if counter is not None:
            now = round(counter * 1000)
            node.counters[device["uuid"]] = now, ts_ms
            if last is not None and last[1] < ts_ms:
                mj = now - last[0] if now >= last[0] else now
                if mj <= 20_000 * (ts_ms - last[1]):
                    return mj, last[1], ts_ms
        elif power is not None:
            node.counters[device["uuid"]] = None
        return round((power or 0) * (ts_ms - since_ms)), since_ms, ts_ms

    def _device(
        self, span: tuple[int, int, int], node: str, gpu: str, of: tuple[Json, int, int], devices: list[Json], how: str
    ) -> None:
        """Count a piece of a tick for the holders of a device. ``span``: its minute, and from when to when since what
        the tick stands for began. ``of``: the device, its slices and its energy."""
        (start_ms, since_ms, until_ms), (device, slices, energy_mj) = span, of
        ms, metrics, holders = until_ms - since_ms, device["metrics"], device.get("holders") or []
        lost, is_rest = device.get("state", "ok") != "ok", device is devices[-1] and len(devices) > 1
        used = 0 if is_rest or lost else millionths(first(metrics, (BUSY[0], *BUSY[2:])))
        tensor = 0 if is_rest or lost else millionths(metrics.get("tensor_active_ratio"))
        memory = 0 if lost else round(metrics.get("memory_used_bytes") or 0)
        if is_rest and not lost:
            cut = (one["metrics"].get("memory_used_bytes") or 0 for one in devices[:-1] if is_ok(one))
            memory = max(0, memory - sum(map(round, cut)))
        whole = Counter(
            device_ms=ms, energy_mj=energy_mj, memory_byte_ms=memory * ms,
            used_us=used * until_ms // 1000 - used * since_ms // 1000,
            tensor_us=tensor * until_ms // 1000 - tensor * since_ms // 1000,
        )  # fmt: skip
        rows = [Row(start_ms, node, gpu, device["uuid"], "lost" if lost else "free")]
        split: dict[str, list[int]] = {field: [whole[field]] for field in whole}
        idle = [False]
        if holders and not lost:
            rows = [Row(start_ms, node, gpu, device["uuid"], "held", *named(one)) for one in holders]
            own = [one.get("parts") or {} for one in holders]
            done, held = ([one.get(key) or 0 for one in own] for key in ("utilization_ratio", "memory_used_bytes"))
            did = [millionths(one) for one in done]
            used_of = metrics.get("memory_used_bytes") or 0
            equal, by_use = equal_parts(holders), filled(did, 1_000_000, holders)
            weights = {"device_ms": equal if self._split == "equal" else by_use, "energy_mj": by_use}
            weights |= dict.fromkeys(("used_us", "tensor_us"), filled(did, millionths_of(metrics), holders))
            weights["memory_byte_ms"] = filled([round(one) for one in held], round(used_of), holders)
            split = {field: shared(whole[field], weights[field]) for field in whole}
            idle = [is_idle(device, one) for one in holders]
        for place, row in enumerate(rows):
            amounts = Counter({field: split[field][place] for field in whole})
            own_ms = amounts["device_ms"]
            amounts.update({"slice_ms": own_ms * slices, "idle_ms": own_ms * idle[place], f"{how}_ms": own_ms})
            self._rows[row].update(amounts)

    def windows(self, lasts_ms: int) -> dict[Row, Json]:
        """The rows that are not zero, of all windows of a length. Of what is unobserved, the energy is not in them."""
        found: dict[Row, Counter[str]] = defaultdict(Counter)
        for row, amounts in self._rows.items():
            found[row._replace(start_ms=row.start_ms // lasts_ms * lasts_ms)].update(amounts)
        for (node, uuid, hour), of in self._of.items():
            for minute in range(hour * 60, hour * 60 + 60):
                unseen_ms = MINUTE_MS - self._seen_ms[node, uuid, minute]
                row = Row(minute * MINUTE_MS // lasts_ms * lasts_ms, node, uuid, uuid, "unobserved")
                found[row].update(device_ms=unseen_ms, slice_ms=unseen_ms * of)
        some = {row: amounts for row, amounts in found.items() if any(amounts.values())}
        return {row: {field: amounts[field] for field in FIELDS} for row, amounts in some.items()}

    def wrong(self, records: Sequence[Usage], lasts_ms: int, until_ms: int | None = None) -> list[str]:
        """In what the records that count differ from these sums: in the windows of a length, of all time or until one.

        The energy that is unobserved is compared for all time only, as one sum of each GPU.
        """
        found, beside_mj, closes = dict[Row, Json](), Counter[tuple[str, str]](), Counter[tuple[str, str, int, int]]()
        expected = {
            row: its for row, its in self.windows(lasts_ms).items() if until_ms is None or row.start_ms < until_ms
        }
        said = [f"not final: {one.key}" for one in records if not one.final]
        for one in records:
            row = Row(one.start_ms, f"{one.cluster}/{one.node}", one.gpu_uuid, one.uuid, one.category, *named_of(one))
            closes[row.node, row.gpu_uuid, one.start_ms, one.of] += one.slice_ms
            amounts = {field: getattr(one, field) for field in FIELDS}
            if one.category == "unobserved":
                beside_mj[row.node, row.gpu_uuid] += amounts["energy_mj"]
                amounts["energy_mj"] = 0
            if any(amounts.values()):
                found[row] = amounts
        said += [
            f"{row} has {found.get(row)}, and its ticks say {expected.get(row)}"
            for row in found.keys() | expected.keys()
            if found.get(row) != expected.get(row)
        ]
        said += [f"{window} adds up to {ms}" for window, ms in closes.items() if ms != lasts_ms * window[3]]
        for gpu in beside_mj.keys() | self._beside_mj.keys() if until_ms is None else ():
            if beside_mj[gpu] != self._beside_mj[gpu]:
                said.append(f"{gpu} drew {beside_mj[gpu]} mJ unobserved, and its ticks say {self._beside_mj[gpu]}")
        return said


def by_gpu(devices: Sequence[Json]) -> dict[str, list[Json]]:
    """The devices of each physical GPU: what was cut of it, then itself."""
    found: dict[str, list[Json]] = {}
    for device in devices:
        found.setdefault(device["mig"]["parent_uuid"] if device.get("mig") else device["uuid"], []).append(device)
    return {uuid: sorted(of, key=lambda one: not one.get("mig")) for uuid, of in found.items()}


def slices(devices: Sequence[Json], of: int) -> list[int]:
    """The compute slices of each device of a GPU: as the profiles say, and what is left for the GPU itself."""
    found = list[int]()
    for device in devices[:-1]:
        name = device["mig"]["profile"]
        found.append(min(of - sum(found), int(name.partition("c." if "c." in name else "g.")[0])))
    return [*found, of - sum(found)]


def minutes(since_ms: int, until_ms: int) -> Iterator[tuple[int, int]]:
    edges = [since_ms, *range(-(-(since_ms + 1) // MINUTE_MS) * MINUTE_MS, until_ms, MINUTE_MS), until_ms]
    yield from (pair for pair in itertools.pairwise(edges) if pair[0] < pair[1])


def parts_of(drawn: tuple[int, int, int], counted_ms: int, lasting_ms: Sequence[int]) -> list[int]:
    """The energy of the last pieces of the time in which it was drawn evenly. What of it is in time that was counted
    before is rounded down first."""
    mj, from_ms, to_ms = drawn
    if from_ms < counted_ms:
        mj, from_ms = mj - mj * (counted_ms - from_ms) // (to_ms - from_ms), counted_ms
    ends_ms = [to_ms - from_ms - after_ms for after_ms in itertools.accumulate(reversed(lasting_ms), initial=0)][::-1]
    until = [mj * ms // (to_ms - from_ms) if ms else 0 for ms in ends_ms]
    return [end - start for start, end in itertools.pairwise(until)]


def shared(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Parts that sum: each rounded down, and one more for the largest remainders."""
    weights = weights if any(weights) else [1] * len(weights)
    exact = [Fraction(total) * weight / sum(weights) for weight in weights]
    order = sorted(range(len(exact)), key=lambda place: (floor(exact[place]) - exact[place], place))
    more = set(order[: total - sum(map(floor, exact))])
    return [floor(part) + (place in more) for place, part in enumerate(exact)]


def equal_parts(holders: Sequence[Json]) -> list[Fraction]:
    """Equal for each pod that was given the device, and in it for each container."""
    given = [one for one in holders if not one.get("observed")] or list(holders)
    pods = Counter(pod_of(one) for one in given)
    return [Fraction(1, len(pods) * pods[pod_of(one)]) if one in given else Fraction(0) for one in holders]


def filled(own: Sequence[int], whole: int, holders: Sequence[Json]) -> list[Fraction]:
    """What is each holder's own, and what is nobody's in equal parts."""
    rest = max(0, whole - sum(own))
    return [mine + rest * part for mine, part in zip(own, equal_parts(holders), strict=True)]


def is_idle(device: Json, holder: Json) -> bool:
    """Whether a holder is known to do nothing with a device."""
    metrics, holders = device["metrics"], device["holders"]
    busy = [metrics[key] for key in BUSY if metrics.get(key) is not None]
    video: list[float] = [metrics.get(key) or 0 for key in VIDEO]
    own = [done for one in holders if pod_of(one) == pod_of(holder) and (done := part(one)) is not None]
    uid = holder.get("pod_uid")
    ran = [one for one in device.get("processes") or () if uid and one.get("pod_uid") == uid]
    if sum(own) >= 0.01 or sum(one.get("sm_utilization_ratio") or 0 for one in ran) >= 0.01 or holder.get("observed"):
        return False
    if max([*busy, *video]) < 0.01:
        return bool(busy)
    if len({pod_of(one) for one in holders}) == 1 or not own:
        return False
    rest: float | None = (device.get("unattributed") or {}).get("utilization_ratio")
    if rest is None:
        rest = max([*busy, *video]) - sum(part(one) or 0 for one in holders)
    theirs = {one.get("pod_uid") for one in holders if one.get("pod_uid")}
    only_theirs = all(one.get("pod_uid") in theirs for one in device.get("processes") or ())
    little = rest < 0.01 or (only_theirs and 2 * rest < sum(part(one) or 0 for one in holders))
    return bool(little) and max(video) < 0.01


def part(holder: Json) -> float | None:
    found: float | None = (holder.get("parts") or {}).get("utilization_ratio")
    return found


def pod_of(holder: Json) -> tuple[Any, ...]:
    return holder["namespace"], holder["pod"], holder.get("pod_uid")


def named(holder: Json) -> list[str]:
    return [holder.get(key) or "" for key in ("namespace", "pod", "pod_uid", "container")]


def named_of(one: Usage) -> list[str]:
    return [one.namespace or "", one.pod or "", one.pod_uid or "", one.container or ""]


def is_ok(device: Json) -> bool:
    return bool(device.get("state", "ok") == "ok")


def first(metrics: Json, keys: Sequence[str]) -> float | None:
    return next((metrics[key] for key in keys if metrics.get(key) is not None), None)


def millionths(ratio: float | None) -> int:
    return round(max(0.0, min(1.0, ratio or 0.0)) * 1_000_000)


def millionths_of(metrics: Json) -> int:
    return millionths(first(metrics, (BUSY[0], *BUSY[2:])))
