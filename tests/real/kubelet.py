"""A node: a real kubelet with containerd, runc and a device plugin, so that pods have containers that run.

Only root can have one. Its processes have a mount namespace of their own, in which ``/var/lib/kubelet`` is a folder of
the test, and its pods' control groups are below one of the test, so that a kubelet of this machine is left alone.

    with ApiServer(tmp_path / "api") as api, Node(tmp_path / "node", api, GPUS, NVML) as node:
        node.run("train-0", gpus=1)
        node.listed()  # the devices of each pod
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tarfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc

from producers.node.podresources_pb2 import ListPodResourcesResponse
from tests.eventually import eventually_sync
from tests.real.kubernetes import ADMIN, ApiServer, Json
from tests.real.process import HttpServer, Server, listens
from tests.real.servers import Missing, real_dir
from tests.sinks.remote_write.wire import compiled

KUBELET = "kubelet-1.36.3"
NAME = "gpu-node-1"
GPU = "nvidia.com/gpu"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
IMAGE = "localhost/sleeper:1"
SLEEPER = "trap 'exit 0' TERM; while :; do sleep 1 & wait; done"
"""What a container does: it waits until it is stopped."""

INSTALLED = "/opt/gpustream"
"""Where gpustream is in its image."""

BRIDGE, HOST = "gpustream0", "10.213.0.1"
"""What connects the pods, and this machine's address on it."""

NVIDIA_DEVICE_PLUGIN = "NVIDIA_DEVICE_PLUGIN"
"""The environment variable with the path of NVIDIA's device plugin, which is then tried in place of the tests' own."""

SERVICE = "10.0.0.1"
"""The first address of the range that the API server is told for services."""

_PLUGINS = Path("/var/lib/kubelet/device-plugins")
"""Where the kubelet looks for device plugins, whatever its own folder is."""

_HIERARCHIES = Path("/sys/fs/cgroup")
"""Where control groups are: one hierarchy, or, with version 1, some in folders of it."""


def find_kubelet() -> Path:
    """The folder of the node's programs; raises :class:`Missing`."""
    folder = real_dir() / KUBELET
    if not shutil.which(str(folder / "kubelet")):
        raise Missing(f"no kubelet in {folder}: run `make kubelet`")
    if os.geteuid() != 0:
        raise Missing("a kubelet needs root")
    return folder


