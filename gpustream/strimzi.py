"""Writes the topics, users and ACLs for Strimzi's operators: ``python -m gpustream.strimzi [--check]``.

In:       the topics; the ACLs of each command; the chart's values.yaml.
Out:      ``files/kafka.json`` of the chart, of which it makes Strimzi's objects; the same objects for kustomize, in
          ``k8s/components/strimzi``.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpustream.acls import Acl, of_commands
from gpustream.chart import CHART, COMPONENTS
from topics.reference import generate
from topics.topic import load_topics

STRIMZI = Path(__file__).parent.parent / "k8s" / "components" / "strimzi"

USERS = "  # written by `python -m gpustream.strimzi`: the user of each component\n"
"""The marker in the kustomization: what follows it is written, what is before it is kept."""

USER_PATCH = """\
  - target:
      kind: DaemonSet|Deployment|StatefulSet
      name: {name}
      labelSelector: app.kubernetes.io/name=gpustream
    patch: |
      - op: replace
        path: /spec/template/spec/volumes/0/projected/sources/0/secret/name
        value: gpustream-{name}
"""


def kafka() -> dict[str, Any]:
    """The topics, and what each command may do, as Strimzi writes it."""
    acls_by_command: dict[str, list[dict[str, Any]]] = {}
    granted = of_commands()
    for command in COMPONENTS.values():
        operations: dict[Acl, list[str]] = {}
        for acl in granted[command]:
            operations.setdefault(acl._replace(operation=""), []).append(acl.operation)
        acls_by_command[command] = [
            {
                "type": {"TransactionalId": "transactionalId"}.get(acl.resource, acl.resource.lower()),
                "name": acl.name,
                "patternType": "prefix" if acl.prefixed else "literal",
                "operations": names,
            }
            for acl, names in operations.items()
        ]
    topics = [{"name": topic.name, "config": topic.settings()} for topic in load_topics().values()]
    return {"topics": topics, "acls": acls_by_command}


def strimzi_object(kind: str, name: str, component: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An object for one of Strimzi's operators, those of the Kafka called kafka."""
    labels = {"name": "gpustream", "component": component}
    return {
        "apiVersion": "kafka.strimzi.io/v1",
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "gpustream",
            "labels": {f"app.kubernetes.io/{key}": value for key, value in labels.items()}
            | {"strimzi.io/cluster": "kafka"},
        },
        "spec": spec,
    }


def kafka_topics(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A KafkaTopic for each topic, with as many partitions and replicas as the chart has."""
    options = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["topics"]["options"]
    size = {"partitions": options["partitions"], "replicas": options["replication-factor"]}
    return [
        strimzi_object(
            "KafkaTopic",
            f"gpustream-{topic['name'].replace('.', '-')}",
            "topics",
            {"topicName": topic["name"], **size, "config": topic["config"]},
        )
        for topic in contents["topics"]
    ]


def users_of_components() -> dict[str, str]:
    """The workload of each command, except of the one that makes topics: its name in k8s/, which is also its user's."""
    names = {re.sub("([A-Z])", r"-\1", name).lower(): command for name, command in COMPONENTS.items()}
    return {name: command for name, command in names.items() if name != "topics"}


def kafka_users(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A KafkaUser for each component, with the ACLs that its command needs."""
    return [
        strimzi_object(
            "KafkaUser",
            f"gpustream-{name}",
            name,
            {
                "authentication": {"type": "tls"},
                "authorization": {
                    "type": "simple",
                    "acls": [
                        {
                            "resource": {key: acl[key] for key in ("type", "name", "patternType")},
                            "operations": acl["operations"],
                        }
                        for acl in contents["acls"][command]
                    ],
                },
            },
        )
        for name, command in users_of_components().items()
    ]


def as_documents(objects: list[dict[str, Any]], title: str) -> str:
    """A file of YAML documents, with a line on what they are."""
    documents = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    return f"# {title}: written by `python -m gpustream.strimzi`.\n{documents}"


def files() -> dict[Path, str]:
    """The files as they should be."""
    contents = kafka()
    head, mark, _ = (STRIMZI / "kustomization.yaml").read_text(encoding="utf-8").partition(USERS)
    mounts = head + mark + "".join(USER_PATCH.format(name=name) for name in users_of_components())
    return {
        CHART / "files" / "kafka.json": json.dumps(contents, indent=2) + "\n",
        STRIMZI / "topics.yaml": as_documents(kafka_topics(contents), "The topics"),
        STRIMZI / "users.yaml": as_documents(kafka_users(contents), "A user for each component"),
        STRIMZI / "kustomization.yaml": mounts,
    }


if __name__ == "__main__":
    sys.exit(generate(files(), "gpustream.strimzi", sys.argv[1:]))
