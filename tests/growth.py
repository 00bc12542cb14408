"""How much an object keeps: what grows with everything that has come and gone shows here."""

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType

_OF_ALL = (type, ModuleType, FunctionType, CodeType, logging.Logger, asyncio.AbstractEventLoop)


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
