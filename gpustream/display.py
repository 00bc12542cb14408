"""Where a run is shown: redrawn in place on a terminal, as a line now and then elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from gpustream import live
from gpustream.live import Frame

DRAW_EVERY_S = 0.5
LINE_EVERY_S = 5.0


class Display(Protocol):
    """Something that shows frames, as often as it sees fit."""

    def show(self, elapsed_s: float, frame: Callable[[], Frame]) -> None:
        """Shows the frame, or does not ask for it where it is too early."""


class Screen:
    """Redraws the frame in place."""

    def __init__(self, drawn: Live) -> None:
        self._drawn = drawn
        self._due_s = 0.0

    def show(self, elapsed_s: float, frame: Callable[[], Frame]) -> None:
        """Twice a second."""
        if elapsed_s >= self._due_s:
            self._due_s = elapsed_s + DRAW_EVERY_S
            self._drawn.update(live.screen(frame(), self._drawn.console.height), refresh=True)


class Lines:
    """Writes a line for the frame."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._due_s = LINE_EVERY_S

    def show(self, elapsed_s: float, frame: Callable[[], Frame]) -> None:
        """Every five seconds."""
        if elapsed_s >= self._due_s:
            self._due_s += LINE_EVERY_S
            self._out.write(live.line(frame()) + "\n")
            self._out.flush()


@contextlib.contextmanager
def displayed(*, watched: bool, to_stderr: bool) -> Iterator[Display]:
    """The display for a terminal that is ``watched``, else lines; ``to_stderr`` keeps standard output free of them."""
    if not watched:
        yield Lines(sys.stderr if to_stderr else sys.stdout)
        return
    with Live(console=Console(), auto_refresh=False) as drawn:
        yield Screen(drawn)
