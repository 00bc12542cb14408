"""A Lease at the API server: read, and written where nobody else wrote it since.

On failure: :class:`Refused`, in a sentence that names the RBAC rule that is missing; Unreachable.
"""

import asyncio
from typing import Protocol

import msgspec

from producers.cluster.answers import Answer, Unreachable
from producers.cluster.lease_record import Json
from producers.cluster.restarts import message


class Requests(Protocol):
    """What a Lease needs of :class:`producers.cluster.api.Api`."""

    async def request(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float = 10.0) -> Answer:
        """Ask; raises Unreachable."""


class Refused(Exception):
    """The Lease could not be read or written; the message is a sentence, ``reason`` its kind. Try again."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Store:
    """The Lease at the API server, as last read or written."""

    def __init__(self, api: Requests, namespace: str, name: str) -> None:
        self._api, self._name = api, name
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._new: Json = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
        }
        self._lease: Json | None = None

    async def read(self, within_s: float) -> Json | None:
        """The Lease; None: there is none. Raises Refused and Unreachable."""
        answer = await self._ask("GET", f"{self._collection}/{self._name}", None, within_s)
        if answer.status not in (200, 404):
            raise self._refusal("get", answer)
        self._lease = None if answer.status == 404 else _object(answer.body)
        return self._lease

    async def write(self, spec: Json, within_s: float) -> bool:
        """Write this spec into the Lease, or a new one; False where it changed since. Raises Refused, Unreachable."""
        body = msgspec.json.encode({**(self._lease or self._new), "spec": spec})
        if self._lease is None:
            verb, answer = "create", await self._ask("POST", self._collection, body, within_s)
        else:
            verb, answer = "update", await self._ask("PUT", f"{self._collection}/{self._name}", body, within_s)
        if answer.status == 409 or (answer.status == 404 and verb == "update"):
            return False
        if answer.status not in (200, 201):
            raise self._refusal(verb, answer)
        self._lease = _object(answer.body)
        return True

    async def _ask(self, method: str, path: str, body: bytes | None, within_s: float) -> Answer:
        try:
            async with asyncio.timeout(within_s):
                return await self._api.request(method, path, body=body, timeout_s=max(within_s, 0.001))
        except TimeoutError as error:
            raise Unreachable("timeout", f"no answer within {within_s:.1f} s") from error

    def _refusal(self, verb: str, answer: Answer) -> Refused:
        said = f"{message(answer.body)} ({answer.status})"
        if answer.status != 403:
            return Refused(str(answer.status), f"the API server does not {verb} it: {said}")
        only = "" if verb == "create" else f', resourceNames: ["{self._name}"]'
        rule = f'{{apiGroups: ["coordination.k8s.io"], resources: [leases]{only}, verbs: [{verb}]}}'
        return Refused("403", f"not allowed (403); our Role lacks {rule}: {said}")


def _object(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body, type=Json)
    except msgspec.DecodeError as error:
        raise Refused("garbage", f"an answer that is no Lease ({error}): {message(body)}") from error
