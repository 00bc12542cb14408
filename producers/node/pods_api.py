"""The kubelet's Pods API: the pods of this node, pushed as they begin, change and end.

In: the stream of ``/v1alpha1.Pods/WatchPods`` on a unix socket of its own, from Kubernetes 1.37 on. Out: each pod's
name and uid, whether it has ended, and the devices that its status names.
State: the pods of the stream, from its first complete list on.
On failure: a stream that breaks is opened again. Until it has sent a complete list, this module reports no pods, and
only the kubelet's pod resources count, which are read at every tick. If the kubelet does not have this API, or has it
switched off, it is tried again once a minute, and at once after a restart of the kubelet.

Source: Kubernetes' documentation, Kubelet Pods API; KEP-4188; KEP-4680 for ``allocatedResourcesStatus``.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.pods_pb2 import ADDED, DELETED, INITIAL_SYNC_COMPLETE, MODIFIED, Pod, WatchPodsEvent

log = logging.getLogger(__name__)

LARGEST_EVENT_BYTES = 64 * 1024 * 1024
LOOK_AGAIN_S = 1.0  # how often the socket is looked for: an upgrade of the kubelet may create it
REFUSED_AGAIN_S = 60.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 5.0  # after a stream that broke
_MAX_REASON_CHARS = 300
_STATIC_UID_LENGTH = 32  # a static pod has another uid in the kubelet than in the API server
_ENDED_PHASES = ("Succeeded", "Failed")
_TYPES = {ADDED: "added", MODIFIED: "modified", DELETED: "deleted", INITIAL_SYNC_COMPLETE: "synced"}

Ending = Literal["ended", "unavailable", "too_slow", "refused", "undecodable"]
_ENDINGS: Mapping[grpc.StatusCode, Ending] = {
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.CANCELLED: "unavailable",
    grpc.StatusCode.INTERNAL: "unavailable",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "too_slow",
}
Json = Mapping[str, Any]
PodName = tuple[str, str]  # namespace and name


class PushedPod(NamedTuple):
    """A pod as the stream reported it last. ``containers`` are those of gpu.allocations that its status names.
    ``event_number`` is that of the event with which it began or ended, counted from the start of this process."""

    name: PodName
    uid: str
    ended: bool
    containers: tuple[Json, ...]
    event_number: int


def decode_pod(pod: Pod, *, deleted: bool, prefixes: tuple[str, ...], event_number: int) -> PushedPod:
    name, uid = (pod.metadata.namespace, pod.metadata.name), pod.metadata.uid
    ended = deleted or pod.status.phase in _ENDED_PHASES
    containers: list[Json] = []
    for container in () if ended else pod.status.container_statuses:
        for status in container.allocated_resources_status:
            ids = dict.fromkeys(resource.resource_id for resource in status.resources if resource.resource_id)
            if ids and status.name.startswith(prefixes):
                row = {"namespace": name[0], "pod": name[1], "container": container.name, "resource": status.name}
                containers.append({**row, "device_ids": list(ids), **_uid(uid)})
    return PushedPod(name, uid, ended, tuple(containers), event_number)


def merge_pods(listed: Sequence[Json], events_at_call: int, pods: Collection[PushedPod]) -> list[Json]:
    """The containers that hold devices, according to the kubelet's pod resources (``listed``) and its pods.

    ``events_at_call`` is the number of the last event before the pod resources were read. A pod that has ended holds
    nothing, even if it is listed. A listed pod gets its uid, unless the list is older than the pod: then the listed one
    is another pod of that name. A pod that is not listed yet holds the devices that its status names. A listed pod
    without any event stays as it is.
    """
    live_by_name: dict[PodName, PushedPod] = {pod.name: pod for pod in pods if not pod.ended}
    ended_names = {pod.name for pod in pods if pod.ended}
    rows: list[Json] = []
    for row in listed:
        name = (row["namespace"], row["pod"])
        live_pod = live_by_name.get(name)
        if live_pod is None and name not in ended_names:
            rows.append(row)
        elif live_pod is not None and (live_pod.event_number <= events_at_call or name not in ended_names):
            rows.append({**row, **_uid(live_pod.uid)})
    listed_keys = set(map(container_key, rows))
    return rows + [
        row for pod in live_by_name.values() for row in pod.containers if container_key(row) not in listed_keys
    ]


def container_key(row: Json) -> tuple[Any, ...]:
    """What identifies a row of containers: the container, and the resource of its devices."""
    return (row["namespace"], row["pod"], row["container"], row.get("resource"))


def _uid(uid: str) -> dict[str, str]:
    return {"pod_uid": uid} if uid and len(uid) != _STATIC_UID_LENGTH else {}


class PodWatch:
    """Watches the pods of one kubelet on ``socket``. Only resources whose name begins with one of ``prefixes`` count.
    ``changed`` is called after each change."""

    def __init__(
        self, socket: Path, instruments: Instruments, *, prefixes: tuple[str, ...], changed: Callable[[], None]
    ) -> None:
        self._socket, self._instruments, self._prefixes, self._changed = socket, instruments, prefixes, changed
        self._pods: dict[str, PushedPod] = {}
        self._synced = False
        self._logged: str | None = None
        self.event_count = 0

    @property
    def pods(self) -> Collection[PushedPod]:
        """The pods, if the stream has sent its complete list; else none."""
        return self._pods.values() if self._synced else ()

    def forget(self, listed: Collection[PodName], events_at_call: int) -> None:
        """Forget the pods that ended before the pod resources were read and are not listed any more. If the name of
        such a pod is listed, it is that of another pod, which lives."""
        known = [pod for pod in self.pods if pod.event_number <= events_at_call]
        live_names = {pod.name for pod in known if not pod.ended}
        for pod in known:
            if pod.ended and (pod.name not in listed or pod.name in live_names):
                del self._pods[pod.uid]

    async def run(self) -> None:
        """Watch until it is cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            identity = self._identity()
            if identity is None:
                self._log_state("absent", "the socket is not there")
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            result, reason = await self._watch()
            retry_s = FIRST_RETRY_S if self._synced else min(2 * retry_s, LONGEST_RETRY_S)
            self._synced = False
            self._pods.clear()
            self._instruments.gauge(names.PODS_WATCHED).set(0)
            self._instruments.counter(names.POD_WATCHES, result).inc()
            self._log_state(result, reason)
            if result != "refused":
                await asyncio.sleep(retry_s)
                continue
            for _ in range(round(REFUSED_AGAIN_S / LOOK_AGAIN_S)):
                await asyncio.sleep(LOOK_AGAIN_S)
                if self._identity() != identity:  # the kubelet was restarted, and may not refuse any more
                    break

    async def _watch(self) -> tuple[Ending, str]:
        """Open a stream, and handle its events until it ends; returns how it ended, and a text for people."""
        limit = ("grpc.max_receive_message_length", LARGEST_EVENT_BYTES)
        async with grpc.aio.insecure_channel(f"unix:{quote(str(self._socket))}", [limit]) as channel:
            watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            watch = channel.unary_stream("/v1alpha1.Pods/WatchPods")
            try:
                async for value in watch(b""):
                    self._handle(WatchPodsEvent.FromString(value))
            except grpc.aio.AioRpcError as error:
                code = error.code()
                return _ENDINGS.get(code, "refused"), f"{code.name}: {error.details()}"[:_MAX_REASON_CHARS]
            except DecodeError as error:
                return "undecodable", str(error)
        return "ended", "the kubelet ended it"

    def _handle(self, event: WatchPodsEvent) -> None:
        """Handle an event. A pod of the first complete list gets the event number 0, as if it was always known."""
        if event.type not in _TYPES:
            return
        self._instruments.counter(names.POD_EVENTS, _TYPES[event.type]).inc()
        self.event_count += 1
        if event.type == INITIAL_SYNC_COMPLETE:
            self._synced = True
            self._instruments.gauge(names.PODS_WATCHED).set(1)
            self._log_state("synced", "")
            self._changed()
            return
        if not event.pod.metadata.uid:
            raise DecodeError("a pod without a uid")
        event_number, previous = self.event_count if self._synced else 0, self._pods.get(event.pod.metadata.uid)
        pod = decode_pod(event.pod, deleted=event.type == DELETED, prefixes=self._prefixes, event_number=event_number)
        if previous is not None and previous.ended == pod.ended:
            pod = pod._replace(event_number=previous.event_number)
        self._pods[pod.uid] = pod
        if self._synced and pod != previous:
            self._changed()

    def _identity(self) -> tuple[int, ...] | None:
        """What identifies the socket, to notice a restart of the kubelet; None if there is no socket."""
        try:
            status = self._socket.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def _log_state(self, state: str, reason: str) -> None:
        """Log whether pods are pushed, if that has changed."""
        state = state if state in ("synced", "absent") else "broken"
        if state == self._logged:
            return
        self._logged = state
        if state == "synced":
            log.info("the kubelet at %s says when pods begin and end", self._socket)
        elif state == "absent":
            log.info(
                "the kubelet has no Pods API at %s (%s): its pod resources are asked at each tick, as ever",
                self._socket,
                reason,
            )
        else:
            log.info(
                "the kubelet's Pods API at %s does not say when pods begin and end (%s): its pod resources are asked at"
                " each tick, as without it",
                self._socket,
                reason,
            )
