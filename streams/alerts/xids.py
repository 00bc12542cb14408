"""What XID errors mean and what to do, by code.

Source: NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors) for Ampere and later, and its list for older GPUs.
The words are ours. Whose doing an error is follows from the catalogue's first action. If it is to restart or to mend
the program, the error is a program's. If it is a reset, a restart of the node, a cable or a new GPU, the error is
hardware's. A code can have other causes than its usual one: if several programs have an error, and on one GPU only,
it is the GPU's.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

XidKind = Literal["application", "driver", "hardware", "recovered", "unknown"]
XID_KINDS: tuple[XidKind, ...] = get_args(XidKind)


class Xid(NamedTuple):
    """A code: whose doing it is, what it means, and what to do."""

    kind: XidKind
    meaning: str
    action: str


UNKNOWN = Xid("unknown", "an error that gpustream has no text for", "look the code up in NVIDIA's XID catalogue")

_RESTART = "restart the program; if it comes again, update driver and libraries, then check the program"
_DEBUG = "debug the program (compute-sanitizer); if several programs get it on this GPU only, test the GPU"
_RESET = "drain the node and reset the GPU; if it comes again, have the GPU tested or replaced"
_REBOOT = "drain and power-cycle the node; check the GPU's seating, power and cables; if it comes again, replace it"
_OTHERS = "see the other errors of this GPU at that time: this one follows from them"
_NONE = "nothing at once"
_LATER = "reset the GPU when it is free"
_UPDATE = "update driver and firmware; if it comes again, report it to NVIDIA"
_LINK = "see which link (nvidia-smi nvlink --errorcounters), reset the GPUs on it; then check bridges, cables, switches"

_ROWS: dict[int, Xid] = {
    8: Xid("application", "a program's work on the GPU did not go on in time", _RESTART),
    11: Xid("application", "a program sent commands that the GPU could not read", _DEBUG),
    13: Xid("application", "a program did what the GPU can't do, often an array index out of bounds", _DEBUG),
    25: Xid("application", "a program sent commands that are not allowed", _DEBUG),
    31: Xid("application", "a program used an address of GPU memory that it does not have", _DEBUG),
    32: Xid("application", "commands arrived at the GPU damaged, by a program or on the PCIe bus", _DEBUG),
    37: Xid("driver", "the GPU's firmware was asked what it does not know", _NONE),
    38: Xid("driver", "the GPU's firmware did not answer in time", _UPDATE),
    43: Xid("application", "a program's channel was reset after an error of its own; the GPU is well", _RESTART),
    44: Xid("driver", "a fault while the GPU switched from one program to another", _UPDATE),
    45: Xid("application", "the driver ended a program's work after another error, or the program was killed", _OTHERS),
    46: Xid("hardware", "the GPU stopped and did not react", _RESET),
    48: Xid("hardware", "a memory error that ECC could not correct", _RESET),
    54: Xid("hardware", "the GPU's board has no auxiliary power", "check the power cables of the GPU"),
    57: Xid("hardware", "an error on the way to the GPU's memory", _RESET),
    58: Xid("hardware", "the way to the GPU's memory is unstable", _RESET),
    59: Xid("driver", "an error of the GPU's internal controller (older drivers)", _UPDATE),
    60: Xid("application", "an error in the GPU's security or video processor", _RESTART),
    61: Xid("hardware", "the GPU's internal controller stopped at a breakpoint", _RESET),
    62: Xid("hardware", "the GPU's internal controller halted", _RESET),
    63: Xid("recovered", "a bad row or page of memory is replaced", _LATER),
    64: Xid("hardware", "a bad row of memory could not be replaced", _RESET),
    66: Xid("driver", "the driver used what it must not", _UPDATE),
    67: Xid("driver", "the driver used what it must not", _UPDATE),
    69: Xid("application", "a program sent a command of a kind that the engine does not have", _DEBUG),
    74: Xid("hardware", "an error on an NVLink", _LINK),
    78: Xid("driver", "a virtual GPU did not start", "use versions of the vGPU software that fit each other"),
    79: Xid("hardware", "the GPU does not answer on the PCIe bus any more", _REBOOT),
    80: Xid("application", "commands arrived at the GPU with a wrong checksum", _DEBUG),
    92: Xid("recovered", "many memory errors that ECC corrected", "watch the GPU; have it tested when it is free"),
    93: Xid("recovered", "the GPU's InfoROM was written more often than it was made for", _NONE),
    94: Xid("hardware", "a memory error that ECC could not correct and that hit one program only",
            "restart the program; reset the GPU when it is free"),
    95: Xid("hardware", "a memory error that ECC could not correct and that may have hit every program", _RESET),
    106: Xid("recovered", "a test message of the board's management interface", _NONE),
    107: Xid("recovered", "a test message of the board's management interface", _NONE),
    109: Xid("hardware", "the GPU could not switch from one program to another in time", _RESET),
    110: Xid("hardware", "the GPU's security engine found a fault", _RESET),
    119: Xid("hardware", "the GPU's system processor (GSP) did not answer the driver in time", _RESET),
    120: Xid("hardware", "the GPU's system processor (GSP) failed", _RESET),
    121: Xid("recovered", "errors on the link between GPU and CPU (C2C), corrected", _NONE),
    122: Xid("hardware", "the GPU's controller could not read its flash memory", _RESET),
    123: Xid("hardware", "the GPU's controller could not write its flash memory", _RESET),
    124: Xid("hardware", "the GPU's controller could not erase its flash memory", _RESET),
    125: Xid("hardware", "the file system of the GPU's InfoROM is damaged", "have the GPU tested or replaced"),
    136: Xid("hardware", "an NVLink could not be trained", _LINK),
    137: Xid("application", "a program used memory of another GPU, over NVLink, that it may not", _DEBUG),
    140: Xid("hardware", "a memory error that ECC could not correct and the driver could not contain", _RESET),
    141: Xid("driver", "an error in CUDA's fast path to the GPU", _UPDATE),
    143: Xid("hardware", "the GPU could not be started", _RESET),
    151: Xid("driver", "keys of confidential computing could not be changed", "restart the virtual machine"),
    154: Xid("recovered", "what the GPU needs has changed (nvidia-smi -q: GPU Recovery Action)", _OTHERS),
    155: Xid("hardware", "an NVLink was found to be wrong by the driver", _LINK),
    156: Xid("hardware", "a part of the GPU that is bad is taken out of use at the next reset", _RESET),
    157: Xid("hardware", "a part of the GPU that is bad could not be taken out of use", _RESET),
    158: Xid("hardware", "the GPU did not react within a time after which it never does", _RESET),
    159: Xid("hardware", "an error on the link between GPU and CPU", _OTHERS),
    160: Xid("recovered", "a memory channel that is bad is taken out of use", _NONE),
    161: Xid("hardware", "a memory channel that is bad could not be taken out of use", _RESET),
    162: Xid("recovered", "power smoothing works again", _NONE),
    163: Xid("recovered", "power smoothing is off", _NONE),
    164: Xid("recovered", "the parts that smooth power are near the end of their life", "plan to replace the GPU"),
    165: Xid("hardware", "the parts that smooth power are at the end of their life", "replace the GPU"),
    166: Xid("hardware", "an NVLink carried data before its encryption was set up", _LINK),
    167: Xid("hardware", "the GPU did not answer on the PCIe bus in time", _REBOOT),
    168: Xid("hardware", "the GPU has less memory, because part of it is bad", _RESET),
    169: Xid("hardware", "the GPU's security processor halted", _RESET),
    170: Xid("hardware", "an NVLink had an error in confidential computing", _LINK),
    171: Xid("hardware", "a memory error that ECC could not correct, in the GPU's DRAM", _RESET),
    172: Xid("hardware", "a memory error that ECC could not correct, in the GPU's caches (SRAM)", _RESET),
    173: Xid("hardware", "the link between GPU and CPU (C2C) failed", _RESET),
}  # fmt: skip


_ENGINES = {
    "a copy engine": (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    "a video decoder": (68, 83, 84, 88, 89, 96, 97, 98),
    "a video encoder": (47, 65, 73, 142),
    "a JPEG engine": (82, *range(99, 106)),
    "an optical flow engine": (86, 139),
}
_ROWS |= {
    code: Xid("application", f"an error in {engine}", _RESTART) for engine, codes in _ENGINES.items() for code in codes
}
_ROWS |= dict.fromkeys(range(144, 151), Xid("hardware", "an error on an NVLink of the fifth generation", _LINK))
XIDS: Mapping[int, Xid] = MappingProxyType(dict(sorted(_ROWS.items())))


def of_code(code: int | None) -> Xid:
    return UNKNOWN if code is None else XIDS.get(code, UNKNOWN)


def code_of(text: str) -> int | None:
    """The code that a text is; None if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def of_text(text: str) -> Xid:
    return of_code(code_of(text))
