"""The documents of custom.metrics.k8s.io, versions v1beta1 and v1beta2: discovery, values, errors. Pure.

Source: k8s.io/metrics (``MetricValueList``, its protobuf-free JSON) and kube-controller-manager's autoscaler: it
reads a list's kind, and of each item ``describedObject.name`` and ``value``. It rounds a value up to thousandths, so
that values are rounded to them here: 0.9000000001 is 900m, not 901m.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sinks.metrics_api.holdings import SERVED
from sinks.metrics_api.selectors import Selector
from topics.times import rfc3339, time_of

GROUP = "custom.metrics.k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""The versions of the API, the preferred one first."""

_WORKLOADS = ("deployments.apps", "statefulsets.apps", "daemonsets.apps", "jobs.batch", "cronjobs.batch")
"""Those that discovery lists; metrics of other kinds of workloads are answered as well."""

_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    503: "ServiceUnavailable",
}  # fmt: skip


class DescribedObject(NamedTuple):
    """The object that a value is of: a pod, a workload or a namespace."""

    kind: str
    name: str
    namespace: str | None = None
    api_version: str = "v1"


class Value(NamedTuple):
    """A value of an object, and when it was read."""

    described: DescribedObject
    value: float
    ts_ms: int


def quantity(value: float) -> str:
    """A number as Kubernetes writes it, in thousandths: 0.9 is ``900m``, 64 GiB are ``68719476736``."""
    thousandths = round(value * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def resource_of(kind: str) -> str:
    """The resource of a kind in lower case, as the plural that Kubernetes guesses: ``networkpolicies``, ``jobs``."""
    if kind.endswith("s"):
        return f"{kind}es"
    return f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


def group() -> dict[str, Any]:
    """The response of ``/apis/custom.metrics.k8s.io``."""
    versions = [{"groupVersion": f"{GROUP}/{version}", "version": version} for version in VERSIONS]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "versions": versions,
        "preferredVersion": versions[0],
    }


def resources(version: str) -> dict[str, Any]:
    """The resources of a version: each metric of pods, of namespaces and of the usual workloads."""
    kinds = {"pods": True, "namespaces": False, **dict.fromkeys(_WORKLOADS, True)}
    rows = [
        {
            "name": f"{resource}/{metric}",
            "singularName": "",
            "namespaced": namespaced,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for resource, namespaced in kinds.items()
        for metric in SERVED
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{version}", "resources": rows}


def metric_values(version: str, metric: str, selector: Selector, values: Iterable[Value]) -> dict[str, Any]:
    """A list of values of a metric."""
    label_selector = selector.as_object()
    items = []
    for described, value, ts_ms in values:
        reference = {"kind": described.kind, "name": described.name, "apiVersion": described.api_version}
        if described.namespace is not None:
            reference["namespace"] = described.namespace
        if version == "v1beta1":
            identifier: dict[str, Any] = {"metricName": metric, "selector": label_selector}
        else:
            identifier = {"metric": {"name": metric, "selector": label_selector}}
        reading = {"timestamp": rfc3339(time_of(ts_ms)), "value": quantity(value)}
        items.append({"describedObject": reference, **identifier, **reading})
    return {"kind": "MetricValueList", "apiVersion": f"{GROUP}/{version}", "metadata": {}, "items": items}


def status(code: int, message: str) -> Mapping[str, Any]:
    """An error, as the Kubernetes API writes it."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS.get(code, "InternalError"),
        "code": code,
    }
