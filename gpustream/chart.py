"""Writes the parts of the Helm chart that follow from the commands: ``python -m gpustream.chart [--check]``.

In:       the chart's values.yaml; every command's options, as click knows them.
Out:      ``values.schema.json``, which refuses a value or an option that there is not; the table of values in the
          chart's README.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from gpustream.cli import commands
from topics.reference import filled, generate, table

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
    "page": "sink page",
    "reclaim": "sink reclaim",
}
"""The values of each component, and the command that it runs."""

NEEDS = {
    "webhook": " It needs `options.url`, and `options.secret-file` or `options.unsigned`.",
    "metricsApi": " It needs to know who may ask: `secret`, with a file `token`, `options.client-ca`, or `aggregated`.",
}
"""What a component can't start without, and the chart does not bring."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
ANY_LIST: dict[str, Any] = {"type": "array"}
TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}}
SWITCH: dict[str, Any] = {"type": "boolean"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}


def doc(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    """The schema of a value with its description."""
    return {**schema, "description": description}


def object_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def kubernetes_object(field_names: str, texts: str = "") -> dict[str, Any]:
    """The schema of an object of Kubernetes with these fields, of any content, and these texts, and no others."""
    fields: dict[str, dict[str, Any]] = {name: {} for name in field_names.split()}
    return object_of(**fields, **{name: {"type": ["string", "null"]} for name in texts.split()})


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a value that may be empty, and whose properties may: so a site's file of values takes away what one
    before it has. Helm itself takes away only what the chart's values.yaml has."""
    changed = dict(schema)
    if "enum" in schema:
        changed["enum"] = [*schema["enum"], None]
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        changed["type"] = [*kinds, "null"]
    if "properties" in schema:
        changed["properties"] = {name: or_null(value) for name, value in schema["properties"].items()}
    return changed


def list_of(item: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """The schema of a list of such objects, of which some fields are required."""
    return {"type": "array", "items": {**item, "required": list(required)}}


POD_VALUES: dict[str, dict[str, Any]] = {
    "resources": doc(object_of(requests=TEXTS, limits=TEXTS, claims=ANY_LIST), "Requests and limits of the container."),
    "nodeSelector": doc(TEXTS, "The labels of the nodes that the pods run on."),
    "tolerations": doc(
        list_of(kubernetes_object("tolerationSeconds", texts="key operator value effect")),
        "The taints that the pods tolerate.",
    ),
    "affinity": doc(kubernetes_object("nodeAffinity podAffinity podAntiAffinity"), "The pods' affinity."),
    "priorityClassName": doc(TEXT, "The pods' priority class."),
    "runtimeClassName": doc(TEXT, "The pods' RuntimeClass, for example nvidia for the node producer."),
    "podLabels": doc(TEXTS, "More labels of the pods."),
    "podAnnotations": doc(TEXTS, "Annotations of the pods."),
    "serviceAccountName": doc(
        TEXT,
        "An account of yours, for example with a role of a cloud; cluster, reclaim, metricsApi with aggregated, and "
        "node on OpenShift have the chart's.",
    ),
    "podSecurityContext": doc(
        kubernetes_object(
            "runAsNonRoot runAsUser runAsGroup fsGroup fsGroupChangePolicy supplementalGroups supplementalGroupsPolicy "
            "seccompProfile appArmorProfile seLinuxOptions seLinuxChangePolicy sysctls"
        ),
        "The pods' security context.",
    ),
    "securityContext": doc(
        kubernetes_object(
            "allowPrivilegeEscalation readOnlyRootFilesystem capabilities privileged procMount runAsNonRoot runAsUser "
            "runAsGroup seccompProfile appArmorProfile seLinuxOptions"
        ),
        "The container's security context.",
    ),
    "resourceClaims": doc(
        list_of(ANY_OBJECT, "name"), "Claims of the pods, if GPUs come by dynamic resource allocation."
    ),
    "terminationGracePeriodSeconds": doc(COUNT, "A process takes at most 10 s to stop."),
    "extraArgs": doc({"type": "array", "items": TEXT}, "More arguments of the command."),
    "extraEnv": doc(
        list_of(kubernetes_object("valueFrom", texts="name value"), "name"),
        "More environment variables, as the container has them.",
    ),
    "extraEnvFrom": doc(
        list_of(kubernetes_object("configMapRef secretRef prefix")),
        "ConfigMaps and Secrets that are environment variables.",
    ),
    "extraVolumes": doc(list_of(ANY_OBJECT, "name"), "More volumes of the pods."),
    "extraVolumeMounts": doc(
        list_of(
            kubernetes_object("name mountPath readOnly subPath subPathExpr mountPropagation recursiveReadOnly"),
            "name",
            "mountPath",
        ),
        "More mounts of the container.",
    ),
    "extraPodSpec": doc(
        kubernetes_object(
            "dnsConfig dnsPolicy hostAliases hostNetwork hostUsers initContainers preemptionPolicy schedulerName "
            "topologySpreadConstraints"
        ),
        "More fields of the pods' spec, such as dnsConfig, hostAliases and initContainers; topologySpreadConstraints "
        "in place of the chart's.",
    ),
    "revisionHistoryLimit": doc(COUNT, "How many old revisions Kubernetes keeps; without it 10."),
    "secret": doc(
        TEXT, "A Secret of yours whose files the pod sees in /etc/gpustream/NAME, for options that name files."
    ),
    "disruptionBudget": doc(SWITCH, "A PodDisruptionBudget, if there is more than one replica."),
    "autoscaling": object_of(
        enabled=doc(
            SWITCH, "Scale streams and remoteWrite, by KEDA or a HorizontalPodAutoscaler; webhook and parquet, by KEDA."
        ),
        minReplicas=doc(COUNT, "The fewest pods; 0 only by KEDA: none while there is no lag."),
        maxReplicas=doc(COUNT, "The most pods: no more than partitions."),
        targetCPU=doc(TEXT, "Of one pod, which has one core; empty: not scaled on CPU."),
        lagThreshold=doc(COUNT, "Records that one pod may be behind. KEDA only."),
    ),
}

SERVICE_ACCOUNT = object_of(annotations=doc(TEXTS, "Annotations of the account, for example a role of a cloud."))

COMPONENT_VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "node": {
        "serviceAccount": SERVICE_ACCOUNT,
        "maxUnavailable": doc({"type": ["string", "integer"]}, "Nodes that are updated at once."),
        "kubeletDirectory": doc(
            {**TEXT, "pattern": "^/"}, "Where the kubelet has its files; /var/lib/k0s/kubelet, for example."
        ),
        "resourceQuota": doc(SWITCH, "A ResourceQuota for the pods' priority class, as GKE wants it."),
    },
    "cluster": {
        "policyEvents": doc(SWITCH, "Events on pods whose annotations under gpustream.dev/ are wrong."),
        "serviceAccount": SERVICE_ACCOUNT,
        "customOwners": doc(
            {
                "type": "array",
                "items": {**object_of(apiGroups=ANY_LIST, resources=ANY_LIST), "required": ["apiGroups", "resources"]},
            },
            "Custom controllers above GPU pods that the cluster producer may get; "
            "k8s/components/custom-owners has those that are common.",
        ),
    },
    "parquet": {
        "storage": object_of(
            size=doc(
                TEXT,
                "Of the volume in which the files are. Kubernetes changes the storage of no StatefulSet: before an "
                "upgrade with another one, delete it with `--cascade=orphan`; the volume that is there stays as it is.",
            ),
            className=doc(TEXT, "Its StorageClass; empty: the cluster's default."),
        )
    },
    "metricsApi": {
        "serviceAccount": SERVICE_ACCOUNT,
        "aggregated": doc(SWITCH, "Serve custom.metrics.k8s.io too, if no other server has it."),
        "tlsSecret": doc(TEXT, "A Secret with tls.crt and tls.key; empty: that of the certificate below."),
        "caBundle": doc(TEXT, "Without cert-manager: the CA of that certificate, in base64, for the API server."),
        "certificate": object_of(
            enabled=doc(SWITCH, "A Certificate by cert-manager, which also gives its CA to the API server."),
            issuerRef=doc(kubernetes_object("name kind group"), "Who issues it."),
        ),
    },
    "page": {
        "from": doc(
            list_of(kubernetes_object("podSelector namespaceSelector ipBlock")),
            "With networkPolicy.enabled, the peers that may connect; empty: nobody but `kubectl port-forward`.",
        )
    },
    "reclaim": {
        "serviceAccount": SERVICE_ACCOUNT,
        "act": doc(SWITCH, "Do what namespaces let be done, with the rights to change workloads; else a dry run."),
        "namespaces": doc(
            {"type": "array", "items": {**TEXT, "minLength": 1}}, "Where it may read, and act; empty: everywhere."
        ),
    },
    "alerts": {"rules": doc(TEXT, "The text of a rules file; empty: the rules that come with gpustream.")},
}

GLOBAL_VALUES: dict[str, dict[str, Any]] = {
    "image": object_of(
        repository=doc(TEXT, "The image."),
        tag=doc(TEXT, "Its tag; empty: the chart's appVersion."),
        digest=doc({**TEXT, "pattern": "^(sha256:[0-9a-f]{64})?$"}, "Its digest, which wins over the tag."),
        pullPolicy=doc({"enum": ["Always", "IfNotPresent", "Never"]}, "When it is pulled."),
        pullSecrets=doc(list_of(object_of(name=TEXT), "name"), "Secrets of its registry, as `- name: NAME`."),
    ),
    "fullnameOverride": doc(TEXT, "What the names of all objects begin with; empty: the release's name."),
    "commonLabels": doc(TEXTS, "More labels of every object; those of pods are `defaults.podLabels`."),
    "commonAnnotations": doc(TEXTS, "More annotations of every object; those of pods are `defaults.podAnnotations`."),
    "kafkaSecret": doc(
        TEXT,
        "A Secret of yours whose files every pod sees in /etc/gpustream/kafka; with `strimzi.users` ca.crt is enough, "
        "and empty is the CA that Strimzi has in the namespace.",
    ),
    "keda": object_of(
        enabled=doc(SWITCH, "Scale by KEDA on lag and CPU, instead of by a HorizontalPodAutoscaler on CPU."),
        pollingInterval=doc({**COUNT, "minimum": 1}, "Seconds."),
        authentication=doc(
            TEXT, "A TriggerAuthentication of yours, for a Kafka with TLS or SASL; with `strimzi.users` it has a user."
        ),
    ),
    "monitors": object_of(
        enabled=doc(SWITCH, "A PodMonitor, and a ServiceMonitor of the scrape sink, for the Prometheus operator."),
        labels=doc(TEXTS, "Labels by which your Prometheus selects them."),
        interval=doc(TEXT, "How often they are scraped; empty: the Prometheus's own."),
        honorLabels=doc(SWITCH, "The scrape sink's series keep their labels: those of the GPUs' pods."),
    ),
    "prometheusRule": object_of(
        enabled=doc(SWITCH, "PrometheusRules: what is recorded of GPUs, and the alerts about gpustream itself."),
        labels=doc(TEXTS, "Labels by which your Prometheus selects them."),
        gpus=doc(SWITCH, "Alerts about GPUs too; only if the component alerts does not run, or each comes twice."),
    ),
    "dashboards": object_of(
        enabled=doc(SWITCH, "A ConfigMap for each dashboard, for Grafana's sidecar."),
        labels=doc(TEXTS, "The label that the sidecar looks for."),
        annotations=doc(TEXTS, "For example the folder in Grafana."),
    ),
    "networkPolicy": object_of(
        enabled=doc(SWITCH, "Nothing may connect to the pods but to the ports that are scraped."),
        **{
            "from": doc(
                list_of(kubernetes_object("podSelector namespaceSelector ipBlock")),
                "And only from these peers; empty: from anywhere. The metrics API's port is open: it asks who one is.",
            )
        },
    ),
    "strimzi": object_of(
        topics=doc(SWITCH, "A KafkaTopic for each topic, instead of the Job."),
        users=doc(
            SWITCH,
            "A KafkaUser for each component, with the ACLs that it needs and no more. The component logs in as it: the "
            "user operator must write its Secret into the release's namespace.",
        ),
        cluster=doc(TEXT, "The name of the Kafka."),
        namespace=doc(TEXT, "Where the Kafka is; empty: the release's namespace."),
        authentication=doc(
            {"enum": ["tls", "tls-external", "scram-sha-512"]}, "How the users log in; tls-external: by `kafkaSecret`."
        ),
    ),
    "openshift": doc(SWITCH, "The cluster picks the users; the node producer may use its constraints `privileged`."),
    "selinux": doc(SWITCH, "The node producer has the type that SELinux lets connect to the kubelet's socket."),
    "extraObjects": doc(
        {"type": "array", "items": {"type": ["object", "string"]}},
        "More objects, or texts of objects; they may have templates in them.",
    ),
}

OF_THE_PARENT: dict[str, dict[str, Any]] = {
    "enabled": doc({"const": True}, "True, or left out; its parent's `condition: gpustream.enabled` may say false."),
    "global": doc(ANY_OBJECT, "Helm's own, for a chart that this one is a part of."),
}


def require_defaults(schema: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Make the schema of an object refuse an empty value where templates need one: in place of a group of values, or of
    a default that is a switch, a number or a text. Helm takes an empty value for no value, not even the default."""
    schema["required"] = []
    for name, default in defaults.items():
        value = schema["properties"][name]
        if "$ref" in value or isinstance(default, list) or default == "":
            continue
        if isinstance(default, dict) and "properties" not in value:
            continue
        if isinstance(default, dict) and name not in ("options", "issuerRef"):
            require_defaults(value, default)
        schema["required"].append(name)


def options_of(command: click.Command) -> dict[str, Any]:
    """The options of a command as properties, by their names without dashes."""
    properties = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar:
            takes_several = option.multiple or "[,...]" in option.type.name
            scalars = ["string", "number", *(["boolean"] if isinstance(option.type, click.types.BoolParamType) else [])]
            kind: dict[str, Any] = {"type": [*scalars, *(["array"] if takes_several else [])]}
            if isinstance(option.type, click.Choice) and not option.multiple:
                kind = {"enum": list(option.type.choices)}
            properties[option.opts[0].removeprefix("--")] = doc(or_null(kind), " ".join((option.help or "").split()))
    return properties


def schema(values: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the chart's values, which are ``values`` by default."""
    by_words = {" ".join(path[1:]): command for path, command in commands()}
    options = {
        name: options_of(by_words.get(command) or by_words[command.split()[0]]) for name, command in COMPONENTS.items()
    }
    all_options: dict[str, Any] = {}
    for component_options in options.values():
        all_options |= {
            option: value
            for option, value in component_options.items()
            if "array" not in all_options.get(option, {}).get("type", [])
        }
    pod_references = {name: {"$ref": f"#/definitions/{name}"} for name in POD_VALUES}
    components = {
        name: {
            **object_of(
                enabled=doc(SWITCH, f"Whether `gpustream {command}` runs.{NEEDS.get(name, '')}"),
                **({} if name in {"topics", "node"} else {"replicas": doc(COUNT, "How many pods.")}),
                options=doc(object_of(**options[name]), f"Options of `gpustream {command}`, without the dashes."),
                **pod_references,
                **COMPONENT_VALUES.get(name, {}),
            ),
            "description": f"`gpustream {command}`.",
        }
        for name, command in COMPONENTS.items()
    }
    values_schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **object_of(
            **GLOBAL_VALUES,
            options=doc(object_of(**all_options), "Options of every component that has them, without the dashes."),
            defaults=doc(object_of(**pod_references), "What every pod has, unless its component says otherwise."),
            **components,
            **OF_THE_PARENT,
        ),
        "definitions": {name: or_null(value) for name, value in POD_VALUES.items()},
    }
    require_defaults(values_schema, values)
    for name in ("defaults", *COMPONENTS):  # a reference has no room for what is required of one component
        if "autoscaling" in values[name]:
            keys = ["enabled", "minReplicas", "maxReplicas"] if name == "defaults" else ["lagThreshold"]
            whole = {"allOf": [pod_references["autoscaling"], {"required": keys}]}
            values_schema["properties"][name]["properties"]["autoscaling"] = whole
            values_schema["properties"][name]["required"].append("autoscaling")
    switches = ["terminationGracePeriodSeconds", "disruptionBudget"]
    values_schema["properties"]["defaults"]["required"] += switches
    return values_schema


def rows(schema: Mapping[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """The table of values: each with its default and what it is for."""
    for name, property_schema in schema["properties"].items():
        name_path, default = f"{path}{name}", values.get(name) if isinstance(values, dict) else None
        value = POD_VALUES[name] if {"$ref", "allOf"} & property_schema.keys() else property_schema
        if name == "options" or "properties" not in value or (path and "description" in value):
            default_cell = "" if default is None else f"`{json.dumps(default)}`"
            yield f"`{name_path}`", default_cell, value.get("description", "")
        elif not path and name in COMPONENTS:
            properties = value["properties"].items()
            component_schema = {"properties": {key: schema for key, schema in properties if key not in POD_VALUES}}
            yield from rows(component_schema, default, f"{name_path}.")
            for key, component_default in sorted((default or {}).items()):
                if key in POD_VALUES:
                    yield f"`{name_path}.{key}`", f"`{json.dumps(component_default)}`", f"As `defaults.{key}`."
        else:
            yield from rows(value, default, f"{name_path}.")


def files() -> dict[Path, str]:
    """The files as they should be."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    values_schema, readme = schema(values), CHART / "README.md"
    return {
        CHART / "values.schema.json": json.dumps(values_schema, indent=2) + "\n",
        readme: filled(readme, {"values": table(("value", "default", "meaning"), rows(values_schema, values))}),
    }


if __name__ == "__main__":
    sys.exit(generate(files(), "gpustream.chart", sys.argv[1:]))
