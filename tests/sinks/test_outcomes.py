"""What became of records, counted."""

from delivery.instruments import Instruments
from sinks import outcomes
from sinks.outcomes import Outcomes


def test_several_readers_count_the_partitions_of_all_of_them() -> None:
    made = Instruments(outcomes.instruments("test"))
    counted, first, second = Outcomes("test", made), object(), object()
    counted.assigned([1, 2], of=first)
    counted.assigned([30], of=second)
    counted.assigned([4], of=first)
    found = {name: made.registry.get_sample_value(f"gpustream_test_{name}") for name in ("partitions", "lag_records")}
    assert found == {"partitions": 2, "lag_records": 34}
