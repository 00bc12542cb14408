"""Device ids: every form that device plugins write is parsed, and nothing else."""

import uuid as uuids

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.device_ids import DeviceIndex, DeviceRef, UnknownDeviceId, parse
from topics.samples import Device, Mig

GPU_A = "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"
GPU_B = "GPU-1f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"
MIG_1 = "MIG-2f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"
MIG_2 = "MIG-3f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"

uuid_texts = st.uuids().map(str)
gpu_uuids, mig_uuids = uuid_texts.map("GPU-{}".format), uuid_texts.map("MIG-{}".format)
numbers = st.integers(0, 999_999_999)

FORMS = {
    "GPU": st.builds(lambda u: (u, DeviceRef(uuid=u)), gpu_uuids),
    "GPU replica": st.builds(lambda u, n: (f"{u}::{n}", DeviceRef(uuid=u, replica=n)), gpu_uuids, numbers),
    "GPU slot": st.builds(lambda u, n: (f"{u}-{n}", DeviceRef(uuid=u, slot=n)), gpu_uuids, numbers),
    "MIG": st.builds(lambda u: (u, DeviceRef(uuid=u)), mig_uuids),
    "MIG replica": st.builds(lambda u, n: (f"{u}::{n}", DeviceRef(uuid=u, replica=n)), mig_uuids, numbers),
    "MIG of an old driver": st.builds(
        lambda u, g, c: (f"MIG-{u}/{g}/{c}", DeviceRef(parent_uuid=u, gpu_instance=g, compute_instance=c)),
        gpu_uuids,
        numbers,
        numbers,
    ),
    "GKE": st.builds(lambda i: (f"nvidia{i}", DeviceRef(minor=i)), numbers),
    "GKE shared": st.builds(lambda i, n: (f"nvidia{i}/vgpu{n}", DeviceRef(minor=i, replica=n)), numbers, numbers),
    "GKE MIG": st.builds(lambda i, g: (f"nvidia{i}/gi{g}", DeviceRef(minor=i, gpu_instance=g)), numbers, numbers),
    "GKE MIG shared": st.builds(
        lambda i, g, n: (f"nvidia{i}/gi{g}/vgpu{n}", DeviceRef(minor=i, gpu_instance=g, replica=n)),
        numbers,
        numbers,
        numbers,
    ),
}


def as_text(ref: DeviceRef) -> str:
    """The id with these parts, as text."""
    shares = {"::": ref.replica, "-": ref.slot}
    if ref.uuid:
        return ref.uuid + "".join(f"{mark}{share}" for mark, share in shares.items() if share is not None)
    if ref.parent_uuid:
        return f"MIG-{ref.parent_uuid}/{ref.gpu_instance}/{ref.compute_instance}"
    parts = {"nvidia": ref.minor, "/gi": ref.gpu_instance, "/vgpu": ref.replica}
    return "".join(f"{name}{number}" for name, number in parts.items() if number is not None)


any_form = st.one_of(*FORMS.values())
with_uuid = any_form.filter(lambda form: form[1].minor is None)


cases = st.integers(0, 2**64 - 1)


def in_case(text: str, case: int) -> str:
    """The text, with those hexadecimal letters in upper case whose bit in ``case`` is set."""
    letters = [letter.upper() if letter in "abcdef" and case >> bit & 1 else letter for bit, letter in enumerate(text)]
    return "".join(letters)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_an_id_of_every_form_is_parsed_into_its_parts(form: str, data: st.DataObject) -> None:
    device_id, ref = data.draw(FORMS[form])

    assert parse(device_id) == ref


@given(with_uuid, cases)
def test_hexadecimal_digits_in_upper_case_mean_the_same(pair: tuple[str, DeviceRef], case: int) -> None:
    device_id, ref = pair

    assert parse(device_id.upper()) == parse(in_case(device_id, case)) == ref


