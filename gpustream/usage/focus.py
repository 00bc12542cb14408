"""A bill's charges divided by who had the GPUs: FOCUS 1.3's split cost allocation.

In:       a bill, a CSV file with the columns of FOCUS, and the records of gpu.usage for its time.
Out:      the bill again. A charge for a node or a GPU is there as several allocated charges: one for each holder, and
          one each for what was free, unobserved and lost. All other charges are as they were.
On failure: :class:`BillError` with the place of what is wrong in the bill.

A charge is for a node if its ResourceId or ResourceName is one of the node's ids: its name, the value of a node label,
or what a file says. It is for a GPU if that is the GPU's UUID. What can be summed in a charge, its costs and
quantities, is divided by GPU time, ``slice_ms / of``. The parts add up to the charge exactly: in cents or, if the
charge has more digits than that, in its last one. Everything else is copied.

Source: FOCUS 1.3, "Data Generator-Calculated Split Cost Allocation Handling" and the columns that begin with Allocated.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import msgspec

from delivery.prices import milliseconds
from gpustream.usage.read import Range
from gpustream.usage.table import CATEGORIES, By, divided, holder, rounded
from topics.usage import HOUR_MS, Usage

METHOD_ID = "gpustream-gpu-time"
"""What docs/how-to/chargeback.md says of how charges are divided."""

ALLOCATED = (
    "AllocatedMethodId", "AllocatedMethodDetails", "AllocatedResourceId", "AllocatedResourceName", "AllocatedTags",
)  # fmt: skip
OWN = ("x_OriginRow", "x_UsageCategory")

NEEDED = ("ResourceId", "ChargePeriodStart", "ChargePeriodEnd", "BilledCost")
COSTS = ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "PricingCurrencyEffectiveCost")
QUANTITIES = ("ConsumedQuantity", "PricingQuantity", "CommitmentDiscountQuantity")
_FINE_PLACES = 9
_MOST_DIGITS = 30
"""More than any bill has: a number of a billion digits would never be divided."""

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://")
_encoder = msgspec.json.Encoder(decimal_format="number")


class BillError(ValueError):
    """The bill, or a file beside it, can't be used, and why."""


class Part(NamedTuple):
    """Who gets a part of a charge; the cluster and name are empty if nobody held it."""

    category: str
    cluster: str
    name: str


