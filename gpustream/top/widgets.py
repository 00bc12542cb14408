"""The widgets of the terminal application: scrolling lines, the help, and a question."""

import functools
from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from gpustream.top import draw
from gpustream.top.draw import Line

HELP = """\
1 to 7, Tab     fleet, nodes, GPUs, pods, workloads, alerts, log
↑ ↓ j k, wheel  move; PgUp PgDn, Home End (g G): further
Enter, click    what is behind a row: a node's or pod's GPUs,
                a workload's pods, a GPU's last minutes, an alert
Esc             back; then out of the filter
/               filter: words that a row must have, !word must not
< >             sort by the column to the left or right;
                or click its title, twice: the other way round
r               the other way round
Space           hold the picture still, and go on
q               quit
Ctrl-Z          to the shell; fg brings it back

█ busy, as high as it is used    i idle: held, and does nothing
h held, and its use not known    · free    ? silent for 15 s
X failing: lost, does not answer, or unwell"""


class Pane(Widget, can_focus=True):
    """Scrolling lines below a fixed head. Draws only the lines that changed."""

    def __init__(self) -> None:
        super().__init__(id="lines")
        self.head: list[Line] = []
        self.count = 0
        self.line: Callable[[int], Line] = lambda _: []
        self.top = 0
        self.cursor: int | None = None
        self._drawn: list[Line] = []

    @property
    def room(self) -> int:
        """How many of the scrolling lines are visible at once."""
        return max(1, self.size.height - len(self.head))

    def show(self, head: list[Line], count: int, line: Callable[[int], Line], cursor: int | None) -> None:
        """Shows these lines, the marked one among them if there is one."""
        self.head, self.count, self.line, self.cursor = head, count, line, cursor
        if cursor is not None:
            self.top = min(max(self.top, cursor - self.room + 1), cursor)
        self.top = max(0, min(self.top, count - self.room))
        drawn = [self._line(y) for y in range(self.size.height)]
        changed = [y for y, line_drawn in enumerate(drawn) if y >= len(self._drawn) or self._drawn[y] != line_drawn]
        self._drawn = drawn
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _line(self, y: int) -> Line:
        width = self.size.width
        if y < len(self.head):
            return draw.fit(self.head[y], width)
        index = self.top + y - len(self.head)
        if index >= self.count:
            return draw.fit([], width)
        has_bar = self.count > self.room
        fitted = draw.fit(self.line(index), width - has_bar, "reverse" if index == self.cursor else "")
        if not has_bar:
            return fitted
        first, length = self.top * self.room // self.count, max(1, self.room * self.room // self.count)
        return [*fitted, ("┃", "") if first <= y - len(self.head) < first + length else ("│", "dim")]

    def render_line(self, y: int) -> Strip:
        """A line of the screen, as Textual asks for it."""
        line = self._drawn[y] if y < len(self._drawn) else self._line(y)
        return Strip([Segment(text, _style(style)) for text, style in line], self.size.width)


_style = functools.cache(Style.parse)


class Question(ModalScreen[bool]):
    """Asks a question; the result says whether the answer was yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter,ctrl+c", "dismiss(True)", "yes"),
        Binding("n,escape,q", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny: yes    n: no", classes="box", markup=False)


class Help(ModalScreen[None]):
    """The keys, and what the signs mean. Any key closes it."""

    def compose(self) -> ComposeResult:
        yield Static(HELP, classes="box", markup=False)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.dismiss()

    def on_click(self) -> None:
        self.dismiss()
