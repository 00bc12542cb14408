"""Removes secrets from texts that others read: logs, ``/readyz``, dead letters.

A receiver, or a gateway before it, may repeat in its answer what it was sent.
"""

import re

_SECRETS = (
    (re.compile(r"(://)[^/?#\s]+@"), r"\1***@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"(?i)\b(authorization)(\\*['\"]?\s*[:=]\s*\\*['\"]?)[^'\",}]+"), r"\1\2***"),
    (
        re.compile(
            r"""(?i)(password|token|secret|api[-_ ]?key)(\\*['"]?\s*[:=]\s*)(\\*"[^"]*"|\\*'[^']*'|['"]?[^\s'",]+)"""
        ),
        r"\1\2***",
    ),
)
"""A quotation mark may have backslashes before it: an answer in JSON quotes what it was sent as JSON."""


def redact(text: str) -> str:
    """The text with passwords in URLs, credentials in headers and values of secrets replaced by ``***``."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
