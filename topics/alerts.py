"""gpu.alerts and gpu.alert-state: the last state of each alert, and what the alert stream remembers."""

from topics.topic import Topic

TOPIC = Topic(
    name="gpu.alerts",
    key="the alert's fingerprint",
    record=None,
    cleanup="compact",
    retention_hours=None,
    by_node=False,
    promise="The last record of a key is the alert's state. Open alerts are written again daily.",
    example={},
)

STATE = Topic(
    name="gpu.alert-state",
    key="cluster/node",
    record=None,
    cleanup="compact",
    retention_hours=None,
    by_node=True,
    promise="Private to the alert stream.",
    example={},
)
