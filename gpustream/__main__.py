"""``python -m gpustream``, and what the installed command calls."""

import io
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command. An output that can't be written, as on a full disk, is an error of one line, and exit code 1.

    A standard stream that was closed is /dev/null: otherwise the first socket would be in its place, and uvloop aborts
    the process when it closes that. What the locale's encoding has no sign for is a question mark on standard output.
    The first process of a container ends by a signal from the beginning: the kernel gives it none without a handler.
    """
    by_default = _end if os.getpid() == 1 else signal.SIG_DFL
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, by_default)
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, by_default)  # during the imports it would be a traceback
    from gpustream import cli, command

    signal.signal(signal.SIGINT, on_interrupt)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            cli.main(prog_name="gpustream")
        finally:  # here it can be reported: where Python does it, at the end, it is another exit code
            sys.stdout.flush()
    except OSError as error:
        if (sentence := command.output_failure(error)) is None:
            raise
        ended = error.__context__
        code = ended.code if isinstance(ended, SystemExit) else None
        if not code:  # a command that failed has said why
            sys.stderr.write(f"gpustream: {sentence}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what was not written is tried again at the exit
        sys.exit(code or 1)


def _end(number: int, _: FrameType | None) -> None:
    """Ends the process with the exit code that a shell gives for this signal."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
