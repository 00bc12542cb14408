"""What a GPU-hour costs, by model, date and node labels, from a YAML or TOML file.

In:       a file such as

              currency: EUR
              prices:
                - {model: "NVIDIA H100*", per_gpu_hour: 1.10, node_labels: {karpenter.sh/capacity-type: spot}}
                - {model: "NVIDIA H100*", per_gpu_hour: 2.95, from: 2026-10-01}

Out:      :class:`Prices`. The first entry that matches a window is its price. Numbers are decimals from the file's own
          digits: none of them is ever a float.
On failure: :class:`PricesError` with every error of the file and the entry that it is in.
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

from delivery import files
from delivery.files import TooLarge, YamlLoader

_FIELDS = frozenset({"model", "per_gpu_hour", "from", "to", "node_labels"})
_FOREVER_MS = 2**63 - 1
_MAX_EXPONENT = 30


class PricesError(ValueError):
    """The file can't be used; the message has one line for each error."""


class Price(NamedTuple):
    """The price of an hour of a whole GPU, for models that match ``model`` and windows that begin in from_ms..to_ms."""

    model: str
    per_gpu_hour: Decimal
    from_ms: int
    to_ms: int
    node_labels: tuple[tuple[str, str], ...]


class Prices(NamedTuple):
    """The entries of a file, in its order."""

    currency: str
    entries: tuple[Price, ...]

    def price_of(self, model: str, start_ms: int, node_labels: Mapping[str, str]) -> Decimal | None:
        """The price of an hour of a GPU of this model in a window that begins then; None if no entry matches."""
        for entry in self.entries:
            if (
                entry.from_ms <= start_ms < entry.to_ms
                and fnmatchcase(model.lower(), entry.model)
                and all(node_labels.get(name) == value for name, value in entry.node_labels)
            ):
                return entry.per_gpu_hour
        return None


class _Loader(YamlLoader):
    """YAML whose numbers stay text, and in which a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping. Raises ConstructorError if a key stands twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if duplicates := {str(key) for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"{min(duplicates)} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag in ("float", "int", "bool"):  # a label's value may be true or 1
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", lambda _, node: str(node.value))


def load(path: Path) -> Prices:
    """The prices in a file. Raises PricesError."""
    document = _document(path)
    errors: list[str] = []
    if not isinstance(document, dict) or not isinstance(document.get("prices"), list) or not document["prices"]:
        raise PricesError(f"{path}: it needs a list `prices` with at least one entry")
    currency = document.get("currency")
    if not isinstance(currency, str) or not currency.isprintable() or not 0 < len(currency) <= 12:
        errors.append("`currency` must name the currency, such as EUR")
    errors += [f"`{name}` is not known" for name in document.keys() - {"currency", "prices"}]
    entries = []
    for number, entry in enumerate(document["prices"], 1):
        price, price_errors = _price(entry)
        errors += [f"price {number}: {error}" for error in price_errors]
        entries.append(price)
    errors += _overlaps(entries)
    if errors:
        raise PricesError("\n".join(f"{path}: {error}" for error in errors))
    return Prices(str(currency), tuple(entry for entry in entries if entry is not None))


def _document(path: Path) -> Any:
    """What a file of YAML or TOML holds. Raises PricesError."""
    try:
        data = files.read(path)
    except OSError as error:
        raise PricesError(f"{path}: {error.strerror}") from error
    except TooLarge as error:
        raise PricesError(f"{path}: it is {error}") from error
    try:
        text = data.decode("utf-8-sig")
        return tomllib.loads(text, parse_float=str) if path.suffix == ".toml" else yaml.load(text, _Loader)  # noqa: S506 - it is a safe one
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PricesError(f"{path}:{line}: it is not UTF-8") from error
    except RecursionError as error:
        raise PricesError(f"{path}: it is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        place = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else path
        raise PricesError(f"{place}: {error.problem}") from error
    except (ValueError, AttributeError, yaml.YAMLError) as error:  # PyYAML's, of what its tag calls a timestamp
        raise PricesError(f"{path}: {' '.join(str(error).split())}") from error


def _price(entry: Any) -> tuple[Price | None, list[str]]:
    if not isinstance(entry, dict):
        return None, ["it must have `model` and `per_gpu_hour`"]
    errors = [f"`{name}` is not known" for name in sorted(map(str, entry.keys() - _FIELDS))]
    model, labels = entry.get("model"), entry.get("node_labels", {})
    if not isinstance(model, str) or not model.strip():
        errors.append('`model` must be what gpu.usage calls the model, such as "NVIDIA H100*"')
    if not isinstance(labels, dict) or not all(isinstance(text, str) for pair in labels.items() for text in pair):
        errors.append("`node_labels` must be names with one value each")
        labels = {}
    try:
        amount = Decimal(str(entry.get("per_gpu_hour")))
    except (InvalidOperation, ValueError):  # a ValueError: it has more digits than Python writes
        amount = Decimal(-1)
    if not amount.is_finite() or amount < 0 or abs(amount.adjusted()) > _MAX_EXPONENT:
        errors.append("`per_gpu_hour` must be a number that is not below zero, such as 2.95")
    span = []
    for name, default_ms in (("from", 0), ("to", _FOREVER_MS)):
        at_ms = milliseconds(entry[name]) if name in entry else default_ms
        if at_ms is None:
            errors.append(f"`{name}` must be a date or a time, such as 2026-10-01 (UTC)")
        span.append(default_ms if at_ms is None else at_ms)
    if span[0] >= span[1]:
        errors.append("`from` must be before `to`")
    if errors:
        return None, errors
    return Price(str(model).strip().lower(), amount, span[0], span[1], tuple(sorted(labels.items()))), []


def _overlaps(entries: Sequence[Price | None]) -> Iterator[str]:
    """An error for each entry whose time overlaps that of an earlier one with the same model and node labels.

    A later entry may contain all of an earlier one's time: it is the price for the rest.
    """
    for (first_number, first), (number, entry) in combinations(enumerate(entries, 1), 2):
        if first is None or entry is None or (first.model, first.node_labels) != (entry.model, entry.node_labels):
            continue
        first_span, span = (first.from_ms, first.to_ms), (entry.from_ms, entry.to_ms)
        overlap = max(first_span[0], span[0]), min(first_span[1], span[1])
        if overlap[0] < overlap[1] and not overlap == first_span != span:
            yield (
                f"price {number}: price {first_number} has the same model and node labels, and some of the same time:"
                " let one end where the other begins"
            )


def datetime_of(text: str) -> datetime:
    """A date or a time by ISO 8601 or RFC 3339, whose t and z may be small. Raises ValueError."""
    return datetime.fromisoformat(text.strip().upper())


def milliseconds(value: Any) -> int | None:
    """A date or a time in ms since the epoch, in UTC if it names no zone; None if it is neither."""
    try:
        if isinstance(value, str):
            value = datetime_of(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)  # noqa: DTZ001 - the zone comes next
        if not isinstance(value, datetime):
            return None
        zoned: datetime = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return round(zoned.timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
