"""NVML with a record of what it answered: the newest answer of each call for each GPU, and how long the calls took.

In: what the node asks. Out: what NVML answers, and :meth:`RecordingNvml.recorded` for a file.
"""

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from producers.node.nvml.binding import FieldId, FieldValue, Handle, Nvml, NvmlError

T = TypeVar("T")


@dataclass
class Answers:
    """To one call about one GPU: the newest answer, the errors and how often each came, and the calls' times."""

    newest: Any = None
    errors: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class RecordingNvml(Nvml):
    """For several threads. What is of no GPU is recorded under ``""``; what is of a MIG device under its UUID."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._answers: dict[tuple[str, str], Answers] = {}

    def handle(self, index: int) -> Handle:
        """Open a GPU."""
        return self._noted("", f"nvmlDeviceGetHandleByIndex {index}", lambda: super(RecordingNvml, self).handle(index))

    def call(self, function: str, *arguments: Any) -> Any:
        """What pynvml's ``function`` of no GPU gives; of the driver it is recorded."""
        if not function.startswith("nvmlSystem"):
            return super().call(function, *arguments)
        return self._noted("", function, lambda: super(RecordingNvml, self).call(function, *arguments))

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives."""
        plain = [str(argument) for argument in arguments if isinstance(argument, int | str)]
        call = " ".join([function, *plain])
        answer = self._noted(
            self._name(handle), call, lambda: super(RecordingNvml, self).ask(function, handle, *arguments)
        )
        if function == "nvmlDeviceGetUUID":
            self._names[self.address(handle)] = answer
        return answer

    def fields(self, handle: Handle, fields: Sequence[FieldId]) -> list[FieldValue]:
        """Many fields in one call."""
        name = self._name(handle)
        answers = self._noted(
            name, "nvmlDeviceGetFieldValues", lambda: super(RecordingNvml, self).fields(handle, fields)
        )
        for field_id, answer in zip(fields, answers, strict=True):
            self._keep(name, f"field {field_id}", answer)
        return answers

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """What nvmlDeviceGetSamples has of that kind."""
        call = f"nvmlDeviceGetSamples {kind}"
        return self._noted(self._name(handle), call, lambda: super(RecordingNvml, self).samples(handle, kind, since_us))

    def recorded(self) -> dict[str, dict[str, Any]]:
        """By UUID and call, as JSON takes it."""
        by_name: dict[str, dict[str, Any]] = {}
        with self._lock:
            for (name, call), answers in sorted(self._answers.items()):
                mean_s = answers.seconds / answers.calls if answers.calls else 0.0
                times = {"calls": answers.calls, "mean_s": round(mean_s, 6), "longest_s": round(answers.longest_s, 6)}
                row = {"answer": plain(answers.newest), "errors": dict(answers.errors)} | (
                    times if answers.calls else {}
                )
                by_name.setdefault(name, {})[call] = row
        return by_name

    def _name(self, handle: Handle) -> str:
        return self._names.get(self.address(handle), "")

    def _noted(self, name: str, call: str, work: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        error = None
        try:
            answer = work()
        except NvmlError as raised:
            error = raised.name
            raise
        else:
            self._keep(name, call, answer)
            return answer
        finally:
            took_s = time.perf_counter() - began_s
            with self._lock:
                answers = self._answers.setdefault((name, call), Answers())
                answers.calls, answers.seconds = answers.calls + 1, answers.seconds + took_s
                answers.longest_s = max(answers.longest_s, took_s)
                if error is not None:
                    answers.errors[error] += 1

    def _keep(self, name: str, call: str, answer: Any) -> None:
        with self._lock:
            self._answers.setdefault((name, call), Answers()).newest = answer


def plain(answer: Any) -> Any:
    """An answer of NVML as JSON takes it: structures by their fields, handles left out."""
    if answer is None or isinstance(answer, bool | int | float | str):
        return answer
    if isinstance(answer, FieldValue):
        return answer._asdict()
    if isinstance(answer, ctypes.Structure):
        return {name: plain(getattr(answer, name)) for name, *_ in answer._fields_}
    if isinstance(answer, list | tuple):
        return [plain(item) for item in answer]
    return {key: plain(value) for key, value in vars(answer).items()} if hasattr(answer, "__dict__") else None
