"""Command lines of gpustream, checked as its commands do, and not run."""

from collections.abc import Iterable

import click

from gpustream.cli import main


def parsed(arguments: Iterable[str]) -> click.Context:
    """What a command line says after ``gpustream``. Raises what the command raises if it is wrong."""
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