@given(with_uuid, cases, cases, cases)
def test_a_uuid_of_a_tick_is_found_in_whatever_case_either_is_written(
    pair: tuple[str, DeviceRef], case: int, case_of_id: int, case_of_parent: int
) -> None:
    device_id, ref = pair
    parent, uuid = in_case(ref.parent_uuid or GPU_A, case_of_parent), in_case(ref.uuid or MIG_1, case)
    is_gpu = uuid.startswith("GPU-")
    device = gpu(uuid, None) if is_gpu else mig(uuid, parent, 0, ref.gpu_instance, ref.compute_instance)

    assert DeviceIndex([device]).find(parse(in_case(device_id, case_of_id))) == uuid


@given(st.one_of(st.text(), st.from_regex(r"(GPU|MIG|nvidia|MIG-GPU)[-/:0-9a-fA-F]*(gi|vgpu)?.*")))
def test_any_text_is_an_id_in_full_or_is_refused(text: str) -> None:
    try:
        ref = parse(text)
    except UnknownDeviceId:
        return
    assert as_text(ref).lower() == text.lower()


@pytest.mark.parametrize(
    "device_id",
    [
        "",
        "GPU-",
        "0",
        "GPU-0f12ab34",
        GPU_A + "\n",
        " " + GPU_A,
        GPU_A.replace("-", ""),
        GPU_A + "::",
        GPU_A + "::-1",
        GPU_A + "::1::2",
        GPU_A + "::01",
        GPU_A + "-",
        GPU_A + "-1-2",
        GPU_A + "::" + "9" * 5000,
        MIG_1 + "-0",
        MIG_1 + "/1/0",
        f"MIG-{GPU_A}",
        f"MIG-{GPU_A}/1",
        f"MIG-{GPU_A}/1/0::0",
        "gpu-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
        "nvidia",
        "nvidia-0",
        "nvidia0/",
        "nvidia0/vgpu",
        "nvidia0/vgpu1/gi1",
        "nvidia٣",
        "nvidia0/gi1/ci0",
        "TPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
    ],
)
def test_a_text_that_is_almost_an_id_is_refused(device_id: str) -> None:
    with pytest.raises(UnknownDeviceId):
        parse(device_id)


def test_the_refusal_quotes_the_id() -> None:
    with pytest.raises(UnknownDeviceId, match=r"'amd\\n0' is not a device id"):
        parse("amd\n0")


def test_the_refusal_of_a_long_id_is_short() -> None:
    with pytest.raises(UnknownDeviceId) as raised:
        parse("x" * 100_000)

    assert len(str(raised.value)) < 200


@given(any_form, numbers)
def test_a_share_of_a_device_is_the_same_physical_device(pair: tuple[str, DeviceRef], number: int) -> None:
    _, ref = pair
    fields = {name: getattr(ref, name) for name in ref.__struct_fields__ if name not in ("replica", "slot")}
    whole_device = DeviceRef(**fields)

    assert ref.physical == whole_device.physical == DeviceRef(**fields, replica=number).physical
    assert hash(ref.physical) == hash(whole_device.physical)


@given(any_form, any_form)
def test_two_devices_are_never_the_same_physical_device(
    first: tuple[str, DeviceRef], second: tuple[str, DeviceRef]
) -> None:
    are_equal = all(
        getattr(first[1], name) == getattr(second[1], name)
        for name in ("uuid", "parent_uuid", "minor", "gpu_instance", "compute_instance")
    )

    assert (first[1].physical == second[1].physical) == are_equal


def gpu(uuid: str, minor: int | None, index: int | None = None) -> Device:
    return Device(uuid=uuid, index=index, minor=minor)


def mig(uuid: str, parent: str, minor: int | None, gi: int | None, ci: int | None = 0) -> Device:
    return Device(uuid=uuid, minor=minor, mig=Mig(uuid=uuid, parent_uuid=parent, gpu_instance=gi, compute_instance=ci))


