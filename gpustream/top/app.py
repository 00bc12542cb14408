"""The terminal application: keys, mouse, and what of the screen is drawn again.

In:       a function that gives the moment to be shown; keys and the mouse.
Out:      the screen: twice a second at most, and of it only the lines that changed.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.widget import Widget
from textual.widgets import Input, Static

from gpustream.fleet import Device, Use
from gpustream.top import draw, views
from gpustream.top.draw import Line, TableView
from gpustream.top.views import FiringAlert, NodeRow, Now
from gpustream.top.widgets import Help, Pane, Question

W = TypeVar("W", bound=Widget)

DRAW_EVERY_S = 0.5
LOG_LINES = 200

_WHEEL = 3
_NAMES = ("Fleet", *(table.name for table in views.TABLES), "Log")
_TABLES = {table.name: table for table in views.TABLES}
_FILTERED_HINT = "words that a row must have; !word: must not have"


@dataclass(frozen=True)
class Place:
    """What is looked at: a view, the rows that are in it, how they are sorted, and which one is marked."""

    view: str
    about: str = ""
    only: Callable[[Any], bool] | None = None
    filter: str = ""
    sorted_by: str = ""
    falling: bool = False
    marked: Any = None
    detail: Any = None


def _fresh(view: str) -> Place:
    table = _TABLES.get(view)
    by = table.sorted_by if table else ""
    return Place(view, sorted_by=by, falling=table.column(by).falling if table else False)


class TopApp(App[None]):
    """Shows what ``now`` gives. ``question`` is asked before ``quit`` is called; without one it is not."""

    CSS = """
    Screen { background: transparent; }
    #title, #tabs, #keys { height: 1; }
    #trouble { height: auto; max-height: 2; display: none; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #pane { height: 1fr; }
    ModalScreen { align: center middle; }
    .box { width: auto; max-width: 100%; height: auto; max-height: 100%; padding: 0 2; border: round ansi_blue; }
    """
    ENABLE_COMMAND_PALETTE = False
    TITLE = "gpustream"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view({name!r})", name) for number, name in enumerate(_NAMES, 1)),
        Binding("tab", "next_view(1)", priority=True),
        Binding("shift+tab", "next_view(-1)", priority=True),
        Binding("down,j", "move(1)"),
        Binding("up,k", "move(-1)"),
        Binding("pagedown,ctrl+f", "page(1)"),
        Binding("pageup,ctrl+b", "page(-1)"),
        Binding("home,g", "move(-1000000)"),
        Binding("end,G", "move(1000000)"),
        Binding("enter", "enter"),
        Binding("escape", "leave", priority=True),
        Binding("slash", "filter"),
        Binding("less_than_sign,comma,left", "sort(-1)"),
        Binding("greater_than_sign,full_stop,right", "sort(1)"),
        Binding("r", "reverse"),
        Binding("space", "hold"),
        Binding("question_mark,h,f1", "help"),
        Binding("q,ctrl+q", "ask", priority=False),
        Binding("ctrl+c", "stop", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
    ]

    def __init__(
        self, now: Callable[[], Now], *, quit_now: Callable[[], None] | None = None, question: str = ""
    ) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self._moment = now
        self._quit_now, self._question = quit_now or self.exit, question
        self._now: Now | None = None
        self._places = {name: _fresh(name) for name in _NAMES}
        self._stack: list[Place] = []
        self._view = _NAMES[0]
        self._held = False
        self._rows: list[Any] = []
        self.logged: deque[str] = deque(maxlen=LOG_LINES)

    def compose(self) -> ComposeResult:
        """A title, the views, what is wrong, the view, the filter, the keys."""
        yield Static(id="title", markup=False)
        yield Static(id="tabs", markup=False)
        yield Static(id="trouble", markup=False)
        with Vertical(id="pane"):
            yield Pane(id="lines")
        yield Input(id="filter", placeholder=_FILTERED_HINT, select_on_focus=False)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        """Draws, and goes on to draw."""
        self.begin_capture_print(self, stdout=False)
        self.pane.focus()
        self.set_interval(DRAW_EVERY_S, self._draw_again)
        self.call_after_refresh(self.draw)

    @property
    def pane(self) -> Pane:
        """The lines."""
        return self._find("#lines", Pane)

    def _find(self, selector: str, kind: type[W]) -> W:
        """A widget of the view, whatever lies over it."""
        return self.screen_stack[0].query_one(selector, kind)

    @property
    def place(self) -> Place:
        """What is looked at."""
        return self._places[self._view]

    def _go(self, **changes: Any) -> None:
        self._places[self._view] = replace(self.place, **changes)
        self.draw()

    # -- drawing

    def _draw_again(self) -> None:
        with contextlib.suppress(NoMatches):  # at the end the widgets go before the timer does
            self.draw()

    def draw(self) -> None:
        """Draws the moment, or the one that is held."""
        if self._now is None or not self._held:
            self._now = self._moment()
        width, place = self.size.width, self.place
        clock = f"{self._now.at:%H:%M:%S}Z" + (" HELD" if self._held else "")
        left = " · ".join((self._now.title, *self._now.facts))
        self._put("#title", [*draw.fit([(left, "bold")], max(0, width - len(clock) - 1)), (f" {clock}", "")])
        tabs: Line = []
        for number, name in enumerate(_NAMES, 1):
            count = f"({len(self._now.firing)})" if name == "Alerts" and self._now.firing else ""
            tabs += [(f" {number} {name}{count} ", "reverse bold" if name == self._view else ""), (" ", "")]
        self._put("#tabs", draw.fit(tabs, width))
        said = [f"filter: {place.filter}" if place.filter else "", place.about]
        keys = "? help  / filter  < > sort  Enter open  Esc back  q quit"
        keys = "  ".join(filter(None, (*said, keys)))
        self._put("#keys", draw.fit([(keys, "dim")], width))
        trouble = self._find("#trouble", Static)
        trouble.display = bool(self._now.trouble)
        if self._now.trouble:
            self._put("#trouble", [(self._now.trouble, "yellow")])
        pane = self.pane
        if place.detail is not None:
            lines = self._detail(self._now, place.detail)
            pane.show([], len(lines), lambda at, _: lines[at], None)
        elif place.view in _TABLES:
            self._draw_table(self._now, _TABLES[place.view], place)
        else:
            lines = (
                views.fleet_lines(self._now, self.size.width, self.size.height)
                if place.view == "Fleet"
                else ([[(line, "")] for line in self.logged] or [[("nothing was logged", "dim")]])
            )
            pane.show([], len(lines), lambda at, _: lines[at], None)

    def _draw_table(self, now: Now, table: TableView, place: Place) -> None:
        rows = [one for one in table.rows(now) if place.only is None or place.only(one)]
        self._rows = draw.chosen(table, rows, place.filter, place.sorted_by, falling=place.falling)
        at = next((n for n, one in enumerate(self._rows) if table.key(one) == place.marked), 0)
        if self._rows and place.marked is None:
            self._places[self._view] = replace(place, marked=table.key(self._rows[0]))
        width = self.size.width - 1
        head = [draw.head(table.columns, width, place.sorted_by, falling=place.falling)]
        if not self._rows:
            found = f"nothing has {place.filter!r}" if place.filter else table.empty
            self.pane.show(head, 1, lambda _at, _width: [(found, "dim")], None)
            return
        self.pane.show(head, len(self._rows), lambda n, _: draw.row(table.columns, self._rows[n], width), at)

    def _detail(self, now: Now, detail: Any) -> list[Line]:
        size = self.size
        if isinstance(detail, Device):
            known = next((one for one in now.fleet.devices() if one.uuid == detail.uuid), detail)
            return views.device_lines(now, known, size.width, size.height)
        current = next((one for one in now.firing if one.alert.fingerprint == detail.alert.fingerprint), detail)
        return views.alert_lines(now, current, size.width, size.height)

    def _put(self, selector: str, line: Line) -> None:
        """Shows a line in a widget, if it is another than before."""
        widget = self._find(selector, Static)
        if getattr(widget, "shown", None) != line:
            widget.shown = line  # type: ignore[attr-defined] # of ours
            widget.update(Text.assemble(*line, no_wrap=selector != "#trouble", end=""))

    def on_print(self, event: events.Print) -> None:
        """Keeps the last lines of what is written to standard error, which would spoil the screen."""
        self.logged.extend(filter(str.strip, event.text.splitlines()))

    def on_resize(self) -> None:
        """Everything is laid out again."""
        self.call_after_refresh(self.draw)

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What lies over the view, such as the help, has the keys to itself."""
        covered = len(self.screen_stack) > 1
        return not (covered and action in ("leave", "next_view"))

    def action_view(self, name: str) -> None:
        """Opens another view; if it is open already, shows all of it."""
        if name == self._view:
            self._stack.clear()
            self._places[name] = replace(_fresh(name), filter=self.place.filter)
        self._view = name
        self.pane.top = 0
        self.draw()

    def action_next_view(self, step: int) -> None:
        """The view to the right or left."""
        self.action_view(_NAMES[(_NAMES.index(self._view) + step) % len(_NAMES)])

    def action_move(self, step: int) -> None:
        """The marked row, or the lines."""
        pane, place = self.pane, self.place
        if pane.cursor is None or place.view not in _TABLES or not self._rows:
            pane.top = max(0, min(pane.top + step, pane.count - pane.room))
            self.draw()
            return
        at = max(0, min(pane.cursor + step, len(self._rows) - 1))
        self._go(marked=_TABLES[place.view].key(self._rows[at]))

    def action_page(self, step: int) -> None:
        """A screen further."""
        self.action_move(step * max(1, self.pane.room - 1))

    def action_enter(self) -> None:
        """What is behind the marked row."""
        place, cursor = self.place, self.pane.cursor
        if place.view == "Fleet":
            self.action_view("GPUs")
        if place.detail is not None or cursor is None or cursor >= len(self._rows) or place.view not in _TABLES:
            return
        one = self._rows[cursor]
        if isinstance(one, NodeRow):
            node = one.node
            self._open("GPUs", f"of {node.name}", lambda d: d.node == node.name and d.cluster == node.cluster)
        elif isinstance(one, Use) and place.view == "Workloads":
            names = {held.name for device in one.devices for held in device.held if held.workload == one.workload}
            self._open("Pods", f"of {one.who}", lambda use: use.who in names)
        elif isinstance(one, Use):
            uuids = {device.uuid for device in one.devices}
            self._open("GPUs", f"of {one.who}", lambda device: device.uuid in uuids)
        elif isinstance(one, Device | FiringAlert):
            self._stack.append(place)
            self.pane.top = 0
            self._go(detail=one)

    def _open(self, view: str, about: str, only: Callable[[Any], bool]) -> None:
        self._stack.append(self.place)
        self._view = view
        self._places[view] = replace(_fresh(view), about=about, only=only)
        self.pane.top = 0
        self.draw()

    def action_leave(self) -> None:
        """Leaves the filter's line, then what was opened, then the filter."""
        entry = self._find("#filter", Input)
        if entry.display:
            entry.display = False
            self.pane.focus()
            self._go(filter="")
        elif self._stack:
            before, left = self._stack.pop(), self._view
            if left != before.view:
                self._places[left] = _fresh(left)
            self._view, self._places[before.view] = before.view, before
            self.draw()
        elif self.place.filter:
            self._go(filter="")

    def action_filter(self) -> None:
        """Opens the line for the filter."""
        if self.place.view in _TABLES and self.place.detail is None:
            entry = self._find("#filter", Input)
            entry.value = self.place.filter
            entry.display = True
            self.screen.set_focus(entry)  # at once: what is typed next is for it

    def on_input_changed(self, event: Input.Changed) -> None:
        """Each letter filters."""
        if self._find("#filter", Input).display:
            self._go(filter=event.value, marked=None)

    def on_input_submitted(self) -> None:
        """The filter stays, and its line goes."""
        self._find("#filter", Input).display = False
        self.pane.focus()

    def action_sort(self, step: int) -> None:
        """By the column to the right or left."""
        if self.place.view in _TABLES:
            columns = [column for column, _ in draw.layout(_TABLES[self.place.view].columns, self.size.width - 1)]
            titles = [column.title for column in columns]
            at = titles.index(self.place.sorted_by) if self.place.sorted_by in titles else 0
            column = columns[(at + step) % len(columns)]
            self._go(sorted_by=column.title, falling=column.falling)

    def action_reverse(self) -> None:
        """The other way round."""
        self._go(falling=not self.place.falling)

    def action_hold(self) -> None:
        """Holds the picture, or lets it go on."""
        self._held = not self._held
        self.draw()

    def action_help(self) -> None:
        """The keys and the signs."""
        self.push_screen(Help())

    async def action_ask(self) -> None:
        """Quits, after a question if there is one."""
        if not self._question:
            self._quit_now()
        else:
            self.push_screen(Question(self._question), lambda yes: self._quit_now() if yes else None)

    def action_stop(self) -> None:
        """Quits at once."""
        self._quit_now()

    # -- the mouse

    def on_mouse_scroll_down(self) -> None:
        """Further down."""
        self.action_move(_WHEEL)

    def on_mouse_scroll_up(self) -> None:
        """Further up."""
        self.action_move(-_WHEEL)

    def on_click(self, event: events.Click) -> None:
        """A tab opens its view, a title sorts, a row is marked, and is opened when it is marked."""
        if len(self.screen_stack) > 1 or event.widget is None:
            return
        if event.widget.id == "tabs":
            edge = 0
            for number, name in enumerate(_NAMES, 1):
                count = f"({len(self._now.firing)})" if self._now and name == "Alerts" and self._now.firing else ""
                edge += cell_len(f" {number} {name}{count} ") + 1
                if event.x < edge:
                    self.action_view(name)
                    return
        elif isinstance(event.widget, Pane) and self.place.view in _TABLES and self.place.detail is None:
            self._click_table(event.x, event.y)

    def _click_table(self, x: int, y: int) -> None:
        place, table = self.place, _TABLES[self.place.view]
        if y == 0:
            edge = 0
            for column, size in draw.layout(table.columns, self.size.width - 1):
                edge += size + 1
                if x < edge:
                    same = column.title == place.sorted_by
                    self._go(sorted_by=column.title, falling=not place.falling if same else column.falling)
                    return
        at = self.pane.top + y - 1
        if 0 <= at < len(self._rows):
            if at == self.pane.cursor:
                self.action_enter()
            else:
                self._go(marked=table.key(self._rows[at]))
