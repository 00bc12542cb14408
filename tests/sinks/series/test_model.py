"""Sets of series: what they have in common."""

import msgspec

from sinks.series.model import Row, SeriesSet
from topics.metric import Labels


def test_equal_labels_of_two_sets_are_in_memory_once() -> None:
    encoded = msgspec.json.encode([("k8s_node_name", "node-1"), ("gpu_uuid", "GPU-a")])
    first, other = (SeriesSet(msgspec.json.decode(encoded, type=Labels), (Row("gpu_utilization"),)) for _ in range(2))
    assert first.labels == other.labels == (("k8s_node_name", "node-1"), ("gpu_uuid", "GPU-a"))
    assert all(label is same for label, same in zip(first.labels, other.labels, strict=True))
