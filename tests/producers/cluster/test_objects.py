"""Objects are read as the API server writes them; a malformed object is not taken for an empty one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.cluster import objects
from producers.cluster.objects import UndecodableObject, controller, decode, milliseconds
from tests.producers.cluster.kubernetes_objects import START_MS, pod, pod_json, raw

_POD, _IDENTITY = msgspec.json.Decoder(objects.Pod), msgspec.json.Decoder(objects.Identity)


def test_a_pod_is_read_as_the_api_server_writes_it() -> None:
    read = pod("bert-0", "u1", labels={"app": "x"}, limits={"nvidia.com/gpu": "1", "memory": "8Gi"})

    assert (read.metadata.name, read.metadata.uid, read.metadata.namespace) == ("bert-0", "u1", "ml")
    assert (read.spec.node_name, read.metadata.labels) == ("n1", {"app": "x"})
    assert milliseconds(read.status.start_time) == START_MS


def test_lists_and_maps_may_be_null_or_absent() -> None:
    nothing = {"spec": {"containers": None}, "status": {"containerStatuses": None, "conditions": None}}
    sparse = {"metadata": {"name": "a", "uid": "u", "labels": None, "ownerReferences": None}, **nothing}

    assert decode(_POD, raw(sparse)).spec.containers is None
    assert decode(_POD, raw({"metadata": {"name": "a", "uid": "u"}})).status.phase is None


@pytest.mark.parametrize(
    "mangled",
    [
        b"",
        b"{",
        b"[]",
        b'{"metadata": {"name": "a"}}',
        b'{"metadata": {"name": "a", "uid": 7}}',
        b'{"metadata": {"name": "a", "uid": "u", "labels": {"a": 1}}}',
        b'{"metadata": {"name": "a", "uid": "u", "creationTimestamp": "yesterday"}}',
        b'{"metadata": {"name": "a", "uid": "u", "creationTimestamp": "2026-03-01T12:00:00"}}',
        b'{"metadata": {"name": "\xff", "uid": "u"}}',
        b'{"metadata": {"name": "\\ud800", "uid": "u"}}',
        b'{"metadata": {"name": "a", "uid": "u"}, "x": ' + b"[" * 100_000,
    ],
    ids=range(11),
)
def test_a_malformed_pod_is_undecodable(mangled: bytes) -> None:
    with pytest.raises(UndecodableObject):
        decode(_POD, mangled)


@pytest.mark.parametrize("levels", [2_000, 20_000])
def test_an_object_is_read_that_is_nested_deeper_than_python_reads(levels: int) -> None:
    labels = {"app": '"]}\\'}
    nested = b'{"a": "]}", "b":' * levels + b"1" + b"}" * levels
    for rest in (b', "x": ' + nested, b', "x": [' + nested + b", " + nested + b"]"):
        read = decode(_POD, raw(pod_json("bert-0", "u1", labels=labels))[:-1] + rest + b"}")
        assert (read.metadata.uid, read.metadata.labels) == ("u1", labels)


json_values = st.recursive(
    st.none() | st.integers() | st.text('"\\[]{},: a'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[]{},: a'), inner),
    max_leaves=20,
)


@given(json_values, st.integers(1, 5))
def test_what_is_nested_too_deeply_is_null_and_the_rest_as_it_was(value: Any, deepest: int) -> None:
    def expected(value: Any, depth: int) -> Any:
        if not isinstance(value, list | dict):
            return value
        if depth == deepest:
            return None
        if isinstance(value, list):
            return [expected(item, depth + 1) for item in value]
        return {key: expected(item, depth + 1) for key, item in value.items()}

    assert json.loads(objects.shallow(raw(value), deepest)) == expected(value, 0)


def test_the_identity_of_a_pod_is_read_though_the_rest_is_malformed() -> None:
    mangled = {**pod_json("bert-0", "u1"), "spec": "none"}

    assert decode(_IDENTITY, raw(mangled)).metadata == objects.IdentityMeta("bert-0", "u1")


def test_the_controller_is_the_owner_that_is_marked_as_such() -> None:
    content = pod_json()
    rows = [{"apiVersion": "v1", "kind": "A", "name": "a", "uid": "1", "controller": flag} for flag in (None, False)]
    content["metadata"]["ownerReferences"] = rows
    assert controller(decode(_POD, raw(content)).metadata) is None

    content["metadata"]["ownerReferences"] = [*rows, {**rows[0], "uid": "2", "controller": True}]
    owner = controller(decode(_POD, raw(content)).metadata)
    assert owner is not None
    assert owner.uid == "2"


def test_a_time_before_the_epoch_is_the_epoch() -> None:
    content = pod_json(status={"startTime": "0001-01-01T00:00:00Z"})

    assert milliseconds(decode(_POD, raw(content)).status.start_time) == 0
