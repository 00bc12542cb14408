"""The text that a scraper reads, read back by the official parser."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sinks.blocks import Row
from sinks.scrape.text import Device, expose, lines

USED = Row("gpu_utilization", (), "gauge", "Share of the time.")
CLOCK = Row("gpu_clock_frequency", (("gpu_clock_type", "sm"),), "gauge", "MHz.")
ENERGY = Row("gpu_energy_consumption", (), "counter", "mJ since the driver was loaded.")

values = st.floats(allow_nan=False, allow_infinity=False)


def test_devices_become_families_without_timestamps() -> None:
    rows = (USED, CLOCK)
    text = expose(
        [
            Device(lines((("gpu_uuid", "b"),), rows), [0.5, 1980.0]),
            Device(lines((("gpu_uuid", "a"),), rows), [0.0, 1980.0]),
        ]
    )

    assert text == (
        "# HELP gpu_clock_frequency MHz.\n"
        "# TYPE gpu_clock_frequency gauge\n"
        'gpu_clock_frequency{gpu_uuid="b",gpu_clock_type="sm"} 1980.0\n'
        'gpu_clock_frequency{gpu_uuid="a",gpu_clock_type="sm"} 1980.0\n'
        "# HELP gpu_utilization Share of the time.\n"
        "# TYPE gpu_utilization gauge\n"
        'gpu_utilization{gpu_uuid="b"} 0.5\n'
        'gpu_utilization{gpu_uuid="a"} 0.0\n'
    )


def test_a_counter_keeps_its_name() -> None:
    text = expose([Device(lines((("gpu_uuid", "a"),), (ENERGY,)), [12.0])])

    assert "# TYPE gpu_energy_consumption counter\n" in text
    assert 'gpu_energy_consumption{gpu_uuid="a"} 12.0\n' in text


def test_of_two_devices_with_the_same_labels_the_first_is_shown() -> None:
    same = lines((("gpu", "0"),), (USED,))

    assert expose([Device(same, [0.1]), Device(same, [0.2])]).count("gpu_utilization{") == 1


def test_nothing_is_an_empty_text() -> None:
    assert expose([]) == ""


@given(st.text(), st.text(), values)
def test_any_label_and_any_value_are_read_back_as_they_were(model: str, pod: str, value: float) -> None:
    labels = (("gpu_model", model), ("k8s_pod_name", pod))
    (family,) = text_string_to_metric_families(expose([Device(lines(labels, (USED,)), [value])]))

    assert family.samples[0].labels == dict(labels)
    assert family.samples[0].value == value
