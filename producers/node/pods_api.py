"""The kubelet's Pods API: the pods of this node, pushed as they begin, change and end.

In: the stream of ``/v1alpha1.Pods/WatchPods`` on a unix socket of its own, from Kubernetes 1.37 on. Out: which pod has
each name, with its uid; which have ended; and what their statuses say of their devices.
State: the pods of the stream, from its first complete list on.
On failure: a stream that breaks is opened again. Until it has a complete list, no pods are known from here, and only
the kubelet's pod resources count, which are asked at every tick. If the kubelet does not have this API, or has it
switched off, it is asked again once a minute, and at once after its restart.

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
LOOK_AGAIN_S = 1.0  # how often the socket is looked for: it comes with an upgrade of the kubelet
REFUSED_AGAIN_S = 60.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 5.0  # after a stream that broke
_LONGEST_REASON = 300
_STATIC_UID_LENGTH = 32  # of a static pod the kubelet has another uid than the API server
_OVER = ("Succeeded", "Failed")
_TYPES = {ADDED: "added", MODIFIED: "modified", DELETED: "deleted", INITIAL_SYNC_COMPLETE: "synced"}

Ending = Literal["ended", "unavailable", "too_slow", "refused", "undecodable"]
_ENDINGS: Mapping[grpc.StatusCode, Ending] = {
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.CANCELLED: "unavailable",
    grpc.StatusCode.INTERNAL: "unavailable",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "too_slow",
}
JsonDict = Mapping[str, Any]
PodName = tuple[str, str]  # namespace and name


class PushedPod(NamedTuple):
    """A pod as the stream said it last. ``over``: it has ended. ``rows``: the containers of gpu.allocations that its
    status names. ``push``: the number of the event with which it began, or ended, counted from the process's start."""

    name: PodName
    uid: str
    over: bool
    rows: tuple[JsonDict, ...]
    push: int


def pushed(pod: Pod, *, deleted: bool, prefixes: Sequence[str], push: int) -> PushedPod:
    """What an event says of its pod."""
    name, uid = (pod.metadata.namespace, pod.metadata.name), pod.metadata.uid
    over = deleted or pod.status.phase in _OVER
    rows: list[JsonDict] = []
    for container in () if over else pod.status.container_statuses:
        for status in container.allocated_resources_status:
            ids = dict.fromkeys(one.resource_id for one in status.resources if one.resource_id)
            if ids and status.name.startswith(tuple(prefixes)):
                row = {"namespace": name[0], "pod": name[1], "container": container.name, "resource": status.name}
                rows.append({**row, "device_ids": list(ids), **_uid(uid)})
    return PushedPod(name, uid, over, tuple(rows), push)


def held(listed: Sequence[JsonDict], asked: int, pods: Collection[PushedPod]) -> list[JsonDict]:
    """The containers that hold devices, by the kubelet's pod resources (``listed``) and by its pods.

    ``asked`` is the number of the last event before the pod resources were asked. What ended holds nothing, whatever is
    listed. A pod that is listed has its uid, unless it is listed since before it began, when its name was another
    pod's. A pod that is not listed yet holds what its status names. What no event has named stays as it is listed.
    """
    lives: dict[PodName, PushedPod] = {pod.name: pod for pod in pods if not pod.over}
    over = {pod.name for pod in pods if pod.over}
    rows: list[JsonDict] = []
    for row in listed:
        name = (row["namespace"], row["pod"])
        live = lives.get(name)
        if live is None and name not in over:
            rows.append(row)
        elif live is not None and (live.push <= asked or name not in over):
            rows.append({**row, **_uid(live.uid)})
    there = set(map(holder, rows))
    return rows + [row for pod in lives.values() for row in pod.rows if holder(row) not in there]


def holder(row: JsonDict) -> tuple[Any, ...]:
    """Who holds the devices of a row: a container, and the resource that they are of."""
    return (row["namespace"], row["pod"], row["container"], row.get("resource"))


