"""Names of users, asked for where a directory service that hangs costs a name and never a reading.

In: user ids, and what the machine's name service knows. Out: names.
State: the names found, and the questions that nobody has answered yet.
On failure: who has no name is called by number, and asked for again with the next process.
"""

import os
import pwd
import threading
from collections import OrderedDict
from collections.abc import Callable

from producers.node.slurm import as_name

WAIT_S = 0.05
"""Long enough for a file and for a local cache, so that a job has its user's name from its first tick on."""

_REMEMBERED = 4096
_MOST_ASKED_AT_ONCE = 4


def of_this_machine(uid: int) -> str | None:
    """What the machine calls a user; None where it knows none, or calls it what can't be printed."""
    try:
        return as_name(os.fsencode(pwd.getpwuid(uid).pw_name))
    except (KeyError, OverflowError):
        return None


class Users:
    """For any thread. ``lookup`` gives a name, and may take for ever."""

    def __init__(self, lookup: Callable[[int], str | None] = of_this_machine, *, wait_s: float = WAIT_S) -> None:
        self._lookup, self._wait_s = lookup, wait_s
        self._lock = threading.Lock()
        self._names: OrderedDict[int, str] = OrderedDict()
        self._asked: set[int] = set()

    def ask(self, uid: int) -> None:
        """Find a name out; waits a moment for it, once."""
        with self._lock:
            if uid in self._names or uid in self._asked or len(self._asked) >= _MOST_ASKED_AT_ONCE:
                return
            self._asked.add(uid)
        asking = threading.Thread(target=self._find, args=(uid,), name=f"user-{uid}", daemon=True)
        asking.start()
        asking.join(self._wait_s)

    def name(self, uid: int) -> str:
        """The name, where it was found by now; else the number. Never waits."""
        with self._lock:
            if uid in self._names:
                self._names.move_to_end(uid)
            return self._names.get(uid, str(uid))

    def _find(self, uid: int) -> None:
        try:
            name = self._lookup(uid)
        finally:
            with self._lock:
                self._asked.discard(uid)
        if name is not None:
            with self._lock:
                self._names[uid] = name
                if len(self._names) > _REMEMBERED:
                    self._names.popitem(last=False)
