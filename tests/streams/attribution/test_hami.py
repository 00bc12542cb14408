"""HAMi's annotation goes before the slots that the kubelet picked."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.attribution.hami import ANNOTATION, parse_hami_annotation
from streams.attribution.holders import holders_by_snapshot
from tests.streams.attribution.records import container, gpu, pod, snapshot
from topics.allocations import Container
from topics.device_ids import parse
from topics.samples import Device

A, B, C = gpu(0xA), gpu(0xB), gpu(0xC)
DEVICES = tuple(Device(uuid, index=i) for i, uuid in enumerate((A, B, C)))


def entry(uuid: str) -> str:
    """A device as HAMi writes it."""
    return f"{uuid},NVIDIA,500,5:"


def holders_by_device(annotation: str | None, *containers: Container) -> dict[str, list[tuple[str, str | None]]]:
    """The pod and container of each device's holders, the pod p with this annotation."""
    annotations = {} if annotation is None else {ANNOTATION: annotation}
    pods = {("ns", "p"): msgspec.structs.replace(pod("p"), annotations=annotations)}
    result = holders_by_snapshot(snapshot(1, *containers), DEVICES, pods, {})
    assert result.unknown_ids == ()
    return {uuid: [(h.pod, h.container) for h in holders] for uuid, holders in result.by_uuid.items()}


@pytest.mark.parametrize(
    ("annotation", "ids"),
    [
        (f"{entry(A)};", ((A,),)),
        (f"{entry(A)}{entry(B)};", ((A, B),)),
        (f"{entry(A)};{entry(B)};", ((A,), (B,))),
        (f";{entry(A)};;{entry(B)};", ((A,), (B,))),
        (entry(A).rstrip(":"), ((A,),)),
        (f"{A},NVIDIA-Tesla P4,500,5:;", ((A,),)),
        (f"{A},NVIDIA,500,5,more:;", ((A,),)),
    ],
)
def test_each_container_has_the_devices_of_its_section(annotation: str, ids: tuple[tuple[str, ...], ...]) -> None:
    assert parse_hami_annotation(annotation) == ids


@pytest.mark.parametrize(
    "annotation",
    [
        "",
        ";",
        ":;",
        "x",
        f"{A};",
        f"{A},NVIDIA,500;",
        "MLU-1,MLU,500,5:;",
        f"{A}-3,NVIDIA,500,5:;",
        f"{A}::3,NVIDIA,500,5:;",
        f"{A}[0-1],NVIDIA,500,5:;",
        f"nvidia0,NVIDIA,500,5:;{entry(B)}",
        f"{entry(A)}broken:;",
    ],
)
def test_an_annotation_that_names_no_devices_says_nothing(annotation: str) -> None:
    assert parse_hami_annotation(annotation) is None
    assert holders_by_device(annotation, container("p", f"{C}-1")) == {C: [("p", "main")]}


@given(st.text(alphabet=f";:,-[] \n{A}", max_size=200) | st.text(max_size=50))
def test_no_annotation_raises_and_all_that_is_read_are_device_ids(annotation: str) -> None:
    for section in parse_hami_annotation(annotation) or ():
        assert [parse(device_id).uuid for device_id in section]


def test_the_annotation_beats_the_slots_of_the_kubelet() -> None:
    assert holders_by_device(f"{entry(B)};", container("p", f"{A}-3")) == {B: [("p", "main")]}


def test_sections_belong_to_the_containers_with_slots_in_order() -> None:
    given_slots = (container("p", f"{C}-0", name="x"), container("p", f"{C}-1", f"{C}-2", name="y"))

    assert holders_by_device(f"{entry(A)};;{entry(B)}{entry(C)};", *given_slots) == {
        A: [("p", "x")],
        B: [("p", "y")],
        C: [("p", "y")],
    }


def test_a_section_belongs_to_the_container_whose_slots_are_of_its_gpus() -> None:
    """As HAMi 2.9 wrote it for containers zz, aa and mm, which a snapshot has in the order of their names."""
    given_slots = (
        container("p", f"{B}-3", name="aa"),
        container("p", f"{A}-1", f"{C}-7", name="mm"),
        container("p", f"{A}-5", name="zz"),
    )

    assert holders_by_device(f"{entry(A)};{entry(B)};{entry(C)}{entry(A)};", *given_slots) == {
        A: [("p", "mm"), ("p", "zz")],
        B: [("p", "aa")],
        C: [("p", "mm")],
    }


def test_what_an_init_container_had_nobody_holds() -> None:
    """The kubelet lists no init container, and gives its slots to another one, whatever HAMi has chosen for that."""
    assert holders_by_device(f"{entry(A)}{entry(B)};{entry(A)};", container("p", f"{A}-1")) == {A: [("p", "main")]}
    assert holders_by_device(f"{entry(C)};{entry(B)};", container("p", f"{C}-7")) == {B: [("p", "main")]}
    given_slots = (container("p", f"{B}-0", name="aa"), container("p", f"{C}-1", name="zz"))
    assert holders_by_device(f"{entry(C)};{entry(A)};{entry(B)};", *given_slots) == {
        A: [("p", "zz")],
        B: [("p", "aa")],
    }


def test_with_fewer_sections_than_containers_each_has_all_devices() -> None:
    given_slots = (container("p", f"{C}-0", name="x"), container("p", f"{C}-1", name="y"))

    assert holders_by_device(f"{entry(A)}{entry(B)};", *given_slots) == {
        A: [("p", "x"), ("p", "y")],
        B: [("p", "x"), ("p", "y")],
    }


def test_an_annotation_with_more_devices_than_the_pod_has_slots_is_not_followed() -> None:
    """A tenant may write it, and would hold the whole node."""
    everything = "".join(map(entry, (A, B, C)))
    assert holders_by_device(f"{everything};", container("p", f"{A}-3")) == {A: [("p", "main")]}
    given_slots = (container("p", f"{A}-0", name="x"), container("p", f"{B}-1", name="y"))
    for forged in (f"{everything};", f"{entry(A)};{entry(B)}{entry(C)};"):
        assert holders_by_device(forged, *given_slots) == {A: [("p", "x")], B: [("p", "y")]}


def test_without_an_annotation_or_a_pod_the_slots_name_the_device() -> None:
    assert holders_by_device(None, container("p", f"{A}-3")) == {A: [("p", "main")]}
    assert holders_by_device(f"{entry(B)};", container("q", f"{A}-3")) == {A: [("q", "main")]}


def test_ids_that_are_no_slots_stand_beside_the_annotation() -> None:
    assert holders_by_device(f"{entry(B)};", container("p", A)) == {A: [("p", "main")]}
    assert holders_by_device(f"{entry(B)};", container("p", A, f"{C}-0")) == {A: [("p", "main")], B: [("p", "main")]}


def test_an_annotated_device_that_is_not_in_the_tick_has_no_holder() -> None:
    assert holders_by_device(f"{entry(gpu(99))};", container("p", f"{A}-3")) == {}


def test_two_pods_with_slots_of_one_gpu_share_it() -> None:
    assert holders_by_device(f"{entry(A)};", container("p", f"{B}-0"), container("q", f"{A}-1")) == {
        A: [("p", "main"), ("q", "main")]
    }
