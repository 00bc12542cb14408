"""docker-compose.yml under Docker, with the image that it builds: `make compose` runs this.

It makes images, containers and volumes of a project of its own, and removes the containers and volumes at the end. The
ports that docker-compose.yml publishes have to be free. ``COMPOSE_BASE`` is another base image than the Dockerfile's;
services of ``COMPOSE_WITHOUT`` are not started. Both are for a machine that can't have the images of a registry.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.eventually import eventually, eventually_sync
from tests.real.conftest import need
from tests.real.pipeline import read_all
from tests.real.servers import Missing

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
WITHOUT = {"node", *os.environ.get("COMPOSE_WITHOUT", "").split()}
OURS = [name for name, service in SERVICES.items() if service["image"] == "gpustream"]
RUNNING = [name for name in OURS if name not in {"topics", *WITHOUT}]
KAFKA, PROMETHEUS = "localhost:9092", "http://localhost:9090"
NODES, GPUS = 4, 32


def find_docker() -> Path:
    """Docker with Compose, and an engine that answers; raises :class:`Missing`."""
    path = shutil.which("docker")
    if path is None or subprocess.run([path, "compose", "version"], capture_output=True, check=False).returncode:
        raise Missing("no docker with the plugin compose on PATH")
    if subprocess.run([path, "info"], capture_output=True, check=False).returncode:
        raise Missing("no Docker engine answers: set DOCKER_HOST, or start dockerd")
    return Path(path)


def compose(*arguments: str) -> str:
    """What a command of Docker Compose prints. Raises CalledProcessError; what it says is on stderr."""
    return docker("compose", "--project-name", "gpustream-tests", *arguments)


def docker(*arguments: str) -> str:
    """What a command of Docker prints, likewise."""
    done = subprocess.run([str(find_docker()), *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def states() -> dict[str, tuple[str, str, int]]:
    """Of each service's container the state, the health, and the exit code."""
    rows = [json.loads(line) for line in compose("ps", "--all", "--format", "json").splitlines()]
    return {row["Service"]: (row["State"], row["Health"], row["ExitCode"]) for row in rows}


def all_are_well() -> bool:
    """Whether each component runs and answers."""
    found = states()
    return all(found[name][:2] == ("running", "healthy") for name in RUNNING)


def values(expr: str) -> list[tuple[dict[str, str], float]]:
    """The labels and the value of each series with which Prometheus answers."""
    result = ask(f"query?{urllib.parse.urlencode({'query': expr})}")["result"]
    return [(item["metric"], float(item["value"][1])) for item in result]


def ask(path: str) -> Any:
    """The data of Prometheus' answer."""
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/{path}", timeout=60) as answer:  # noqa: S310 - http, and ours
        return json.load(answer)["data"]


@pytest.fixture(scope="module", autouse=True)
def fleet() -> Iterator[None]:
    """The pipeline, once each of its components is well."""
    need(find_docker)
    base = os.environ.get("COMPOSE_BASE")
    compose("build", *(["--build-arg", f"BASE={base}"] if base else []), "topics")
    try:
        compose("up", "--detach", *(name for name in SERVICES if name not in WITHOUT))
        eventually_sync(all_are_well)
        yield
    finally:
        compose("down", "--volumes")


def test_prometheus_has_each_gpu_and_who_holds_it() -> None:
    eventually_sync(lambda: len(values("gpu_power_draw")) >= GPUS)
    held = eventually_sync(lambda: values('gpu_power_draw{k8s_pod_name!=""}'))
    assert len({labels["k8s_node_name"] for labels, _ in values("gpu_power_draw")}) == NODES
    assert all(labels["k8s_namespace_name"] for labels, _ in held)


def test_prometheus_scrapes_each_component_and_has_the_rules() -> None:
    eventually_sync(lambda: len(values("up == 1")) == len(RUNNING) or None)
    assert {Path(group["file"]).name for group in ask("rules")["groups"]} == {"recording.yml", "pipeline.yml"}


async def test_no_tick_is_lost_when_kafka_and_all_components_are_started_again() -> None:
    compose("restart", "kafka")
    compose("restart", *RUNNING)
    eventually_sync(all_are_well)
    newest_ms = time.time() * 1000

    def is_read_on() -> bool:
        return values("max(timestamp(gpu_power_draw))")[0][1] * 1000 > newest_ms

    eventually_sync(is_read_on)
    sent = await ticks("gpu.samples")
    runs = {(node, run_id) for node, run_id, _ in sent}
    assert len(runs) == 2 * NODES  # each node has a run before, and one after it
    for run in runs:
        seqs = {seq for *other, seq in sent if tuple(other) == run}
        assert seqs == set(range(1, max(seqs) + 1)), run

    async def all_are_attributed() -> bool:
        return sent <= await ticks("gpu.attributed")

    await eventually(all_are_attributed, every_s=1)


async def ticks(topic: str) -> set[tuple[str, int, int]]:
    """The node, run_id and seq of each tick of a topic."""
    records = [json.loads(record.value) for record in await read_all(KAFKA, topic)]
    return {(record["node"], record["run_id"], record["seq"]) for record in records}


def test_components_that_are_stopped_end_in_time_and_without_an_error() -> None:
    compose("stop", "--timeout", "10", *RUNNING)  # what is killed then has another exit code
    assert {name: states()[name] for name in RUNNING} == dict.fromkeys(RUNNING, ("exited", "", 0))


def test_the_image_needs_no_right_no_network_and_nothing_to_write_on() -> None:
    restrictions = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none"]
    demo = ["run", "--simulate", "4x8", "--duration", "5s", "--summary", "json"]
    summary = json.loads(docker("run", "--rm", *restrictions, "gpustream", *demo))
    assert summary["ticks"] == summary["attributed"]["exact"] > 0
    assert (summary["lost"], summary["dropped"], summary["dead_lettered"]) == (0, 0, 0)
