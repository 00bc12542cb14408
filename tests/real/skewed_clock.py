"""``python skewed_clock.py FILE ARGUMENTS``: gpustream with a clock that is wrong by the seconds in the file."""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    shift, true_ns = Path(sys.argv.pop(1)), time.time_ns
    time.time_ns = lambda: true_ns() + int(float(shift.read_text()) * 1e9)
    time.time = lambda: time.time_ns() / 1e9
    from gpustream.cli import main  # after its clock: modules take the function when they are imported

    main(prog_name="gpustream")
