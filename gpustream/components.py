"""Components by name: loaded and configured without importing any before it is wanted.

A component is a class with ``name``, ``registry``, ``run(stop)`` and ``not_ready()``, made from one frozen record of
settings.
"""

import asyncio
import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry

from delivery.settings import Registered


@runtime_checkable
class Component(Protocol):
    """A producer, a stream or a sink."""

    name: str
    registry: CollectorRegistry

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set, and returns within 8 s of that. Raises when it can't go on."""

    def not_ready(self) -> list[str]:
        """Why it is not ready yet; empty when it is."""


def load(target: str) -> Any:
    """The object that an import string ``module:name`` names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def settings(row: Registered, given: Mapping[str, Any]) -> Any:
    """The settings of a component from the values given for its fields; the others have their defaults."""
    record = load(row.settings)
    return record(**{field.name: given[field.name] for field in dataclasses.fields(record) if field.name in given})


def mistakes(row: Registered, given: Mapping[str, Any]) -> list[str]:
    """Every mistake in what was given to a component, in words for whoever wrote it."""
    found: list[str] = settings(row, given).mistakes()
    return found


def make(row: Registered, given: Mapping[str, Any], **hooks: Any) -> Any:
    """The component with its settings. ``hooks`` are further arguments of its constructor."""
    return load(row.component)(settings(row, given), **hooks)
