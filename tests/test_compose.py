"""docker-compose.yml agrees with the Compose schema, with the command's options and with itself. No Docker needed."""

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.command_line import parsed
from tests.real import servers

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.load((ROOT / "docker-compose.yml").read_text(), yaml.CSafeLoader)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "gpustream"}
OTHERS = SERVICES.keys() - OURS.keys()
SCHEMAS = "check_jsonschema/builtin_schemas/vendor"


def config(name: str) -> Any:
    """A configuration file that the compose file holds, parsed."""
    return yaml.load(COMPOSE["configs"][name]["content"], yaml.CSafeLoader)


def violations(document: Any, schema_name: str = "compose-spec") -> list[str]:
    """The violations of the Compose schema, or of another one that comes with check-jsonschema, in a document."""
    return [f"{error.json_path}: {error.message}" for error in _validator(schema_name).iter_errors(document)]


@functools.cache
def _validator(schema_name: str) -> Any:
    path = importlib.metadata.distribution("check-jsonschema").locate_file(f"{SCHEMAS}/{schema_name}.json")
    schema = json.loads(Path(str(path)).read_text())
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def test_it_follows_the_compose_schema() -> None:
    assert violations(COMPOSE) == []


@pytest.mark.parametrize(
    ("service", "attribute", "value"),
    [("kafka", "port", ["9092"]), ("grafana", "healthcheck", "wget"), ("node", "deploy", {"resources": {"gpus": 1}})],
)
def test_the_schema_finds_what_compose_would_refuse(service: str, attribute: str, value: object) -> None:
    wrong = {**COMPOSE, "services": {**SERVICES, service: {**SERVICES[service], attribute: value}}}
    assert any(f"'{attribute}'" in violation or f".{attribute}" in violation for violation in violations(wrong))


