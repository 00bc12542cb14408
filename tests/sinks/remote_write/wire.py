"""Reads remote-write bodies with messages that protoc compiled from the official field numbers."""

import functools
import importlib
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cramjam
from google.protobuf import message
from grpc_tools import protoc  # type: ignore[import-untyped]

PROTO = Path(__file__).parent.parent / "proto"


class Sample(NamedTuple):
    """A sample as a receiver reads it: labels in the order of the wire, the value's bits (NaN is comparable so)."""

    labels: tuple[tuple[str, str], ...]
    ts_ms: int
    bits: int

    @property
    def value(self) -> float:
        """The value of the bits."""
        number: float = struct.unpack("<d", struct.pack("<Q", self.bits))[0]
        return number

    @property
    def series(self) -> frozenset[tuple[str, str]]:
        """What identifies the series."""
        return frozenset(self.labels)


def bits(value: float) -> int:
    """The bits of a float, as an integer."""
    number: int = struct.unpack("<Q", struct.pack("<d", value))[0]
    return number


@functools.cache
def compiled(proto: Path) -> Any:
    """The module of a .proto file."""
    with tempfile.TemporaryDirectory() as folder:
        code = protoc.main(["protoc", f"-I{proto.parent}", f"--python_out={folder}", str(proto)])
        if code:
            raise RuntimeError(f"protoc: {code}")
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(f"{proto.stem}_pb2")
        finally:
            sys.path.remove(folder)


def messages(name: str) -> Any:
    """The module of a .proto file of the official messages of remote write and OTLP."""
    return compiled(PROTO / f"{name}.proto")


def read_v1(body: bytes, only: str | None = None) -> list[Sample]:
    """The samples of an uncompressed 1.0 request; raises ``DecodeError`` if it is none.

    ``only``: those of this metric, if its name is the first label; others are passed over quickly.
    """
    request = messages("write_v1").WriteRequest.FromString(body)
    return [
        Sample(tuple((label.name, label.value) for label in series.labels), sample.timestamp, bits(sample.value))
        for series in request.timeseries
        if only is None or series.labels[0].value == only
        for sample in series.samples
    ]


def read_v2(body: bytes, only: str | None = None) -> list[Sample]:
    """The samples of an uncompressed 2.0 request; raises ``DecodeError`` or ``IndexError`` if it is none.

    ``only``: as for :func:`read_v1`.
    """
    request = messages("write_v2").Request.FromString(body)
    symbols = list(request.symbols)
    if symbols[0]:
        raise message.DecodeError("the first symbol is not empty")
    return [
        Sample(_labels(symbols, series.labels_refs), sample.timestamp, bits(sample.value))
        for series in request.timeseries
        if only is None or symbols[series.labels_refs[1]] == only
        for sample in series.samples
    ]


def _labels(symbols: Sequence[str], refs: Sequence[int]) -> tuple[tuple[str, str], ...]:
    return tuple((symbols[name], symbols[value]) for name, value in zip(refs[::2], refs[1::2], strict=True))


def starts_v2(body: bytes) -> dict[str, tuple[int, int]]:
    """When the counters began, by metric name of a 2.0 request: on the sample, and on the series as before 3.8."""
    request = messages("write_v2").Request.FromString(body)
    return {
        dict(_labels(request.symbols, series.labels_refs))["__name__"]: (
            series.samples[0].start_timestamp,
            series.created_timestamp,
        )
        for series in request.timeseries
    }


def metadata_v2(body: bytes) -> dict[str, tuple[int, str, str]]:
    """Type, help and unit by metric name of a 2.0 request."""
    request = messages("write_v2").Request.FromString(body)
    return {
        dict(_labels(request.symbols, series.labels_refs))["__name__"]: (
            series.metadata.type,
            request.symbols[series.metadata.help_ref],
            request.symbols[series.metadata.unit_ref],
        )
        for series in request.timeseries
    }


def unsnappy(body: bytes) -> bytes:
    """The block that snappy made."""
    return bytes(cramjam.snappy.decompress_raw(body))
