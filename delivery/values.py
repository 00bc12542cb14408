"""Pure parsers for the values of options.

In: the text of an option or an environment variable.
Out: a float in seconds, an int in bytes, or one of the small tuples below.
On failure: ``ValueError`` with a sentence that gives an example of what is right, and never repeats a secret.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from topics import TOPICS

_DAY_MS = 86_400_000
_LONGEST_MS = 3650 * _DAY_MS
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|)", re.ASCII)
_DURATIONS = re.compile("".join(f"(?:[0-9]{{1,12}}{unit})?" for unit in ("d", "h", "m", "s", "ms")), re.ASCII)
_DURATION_MS = {"ms": 1, "s": 1_000, "": 1_000, "m": 60_000, "h": 3_600_000, "d": _DAY_MS}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(B|KiB|MiB|GiB|)", re.ASCII)
_SIZE_BYTES = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_FLEET = re.compile(r"[1-9][0-9]{0,5}x[1-9][0-9]{0,2}")
_PORT = re.compile(r"[0-9]{1,9}")
_HOST = re.compile(r"\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+")
_PREFIX = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?/[A-Za-z0-9._-]*")
_TOPIC_PREFIX = re.compile(r"[A-Za-z0-9._-]*")
_LONGEST_TOPIC_PREFIX = 249 - max(map(len, TOPICS))  # Kafka takes topic names of 249 characters
_LONGEST_SOCKET_PATH = 107  # of a sockaddr_un's 108 bytes the last is a zero
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Address(NamedTuple):
    """A host and a port. To listen on, port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def milliseconds(text: str) -> int:
    """``500ms``, ``30s``, ``15m``, ``2h``, ``7d``, ``1h30m``; a bare number is seconds."""
    stripped = text.strip()
    if not stripped or not (_DURATION.fullmatch(stripped) or _DURATIONS.fullmatch(stripped)):
        raise ValueError(
            f"{text[:80]!r} is not a duration: write 500ms, 30s, 15m, 2h, 7d or 1h30m (a bare number is seconds)"
        )
    ms = sum(round(float(count) * _DURATION_MS[unit]) for count, unit in _DURATION.findall(stripped))
    if ms > _LONGEST_MS:
        raise ValueError(f"{text[:80]!r} is longer than ten years")
    return ms


def duration(text: str) -> float:
    """A duration in seconds, in the syntax of :func:`milliseconds`."""
    return milliseconds(text) / 1000


def duration_text(seconds: float) -> str:
    """A duration as it would be typed: ``15m``, ``90s``, ``500ms``."""
    ms = round(seconds * 1000)
    unit = next((unit for unit in ("d", "h", "m", "s") if ms and ms % _DURATION_MS[unit] == 0), "ms")
    return f"{ms // _DURATION_MS[unit]}{unit}"


def duration_words(ms: float) -> str:
    """A duration as people read it, ``15m``, ``1h 30m``, ``2d 3h``: its two largest units, of whole seconds."""
    remaining_s, parts = round(ms / 1000), []
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, remaining_s = divmod(remaining_s, seconds)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def size(text: str) -> int:
    """Bytes: ``512B``, ``64KiB``, ``4MiB``, ``1GiB``; a bare number is bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a size: write 512B, 64KiB, 4MiB or 1GiB (a bare number is bytes)")
    return int(float(match[1]) * _SIZE_BYTES[match[2]])


def size_text(count: int) -> str:
    """A size as it would be typed: ``16MiB``, ``100B``."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if count and count % _SIZE_BYTES[unit] == 0), "B")
    return f"{count // _SIZE_BYTES[unit]}{unit}"


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: object, replacement: str = "?") -> str:
    """A text without control characters, on which a terminal would act: records are not to be trusted."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(character if character.isprintable() else replacement for character in shown)


def name(text: str) -> str:
    """The name of a cluster or a node: 1-253 of ``A-Z a-z 0-9 . _ -``."""
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is not a name: use 1 to 253 of A-Z a-z 0-9 . _ -")
    return text


def topic_prefix(text: str) -> str:
    """The prefix of the names of topics and consumer groups, such as ``team-a.``; it may be empty."""
    if not _TOPIC_PREFIX.fullmatch(text) or len(text) > _LONGEST_TOPIC_PREFIX:
        limit = f"at most {_LONGEST_TOPIC_PREFIX} of A-Z a-z 0-9 . _ -"
        raise ValueError(f"{text[:80]!r} can't begin the name of a Kafka topic: use {limit}, such as team-a.")
    return text


def fleet_size(text: str) -> str:
    """``100x8``: a hundred nodes of eight GPUs."""
    if not _FLEET.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not a fleet: write NODESxGPUS, such as 4x8")
    return text.strip()


def host_ports(text: str) -> str:
    """``HOST:PORT[,HOST:PORT...]``, without spaces around the commas."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        host, _, port = part.rpartition(":")
        if not _HOST.fullmatch(host) or not _is_port(port) or port == "0":
            _, at, after = part.rpartition("@")  # what is before it may be a user and a password
            shown = f"***@{after}" if at else part
            raise ValueError(
                f"{shown!r} is not HOST:PORT, such as kafka-0:9092 or [fd00::1]:9092 (several are separated by commas)"
            )
    return ",".join(parts)


