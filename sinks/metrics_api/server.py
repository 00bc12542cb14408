"""The HTTP server of the metrics API: access, routes and responses.

In: requests. Out: JSON. An error is a ``Status`` of Kubernetes below ``/apis``, and an object with ``error`` elsewhere.

    /v1/workloads/NAMESPACE/KIND/NAME ................ plain JSON, for KEDA's metrics-api scaler and others
    /apis/custom.metrics.k8s.io/VERSION/namespaces/... the aggregated API, for the autoscaler of Kubernetes itself
"""

import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import Counter

from delivery.kubernetes.client import Unreachable
from sinks.metrics_api import custom_metrics, selectors
from sinks.metrics_api.cluster import ApiServer
from sinks.metrics_api.custom_metrics import GROUP, VERSIONS, DescribedObject, Value, resource_of
from sinks.metrics_api.holdings import SERVED, SUMMED, Holding, Holdings, combined_value, pod_value
from sinks.metrics_api.selectors import EVERYTHING, Selector, SelectorError

PodHoldings = Mapping[str, list[Holding]]
"""The holdings of pods, by name."""

_APIS = "/apis"


@dataclass(frozen=True, kw_only=True)
class Access:
    """The clients that are allowed. ``guarded``: a client needs a certificate, or the bearer token in the file.

    Below ``/apis`` only the API server's front proxy is allowed: a certificate with one of these names, or with any
    name if there are none. ``own_ca``: the CA is the clients' own, and any of its certificates opens the rest. Else it
    is that of the front proxies, which in some clusters signs the certificates of users, too.
    """

    guarded: bool
    names: Callable[[], frozenset[str]]
    token_file: Path | None
    own_ca: bool = True

    def refusal(self, request: web.Request) -> tuple[int, str] | None:
        """The status and reason of a request that is refused; None if it is allowed."""
        if not self.guarded:
            return None
        certificate = (request.transport and request.transport.get_extra_info("peercert")) or None
        subject = [pair for pairs in (certificate or {}).get("subject", ()) for pair in pairs]
        name, names = next((str(value) for key, value in subject if key == "commonName"), ""), self.names()
        is_front_proxy = certificate is not None and (not names or name in names)
        if request.path.startswith(_APIS):
            if certificate is None:
                return 401, "only the API server's front proxy may ask, with its certificate"
            return None if is_front_proxy else (403, f"{name!r} is not a name of a front proxy")
        if is_front_proxy or (certificate is not None and self.own_ca):
            return None
        if self.token_file is None:
            return 401, "show a certificate of the clients' CA"
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        try:
            token, shown = self.token_file.read_bytes().strip(), credentials.strip().encode(errors="surrogateescape")
        except OSError as error:
            return 503, f"the file of the bearer token can't be read: {error.strerror}"
        if token and scheme.lower() == "bearer" and hmac.compare_digest(shown, token):
            return None
        return 401, "show a certificate of the clients' CA or the bearer token"


