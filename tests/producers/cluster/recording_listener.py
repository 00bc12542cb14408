"""A listener that records its calls."""

import json
from typing import Any

from producers.cluster.reflector import Listener


class RecordingListener(Listener[Any]):
    """Keeps the ``objects`` by their names, and the ``calls`` in their order."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self._listed: set[str] | None = None

    def begin(self) -> None:
        self.calls.append("begin")
        self._listed = set()

    def put(self, raw: bytes) -> None:
        assert type(raw) is bytes
        content = json.loads(raw)
        name = content["metadata"]["name"]
        self.calls.append(f"put {name}")
        self.objects[name] = content
        if self._listed is not None:
            self._listed.add(name)

    def remove(self, raw: bytes) -> None:
        name = json.loads(raw)["metadata"]["name"]
        self.calls.append(f"remove {name}")
        self.objects.pop(name, None)

    def complete(self) -> None:
        self.calls.append("complete")
        self.objects = {name: self.objects[name] for name in self._listed or ()}
        self._listed = None

    @property
    def lists(self) -> int:
        return self.calls.count("complete")