class Charge:
    """A charge that may be divided: what GPUs did in the hours from ``from_ms`` until ``to_ms``, for whom."""

    def __init__(self, from_ms: int, to_ms: int) -> None:
        self.from_ms, self.to_ms = from_ms, to_ms
        self.hours: set[int] = set()
        self.slice_ms: dict[tuple[Part, int], int] = {}  # by whose it is, and how many slices the GPU has

    def take(self, record: Usage, part: Part) -> None:
        """Count a record for a part."""
        self.hours.add(record.start_ms // HOUR_MS)
        key = part, record.of
        self.slice_ms[key] = self.slice_ms.get(key, 0) + record.slice_ms

    def weights(self) -> dict[Part, Fraction]:
        """The GPU time of each part, in ms: the holders by name, then what nobody held."""
        found: dict[Part, Fraction] = {}
        for (part, of), slice_ms in self.slice_ms.items():
            found[part] = found.get(part, Fraction(0)) + Fraction(slice_ms, of)
        ranks = {name: rank for rank, name in enumerate(CATEGORIES)}
        return dict(sorted(found.items(), key=lambda one: (ranks.get(one[0].category, len(ranks)), one[0])))


class Nodes(NamedTuple):
    """What a bill calls nodes: by their names, and by the ids in a file. ``label`` None: no node label has an id."""

    ids: Mapping[str, Sequence[str]] = {}
    label: str | None = None


def read_nodes(path: Path) -> dict[str, list[str]]:
    """The ids of each node, from a file with an id and a node's name in each line. Raises BillError."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise BillError(f"{path}:{number}: it must be the bill's ResourceId and the name of a node")
        found.setdefault(words[1], []).append(words[0])
    return found


def names_of(text: str) -> set[str]:
    """How an id may be written elsewhere: without its scheme, and by its last part alone, unless that is a number."""
    whole = _SCHEME.sub("", text.strip().lower())
    last = re.split(r"[/:]", whole)[-1]
    return {whole, last} - {""} if not last.isdigit() else {whole}


class Bill:
    """The rows of a bill, and for what the GPUs that it charges for were used.

    When all lines are written: ``divided`` is how many charges were, ``partly`` how many of those have hours without
    usage, and ``unchanged`` how many were not, by the reason.
    """

    def __init__(self, path: Path, by: By, nodes: Nodes, summed: Sequence[str] = ()) -> None:
        """Read a bill. ``summed``: what else can be summed in it, beside FOCUS's own columns. Raises BillError."""
        self._path, self._by, self._nodes = path, by, nodes
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                columns, *rows = [row for row in csv.reader(file, strict=True) if row] or [[]]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise BillError(f"{path}: it can't be read as CSV in UTF-8: {error}") from error
        if missing := [name for name in (*NEEDED, *summed) if name not in columns]:
            raise BillError(f"{path}: it has no column {missing[0]}, so it is not a bill in the form of FOCUS")
        if twice := [name for name, count in Counter(columns).items() if count > 1]:
            raise BillError(f"{path}: it has two columns {twice[0]}")
        for number, row in enumerate(rows, 1):
            if len(row) != len(columns):
                raise BillError(f"{path}: row {number} has {len(row)} fields, and the first line {len(columns)}")
        self._columns, self._rows = columns, rows
        self._places = dict.fromkeys((*COSTS, *summed), 2) | dict.fromkeys(QUANTITIES, _FINE_PLACES)
        self._charges: dict[int, Charge] = {}
        self._hourly: dict[tuple[str, int], list[Charge]] = {}  # those of one hour, by an id and that hour
        self._longer: dict[str, list[Charge]] = {}
        self._names: dict[tuple[str, str, str], frozenset[str]] = {}
        self._tags: dict[Part, str] = {}
        self.divided = self.partly = 0
        self.unchanged: Counter[str] = Counter()
        for number, row in enumerate(self._rows, 1):
            cells = dict(zip(self._columns, row, strict=True))
            from_ms, to_ms = milliseconds(cells["ChargePeriodStart"]), milliseconds(cells["ChargePeriodEnd"])
            if from_ms is None or to_ms is None or from_ms >= to_ms or cells.get("AllocatedMethodId"):
                continue
            charge = Charge(from_ms // HOUR_MS * HOUR_MS, -(-to_ms // HOUR_MS) * HOUR_MS)
            self._charges[number] = charge
            for name in names_of(cells["ResourceId"]) | names_of(cells.get("ResourceName", "")):
                if charge.to_ms - charge.from_ms == HOUR_MS:
                    self._hourly.setdefault((name, charge.from_ms), []).append(charge)
                else:
                    self._longer.setdefault(name, []).append(charge)

    @property
    def range(self) -> Range | None:
        """From when to when its charges are, in whole hours; None if it has none that could be divided."""
        charges = self._charges.values()
        return Range(min(one.from_ms for one in charges), max(one.to_ms for one in charges)) if charges else None

    def add(self, record: Usage) -> None:
        """Take in a record; there is one for each key."""
        part = Part(record.category, "", "")
        if record.category == "held":
            part = Part("held", "" if self._by == "team" else record.cluster, holder(record, self._by))
            self._tags.setdefault(part, _tags(record, self._by))
        hour_ms = record.start_ms // HOUR_MS * HOUR_MS
        charges: set[Charge] = set()
        for name in self._names_of(record):
            charges.update(self._hourly.get((name, hour_ms), ()))
            charges.update(one for one in self._longer.get(name, ()) if one.from_ms <= hour_ms < one.to_ms)
        for charge in charges:
            charge.take(record, part)

    def _names_of(self, record: Usage) -> frozenset[str]:
        """What a bill may call the node or the GPU of a record."""
        label = record.node_labels.get(self._nodes.label or "", "")
        known = self._names.get(key := (record.node, record.gpu_uuid, label))
        if known is None:
            ids = (record.node, record.node.partition(".")[0], record.gpu_uuid, label)
            known = frozenset().union(*map(names_of, (*ids, *self._nodes.ids.get(record.node, ()))))
            self._names[key] = known
        return known

    def lines(self, counted: Range) -> Iterator[Sequence[str]]:
        """The bill with its charges divided, its columns first. ``counted``: the time that the records are of.

        Raises BillError.
        """
        first_own = next((at for at, name in enumerate(self._columns) if name.startswith("x_")), len(self._columns))
        columns = list(dict.fromkeys((*self._columns[:first_own], *ALLOCATED, *self._columns[first_own:], *OWN)))
        yield columns
        for number, row in enumerate(self._rows, 1):
            cells, charge = dict(zip(self._columns, row, strict=True)), self._charges.get(number)
            parts: Iterable[Mapping[str, str]] = (cells,)
            if charge is None:
                self.unchanged["of no time, or divided before"] += 1
            elif not charge.slice_ms:
                self.unchanged["of no node or GPU that has usage in their time"] += 1
            elif charge.from_ms < counted.from_ms or charge.to_ms > counted.to_ms:
                self.unchanged["of a time that is not all counted"] += 1
            else:
                self.divided += 1
                self.partly += len(charge.hours) * HOUR_MS < charge.to_ms - charge.from_ms
                parts = self._parts(number, cells, charge)
            yield from ([part.get(name, "") for name in columns] for part in parts)

    def _parts(self, number: int, cells: Mapping[str, str], charge: Charge) -> Iterator[Mapping[str, str]]:
        """The allocated charges of a charge."""
        weights = charge.weights()
        shares = list(weights.values())
        summed: dict[str, list[Decimal]] = {}
        for name, places in self._places.items():
            if (text := cells.get(name, "").strip()) and text.lower() != "null":
                try:
                    amount = Decimal(text)
                    if abs(amount.adjusted()) > _MOST_DIGITS:
                        raise ValueError(text)
                    summed[name] = divided(amount, shares, places)
                except (ArithmeticError, ValueError):
                    wrong = f"{name} is {text!r:.80}, and must be a number such as 12.34"
                    raise BillError(f"{self._path}: row {number}: {wrong}") from None
        ratios = divided(Decimal(1), shares, _FINE_PLACES)
        hours = divided(rounded(sum(shares, Fraction(0)) / HOUR_MS, _FINE_PLACES), shares, _FINE_PLACES)
        for place, part in enumerate(weights):
            usage = {"UsageUnit": "GPU-Hours", "UsageQuantity": hours[place]}
            details = {"Elements": [{"AllocatedRatio": ratios[place], **usage}]}
            named = {}
            if part.category == "held":
                resource = f"{part.cluster}/{part.name}" if part.cluster else part.name
                named = {"AllocatedResourceId": resource, "AllocatedResourceName": part.name}
                named["AllocatedTags"] = self._tags[part]
            yield {
                **cells,
                **{name: f"{amounts[place]:f}" for name, amounts in summed.items()},
                "AllocatedMethodId": METHOD_ID,
                "AllocatedMethodDetails": _encoder.encode(details).decode(),
                **named,
                "x_OriginRow": str(number),
                "x_UsageCategory": part.category,
            }


def _tags(record: Usage, by: By) -> str:
    """What is known of a holder, as FOCUS writes tags: of a pod its labels, too."""
    tags: dict[str, str] = {by: holder(record, by)}
    if by in ("pod", "workload"):
        tags |= {"namespace": record.namespace or "", **({"team": record.team} if record.team else {})}
    if by == "pod":
        if record.workload is not None:
            tags["workload"] = f"{record.workload.kind}/{record.workload.name}"
        tags |= {f"label/{name}": value for name, value in sorted(record.labels.items())}
    if by in ("namespace", "workload", "pod", "node"):
        tags["cluster"] = record.cluster
    return msgspec.json.encode({f"gpustream/{name}": value for name, value in tags.items()}).decode()
