"""Every reader of this version can read records of a later version: unknown fields and words change nothing else."""

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gpustream.alerts import LatestAlerts
from gpustream.fleet import Fleet as TopFleet
from gpustream.ticks import decode_tick as decode_shown
from gpustream.top import draw
from gpustream.top.moment import Now
from gpustream.top.tables import TABLES
from sinks import alerts as alert_records
from sinks.alertmanager import ActiveAlerts, postable
from sinks.metrics_api.holdings import decode as decode_holdings
from sinks.metrics_api.holdings import holdings_by_namespace
from sinks.page import frames
from sinks.page.fleet import Fleet as PageFleet
from sinks.reclaim.decide import describe
from sinks.remote_write.alerts import AlertSeries
from sinks.remote_write.nodes import OpenSeries
from sinks.series.tick import decode as decode_series
from sinks.series.translation import Translator
from streams.alerts import tick as alert_ticks
from streams.alerts.memory import decode as decode_state
from streams.attribution import join
from streams.attribution.component import decode as decode_node
from streams.usage.tick import decode as decode_counted
from tests.streams.alerts.ticks import findings_in
from tests.streams.usage.made import BookkeeperHarness
from topics.actions import Action
from topics.attributed import TOPIC as ATTRIBUTED
from topics.attributed import AttributedSample
from topics.profiles import PROFILES
from topics.samples import TOPIC as SAMPLES
from topics.samples import Sample
from topics.times import epoch_ms
from topics.topic import Topic, decoder, load_topics

SCHEMAS = Path(__file__).parents[1] / "topics" / "schemas"
RECORDS = [topic for topic in load_topics().values() if topic.record is not None]
TEXTS = ("info", "labels", "annotations", "namespace_labels", "node_labels")
MAPS: dict[str, Any] = {"metrics": 0.5, "xids": 1, "resolved": 1} | dict.fromkeys(TEXTS, "new")
"""Objects whose keys are data, and the value of a new key."""

UNKNOWN_WORDS = {
    "state": "resting",
    "attribution": "guessed",
    "severity": "page",
    "conflict": "ghost",
    "phase": "Dreaming",
}
Json = dict[str, Any]


def later(record: Any, *, with_words: bool = True) -> Any:
    """A record as a later version writes it: with unknown fields everywhere and, if ``with_words``, unknown words."""
    if isinstance(record, list):
        return [later(item, with_words=with_words) for item in record]
    if not isinstance(record, dict):
        return record
    later_record = {
        key: {**value, "added_later": MAPS[key]} if key in MAPS else later(value, with_words=with_words)
        for key, value in record.items()
    }
    if with_words:
        later_record |= {key: word for key, word in UNKNOWN_WORDS.items() if key in record}
    return later_record | {"added_later": {"by": ["a", "later", "version"], "n": 1}}


def rich() -> Json:
    """A tick of gpu.attributed with most of the optional fields."""
    tick = copy.deepcopy(ATTRIBUTED.example)
    (device,) = tick["devices"]
    device |= {
        "mig": {"uuid": device["uuid"], "parent_uuid": "GPU-p", "gpu_instance": 1, "profile": "1g.10gb"},
        "info": {"serial": "7"},
        "xids": {"79": 1},
        "events": [{"kind": "xid", "code": 79, "ts_ms": 1, "allocations_seq": 4, "holders": device["holders"]}],
        "conflict": "no_pod",
        "unattributed": {"utilization_ratio": 0.1},
    }
    device["metrics"] |= {"clock_event_reasons": 0x40, "temperature_celsius": 90}
    return tick


class Record(NamedTuple):
    """A record of a log."""

    key: bytes
    value: bytes
    topic: str = "gpu.alerts"
    partition: int = 0
    offset: int = 0
    timestamp: int = 0


def encoded(record: Json) -> bytes:
    return msgspec.json.encode(record)


