"""Builds commands from records of settings. A command reports every error of its command line at once.

In:       records of settings (:mod:`delivery.settings`); arguments and environment variables, as click parses them.
Out:      the parsed parameters, and the settings and the component made from them; or one usage error (exit code 2)
          with a line for each error.

Each option has one environment variable, ``GPUSTREAM_`` and its name, whatever the subcommand.
"""

import dataclasses
import difflib
import errno
import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar

import click

from delivery import settings as schema
from delivery.connection import Connection
from delivery.redaction import redact
from delivery.settings import LISTEN, ComponentSpec, ConnectionSettings, Field, Text
from delivery.values import Address

S = TypeVar("S")
Decorator = Callable[[Any], Any]

_ERRORS = "gpustream.errors"
_INVALID = "gpustream.invalid"
_VARIABLE = "GPUSTREAM_"
_OPTION = re.compile(r"--[\w-]+")
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}
_UNBROKEN_HYPHEN = "\u2011"

HELP_BY = {"help_option_names": ["--help", "-h"]}
"""The options that show the help of any command."""


def output_failure(error: BaseException | None) -> str | None:
    """What to say of an error if an output can't be written, as on a full disk; None of any other error."""
    if not isinstance(error, OSError) or error.errno not in _OUTPUT_ERRORS:
        return None
    return f"can't write: {error.strerror}{f': {error.filename}' if error.filename else ''}"


class UsageErrors(click.UsageError):
    """Every error of a command line and its environment, and the variables in it that are misspelt. In a container
    they are in its log, so they repeat no password of a URL."""

    def __init__(self, errors: list[str], ctx: click.Context) -> None:
        errors = errors + _misspelt_variables(name for param in ctx.command.params for name in param.opts)
        lines = errors if len(errors) == 1 else [f"{len(errors)} mistakes:", *(f"  {error}" for error in errors)]
        super().__init__(redact("\n".join(lines)), ctx)


class _Collecting(click.Parameter):
    """A parameter that notes its error and takes a valid value instead, so that parsing goes on."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """As click's, but never raises a usage error."""
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.UsageError as error:
            ctx.meta.setdefault(_ERRORS, []).append(error.format_message().strip())
            ctx.meta.setdefault(_INVALID, set()).update(self.opts)
            example = getattr(self.type, "example", None)
            value = self.get_default(ctx) if example is None else self.type.convert(example, self, ctx)
            value = (value,) if getattr(self, "multiple", False) else value
            ctx.params[self.name or ""] = value
            return value, args


class Option(_Collecting, click.Option):
    """An option of a :class:`Command`."""


class Argument(_Collecting, click.Argument):
    """An argument of a :class:`Command`."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A sentence with the choice that is most like the word; empty if none is like it."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _misspelt_variables(option_names: Iterable[str]) -> list[str]:
    """What to say of each variable of the environment that is nearly one of these options', and so is not read."""
    names = {envvar(name).removeprefix(_VARIABLE) for name in option_names if name.startswith("--")}
    unread = [name.removeprefix(_VARIABLE) for name in os.environ if name.startswith(_VARIABLE)]
    meant = [(name, difflib.get_close_matches(name, names, n=1, cutoff=0.8)) for name in unread if name not in names]
    return [
        f"{_VARIABLE}{name} is no variable of this command. Did you mean {_VARIABLE}{close[0]}?"
        for name, close in meant
        if close
    ]


def _argument_of(args: list[str], name: str) -> str:
    """The argument in which click found an option that the command lacks: ``--nmae=x``, or ``-hn`` for ``-n``."""
    written = re.compile(rf"-[^-=]*{re.escape(name[1:])}" if len(name) == 2 else rf"{re.escape(name)}(=|$)")
    return next(arg for arg in args if written.match(arg))


