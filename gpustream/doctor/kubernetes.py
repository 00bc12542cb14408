"""Reads gpustream's objects from the Kubernetes API: its pods and their owners, the nodes, the Lease, the rights.

In:       a namespace, and a kubeconfig.
Out:      a :class:`Cluster`. A request that the API server refuses is named, and the others are still sent.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from delivery.kafka_errors import describe
from delivery.kubernetes.client import Answer, Client, Unreachable, message
from delivery.kubernetes.credentials import ConfigError
from gpustream.doctor.situation import Cluster, Json
from producers.cluster.config import LEASE_NAME
from producers.settings import GPU_RESOURCES
from topics.topic import UNDECODABLE

_SELECTOR = {"labelSelector": "app.kubernetes.io/name=gpustream"}
COMPONENT = "app.kubernetes.io/component"
OWNERS = ("daemonsets", "statefulsets", "deployments")
LEASE_VARIABLE = "GPUSTREAM_LEASE"
ODD_ANSWERS = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What is raised if an answer is no JSON, or has another shape than that of the API that was asked."""

_PAGE = "500"
_LOG_LINES = "3"

CLUSTER_RIGHTS = (
    *(("", resource, verb) for resource in ("pods", "nodes", "namespaces") for verb in ("list", "watch")),
    *(
        ("resource.k8s.io", resource, verb)
        for resource in ("resourceslices", "resourceclaims", "devicetaintrules")
        for verb in ("list", "watch")
    ),
    *(("apps", resource, "get") for resource in ("replicasets", "deployments", "statefulsets", "daemonsets")),
    *(("batch", resource, "get") for resource in ("jobs", "cronjobs")),
    ("", "replicationcontrollers", "get"),
)
"""What the cluster producer's service account must be allowed to do everywhere: group, resource, verb."""

LEASE_RIGHTS = tuple(("coordination.k8s.io", "leases", verb) for verb in ("create", "get", "update"))
"""The same, of its Lease only: a Role may name it."""


