"""A resolver of names that can be switched off, for processes that are started with its environment."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.real.servers import Missing

SOURCE = Path(__file__).with_name("resolver.c")


class Resolver:
    """libc's, until it is :meth:`gone`; raises :class:`Missing` without a C compiler."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which(os.environ.get("CC") or "cc")
        if compiler is None:
            raise Missing("no C compiler on PATH: install gcc or clang, or name one with CC")
        library, self._gone = directory / "resolver.so", directory / "resolver-gone"
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "RESOLVER_GONE": str(self._gone)}

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        """No name is resolved for as long as it lasts."""
        self._gone.touch()
        try:
            yield
        finally:
            self._gone.unlink()
