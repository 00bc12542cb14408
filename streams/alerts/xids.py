"""What XID errors mean and what to do, by code."""

from typing import Literal, NamedTuple

XidKind = Literal["application", "driver", "hardware", "recovered", "unknown"]


class Xid(NamedTuple):
    """A code: whose doing it is, what it means, and what to do."""

    kind: XidKind
    meaning: str
    action: str


_UNKNOWN = Xid("unknown", "an error of the GPU or its driver", "look the code up in NVIDIA's XID catalogue")
XIDS: dict[int, Xid] = {}


def of_code(code: int | None) -> Xid:
    """The row of a code."""
    return XIDS.get(code, _UNKNOWN) if code is not None else _UNKNOWN
