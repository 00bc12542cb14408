"""How much of a GPU a pod holds, so that what it wastes is counted in seconds of a whole one. Pure.

A MIG device is as many of its GPU's compute slices as its profile says (``1g.10gb``: 1 of 7; an A30 has 4). A device
that several pods hold is divided among them equally, whatever each was promised: no record says more.
"""

import re
from typing import NamedTuple

from streams.alerts.finding import Facts
from streams.alerts.tick import Device

_PROFILE = re.compile(r"(?:([1-8])c\.)?([1-8])g\.", re.ASCII)
_SLICES = 7
_SLICES_BY_MODEL = {"A30": 4}


class Share(NamedTuple):
    """A part of a GPU, None where it is not known, and how it was found."""

    ratio: float | None
    how: str


def share_of(facts: Facts) -> Share:
    """What of a GPU the pod of a finding holds."""
    slices = _mig(facts.device) if facts.device is not None else Share(1.0, "")
    if slices.ratio is None:
        return slices
    ways = [slices.how] if slices.how else []
    if facts.sharing > 1:
        ways.append(f"one of {facts.sharing} pods on it, divided equally")
    return Share(slices.ratio / facts.sharing, "; ".join(ways) or "a whole GPU")


def _mig(device: Device) -> Share:
    if device.mig is None:
        return Share(1.0, "")
    match = _PROFILE.match(device.mig.profile or "")
    if match is None:
        return Share(None, "")
    words = set(re.split(r"[^A-Za-z0-9]+", device.model or ""))
    slices = next((count for model, count in _SLICES_BY_MODEL.items() if model in words), _SLICES)
    own = min(int(match[1] or match[2]), slices)
    return Share(own / slices, f"{own} of {slices} compute slices")