class _ApiReader:
    """Reads from the API server, and remembers what it refused."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.refusals: dict[str, str] = {}

    async def get(self, kind: str, path: str, params: Mapping[str, str] | None = None) -> Any:
        """An object; None if the request was refused, or the object does not exist. Raises Unreachable."""
        response = await self._client.request("GET", path, params=params)
        if response.status == 200:
            return _decoded(response)
        if response.status == 403:
            self.refusals[kind] = message(response.body)
        elif response.status != 404:
            raise _no_answer(response)
        return None

    async def items(self, kind: str, path: str, params: Mapping[str, str]) -> list[Json]:
        """All objects of a list, read page by page."""
        objects: list[Json] = []
        query = {"limit": _PAGE, **params}
        while True:
            page = await self.get(kind, path, query) or {}
            objects += page.get("items") or []
            if not (token := page.get("metadata", {}).get("continue")):
                return objects
            if token == query.get("continue"):
                raise Unreachable("cut", f"{path}: all pages of the list name the same next one")
            query["continue"] = token

    async def log(self, namespace: str, pod: str, container: str) -> str:
        """The last lines of a container that ended; empty if Kubernetes does not have them any more."""
        params = {"container": container, "previous": "true", "tailLines": _LOG_LINES}
        response = await self._client.request("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log", params=params)
        return response.body.decode("utf-8", "replace").strip() if response.status == 200 else ""

    async def renewed_ms(self, lease: str) -> int | None:
        """When a Lease, ``NAMESPACE/NAME``, was renewed; None if it does not exist. Raises Unreachable."""
        namespace, _, name = lease.partition("/")
        content = await self.get("leases", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
        return timestamp_ms(content["spec"].get("renewTime")) if content else None

    async def missing_rights(self, account: str, namespace: str, lease: str) -> list[str]:
        """What a cluster producer's service account may not do; nothing if this user may not ask. ``lease``: its Lease,
        ``NAMESPACE/NAME``, if it has one. Raises Unreachable."""
        user = f"system:serviceaccount:{namespace}:{account}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
        lease_namespace, _, lease_name = lease.partition("/")
        of_lease = {"namespace": lease_namespace, "name": lease_name}
        rights = [(right, {"namespace": "", "name": ""}) for right in CLUSTER_RIGHTS]
        rights += [(right, of_lease) for right in LEASE_RIGHTS if lease]
        path, missing = "/apis/authorization.k8s.io/v1/subjectaccessreviews", []
        for (group, resource, verb), of_object in rights:
            attributes = {"group": group, "resource": resource, "verb": verb, **of_object}
            spec = {"user": user, "groups": groups, "resourceAttributes": attributes}
            body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
            response = await self._client.request("POST", path, body=json.dumps(body).encode())
            if response.status == 403:
                self.refusals["rights"] = message(response.body)
                return []
            if response.status not in (200, 201):
                raise _no_answer(response)
            if not (_decoded(response).get("status") or {}).get("allowed"):
                missing.append(f"{verb} {resource}{'.' * bool(group)}{group}")
        return missing


def _no_answer(response: Answer) -> Unreachable:
    return Unreachable("cut", f"HTTP {response.status}: {message(response.body)}")


def _decoded(response: Answer) -> Json:
    """The object in an answer. Raises Unreachable if there is none: a proxy answered with a page of its own."""
    try:
        return msgspec.json.decode(response.body, type=Json)
    except UNDECODABLE as error:
        raise _no_answer(response) from error


async def inspect(kubeconfig: Path | None, namespace: str) -> Cluster:
    """Reads the objects of gpustream in this namespace. ``error`` is set if the API server does not answer."""
    client = Client(kubeconfig)
    try:
        await client.start()
        return await _inspect(_ApiReader(client), namespace)
    except (ConfigError, Unreachable) as error:
        return Cluster(namespace, error=str(error))
    except ODD_ANSWERS as error:
        return Cluster(namespace, error=f"its answer has no objects of Kubernetes: {describe(error)}")
    finally:
        await client.close()


async def _inspect(api: _ApiReader, namespace: str) -> Cluster:
    namespace_path = f"namespaces/{namespace}"
    pods = await api.items("pods", f"/api/v1/{namespace_path}/pods", _SELECTOR)
    owners = [
        owner for kind in OWNERS for owner in await api.items(kind, f"/apis/apps/v1/{namespace_path}/{kind}", _SELECTOR)
    ]
    nodes = []
    for node in await api.items("nodes", "/api/v1/nodes", {}):
        capacity, labels = node.get("status", {}).get("capacity") or {}, node["metadata"].get("labels") or {}
        has_gpus = any(name.startswith(GPU_RESOURCES) and amount != "0" for name, amount in capacity.items())
        nodes += [node] if has_gpus or labels.get("nvidia.com/gpu.present") == "true" else []
    names = dict.fromkeys(
        source["configMapRef"]["name"]
        for pod in pods
        for container in pod["spec"]["containers"]
        for source in container.get("envFrom", [])
        if "configMapRef" in source
    )
    config_maps = {
        name: config_map.get("data") or {}
        for name in names
        if (config_map := await api.get(f"ConfigMap {name}", f"/api/v1/{namespace_path}/configmaps/{name}")) is not None
    }
    terminated = [
        (pod["metadata"]["name"], status["name"])
        for pod in pods
        for status in statuses(pod)
        if last_termination(status)
    ]
    lease_by_account = {
        pod["spec"].get("serviceAccountName", "default"): lease_of(pod, config_maps, namespace)
        for pod in pods
        if component_of(pod) == "cluster"
    }
    return Cluster(
        namespace,
        pods=pods,
        nodes=nodes,
        owners=owners,
        config_maps=config_maps,
        leases={lease: await api.renewed_ms(lease) for lease in sorted(set(lease_by_account.values())) if lease},
        missing_rights={
            account: await api.missing_rights(account, namespace, lease)
            for account, lease in sorted(lease_by_account.items())
        },
        logs={key: log for key in terminated if (log := await api.log(namespace, *key))},
        refusals=api.refusals,
    )


def lease_of(pod: Json, config_maps: Mapping[str, Json], namespace: str) -> str:
    """The Lease of a cluster producer's pod, ``NAMESPACE/NAME``; empty if it has none (``off``)."""
    values = {LEASE_VARIABLE: f"{namespace}/{LEASE_NAME}"}
    for container in pod["spec"]["containers"]:
        for source in container.get("envFrom") or []:
            values |= config_maps.get((source.get("configMapRef") or {}).get("name", ""), {})
        values |= {variable["name"]: variable.get("value", "") for variable in container.get("env") or []}
    lease = values[LEASE_VARIABLE]
    return lease if "/" in lease else ""


def timestamp_ms(time: str | None) -> int | None:
    """A timestamp of the Kubernetes API in ms; None if there is none."""
    return int(datetime.fromisoformat(time).timestamp() * 1000) if time else None


def component_of(obj: Json) -> str:
    """The component of a pod or of its owner, by its label."""
    return str((obj["metadata"].get("labels") or {}).get(COMPONENT, ""))


def statuses(pod: Json) -> list[Json]:
    """The statuses of a pod's init containers and containers."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def last_termination(status: Json) -> Json:
    """How a container terminated the last time; empty if it never did."""
    terminated: Json = (
        (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    )
    return terminated