@pytest.mark.parametrize("service", OURS.values(), ids=list(OURS))
def test_every_service_has_a_valid_command_line(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    with parsed(list(service["command"])) as context:
        options = {param.envvar for param in context.command.params}
    assert set(service["environment"]) <= options


def test_the_services_are_the_whole_pipeline() -> None:
    commands = [" ".join(service["command"][:2]) for service in OURS.values()]
    assert commands == [
        "topics create",
        "produce simulated",
        "produce node",
        "stream attribution",
        "stream alerts",
        "stream usage",
        "sink remote-write",
        "sink alertmanager",
    ]


def test_one_service_builds_the_image_and_the_others_wait_for_it_and_never_pull_it() -> None:
    assert [name for name, service in SERVICES.items() if "build" in service] == ["topics"]
    others = OURS.keys() - {"topics"}
    assert {SERVICES[name]["pull_policy"] for name in others} == {"never"}
    assert [name for name in others if "topics" not in SERVICES[name]["depends_on"]] == []


def test_only_the_producer_for_real_gpus_needs_a_profile() -> None:
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"node": ["gpu"]}
    devices = SERVICES["node"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu", "utility"]}]


def test_nothing_starts_before_what_it_needs() -> None:
    for service in SERVICES.values():
        for name, needed in service.get("depends_on", {}).items():
            if needed["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]
            else:
                assert needed["condition"] == "service_completed_successfully"
                assert "restart" not in SERVICES[name]


def test_a_service_that_writes_to_a_server_waits_for_it() -> None:
    waits_for = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
    assert waits_for["topics"] == {"kafka"}
    assert waits_for["remote-write"] == {"topics", "prometheus"}
    assert waits_for["alertmanager-sink"] == {"topics", "alertmanager"}
    assert waits_for["grafana"] == {"prometheus"}
    streams = {frozenset(waits_for[name]) for name in ("producer", "node", "attribution", "alerts", "usage")}
    assert streams == {frozenset({"topics"})}


def test_every_lasting_service_is_restarted_and_has_a_health_check() -> None:
    lasting = {name: service for name, service in SERVICES.items() if name != "topics"}
    assert {service["restart"] for service in lasting.values()} == {"unless-stopped"}
    assert {service["healthcheck"]["test"][0] for service in lasting.values()} == {"CMD"}


def test_ports_are_published_on_the_loopback_address_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(ports) == [f"127.0.0.1:{port}:{port}" for port in (3000, 9090, 9092, 9093)]


def test_images_of_others_are_pinned_to_the_tested_version_if_there_is_one() -> None:
    images = dict(SERVICES[name]["image"].split(":") for name in OTHERS)
    assert images["apache/kafka"] == servers.KAFKA.removeprefix("kafka-")
    assert images["prom/prometheus"] == "v" + servers.PROMETHEUS.removeprefix("prometheus-")
    assert all(tag.removeprefix("v").count(".") == 2 for tag in images.values())


def test_nobody_runs_as_root() -> None:
    assert [name for name, service in SERVICES.items() if "user" in service or service.get("privileged")] == []


def test_every_mount_exists_and_is_read_only_or_is_a_named_volume() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", [])]
    named = {mount[0] for mount in mounts if not mount[0].startswith(".")}
    assert named == COMPOSE["volumes"].keys()
    files = {mount[0]: mount[2:] for mount in mounts if mount[0].startswith(".")}
    assert set(map(tuple, files.values())) == {("ro",)}
    assert [path for path in files if not (ROOT / path).exists()] == []


def test_every_configuration_is_used_by_a_service() -> None:
    config_names = [entry["source"] for service in SERVICES.values() for entry in service.get("configs", [])]
    assert sorted(config_names) == sorted(COMPOSE["configs"])
    assert [
        name for name in config_names if "$" in COMPOSE["configs"][name]["content"]
    ] == []  # Compose would fill it in


def test_prometheus_scrapes_every_component_where_it_listens() -> None:
    (job,) = config("prometheus")["scrape_configs"]
    (always,), (started,) = job["static_configs"], job["dns_sd_configs"]
    listening = {name for name, service in OURS.items() if "GPUSTREAM_LISTEN" in service["environment"]}
    targets = always["targets"] + [f"{name}:{started['port']}" for name in started["names"]]
    assert set(targets) == {f"{name}:9401" for name in listening}


def test_prometheus_accepts_remote_writes_and_sends_alerts() -> None:
    assert "--web.enable-remote-write-receiver" in SERVICES["prometheus"]["command"]
    ((manager,),) = [entry["static_configs"] for entry in config("prometheus")["alerting"]["alertmanagers"]]
    assert manager["targets"] == ["alertmanager:9093"]
    rules = {f"./k8s/prometheus/{name}:/etc/prometheus/{name}:ro" for name in config("prometheus")["rule_files"]}
    assert rules == {mount for mount in SERVICES["prometheus"]["volumes"] if mount.startswith(".")}


def test_conditions_of_the_alert_stream_have_no_rule_in_prometheus() -> None:
    assert "alerts" in OURS
    loaded = [ROOT / mount.split(":")[0] for mount in SERVICES["prometheus"]["volumes"] if mount.startswith(".")]
    groups = [group for file in loaded for group in yaml.load(file.read_text(), yaml.CSafeLoader)["groups"]]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts != []
    assert [name for name in alerts if not name.startswith("Gpustream")] == []


def test_the_route_of_alertmanager_has_its_receiver() -> None:
    settings = config("alertmanager")
    assert [receiver["name"] for receiver in settings["receivers"]] == [settings["route"]["receiver"]]


def test_grafana_shows_the_dashboards_to_anybody_and_lets_nobody_in() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"  # admin and its default password
    (provider,) = config("grafana-dashboards")["providers"]
    folder = provider["options"]["path"]
    assert f"./k8s/components/dashboards:{folder}:ro" in SERVICES["grafana"]["volumes"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder
    assert (ROOT / "k8s" / "components" / "dashboards" / home.name).is_file()


def test_grafana_queries_prometheus_at_its_address() -> None:
    (source,) = config("grafana-data-sources")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == config("prometheus")["global"]["scrape_interval"]
