"""docker-compose.yml, held against the command's options: no Docker needed."""

from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from gpustream.cli import main

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "gpustream"}


def parsed(arguments: list[str]) -> click.Context:
    """The command line, checked as the command itself does and not run."""
    command: click.Command = main
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    return command.make_context(command.name, arguments)


@pytest.mark.parametrize("service", OURS.values(), ids=list(OURS))
def test_every_service_is_a_command_line_that_is_right(
    service: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    with parsed(list(service["command"])) as context:
        options = {param.envvar for param in context.command.params}
    assert set(service["environment"]) <= options


def test_the_services_are_the_whole_pipeline() -> None:
    commands = [" ".join(service["command"][:2]) for service in OURS.values()]
    assert commands == ["topics create", "produce simulated", "stream attribution", "sink remote-write"]


def test_nothing_starts_before_what_it_needs() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for name, needed in service.get("depends_on", {}).items():
            if needed["condition"] == "service_healthy":
                assert "healthcheck" in services[name]
            else:
                assert needed["condition"] == "service_completed_successfully"
                assert "restart" not in services[name]


def test_ports_are_published_on_the_loopback_address_only() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_prometheus_scrapes_every_component_where_it_listens() -> None:
    (job,) = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    (targets,) = job["static_configs"]
    listening = {name for name, service in OURS.items() if "GPUSTREAM_LISTEN" in service["environment"]}
    assert set(targets["targets"]) == {f"{name}:9401" for name in listening}


def test_the_image_holds_every_package_of_the_distribution() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text()
    for package in ("gpustream", "topics", "producers", "streams", "sinks"):
        assert f"COPY {package} {package}\n" in dockerfile
        assert f"!{package}/\n" in ignored
