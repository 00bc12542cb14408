"""An Alertmanager in memory: what it accepts, what it refuses, and which alerts fire in it."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sinks.receiver import Reply
from tests.sinks.receivers import Scripted


class FakeAlertmanager(Scripted):
    """Takes alerts as Alertmanager does: the valid ones of a request are in, however it answers.

    ``bad`` are names of pods whose alerts it finds invalid. ``held`` has the last alert of each pod, and
    ``by_labels`` each that it tells apart: alerts with other labels are other alerts.
    """

    def __init__(self, *script: int, bad: frozenset[str] = frozenset()) -> None:
        super().__init__(*script, default_status=self._judge)
        self.bad = bad
        self.held: dict[str, Mapping[str, Any]] = {}
        self.by_labels: dict[frozenset[tuple[str, str]], Mapping[str, Any]] = {}
        self.heard: list[tuple[str, bool]] = []

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """One attempt."""
        assert url.endswith("/api/v2/alerts")
        reply = await super().post(url, body, headers)
        if reply.status in {200, 400}:
            for alert in json.loads(body):
                self._take(alert)
        return reply

    def restart(self) -> None:
        """Forgets all alerts: it has them in memory only."""
        self.held.clear()
        self.by_labels.clear()

    def firing(self) -> set[str]:
        """The pods whose alerts fire now."""
        return {pod for pod, alert in self.held.items() if _fires(alert)}

    def severities(self) -> list[tuple[str, str]]:
        """The pod and the severity of each alert that fires now."""
        all_labels = [alert["labels"] for alert in self.by_labels.values() if _fires(alert)]
        return sorted((labels["k8s_pod_name"], labels["severity"]) for labels in all_labels)

    def _judge(self, body: bytes) -> int:
        return 400 if any(alert["labels"]["k8s_pod_name"] in self.bad for alert in json.loads(body)) else 200

    def _take(self, alert: Mapping[str, Any]) -> None:
        pod = alert["labels"]["k8s_pod_name"]
        if pod not in self.bad:
            self.held[pod] = self.by_labels[frozenset(alert["labels"].items())] = alert
            self.heard.append((pod, pod in self.firing()))


def _fires(alert: Mapping[str, Any]) -> bool:
    return datetime.fromisoformat(alert["endsAt"]) > datetime.now(UTC)
