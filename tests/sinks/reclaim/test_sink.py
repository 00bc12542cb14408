"""The sink as a component."""

import asyncio
import json
from pathlib import Path

import pytest

from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.sink import ReclaimSink
from tests.eventually import eventually


async def test_without_a_broker_it_says_so_and_stops_when_asked(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "x", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            }
        )
    )
    sink = ReclaimSink(ReclaimSettings(kafka="127.0.0.1:1", kubeconfig=kubeconfig))
    stop = asyncio.Event()
    assert sink.not_ready() == ["not started"]
    running = asyncio.ensure_future(sink.run(stop))
    await eventually(
        lambda: (
            "no Kafka broker answers at 127.0.0.1:1 (KafkaConnectionError): is one up there, for clients?"
            in sink.not_ready()
        )
    )
    stop.set()
    await asyncio.wait_for(running, 8)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"act": True, "dry_run": True}, "--act and --dry-run: one or the other"),
        ({"alert_age_s": 0.0}, "--alert-age: must be above zero"),
        ({"alert_names": ("",)}, "--alert-names: an empty name"),
    ],
)
def test_settings_that_make_no_sense_are_reported(options: dict[str, object], error: str) -> None:
    assert ReclaimSettings(kafka="127.0.0.1:1", **options).errors() == [error]  # type: ignore[arg-type]