NODE = (gpu(GPU_A, 0), gpu(GPU_B, 1), mig(MIG_1, GPU_B, 1, 7), mig(MIG_2, GPU_B, 1, 8))


@pytest.mark.parametrize(
    ("device_id", "uuid"),
    [
        (GPU_A, GPU_A),
        (GPU_A.upper(), GPU_A),
        (f"{GPU_A}::3", GPU_A),
        (f"{GPU_A}-9", GPU_A),
        (MIG_1, MIG_1),
        (f"{MIG_2}::1", MIG_2),
        (f"MIG-{GPU_B}/7/0", MIG_1),
        (f"MIG-{GPU_B}/8/0", MIG_2),
        ("nvidia0", GPU_A),
        ("nvidia0/vgpu2", GPU_A),
        ("nvidia1", GPU_B),
        ("nvidia1/gi7", MIG_1),
        ("nvidia1/gi8/vgpu0", MIG_2),
        ("GPU-9f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b", None),
        ("nvidia2", None),
        ("nvidia0/gi7", None),
        ("nvidia1/gi9", None),
        (f"MIG-{GPU_B}/7/1", None),
        (f"MIG-{GPU_A}/7/0", None),
    ],
)
def test_an_id_finds_its_device_in_a_tick(device_id: str, uuid: str | None) -> None:
    assert DeviceIndex(NODE).find(parse(device_id)) == uuid


def test_the_uuid_found_is_written_as_the_tick_has_it() -> None:
    assert DeviceIndex([gpu(GPU_A.upper(), 0)]).find(parse(GPU_A)) == GPU_A.upper()


def test_the_number_of_a_device_file_is_the_minor_number_and_not_the_index() -> None:
    index = DeviceIndex([gpu(GPU_A, minor=1, index=0), gpu(GPU_B, minor=0, index=1)])

    assert (index.find(parse("nvidia0")), index.find(parse("nvidia1"))) == (GPU_B, GPU_A)


def test_a_gpu_without_a_minor_number_goes_by_its_index() -> None:
    assert DeviceIndex([gpu(GPU_A, minor=None, index=3)]).find(parse("nvidia3")) == GPU_A


def test_a_minor_number_that_two_gpus_claim_names_neither() -> None:
    index = DeviceIndex([gpu(GPU_A, 0), gpu(GPU_B, 0), gpu("GPU-" + str(uuids.UUID(int=3)), 0)])

    assert index.find(parse("nvidia0")) is None
    assert index.find(parse(GPU_A)) == GPU_A


@pytest.mark.parametrize("first", [0, None])
def test_an_id_without_a_compute_instance_means_the_first(first: int | None) -> None:
    index = DeviceIndex([mig(MIG_1, GPU_A, 0, 1, 1), mig(MIG_2, GPU_A, 0, 1, first)])

    assert index.find(parse("nvidia0/gi1")) == MIG_2
    assert index.find(parse(f"MIG-{GPU_A}/1/1")) == MIG_1


def test_a_mig_device_with_unknown_instances_is_found_only_by_its_uuid() -> None:
    index = DeviceIndex([gpu(GPU_A, None), mig(MIG_1, GPU_A, 0, None, None), mig(MIG_2, GPU_A, None, 2, None)])

    assert [index.find(parse(device_id)) for device_id in (GPU_A, MIG_1, MIG_2)] == [GPU_A, MIG_1, MIG_2]
    assert [index.find(parse(device_id)) for device_id in ("nvidia0", "nvidia0/gi2")] == [None, None]


@given(st.lists(st.tuples(gpu_uuids, numbers), unique_by=(lambda pair: pair[0], lambda pair: pair[1])))
def test_every_gpu_of_a_tick_is_found_by_its_uuid_and_by_its_minor_number(pairs: list[tuple[str, int]]) -> None:
    index = DeviceIndex(gpu(uuid, number) for uuid, number in pairs)

    for uuid, number in pairs:
        assert index.find(parse(uuid)) == index.find(parse(f"nvidia{number}")) == uuid
