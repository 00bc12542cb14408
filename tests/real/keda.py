"""KEDA itself: its operator, its metrics server and its admission, beside a real API server.

``make keda`` builds them and runs ``tests/real/with_keda.py``. They are not among the servers that ``make test`` wants.
"""

import base64
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from tests.real.autoscaling import outside_service
from tests.real.certificates import Authority
from tests.real.kubernetes import ADMIN, ApiServer, Json
from tests.real.process import Server, listens
from tests.real.servers import Missing, real_dir

KEDA = "keda-2.21.0"
NAMESPACE = "keda"
_METRICS = f"{NAMESPACE}/keda-metrics-apiserver"


def find_keda() -> Path:
    """The folder of KEDA's programs and definitions; raises :class:`Missing`."""
    folder = real_dir() / KEDA
    if not (folder / "operator").is_file():
        raise Missing(f"no KEDA in {folder}: run `make keda`")
    return folder


class _Program(Server):
    """One of KEDA's programs, as an administrator, with a certificate for localhost."""

    def __init__(self, directory: Path, api: ApiServer, authority: Authority) -> None:
        super().__init__(directory, ports=3)
        self.kubeconfig, self.authority = api.kubeconfig(ADMIN), authority

    @property
    def port(self) -> int:
        """Where it serves what the others ask for."""
        return self.ports[0].number

    def prepare(self) -> None:
        """Writes the certificate under the names that KEDA looks for."""
        signed = self.authority.sign("keda", "DNS:localhost", "IP:127.0.0.1")
        for name, file in (("ca.crt", signed.ca), ("tls.crt", signed.certificate), ("tls.key", signed.key)):
            (self.directory / name).write_bytes(file.read_bytes())

    def ready(self) -> bool:
        """Whether it serves."""
        return listens(self.port)


class Operator(_Program):
    """The operator, which makes autoscalers of ScaledObjects and asks the triggers. It trusts the authority, too."""

    def command(self) -> Sequence[str]:
        """The operator in the foreground, with its objects in a namespace of its own."""
        metrics, probes = (f"127.0.0.1:{port.number}" for port in self.ports[1:])
        return [
            "env",
            f"POD_NAMESPACE={NAMESPACE}",
            f"KEDA_CLUSTER_OBJECT_NAMESPACE={NAMESPACE}",
            "WATCH_NAMESPACE=",
            str(find_keda() / "operator"),
            f"--kubeconfig={self.kubeconfig}",
            f"--metrics-service-bind-address=127.0.0.1:{self.port}",
            f"--metrics-bind-address={metrics}",
            f"--health-probe-bind-address={probes}",
            f"--cert-dir={self.directory}",
            f"--ca-dir={self.authority.ca.parent}",
        ]


class Metrics(_Program):
    """The metrics server, which hands the operator's numbers to the API server."""

    operator: Operator

    def command(self) -> Sequence[str]:
        """The metrics server in the foreground."""
        names = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig", "lister-kubeconfig")
        return [
            "env",
            f"POD_NAMESPACE={NAMESPACE}",
            "WATCH_NAMESPACE=",
            str(find_keda() / "adapter"),
            *(f"--{name}={self.kubeconfig}" for name in names),
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--port={self.ports[1].number}",
            f"--cert-dir={self.directory}",
            f"--metrics-service-address=localhost:{self.operator.port}",
        ]


class Admission(_Program):
    """The admission, which refuses ScaledObjects that can't work."""

    def command(self) -> Sequence[str]:
        """The admission in the foreground."""
        metrics, probes = (f"127.0.0.1:{port.number}" for port in self.ports[1:])
        return [
            str(find_keda() / "webhooks"),
            f"--kubeconfig={self.kubeconfig}",
            f"--port={self.port}",
            f"--metrics-bind-address={metrics}",
            f"--health-probe-bind-address={probes}",
            f"--cert-dir={self.directory}",
        ]


@contextmanager
def keda(directory: Path, api: ApiServer, authority: Authority) -> Iterator[None]:
    """KEDA in a cluster: its definitions, its three programs, and what leads the API server to them."""
    api.namespace(NAMESPACE)
    for file in sorted((find_keda() / "crds").glob("*.yaml")):
        assert api.apply(yaml.safe_load(file.read_text())).status == 201
    with ExitStack() as programs:
        operator = programs.enter_context(Operator(directory / "operator", api, authority))
        metrics = Metrics(directory / "metrics", api, authority)
        metrics.operator = operator
        programs.enter_context(metrics)
        admission = programs.enter_context(Admission(directory / "admission", api, authority))
        api.create(outside_service(_METRICS))
        api.create(_external_metrics(metrics.port))
        assert api.apply(_admission(admission.port, authority)).status == 201
        yield


def _external_metrics(port: int) -> Json:
    namespace, _, name = _METRICS.partition("/")
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": namespace, "name": name, "port": port},
        },
    }


def _admission(port: int, authority: Authority) -> Json:
    """KEDA's own configuration, at this address, for all that it refuses to be refused."""
    content: Json = yaml.safe_load((find_keda() / "validation_webhooks.yaml").read_text())
    ca = base64.b64encode(authority.ca.read_bytes()).decode()
    for webhook in content["webhooks"]:
        path = webhook["clientConfig"]["service"]["path"]
        webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": ca}
        webhook["failurePolicy"] = "Fail"
    return content
