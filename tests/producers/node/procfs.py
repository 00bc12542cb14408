"""A fake procfs in a folder, in which tests start and end processes."""

from pathlib import Path

from producers.node.cgroups import ProcessOwners
from producers.node.jobs import KnownJobs, Users


class Procfs:
    """Processes in ``root``, and their owners. User 1000 is alice."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        jobs = KnownJobs(Users({1000: "alice"}.get, within_s=30.0))
        self.owners = ProcessOwners(root, jobs, environ_within_s=30.0)

    def begin(
        self,
        pid: int,
        started: int,
        cgroup: str | None,
        comm: str = "python",
        *,
        environ: bytes | None = None,
        uid: int | None = None,
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = " ".join(str(number) for number in range(4, 22))
        (folder / "stat").write_text(f"{pid} ({comm}) S {fields} {started} 23 24 25\n")
        (folder / "comm").write_text(f"{comm}\n")
        if cgroup is None:
            (folder / "cgroup").unlink(missing_ok=True)
        else:
            (folder / "cgroup").write_text(cgroup)
        if environ is not None:
            (folder / "environ").write_bytes(environ)
        if uid is not None:
            (folder / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t0\t0\t0\nGid:\t5\t5\t5\t5\n")

    def end(self, pid: int) -> None:
        for name in ("stat", "comm", "cgroup", "environ", "status"):
            (self.root / str(pid) / name).unlink(missing_ok=True)
        (self.root / str(pid)).rmdir()
