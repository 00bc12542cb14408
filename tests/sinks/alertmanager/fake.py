"""An Alertmanager in memory: what it takes, what it finds wrong, and what it then holds to be firing."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sinks.receiver import Reply
from tests.sinks.receivers import Scripted


class FakeAlertmanager(Scripted):
    """Takes alerts as Alertmanager does: the valid ones of a request are in, however it answers.

    ``bad`` are names of pods whose alerts it finds invalid.
    """

    def __init__(self, *script: int, bad: frozenset[str] = frozenset()) -> None:
        super().__init__(*script, then=self._judge)
        self.bad = bad
        self.held: dict[str, Mapping[str, Any]] = {}
        self.heard: list[tuple[str, bool]] = []

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """One attempt."""
        assert url.endswith("/api/v2/alerts")
        reply = await super().post(url, body, headers)
        if reply.status in {200, 400}:
            for one in json.loads(body):
                self._take(one)
        return reply

    def restart(self) -> None:
        """It has alerts in memory only."""
        self.held.clear()

    def firing(self) -> set[str]:
        """The pods whose alerts fire, as of now."""
        return {pod for pod, one in self.held.items() if datetime.fromisoformat(one["endsAt"]) > datetime.now(UTC)}

    def _judge(self, body: bytes) -> int:
        return 400 if any(one["labels"]["k8s_pod_name"] in self.bad for one in json.loads(body)) else 200

    def _take(self, one: Mapping[str, Any]) -> None:
        pod = one["labels"]["k8s_pod_name"]
        if pod not in self.bad:
            self.held[pod] = one
            self.heard.append((pod, pod in self.firing()))
