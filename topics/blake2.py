"""BLAKE2b, by which alerts and actions are identified, also if Python has none: Red Hat's in FIPS mode does not.

In: bytes. Out: their digest, the same with every Python. It protects nothing. Source: RFC 7693, without a key.
"""

import hashlib
import struct
from functools import lru_cache

_BLOCK_BYTES = 128
_ROUNDS = 12
_MASK = 2**64 - 1
_START = (
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
)  # fmt: skip
_MIXED = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
_SCHEDULE = (
    "0123456789abcdef",
    "ea489fd61c02b753",
    "b8c052fdae367194",
    "7931dcbe265a40f8",
    "905724afe1bc683d",
    "2c6a0b834d75fe19",
    "c51fed4a0763928b",
    "db7ec13950f4862a",
    "6fe9b308c2d714a5",
    "a2847615fb9e3cd0",
)
"""Which words of a block are mixed in, round by round, in hexadecimal."""


def blake2b(content: bytes, size: int) -> bytes:
    """The digest of ``size`` bytes."""
    try:
        return hashlib.blake2b(content, digest_size=size, usedforsecurity=False).digest()
    except (AttributeError, TypeError, ValueError):  # it is missing, or OpenSSL's, which makes 64 bytes or none
        return blake2b_in_python(content, size)


@lru_cache(maxsize=16384)
def blake2b_in_python(content: bytes, size: int) -> bytes:
    """The same, in about half a millisecond for each 128 bytes."""
    state = [_START[0] ^ 0x01010000 ^ size, *_START[1:]]
    for begin in range(0, max(1, len(content)), _BLOCK_BYTES):
        end = min(begin + _BLOCK_BYTES, len(content))
        words = struct.unpack("<16Q", content[begin:end].ljust(_BLOCK_BYTES, b"\0"))
        v = [*state, *_START]
        v[12] ^= end
        v[14] ^= _MASK if end == len(content) else 0
        for number in range(_ROUNDS):
            schedule = iter(_SCHEDULE[number % len(_SCHEDULE)])
            for a, b, c, d in _MIXED:
                for first, second in ((32, 24), (16, 63)):
                    v[a] = (v[a] + v[b] + words[int(next(schedule), 16)]) & _MASK
                    v[d] = _rotated(v[d] ^ v[a], first)
                    v[c] = (v[c] + v[d]) & _MASK
                    v[b] = _rotated(v[b] ^ v[c], second)
        state = [word ^ v[index] ^ v[index + 8] for index, word in enumerate(state)]
    return struct.pack("<8Q", *state)[:size]


def _rotated(word: int, bits: int) -> int:
    return (word >> bits | word << (64 - bits)) & _MASK
