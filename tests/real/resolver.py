"""A resolver of names that can be switched off, for processes that are started with its environment."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.real.servers import Missing

SOURCE = Path(__file__).with_name("resolver.c")


def find_compiler() -> Path:
    """A C compiler, of CC or PATH; raises :class:`Missing`."""
    path = shutil.which(os.environ.get("CC") or "cc")
    if path is None:
        raise Missing("no C compiler on PATH: install gcc or clang, or name one with CC")
    return Path(path)


class Resolver:
    """libc's, except inside :meth:`unresolvable`; raises :class:`Missing` without a C compiler."""

    def __init__(self, directory: Path) -> None:
        library, self._gone_file = directory / "resolver.so", directory / "resolver-gone"
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [find_compiler(), "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True
        )
        self.environment = {"LD_PRELOAD": str(library), "RESOLVER_GONE": str(self._gone_file)}

    @contextlib.contextmanager
    def unresolvable(self) -> Iterator[None]:
        """No name is resolved for as long as it lasts."""
        self._gone_file.touch()
        try:
            yield
        finally:
            self._gone_file.unlink()
