"""The outcomes of records, counted."""

from types import ModuleType

import pytest

from delivery.instruments import Instrument, Instruments
from sinks import alertmanager, outcomes, webhook
from sinks.outcomes import Outcomes
from sinks.remote_write import sink as remote_write
from sinks.scrape import sink as scrape
from tests.sinks.conftest import sample
from tests.sinks.records import outcome_instruments


def test_several_readers_count_the_partitions_of_all_of_them() -> None:
    instruments = Instruments(outcome_instruments("test"))
    counted, first, second = Outcomes("test", instruments), object(), object()
    counted.assigned([1, 2], of=first)
    counted.assigned([30], of=second)
    counted.assigned([4], of=first)
    gauges = {
        name: instruments.registry.get_sample_value(f"gpustream_test_{name}") for name in ("partitions", "lag_records")
    }
    assert gauges == {"partitions": 2, "lag_records": 34}


def test_a_lag_that_is_not_known_yet_is_not_taken_for_none() -> None:
    instruments = Instruments(outcome_instruments("test"))
    counted = Outcomes("test", instruments)
    shown = []
    for lags in ([5, 8], [5, None], [20, None, None], [2, 0, 4]):
        counted.assigned(lags)
        shown.append(instruments.registry.get_sample_value("gpustream_test_lag_records"))

    assert shown == [13, 13, 20, 6]


@pytest.mark.parametrize("sink", [remote_write, scrape], ids=lambda sink: sink.COMPONENT)
def test_a_delivered_tick_is_as_old_as_its_reading_and_never_less_than_nothing(sink: ModuleType) -> None:
    instruments = Instruments(sink.INSTRUMENTS)
    counted = Outcomes(sink.COMPONENT, instruments, clock_s=lambda: 1000.0)
    for ts_ms in (999_900, 1_061_000):
        counted.delay(sample(1, ts_ms=ts_ms))
    value, name = instruments.registry.get_sample_value, f"gpustream_{sink.COMPONENT}_delay_seconds"
    assert value(f"{name}_count") == 2
    assert value(f"{name}_sum") == pytest.approx(0.1)
    assert [value(f"{name}_bucket", {"le": le}) for le in ("0.02", "0.2", "86400.0")] == [1, 2, 2]


@pytest.mark.parametrize("sink", [alertmanager, remote_write, scrape, webhook], ids=lambda sink: sink.COMPONENT)
def test_what_every_sink_counts_is_called_the_same_after_the_sink_s_name(sink: ModuleType) -> None:
    common: tuple[Instrument, ...] = sink.INSTRUMENTS[: len(outcomes.COMMON)]
    assert [metric.name for metric in common] == [f"gpustream_{sink.COMPONENT}_{row.name}" for row in outcomes.COMMON]
