"""What a row of the metric catalogue is: a key, what it means, and the series it becomes in each naming profile."""

from typing import Literal, NamedTuple, get_args

import msgspec

Profile = Literal["otel", "dcgm", "dcgm-legacy"]
PROFILES: tuple[Profile, ...] = get_args(Profile)

Labels = tuple[tuple[str, str], ...]

_DECIMALS = 9


class Series(NamedTuple):
    """One series of a key in a profile: its name, the labels that tell it from others of that name, and its value.

    The value is ``value * scale``, or, with ``bits``, 1.0 or 0.0 for whether any of those bits is set.
    """

    name: str
    labels: Labels = ()
    scale: float = 1.0
    bits: int | None = None

    def of(self, value: float) -> float:
        """The series' value for a value of the key, without what scaling adds past 9 decimals: 0.57 is 57.0 %."""
        if self.bits is not None:
            return 1.0 if int(value) & self.bits else 0.0
        return float(value) if self.scale == 1.0 else round(value * self.scale, _DECIMALS)


class Family(NamedTuple):
    """A name that several series of one device share.

    ``label`` tells them apart and ``keys`` are what they are made of. ``total`` says what their sum is. It is None if
    they are readings of one quantity that can't be added up; then ``mean`` says what their mean and maximum are of.
    """

    label: str
    keys: tuple[str, ...]
    total: str | None = None
    mean: str | None = None


class Ratio(NamedTuple):
    """A series made of two keys of one device: ``numerator / denominator * scale``."""

    name: str
    numerator: str
    denominator: str
    unit: str
    help: str
    scale: float = 1.0
    labels: Labels = ()

    def of(self, numerator: float, denominator: float) -> float | None:
        """The series' value, or None where the denominator is zero."""
        return numerator / denominator * self.scale if denominator else None


class Info(NamedTuple):
    """A series that is not made of a device's metrics. ``labels``: the names of those that tell its series apart."""

    name: str
    help: str
    unit: str = ""
    kind: Literal["gauge", "counter"] = "gauge"
    labels: tuple[str, ...] = ()


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a key, in base units. Of its series in a profile the first is the value, the rest are made from it.

    ``mig``: a GPU in MIG mode and its MIG devices may both have it, and the GPU's value covers theirs.
    """

    key: str
    unit: str
    kind: Literal["gauge", "counter"]
    help: str
    nvml: str
    names: dict[Profile, tuple[Series, ...]]
    mig: bool = False
