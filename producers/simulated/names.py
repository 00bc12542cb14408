"""Identities as NVIDIA and Kubernetes make them, each a pure function of what it identifies.

Source: Kubernetes' apimachinery for the alphabet of generated suffixes, which has no vowels, and for how the hash of a
pod template is written in it.
"""

import random
import uuid

from topics.blake2 import blake2b

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
SUFFIXES = len(_ALPHABET) ** 5  # how many suffixes there are
_SCATTER = 9_999_991  # shares no factor with SUFFIXES, so that no two numbers below it meet


def digest(*parts: object) -> bytes:
    """32 bytes that stand for ``parts``; equal parts give equal bytes on every machine."""
    return blake2b("\x1f".join(map(str, parts)).encode(), 32)


def generator(*parts: object) -> random.Random:
    """A random generator of its own for what ``parts`` name."""
    return random.Random(int.from_bytes(digest(*parts)[:8], "big"))


def fraction(*parts: object) -> float:
    """A number in [0, 1) that stands for ``parts``."""
    return int.from_bytes(digest(*parts)[:6], "big") / 2**48


def object_uid(*parts: object) -> str:
    """The uid of a Kubernetes object: a version 4 UUID."""
    return str(uuid.UUID(bytes=digest("uid", *parts)[:16], version=4))


def device_uuid(prefix: str, *parts: object) -> str:
    """The UUID of a GPU (``prefix`` GPU) or of a MIG device (MIG), lower hex 8-4-4-4-12."""
    return f"{prefix}-{uuid.UUID(bytes=digest(prefix, *parts)[:16])}"


def serial(*parts: object) -> str:
    """The serial number of a GPU: 13 digits."""
    return f"{int.from_bytes(digest('serial', *parts)[:8], 'big') % 10**13:013d}"


def suffix(*parts: object) -> str:
    """The 5 characters that Kubernetes appends to a generated name."""
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest("suffix", *parts)[:5])


def numbered_suffix(number: int, *parts: object) -> str:
    """The suffix of the ``number``-th object that ``parts`` generate. No two numbers have the same one until all
    SUFFIXES are used up, because an API server refuses a name that is taken."""
    rest = (number * _SCATTER + int.from_bytes(digest("suffix", *parts)[:8], "big")) % SUFFIXES
    letters = []
    for _ in range(5):
        rest, letter = divmod(rest, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)


def template_hash(*parts: object) -> str:
    """The hash of a pod template, as in the name of a ReplicaSet: a decimal number in the alphabet of suffixes."""
    number = str(int.from_bytes(digest("template", *parts)[:4], "big"))
    return "".join(_ALPHABET[ord(digit) % len(_ALPHABET)] for digit in number)


def container_id(*parts: object) -> str:
    """A container runtime's id: 64 hex digits."""
    return digest("container", *parts).hex()
