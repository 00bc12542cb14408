"""``python -m gpustream``, and what the installed command calls.

A folder or package of another program may have the name of one of ours, and Python would import it in place of ours:
that is said in one sentence, before anything is imported.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parents[1]

for _name in ("delivery", "producers", "sinks", "streams", "topics"):
    _spec = find_spec(_name)
    _found = "nothing" if _spec is None else _spec.origin or next(iter(_spec.submodule_search_locations or ()))
    if Path(_found).resolve() != _HOME / _name / "__init__.py":
        sys.stderr.write(
            f"gpustream needs its own package {_name!r} of {_HOME}, but Python finds {_found} first: "
            "start gpustream in another folder, or take that one off PYTHONPATH.\n"
        )
        raise SystemExit(2)

from gpustream.cli import main  # noqa: E402 - only after the check

if __name__ == "__main__":
    main(prog_name="gpustream")