class HelpFormatter(click.HelpFormatter):
    """Writes help as click does, but breaks no line after a hyphen: ``--stale-after`` and
    ``gpustream-sink-scrape`` stay whole, to be found and copied."""

    def write(self, string: str) -> None:
        super().write(string.replace(_UNBROKEN_HYPHEN, "-"))

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _UNBROKEN_HYPHEN))

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Add a list of terms, each with its wrapped text."""
        unbroken = [(term, text.replace("-", _UNBROKEN_HYPHEN)) for term, text in rows]
        super().write_dl(unbroken, col_max, col_spacing)


class HelpContext(click.Context):
    """Where a command runs: its help is written by :class:`HelpFormatter`."""

    formatter_class = HelpFormatter


class CommandGroup(click.Group):
    """A click group that answers a misspelt command with the most similar one, or with all of them."""

    context_class = HelpContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's. The error for an unknown option names the commands: the option may be of one of them."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not error.possibilities:
                names = ", ".join(self.list_commands(ctx))
                error.message = f"No such option {error.option_name!r} before a command. The commands are: {names}."
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with a suggestion."""
        names = self.list_commands(ctx)
        if args[0] not in names and not ctx.resilient_parsing:
            hint = did_you_mean(args[0], names) or f" The commands are: {', '.join(names)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


class Command(click.Command):
    """A click command with an example in its help, whose errors are all reported at once.

    ``check`` gets all parameters, and returns what is wrong with their combination. If a value is invalid, it gets the
    example of the option's type instead, so that one error does not hide the others. What ``check`` says of an option
    whose value is invalid is left out: it is about the example.
    """

    context_class = HelpContext

    def __init__(
        self,
        *args: Any,
        check: Callable[[dict[str, Any]], Iterable[str]] | None = None,
        example: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{"context_settings": HELP_BY, **kwargs})
        self.check = check
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses everything, then raises :class:`UsageErrors` if anything was wrong."""
        ctx.allow_extra_args = True
        args = list(args)
        errors: list[str] = []
        unknown: list[str] = []
        without_value: set[str | None] = set()
        while True:
            try:
                extra_args = super().parse_args(ctx, list(args))
                break
            except click.BadOptionUsage as error:
                errors.append(error.format_message())
                without_value.add(error.option_name)
                args = [arg for arg in args if arg.partition("=")[0] != error.option_name]
            except click.NoSuchOption as error:  # not left to click, which can take it for a file or another argument
                argument = _argument_of(args, error.option_name)
                unknown.append(argument.partition("=")[0])
                args.remove(argument)
        errors += [error for error in ctx.meta.get(_ERRORS, ()) if without_value.isdisjoint(_OPTION.findall(error))]
        valid_names = [name for param in self.get_params(ctx) for name in param.opts]
        errors += [f"No such option {name!r}.{did_you_mean(name, valid_names)}" for name in unknown]
        if not unknown:  # an unknown option could have brought the surplus arguments
            errors += [f"Got an unexpected argument {arg!r}." for arg in extra_args]
        invalid = ctx.meta.get(_INVALID, set()) | without_value
        checked = self.check(ctx.params) if self.check else ()
        errors += [error for error in checked if invalid.isdisjoint(_OPTION.findall(error))]
        if errors and not ctx.resilient_parsing:
            raise UsageErrors(errors, ctx)
        return []

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The example, as it would be typed."""
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


# -- options, from records of settings


def envvar(option_name: str) -> str:
    """The environment variable of an option: ``--session-timeout`` is ``GPUSTREAM_SESSION_TIMEOUT``."""
    return _VARIABLE + option_name.lstrip("-").replace("-", "_").upper()


def option(name: str, *declarations: str, **attributes: Any) -> Decorator:
    """A click option with its environment variable, both shown in the help with the default."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(name, *declarations, cls=Option, envvar=envvar(name), show_envvar=True, **attributes)


def combined(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in the order of the help."""
    return lambda function: functools.reduce(lambda decorated, add: add(decorated), reversed(decorators), function)


