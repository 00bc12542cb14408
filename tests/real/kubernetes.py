"""A real Kubernetes API: etcd and kube-apiserver, with RBAC, and without a scheduler, controllers and kubelets.

What those would do, tests write themselves: owners, bindings, status. :class:`ControllerManager` has the controllers
that scale workloads. Users are of two kinds: those of the token file,
who may do nothing but ``admin`` everything, and service accounts made on the way.
"""

import http.client
import json
import shutil
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.real.certificates import Authority
from tests.real.process import HttpServer, Server, listens
from tests.real.servers import Missing, find_openssl, real_dir

ETCD = "etcd-3.6.5"
KUBERNETES = "kubernetes-1.36.3"
KUBECTL = "kubectl-1.36.3"
ADMIN = "admin"
FRONT_PROXY = "front-proxy-client"
ASK_TIMEOUT_S = 30.0

Json = dict[str, Any]


def find_etcd() -> Path:
    """etcd's program; raises :class:`Missing`."""
    return _program(ETCD, "etcd")


def find_kube_apiserver() -> Path:
    """The API server's program; raises :class:`Missing`."""
    return _program(KUBERNETES, "kube-apiserver")


def find_kube_controller_manager() -> Path:
    """The controllers' program; raises :class:`Missing`."""
    return _program(KUBERNETES, "kube-controller-manager")


def find_kubectl() -> Path:
    """kubectl; raises :class:`Missing`."""
    return _program(KUBECTL, "kubectl")


def _program(folder: str, name: str) -> Path:
    path = shutil.which(str(real_dir() / folder / name))
    if not path:
        raise Missing(f"no {name} in {real_dir() / folder}: run `make real-servers`")
    return Path(path)


class Etcd(HttpServer):
    """One etcd."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ports=2)

    def command(self) -> Sequence[str]:
        """The server in the foreground. What it writes need not outlive a power cut."""
        peers = f"http://127.0.0.1:{self.ports[1].number}"
        return [
            str(find_etcd()),
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--log-level=error",
            "--unsafe-no-fsync",
        ]

    def ready(self) -> bool:
        """Whether it has a leader."""
        answer = self.get("/health")
        return answer is not None and json.loads(answer)["health"] == "true"

    def compact(self) -> int:
        """Compacts all history; returns the oldest revision that is left."""
        revision = int(self._ask("maintenance/status", {})["header"]["revision"])
        self._ask("kv/compaction", {"revision": revision, "physical": True})
        return revision

    def _ask(self, path: str, body: Json) -> Json:
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode())  # noqa: S310 - http
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:  # noqa: S310 - http, and ours
            content: Json = json.load(answer)
        return content


class Reply(NamedTuple):
    """The API server's answer to a request of a test."""

    status: int
    body: Json
    warnings: list[str]


class Denied(Exception):
    """The API server did not do what a helper below asked for."""