class Api:
    """The API. ``cluster`` None: only plain JSON. ``count`` returns the counter of responses with a status."""

    def __init__(
        self,
        holdings: Holdings,
        access: Access,
        cluster: ApiServer | None,
        count: Callable[[str], Counter],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holdings, self._access, self._cluster, self._count, self._now_s = holdings, access, cluster, count, now_s

    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        routes = [web.get("/v1/workloads/{namespace}/{kind}/{name}", self._workload)]
        if self._cluster is not None:
            root = f"{_APIS}/{GROUP}"
            version = f"{root}/{{version:{'|'.join(VERSIONS)}}}"
            routes += [
                web.get(root, self._discovery),
                web.get(version, self._discovery),
                web.get(f"{version}/namespaces/{{namespace}}/metrics/{{metric}}", self._namespace),
                web.get(f"{version}/namespaces/{{namespace}}/{{resource}}/{{name}}/{{metric}}", self._objects),
            ]
        return routes

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse clients that are not allowed, and turn errors into the JSON of their path."""
        try:
            if (refused := self._access.refusal(request)) is not None:
                response: web.StreamResponse = _error(request, *refused)
            else:
                response = await handler(request)
        except SelectorError as error:
            response = _error(request, 400, str(error))
        except (Unreachable, TimeoutError) as error:
            response = _error(request, 503, f"the API server does not list pods: {error or 'no answer in time'}")
        except web.HTTPException as error:
            text = error.text or error.reason
            if error is request.match_info.http_exception:  # no such path: name those that there are
                custom = "needs --custom-metrics" if self._cluster is None else f"is below {_APIS}/{GROUP}"
                text = f"GET /v1/workloads/NAMESPACE/KIND/NAME is what can be asked here; {GROUP} {custom}"
            response = _error(request, error.status, text)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
        self._count(str(response.status)).inc()
        return response

    # -- plain JSON

    async def _workload(self, request: web.Request) -> web.Response:
        namespace, kind, name = (request.match_info[part] for part in ("namespace", "kind", "name"))
        pods = self._of_workload(self._pods(namespace), kind, name)
        if not pods:
            raise web.HTTPNotFound(text=f"no pod of {kind} {name} in {namespace} holds a GPU now, as far as is known")
        values_by_metric = {
            metric: values
            for metric in SERVED
            if (values := [value for held in pods.values() if (value := pod_value(held, metric)) is not None])
        }
        return _json(
            {
                "namespace": namespace,
                "kind": kind,
                "name": name,
                "holders": len(pods),
                "devices": sum(map(len, pods.values())),
                "oldest_ts_ms": _oldest_ms(pods),
                "mean_over_holders": {metric: sum(values) / len(values) for metric, values in values_by_metric.items()},
                "sum_over_holders": {
                    metric: sum(values) for metric, values in values_by_metric.items() if metric in SUMMED
                },
                "max_over_holders": {metric: max(values) for metric, values in values_by_metric.items()},
            }
        )

    # -- the aggregated API

    async def _discovery(self, request: web.Request) -> web.Response:
        """The versions, or the metrics of a version."""
        version = request.match_info.get("version")
        return _json(custom_metrics.group() if version is None else custom_metrics.resources(version))

    async def _namespace(self, request: web.Request) -> web.Response:
        """A metric of a namespace, or of all namespaces: that of all pods in it together."""
        metric, selector, label_selector = _parameters(request)
        if label_selector:
            raise web.HTTPBadRequest(text="a labelSelector can select pods only")
        name = request.match_info["namespace"]
        namespaces = self._holdings.namespaces() if name == "*" else [name]
        objects = [
            (DescribedObject("Namespace", namespace), self._pods(namespace, selector)) for namespace in namespaces
        ]
        required = "" if name == "*" else f"the namespace {name}"
        return _metric_values(request, metric, selector, objects, required=required)

    async def _objects(self, request: web.Request) -> web.Response:
        """A metric of a pod or workload; for the name ``*`` of all, or of all pods that match the label selector."""
        metric, selector, label_selector = _parameters(request)
        namespace, resource, name = (request.match_info[part] for part in ("namespace", "resource", "name"))
        plural, _, group = resource.partition(".")
        of_pods, selected = plural == "pods" and not group, None
        if self._cluster is not None and of_pods and name == "*" and label_selector:
            selected = await self._cluster.pods(namespace, label_selector)
        pods = self._pods(namespace, selector)  # not before the list came: a value may be too old by then
        if of_pods:
            objects: list[tuple[DescribedObject, PodHoldings]] = [
                (DescribedObject("Pod", pod, namespace), {pod: held})
                for pod, held in pods.items()
                if (name in ("*", pod)) and (selected is None or pod in selected)
            ]
        elif label_selector:
            raise web.HTTPBadRequest(text="a labelSelector can select pods only")
        else:
            owners = {
                owner
                for held in pods.values()
                for holding in held
                for owner in holding.workloads
                if resource_of(owner[0].lower()) == plural and name in ("*", owner[1])
            }
            version = {"api_version": f"{group}/v1"} if group else {}
            objects = [
                (DescribedObject(kind, owner, namespace, **version), self._of_workload(pods, kind, owner))
                for kind, owner in sorted(owners)
            ]
        required = "" if name == "*" else f"{resource} {name} in {namespace}"
        return _metric_values(request, metric, selector, objects, required=required)

    def _pods(self, namespace: str, selector: Selector = EVERYTHING) -> PodHoldings:
        return self._holdings.pods(namespace, self._now_s(), selector.matches)

    def _of_workload(self, pods: PodHoldings, kind: str, name: str) -> PodHoldings:
        workload = (kind.lower(), name)
        return {
            pod: held
            for pod, held in pods.items()
            if any((owner[0].lower(), owner[1]) == workload for holding in held for owner in holding.workloads)
        }


def _parameters(request: web.Request) -> tuple[str, Selector, str]:
    """The metric, its label selector, and the label selector of pods. Raises HTTPNotFound and SelectorError."""
    metric = request.match_info["metric"]
    if metric not in SERVED:
        raise web.HTTPNotFound(text=f"there is no metric {metric}: see /apis/{GROUP}/{VERSIONS[0]}")
    selector = selectors.parse(request.query.get("metricLabelSelector", ""))
    return metric, selector, request.query.get("labelSelector", "").strip()


def _metric_values(
    request: web.Request,
    metric: str,
    selector: Selector,
    objects: list[tuple[DescribedObject, PodHoldings]],
    *,
    required: str,
) -> web.Response:
    """The values of those of the objects that have one. Raises HTTPNotFound if ``required``, an object, has none."""
    values = [
        Value(described, value, _oldest_ms(pods))
        for described, pods in objects
        if (value := combined_value(pods, metric)) is not None
    ]
    if required and not values:
        raise web.HTTPNotFound(text=f"the metric {metric} is not known of {required} now")
    return _json(custom_metrics.metric_values(request.match_info["version"], metric, selector, values))


def _oldest_ms(pods: PodHoldings) -> int:
    return min(holding.ts_ms for held in pods.values() for holding in held)


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _error(request: web.Request, status: int, text: str) -> web.Response:
    text = text.strip()
    kubernetes = request.path.startswith(_APIS)
    return _json(custom_metrics.status(status, text) if kubernetes else {"error": text}, status)
