"""Interprets a receiver's answer: one policy for each status.

| answer | policy |
|---|---|
| 2xx to 1.0; 2xx to 2.0 that counts all samples as written | accepted |
| 2xx or 4xx to 2.0 that does not count written samples, 415 | not 2.0: `auto` falls back to 1.0; `2.0`: as for 401 |
| 2xx to 2.0 that counts fewer samples as written | refused |
| none, 408, 425, 429, other 5xx | retried for as long as it takes, after `Retry-After`, and never split |
| 429 that names a limit of series | refused |
| 429 that names a limit of bursts, and the request is above it | too large |
| 500 | retried, and refused after 5 in a row while other requests are accepted |
| 401, 403, 404, 405, 407, 410, 3xx | likewise; if no others are accepted, it refuses everything: wait, and probe it |
| 413 | too large: sent in halves, and the size is remembered |
| any other 4xx | refused |

If a request is refused, or too large, and the receiver accepts a small one meanwhile, it is bisected to find the
refused series. Otherwise the receiver refuses everything.

Source: the remote-write specifications 1.0 and 2.0. The patterns match the texts of Prometheus, Mimir and Cortex.
Thanos answers 409 to samples of which it has other values.
"""

import math
import re
from typing import Literal, NamedTuple

Protocol = Literal["1.0", "2.0"]
Meaning = Literal["accepted", "refused", "too-large", "again", "server-error", "not-2.0", "misconfigured"]

AHEAD_MS = 5 * 60_000
"""A sample that is out of bounds is too early, unless it is this far ahead of now."""

UNTIMELY = frozenset({"out_of_order", "too_old", "duplicate", "conflict"})
"""Reasons to drop a node's tick as a whole, because sending it in parts would change nothing."""

THERE = frozenset({"out_of_order", "duplicate", "conflict"})
"""Reasons that mean that the receiver has this sample or a later one."""

WHOLE = UNTIMELY | {"too_far_ahead"}
"""Reasons that hold for a whole tick, because all of its samples have the same time."""

TOO_LARGE = "too_large"
"""The reason for refusing a request that is larger than the receiver accepts."""

_PAYLOAD_TOO_LARGE = 413
_TOO_MANY = 429
_SERVER_ERROR = 500
_NOT_IN_2_0 = 415
_AGAIN = frozenset({0, 408, 425, _TOO_MANY})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407, 410})

_REASONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("too_far_ahead", re.compile(r"too[ -]far[ -]in[ -](the )?future|timestamp[ -]too[ -]new")),
    ("duplicate", re.compile(r"duplicate sample|(duplicate|repeated)[ -]timestamp")),
    ("too_old", re.compile(r"too old|timestamp-too-old")),
    ("out_of_order", re.compile(r"out[ -]of[ -]order")),
    ("series_limit", re.compile(r"series[ -]limit|limit of \S+ (\S+ )?series|max-(\w+-)?series")),
)
_SERIES_LIMIT = dict(_REASONS)["series_limit"]
_BY_STATUS = {409: "conflict", _SERVER_ERROR: "server_error"}
_ABOVE_BURST = re.compile(r"ingestion burst size limit")
_BURST = re.compile(r"ingestion rate limit, .* maximum allowed burst of ([0-9]{1,18})\b")
_OUT_OF_BOUNDS = re.compile(r"out of bounds")


class Answer(NamedTuple):
    """The answer to an attempt. ``status`` 0: there was none, ``text`` says why. ``written``: the samples it counts."""

    status: int
    text: str = ""
    written: int | None = None
    retry_after_s: float | None = None

    @property
    def summary(self) -> str:
        """The answer in one line."""
        text = " ".join(self.text.split())[:200]
        return f"HTTP {self.status}: {text}".rstrip(": ") if self.status else text


class Refusal(NamedTuple):
    """Why samples were refused: a reason to count by, and the receiver's text in one line.

    ``written``: how many of them were accepted nevertheless, if they were refused for their time by a receiver that
    counts them. ``sent_before``: earlier attempts failed in another way, by which a receiver of several ingesters may
    have taken a part of them.
    """

    reason: str
    text: str
    written: int = 0
    sent_before: bool = False


def meaning(answer: Answer, protocol: Protocol, samples: int, *, speaks_2_0: bool = False) -> Meaning:
    """What an answer to a request with this many samples means.

    ``speaks_2_0``: the receiver has counted written samples before, so an answer without a count is not one of 1.0.
    """
    status = answer.status
    uncounted = protocol == "2.0" and answer.written is None
    if status == _PAYLOAD_TOO_LARGE:
        return "too-large"
    if status == _TOO_MANY and _SERIES_LIMIT.search(answer.text.lower()):
        return "refused"
    if status == _TOO_MANY and _is_above_burst(answer, samples if protocol == "1.0" else 2 * samples):
        return "too-large"
    if status in _AGAIN or status > _SERVER_ERROR:
        return "again"
    if status == _SERVER_ERROR:
        return "server-error"
    if status in _MISCONFIGURED or 300 <= status < 400 or status < 200:
        return "misconfigured"
    if status < 300:
        if uncounted:
            return "not-2.0"
        return "accepted" if protocol == "1.0" or (answer.written or 0) >= samples else "refused"
    if uncounted and (status == _NOT_IN_2_0 or not speaks_2_0):
        return "not-2.0"
    return "misconfigured" if status == _NOT_IN_2_0 else "refused"


def refusal(answer: Answer, ts_ms: int, now_ms: int) -> Refusal:
    """Why samples of about this time were refused, from the receiver's text."""
    lowered = answer.text.lower()
    text = " ".join(answer.text.split())[:300] or f"HTTP {answer.status}"
    if answer.status == _PAYLOAD_TOO_LARGE or _is_above_burst(answer):
        return Refusal(TOO_LARGE, text)
    if answer.status < 300:
        return Refusal("not_written", f"HTTP {answer.status}, and {answer.written} samples written")
    for reason, pattern in _REASONS:
        if pattern.search(lowered):
            return Refusal(reason, text, (answer.written or 0) if reason in UNTIMELY else 0)
    if _OUT_OF_BOUNDS.search(lowered):
        return Refusal("too_far_ahead" if ts_ms > now_ms + AHEAD_MS else "too_old", text)
    return Refusal(_BY_STATUS.get(answer.status, "rejected"), text)


def _is_above_burst(answer: Answer, items: float = math.inf) -> bool:
    """Whether a request of so many samples and metadata is more than the receiver ever takes at once.

    Mimir's answer to a request that comes too early and to one that is too large was the same once.
    """
    text = answer.text.lower()
    burst = _BURST.search(text)
    return bool(_ABOVE_BURST.search(text)) or (burst is not None and items > int(burst[1]))
