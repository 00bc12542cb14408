"""A bill's charges divided by who had the GPUs: FOCUS 1.3's split cost allocation.

In:       a bill, a CSV file with the columns of FOCUS, and the records of gpu.usage for its time.
Out:      the bill again. A charge for a node or a GPU is there as several allocated charges: one for each holder, and
          one each for what was free, unobserved and lost. All other charges are as they were.
On failure: :class:`BillError` with the place of what is wrong in the bill.

A charge is for a node if its ResourceId or ResourceName is one of the node's ids: its name, the value of a node label,
or what a file says. Nodes of one name in several clusters share it, unless the file tells them apart. It is for a GPU
if that is the GPU's UUID. What can be summed in a charge, its costs and quantities, is divided by GPU time,
``slice_ms / of``. The parts add up to the charge exactly: in cents or, if the charge has more digits than that, in its
last one. Everything else is copied.

Source: FOCUS 1.3, "Data Generator-Calculated Split Cost Allocation Handling" and the columns that begin with Allocated.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import msgspec

from delivery.prices import milliseconds
from gpustream.output import cell, json_text
from gpustream.usage.read import Range
from gpustream.usage.table import CATEGORIES, By, divided, holder_name, rounded
from topics.usage import HOUR_MS, Usage

METHOD_ID = "gpustream-gpu-time"
"""Names the method of dividing charges that docs/how-to/chargeback.md describes."""

ALLOCATED_COLUMNS = (
    "AllocatedMethodId", "AllocatedMethodDetails", "AllocatedResourceId", "AllocatedResourceName", "AllocatedTags",
)  # fmt: skip
EXTRA_COLUMNS = ("x_OriginRow", "x_UsageCategory")

REQUIRED_COLUMNS = ("ResourceId", "ChargePeriodStart", "ChargePeriodEnd", "BilledCost")
COST_COLUMNS = ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "PricingCurrencyEffectiveCost")
QUANTITY_COLUMNS = ("ConsumedQuantity", "PricingQuantity", "CommitmentDiscountQuantity")
_QUANTITY_PLACES = 9
_MAX_DIGITS = 30
"""More than any bill has: a number of a billion digits would never be divided."""

_OTHER_FORMATS = {
    b"\x1f\x8b": "a gzip file, which gunzip unpacks",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet",
    b"PAR1": "a Parquet file",
}
"""Other formats in which clouds export bills, by their first bytes."""

_SEPARATORS = str.maketrans(dict.fromkeys(',"', " "))  # neither an id nor a name has them
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://")
_encoder = msgspec.json.Encoder(decimal_format="number")


class BillError(ValueError):
    """The bill, or a file that belongs to it, can't be used, and why."""


class Part(NamedTuple):
    """Who gets a part of a charge; the cluster and name are empty if nobody held it."""

    category: str
    cluster: str
    name: str


