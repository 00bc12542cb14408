"""Which records of gpu.attributed are replays: one rule for all its readers.

In: the node's last tick, and its next record. Out: whether the record is the next tick, a replay, or the first tick of
a new log. Pure.

After a crash or a rebalance, the attribution stream writes some ticks again. A tick of the last run is a replay if its
``seq`` is not above the last one's. A tick of another run is a replay if neither its ``offset`` nor its ``ts_ms`` is
above that of all ticks before; run ids have no order, and a clock may have been set back. If any other tick has an
``offset`` that is not above the last one's, gpu.samples was deleted and created again, and its offsets began again.
"""

from typing import Literal, Protocol

import msgspec

from topics.topic import UInt

Verdict = Literal["next", "replay", "new_log"]


class Tick(Protocol):
    """The fields of a record of gpu.attributed that the rule needs."""

    @property
    def run_id(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def ts_ms(self) -> int: ...
    @property
    def offset(self) -> int: ...


class LastTick(msgspec.Struct, frozen=True):
    """The last tick of a node that was not a replay; ``newest_ts_ms`` is the latest ``ts_ms`` of all its ticks."""

    run_id: UInt
    seq: UInt
    offset: UInt
    newest_ts_ms: UInt


def verdict(last: LastTick | None, tick: Tick) -> Verdict:
    """What a record is, given the last tick of its node; None: there was none."""
    if last is None:
        return "next"
    offset_rises = tick.offset > last.offset
    if tick.run_id == last.run_id and tick.seq <= last.seq:
        return "replay"
    if tick.run_id != last.run_id and not offset_rises and tick.ts_ms <= last.newest_ts_ms:
        return "replay"
    return "next" if offset_rises else "new_log"


def after(last: LastTick | None, tick: Tick) -> LastTick:
    """The :class:`LastTick` after a tick that is not a replay."""
    newest_ts_ms = tick.ts_ms if last is None else max(last.newest_ts_ms, tick.ts_ms)
    return LastTick(tick.run_id, tick.seq, tick.offset, newest_ts_ms)
