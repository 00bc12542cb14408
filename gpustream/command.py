"""A command that checks all of its configuration at the start, and lists every mistake in one message.

In:       arguments and environment variables, as click parses them.
Out:      the parsed parameters; or one usage error (exit code 2) with a line per mistake.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

Check = Callable[[dict[str, Any]], Iterable[str]]
"""Parameters -> what is wrong with them together."""

_MISTAKES = "gpustream.mistakes"


class Mistakes(click.UsageError):
    """Every mistake of a command line and its environment."""

    def __init__(self, mistakes: list[str], ctx: click.Context) -> None:
        lines = mistakes if len(mistakes) == 1 else [f"{len(mistakes)} mistakes:", *(f"  {m}" for m in mistakes)]
        super().__init__("\n".join(lines), ctx)
        self.mistakes = mistakes


class _Collecting(click.Parameter):
    """A parameter whose mistake is noted, and its value replaced by one that is right, so that parsing goes on."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """As click's, but never raises a usage error."""
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.UsageError as error:
            ctx.meta.setdefault(_MISTAKES, []).append(error.format_message().strip())
            value = self._stand_in(ctx)
            ctx.params[self.name or ""] = value
            return value, args

    def _stand_in(self, ctx: click.Context) -> Any:
        example = getattr(self.type, "example", None)
        value = self.get_default(ctx) if example is None else self.type.convert(example, self, ctx)
        return (value,) if getattr(self, "multiple", False) else value


class Option(_Collecting, click.Option):
    """An option of a :class:`Command`."""


class Argument(_Collecting, click.Argument):
    """An argument of a :class:`Command`."""


class Command(click.Command):
    """A click command with an example in its help, whose mistakes are all reported at once.

    ``check`` sees the parameters together. Where an option was wrong it sees the example of the option's type, so that
    one mistake does not hide the others.
    """

    def __init__(self, *args: Any, check: Check | None = None, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check = check
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses everything, then raises :class:`Mistakes` if anything was wrong."""
        ctx.ignore_unknown_options = ctx.allow_extra_args = True
        mistakes, rest = self._parse(ctx, args)
        mistakes += ctx.meta.get(_MISTAKES, ())
        mistakes += _surplus(self, ctx, rest)
        mistakes += self.check(ctx.params) if self.check else ()
        if mistakes and not ctx.resilient_parsing:
            raise Mistakes(mistakes, ctx)
        return []

    def _parse(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """What is wrong with how options are written, and what was left over of the arguments."""
        mistakes: list[str] = []
        while True:
            try:
                return mistakes, super().parse_args(ctx, list(args))
            except click.BadOptionUsage as error:
                mistakes.append(error.format_message())
                args = [arg for arg in args if arg.partition("=")[0] != error.option_name]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The example, as it would be typed."""
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _surplus(command: click.Command, ctx: click.Context, rest: list[str]) -> list[str]:
    """One mistake per unknown option; surplus arguments only where no unknown option could have brought them."""
    known = [name for param in command.get_params(ctx) for name in param.opts]
    unknown = [arg.partition("=")[0] for arg in rest if arg.startswith("-") and arg != "-"]
    if unknown:
        return [_no_such_option(arg, known) for arg in unknown]
    return [f"Got an unexpected argument {arg!r}." for arg in rest]


def _no_such_option(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"No such option {given!r}." + (f" Did you mean {close[0]}?" if close else "")
