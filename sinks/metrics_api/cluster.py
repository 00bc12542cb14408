"""What the metrics API needs from the cluster's API server: the front proxies' CA, the API group, pods by selector.

In: the API server's responses. Out: the front proxies' CA and names; the names of the pods that match a label selector.
State: the front proxies' CA, read again every minute. Pods are listed at each request, because an autoscaler may select
by labels that gpu.workloads does not have.
On failure: at the start it waits for the API server, for as long as it takes; :class:`GroupTaken` ends the process. A
selector that the API server refuses raises :class:`SelectorError`, everything else :class:`Unreachable`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from delivery.kubernetes.client import ApiHealth, Client, Unreachable, message
from delivery.tasks import set_within
from sinks.metrics_api.custom_metrics import GROUP
from sinks.metrics_api.selectors import SelectorError
from topics.topic import UNDECODABLE

log = logging.getLogger(__name__)

T = TypeVar("T")

API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
AUTHENTICATION = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"

_RETRY_S = 2.0
_ASK_WITHIN_S = 5.0
_REFRESH_S = 60.0
_PAGE_PODS = 500
_LISTS_AT_ONCE = 4
_LIST_WITHIN_S = 10.0
_NAMES_ONLY = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}


class GroupTaken(Exception):
    """Another server serves custom.metrics.k8s.io. The message names it, and what to do."""

    exit_code = 1


class FrontProxy(NamedTuple):
    """The CA of the API server's client certificates, None if it was not asked for, and the allowed names; empty: any
    name."""

    ca: str | None = None
    names: frozenset[str] = frozenset()


class _Meta(msgspec.Struct):
    name: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Object(msgspec.Struct):
    metadata: _Meta


class _Pods(msgspec.Struct):
    metadata: _Meta
    items: list[_Object] | None = None  # the API server writes null if it was asked for the metadata only


class _Service(msgspec.Struct):
    namespace: str = ""
    name: str = ""


class _ApiServiceSpec(msgspec.Struct):
    group: str = ""
    service: _Service | None = None


class _ApiService(msgspec.Struct):
    metadata: _Meta
    spec: _ApiServiceSpec


class _ApiServices(msgspec.Struct):
    items: list[_ApiService]


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] = {}


class ApiServer:
    """The API server that ``client`` connects to. ``service``: NAMESPACE/NAME of our own Service."""

    def __init__(self, client: Client, service: str) -> None:
        self._client, self._service = client, service
        self._lists = asyncio.Semaphore(_LISTS_AT_ONCE)
        self._health = ApiHealth("the API server", log)
        self.front_proxy = FrontProxy()

    async def start(self, stop: asyncio.Event, *, ask_front_proxy: bool) -> None:
        """Ensure that the API group is ours, and read the front proxies' CA if asked to; until ``stop`` is set.

        Raises GroupTaken and ConfigError.
        """
        await self._client.start()
        await self._retry(self.require_group, stop)
        if ask_front_proxy:
            self.front_proxy = await self._retry(self._front_proxy, stop) or self.front_proxy

    async def refresh(self) -> None:
        """Keep the front proxies' CA up to date, for ever."""
        logged = ""
        while True:
            await asyncio.sleep(_REFRESH_S)
            problem = ""
            try:
                self.front_proxy = await self._front_proxy()
            except Unreachable as error:
                problem = error.reason
                if problem != logged:
                    log.warning("the front proxies' CA could not be read again, and stays what it was: %s", error)
            logged = problem

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def not_ready(self) -> list[str]:
        """The problem with the API server, if there is one."""
        return [f"the API server: {self._health.problem}"] if self._health.problem else []

    async def require_group(self) -> None:
        """Raises GroupTaken if an APIService gives the group to another Service than ours."""
        answer = await self._ask(API_SERVICES, "list apiservices")
        for api_service in _decoded(answer, _ApiServices).items:
            owner = api_service.spec.service
            if api_service.spec.group != GROUP or owner is None:
                continue
            service = f"{owner.namespace}/{owner.name}"
            if service != self._service:
                raise GroupTaken(
                    f"{GROUP} belongs to the Service {service} (APIService {api_service.metadata.name}), and only one"
                    " server can have it: delete that APIService, or leave out --custom-metrics; ours would be"
                    f" {self._service}"
                )

    async def pods(self, namespace: str, selector: str) -> set[str]:
        """The names of the pods that match a label selector. Raises SelectorError and Unreachable."""
        names: set[str] = set()
        params = {"labelSelector": selector, "limit": str(_PAGE_PODS)}
        async with self._lists, asyncio.timeout(_LIST_WITHIN_S):
            while True:
                path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
                answer = await self._client.request("GET", path, params=params, headers=_NAMES_ONLY)
                if answer.status == 400:
                    raise SelectorError(message(answer.body))
                if answer.status != 200:
                    raise Unreachable("connection", f"{answer.status}: {message(answer.body)}")
                page = _decoded(answer.body, _Pods)
                names.update(pod.metadata.name for pod in page.items or ())
                if not page.metadata.continue_:
                    return names
                params["continue"] = page.metadata.continue_

    async def _front_proxy(self) -> FrontProxy:
        data = _decoded(await self._ask(AUTHENTICATION, "get that ConfigMap"), _ConfigMap).data
        if not (ca := data.get("requestheader-client-ca-file", "")):
            raise Unreachable("connection", f"{AUTHENTICATION} has no requestheader-client-ca-file: give --client-ca")
        names = _decoded(data.get("requestheader-allowed-names", "[]").encode(), list[str])
        return FrontProxy(ca, frozenset(names))

    async def _ask(self, path: str, right: str) -> bytes:
        answer = await self._client.request("GET", path, timeout_s=_ASK_WITHIN_S)
        if answer.status == 200:
            return answer.body
        hint = f" (this needs the right to {right})" if answer.status == 403 else ""
        raise Unreachable("connection", f"{path}: {answer.status}: {message(answer.body)}{hint}")

    async def _retry(self, ask: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T | None:
        """Ask until there is a response; None if ``stop`` is set before."""
        while not stop.is_set():
            try:
                response = await ask()
            except Unreachable as error:
                self._health.bad(error.reason, str(error))
                await set_within(stop, _RETRY_S)
            else:
                self._health.good("asked")
                return response
        return None


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise Unreachable("connection", f"the API server's answer can't be read: {error}") from error
