"""The events of a run for its summary: pods that came and went, shared GPUs, MIG, errors, lost GPUs, alerts. Pure.

In:       ticks and alerts, as they come.
Out:      lines for people, at the end.
State:    who holds each node's devices, which devices were cut or lost, and counts: no more than the fleet is large.
"""

from collections import Counter

from gpustream.ticks import Tick
from topics.alerts import Alert
from topics.attributed import by_pod
from topics.times import epoch_ms

_MAX_NAMED = 4
"""At most this many things of one kind are named."""


class Sightings:
    """Counts and names the events in ticks and alerts."""

    def __init__(self) -> None:
        self._pods: dict[tuple[str, str], frozenset[tuple[str, str]]] = {}
        self._pods_started = self._pods_ended = self._max_pods = 0
        self._start_ms: int | None = None
        self._shared: tuple[int, str] = (1, "")
        self._mig: set[str] = set()
        self._lost: dict[str, str] = {}
        self._recovered: set[str] = set()
        self._xids: list[str] = []
        self._alerts: Counter[str] = Counter()
        self._first_alert_ms: dict[str, int] = {}

    def tick(self, tick: Tick) -> None:
        """Adds a tick. It must not be a replay."""
        self._start_ms = min(tick.ts_ms, tick.ts_ms if self._start_ms is None else self._start_ms)
        holding_pods = set[tuple[str, str]]()
        for device in tick.devices:
            where, gpu = f"GPU {device.index} of {tick.node}", device.mig.parent_uuid if device.mig else device.uuid
            pods = by_pod(device.holders)
            holding_pods.update((pod.namespace, pod.pod) for pod in pods)
            if len(pods) > self._shared[0]:
                self._shared = len(pods), where
            if device.mig is not None and pods:
                self._mig.add(device.uuid)
            if device.state == "lost":
                self._lost.setdefault(gpu, where)
            elif gpu in self._lost:
                self._recovered.add(gpu)
            for event in device.events or ():
                if event.kind == "xid" and len(self._xids) < _MAX_NAMED:
                    holder = f", held by {next(iter(pods)).pod}" if pods else ""
                    self._xids.append(f"XID {event.code} on {where}{holder}")
        current, previous = frozenset(holding_pods), self._pods.get((tick.cluster, tick.node))
        if previous is not None:
            self._pods_started += len(current - previous)
            self._pods_ended += len(previous - current)
        self._pods[tick.cluster, tick.node] = current
        self._max_pods = max(self._max_pods, sum(map(len, self._pods.values())))

    def alert(self, alert: Alert) -> None:
        """Adds a transition of an alert."""
        at_ms = epoch_ms(alert.starts_at)
        if alert.is_open and not alert.revision and self._start_ms is not None and at_ms >= self._start_ms:
            self._alerts[alert.name] += 1
            self._first_alert_ms.setdefault(alert.name, at_ms)

    def lines(self) -> list[str]:
        """What was seen, a line each."""
        lines = []
        if self._max_pods:
            lines.append(f"up to {self._max_pods} pods at a time; {self._pods_started} came, {self._pods_ended} went")
        if self._shared[1]:
            lines.append(f"{self._shared[0]} pods that share {self._shared[1]}")
        if self._mig:
            lines.append(f"{len(self._mig)} MIG devices that pods held")
        lines += self._xids
        for uuid, where in list(self._lost.items())[:_MAX_NAMED]:
            lines.append(f"{where} lost{', and back' if uuid in self._recovered else ''}")
        for name, count in self._alerts.most_common():
            after_s = (self._first_alert_ms[name] - (self._start_ms or 0)) / 1000
            count_text = f"{count} alerts, the first" if count > 1 else "an alert"
            lines.append(f"{name}: {count_text} {after_s:.0f} s after the start")
        return lines
