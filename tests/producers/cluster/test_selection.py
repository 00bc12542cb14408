"""GPU pods are recognised by the resources that they request. Only allowed labels are kept, within bounds."""

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.cluster import config, objects
from producers.cluster.objects import (
    ANNOTATION_BOUNDS,
    LABEL_BOUNDS,
    AllowList,
    Bounds,
    Selection,
    allow_list_errors,
    decode,
    shortened,
)
from tests.producers.cluster.kubernetes_objects import PREFIXES, pod, pod_json, raw

_POD = msgspec.json.Decoder(objects.Pod)


def selection(*prefixes: str) -> Selection:
    nothing = AllowList((), LABEL_BOUNDS)
    return Selection(prefixes, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("limits", "concerns"),
    [
        ({"nvidia.com/gpu": "1"}, True),
        ({"nvidia.com/mig-1g.10gb": 1}, True),
        ({"nvidia.com/gpu.shared": "2", "cpu": "1"}, True),
        ({"amd.com/gpu": "1"}, False),
        ({"cpu": "500m"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_gpu_pod_asks_for_a_resource_of_the_prefixes(limits: object, concerns: bool) -> None:
    assert selection(*PREFIXES).has_pod(pod(limits=limits)) is concerns


def test_a_sidecar_or_a_claim_makes_a_gpu_pod_too() -> None:
    concerns = selection(*PREFIXES).has_pod
    plain = pod_json(limits={})
    sidecar, claim, extended = pod_json(limits={}), pod_json(limits={}), pod_json(limits={})
    sidecar["spec"]["initContainers"] = [{"name": "s", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    claim["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    extended["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "x", "requestMappings": []}

    assert [concerns(decode(_POD, raw(content))) for content in (plain, sidecar, claim, extended)] == [
        False,
        True,
        True,
        True,
    ]


def test_a_driver_is_of_the_domain_of_a_prefix() -> None:
    concerns = selection("nvidia.com/", "k8s.amazonaws.com/vgpu").has_driver
    drivers = ("gpu.nvidia.com", "nvidia.com", "compute-domain.nvidia.com", "notnvidia.com", "net.example.com")

    assert [concerns(driver) for driver in drivers] == [True, True, True, False, False]


def test_an_allow_list_keeps_names_prefixes_and_all() -> None:
    labels = {"app": "1", "app.kubernetes.io/name": "2", "apple": "3", "team": "4"}

    def kept(*allowed: str) -> list[str]:
        return list(AllowList(allowed, LABEL_BOUNDS).keep(labels).entries)

    assert kept("app") == ["app"]
    assert kept("app.kubernetes.io/*", "team") == ["team", "app.kubernetes.io/name"]
    assert kept("*") == sorted(labels)
    assert kept() == []
    assert AllowList(["*"], LABEL_BOUNDS).keep(None) == ({}, 0)


def test_keys_that_an_allow_list_names_go_before_those_of_a_prefix() -> None:
    crowd = {f"a{number}": "x" * 4096 for number in range(9)}
    kept = AllowList(["*", "hami.io/vgpu-devices-allocated"], ANNOTATION_BOUNDS).keep(
        {**crowd, "hami.io/vgpu-devices-allocated": "y" * 2048}
    )

    assert list(kept.entries) == ["hami.io/vgpu-devices-allocated", "a0", "a1", "a2"]
    assert kept.cut == 6


def test_every_error_of_an_allow_list_is_named() -> None:
    wrong = ("", "a b", "app*", "/x", "a/b/*", "UPPER/x", "-a", "x/*y")
    errors = allow_list_errors("--pod-labels", ("app", "app.kubernetes.io/*", "*", "Ab_c.d", "a.b/C", *wrong))

    assert [repr(name) in error for name, error in zip(wrong, errors, strict=True)] == [True] * len(wrong)
    assert all(error.startswith("--pod-labels: ") for error in errors)


def test_the_default_allow_lists_have_no_errors() -> None:
    lists = (config.POD_LABELS, config.POD_ANNOTATIONS, config.NAMESPACE_LABELS, config.NODE_LABELS)

    assert [allow_list_errors("x", allowed) for allowed in lists] == [[], [], [], []]


def test_of_ten_thousand_labels_the_first_sixty_four_are_kept_and_the_rest_counted() -> None:
    kept = AllowList(["*"], LABEL_BOUNDS).keep({f"l{number:05}": "x" for number in range(10_000)})

    assert list(kept.entries) == [f"l{number:05}" for number in range(64)]
    assert kept.cut == 10_000 - 64


def test_of_a_megabyte_the_first_four_kilobytes_are_kept() -> None:
    kept = AllowList(["gpustream.dev/*"], ANNOTATION_BOUNDS).keep({"gpustream.dev/x": "a" * 1_000_000, "y": "b"})

    assert kept == ({"gpustream.dev/x": "a" * 4096}, 1)


@given(st.text(max_size=40), st.integers(0, 50))
def test_a_shortened_text_is_a_beginning_that_fits(text: str, longest: int) -> None:
    short = shortened(text, longest)

    assert text.startswith(short)
    assert len(short.encode()) <= longest
    assert short == text or len(short.encode()) > longest - 4


_BOUNDS = Bounds(4, 12, 100)


@given(st.dictionaries(st.text(max_size=30), st.text(max_size=30), max_size=8))
def test_the_kept_labels_are_within_all_bounds_and_the_rest_is_counted(labels: dict[str, str]) -> None:
    kept, cut = AllowList(["*"], _BOUNDS).keep(labels)

    assert len(kept) <= _BOUNDS.entries
    assert len(orjson.dumps(kept)) <= _BOUNDS.total_bytes + 2
    assert cut == sum(kept.get(name) != value for name, value in labels.items())
    assert list(kept) == sorted(kept)


def test_one_entry_that_does_not_fit_leaves_room_for_the_others() -> None:
    kept = AllowList(["*"], _BOUNDS).keep({"a": "\x01" * 20, "b": "x"})

    assert kept == ({"a": "\x01" * 12, "b": "x"}, 1)
    assert AllowList(["*"], Bounds(4, 20, 60)).keep({"a": "\x01" * 20, "b": "x"}) == ({"b": "x"}, 1)
