"""The settings of the metrics API."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from delivery.settings import LEASE, LISTEN, NAMES, READABLE_FILE, KafkaSettings, Kubeconfig, Option
from delivery.values import Address
from sinks.settings import LOOPBACK

METRICS_ADDRESS = Address("127.0.0.1", 8443)


@dataclass(frozen=True, kw_only=True)
class MetricsApiSettings(KafkaSettings):
    """Where autoscalers' questions are answered, and to whom. ``custom_metrics`` None: only as plain JSON."""

    metrics_listen: Annotated[
        Address | None,
        Option("--metrics-listen", LISTEN, "Where questions are answered; --listen stays this process's own."),
    ] = METRICS_ADDRESS
    serving_cert: Annotated[
        Path | None,
        Option(
            "--serving-cert",
            READABLE_FILE,
            "The server's certificate, PEM, for SERVICE.NAMESPACE.svc. It and --serving-key are read again when they"
            " change. Without them: HTTP without TLS, on a loopback address only.",
        ),
    ] = None
    serving_key: Annotated[
        Path | None, Option("--serving-key", READABLE_FILE, "The private key of --serving-cert, PEM, not encrypted.")
    ] = None
    client_ca: Annotated[
        Path | None,
        Option(
            "--client-ca",
            READABLE_FILE,
            "The CA whose certificates clients must show, PEM; read again when it changes.",
            shown="with --custom-metrics the API server's front-proxy CA, as kube-system has it; else none, on a"
            " loopback address only",
        ),
    ] = None
    client_names: Annotated[
        tuple[str, ...],
        Option(
            "--client-names",
            NAMES,
            "The common names of the front proxies, which alone may ask for custom.metrics.k8s.io.",
            shown="those of kube-system",
        ),
    ] = ()
    client_token_file: Annotated[
        Path | None,
        Option(
            "--client-token-file",
            READABLE_FILE,
            "A file with a bearer token: who shows it may ask for plain JSON without a certificate. It is read at each"
            " request.",
        ),
    ] = None
    custom_metrics: Annotated[
        str | None,
        Option(
            "--custom-metrics",
            LEASE,
            "Serve custom.metrics.k8s.io too: the NAMESPACE/NAME of the Service by which the API server finds this"
            " process, as its APIService has it. Refused if the group belongs to another Service.",
            shown="off",
        ),
    ] = None
    kubeconfig: Kubeconfig = None

    def errors(self) -> list[str]:
        errors = super().errors()
        tls = self.serving_cert is not None and self.serving_key is not None
        if (self.serving_cert is None) != (self.serving_key is None):
            errors.append("--serving-cert and --serving-key go together")
        if self.client_ca is not None and not tls:
            errors.append("--client-ca: it is of no use without TLS: --serving-cert and --serving-key")
        if self.client_names and self.custom_metrics is None:
            errors.append("--client-names: it is of no use without --custom-metrics")
        if any("*" in name for name in self.client_names):
            errors.append("--client-names: names without *")
        if self.metrics_listen is None:
            errors.append("--metrics-listen: off is not possible: it is all that this sink does")
        elif self.metrics_listen.host not in LOOPBACK:
            if not tls:
                errors.append("--metrics-listen: beyond loopback only with TLS: --serving-cert and --serving-key")
            if self.client_ca is None and self.custom_metrics is None and self.client_token_file is None:
                needed = "--client-ca or --client-token-file"
                errors.append(f"--metrics-listen: beyond loopback only with {needed}, or everybody may ask")
        return errors
