"""The HTTP of the metrics API: who may ask what, and what is answered.

In: requests. Out: JSON; every error as the path's readers expect it: a ``Status`` of Kubernetes below ``/apis``, an
``error`` elsewhere.

    /v1/workloads/NAMESPACE/KIND/NAME ................ plain JSON, for KEDA's metrics-api scaler and for anybody
    /apis/custom.metrics.k8s.io/VERSION/namespaces/... the aggregated API, for the autoscaler of Kubernetes itself
"""

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import Counter

from delivery.kubernetes.client import Unreachable
from sinks.metrics_api import custom_metrics, selectors
from sinks.metrics_api.cluster import ApiServer
from sinks.metrics_api.custom_metrics import GROUP, VERSIONS, DescribedObject, Value, resource_of
from sinks.metrics_api.holdings import SERVED, SUMMED, Holding, Holdings, combined, of_pod
from sinks.metrics_api.selectors import EVERYTHING, Selector, SelectorError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Pods = Mapping[str, list[Holding]]

_APIS = "/apis"


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask. ``guarded``: a client has to say who it is, by a certificate or by the bearer token in the file.

    Below ``/apis`` only front proxies may ask: certificates with one of these names; none means any name.
    """

    guarded: bool
    names: Callable[[], frozenset[str]]
    token_file: Path | None

    def refusal(self, request: web.Request) -> tuple[int, str] | None:
        """The status and the reason for which a request is refused; None: it is not."""
        if not self.guarded:
            return None
        certificate = (request.transport and request.transport.get_extra_info("peercert")) or None
        if request.path.startswith(_APIS):
            if certificate is None:
                return 401, "only the API server's front proxy may ask, with its certificate"
            subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
            name, names = next((str(value) for key, value in subject if key == "commonName"), ""), self.names()
            return (403, f"{name!r} is not a name of a front proxy") if names and name not in names else None
        if certificate is not None:
            return None
        if self.token_file is None:
            return 401, "show a certificate of the clients' CA"
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        token = self.token_file.read_bytes().strip()
        if token and scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token):
            return None
        return 401, "show a certificate of the clients' CA or the bearer token"


class Api:
    """What is answered. ``cluster`` None: only plain JSON. ``count`` gives the counter of answers with a status."""

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
        """Everything that is answered."""
        found = [web.get("/v1/workloads/{namespace}/{kind}/{name}", self._workload)]
        if self._cluster is not None:
            root = f"{_APIS}/{GROUP}"
            version = f"{root}/{{version:{'|'.join(VERSIONS)}}}"
            found += [
                web.get(root, self._discovery),
                web.get(version, self._discovery),
                web.get(f"{version}/namespaces/{{namespace}}/metrics/{{metric}}", self._namespace),
                web.get(f"{version}/namespaces/{{namespace}}/{{resource}}/{{name}}/{{metric}}", self._objects),
            ]
        return found

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses who may not ask, and answers every error in the form of its path."""
        try:
            if (refused := self._access.refusal(request)) is not None:
                answer: web.StreamResponse = _error(request, *refused)
            else:
                answer = await handler(request)
        except SelectorError as error:
            answer = _error(request, 400, str(error))
        except (Unreachable, TimeoutError) as error:
            answer = _error(request, 503, f"the API server does not list pods: {error or 'no answer in time'}")
        except web.HTTPException as error:
            text = error.text or error.reason
            if error is request.match_info.http_exception:  # nothing is there: say what is
                custom = "needs --custom-metrics" if self._cluster is None else f"is below {_APIS}/{GROUP}"
                text = f"GET /v1/workloads/NAMESPACE/KIND/NAME is what can be asked here; {GROUP} {custom}"
            answer = _error(request, error.status, text)
        self._count(str(answer.status)).inc()
        return answer

    # -- plain JSON

    async def _workload(self, request: web.Request) -> web.Response:
        namespace, kind, name = (request.match_info[part] for part in ("namespace", "kind", "name"))
        pods = self._of_workload(self._pods(namespace), kind, name)
        if not pods:
            raise web.HTTPNotFound(text=f"no pod of {kind} {name} in {namespace} holds a GPU now, as far as is known")
        values = {
            metric: [value for some in pods.values() if (value := of_pod(some, metric)) is not None]
            for metric in SERVED
        }
        known = {metric: some for metric, some in values.items() if some}
        return _json(
            {
                "namespace": namespace,
                "kind": kind,
                "name": name,
                "holders": len(pods),
                "devices": sum(map(len, pods.values())),
                "oldest_ts_ms": _oldest_ms(pods),
                "mean_over_holders": {metric: sum(some) / len(some) for metric, some in known.items()},
                "sum_over_holders": {metric: sum(some) for metric, some in known.items() if metric in SUMMED},
                "max_over_holders": {metric: max(some) for metric, some in known.items()},
            }
        )

    # -- the aggregated API

    async def _discovery(self, request: web.Request) -> web.Response:
        """What can be asked: the versions, or the metrics of one of them."""
        version = request.match_info.get("version")
        return _json(custom_metrics.group() if version is None else custom_metrics.resources(version))

    async def _namespace(self, request: web.Request) -> web.Response:
        """A metric of a namespace, or of all: of its pods together."""
        metric, selector, labels = _asked(request)
        if labels:
            raise web.HTTPBadRequest(text="a labelSelector can select pods only")
        name = request.match_info["namespace"]
        namespaces = self._holdings.namespaces() if name == "*" else [name]
        found = [(DescribedObject("Namespace", one), self._pods(one, selector)) for one in namespaces]
        return _answer(request, metric, selector, found, must="" if name == "*" else f"the namespace {name}")

    async def _objects(self, request: web.Request) -> web.Response:
        """A metric of a pod or a workload, or, by ``*``, of all that the label selector takes."""
        metric, selector, labels = _asked(request)
        namespace, resource, name = (request.match_info[part] for part in ("namespace", "resource", "name"))
        pods = self._pods(namespace, selector)
        plural, _, group = resource.partition(".")
        if plural == "pods" and not group:
            asked = self._cluster if name == "*" and labels else None
            chosen = None if asked is None else await asked.pods(namespace, labels)
            found: list[tuple[DescribedObject, Pods]] = [
                (DescribedObject("Pod", pod, namespace), {pod: some})
                for pod, some in pods.items()
                if (name in ("*", pod)) and (chosen is None or pod in chosen)
            ]
        elif labels:
            raise web.HTTPBadRequest(text="a labelSelector can select pods only")
        else:
            owners = {
                owner
                for some in pods.values()
                for one in some
                for owner in one.workloads
                if resource_of(owner[0].lower()) == plural and name in ("*", owner[1])
            }
            version = {"api_version": f"{group}/v1"} if group else {}
            found = [
                (DescribedObject(kind, of, namespace, **version), self._of_workload(pods, kind, of))
                for kind, of in sorted(owners)
            ]
        return _answer(
            request, metric, selector, found, must="" if name == "*" else f"{resource} {name} in {namespace}"
        )

    def _pods(self, namespace: str, selector: Selector = EVERYTHING) -> Pods:
        return self._holdings.pods(namespace, self._now_s(), selector.matches)

    def _of_workload(self, pods: Pods, kind: str, name: str) -> Pods:
        wanted = (kind.lower(), name)
        return {
            pod: some
            for pod, some in pods.items()
            if any((of.lower(), called) == wanted for one in some for of, called in one.workloads)
        }