def options(*records: type[Any], only: Sequence[str] = ()) -> Decorator:
    """Adds the options of these records, each once, in the order of the help; if ``only`` names fields, only theirs.

    A default is given to click as it would be typed, so that help and docs can show it.
    """
    fields_by_option: dict[str, Field] = {}
    for field in (field for record in records for field in schema.fields(record)):
        if not only or field.name in only:
            fields_by_option.setdefault(field.option.name, field)

    def decorate(function: Any) -> Any:
        for field in reversed(fields_by_option.values()):
            attributes: dict[str, Any] = {"help": field.option.help, "multiple": field.option.repeatable}
            attributes |= {"is_flag": True} if field.is_flag else {"type": field.type}
            if field.default is schema.REQUIRED:
                attributes["required"] = True
            elif field.default is not None and not field.option.repeatable:
                show = field.type.show if isinstance(field.type, Text) and not callable(field.default) else None
                attributes["default"] = show(field.default) if show else field.default
            if field.option.shown is not None or field.is_flag:
                attributes["show_default"] = field.option.shown or False
            function = option(field.option.name, field.name, **attributes)(function)
        return function

    return decorate


OWN_ADDRESS = Address("127.0.0.1", 9401)


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """The settings of every long-running process, beside its component's. If ``listen`` is None, it listens nowhere."""

    listen: Annotated[
        Address | None,
        schema.Option("--listen", LISTEN, "Where this process serves its own /metrics, /healthz and /readyz."),
    ] = OWN_ADDRESS
    log_format: Annotated[
        Literal["text", "json"], schema.Option("--log-format", None, "How log lines on standard error are written.")
    ] = "text"


OF_CONNECTION = tuple(field.name for field in dataclasses.fields(ConnectionSettings))


def connection(values: Mapping[str, Any]) -> Connection:
    """The connection to Kafka that these values of options describe. Raises :class:`UsageErrors`."""
    settings = record_of(ConnectionSettings, values)
    if messages := settings.errors():
        raise UsageErrors(messages, click.get_current_context())
    return settings.connection()


def _connecting(function: Callable[..., Any]) -> Any:
    """Adds the options of the connection to Kafka; the function gets the ``connection`` made from them."""

    @functools.wraps(function)
    def with_connection(**values: Any) -> Any:
        other_values = {name: value for name, value in values.items() if name not in OF_CONNECTION}
        return function(connection=connection(values), **other_values)

    return options(ConnectionSettings)(with_connection)


KAFKA: Decorator = _connecting


def logged(level: int = logging.INFO) -> Decorator:
    """Adds the option ``--log-format``, and sets up logging in that format before the command runs."""

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(log_format: Literal["text", "json"], **values: Any) -> Any:
            from gpustream import logs

            logs.setup(log_format, level)
            return function(**values)

        return options(ProcessSettings, only=("log_format",))(run)

    return decorate


LOG_FORMAT = logged()


def output_format(*names: str, help: str) -> Decorator:  # noqa: A002 - as in click
    """The option ``--format``, which the command gets as ``form``. The first name is the default."""
    return option("--format", "form", type=click.Choice(names), default=names[0], help=help)


# -- settings and components, from the values of options


def record_of(kind: type[S], values: Mapping[str, Any]) -> S:
    """A record of settings from these values of its fields. A field without a value has its default."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type] # a dataclass
    return kind(**{field.name: values[field.name] for field in fields if field.name in values})


def settings(spec: ComponentSpec, values: Mapping[str, Any]) -> Any:
    """The settings of a component from these values of its fields."""
    return record_of(resolve_name(spec.settings), values)


def errors(spec: ComponentSpec, values: Mapping[str, Any]) -> list[str]:
    """Every error in the settings of a component, as sentences for whoever wrote them."""
    messages: list[str] = settings(spec, values).errors()
    return messages


def component(spec: ComponentSpec, values: Mapping[str, Any], **hooks: Any) -> Any:
    """The component, with its settings from these values. ``hooks`` are further arguments of its constructor."""
    return resolve_name(spec.component)(settings(spec, values), **hooks)
