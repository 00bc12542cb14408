"""The frames of the page, as a browser puts them together."""

from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from sinks.page.fleet import WAITED_MS, Fleet
from sinks.page.frames import Json, Versions, frame, versions
from tests.sinks.page.ticks import START_MS, alert, device, holder, hour, tick
from topics.usage import HOUR_MS

METRIC = "gpu_utilization_ratio"
BACK_MS = -WAITED_MS - 60_000

_DEVICES = [
    device("GPU-a", holder("p-0"), used=0.5),
    device("GPU-a", holder("p-0"), used=0.0),
    device("GPU-a", holder("q-0", team="\u202e<b>"), holder("p-0"), used=1e300),
    device("GPU-b", state="lost"),
    device("MIG-1", holder("p-0"), mig={"uuid": "MIG-1", "parent_uuid": "GPU-a", "profile": "1g.10gb"}),
]

ticks = st.tuples(
    st.sampled_from(["n1", "n2"]),
    st.sampled_from([1_000, 1_000, 20_000, HOUR_MS, BACK_MS]),
    st.sampled_from(["", "a", "b"]),
    st.lists(st.sampled_from(_DEVICES), max_size=3, unique_by=lambda device: device["uuid"]),
)
"""A node, by how much the clock went on, the node's zone, and its devices."""

seconds = st.sampled_from([1.0, 60.0, 4_000.0])
alerts = st.sampled_from([None, alert(), alert(state="resolved", ends_at="2026-11-22T13:00:00Z")])
hours = st.builds(lambda revision, team: hour(revision=revision, team=team), st.integers(0, 3), st.text(max_size=3))


class Browser:
    """What a page shows that is open."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def receive(self, received: Json) -> None:
        """Take a frame, as it comes over the network."""
        read = msgspec.json.decode(msgspec.json.encode(received))
        if read["kind"] == "all":
            self.content = {"began_ms": read["began_ms"], "metrics": read["metrics"], "nodes": {}, "now": {}}
        for part in ("nodes", "now"):
            self.content[part] |= {node[0]: node for node in read[part]}
        self.content |= {part: read[part] for part in ("alerts", "usage") if part in read}


@given(st.lists(ticks | seconds | alerts | hours, max_size=20), st.data())
@example([("n1", 0, "", _DEVICES[:1]), ("n1", BACK_MS, "", _DEVICES[:1])], None)
def test_a_page_that_is_open_shows_what_one_that_is_opened_now_does(
    steps: list[Any], data: st.DataObject | None
) -> None:
    fleet, browser = Fleet(START_MS), Browser()
    since: Versions | None = None
    now_s, ts_ms = 0.0, START_MS
    for seq, step in enumerate(steps, 1):
        if isinstance(step, tuple):
            node, later_ms, zone, devices = step
            ts_ms += later_ms
            labels = {"topology.kubernetes.io/zone": zone}
            fleet.add_tick(tick(seq, *devices, node=node, ts_ms=ts_ms, node_labels=labels), now_s)
        elif isinstance(step, float):
            now_s += step
            fleet.expire(now_s)
            fleet.expire_usage(START_MS + round(now_s * 1000))
        elif step is None or hasattr(step, "severity"):
            fleet.set_alert(b"fingerprint", step)
        else:
            fleet.add_usage(step.key.encode(), step)
        if data is None or data.draw(st.booleans(), label="a frame is sent"):
            browser.receive(frame(fleet, METRIC, 0, since))
            since = versions(fleet)

    browser.receive(frame(fleet, METRIC, 0, since))

    opened_now = Browser()
    opened_now.receive(frame(fleet, METRIC, 0))
    assert browser.content == opened_now.content