class ApiServer(Server):
    """kube-apiserver and its etcd. ``users`` are those of the token file besides ``admin``, without any rights.

    ``service_accounts``: each pod needs one, as in a cluster, where a controller makes them.
    """

    stop_timeout_s = 4.0
    """It waits a minute for the ends of the watches that it serves."""

    def __init__(
        self,
        directory: Path,
        *,
        users: Sequence[str] = ("one", "two"),
        options: Sequence[str] = (),
        service_accounts: bool = False,
    ) -> None:
        super().__init__(directory)
        self.service_accounts = service_accounts
        self.etcd = Etcd(directory / "etcd")
        self.users = [ADMIN, *users]
        self.options = list(options)
        self.front_proxies = Authority(directory / "front-proxies")
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}
        self._of_thread = threading.local()
        self._connections: list[http.client.HTTPSConnection] = []

    @property
    def url(self) -> str:
        """The server's base URL, without a slash at the end."""
        return f"https://127.0.0.1:{self.ports[0].number}"

    @property
    def ca(self) -> Path:
        """The certificate authority that it made for itself."""
        return self.directory / "certs" / "apiserver.crt"

    def prepare(self) -> None:
        """Writes the users' tokens and makes the key for service accounts' tokens."""
        key, public = self.directory / "sa.key", self.directory / "sa.pub"
        openssl = str(find_openssl())
        subprocess.run([openssl, "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        subprocess.run([openssl, "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
        rows = [
            f'{self.token(user)},{user},{user},"{"system:masters" if user == ADMIN else ""}"' for user in self.users
        ]
        (self.directory / "tokens.csv").write_text("\n".join(rows) + "\n")

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return [
            str(find_kube_apiserver()),
            f"--etcd-servers={self.etcd.url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.ports[0].number}",
            f"--cert-dir={self.directory / 'certs'}",
            f"--service-account-key-file={self.directory / 'sa.pub'}",
            f"--service-account-signing-key-file={self.directory / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.invalid",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            *([] if self.service_accounts else ["--disable-admission-plugins=ServiceAccount"]),
            "--allow-privileged",  # as clusters are installed: nothing of GKE's would be taken without
            "--shutdown-delay-duration=0s",
            *self._front_proxy(),
            *self.options,
        ]

    def _front_proxy(self) -> list[str]:
        """How it authenticates to the servers behind it, and names the user for whom it asks."""
        certificate = self.front_proxies.sign(FRONT_PROXY)
        return [
            f"--requestheader-client-ca-file={certificate.ca}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={certificate.certificate}",
            f"--proxy-client-key-file={certificate.key}",
        ]

    def ready(self) -> bool:
        """Whether it says that it is ready, its own roles and namespaces made."""
        try:
            return (
                listens(self.ports[0].number)
                and self.request("GET", "/readyz").status == 200
                and self.request("GET", "/api/v1/namespaces/default").status == 200
            )
        except (OSError, ssl.SSLError):
            return False

    def start(self) -> Self:
        """Starts etcd if it does not run, then the API server."""
        self.etcd.start()
        return super().start()

    def close(self) -> None:
        """Ends both for good."""
        for connection in self._connections:
            connection.close()
        super().close()
        self.etcd.close()

    # -- who asks

    def token(self, user: str) -> str:
        """The bearer token of a user of the token file."""
        return f"{user}-token"

    def service_account(self, namespace: str, name: str) -> str:
        """A new token of that service account, which is made if it is not there."""
        self.namespace(namespace)
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        if self.request("GET", f"{path}/{name}").status == 404:
            self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(name, namespace)})
        answer = self.request("POST", f"{path}/{name}/token", {"spec": {"expirationSeconds": 3600}})
        return str(self._done(answer)["status"]["token"])

    def kubeconfig(self, user: str | None = None, *, server: str | None = None, **credentials: str) -> Path:
        """Writes a kubeconfig for a user of the token file, or with other ``credentials``; ``server``: a proxy's."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "real",
            "clusters": [
                {"name": "real", "cluster": {"server": server or self.url, "certificate-authority": str(self.ca)}}
            ],
            "users": [{"name": "real", "user": {"token": self.token(user)} if user else credentials}],
            "contexts": [{"name": "real", "context": {"cluster": "real", "user": "real"}}],
        }
        path = self.directory / f"kubeconfig-{len(list(self.directory.glob('kubeconfig-*')))}"
        path.write_text(json.dumps(content))
        return path

    def grant(self, subject: str, *rules: Json, namespace: str | None = None) -> str:
        """Lets a user do that, everywhere or in a namespace; returns the role. ``NAMESPACE:NAME`` is an account."""
        name = f"grant-{len(self._items('ClusterRole')) + len(self._items('Role'))}"
        kind = "Role" if namespace else "ClusterRole"
        account, _, account_name = subject.rpartition(":")
        user = {"kind": "ServiceAccount", "namespace": account} if account else {"kind": "User"}
        rbac, metadata = "rbac.authorization.k8s.io", _metadata(name, namespace)
        self.create({"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": metadata, "rules": list(rules)})
        self.create(
            {
                "apiVersion": f"{rbac}/v1",
                "kind": f"{kind}Binding",
                "metadata": metadata,
                "roleRef": {"apiGroup": rbac, "kind": kind, "name": name},
                "subjects": [{**user, "name": account_name}],
            }
        )
        return name

    def revoke(self, name: str) -> None:
        """Revokes a cluster-wide grant."""
        self.delete(f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{name}")

    # -- objects

    def namespace(self, name: str) -> None:
        """Makes a namespace if it is not there."""
        if self.request("GET", f"/api/v1/namespaces/{name}").status == 404:
            self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def create(self, content: Json) -> Json:
        """Creates an object; returns the result. Raises :class:`Denied`."""
        return self._done(self.request("POST", self.collection(content), content))

    def apply(self, content: Json, *, user: str = ADMIN, dry_run: bool = False) -> Reply:
        """Applies an object on the server's side, with strict validation."""
        params = "?fieldManager=tests&force=true&fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        path = f"{self.collection(content)}/{content['metadata']['name']}{params}"
        return self.request("PATCH", path, content, user=user, content_type="application/apply-patch+yaml")

    def patch(self, path: str, content: Json, *, status: bool = False) -> Json:
        """Merges a patch into an object, or into its status; returns the result. Raises :class:`Denied`."""
        path += "/status" if status else ""
        return self._done(self.request("PATCH", path, content, content_type="application/merge-patch+json"))

    def get(self, path: str) -> Json:
        """An object. Raises :class:`Denied`."""
        return self._done(self.request("GET", path))

    def delete(self, path: str) -> None:
        """Deletes an object at once: no kubelet would end it in order. Raises :class:`Denied`."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        self._done(self.request("DELETE", path, options))

    def bind(self, namespace: str, pod: str, node: str) -> None:
        """Gives a pod to a node, as the scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        content = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self._done(self.request("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", content))

    def collection(self, content: Json) -> str:
        """The path of the collection that an object belongs to, as the server's discovery names it."""
        version, kind = content["apiVersion"], content["kind"]
        plural, namespaced = self._plural(version, kind)
        namespace = f"namespaces/{content['metadata'].get('namespace', 'default')}/" if namespaced else ""
        return f"{_root(version)}/{namespace}{plural}"

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        user: str = ADMIN,
        token: str | None = None,
        content_type: str = "application/json",
    ) -> Reply:
        """Asks as a user, or with another's token; any status is an answer.

        Raises ``OSError`` or ``http.client.HTTPException`` if there is none. Each thread keeps a connection, since to
        make one takes more CPU than to ask; what the server has closed meanwhile is made again, once.
        """
        headers = {"Authorization": f"Bearer {token or self.token(user)}", "Content-Type": content_type}
        data = None if body is None else json.dumps(body).encode()
        connection = self._connection()
        while True:
            was_open = connection.sock is not None
            try:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                return Reply(answer.status, _json(answer.read()), answer.headers.get_all("Warning") or [])
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not was_open or isinstance(error, TimeoutError):
                    raise

    def _connection(self) -> http.client.HTTPSConnection:
        """The calling thread's."""
        if not hasattr(self._of_thread, "connection"):
            context = ssl.create_default_context(cafile=str(self.ca))
            address = ("127.0.0.1", self.ports[0].number)
            connection = http.client.HTTPSConnection(*address, timeout=ASK_TIMEOUT_S, context=context)
            self._of_thread.connection = connection
            self._connections.append(connection)
        kept: http.client.HTTPSConnection = self._of_thread.connection
        return kept

    def _plural(self, version: str, kind: str) -> tuple[str, bool]:
        if (version, kind) not in self._plurals:
            for resource in self._done(self.request("GET", _root(version)))["resources"]:
                if "/" not in resource["name"]:
                    self._plurals[version, resource["kind"]] = resource["name"], resource["namespaced"]
        return self._plurals[version, kind]

    def _items(self, kind: str) -> list[Json]:
        plural, _ = self._plural("rbac.authorization.k8s.io/v1", kind)
        items: list[Json] = self.get(f"/apis/rbac.authorization.k8s.io/v1/{plural}")["items"]
        return items

    def _done(self, answer: Reply) -> Json:
        if not 200 <= answer.status < 300:
            raise Denied(f"{answer.status}: {answer.body}")
        return answer.body


