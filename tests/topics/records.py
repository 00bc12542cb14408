"""Records of any shape that a type allows, as hypothesis strategies over JSON values."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from topics.profiles import PROFILES, ProfileName
from topics.topic import Topic

Json = dict[str, Any]

LARGEST = 2**63 - 1

scalars = st.one_of(st.none(), st.booleans(), st.integers(-LARGEST, LARGEST), st.text(max_size=5))
unknown = st.dictionaries(
    st.text(max_size=5).map("unknown_{}".format), st.one_of(scalars, st.lists(scalars, max_size=2)), max_size=1
)


def records_of(topic: Topic) -> st.SearchStrategy[Json]:
    """Every record that the topic's type accepts, with unknown fields, and nulls for missing values."""
    assert topic.record is not None
    struct: st.SearchStrategy[Json] = _values(inspect.type_info(topic.record))
    return struct


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            return st.deferred(lambda: _structs(kind))
        case inspect.Metadata():
            return _values(kind.type)
        case inspect.UnionType():
            return st.one_of([_values(option) for option in kind.types])
        case inspect.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=2)
        case inspect.VarTupleType():
            return st.lists(_values(kind.item_type), max_size=2)
        case _:
            return _scalars(kind)


def _scalars(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType():
            return st.integers(-LARGEST if kind.ge is None else kind.ge, LARGEST if kind.le is None else kind.le)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.StrType():
            return st.from_regex(kind.pattern) if kind.pattern else st.text(max_size=10)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.DateTimeType():
            return st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat)
        case inspect.AnyType():
            return st.dictionaries(st.text(max_size=5), scalars, max_size=2)
        case inspect.NoneType():
            return st.none()
        case _:
            raise NotImplementedError(kind)


def _structs(kind: inspect.StructType) -> st.SearchStrategy[Any]:
    if kind.array_like:
        return st.tuples(*(_values(field.type) for field in kind.fields)).map(list)
    required = {field.name: _values(field.type) for field in kind.fields if field.required}
    optional = {field.name: st.none() | _values(field.type) for field in kind.fields if not field.required}
    known_fields = st.fixed_dictionaries(required, optional=optional)
    return st.builds(lambda extra, record: {**extra, **record}, unknown, known_fields)


def encoded(record: Json) -> bytes:
    """The record as a producer writes it."""
    return msgspec.json.encode(record)


def own_labels(profile: ProfileName) -> frozenset[str]:
    """The names of the labels that distinguish series of one name in a profile."""
    named = PROFILES[profile]
    labels = [series.labels for many_series in named.series.values() for series in many_series] + [
        ratio.labels for ratio in named.ratios
    ]
    return frozenset(name for pairs in labels for name, _ in pairs)
