"""The manifests of k8s/ as their tests read them: files, kustomizations, pods and what their containers see."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

K8S = Path(__file__).parents[2] / "k8s"
README = (K8S / "README.md").read_text()
IMAGE = "gpustream"

Manifest = dict[str, Any]

WEBHOOK = {"GPUSTREAM_URL": "https://hooks.example.com/gpu-alerts"}
"""The ConfigMap that the component `webhook` wants of whoever takes it."""

PODS_OF = {"DaemonSet", "Deployment", "StatefulSet", "Job"}
"""Kinds that make pods."""


def documents(text: str) -> list[Manifest]:
    """The documents of a YAML text. libyaml reads it in a tenth of the time that Python takes."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


class Object(NamedTuple):
    """An object and the file that it is in."""

    path: Path
    content: Manifest

    def __str__(self) -> str:
        return str(self.path.relative_to(K8S))

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.content["metadata"]["name"])

    @property
    def pod(self) -> Manifest:
        """Its pod template."""
        template: Manifest = self.content["spec"]["template"]
        return template

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (only,) = self.pod["spec"]["containers"]
        found: Manifest = only
        return found

    @property
    def ours(self) -> bool:
        """Whether its pods run gpustream."""
        return self.kind in PODS_OF and self.container["image"].split(":")[0] == IMAGE


def kustomizations() -> dict[Path, Manifest]:
    """Every folder with a kustomization, and what that says."""
    return {
        path.parent: yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(K8S.rglob("kustomization.yaml"))
    }


def objects() -> list[Object]:
    """Every object of every file beside a kustomization."""
    files = [file for folder in kustomizations() for file in sorted(folder.glob("*.yaml"))]
    return [
        Object(file, document)
        for file in files
        if file.name != "kustomization.yaml"
        for document in documents(file.read_text())
    ]


OBJECTS = objects()
WORKLOADS = [thing for thing in OBJECTS if thing.kind in PODS_OF]
OURS = [thing for thing in WORKLOADS if thing.ours]


def the(kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (the_object,) = [thing for thing in OBJECTS if (thing.kind, thing.name) == (kind, name)]
    return the_object


def config_maps() -> dict[str, dict[str, str]]:
    """What the ConfigMaps of the base hold, and the webhook's, by their names without a hash."""
    maps = {"webhook": dict(WEBHOOK)}
    for folder, kustomization in kustomizations().items():
        for generator in kustomization.get("configMapGenerator", []):
            if generator.get("behavior", "create") == "create" and "envs" in generator:
                (file,) = generator["envs"]
                maps[generator["name"]] = env_file(folder / file)
    return maps


def env_file(path: Path) -> dict[str, str]:
    """The variables of a file of NAME=VALUE lines, as kustomize reads it."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def merged() -> dict[str, dict[str, str]]:
    """The ConfigMaps of the try overlay: the base's, with what the overlay sets."""
    maps = config_maps()
    for generator in kustomizations()[K8S / "try"]["configMapGenerator"]:
        maps[generator["name"]] |= dict(literal.split("=", 1) for literal in generator["literals"])
    return maps


def environment(container: Manifest, maps: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The variables that a container sees; those from its pod's fields hold the field's path."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        variables |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", []):
        variables[variable["name"]] = _value(variable, maps)
    return variables


def _value(variable: Manifest, maps: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return str(source["fieldRef"]["fieldPath"])
    key = source["configMapKeyRef"]
    return maps[key["name"]][key["key"]]
