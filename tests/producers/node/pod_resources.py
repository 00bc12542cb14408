"""A fake of the kubelet's pod-resources socket: a gRPC server whose answers a test sets, in its own threads.

``python -m tests.producers.node.pod_resources SOCKET N`` serves N containers until it is killed.
"""

import contextlib
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from producers.node.podresources_pb2 import (
    ClaimResource,
    ContainerDevices,
    ContainerResources,
    DynamicResource,
    ListPodResourcesResponse,
    PodResources,
)

GPU = "nvidia.com/gpu"
GPU_A, GPU_B = "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b", "GPU-1f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"
_LONGEST_S = 60.0


def container(name: str = "main", **device_ids: Sequence[str]) -> ContainerResources:
    """A container with GPUs: ``gpus=["GPU-..."]``; or with any resource: ``**{"nvidia.com/gpu": [...]}``."""
    resources = {GPU if key == "gpus" else key: ids for key, ids in device_ids.items()}
    devices = [ContainerDevices(resource_name=key, device_ids=ids) for key, ids in resources.items()]
    return ContainerResources(name=name, devices=devices)


def claiming(name: str, claim: str, *devices: tuple[str, str, str]) -> ContainerResources:
    """A container with a resource claim; each device is (driver, pool, device)."""
    resources = [ClaimResource(driver_name=d, pool_name=p, device_name=n) for d, p, n in devices]
    dynamic = DynamicResource(claim_name=claim, claim_namespace="ml-team", claim_resources=resources)
    return ContainerResources(name=name, dynamic_resources=[dynamic])


def pod(name: str, *containers: ContainerResources, namespace: str = "ml-team") -> PodResources:
    """A pod, as in a kubelet's answer."""
    return PodResources(name=name, namespace=namespace, containers=containers)


def answer(*pods: PodResources) -> bytes:
    """A kubelet's answer."""
    return ListPodResourcesResponse(pod_resources=pods).SerializeToString()


def pods_on(gpus: Mapping[str, str]) -> bytes:
    """The answer of a node in which each GPU (by id) is held by a pod of one container."""
    return answer(*(pod(name, container(gpus=[gpu])) for gpu, name in gpus.items()))


INVALID_UTF8 = pods_on({GPU_A: "bert-0"}).replace(b"bert-0", b"ber\xff-0")
"""An answer with a name that is no valid UTF-8."""


def many(count: int, namespace: str = "ml-team") -> bytes:
    """The answer of a node with that many containers, each with a GPU, some other devices and a cpu or two."""
    return answer(
        *(
            pod(
                f"bert-finetune-{i:05}",
                container("pytorch", **{GPU: [f"GPU-0f12ab34-5c6d-7e8f-9a0b-{i:012x}"], "rdma/hca": [f"mlx5_{i}"]}),
                namespace=namespace,
            )
            for i in range(count)
        )
    )


class Server:
    """A kubelet on ``path``. Its attributes may be changed at any time, and apply to later calls."""

    def __init__(self, path: Path, reply: bytes = b"") -> None:
        self.path = path
        self.reply = reply
        self.delay_s = 0.0
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.calls = 0
        self._called = threading.Condition()
        self._server: grpc.Server | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start serving; a socket that another server left behind is replaced."""
        self._stopping.clear()
        self._server = grpc.server(ThreadPoolExecutor(4))
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._list)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": method}),)
        )
        self._server.add_insecure_port(f"unix:{quote(str(self.path))}")
        self._server.start()

    def stop(self) -> None:
        """Stop at once: connections break, and the socket is removed."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def release(self) -> None:
        """Answer now the calls that wait for the end of a delay."""
        self.delay_s = 0.0
        self._stopping.set()
        self._stopping.clear()

    def called(self, times: int) -> None:
        """Wait until there were ``times`` calls, including unanswered ones."""
        with self._called:
            assert self._called.wait_for(lambda: self.calls >= times, _LONGEST_S)

    def fail(self, code: grpc.StatusCode | None, text: str = "") -> None:
        """Answer with this error from now on; None: answer with the reply again."""
        self.error = None if code is None else (code, text)

    def _list(self, _: Any, context: grpc.ServicerContext) -> bytes:
        with self._called:
            self.calls += 1
            self._called.notify_all()
        if self.delay_s:
            self._stopping.wait(self.delay_s)
        if self.error is not None:
            context.abort(*self.error)
        return self.reply


@contextlib.contextmanager
def serving(path: Path, reply: bytes = b"") -> Iterator[Server]:
    """A server that runs inside the ``with`` block."""
    server = Server(path, reply)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def listening(path: Path, greeting: bytes | None) -> Iterator[None]:
    """A listener on ``path`` that is no gRPC server: it sends ``greeting`` to each client; None: it never accepts."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as accepted:
        listener.bind(str(path))
        listener.listen(64)

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = accepted.enter_context(listener.accept()[0])
                    with contextlib.suppress(OSError):
                        connection.sendall(greeting or b"")

        thread = threading.Thread(target=greet, daemon=True)
        if greeting is not None:
            thread.start()
        try:
            yield
        finally:
            path.unlink()
            listener.shutdown(socket.SHUT_RDWR)
            if greeting is not None:
                thread.join()


def dead(path: Path) -> None:
    """A socket file whose server has ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def main(path: str, count: str) -> None:
    """Serve until killed, and print a line at the start."""
    Server(Path(path), many(int(count))).start()
    print("serving", flush=True)  # noqa: T201 - what the parent waits for
    for _ in itertools.count():
        time.sleep(_LONGEST_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