def _asked(request: web.Request) -> tuple[str, Selector, str]:
    """The metric, the selector of its labels, and the selector of objects. Raises HTTPNotFound and SelectorError."""
    metric = request.match_info["metric"]
    if metric not in SERVED:
        raise web.HTTPNotFound(text=f"there is no metric {metric}: see /apis/{GROUP}/{VERSIONS[0]}")
    chosen = selectors.parse(request.query.get("metricLabelSelector", ""))
    return metric, chosen, request.query.get("labelSelector", "").strip()


def _answer(
    request: web.Request, metric: str, selector: Selector, found: list[tuple[DescribedObject, Pods]], *, must: str
) -> web.Response:
    """The values of these objects, of those that have one; ``must``: what has to have one, or it is not found."""
    values = [
        Value(described, value, _oldest_ms(pods))
        for described, pods in found
        if (value := combined(pods, metric)) is not None
    ]
    if must and not values:
        raise web.HTTPNotFound(text=f"the metric {metric} is not known of {must} now")
    return _json(custom_metrics.metric_values(request.match_info["version"], metric, selector, values))


def _oldest_ms(pods: Pods) -> int:
    return min(one.ts_ms for some in pods.values() for one in some)


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _error(request: web.Request, status: int, text: str) -> web.Response:
    text = text.strip()
    kubernetes = request.path.startswith(_APIS)
    return _json(custom_metrics.status(status, text) if kubernetes else {"error": text}, status)
