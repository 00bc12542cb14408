"""Who used what: the records of gpu.usage as rows of sums, and what they cost. No clock, no network, no floats.

GPU-hours are of whole GPUs: a MIG device with two of seven compute slices is 2/7 of one.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal, NamedTuple

from delivery.prices import Prices
from topics.usage import HOUR_MS, Usage

By = Literal["namespace", "workload", "team", "pod", "node"]

CATEGORIES = ("held", "free", "unobserved", "lost")
NO_TEAM = "(no team)"
_NO_MODEL = "a model that is not known"


def holder_name(record: Usage, by: By) -> str:
    """The name of the row that a record counts in. A pod without a workload is its own workload."""
    namespace, pod, workload = record.namespace or "", record.pod or "", record.workload
    if by == "node":
        return record.node
    if by == "team":
        return record.team or NO_TEAM
    if by == "namespace":
        return namespace
    kind, name = ("Pod", pod) if workload is None else (workload.kind, workload.name)
    return f"{namespace}/{pod}" if by == "pod" else f"{namespace}/{kind}/{name}"


class Sums:
    """The sums of records. ``growing``: some of them are not final."""

    def __init__(self) -> None:
        self.device_ms = self.slice_ms = self.used_us = self.idle_ms = self.energy_mj = 0
        self.growing = False
        self._gpu: dict[int, list[int]] = {}  # by slices of a GPU: slice-ms held, slice-us used, slice-ms idle
        self._priced: dict[tuple[Decimal, int], list[int]] = {}  # by price and slices of a GPU: slice-ms held, idle

    def add(self, record: Usage, price: Decimal | None) -> None:
        """Adds a record. ``price``: of a GPU-hour of it; None if it has none."""
        self.device_ms += record.device_ms
        self.slice_ms += record.slice_ms
        self.used_us += record.used_us
        self.idle_ms += record.idle_ms
        self.energy_mj += record.energy_mj
        self.growing |= not record.final
        gpu = self._gpu.setdefault(record.of, [0, 0, 0])
        gpu[0] += record.slice_ms
        idle = record.idle_ms * record.slice_ms // record.device_ms if record.device_ms else 0
        gpu[2] += idle
        if record.device_ms:
            gpu[1] += record.used_us * record.slice_ms // record.device_ms
        else:  # by a pod that was not given the GPU: of a MIG device, none is known
            gpu[1] += record.used_us * record.of
        if price is not None:
            priced = self._priced.setdefault((price, record.of), [0, 0])
            priced[0] += record.slice_ms
            priced[1] += idle

    @property
    def gpu_hours(self) -> Fraction:
        """The time of whole GPUs, in hours."""
        return sum((Fraction(gpu[0], of * HOUR_MS) for of, gpu in self._gpu.items()), Fraction(0))

    @property
    def used_hours(self) -> Fraction:
        """The part of it in which they computed."""
        return sum((Fraction(gpu[1], of * HOUR_MS * 1000) for of, gpu in self._gpu.items()), Fraction(0))

    @property
    def idle_hours(self) -> Fraction:
        """The part of it in which their holder did nothing with them."""
        return sum((Fraction(gpu[2], of * HOUR_MS) for of, gpu in self._gpu.items()), Fraction(0))

    @property
    def cost(self) -> Fraction:
        """The cost of what has a price."""
        return self._cost_of(0)

    @property
    def idle_cost(self) -> Fraction:
        """The part of the cost for the time in which their holder did nothing with them."""
        return self._cost_of(1)

    def _cost_of(self, index: int) -> Fraction:
        costs = (Fraction(price) * ms[index] / (of * HOUR_MS) for (price, of), ms in self._priced.items())
        return sum(costs, Fraction(0))


class UsageRow(NamedTuple):
    """The sums of one holder, or of a category that nobody held. ``cost`` is None without prices."""

    by: str
    category: str
    sums: Sums
    share: Fraction
    cost: Decimal | None


class GpuWindow:
    """A window of a GPU: the sum of its parts, the slices of the GPU, its length, and whether it is not final."""

    __slots__ = ("growing", "ms", "of", "slice_ms")

    def __init__(self) -> None:
        self.slice_ms = self.of = self.ms = 0
        self.growing = False


class Table:
    """The sums of records by holder and by category. ``unpriced``: GPU-hours of models that have no price.

    ``gpus`` and ``gpu_hours`` are how many GPUs there were and for how long; ``open_windows``: GPUs' windows of which
    the parts do not add up to the whole, though they are final. ``growing``: when windows begin that are not final.
    """

    def __init__(self, by: By, prices: Prices | None = None) -> None:
        self.by, self.prices = by, prices
        self.categories, self.whole = {name: Sums() for name in CATEGORIES}, Sums()
        self.unpriced: dict[str, Fraction] = {}
        self.growing: set[int] = set()
        self.gpus: set[str] = set()
        self.open_windows = 0
        self.gpu_hours = Fraction(0)
        self._holders: dict[tuple[str, str], Sums] = {}
        self._clusters: set[str] = set()
        self._windows: dict[tuple[str, str, str, int], GpuWindow] = {}

    def add(self, record: Usage) -> None:
        """Adds a record. There is one for each key."""
        price = None
        if self.prices is not None:
            hour_ms = record.start_ms // HOUR_MS * HOUR_MS  # a minute has the price of its hour
            price = self.prices.price_of(record.model or "", hour_ms, record.node_labels)
            if price is None and record.slice_ms:
                model, hours = record.model or _NO_MODEL, Fraction(record.slice_ms, record.of * HOUR_MS)
                self.unpriced[model] = self.unpriced.get(model, Fraction(0)) + hours
        self.categories.setdefault(record.category, Sums()).add(record, price)
        self.whole.add(record, price)
        self._clusters.add(record.cluster)
        if record.category == "held":
            key = "" if self.by == "team" else record.cluster, holder_name(record, self.by)
            self._holders.setdefault(key, Sums()).add(record, price)
        if not record.final:
            self.growing.add(record.start_ms)
        window = self._windows.setdefault((record.cluster, record.node, record.gpu_uuid, record.start_ms), GpuWindow())
        window.slice_ms += record.slice_ms
        window.of, window.ms = max(window.of, record.of), record.end_ms - record.start_ms
        window.growing |= not record.final

    def close(self) -> None:
        """Call it after the last record of a partition: adds up its windows, which are complete now."""
        for (_, _, uuid, _), window in self._windows.items():
            self.gpus.add(uuid)
            gpu_ms = Fraction(window.slice_ms, window.of) if window.growing else window.ms
            self.gpu_hours += Fraction(gpu_ms, HOUR_MS)
            self.open_windows += not window.growing and window.slice_ms != window.ms * window.of
        self._windows.clear()

    def rows(self) -> list[UsageRow]:
        """The holders, most GPU-hours first, then the other categories. The rounded costs add up to the rounded whole.

        If the records are of several clusters, the cluster stands before what is only known within one.
        """
        several_clusters = len(self._clusters) > 1
        rows = [
            (f"{cluster}/{name}" if several_clusters and cluster else name, "held", sums)
            for (cluster, name), sums in self._holders.items()
        ]
        rows.sort(key=lambda row: (-row[2].gpu_hours, row[0]))
        rows += [("", name, sums) for name, sums in self.categories.items() if name != "held"]
        costs: Sequence[Decimal | None] = [None] * len(rows)
        if self.prices is not None:  # first by category, so that these cost the same whoever has the rows
            whole, categories = rounded(self.whole.cost, 2), self.categories.values()
            held, *others = divided(whole, [sums.cost for sums in categories])
            costs = [*divided(held, [sums.cost for _, category, sums in rows if category == "held"]), *others]
        return [UsageRow(*row, self.share(row[2]), cost) for row, cost in zip(rows, costs, strict=True)]

    def share(self, sums: Sums) -> Fraction:
        """The sums' part of all GPU-hours."""
        return sums.gpu_hours / self.whole.gpu_hours if self.whole.gpu_hours else Fraction(0)


