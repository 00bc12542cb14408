"""The stages of the Dockerfile, run without a container engine: ``make image`` prints the size of the result.

In:       the Dockerfile; a bare virtual environment as its base, with no compiler.
Does:     the COPY and RUN lines, with their paths below a temporary folder, and then the command with nothing
          else on PATH.
Out:      the compressed size beside the base image; exit code 1 if that is too large, or if a package is installed that
          only development needs.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_dockerfile import BUILD, PROJECT, ROOT

AT_MOST_MB = 100
"""Of 150: the base, python:3.11-slim-trixie, was 45.5 MB compressed for amd64 in August 2026, with Python 3.11.15
(docker-library/repo-info, which has no figure for the pinned digest)."""


def run_stage(work: Path) -> Path:
    """Run the build stage below a folder. Returns the virtual environment that it makes."""
    bare, source = work / "base", work / "src"
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    environment = {"PATH": f"{bare}/bin:/usr/bin:/bin", "CC": "/bin/false", "EXTRAS": "", "HOME": str(work)}
    source.mkdir()
    for name, rest in BUILD:
        if name == "COPY":
            *copied, to = rest.split()
            for path in copied:
                target = source if to in {".", "./"} else source / to
                if (ROOT / path).is_dir():
                    shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / path, target)
        elif name == "RUN":
            command = re.sub(r"(?<=\s)/(wheels|opt)", rf"{work}/\1", rest)
            sys.stdout.write(f"RUN {rest}\n")
            sys.stdout.flush()
            subprocess.run(["/bin/sh", "-c", command], cwd=source, env=environment, check=True)
    return work / "opt" / "gpustream"


def compressed_mb(folder: Path) -> float:
    """The compressed size of a layer with this folder, in MB."""
    archive = subprocess.Popen(["tar", "--create", "--directory", folder.parent, folder.name], stdout=subprocess.PIPE)
    packed = subprocess.run(["gzip", "-c"], stdin=archive.stdout, capture_output=True, check=True)
    return len(packed.stdout) / 1e6


def for_development_only(folder: Path) -> set[str]:
    """Installed packages that only the dev extra names and no other package needs, and pip."""
    (packages,) = folder.glob("lib/*/site-packages")
    installed = {
        canonicalize_name(distribution.name): distribution for distribution in distributions(path=[str(packages)])
    }
    needed = [
        line for distribution in installed.values() for line in distribution.requires or () if "extra ==" not in line
    ]
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    dev_names, needed_names = ({canonicalize_name(Requirement(line).name) for line in lines} for lines in (dev, needed))
    return {str(name) for name in installed if name in dev_names - needed_names or name == "pip"}


def main() -> int:
    """Build, check and report."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        environment = run_stage(work)
        subprocess.run(
            [f"{environment}/bin/gpustream", "--version"], env={"PATH": f"{environment}/bin"}, cwd="/", check=True
        )
        size, unwanted = compressed_mb(environment), for_development_only(environment)
    sys.stdout.write(f"{size:.1f} MB compressed beside the base image; at most {AT_MOST_MB}\n")
    sys.stdout.writelines(f"only development needs {name}\n" for name in sorted(unwanted))
    return 1 if unwanted or size > AT_MOST_MB else 0


if __name__ == "__main__":
    sys.exit(main())
