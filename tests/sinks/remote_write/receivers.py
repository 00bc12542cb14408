"""Receivers that need no network: they store and refuse samples as Prometheus and Mimir do."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from sinks.remote_write.policy import Answer, Protocol
from tests.sinks.remote_write.wire import Sample, read_v1, read_v2, unsnappy

Refuse = Callable[[Sample], str | None]
"""What is wrong with a sample; None: nothing."""

TOO_LARGE = Answer(413, "request entity too large")
STALE_BITS = 0x7FF0000000000002


class Kind(NamedTuple):
    """A kind of receiver, and the version of the protocol in which it is sent samples.

    ``partial``: it keeps the good part of a request that it refuses (2.0, Mimir), else nothing of it (Prometheus, 1.0).
    ``counts_all``: it counts what it was sent, also if it refuses the request (Mimir, 2.0), else what it stored.
    """

    protocol: Protocol
    partial: bool = False
    counts_all: bool = False


KINDS = (
    Kind("1.0"),
    Kind("1.0", partial=True),
    Kind("2.0", partial=True),
    Kind("2.0", partial=True, counts_all=True),
)

of_every_kind = pytest.mark.parametrize("kind", KINDS, ids=["1.0", "1.0-partial", "2.0", "2.0-counts-all"])


@dataclass
class Receiver:
    """Stores samples by series, and refuses what is out of order and what ``refuse`` names.

    ``most``: more samples in a request are too large for it, and get ``too_large``. ``always``: it gives this answer,
    whatever it is sent.
    ``status``: of its refusals.
    """

    refuse: Refuse = lambda _: None
    kind: Kind = KINDS[0]
    speaks_2_0: bool = True
    most: float = math.inf
    too_large: Answer = TOO_LARGE
    always: Answer | None = None
    status: int = 400
    stored: dict[frozenset[tuple[str, str]], list[tuple[int, int]]] = field(default_factory=dict)
    requests: int = 0
    sizes: list[int] = field(default_factory=list)

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        """Takes a request as a receiver would."""
        self.requests += 1
        if protocol == "2.0" and not self.speaks_2_0:
            return Answer(204)
        samples = (read_v1 if protocol == "1.0" else read_v2)(unsnappy(body))
        self.sizes.append(len(samples))
        if self.always is not None:
            return self.always
        if len(samples) > self.most:
            return self.too_large
        return self.take(samples, count=protocol == "2.0")

    def take(self, samples: Sequence[Sample], *, count: bool = False) -> Answer:
        """Stores samples, or answers with the error of the first bad one."""
        keys = [sample.series for sample in samples]
        errors = {
            number: error
            for number, (key, sample) in enumerate(zip(keys, samples, strict=True))
            if (error := self._error_of(key, sample))
        }
        if not errors or self.kind.partial or count:
            for number, (key, sample) in enumerate(zip(keys, samples, strict=True)):
                if number not in errors:
                    self._store(key, sample)
        written = len(samples) - (0 if self.kind.counts_all else len(errors))
        accepted_count = written if count else None
        if not errors:
            return Answer(204, "", accepted_count)
        number, error = next(iter(errors.items()))
        return Answer(self.status if error == self.refuse(samples[number]) else 400, error, accepted_count)

    def values(self) -> dict[str, list[tuple[int, float]]]:
        """The stored values by metric name, without markers."""
        by_name: dict[str, list[tuple[int, float]]] = {}
        for series, points in self.stored.items():
            valid = [(ts_ms, number(bits)) for ts_ms, bits in points if bits != STALE_BITS]
            by_name.setdefault(dict(series)["__name__"], []).extend(valid)
        return by_name

    def markers(self) -> int:
        """How many staleness markers are stored."""
        return sum(bits == STALE_BITS for points in self.stored.values() for _, bits in points)

    def _error_of(self, key: frozenset[tuple[str, str]], sample: Sample) -> str | None:
        points = self.stored.get(key)
        newest = points[-1] if points else (-1, 0)
        if sample.ts_ms < newest[0]:
            return "out of order sample"
        if sample.ts_ms == newest[0] and sample.bits != newest[1]:
            return "duplicate sample for timestamp"
        return self.refuse(sample)

    def _store(self, key: frozenset[tuple[str, str]], sample: Sample) -> None:
        points = self.stored.setdefault(key, [])
        if not points or points[-1][0] < sample.ts_ms:
            points.append((sample.ts_ms, sample.bits))


def number(bits: int) -> float:
    """The float of these bits."""
    value: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return value