def sleeper(path: Path) -> Path:
    """An image with a shell that waits: for the pods that use GPUs, and what keeps a pod's namespaces."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Missing("no busybox on PATH, statically linked")
    root = path.with_suffix(".root")
    for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy(busybox, root / "bin" / "sh")
    return archive(IMAGE, path, {"Entrypoint": ["/bin/sh", "-c", SLEEPER]}, ["--directory", str(root), "."])


def gpustream(path: Path, packages: Path) -> Path:
    """An image with this Python, and a folder of what is installed for it."""
    prefix = Path(sys.base_prefix)
    binaries = [prefix / "bin" / Path(sys.executable).resolve().name]
    binaries += [*prefix.glob("lib/python*/lib-dynload/*.so"), *packages.rglob("*.so"), *packages.rglob("*.so.*")]
    linked = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    found = {Path(word) for word in linked.split() if word.startswith("/")}
    libraries = [
        str(path) for path in found if path.is_file() and packages not in path.parents and path not in binaries
    ]
    config = {
        "Entrypoint": [str(binaries[0]), "-m", "gpustream"],
        "Env": [f"PYTHONPATH={INSTALLED}", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"],
        "User": "65532:65532",
        "WorkingDir": "/tmp",  # noqa: S108 - as the Dockerfile says
    }
    files = [str(binaries[0]), *map(str, prefix.glob("lib/python*")), str(packages), *libraries]
    left_out = [f"--exclude={prefix}/lib/{pattern}" for pattern in ("*/site-packages", "*/test", "*/config-*")]
    renamed = f"--transform=s,^{packages},{INSTALLED},"
    return archive("docker.io/library/gpustream:0.1.0", path, config, ["--dereference", *left_out, renamed, *files])


def archive(name: str, path: Path, config: Json, files: Sequence[str]) -> Path:
    """Write an OCI archive of an image with one layer; ``files``: what tar is to put into it."""
    layer = path.with_suffix(".layer")
    subprocess.run(["tar", "--create", "--file", layer, "--absolute-names", *files], check=True)
    blobs = {"layer": layer.read_bytes()}
    kinds = "application/vnd.oci.image"

    def described(blob: str, kind: str) -> Json:
        digest = f"sha256:{hashlib.sha256(blobs[blob]).hexdigest()}"
        return {"mediaType": f"{kinds}.{kind}", "digest": digest, "size": len(blobs[blob])}

    platform = {"architecture": "amd64", "os": "linux"}
    root = {"type": "layers", "diff_ids": [described("layer", "")["digest"]]}
    blobs["config"] = json.dumps({**platform, "config": config, "rootfs": root}).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kinds}.manifest.v1+json",
        "config": described("config", "config.v1+json"),
        "layers": [described("layer", "layer.v1.tar")],
    }
    blobs["manifest"] = json.dumps(manifest).encode()
    named = {**described("manifest", "manifest.v1+json"), "annotations": {"io.containerd.image.name": name}}
    contents = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [named]}).encode(),
    } | {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in blobs.values()}
    with tarfile.open(path, "w") as packed:
        for member, content in contents.items():
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    layer.unlink()
    return path


class Namespace:
    """A mount namespace in which ``/var/lib/kubelet`` is a folder of the test. What is mounted in it ends with it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        theirs = _PLUGINS.parent
        theirs.mkdir(parents=True, exist_ok=True)
        mount = f"mount --make-rslave / && mount --bind {folder} {theirs} && mount --make-rshared {theirs}"
        holding = f"{mount} && echo ready && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", holding], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"

    def command(self, *command: str | Path) -> list[str]:
        """A command in the namespace."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", *map(str, command)]

    def close(self) -> None:
        """Let go of it."""
        self._holder.kill()
        self._holder.communicate()


class Containerd(Server):
    """containerd, with runc, and the image of the pods' containers."""

    def __init__(self, directory: Path, namespace: Namespace) -> None:
        super().__init__(directory, ports=0, environment={"PATH": f"{find_kubelet()}:{os.environ['PATH']}"})
        self.namespace = namespace
        self.socket = directory / "containerd.sock"

    def prepare(self) -> None:
        """Write its configuration, and that of the pods' network."""
        programs = find_kubelet()
        address: Json = {
            "type": "host-local",
            "dataDir": f"{self.directory}/addresses",
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        address["ranges"] = [[{"subnet": f"{HOST.rpartition('.')[0]}.0/24", "gateway": HOST}]]
        bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": address}
        (self.directory / "networks").mkdir()
        (self.directory / "networks" / "pods.conflist").write_text(
            json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]})
        )
        cri = "[plugins.'io.containerd.cri.v1"
        (self.directory / "config.toml").write_text(
            f"""version = 3
root = '{self.directory}/root'
state = '{self.directory}/state'
[grpc]
address = '{self.socket}'
[plugins.'io.containerd.internal.v1.opt']
path = '{self.directory}/opt'
{cri}.runtime']
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
{cri}.images'.pinned_images]
sandbox = '{IMAGE}'
{cri}.runtime'.cni]
bin_dirs = ['{programs}']
conf_dir = '{self.directory}/networks'
{cri}.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
runtime_path = '{programs}/containerd-shim-runc-v2'
{cri}.runtime'.containerd.runtimes.runc.options]
BinaryName = '{programs}/runc'
"""
        )

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return self.namespace.command(find_kubelet() / "containerd", "--config", self.directory / "config.toml")

    def ready(self) -> bool:
        """Whether it answers."""
        return self.ctr("version").returncode == 0

    def ctr(self, *command: str | Path) -> "subprocess.CompletedProcess[str]":
        """Ask it."""
        asked = self.namespace.command(
            find_kubelet() / "ctr", "--address", self.socket, "--namespace", "k8s.io", *command
        )
        return subprocess.run(asked, capture_output=True, text=True, check=False)

    def add(self, archive: Path) -> None:
        """Add the image of an archive."""
        done = self.ctr("images", "import", archive)
        assert done.returncode == 0, done.stderr


