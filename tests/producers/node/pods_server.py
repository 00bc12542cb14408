"""A fake of the kubelet's Pods API: a gRPC server that pushes the pods that a test sets, in its own threads."""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from producers.node.pods_pb2 import (
    ADDED,
    DELETED,
    INITIAL_SYNC_COMPLETE,
    MODIFIED,
    ContainerStatus,
    EventType,
    ObjectMeta,
    Pod,
    PodStatus,
    ResourceHealth,
    ResourceStatus,
    WatchPodsEvent,
)

_END = object()


def pushed_pod(
    name: str,
    uid: str,
    *,
    namespace: str = "ml-team",
    phase: str = "Running",
    devices: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> Pod:
    """A pod as the kubelet pushes it. ``devices`` are the device ids in its status, by container and resource."""
    containers = [
        ContainerStatus(
            name=container,
            allocated_resources_status=[
                ResourceStatus(name=resource, resources=[ResourceHealth(resource_id=device_id) for device_id in ids])
                for resource, ids in resources.items()
            ],
        )
        for container, resources in (devices or {}).items()
    ]
    status = PodStatus(phase=phase, container_statuses=containers)
    return Pod(metadata=ObjectMeta(name=name, namespace=namespace, uid=uid), status=status)


class PodsServer:
    """A kubelet's Pods API on ``path``, with the pods that a test adds, changes and deletes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pods: dict[str, Pod] = {}
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.syncs = True
        self.watches = 0
        self._streams: list[queue.SimpleQueue[Any]] = []
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Start serving; a socket that another server left behind is replaced."""
        self._server = grpc.server(ThreadPoolExecutor(4))
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(self._watch)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1alpha1.Pods", {"WatchPods": method}),)
        )
        self._server.add_insecure_port(f"unix:{quote(str(self.path))}")
        self._server.start()

    def stop(self) -> None:
        """Stop at once: streams break, and the socket is removed."""
        if self._server is not None:
            self.end_streams()
            self._server.stop(0).wait()
            self._server = None

    def end_streams(self) -> None:
        """End every stream, as a kubelet does to a reader that is too slow."""
        with self._lock:
            for stream in self._streams:
                stream.put(_END)
            self._streams.clear()

    def push(self, pod: Pod) -> None:
        """Push a pod that is new, or has changed."""
        with self._lock:
            exists = pod.metadata.uid in self.pods
            self.pods[pod.metadata.uid] = pod
            self._send(MODIFIED if exists else ADDED, pod)

    def delete(self, uid: str) -> None:
        """Delete a pod; only its metadata is pushed."""
        with self._lock:
            metadata = self.pods.pop(uid).metadata
            self._send(DELETED, Pod(metadata=metadata))

    def say(self, value: bytes) -> None:
        """Push raw bytes, which may be no event."""
        with self._lock:
            for stream in self._streams:
                stream.put(value)

    def _send(self, kind: EventType, pod: Pod) -> None:
        for stream in self._streams:
            stream.put(WatchPodsEvent(type=kind, pod=pod).SerializeToString())

    def _watch(self, _: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        stream: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self.watches += 1
            if self.error is not None:
                context.abort(*self.error)
            for pod in self.pods.values():
                stream.put(WatchPodsEvent(type=ADDED, pod=pod).SerializeToString())
            if self.syncs:
                stream.put(WatchPodsEvent(type=INITIAL_SYNC_COMPLETE).SerializeToString())
            self._streams.append(stream)
        context.add_callback(lambda: stream.put(_END))
        while (value := stream.get()) is not _END:
            yield value


@contextlib.contextmanager
def pushing(path: Path) -> Iterator[PodsServer]:
    """A server that runs inside the ``with`` block."""
    server = PodsServer(path)
    server.start()
    try:
        yield server
    finally:
        server.stop()