def listen(text: str) -> Address | None:
    """``HOST:PORT``, or None for ``off``."""
    if text.strip().lower() == "off":
        return None
    host, _, port = text.strip().rpartition(":")
    if not _HOST.fullmatch(host) or not _is_port(port):
        raise ValueError(
            f"{text!r} is not HOST:PORT, such as 127.0.0.1:9401 (0.0.0.0:9401: every interface;"
            " IPv6: [::1]:9401), or off"
        )
    return Address(host.strip("[]"), int(port))


def url(text: str) -> str:
    """An absolute http or https URL, unchanged. The error does not repeat a password in it."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or re.search(r"\s", text):
        raise ValueError("not a URL that begins with http:// or https:// and a host")
    return text


def header(text: str) -> tuple[str, str]:
    """``Name: value``. The error does not repeat the value, which may be a secret."""
    key, _, value = text.partition(":")
    if not _HEADER_NAME.fullmatch(key.strip()) or not value.strip() or "\n" in value or "\r" in value:
        raise ValueError("not a header such as 'X-Scope-OrgID: team-a'")
    return key.strip(), value.strip()


def label(text: str) -> tuple[str, str]:
    """``NAME=VALUE``, a label of every series."""
    name, _, value = text.partition("=")
    if not value or not _LABEL.fullmatch(name) or name.startswith("__"):
        raise ValueError(
            f"{text!r} is not a label such as region=eu: letters, digits and _ before the =, a value behind it"
        )
    return name, value


def start_from(text: str) -> str | float:
    """Where a new consumer group starts: ``earliest``, ``latest``, or that many seconds ago."""
    if text in ("earliest", "latest"):
        return text
    try:
        return duration(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither earliest, latest, nor a duration such as 1h") from None


def socket_path(text: str) -> Path | None:
    """The absolute path of a unix socket, or None for ``off``."""
    if text.strip().lower() == "off":
        return None
    path = Path(text.strip())
    if not path.is_absolute() or len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise ValueError(f"{text!r} is not a socket: write its absolute path (at most 107 bytes), or off")
    return path


def prefixes(text: str) -> tuple[str, ...]:
    """Prefixes of resource names, separated by commas: ``nvidia.com/,k8s.amazonaws.com/vgpu``."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if not _PREFIX.fullmatch(part):
            raise ValueError(f"{part!r} is not the beginning of a resource's name, such as nvidia.com/")
    return parts


def names(text: str) -> tuple[str, ...]:
    """Names of labels or annotations, separated by commas, such as ``app,app.kubernetes.io/*``; may be empty."""
    parts = [part.strip() for part in text.split(",")]
    if any(re.search(r"\s", part) for part in parts):
        raise ValueError(f"{text!r} is not a list of names, such as app,app.kubernetes.io/*")
    return tuple(part for part in parts if part)


def lease(text: str) -> str | None:
    """``NAMESPACE/NAME``, or None for ``off``."""
    if text.strip().lower() == "off":
        return None
    namespace, _, name_ = text.strip().partition("/")
    if not (namespace and name_) or "/" in name_:
        raise ValueError(f"{text!r} is not NAMESPACE/NAME, such as gpustream/gpustream-cluster, or off")
    return text.strip()


def _is_port(text: str) -> bool:
    return bool(_PORT.fullmatch(text)) and int(text) <= 65535