def _uid(uid: str) -> dict[str, str]:
    return {"pod_uid": uid} if uid and len(uid) != _STATIC_UID_LENGTH else {}


class PodWatch:
    """Follows one kubelet's pods, on ``socket``. A resource that begins with one of ``prefixes`` counts; ``changed`` is
    called when something new is known."""

    def __init__(
        self, socket: Path, instruments: Instruments, *, prefixes: Sequence[str], changed: Callable[[], None]
    ) -> None:
        self._socket, self._instruments, self._changed = socket, instruments, changed
        self._prefixes = tuple(prefixes)
        self._pods: dict[str, PushedPod] = {}
        self._synced = False
        self._logged: str | None = None
        self.pushes = 0

    @property
    def pods(self) -> Collection[PushedPod]:
        """The pods by uid, if the stream has said them all; else none."""
        return self._pods.values() if self._synced else ()

    def forget(self, listed: Collection[PodName], asked: int) -> None:
        """Forget the pods that had ended before the pod resources were asked, and are not listed any more."""
        for pod in [pod for pod in self.pods if pod.over and pod.push <= asked and pod.name not in listed]:
            del self._pods[pod.uid]

    async def run(self) -> None:
        """Watch for as long as it runs."""
        retry_s = FIRST_RETRY_S
        while True:
            identity = self._identity()
            if identity is None:
                self._note("absent", "the socket is not there")
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            result, reason = await self._watch()
            retry_s = FIRST_RETRY_S if self._synced else min(2 * retry_s, LONGEST_RETRY_S)
            self._synced = False
            self._pods.clear()
            self._instruments.gauge(names.PODS_WATCHED).set(0)
            self._instruments.counter(names.POD_WATCHES, result).inc()
            self._note(result, reason)
            for _ in range(round(REFUSED_AGAIN_S / LOOK_AGAIN_S) if result == "refused" else 1):
                await asyncio.sleep(LOOK_AGAIN_S if result == "refused" else retry_s)
                if self._identity() != identity:  # of a kubelet that has just begun, whatever the last one refused
                    break

    async def _watch(self) -> tuple[Ending, str]:
        """Open a stream, and take its events to its end: how it ended, and in words."""
        limit = ("grpc.max_receive_message_length", LARGEST_EVENT_BYTES)
        async with grpc.aio.insecure_channel(f"unix:{quote(str(self._socket))}", [limit]) as channel:
            watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            watch = channel.unary_stream("/v1alpha1.Pods/WatchPods")
            try:
                async for value in watch(b""):
                    self._take(WatchPodsEvent.FromString(value))
            except grpc.aio.AioRpcError as error:
                code = error.code()
                return _ENDINGS.get(code, "refused"), f"{code.name}: {error.details()}"[:_LONGEST_REASON]
            except DecodeError as error:
                return "undecodable", str(error)
        return "ended", "the kubelet ended it"

    def _take(self, event: WatchPodsEvent) -> None:
        """Take an event. Until the first complete list, a pod counts as known before anything was asked."""
        if event.type not in _TYPES:
            return
        self._instruments.counter(names.POD_EVENTS, _TYPES[event.type]).inc()
        self.pushes += 1
        if event.type == INITIAL_SYNC_COMPLETE:
            self._synced = True
            self._instruments.gauge(names.PODS_WATCHED).set(1)
            self._note("synced", "")
            self._changed()
            return
        if not event.pod.metadata.uid:
            raise DecodeError("a pod without a uid")
        push, known = self.pushes if self._synced else 0, self._pods.get(event.pod.metadata.uid)
        pod = pushed(event.pod, deleted=event.type == DELETED, prefixes=self._prefixes, push=push)
        if known is not None and known.over == pod.over:
            pod = pod._replace(push=known.push)
        self._pods[pod.uid] = pod
        if self._synced and pod != known:
            self._changed()

    def _identity(self) -> tuple[int, ...] | None:
        """Which socket is there; None: there is none."""
        try:
            found = self._socket.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def _note(self, state: str, reason: str) -> None:
        """Log whether pods are pushed, when that has changed."""
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
