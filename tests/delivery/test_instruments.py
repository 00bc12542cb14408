"""The table of a component's own metrics."""

import pytest

from delivery.instruments import Instrument, named

ROWS = (Instrument("records_read_total", "counter", "Read."), Instrument("nodes", "gauge", "Nodes."))


def test_rows_in_common_have_the_full_names_of_one_component() -> None:
    read, nodes = named(ROWS, "gpustream_usage_records_read_total", "gpustream_usage_nodes")

    assert (read.name, read.help) == ("gpustream_usage_records_read_total", "Read.")
    assert (nodes.name, nodes.kind) == ("gpustream_usage_nodes", "gauge")


@pytest.mark.parametrize(
    "names",
    [
        ("gpustream_usage_nodes", "gpustream_usage_records_read_total"),
        ("gpustream_usage_records_read_total",),
    ],
)
def test_names_in_another_order_or_number_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"records_read_total|shorter"):
        named(ROWS, *names)
