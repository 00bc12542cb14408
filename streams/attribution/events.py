"""Who held a device when something happened to it, where that is not who holds it in the tick.

In: a tick's events, and the holders in the snapshots that they name. Out: the events of gpu.attributed.
Pure. An event names the snapshot of its own time, for by the tick another pod may have the device. Its pods are looked
up as of the event, at most a minute before the tick: for so long they are remembered.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from topics.attributed import AttributedEvent, Attribution, Holder
from topics.samples import Event, Sample

EVENT_MS = 60_000
"""For how long before its tick an event's pods are looked up as they were then; those of an older one, as then."""

READ_MS = 10_000
"""For how long after its tick's time an event may come while the tick is read."""


class Then(NamedTuple):
    """What events rest on: the holders by the device's UUID in a snapshot, and how sure it is."""

    holders: Mapping[str, tuple[Holder, ...]]
    attribution: Attribution


def named_snapshots(sample: Sample) -> dict[int, int]:
    """The ``seq`` of each snapshot that events name and the tick does not, and the time of the last such event."""
    found: dict[int, int] = {}
    for device in sample.devices:
        for event in device.events or ():
            seq = event.allocations_seq
            if seq is not None and seq != sample.allocations_seq:
                at_ms = sample.ts_ms if event.ts_ms is None else min(event.ts_ms, sample.ts_ms + READ_MS)
                found[seq] = max(at_ms, sample.ts_ms - EVENT_MS, found.get(seq, 0))
    return found


def attributed_events(
    events: Sequence[Event] | None,
    uuid: str,
    tick: Then,
    by_snapshot: Mapping[int, Then],
) -> tuple[AttributedEvent, ...] | None:
    """The events of a device, each with its own holders where they are not those of ``tick``."""
    if events is None:
        return None
    held = tick.holders.get(uuid, ())
    found = []
    for event in events:
        then = by_snapshot.get(event.allocations_seq, tick) if event.allocations_seq is not None else tick
        holders = then.holders.get(uuid, ())
        found.append(
            AttributedEvent(
                event.kind,
                event.code,
                event.ts_ms,
                event.allocations_seq,
                None if _who(holders) == _who(held) else holders,
                None if then.attribution == tick.attribution else then.attribution,
            )
        )
    return tuple(found)


def _who(holders: Sequence[Holder]) -> list[tuple[str, str, str | None, str | None]]:
    return [(one.namespace, one.pod, one.pod_uid, one.container) for one in holders]