class Kubelet(HttpServer):
    """The kubelet of a node."""

    health = "/healthz"
    stop_timeout_s = 10.0

    def __init__(self, directory: Path, api: ApiServer, containerd: Containerd, cgroup: str, *gates: str) -> None:
        super().__init__(directory, ports=2)
        self.api, self.containerd, self.cgroup, self.gates = api, containerd, cgroup, gates

    def prepare(self) -> None:
        """Write its configuration."""
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self.ports[1].number,
            "healthzPort": self.ports[0].number,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.containerd.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "featureGates": dict.fromkeys(self.gates, True),
            "imageGCHighThresholdPercent": 100,
            "evictionHard": dict.fromkeys(("memory.available", "nodefs.available", "nodefs.inodesFree"), "0%"),
            "nodeStatusUpdateFrequency": "2s",
            "registerWithTaints": [],
            "resolvConf": "",
            "clusterDNS": [HOST],
            "podLogsDir": str(self.directory / "logs"),
        }
        (self.directory / "config.json").write_text(json.dumps(config))

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return self.containerd.namespace.command(
            find_kubelet() / "kubelet",
            f"--config={self.directory / 'config.json'}",
            f"--kubeconfig={self.api.kubeconfig(ADMIN)}",
            f"--hostname-override={NAME}",
            "--node-labels=nvidia.com/gpu.present=true",
        )


class _TcpServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


class Forwarder:
    """Forwards the connections to an address, which pods reach, to a port of 127.0.0.1."""

    def __init__(self, target: int, address: tuple[str, int] = ("", 0)) -> None:
        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", target)) as server:
                    back = threading.Thread(target=_pump, args=(server, self.request))
                    back.start()
                    _pump(self.request, server)
                    back.join()

        self._server = _TcpServer(address, Connection)
        self.url = f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def service_address(api: ApiServer) -> Iterator[None]:
    """The address of the API server's service, as pods know it: what kube-proxy would forward."""
    subprocess.run(["ip", "address", "add", f"{SERVICE}/32", "dev", "lo"], check=True)
    try:
        with Forwarder(api.ports[0].number, (SERVICE, 443)):
            yield
    finally:
        subprocess.run(["ip", "address", "delete", f"{SERVICE}/32", "dev", "lo"], check=True)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Scheduler(Server):
    """The scheduler: pods find the node by themselves."""

    def __init__(self, directory: Path, api: ApiServer) -> None:
        super().__init__(directory)
        self.api = api

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return [
            str(find_kubelet() / "kube-scheduler"),
            f"--kubeconfig={self.api.kubeconfig(ADMIN)}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.ports[0].number}",
            "--leader-elect=false",
        ]

    def ready(self) -> bool:
        """Whether it serves."""
        return listens(self.ports[0].number)


def _messages() -> Any:
    return compiled(Path(__file__).with_name("plugins.proto"))


def _serve(path: Path, services: Mapping[str, Mapping[str, tuple[Callable[[Any], Any], Any]]]) -> grpc.Server:
    """A gRPC server: by service and method, what answers a request, and the request's message. What returns an iterator
    is a stream."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    for service, methods in services.items():
        handlers: dict[str, Any] = {}
        for method, (answer, request) in methods.items():
            kind = grpc.unary_stream_rpc_method_handler if method == STREAM else grpc.unary_unary_rpc_method_handler
            handlers[method] = kind(
                lambda message, _context, answer=answer: answer(message),
                request.FromString,
                lambda message: message.SerializeToString(),
            )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    path.parent.mkdir(parents=True, exist_ok=True)
    server.add_insecure_port(f"unix://{path}")
    server.start()
    return server


STREAM = "ListAndWatch"


class DevicePlugin:
    """A device plugin in this process: the devices of one resource, which are all well."""

    def __init__(self, plugins: Path, resource: str, devices: Sequence[str]) -> None:
        self._plugins, self._resource, self._devices = plugins, resource, devices
        self._endpoint = f"{resource.replace('/', '-')}.sock"
        self._closed = threading.Event()
        self._server: grpc.Server | None = None

    def _list(self) -> Iterator[Any]:
        """All devices; the stream is open until the plugin ends."""
        messages = _messages()
        listed = [messages.Device(ID=device, health="Healthy") for device in self._devices]
        yield messages.ListAndWatchResponse(devices=listed)
        self._closed.wait()

    def _allocate(self, request: Any) -> Any:
        messages = _messages()
        responses = [
            messages.ContainerAllocateResponse(envs={VISIBLE: ",".join(asked.devices_ids)})
            for asked in request.container_requests
        ]
        return messages.AllocateResponse(container_responses=responses)

    def register(self) -> None:
        """Tell the kubelet of it. A kubelet that starts again has to be told again."""
        messages, its_socket = _messages(), self._plugins / "kubelet.sock"
        eventually_sync(its_socket.exists, "the kubelet has emptied the folder, and takes plugins")
        methods = {
            "GetDevicePluginOptions": (lambda _: messages.DevicePluginOptions(), messages.Empty),
            STREAM: (lambda _: self._list(), messages.Empty),
            "Allocate": (self._allocate, messages.AllocateRequest),
        }
        self._server = _serve(self._plugins / self._endpoint, {"v1beta1.DevicePlugin": methods})
        request = messages.RegisterRequest(version="v1beta1", endpoint=self._endpoint, resource_name=self._resource)
        with grpc.insecure_channel(f"unix://{its_socket}") as channel:
            register: Any = channel.unary_unary("/v1beta1.Registration/Register")
            register(request.SerializeToString(), wait_for_ready=True, timeout=30)

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()
        if self._server is not None:
            self._server.stop(None).wait()


class NvidiaDevicePlugin(Server):
    """NVIDIA's device plugin: the GPUs of an NVML that ``environment`` says where to find. It registers by itself."""

    def __init__(self, directory: Path, namespace: Namespace, environment: Mapping[str, str]) -> None:
        super().__init__(directory, ports=0, environment=environment)
        self.namespace = namespace

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return self.namespace.command(os.environ[NVIDIA_DEVICE_PLUGIN])

    def ready(self) -> bool:
        """Whether the kubelet has it."""
        return "Registered device plugin" in self.log_tail()

    def register(self) -> None:
        """Start it."""
        self.start()


