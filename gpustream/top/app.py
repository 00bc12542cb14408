"""The terminal application: keys, mouse, and drawing.

In:       a function that returns the moment to show; keys and the mouse.
Out:      the screen, drawn at most twice a second, and only the lines that changed.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
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
from gpustream.top.moment import FiringAlert, Now
from gpustream.top.tables import GPUS, TABLES, NodeRow
from gpustream.top.widgets import Help, Pane, Question

W = TypeVar("W", bound=Widget)

DRAW_EVERY_S = 0.5
LOG_LINES = 200

_WHEEL = 3
_NAMES = ("Fleet", *(table.name for table in TABLES), "Log")
_TABLES = {table.name: table for table in TABLES}
_KEY_HINTS = "? help  / filter  < > sort  Enter open  Esc back  q quit"
_FILTER_HINT = "words that a row must have; !word: must not have"


@dataclass(frozen=True)
class ViewState:
    """The state of a view: which rows are in it, how they are sorted, and which one is marked.

    ``about`` says in words which rows ``only`` keeps; None keeps all. ``detail`` is the row that is shown by itself.
    """

    view: str
    about: str = ""
    only: Callable[[Any], bool] | None = None
    filter: str = ""
    sorted_by: str = ""
    descending: bool = False
    marked: Any = None
    detail: Any = None


def _new_state(view: str) -> ViewState:
    table = _TABLES.get(view)
    by = table.sorted_by if table else ""
    return ViewState(view, sorted_by=by, descending=table.column(by).descending if table else False)


class TopApp(App[None]):
    """Shows what ``now`` returns. ``q`` calls ``quit_now``, after asking the ``question`` if there is one."""

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
        self._get_now = now
        self._quit_now, self._question = quit_now or self.exit, question
        self._now: Now | None = None
        self._states = {name: _new_state(name) for name in _NAMES}
        self._stack: list[ViewState] = []
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
            yield Pane()
        yield Input(id="filter", placeholder=_FILTER_HINT, select_on_focus=False)
        yield Static(id="keys", markup=False)

    def on_load(self) -> None:
        """Textual makes every task of the loop eager, also those of the pipeline that runs beside it: undo that."""
        asyncio.get_running_loop().set_task_factory(None)

    def on_mount(self) -> None:
        self.begin_capture_print(self, stdout=False)
        self.pane.focus()
        self.set_interval(DRAW_EVERY_S, self._draw_again)
        self.call_after_refresh(self.draw)

    @property
    def pane(self) -> Pane:
        return self._find("#lines", Pane)

    def _find(self, selector: str, kind: type[W]) -> W:
        """A widget of the main screen, even if a dialog lies over it."""
        return self.screen_stack[0].query_one(selector, kind)

    @property
    def state(self) -> ViewState:
        return self._states[self._view]

    def _change(self, **changes: Any) -> None:
        self._states[self._view] = replace(self.state, **changes)
        self.draw()

    # -- drawing

    def _draw_again(self) -> None:
        with contextlib.suppress(NoMatches):  # at the end the widgets and the screens go before the timer does
            if self.screen_stack:
                self.draw()

    def draw(self) -> None:
        """Draws the current moment, or again the moment that is held."""
        if self._now is None or not self._held:
            self._now = self._get_now()
        width, state = self.size.width, self.state
        clock = f"{self._now.at:%H:%M:%S}Z" + (" HELD" if self._held else "")
        title = " · ".join((self._now.title, *self._now.facts))
        self._show_line("#title", [*draw.fit([(title, "bold")], max(0, width - len(clock) - 1)), (f" {clock}", "")])
        tabs: Line = []
        for name, label in self._tabs():
            tabs += [(label, "reverse bold" if name == self._view else ""), (" ", "")]
        self._show_line("#tabs", draw.fit(tabs, width))
        context = [f"filter: {state.filter}" if state.filter else "", state.about]
        hints = "  ".join(filter(None, (*context, _KEY_HINTS)))
        self._show_line("#keys", draw.fit([(hints, "dim")], width))
        trouble = self._find("#trouble", Static)
        trouble.display = bool(self._now.trouble)
        if self._now.trouble:
            self._show_line("#trouble", [(self._now.trouble, "yellow")])
        if state.detail is None and state.view in _TABLES:
            self._draw_table(self._now, _TABLES[state.view], state)
            return
        if state.detail is not None:
            lines = self._detail(self._now, state.detail)
        elif state.view == "Fleet":
            lines = views.fleet_lines(self._now, self.size.width, self.size.height)
        else:
            lines = [[(line, "")] for line in self.logged] or [[("nothing was logged", "dim")]]
        self.pane.show([], len(lines), lines.__getitem__, None)

    def _tabs(self) -> Iterator[tuple[str, str]]:
        for number, name in enumerate(_NAMES, 1):
            count = f"({len(self._now.firing)})" if self._now and name == "Alerts" and self._now.firing else ""
            yield name, f" {number} {name}{count} "

    def _draw_table(self, now: Now, table: TableView, state: ViewState) -> None:
        rows = [row for row in table.rows(now) if state.only is None or state.only(row)]
        self._rows = draw.filtered_rows(table, rows, state.filter, state.sorted_by, descending=state.descending)
        cursor = next((index for index, row in enumerate(self._rows) if table.key(row) == state.marked), 0)
        if self._rows and state.marked is None:
            self._states[self._view] = replace(state, marked=table.key(self._rows[0]))
        width = self.size.width - 1
        header = [draw.header_line(table.columns, width, state.sorted_by, descending=state.descending)]
        if not self._rows:
            message = f"nothing has {state.filter!r}" if state.filter else table.empty
            self.pane.show(header, 1, lambda _: [(message, "dim")], None)
            return
        self.pane.show(
            header, len(self._rows), lambda index: draw.row_line(table.columns, self._rows[index], width), cursor
        )

    def _detail(self, now: Now, detail: Any) -> list[Line]:
        size = self.size
        if isinstance(detail, Device):
            key = GPUS.key(detail)
            current = next((device for device in now.fleet.devices() if GPUS.key(device) == key), detail)
            return views.device_lines(now, current, size.width, size.height)
        fingerprint = detail.alert.fingerprint
        firing = next((firing for firing in now.firing if firing.alert.fingerprint == fingerprint), detail)
        return views.alert_lines(now, firing, size.width, size.height)

    def _show_line(self, selector: str, line: Line) -> None:
        """Shows a line in a widget, if it has changed."""
        widget = self._find(selector, Static)
        if getattr(widget, "shown", None) != line:
            widget.shown = line  # type: ignore[attr-defined] # of ours
            widget.update(Text.assemble(*line, no_wrap=selector != "#trouble", end=""))

    def on_print(self, event: events.Print) -> None:
        """Keeps the last lines written to standard error for the view Log: they would spoil the screen."""
        self.logged.extend(filter(str.strip, event.text.splitlines()))

    def on_resize(self) -> None:
        """Draws again, once everything is laid out."""
        self.call_after_refresh(self.draw)

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys do nothing to the view while a dialog, such as the help, lies over it."""
        covered = len(self.screen_stack) > 1
        return not (covered and action in ("leave", "next_view"))

    def action_view(self, name: str) -> None:
        """Opens a view; if it is open already, shows all its rows again."""
        if name == self._view:
            self._stack.clear()
            self._states[name] = replace(_new_state(name), filter=self.state.filter)
        self._view = name
        self.pane.top = 0
        self.draw()

    def action_next_view(self, step: int) -> None:
        """Opens the view to the right or left."""
        self.action_view(_NAMES[(_NAMES.index(self._view) + step) % len(_NAMES)])

    def action_move(self, step: int) -> None:
        """Moves the marked row, or scrolls if there is none."""
        pane, state = self.pane, self.state
        if pane.cursor is None or state.view not in _TABLES or not self._rows:
            pane.top = max(0, min(pane.top + step, pane.count - pane.room))
            self.draw()
            return
        index = max(0, min(pane.cursor + step, len(self._rows) - 1))
        self._change(marked=_TABLES[state.view].key(self._rows[index]))

    def action_page(self, step: int) -> None:
        """Moves by a screen."""
        self.action_move(step * max(1, self.pane.room - 1))

    def action_enter(self) -> None:
        """Opens what belongs to the marked row: the GPUs of a node or pod, the pods of a workload, or its detail."""
        state, cursor = self.state, self.pane.cursor
        if state.view == "Fleet":
            self.action_view("GPUs")
        if state.detail is not None or cursor is None or cursor >= len(self._rows) or state.view not in _TABLES:
            return
        row = self._rows[cursor]
        if isinstance(row, NodeRow):
            node = row.node
            self._open("GPUs", f"of {node.name}", lambda d: d.node == node.name and d.cluster == node.cluster)
        elif isinstance(row, Use) and state.view == "Workloads":
            names = {
                holder.name
                for device in row.devices
                for holder in device.holders
                if (holder.namespace, holder.workload or holder.pod) == (row.namespace, row.name)
            }
            cluster = row.devices[0].cluster
            self._open("Pods", f"of {row.who}", lambda use: use.who in names and use.devices[0].cluster == cluster)
        elif isinstance(row, Use):
            uuids = {device.uuid for device in row.devices}
            self._open("GPUs", f"of {row.who}", lambda device: device.uuid in uuids)
        elif isinstance(row, Device | FiringAlert):
            self._stack.append(state)
            self.pane.top = 0
            self._change(detail=row)

    def _open(self, view: str, about: str, only: Callable[[Any], bool]) -> None:
        self._stack.append(self.state)
        self._view = view
        self._states[view] = replace(_new_state(view), about=about, only=only)
        self.pane.top = 0
        self.draw()

    def action_leave(self) -> None:
        """Closes the filter's input; else goes back to the view before; else clears the filter."""
        filter_input = self._find("#filter", Input)
        if filter_input.display:
            filter_input.display = False
            self.pane.focus()
            self._change(filter="")
        elif self._stack:
            previous, leaving = self._stack.pop(), self._view
            if leaving != previous.view:
                self._states[leaving] = _new_state(leaving)
            self._view, self._states[previous.view] = previous.view, previous
            self.draw()
        elif self.state.filter:
            self._change(filter="")

    def action_filter(self) -> None:
        if self.state.view in _TABLES and self.state.detail is None:
            filter_input = self._find("#filter", Input)
            filter_input.value = self.state.filter
            filter_input.display = True
            self.screen.set_focus(filter_input)  # at once: what is typed next is for it

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters again with each letter that is typed."""
        if self._find("#filter", Input).display:
            self._change(filter=event.value, marked=None)

    def on_input_submitted(self) -> None:
        """Keeps the filter, and closes its input."""
        self._find("#filter", Input).display = False
        self.pane.focus()

    def action_sort(self, step: int) -> None:
        """Sorts by the column to the right or left."""
        if self.state.view in _TABLES:
            columns = [column for column, _ in draw.layout(_TABLES[self.state.view].columns, self.size.width - 1)]
            titles = [column.title for column in columns]
            index = titles.index(self.state.sorted_by) if self.state.sorted_by in titles else 0
            column = columns[(index + step) % len(columns)]
            self._change(sorted_by=column.title, descending=column.descending)

    def action_reverse(self) -> None:
        self._change(descending=not self.state.descending)

    def action_hold(self) -> None:
        """Holds the picture still, or lets it go on."""
        self._held = not self._held
        self.draw()

    def action_help(self) -> None:
        self.push_screen(Help())

    async def action_ask(self) -> None:
        """Quits, after a question if there is one."""
        if not self._question:
            self._quit_now()
        else:
            self.push_screen(Question(self._question), lambda yes: self._quit_now() if yes else None)

    def action_stop(self) -> None:
        self._quit_now()

    # -- the mouse

    def on_mouse_scroll_down(self) -> None:
        self.action_move(_WHEEL)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-_WHEEL)

    def on_click(self, event: events.Click) -> None:
        """A click on a tab opens its view, on a title sorts, on a row marks it; on the marked row it opens it."""
        if len(self.screen_stack) > 1 or event.widget is None:
            return
        if event.widget.id == "tabs":
            edge = 0
            for name, label in self._tabs():
                edge += cell_len(label) + 1
                if event.x < edge:
                    self.action_view(name)
                    return
        elif isinstance(event.widget, Pane) and self.state.view in _TABLES and self.state.detail is None:
            self._click_table(event.x, event.y)

    def _click_table(self, x: int, y: int) -> None:
        state, table = self.state, _TABLES[self.state.view]
        if y == 0:
            edge = 0
            for column, size in draw.layout(table.columns, self.size.width - 1):
                edge += size + 1
                if x < edge:
                    is_current = column.title == state.sorted_by
                    self._change(
                        sorted_by=column.title,
                        descending=not state.descending if is_current else column.descending,
                    )
                    return
        index = self.pane.top + y - 1
        if 0 <= index < len(self._rows):
            if index == self.pane.cursor:
                self.action_enter()
            else:
                self._change(marked=table.key(self._rows[index]))
