"""The options of the command, made from records of settings: see :mod:`delivery.settings`.

Each has one environment variable, ``GPUSTREAM_`` and its name, whatever the subcommand.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from delivery import settings
from delivery.settings import Field, KafkaSettings, Text
from gpustream.command import Option
from gpustream.config import ProcessSettings

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]


def envvar(option_name: str) -> str:
    """The environment variable of an option: ``--session-timeout`` is ``GPUSTREAM_SESSION_TIMEOUT``."""
    return "GPUSTREAM_" + option_name.lstrip("-").replace("-", "_").upper()


def option(name: str, *declarations: str, **attributes: Any) -> Decorator[Any]:
    """A click option with its environment variable, both shown in the help with the default."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(name, *declarations, cls=Option, envvar=envvar(name), show_envvar=True, **attributes)


def options(*records: type[Any], only: Sequence[str] = ()) -> Decorator[Any]:
    """The options of these records, each once, in the order of the help; ``only`` those of these fields."""
    found: dict[str, Field] = {}
    for field in (field for record in records for field in settings.fields(record)):
        if not only or field.name in only:
            found.setdefault(field.option.name, field)

    def decorate(function: F) -> F:
        for field in reversed(found.values()):
            function = _decorator(field)(function)
        return function

    return decorate


def _decorator(field: Field) -> Decorator[Any]:
    """A field as a click option. The default is given as it would be typed, so that help and docs can show it."""
    how: dict[str, Any] = {"help": field.option.help, "multiple": field.option.repeatable}
    if field.is_flag:
        how["is_flag"] = True
    else:
        how["type"] = field.type
    if field.default is settings.REQUIRED:
        how["required"] = True
    elif field.default is not None and not field.option.repeatable:
        as_typed = field.type.show if isinstance(field.type, Text) and not callable(field.default) else lambda it: it
        how["default"] = as_typed(field.default)
    if field.option.shown is not None or field.is_flag:
        how["show_default"] = field.option.shown or False
    return option(field.option.name, field.name, **how)


KAFKA = options(KafkaSettings, only=("kafka",))
LOG_FORMAT = options(ProcessSettings, only=("log_format",))
