"""The command.

Its other packages, such as ``topics``, have names that folders and packages of other programs have, too. Those of
gpustream come first in its processes: in a wheel they are in a folder of their own here, in the tree beside this one.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "_packages"

sys.path.insert(0, str(_INSTALLED if _INSTALLED.is_dir() else _HERE.parent))
