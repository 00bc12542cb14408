"""The node producer on the GPUs of this machine, beside nvidia-smi, and a report of what both said.

    make gpu                              ten minutes, into build/gpu
    python -m tests.gpu SECONDS FOLDER

It changes nothing on the GPUs: no load, no settings, no resets; XID errors are only read. Put a load of your own beside
it for values that move. In the folder: report.md, nvml.json (what NVML answered, by GPU and call), ticks.jsonl.
Exit code: 0 if the two are of one opinion, 1 if not, 2 if there is no GPU, driver or nvidia-smi.
"""

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from delivery.instruments import Instruments
from delivery.sender import Sender
from producers.node import instruments
from producers.node.cgroups import ProcessOwners
from producers.node.component import NodeProducer
from producers.node.config import NodeSettings
from producers.node.gpus import Gpus
from tests.gpu import report
from tests.gpu.comparison import compare
from tests.gpu.nvidia_smi import Failed, NvidiaSmi, sampling
from tests.gpu.recording import RecordingNvml
from topics import samples

DEFAULT_S = 600.0
DEFAULT_FOLDER = Path("build/gpu")
OPEN_WITHIN_S = 10.0
SMI_EVERY_S = 1.0


class FileSender(Sender):
    """Takes what a producer sends, and writes the ticks into a file, one a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.ticks: list[dict[str, Any]] = []

    async def start(self) -> None:
        """It is connected."""

    def not_ready(self) -> list[str]:
        """Nothing: it always is."""
        return []

    async def ready(self) -> None:
        """It is."""

    async def send(self, topic: str, value: bytes | None, **_: Any) -> "asyncio.Future[int]":
        """Write a tick; snapshots of allocations are of no interest here."""
        if topic == samples.TOPIC.name:
            self._file.write((value or b"") + b"\n")
            self.ticks.append(orjson.loads(value or b""))
        written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        written.set_result(len(self.ticks))
        return written

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Close the file."""
        self._file.close()


async def read(nvml: RecordingNvml, sender: FileSender, seconds: float) -> list[str]:
    """Run the node producer for so long; gives what it says is wrong at the end."""
    settings = NodeSettings(kafka="", node="this-machine", pod_resources_socket=None)
    owners = ProcessOwners(settings.procfs)
    gpus = Gpus(Instruments(instruments.INSTRUMENTS), owners, interval_s=settings.interval_s, nvml=nvml)
    node = NodeProducer(settings, sender=sender, gpus=gpus, process_owners=owners)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    running = asyncio.create_task(node.run(stop))
    await asyncio.wait([running], timeout=max(0.0, seconds - 0.1))
    wrong = gpus.not_ready()
    await running
    return wrong


async def trouble() -> str | None:
    """Why there is nothing to read here."""
    gpus = Gpus(Instruments(instruments.INSTRUMENTS), ProcessOwners(Path("/proc")))
    try:
        await gpus.open(OPEN_WITHIN_S)
        return None if gpus.count else "; ".join(gpus.not_ready())
    finally:
        gpus.close()


def main(seconds: float, folder: Path) -> int:
    """Run both, and write the report."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return _failed("nvidia-smi is not on PATH: it comes with the NVIDIA driver, and is the second opinion here")
    if (reason := asyncio.run(trouble())) is not None:
        return _failed(f"there is no GPU to read: {reason}")
    smi = NvidiaSmi(program)
    try:
        listed = smi.listed()
        smi.sample()
    except Failed as failed:
        return _failed(str(failed))
    folder.mkdir(parents=True, exist_ok=True)
    nvml, sender = RecordingNvml(), FileSender(folder / "ticks.jsonl")
    began_s = time.monotonic()
    with sampling(smi, SMI_EVERY_S) as samples:
        wrong = asyncio.run(read(nvml, sender, seconds))
    outcomes, recorded = compare(sender.ticks, samples), nvml.recorded()
    (folder / "nvml.json").write_bytes(orjson.dumps(recorded, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    text = report.markdown(
        seconds=time.monotonic() - began_s,
        ticks=sender.ticks,
        samples=len(samples),
        listed=listed,
        outcomes=outcomes,
        recorded=recorded,
        not_ready=wrong,
    )
    (folder / "report.md").write_text(text)
    bad = report.disagreements(outcomes)
    sys.stdout.write(f"{text}\nwritten to {folder}\n")
    return 1 if bad or not outcomes else 0


def _failed(reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    return 2


if __name__ == "__main__":
    chosen = sys.argv[1:]
    sys.exit(main(float(chosen[0]) if chosen else DEFAULT_S, Path(chosen[1]) if len(chosen) > 1 else DEFAULT_FOLDER))