class DraDriver:
    """A driver for dynamic resource allocation in this process: each claim has the device that the scheduler chose.

    ``folder`` is the kubelet's; ``chosen`` returns the pool and the device of a claim, by namespace and name.
    """

    def __init__(self, folder: Path, name: str, chosen: Callable[[str, str], tuple[str, str]]) -> None:
        self._folder, self._name, self._chosen = folder, name, chosen
        self._servers: list[grpc.Server] = []

    def __enter__(self) -> Self:
        messages = _messages()
        inside = _PLUGINS.parent / "plugins" / self._name / "dra.sock"
        info = messages.PluginInfo(
            type="DRAPlugin", name=self._name, endpoint=str(inside), supported_versions=["v1.DRAPlugin"]
        )
        registration = {
            "GetInfo": (lambda _: info, messages.InfoRequest),
            "NotifyRegistrationStatus": (
                lambda _: messages.RegistrationStatusResponse(),
                messages.RegistrationStatus,
            ),
        }
        methods = {
            "NodePrepareResources": (self._prepare, messages.ClaimsRequest),
            "NodeUnprepareResources": (
                lambda request: messages.ClaimsResponse(
                    claims={claim.uid: messages.PreparedClaim() for claim in request.claims}
                ),
                messages.ClaimsRequest,
            ),
        }
        service = {"k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin": methods}
        self._servers.append(_serve(self._folder / "plugins" / self._name / "dra.sock", service))
        its_socket = self._folder / "plugins_registry" / f"{self._name}-reg.sock"
        self._servers.append(_serve(its_socket, {"pluginregistration.Registration": registration}))
        return self

    def _prepare(self, request: Any) -> Any:
        messages, claims = _messages(), {}
        for claim in request.claims:
            pool, device = self._chosen(claim.namespace, claim.name)
            claims[claim.uid] = messages.PreparedClaim(
                devices=[messages.PreparedDevice(request_names=["gpu"], pool_name=pool, device_name=device)]
            )
        return messages.ClaimsResponse(claims=claims)

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.stop(None).wait()


