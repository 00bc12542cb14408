"""How much an object keeps, and a call does: what grows with everything that has come and gone shows here."""

import asyncio
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_OF_ALL = (type, ModuleType, FunctionType, CodeType, logging.Logger, asyncio.AbstractEventLoop)
_TOOL_ID = 4  # of sys.monitoring: debuggers, coverage and profilers have others


def kept(root: object, *, without: Iterable[object] = ()) -> int:
    """How many items all containers have that an object refers to, itself or through others."""
    counted, remaining, items = set(map(id, without)), [root], 0
    while remaining:
        found = remaining.pop()
        if id(found) in counted or isinstance(found, _OF_ALL):
            continue
        counted.add(id(found))
        if isinstance(found, dict | list | tuple | set | frozenset | deque):
            items += len(found)
        remaining += gc.get_referents(found)
    return items


def steps(call: Callable[[], object]) -> int:
    """How many instructions of Python a call takes: the same on every machine.

    From Python 3.12 on a traced call of a function that was not traced before has no instructions: they are monitored.
    """
    if sys.version_info >= (3, 12):
        return _monitored_steps(call)
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _monitored_steps(call: Callable[[], object]) -> int:
    monitoring, count = sys.monitoring, 0  # type: ignore[attr-defined, unused-ignore] # Python 3.11 has none

    def on_instruction(_: CodeType, __: int) -> None:
        nonlocal count
        count += 1

    monitoring.use_tool_id(_TOOL_ID, "steps")
    monitoring.register_callback(_TOOL_ID, monitoring.events.INSTRUCTION, on_instruction)
    monitoring.set_events(_TOOL_ID, monitoring.events.INSTRUCTION)
    try:
        call()
    finally:
        monitoring.set_events(_TOOL_ID, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(_TOOL_ID)
    return count
