"""Why a watch begins again, by what the API server answered: how it is counted, said, and when to ask again. Pure."""

from typing import NamedTuple

import msgspec

LONGEST_RETRY_AFTER_S = 120.0
_LONGEST_MESSAGE = 300


class Restart(Exception):
    """Why a watch has to begin again; ``anew``: with a new list. ``reason`` is one of RESTART_REASONS."""

    def __init__(self, reason: str, message: str, *, anew: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.anew, self.wait_s = reason, anew, wait_s


class Resource(NamedTuple):
    """What a path names: ``/apis/apps/v1/replicasets`` is replicasets of the group apps."""

    group: str
    name: str

    @classmethod
    def of(cls, path: str) -> "Resource":
        """The resource of an API path."""
        parts = path.strip("/").split("/")
        return cls(parts[1] if parts[0] == "apis" else "", parts[-1])

    def rule(self, *verbs: str) -> str:
        """The RBAC rule that allows these verbs, as it is written in a role."""
        return f'{{apiGroups: ["{self.group}"], resources: [{self.name}], verbs: [{", ".join(verbs)}]}}'


class Status(msgspec.Struct):
    """What the API server says where it gives no object."""

    code: int = 0
    message: str = ""
    reason: str = ""


_status = msgspec.json.Decoder(Status)


def refused(resource: Resource, status: int, body: bytes, retry_after_s: float | None = None) -> Restart:
    """What a status that is no success means: how it is counted, said, and when it is worth asking again."""
    said = message(body)
    wait_s = min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
    if status in (400, 422) and ("sendInitialEvents" in said or "resourceVersionMatch" in said):
        return Restart("unsupported", f"no streaming lists: {said}", anew=True)
    if status == 410:
        return Restart("expired", said, anew=True)
    if status == 401:
        return Restart("unauthorized", f"our credentials are not accepted (401): {said}", wait_s=wait_s)
    if status == 403:
        rule = resource.rule("list", "watch")
        return Restart("forbidden", f"not allowed (403); our ClusterRole lacks {rule}: {said}", wait_s=wait_s)
    if status == 404:
        return Restart("absent", f"the API server has no such resource (404): {said}", anew=True, wait_s=wait_s)
    if status == 429:
        return Restart("throttled", f"the API server is too busy for us (429): {said}", wait_s=wait_s)
    if status >= 500:
        return Restart("server_error", f"the API server fails ({status}): {said}", wait_s=wait_s)
    return Restart("refused", f"an answer that makes no sense here ({status}): {said}", anew=True, wait_s=wait_s)


def message(body: bytes) -> str:
    """The sentence in an API server's Status; of any other body, its beginning."""
    try:
        said = _status.decode(body).message
    except msgspec.DecodeError:
        said = body[: 4 * _LONGEST_MESSAGE].decode("utf-8", "replace")
    return " ".join(said.split())[:_LONGEST_MESSAGE] or "without a word"
