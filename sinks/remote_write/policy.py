"""What a receiver's answer means: one policy for each status.

| answer | policy |
|---|---|
| 2xx to 1.0; 2xx to 2.0 that says that all was written | accepted |
| 2xx or 4xx to 2.0 that does not count what was written, 415 | not 2.0: `auto` goes on in 1.0; with `2.0` as for 401 |
| 2xx to 2.0 that says that less was written | refused |
| none, 408, 425, 429, other 5xx | tried again for as long as it takes, after what `Retry-After` says, never split |
| 429 that speaks of a limit of series | refused |
| 500 | tried again, and refused after 5 in a row while other requests are accepted |
| 401, 403, 404, 405, 407, 410, 3xx | the receiver refuses everything: waited for, with a small request now and then |
| 413 | too large: halved, and the size remembered |
| any other 4xx | refused |

What is refused is narrowed down to series, if the receiver accepts a small request meanwhile; else it refuses
everything. The same is asked before a request that is too large is halved.

Source: the remote-write specifications 1.0 and 2.0; the texts are Prometheus's, Mimir's and Cortex's. Thanos answers
409 to samples in whose place it has others.
"""

import re
from typing import Literal, NamedTuple

Protocol = Literal["1.0", "2.0"]
Meaning = Literal["accepted", "refused", "too-large", "again", "server-error", "not-2.0", "misconfigured"]

AHEAD_MS = 5 * 60_000
"""How far in the receiver's future a sample that is out of its bounds must lie to be ahead of them, not behind."""

UNTIMELY = frozenset({"out_of_order", "too_old", "duplicate", "conflict"})
"""Reasons for which a node's tick as a whole is dropped: sending it in parts would change nothing."""

THERE = frozenset({"out_of_order", "duplicate", "conflict"})
"""Reasons that say that a receiver has a later sample, or this one."""

WHOLE = UNTIMELY | {"too_far_ahead"}
"""Reasons that hold for all of a node's tick, as all of it has one time."""

TOO_LARGE = "too_large"
"""The reason of a request that is larger than the receiver takes."""

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
_OUT_OF_BOUNDS = re.compile(r"out of bounds")


class Answer(NamedTuple):
    """What came back. ``status`` 0: nothing did; ``text`` says why. ``written``: how many samples, if said."""

    status: int
    text: str = ""
    written: int | None = None
    retry_after_s: float | None = None

    @property
    def said(self) -> str:
        """What came back, in a line."""
        text = " ".join(self.text.split())[:200]
        return f"HTTP {self.status}: {text}".rstrip(": ") if self.status else text


class Refusal(NamedTuple):
    """Why samples were refused: a reason to count by, and one line of what was said.

    ``written``: how many of them were not, of those that were refused for their time by a receiver that says so.
    ``sent_before``: no attempt before this one was answered, and any of them may have been accepted.
    """

    reason: str
    text: str
    written: int = 0
    sent_before: bool = False


def meaning(answer: Answer, protocol: Protocol, samples: int, *, speaks_2_0: bool = False) -> Meaning:
    """What to do about an answer to a request of so many samples.

    ``speaks_2_0``: the receiver once counted what it wrote, so one that says nothing is not one of 1.0.
    """
    status = answer.status
    uncounted = protocol == "2.0" and answer.written is None
    if status == _PAYLOAD_TOO_LARGE:
        return "too-large"
    if status == _TOO_MANY and _SERIES_LIMIT.search(answer.text.lower()):
        return "refused"
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
    """Why samples of about that time were refused, from what the receiver said."""
    said = answer.text.lower()
    text = " ".join(answer.text.split())[:300] or f"HTTP {answer.status}"
    if answer.status == _PAYLOAD_TOO_LARGE:
        return Refusal(TOO_LARGE, text)
    if answer.status < 300:
        return Refusal("not_written", f"HTTP {answer.status}, and {answer.written} samples written")
    for reason, pattern in _REASONS:
        if pattern.search(said):
            return Refusal(reason, text, (answer.written or 0) if reason in UNTIMELY else 0)
    if _OUT_OF_BOUNDS.search(said):
        return Refusal("too_far_ahead" if ts_ms > now_ms + AHEAD_MS else "too_old", text)
    return Refusal(_BY_STATUS.get(answer.status, "rejected"), text)
