"""The records that the attribution stream reads, decoded."""

from collections.abc import Callable, Mapping

from streams.decoding import decoded
from topics.allocations import Allocations
from topics.decoding import decoder
from topics.samples import Sample
from topics.workloads import NodeWorkloads

NodeRecord = Sample | Allocations | NodeWorkloads

_DECODERS: Mapping[str, Callable[[bytes], NodeRecord]] = {
    "gpu.samples": decoder(Sample),
    "gpu.allocations": decoder(Allocations),
    "gpu.workloads": decoder(NodeWorkloads),
}


def decode(topic: str, key: bytes | None, value: bytes | None) -> NodeRecord:
    """The record of a node topic. Raises :class:`streams.decoding.Malformed`."""
    return decoded(_DECODERS[topic], key, value)
