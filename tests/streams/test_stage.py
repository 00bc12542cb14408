"""The own metrics of every stream: the same instruments, under its own name."""

from delivery.watchdog import LATENESS
from streams.alerts.component import INSTRUMENTS as ALERTS
from streams.attribution.component import INSTRUMENTS as ATTRIBUTION

SHARED = (
    "records_read_total",
    "records_delivered_total",
    "records_duplicate_total",
    "records_dead_lettered_total",
    "records_released_total",
    "records_held",
    "open_bytes",
    "nodes",
    "lag_records",
    "misplaced_nodes_total",
    "rebalances_total",
    "holes_total",
    "lost_offsets_total",
    "loop_late_seconds",
)


def test_both_streams_count_what_they_read_alike() -> None:
    alerts = {row.name.removeprefix("gpustream_alerts_"): row[1:] for row in ALERTS}
    attribution = {row.name.removeprefix("gpustream_attribution_"): row[1:] for row in ATTRIBUTION}
    assert {name: alerts[name] for name in SHARED} == {name: attribution[name] for name in SHARED}


def test_both_streams_report_how_late_their_loop_is_as_sinks_do() -> None:
    assert LATENESS._replace(name="gpustream_alerts_loop_late_seconds") in ALERTS
    assert LATENESS._replace(name="gpustream_attribution_loop_late_seconds") in ATTRIBUTION