class Node:
    """A node of a cluster with one kubelet, on which pods run. ``gpus``: the ids of its whole GPUs; ``nvml``: what a
    process needs in its environment to find them."""

    def __init__(
        self, directory: Path, api: ApiServer, gpus: Sequence[str], nvml: Mapping[str, str], *gates: str
    ) -> None:
        self.api, self.folder, self._nvml = api, directory / "kubelet", nvml
        self._cgroup = f"/gpustream-{uuid.uuid4().hex[:8]}"
        self._namespace = Namespace(self.folder)
        self.containerd = Containerd(directory / "containerd", self._namespace)
        self.kubelet = Kubelet(directory / "node", api, self.containerd, self._cgroup, *gates)
        self._gpus = gpus
        self.plugin = self._device_plugin()

    @property
    def pod_resources(self) -> Path:
        """The socket on which the kubelet says which container has which devices."""
        return self.folder / "pod-resources" / "kubelet.sock"

    @property
    def pods_api(self) -> Path:
        """The socket on which it says at once that a pod begins or ends."""
        return self.folder / "pods-api" / "pods-api.sock"

    def __enter__(self) -> Self:
        try:
            for group in _groups(self._cgroup):
                group.mkdir()
            self.containerd.start()
            self.containerd.add(sleeper(self.folder.parent / "sleeper.tar"))
            self.kubelet.start()
            self.plugin.register()
            eventually_sync(
                lambda: self.status().get("capacity", {}).get(GPU) == str(len(self._gpus)), "the node has its GPUs"
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> Json:
        """What the node says of itself."""
        answer = self.api.request("GET", f"/api/v1/nodes/{NAME}")
        status: Json = answer.body["status"] if answer.status == 200 else {}
        return status

    def run(self, name: str, *, gpus: int = 0, namespace: str = "ml", command: str = SLEEPER) -> str:
        """Create a pod of one container, which runs a shell command; returns its uid."""
        container: Json = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "args": [command]}
        container |= {"command": ["/bin/sh", "-c"], "resources": {"limits": {GPU: str(gpus)}} if gpus else {}}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "nodeName": NAME,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 2,
                "containers": [container],
            },
        }
        return str(self.api.create(pod)["metadata"]["uid"])

    def delete(self, name: str, namespace: str = "ml") -> None:
        """Delete a pod, as a user does: the kubelet ends it in order."""
        self.api.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def listed(self) -> dict[str, list[str]]:
        """The devices of each pod, as the kubelet's pod resources say."""
        with grpc.insecure_channel(f"unix://{self.pod_resources}") as channel:
            ask: Any = channel.unary_unary("/v1.PodResourcesLister/List")
            answer = ask(b"", timeout=30, wait_for_ready=True)
        return {
            pod.name: [
                device for container in pod.containers for of_one in container.devices for device in of_one.device_ids
            ]
            for pod in ListPodResourcesResponse.FromString(answer).pod_resources
        }

    def processes(self, pod_uid: str) -> dict[int, list[str]]:
        """The processes of a pod's containers, and the devices that the device plugin gave each."""
        found: dict[int, list[str]] = {}
        for folder, _, _ in os.walk(_groups(self._cgroup)[0]):
            in_pod = f"/pod{pod_uid}/" in folder
            for pid in _pids(Path(folder)) if in_pod else ():
                with contextlib.suppress(OSError):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                    devices = [line for line in environment if line.startswith(f"{VISIBLE}=")]
                    found[pid] = devices[0].partition("=")[2].split(",") if devices else []
        return found

    def restart_kubelet(self) -> None:
        """Start the kubelet again, as an upgrade of it does: containers run on, and plugins register again."""
        self.plugin.close()
        self.kubelet.stop()
        (self.folder / "device-plugins" / "kubelet.sock").unlink(missing_ok=True)
        self.kubelet.start()
        self.plugin = self._device_plugin()
        self.plugin.register()

    def _device_plugin(self) -> DevicePlugin | NvidiaDevicePlugin:
        if NVIDIA_DEVICE_PLUGIN in os.environ:
            return NvidiaDevicePlugin(self.folder.parent / "device-plugin", self._namespace, self._nvml)
        return DevicePlugin(self.folder / "device-plugins", GPU, self._gpus)

    def close(self) -> None:
        """End the kubelet, every container, and all that is mounted."""
        self.plugin.close()
        self.kubelet.close()
        for shim in subprocess.run(
            ["pgrep", "-f", f"containerd-shim-runc-v2 .*{self.containerd.socket}"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(shim), signal.SIGKILL)
        self.containerd.close()
        for group in _groups(self._cgroup):
            _end(group)
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)
        self._namespace.close()


def _groups(name: str) -> list[Path]:
    """A control group in each hierarchy of this machine."""
    hierarchies = [_HIERARCHIES] if (_HIERARCHIES / "cgroup.procs").exists() else list(_HIERARCHIES.iterdir())
    return [hierarchy / name.lstrip("/") for hierarchy in hierarchies if (hierarchy / "cgroup.procs").exists()]


def _pids(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:  # it has just been removed
        return []


def _end(group: Path) -> None:
    """Kill what is in a control group, and remove it."""

    def removed() -> bool:
        folders = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
        for pid in {pid for folder in folders for pid in _pids(folder)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in folders:
            with contextlib.suppress(OSError):  # a process in it is not quite gone
                folder.rmdir()
        return not group.exists()

    eventually_sync(removed, f"{group} is gone")