class Charge:
    """A charge that may be divided, and the GPU time of each part in the hours from ``from_ms`` until ``to_ms``."""

    __slots__ = ("from_ms", "hours", "slice_ms", "tags", "to_ms")

    def __init__(self, from_ms: int, to_ms: int) -> None:
        self.from_ms, self.to_ms = from_ms, to_ms
        self.hours: set[int] = set()
        self.slice_ms: dict[tuple[Part, int], int] = {}  # by part, and number of slices of the GPU
        self.tags: dict[Part, tuple[int, str]] = {}  # of each holder: since when, and what they are

    def add(self, record: Usage, part: Part, tags: str) -> None:
        """Adds a record's GPU time to a part. The tags of a holder are those of its last record in the charge's time,
        in whatever order they come."""
        if tags:
            self.tags[part] = max(self.tags.get(part, (0, "")), (record.start_ms, tags))
        self.hours.add(record.start_ms // HOUR_MS)
        key = part, record.of
        self.slice_ms[key] = self.slice_ms.get(key, 0) + record.slice_ms

    def weights(self) -> dict[Part, Fraction]:
        """The GPU time of each part, in ms: the holders by name, then the other categories."""
        weights: dict[Part, Fraction] = {}
        for (part, of), slice_ms in self.slice_ms.items():
            weights[part] = weights.get(part, Fraction(0)) + Fraction(slice_ms, of)
        ranks = {name: rank for rank, name in enumerate(CATEGORIES)}
        return dict(sorted(weights.items(), key=lambda row: (ranks.get(row[0].category, len(ranks)), row[0])))


class Nodes(NamedTuple):
    """The ids of nodes in a bill: those of a file, by node name or CLUSTER/NODE. ``label``: the node label that has
    one, if any."""

    ids: Mapping[str, Sequence[str]] = {}
    label: str | None = None


def read_nodes(path: Path) -> dict[str, list[str]]:
    """The ids of each node, from a file with an id and a node's name in each line, or CSV of them. Raises BillError."""
    ids: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BillError(f"{path}: it can't be read as text in UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        fields = line.translate(_SEPARATORS).split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2:
            raise BillError(f"{path}:{number}: it must be the bill's ResourceId and the name of a node")
        ids.setdefault(fields[1], []).append(fields[0])
    return ids


def id_forms(text: str) -> set[str]:
    """The forms in which an id may be written: without its scheme, and its last part alone, unless that is a number."""
    without_scheme = _SCHEME.sub("", text.strip().lower())
    last = re.split(r"[/:]", without_scheme)[-1]
    return {without_scheme, last} - {""} if not last.isdigit() else {without_scheme}


def _read_bill(path: Path, required: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """The columns of a bill, of which some are ``required``, and its rows. Raises BillError."""
    shared: dict[str, str] = {}  # most cells have the text of others, which then takes memory once
    try:
        with path.open("rb") as file:
            first_bytes = file.peek(max(map(len, _OTHER_FORMATS)))
            if kinds := [kind for start, kind in _OTHER_FORMATS.items() if first_bytes.startswith(start)]:
                raise BillError(f"{path}: it looks like {kinds[0]}, and a bill must be CSV in UTF-8")
            reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
            columns, *rows = [[shared.setdefault(text, text) for text in row] for row in reader if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BillError(f"{path}: it can't be read as CSV in UTF-8: {error}") from error
    if missing := [name for name in required if name not in columns]:
        raise BillError(f"{path}: it has no column {missing[0]}, so it is not a bill in the form of FOCUS")
    if duplicates := [name for name, count in Counter(columns).items() if count > 1]:
        raise BillError(f"{path}: it has two columns {duplicates[0]}")
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise BillError(f"{path}: row {number} has {len(row)} fields, and the first line {len(columns)}")
    return columns, rows


class Bill:
    """The rows of a bill, and the usage of the GPUs that it charges for.

    After :meth:`lines`, ``divided`` counts the charges that were divided, ``partly`` those of them that have hours
    without usage, and ``unchanged`` the charges that were not divided, by reason.
    """

    def __init__(self, path: Path, by: By, nodes: Nodes, summed: Sequence[str] = ()) -> None:
        """Reads a bill. ``summed``: further columns that can be summed, beside FOCUS's own. Raises BillError."""
        self._path, self._by, self._nodes = path, by, nodes
        self._columns, self._rows = _read_bill(path, (*REQUIRED_COLUMNS, *summed))
        self._places = dict.fromkeys((*COST_COLUMNS, *summed), 2) | dict.fromkeys(QUANTITY_COLUMNS, _QUANTITY_PLACES)
        self._charges: dict[int, Charge] = {}
        self._hourly: dict[tuple[str, int], list[Charge]] = {}  # those of one hour, by an id and that hour
        self._longer: dict[str, list[Charge]] = {}
        self._names: dict[tuple[str, str, str, str], frozenset[str]] = {}
        self._tag_texts: dict[str, str] = {}
        self.divided = self.partly = 0
        self.unchanged: Counter[str] = Counter()
        for number, row in enumerate(self._rows, 1):
            cells = dict(zip(self._columns, row, strict=True))
            from_ms, to_ms = _time_ms(cells["ChargePeriodStart"]), _time_ms(cells["ChargePeriodEnd"])
            if from_ms is None or to_ms is None or from_ms >= to_ms or _has_value(cells.get("AllocatedMethodId", "")):
                continue
            charge = Charge(from_ms // HOUR_MS * HOUR_MS, -(-to_ms // HOUR_MS) * HOUR_MS)
            self._charges[number] = charge
            for name in id_forms(cells["ResourceId"]) | id_forms(cells.get("ResourceName", "")):
                if charge.to_ms - charge.from_ms == HOUR_MS:
                    self._hourly.setdefault((name, charge.from_ms), []).append(charge)
                else:
                    self._longer.setdefault(name, []).append(charge)

    @property
    def range(self) -> Range | None:
        """The time range of its charges, in whole hours; None if none of them could be divided."""
        if not (charges := self._charges.values()):
            return None
        return Range(min(charge.from_ms for charge in charges), max(charge.to_ms for charge in charges))

    @property
    def is_of_other_nodes(self) -> bool:
        """Whether a file has ids of nodes, and none of these has usage."""
        known = {name for cluster, node, *_ in self._names for name in (node, f"{cluster}/{node}")}
        return bool(self._nodes.ids) and self._nodes.ids.keys().isdisjoint(known)

    @property
    def shared_nodes(self) -> list[str]:
        """The nodes whose charges are those of a node of the same name in another cluster, too."""
        charged = {*self._longer, *(name for name, _ in self._hourly)}
        clusters: dict[tuple[str, str], set[str]] = {}
        for (cluster, node, *_), names in self._names.items():
            for name in names & charged:
                clusters.setdefault((node, name), set()).add(cluster)
        return sorted({node for (node, _), charged_in in clusters.items() if len(charged_in) > 1})

    def add(self, record: Usage) -> None:
        """Adds a record. There is one for each key."""
        if not record.slice_ms:
            return
        part, tags = Part(record.category, "", ""), ""
        if record.category == "held":
            part = Part("held", "" if self._by == "team" else record.cluster, holder_name(record, self._by))
            tags = _tags(record, self._by)
            tags = self._tag_texts.setdefault(tags, tags)  # one text for all charges and hours that have it
        label = record.node_labels.get(self._nodes.label or "", "")
        names = self._names.get(key := (record.cluster, record.node, record.gpu_uuid, label))
        if names is None:  # all ids that a bill may have for the node or the GPU
            ids = [record.node, record.node.partition(".")[0], record.gpu_uuid, label]
            for name in (record.node, f"{record.cluster}/{record.node}"):
                ids += self._nodes.ids.get(name, ())
            names = frozenset().union(*map(id_forms, ids))
            self._names[key] = names
        hour_ms = record.start_ms // HOUR_MS * HOUR_MS
        charges: set[Charge] = set()
        for name in names:
            charges.update(self._hourly.get((name, hour_ms), ()))
            charges.update(charge for charge in self._longer.get(name, ()) if charge.from_ms <= hour_ms < charge.to_ms)
        for charge in charges:
            charge.add(record, part, tags)

    def lines(self, counted_range: Range) -> Iterator[Sequence[str]]:
        """The bill with its charges divided, its columns first. ``counted_range``: the time that the records cover.

        Raises BillError.
        """
        original = self._columns
        first_extra = next((index for index, name in enumerate(original) if name.startswith("x_")), len(original))
        ordered = (*original[:first_extra], *ALLOCATED_COLUMNS, *original[first_extra:], *EXTRA_COLUMNS)
        columns = list(dict.fromkeys(ordered))
        yield columns
        for number, row in enumerate(self._rows, 1):
            cells, charge = dict(zip(original, row, strict=True)), self._charges.get(number)
            parts: Iterable[Mapping[str, str]] = (cells,)
            if charge is None:
                self.unchanged["of no time, or divided before"] += 1
            elif not charge.slice_ms:
                self.unchanged["of no node or GPU that has usage in their time"] += 1
            elif charge.from_ms < counted_range.from_ms or charge.to_ms > counted_range.to_ms:
                self.unchanged["of a time that is not all counted"] += 1
            else:
                self.divided += 1
                self.partly += len(charge.hours) * HOUR_MS < charge.to_ms - charge.from_ms
                parts = self._parts(number, cells, charge)
            yield from ([part.get(name, "") for name in columns] for part in parts)

    def _parts(self, number: int, cells: Mapping[str, str], charge: Charge) -> Iterator[Mapping[str, str]]:
        """The allocated charges of a charge: one for each part."""
        weights = charge.weights()
        shares = list(weights.values())
        summed: dict[str, list[Decimal]] = {}
        for name, places in self._places.items():
            if _has_value(text := cells.get(name, "").strip()):
                try:
                    amount = Decimal(text)
                    if abs(amount.adjusted()) > _MAX_DIGITS:
                        raise ValueError(text)
                    summed[name] = divided(amount, shares, places)
                except (ArithmeticError, ValueError):
                    message = f"{name} is {text!r:.80}, and must be a number such as 12.34"
                    raise BillError(f"{self._path}: row {number}: {message}") from None
        ratios = divided(Decimal(1), shares, _QUANTITY_PLACES)
        hours = divided(rounded(sum(shares, Fraction(0)) / HOUR_MS, _QUANTITY_PLACES), shares, _QUANTITY_PLACES)
        for index, part in enumerate(weights):
            usage = {"UsageUnit": "GPU-Hours", "UsageQuantity": hours[index]}
            details = {"Elements": [{"AllocatedRatio": ratios[index], **usage}]}
            allocation = {}
            if part.category == "held":
                resource = f"{part.cluster}/{part.name}" if part.cluster else part.name
                allocation = {"AllocatedResourceId": cell(resource), "AllocatedResourceName": cell(part.name)}
                _, allocation["AllocatedTags"] = charge.tags[part]
            yield {
                **cells,
                **{name: f"{amounts[index]:f}" for name, amounts in summed.items()},
                "AllocatedMethodId": METHOD_ID,
                "AllocatedMethodDetails": _encoder.encode(details).decode(),
                **allocation,
                "x_OriginRow": str(number),
                "x_UsageCategory": cell(part.category),
            }


def _has_value(text: str) -> bool:
    """Whether a cell has a value. Bills leave it empty or write NULL if it has none."""
    return text.strip().lower() not in ("", "null")


def _time_ms(text: str) -> int | None:
    """A time of a bill in ms since the epoch; None if it is none. One that BigQuery exported ends in " UTC"."""
    text = text.strip()
    return milliseconds(f"{text[:-4]}Z" if text.endswith(" UTC") else text)


def _tags(record: Usage, by: By) -> str:
    """A holder's tags, as FOCUS writes them. A pod's have its labels, too."""
    tags: dict[str, str] = {by: holder_name(record, by)}
    if by in ("pod", "workload"):
        tags |= {"namespace": record.namespace or "", **({"team": record.team} if record.team else {})}
    if by == "pod":
        if record.workload is not None:
            tags["workload"] = f"{record.workload.kind}/{record.workload.name}"
        tags |= {f"label/{name}": value for name, value in sorted(record.labels.items())}
    if by in ("namespace", "workload", "pod", "node"):
        tags["cluster"] = record.cluster
    return json_text({f"gpustream/{name}": value for name, value in tags.items()})
