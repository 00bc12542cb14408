"""What a GPU-hour costs, by model, date and node labels, from a YAML or TOML file.

In:       a file such as

              currency: EUR
              prices:
                - {model: "NVIDIA H100*", per_gpu_hour: 1.10, node_labels: {karpenter.sh/capacity-type: spot}}
                - {model: "NVIDIA H100*", per_gpu_hour: 2.95, from: 2026-10-01}

Out:      :class:`Prices`. The first entry that matches a window is its price. Numbers are decimals from the file's own
          digits: none of them is ever a float.
On failure: :class:`PricesError` with every mistake and the entry that it is in.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_FIELDS = frozenset({"model", "per_gpu_hour", "from", "to", "node_labels"})
_EVER_MS = 2**63 - 1
_MOST_DIGITS = 30


class PricesError(ValueError):
    """The file can't be used: all that is wrong with it, one mistake a line."""


class Price(NamedTuple):
    """What an hour of a whole GPU costs: of models by this pattern, in windows that begin in [from_ms, to_ms)."""

    model: str
    per_gpu_hour: Decimal
    from_ms: int
    to_ms: int
    node_labels: tuple[tuple[str, str], ...]


class Prices:
    """The entries of a file, in its order."""

    def __init__(self, currency: str, entries: tuple[Price, ...]) -> None:
        self.currency, self.entries = currency, entries

    def price_of(self, model: str, start_ms: int, node_labels: Mapping[str, str]) -> Decimal | None:
        """What an hour of a GPU of this model costs in a window that begins then; None if no entry says so."""
        for entry in self.entries:
            if (
                entry.from_ms <= start_ms < entry.to_ms
                and fnmatchcase(model.lower(), entry.model)
                and all(node_labels.get(name) == value for name, value in entry.node_labels)
            ):
                return entry.per_gpu_hour
        return None


class _Loader(yaml.SafeLoader):
    """YAML whose numbers stay text, and in which a name that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the loader's own, except that a name may not stand twice."""
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {str(name) for name in names if names.count(name) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"{min(twice)} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag in ("float", "int", "bool"):  # a label's value may be true or 1
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda _, node: str(node.value))


def load(path: Path) -> Prices:
    """The prices in a file. Raises PricesError."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text, parse_float=str) if path.suffix == ".toml" else yaml.load(text, _Loader)  # noqa: S506 - it is a safe one
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PricesError(f"{path}: {' '.join(str(error).split())}") from error
    wrong: list[str] = []
    if not isinstance(document, dict) or not isinstance(document.get("prices"), list) or not document["prices"]:
        raise PricesError(f"{path}: it needs a list `prices` with at least one entry")
    currency = document.get("currency")
    if not isinstance(currency, str) or not currency.isprintable() or not 0 < len(currency) <= 12:
        wrong.append("`currency` must name the currency, such as EUR")
    wrong += [f"`{name}` is not known" for name in document.keys() - {"currency", "prices"}]
    entries = []
    for number, entry in enumerate(document["prices"], 1):
        found, mistakes = _price(entry)
        wrong += [f"price {number}: {mistake}" for mistake in mistakes]
        entries.append(found)
    wrong += _overlaps(entries)
    if wrong:
        raise PricesError("\n".join(f"{path}: {mistake}" for mistake in wrong))
    return Prices(str(currency), tuple(entry for entry in entries if entry is not None))


def _price(entry: Any) -> tuple[Price | None, list[str]]:
    """An entry, or what is wrong with it."""
    if not isinstance(entry, dict):
        return None, ["it must have `model` and `per_gpu_hour`"]
    wrong = [f"`{name}` is not known" for name in sorted(map(str, entry.keys() - _FIELDS))]
    model, labels = entry.get("model"), entry.get("node_labels", {})
    if not isinstance(model, str) or not model.strip():
        wrong.append('`model` must be what gpu.usage calls the model, such as "NVIDIA H100*"')
    if not isinstance(labels, dict) or not all(isinstance(one, str) for pair in labels.items() for one in pair):
        wrong.append("`node_labels` must be names with one value each")
        labels = {}
    try:
        amount = Decimal(str(entry.get("per_gpu_hour")))
    except InvalidOperation:
        amount = Decimal(-1)
    if not amount.is_finite() or amount < 0 or abs(amount.adjusted()) > _MOST_DIGITS:
        wrong.append("`per_gpu_hour` must be a number that is not below zero, such as 2.95")
    span = []
    for name, missing in (("from", 0), ("to", _EVER_MS)):
        at = milliseconds(entry[name]) if name in entry else missing
        if at is None:
            wrong.append(f"`{name}` must be a date or a time, such as 2026-10-01 (UTC)")
        span.append(missing if at is None else at)
    if span[0] >= span[1]:
        wrong.append("`from` must be before `to`")
    if wrong:
        return None, wrong
    return Price(str(model).strip().lower(), amount, span[0], span[1], tuple(sorted(labels.items()))), []


def _overlaps(entries: Sequence[Price | None]) -> Iterator[str]:
    """The entries that share some time with an earlier one of the same model and node labels. An entry that is for more
    time, on both sides, is the price for the rest of it."""
    for (number, first), (later, entry) in combinations(enumerate(entries, 1), 2):
        if first is None or entry is None or (first.model, first.node_labels) != (entry.model, entry.node_labels):
            continue
        span, its = (first.from_ms, first.to_ms), (entry.from_ms, entry.to_ms)
        both = max(span[0], its[0]), min(span[1], its[1])
        if both[0] < both[1] and not both == span != its:
            yield (
                f"price {later}: price {number} has the same model and node labels, and some of the same time: let one"
                " end where the other begins"
            )


def milliseconds(at: Any) -> int | None:
    """A date or a time as a file or a user writes it, in ms since the epoch: UTC if it names no zone. None: neither."""
    try:
        if isinstance(at, str):
            at = datetime.fromisoformat(at.strip())
        if isinstance(at, date) and not isinstance(at, datetime):
            at = datetime(at.year, at.month, at.day)  # noqa: DTZ001 - the zone comes next
        if not isinstance(at, datetime):
            return None
        zoned: datetime = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return round(zoned.timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
