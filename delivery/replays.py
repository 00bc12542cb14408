"""Which records of gpu.attributed are replays: one rule for all its readers.

In: what is kept of a node's last tick, and the node's next record. Out: whether that is its next tick, a replay, or the
first tick of a new log. Pure.

After a crash or a rebalance, the attribution stream writes some ticks again. A tick of the last run is a replay if its
``seq`` is not above the last one's. A tick of another run is a replay if neither its ``offset`` nor its ``ts_ms`` is
later than that of all ticks before; the ids of runs have no order, and a clock may have been set back. If any other
tick has an ``offset`` that is not above the last one's, gpu.samples was deleted and created again, and its offsets
began again.
"""

from typing import Literal, Protocol

import msgspec

from topics.topic import UInt

Verdict = Literal["next", "replay", "new_log"]


class Tick(Protocol):
    """A record of gpu.attributed, as far as the rule looks at it."""

    @property
    def run_id(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def ts_ms(self) -> int: ...
    @property
    def offset(self) -> int: ...


class LastTick(msgspec.Struct, frozen=True):
    """The last tick of a node that was not a replay; ``newest_ts_ms`` is the latest time of any."""

    run_id: UInt
    seq: UInt
    offset: UInt
    newest_ts_ms: UInt


def verdict(last: LastTick | None, tick: Tick) -> Verdict:
    """What a record is, after the last tick of its node; None: there was none."""
    if last is None:
        return "next"
    later = tick.offset > last.offset
    if tick.run_id == last.run_id and tick.seq <= last.seq:
        return "replay"
    if tick.run_id != last.run_id and not later and tick.ts_ms <= last.newest_ts_ms:
        return "replay"
    return "next" if later else "new_log"


def after(last: LastTick | None, tick: Tick) -> LastTick:
    """What to keep after a tick that is not a replay."""
    newest_ts_ms = tick.ts_ms if last is None else max(last.newest_ts_ms, tick.ts_ms)
    return LastTick(tick.run_id, tick.seq, tick.offset, newest_ts_ms)