def rounded(value: Fraction, places: int) -> Decimal:
    """Rounds to ``places`` digits after the point; a half goes to the even digit."""
    return _decimal(round(value * 10**places), places)


def divided(amount: Decimal, weights: Sequence[Fraction | int], places: int = 2) -> list[Decimal]:
    """Divides an amount by weight into parts that add up to exactly it, each a whole number of its smallest unit.

    That unit is the digit of ``places``, or the amount's last one if it has more. What is left after rounding down
    goes, a unit each, to the parts that lost most by it, and of equal ones to the first. Without weight, all are 0.
    """
    exponent = amount.as_tuple().exponent
    places = max(places, -exponent if isinstance(exponent, int) else 0)
    units, total_weight = int(abs(Fraction(amount)) * 10**places), Fraction(sum(weights))
    if not total_weight:
        return [_decimal(0, places) for _ in weights]
    exact = [units * weight / total_weight for weight in weights]
    parts = [int(part) for part in exact]
    by_loss = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_loss[: units - sum(parts)]:
        parts[index] += 1
    return [_decimal(-part if amount < 0 else part, places) for part in parts]


def _decimal(units: int, places: int) -> Decimal:
    """A number of the smallest unit, however long: arithmetic would round it to the context's digits."""
    return Decimal(f"{units}E-{places}")
