"""Parses and checks command lines of gpustream without running them."""

from collections.abc import Iterable

import click

from gpustream.cli import main


def parsed(arguments: Iterable[str]) -> click.Context:
    """The context of the arguments after ``gpustream``. Raises the command's own exception if they are wrong."""
    remaining, context = list(arguments), click.Context(main, **main.context_settings)
    command: click.Command | None = main
    while isinstance(command, click.Group):
        name, *remaining = remaining
        command = command.get_command(context, name)
        assert command is not None, name
        if isinstance(command, click.Group):
            context = click.Context(command, parent=context)
    assert command is not None
    return command.make_context(command.name, remaining, parent=context)
