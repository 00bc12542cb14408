"""Components by name: found, loaded and configured without importing any before it is wanted.

A component is a class with ``name``, ``registry``, ``run(stop)`` and ``not_ready()``, made from one frozen record of
settings whose fields are named as the options are (``grace_s`` is ``--grace``, ``headers`` is ``--header``).
"""

import asyncio
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry

_ENDINGS = ("_s", "_bytes", "s")


@runtime_checkable
class Component(Protocol):
    """A producer, a stream or a sink."""

    name: str
    registry: CollectorRegistry

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set, and returns within 8 s of that. Raises when it can't go on."""

    def not_ready(self) -> list[str]:
        """Why it is not ready yet; empty when it is."""


def exists(target: str) -> bool:
    """Whether the module of an import string ``module:name`` is there, without importing it."""
    module, _, _ = target.partition(":")
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def load(target: str) -> Any:
    """The object that an import string ``module:name`` names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def settings_type(component: type[Any]) -> type[Any]:
    """The record of settings that a component is made from: the type of its constructor's first parameter."""
    hints = typing.get_type_hints(component.__init__)
    first = next(iter(inspect.signature(component).parameters))
    kind: type[Any] = hints[first]
    return kind


def settings(component: type[Any], options: Mapping[str, Any]) -> Any:
    """The settings of a component from the options that have a field of that name, with or without its unit.

    None is an option that was not given, which leaves the field's own default; but where the field may be None itself,
    it is what was given, such as ``off``.
    """
    kind = settings_type(component)
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for field, parameter in inspect.signature(kind).parameters.items():
        option = field if field in options else option_of(field)
        value = options.get(option)
        if (
            value is not None
            or parameter.default is parameter.empty
            or (option in options and _may_be_none(hints[field]))
        ):
            given[field] = value
    return kind(**given)


def _may_be_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def option_of(field: str) -> str:
    """The option that sets a field: its name without the unit, and one of what may be given several times."""
    for ending in _ENDINGS:
        if field.endswith(ending):
            return field.removesuffix(ending)
    return field


def mistakes(component: type[Any], options: Mapping[str, Any]) -> list[str]:
    """What the component itself finds wrong with its settings: ``mistakes()``, or a ValueError when they are made."""
    try:
        made = settings(component, options)
    except ValueError as error:
        return [str(error)]
    return list(made.mistakes()) if hasattr(made, "mistakes") else []
