"""What the Helm chart knows of the commands: ``python -m gpustream.chart [--check]``.

In:       the chart's values.yaml; every command's options, as click knows them; the topics; the ACLs.
Out:      ``values.schema.json``, which refuses a value or an option that there is not; the table of values in the
          chart's README; ``files/kafka.json``, the topics and ACLs that Strimzi's objects are made of.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from gpustream import acls
from gpustream.cli import main
from gpustream.reference import commands
from topics.reference import generate
from topics.topic import load_topics

CHART = Path(__file__).parent.parent / "k8s" / "helm" / "gpustream"

COMPONENTS = {
    "topics": "topics create",
    "node": "produce node",
    "cluster": "produce cluster",
    "attribution": "stream attribution",
    "alerts": "stream alerts",
    "usage": "stream usage",
    "remoteWrite": "sink remote-write",
    "alertmanager": "sink alertmanager",
    "webhook": "sink webhook",
    "scrape": "sink scrape",
    "parquet": "sink parquet",
    "metricsApi": "sink metrics-api",
}
"""The values of each component, and the command that it runs."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
ANY_LIST: dict[str, Any] = {"type": "array"}
TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
SWITCH: dict[str, Any] = {"type": "boolean"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}


def said(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    """A value and what it is for."""
    return {**schema, "description": description}


def closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has these and nothing else."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


OF_EVERY_POD: dict[str, dict[str, Any]] = {
    "resources": said(ANY_OBJECT, "Requests and limits of the container."),
    "nodeSelector": said(TEXTS, "The labels of the nodes that the pods run on."),
    "tolerations": said(ANY_LIST, "The taints that the pods tolerate."),
    "affinity": said(ANY_OBJECT, "The pods' affinity."),
    "priorityClassName": said(TEXT, "The pods' priority class."),
    "runtimeClassName": said(TEXT, "The pods' RuntimeClass, for example nvidia for the node producer."),
    "podLabels": said(TEXTS, "More labels of the pods."),
    "podAnnotations": said(TEXTS, "Annotations of the pods."),
    "podSecurityContext": said(ANY_OBJECT, "The pods' security context."),
    "terminationGracePeriodSeconds": said(COUNT, "A process takes at most 10 s to stop."),
    "extraArgs": said(ANY_LIST, "More arguments of the command."),
    "extraEnv": said(ANY_LIST, "More environment variables, as the container has them."),
    "extraEnvFrom": said(ANY_LIST, "ConfigMaps and Secrets that are environment variables."),
    "extraVolumes": said(ANY_LIST, "More volumes of the pods."),
    "extraVolumeMounts": said(ANY_LIST, "More mounts of the container."),
    "secret": said(
        TEXT, "A Secret of yours whose files the pod sees in /etc/gpustream/NAME, for options that name files."
    ),
    "disruptionBudget": said(SWITCH, "A PodDisruptionBudget, if there is more than one replica."),
    "autoscaling": closed(
        enabled=said(SWITCH, "Scale attribution, alerts, usage and remoteWrite, by KEDA or a HorizontalPodAutoscaler."),
        minReplicas=said(COUNT, "The fewest pods."),
        maxReplicas=said(COUNT, "The most pods: no more than partitions."),
        targetCPU=said(TEXT, "Of one pod, which has one core."),
        lagThreshold=said(COUNT, "Records that one pod may be behind: about 5 s of its work. KEDA only."),
    ),
}

OF_ONE: dict[str, dict[str, dict[str, Any]]] = {
    "node": {
        "maxUnavailable": said({"type": ["string", "integer"]}, "Nodes that are updated at once."),
        "resourceQuota": said(SWITCH, "A ResourceQuota for the pods' priority class, as GKE wants it."),
    },
    "cluster": {
        "serviceAccount": closed(annotations=said(TEXTS, "Annotations of the account.")),
        "customOwners": said(
            {
                "type": "array",
                "items": {**closed(apiGroups=ANY_LIST, resources=ANY_LIST), "required": ["apiGroups", "resources"]},
            },
            "Custom controllers above GPU pods that the cluster producer may get; "
            "k8s/components/custom-owners has those that are common.",
        ),
    },
    "parquet": {
        "storage": closed(
            size=said(TEXT, "Of the volume in which the files are."),
            className=said(TEXT, "Its StorageClass; empty: the cluster's default."),
        )
    },
    "metricsApi": {
        "aggregated": said(SWITCH, "Serve custom.metrics.k8s.io too, if no other server has it."),
        "tlsSecret": said(TEXT, "A Secret with tls.crt and tls.key; empty: that of the certificate below."),
        "caBundle": said(TEXT, "Without cert-manager: the CA of that certificate, in base64, for the API server."),
        "certificate": closed(
            enabled=said(SWITCH, "A Certificate by cert-manager, which also gives its CA to the API server."),
            issuerRef=said(ANY_OBJECT, "Who issues it."),
        ),
    },
    "alerts": {"rules": said(TEXT, "The text of a rules file; empty: the rules that come with gpustream.")},
}

GLOBAL: dict[str, dict[str, Any]] = {
    "image": closed(
        repository=said(TEXT, "The image."),
        tag=said(TEXT, "Its tag; empty: the chart's appVersion."),
        digest=said({**TEXT, "pattern": "^(sha256:[0-9a-f]{64})?$"}, "Its digest, which wins over the tag."),
        pullPolicy=said({"enum": ["Always", "IfNotPresent", "Never"]}, "When it is pulled."),
        pullSecrets=said(ANY_LIST, "Secrets of its registry, as `- name: NAME`."),
    ),
    "fullnameOverride": said(TEXT, "What the names of all objects begin with; empty: the release's name."),
    "kafkaSecret": said(TEXT, "A Secret of yours whose files every pod sees in /etc/gpustream/kafka."),
    "keda": closed(
        enabled=said(SWITCH, "Scale by KEDA on lag and CPU, instead of by a HorizontalPodAutoscaler on CPU."),
        pollingInterval=said(COUNT, "Seconds."),
        authentication=said(TEXT, "A TriggerAuthentication of yours, for a Kafka with TLS or SASL."),
    ),
    "monitors": closed(
        enabled=said(SWITCH, "A PodMonitor, and a ServiceMonitor of the scrape sink, for the Prometheus operator."),
        labels=said(TEXTS, "Labels by which your Prometheus selects them."),
        interval=said(TEXT, "How often they are scraped; empty: the Prometheus's own."),
        honorLabels=said(SWITCH, "The scrape sink's series keep their labels: those of the GPUs' pods."),
    ),
    "prometheusRule": closed(
        enabled=said(SWITCH, "A PrometheusRule with the alerts about gpustream itself."),
        labels=said(TEXTS, "Labels by which your Prometheus selects it."),
        gpus=said(SWITCH, "Alerts about GPUs too; only if the component alerts does not run, or each comes twice."),
    ),
    "dashboards": closed(
        enabled=said(SWITCH, "A ConfigMap for each dashboard, for Grafana's sidecar."),
        labels=said(TEXTS, "The label that the sidecar looks for."),
        annotations=said(TEXTS, "For example the folder in Grafana."),
    ),
    "networkPolicy": closed(
        enabled=said(SWITCH, "Nothing may connect to the pods but to the ports that are scraped."),
        **{"from": said(ANY_LIST, "And only from these peers; empty: from anywhere.")},
    ),
    "strimzi": closed(
        topics=said(SWITCH, "A KafkaTopic for each topic, instead of the Job."),
        users=said(SWITCH, "A KafkaUser for each component, with the ACLs that it needs and no more."),
        cluster=said(TEXT, "The name of the Kafka."),
        namespace=said(TEXT, "Where the Kafka is; empty: the release's namespace."),
        authentication=said({"enum": ["tls", "tls-external", "scram-sha-512"]}, "How the users log in."),
    ),
    "openshift": said(SWITCH, "The cluster picks the users; the node producer may use its constraints `privileged`."),
    "selinux": said(SWITCH, "The node producer has the type that SELinux lets connect to the kubelet's socket."),
    "extraObjects": said(ANY_LIST, "More objects; they may have templates in them."),
}


def options_of(command: click.Command) -> dict[str, Any]:
    """The options of a command as properties, by their names without dashes."""
    found = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar:
            kind: dict[str, Any] = {"type": ["string", "number", "boolean", "array"]}
            if isinstance(option.type, click.Choice) and not option.multiple:
                kind = {"enum": list(option.type.choices)}
            found[option.opts[0].removeprefix("--")] = said(kind, " ".join((option.help or "").split()))
    return found


def schema() -> dict[str, Any]:
    """The schema of the chart's values."""
    by_words = {" ".join(path[1:]): command for path, command in commands(main, ("gpustream",))}
    options = {
        name: options_of(by_words.get(words) or by_words[words.split()[0]]) for name, words in COMPONENTS.items()
    }
    every = {option: value for some in options.values() for option, value in some.items()}
    components = {
        name: {
            **closed(
                enabled=said(SWITCH, f"Whether `gpustream {words}` runs."),
                **({} if name in {"topics", "node"} else {"replicas": said(COUNT, "How many pods.")}),
                options=said(closed(**options[name]), f"Options of `gpustream {words}`, without the dashes."),
                **OF_EVERY_POD,
                **OF_ONE.get(name, {}),
            ),
            "description": f"`gpustream {words}`.",
        }
        for name, words in COMPONENTS.items()
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **closed(
            **GLOBAL,
            options=said(closed(**every), "Options of every component that has them, without the dashes."),
            defaults=said(closed(**OF_EVERY_POD), "What every pod has, unless its component says otherwise."),
            **components,
            **{"global": said(ANY_OBJECT, "Helm's own, for a chart that this one is a part of.")},
        ),
    }


def rows(schema: Mapping[str, Any], values: Any, path: str = "") -> Iterator[str]:
    """The table of values: each with its default and what it is for."""
    for name, value in schema["properties"].items():
        here, default = f"{path}{name}", values.get(name) if isinstance(values, dict) else None
        if name == "options" or "properties" not in value:
            shown = "" if default is None else f"`{json.dumps(default)}`"
            yield f"| `{here}` | {shown} | {value.get('description', '')} |"
        elif not path and name in COMPONENTS:
            own = {"properties": {key: one for key, one in value["properties"].items() if key not in OF_EVERY_POD}}
            yield from rows(own, default, f"{here}.")
            for key, of_its_own in sorted((default or {}).items()):
                if key in OF_EVERY_POD:
                    yield f"| `{here}.{key}` | `{json.dumps(of_its_own)}` | As `defaults.{key}`. |"
        else:
            yield from rows(value, default, f"{here}.")


def readme(schema: Mapping[str, Any]) -> str:
    """The chart's README with its table."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    table = "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *rows(schema, values)])
    page = (CHART / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(<!-- values -->\n\n).*?(\n\n<!-- end -->)", lambda m: m[1] + table + m[2], page, flags=re.DOTALL)


def kafka() -> dict[str, Any]:
    """The topics, and what each command may do, as Strimzi writes it."""
    rights: dict[str, list[dict[str, Any]]] = {}
    of_commands = acls.of_commands()
    for words in COMPONENTS.values():
        operations: dict[tuple[str, str], list[str]] = {}
        for acl in of_commands[words]:
            kind = {"TransactionalId": "transactionalId"}.get(acl.resource, acl.resource.lower())
            operations.setdefault((kind, acl.name), []).append(acl.operation)
        rights[words] = [{"type": kind, "name": name, "operations": some} for (kind, name), some in operations.items()]
    topics = [{"name": topic.name, "config": topic.settings()} for topic in load_topics().values()]
    return {"topics": topics, "acls": rights}


def files() -> dict[Path, str]:
    """The files as they should be."""
    made = schema()
    return {
        CHART / "values.schema.json": json.dumps(made, indent=2) + "\n",
        CHART / "README.md": readme(made),
        CHART / "files" / "kafka.json": json.dumps(kafka(), indent=2) + "\n",
    }


if __name__ == "__main__":
    sys.exit(generate(files(), "gpustream.chart", sys.argv[1:]))
