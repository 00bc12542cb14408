"""``python skewed_clock.py FILE ARGUMENTS``: gpustream with a clock that is wrong by the seconds in the file."""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    shift, true_time = Path(sys.argv.pop(1)), time.time
    time.time = lambda: true_time() + float(shift.read_text())
    from gpustream.cli import main  # after its clock: modules take the function when they are imported

    main(prog_name="gpustream")