class ControllerManager(Server):
    """Some controllers, by default those that scale Deployments; the autoscaler looks every ``period_s``."""

    def __init__(
        self,
        directory: Path,
        api: ApiServer,
        *,
        period_s: int = 1,
        controllers: Sequence[str] = ("deployment", "replicaset", "horizontal-pod-autoscaler"),
    ) -> None:
        super().__init__(directory)
        self.api, self.period_s, self.controllers = api, period_s, controllers

    def command(self) -> Sequence[str]:
        """The controllers in the foreground."""
        return [
            str(find_kube_controller_manager()),
            f"--kubeconfig={self.api.kubeconfig(ADMIN)}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.ports[0].number}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--controllers={','.join(f'{controller}-controller' for controller in self.controllers)}",
            f"--root-ca-file={self.api.ca}",
            f"--horizontal-pod-autoscaler-sync-period={self.period_s}s",
        ]

    def ready(self) -> bool:
        """Whether it serves."""
        return listens(self.ports[0].number)


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _metadata(name: str, namespace: str | None) -> Json:
    return {"name": name, "namespace": namespace} if namespace else {"name": name}


def _json(body: bytes) -> Json:
    try:
        content = json.loads(body)
    except ValueError:
        return {"text": body.decode(errors="replace")}
    return content if isinstance(content, dict) else {"items": content}