def without_additions(record: msgspec.Struct) -> Any:
    """A record without the keys that a later version has added to its maps."""
    return _without(msgspec.to_builtins(record))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        remaining = {key: _without(item) for key, item in value.items() if key != "added_later"}
        return {key: item for key, item in remaining.items() if item != {}}
    return [_without(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("topic", RECORDS, ids=lambda topic: topic.name)
def test_unknown_fields_change_nothing(topic: Topic) -> None:
    assert topic.record is not None
    decode: Callable[[bytes], msgspec.Struct] = decoder(topic.record)
    for record in (topic.example, *([rich()] if topic is ATTRIBUTED else [])):
        assert without_additions(decode(encoded(later(record, with_words=False)))) == without_additions(
            decode(encoded(record))
        )


@pytest.mark.parametrize("topic", RECORDS, ids=lambda topic: topic.name)
def test_unknown_words_are_read_as_they_are(topic: Topic) -> None:
    assert topic.record is not None
    read = msgspec.to_builtins(decoder(topic.record)(encoded(later(topic.example))))
    for key in UNKNOWN_WORDS.keys() & topic.example.keys():
        assert read[key] == UNKNOWN_WORDS[key]


def test_no_field_but_scope_refuses_an_unknown_word() -> None:
    names: set[str] = set()
    for schema in SCHEMAS.glob("*.json"):
        for record in json.loads(schema.read_text())["$defs"].values():
            names |= {name for name, field in record.get("properties", {}).items() if _is_enumerated(field)}
    assert names == {"schema", "scope"}


def _is_enumerated(field: Json) -> bool:
    return "enum" in field or any("enum" in option for option in field.get("anyOf", ()))


TICK_DECODERS: list[Callable[[bytes], msgspec.Struct]] = [
    decoder(AttributedSample), decode_series, alert_ticks.decode, decode_counted, decode_holdings, decode_shown
]  # fmt: skip


@pytest.mark.parametrize("decode", TICK_DECODERS)
def test_another_schema_is_refused(decode: Callable[[bytes], msgspec.Struct]) -> None:
    decode(encoded(rich()))
    with pytest.raises(msgspec.DecodeError):
        decode(encoded({**rich(), "schema": 2}))


def test_attribution_passes_an_unknown_word_on() -> None:
    record = later({**SAMPLES.example, "allocations_seq": None})
    sample = decode_node("gpu.samples", b"prod-us-east-1/gpu-node-1", encoded(record))
    assert isinstance(sample, Sample)
    _, (joined,) = join.step(join.NEW, join.PendingTick(sample, 0, 0.0, 0, float("inf")), 10.0)

    assert joined.sample.devices[0].state == "resting"
    assert joined.sample.devices[0].metrics["gpu_utilization_ratio"] == 0.93


def test_remote_write_writes_the_same_values_for_unknown_words() -> None:
    written = []
    for record in (rich(), later(rich())):
        tick = OpenSeries(Translator([PROFILES["otel"]])).tick(decode_series(encoded(record)))
        written.append(
            {
                (row.name, row.labels): value
                for group in tick.groups
                for row, value in zip(group.series.rows, group.values, strict=True)
            }
        )
    values, later_values = written
    counted = {"gpu_attribution_conflict", "gpu_xid_errors"}  # they have the unknown word, or count one more error
    comparable = {(name, labels): value for (name, labels), value in values.items() if name not in counted}

    assert "gpu_utilization" in {name for name, _ in comparable}
    assert {key: later_values.get(key) for key in comparable} == comparable


def on_the_page(tick: bytes) -> Any:
    fleet = PageFleet(0)
    fleet.add_tick(decoder(AttributedSample)(tick), 0.0)
    frame = frames.frame(fleet, "gpu_utilization_ratio", 0)
    return frame["nodes"], frame["now"]


def in_top(tick: bytes) -> Any:
    fleet = TopFleet()
    fleet.observe(decode_shown(tick), 0.0, epoch_ms(datetime.now(UTC)))
    now = Now(fleet, [], datetime.now(UTC), "")
    return [[draw.row_line(table.columns, row, 200) for row in table.rows(now)] for table in TABLES]


def of_pods(tick: bytes) -> Any:
    return holdings_by_namespace(decode_holdings(tick))


def booked(tick: bytes) -> Any:
    counted = decode_counted(tick)
    books = BookkeeperHarness().play(counted, msgspec.structs.replace(counted, seq=2**40, ts_ms=counted.ts_ms + 90_000))
    return {(row.key, row.revision): (row.device_ms, row.slice_ms, row.used_us, row.energy_mj) for row in books.written}


@pytest.mark.parametrize("with_words", [False, True])
@pytest.mark.parametrize("view", [on_the_page, in_top, of_pods, booked])
def test_a_tick_of_a_later_version_shows_what_it_shows_without_the_additions(
    view: Callable[[bytes], Any], with_words: bool
) -> None:
    shown = view(encoded(rich()))
    assert shown
    assert view(encoded(later(rich(), with_words=with_words))) == shown


def test_a_device_in_an_unknown_state_is_judged_by_its_values_and_not_as_lost_or_well() -> None:
    plain, new = (alert_ticks.decode(encoded(record)) for record in (rich(), later(rich())))
    judgements = {(finding.rule.name, finding.holds) for finding in findings_in(new)}

    assert ("GPUThermalSlowdown", True) in judgements
    assert ("GPUThermalSlowdown", True) in {(finding.rule.name, finding.holds) for finding in findings_in(plain)}
    assert {("GPULost", None), ("GPUNotAnswering", None)} <= judgements
    assert all(
        finding.holds is None for finding in findings_in(new) if finding.rule.name in ("GPULost", "GPUNotAnswering")
    )


def test_an_alert_in_an_unknown_state_is_open_everywhere() -> None:
    example = load_topics()["gpu.alerts"].example
    record = Record(example["fingerprint"].encode(), encoded(later(example)))
    alert = alert_records.read_alert(record)
    assert alert is not None

    active, watched, now_ms = ActiveAlerts(), LatestAlerts(), epoch_ms(alert.starts_at) + 1_000
    active.put(alert, now_ms)
    watched.update(record)
    assert alert_records.Transitions().is_news(alert)
    assert active.count_open() == 1
    assert [firing.fingerprint for firing in watched.firing()] == [alert.fingerprint]
    assert postable(alert, alert.starts_at, 60.0).ends_at > alert.starts_at
    (group,) = AlertSeries().change(alert.fingerprint, alert, now_ms, now_ms)
    assert list(group.values) == [1.0]
    assert ("severity", "page") in group.series.labels


def test_an_action_of_an_unknown_kind_is_listed_by_its_word() -> None:
    action = decoder(Action)(encoded({**load_topics()["gpu.actions"].example, "action": "evict"}))
    assert action.action is not None
    assert action.target is not None
    assert describe(action.action, action.target, "ml") == f"evict {action.target.kind} ml/{action.target.name}"


def test_a_state_of_the_alert_stream_that_a_later_version_wrote_is_taken_over() -> None:
    example = load_topics()["gpu.alert-state"].example
    state = decode_state(encoded(later(example)))
    (tracked,) = state.tracked
    assert tracked.alert is not None
    assert (tracked.name, tracked.alert.is_open) == ("GPUHeldIdle", True)
