"""What the Helm chart knows of the commands: ``python -m gpustream.chart [--check]``.

In:       the chart's values.yaml; every command's options, as click knows them; the topics; the ACLs.
Out:      ``values.schema.json``, which refuses a value or an option that there is not; the table of values in the
          chart's README; ``files/kafka.json``, the topics and ACLs that the chart makes Strimzi's objects of; the same
          objects for kustomize, ``k8s/components/strimzi``.
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

K8S = Path(__file__).parent.parent / "k8s"
CHART = K8S / "helm" / "gpustream"
STRIMZI = K8S / "components" / "strimzi"

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


def of_kubernetes(words: str) -> dict[str, Any]:
    """An object of Kubernetes that has these fields, whatever is in them, and nothing else."""
    return closed(**{word: {} for word in words.split()})


def several(item: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """A list of such objects."""
    return {"type": "array", "items": {**item, "required": list(required)}}


OF_EVERY_POD: dict[str, dict[str, Any]] = {
    "resources": said(closed(requests=TEXTS, limits=TEXTS, claims=ANY_LIST), "Requests and limits of the container."),
    "nodeSelector": said(TEXTS, "The labels of the nodes that the pods run on."),
    "tolerations": said(
        several(of_kubernetes("key operator value effect tolerationSeconds")), "The taints that the pods tolerate."
    ),
    "affinity": said(of_kubernetes("nodeAffinity podAffinity podAntiAffinity"), "The pods' affinity."),
    "priorityClassName": said(TEXT, "The pods' priority class."),
    "runtimeClassName": said(TEXT, "The pods' RuntimeClass, for example nvidia for the node producer."),
    "podLabels": said(TEXTS, "More labels of the pods."),
    "podAnnotations": said(TEXTS, "Annotations of the pods."),
    "serviceAccountName": said(
        TEXT, "An account of yours, for example with a role of a cloud; the cluster producer has its own."
    ),
    "podSecurityContext": said(
        of_kubernetes(
            "runAsNonRoot runAsUser runAsGroup fsGroup fsGroupChangePolicy supplementalGroups supplementalGroupsPolicy "
            "seccompProfile appArmorProfile seLinuxOptions seLinuxChangePolicy sysctls"
        ),
        "The pods' security context.",
    ),
    "securityContext": said(
        of_kubernetes(
            "allowPrivilegeEscalation readOnlyRootFilesystem capabilities privileged procMount runAsNonRoot runAsUser "
            "runAsGroup seccompProfile appArmorProfile seLinuxOptions"
        ),
        "The container's security context.",
    ),
    "resourceClaims": said(
        several(ANY_OBJECT, "name"), "Claims of the pods, if GPUs come by dynamic resource allocation."
    ),
    "terminationGracePeriodSeconds": said(COUNT, "A process takes at most 10 s to stop."),
    "extraArgs": said({"type": "array", "items": TEXT}, "More arguments of the command."),
    "extraEnv": said(
        several(of_kubernetes("name value valueFrom"), "name"), "More environment variables, as the container has them."
    ),
    "extraEnvFrom": said(
        several(of_kubernetes("configMapRef secretRef prefix")),
        "ConfigMaps and Secrets that are environment variables.",
    ),
    "extraVolumes": said(several(ANY_OBJECT, "name"), "More volumes of the pods."),
    "extraVolumeMounts": said(
        several(
            of_kubernetes("name mountPath readOnly subPath subPathExpr mountPropagation recursiveReadOnly"),
            "name",
            "mountPath",
        ),
        "More mounts of the container.",
    ),
    "secret": said(
        TEXT, "A Secret of yours whose files the pod sees in /etc/gpustream/NAME, for options that name files."
    ),
    "disruptionBudget": said(SWITCH, "A PodDisruptionBudget, if there is more than one replica."),
    "autoscaling": closed(
        enabled=said(
            SWITCH, "Scale streams and remoteWrite, by KEDA or a HorizontalPodAutoscaler; webhook and parquet, by KEDA."
        ),
        minReplicas=said(COUNT, "The fewest pods; 0 only by KEDA: none while there is no lag."),
        maxReplicas=said(COUNT, "The most pods: no more than partitions."),
        targetCPU=said(TEXT, "Of one pod, which has one core; empty: not scaled on CPU."),
        lagThreshold=said(COUNT, "Records that one pod may be behind. KEDA only."),
    ),
}

OF_ONE: dict[str, dict[str, dict[str, Any]]] = {
    "node": {
        "maxUnavailable": said({"type": ["string", "integer"]}, "Nodes that are updated at once."),
        "kubeletDirectory": said(TEXT, "Where the kubelet has its files; /var/lib/k0s/kubelet, for example."),
        "resourceQuota": said(SWITCH, "A ResourceQuota for the pods' priority class, as GKE wants it."),
    },
    "cluster": {
        "policyEvents": said(SWITCH, "Events on pods whose annotations under gpustream.dev/ are wrong."),
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
            issuerRef=said(of_kubernetes("name kind group"), "Who issues it."),
        ),
    },
    "page": {
        "from": said(
            several(of_kubernetes("podSelector namespaceSelector ipBlock")),
            "With networkPolicy.enabled, the peers that may connect; empty: nobody but `kubectl port-forward`.",
        )
    },
    "reclaim": {
        "act": said(SWITCH, "Do what namespaces let be done, with the rights to change workloads; else a dry run."),
        "namespaces": said({"type": "array", "items": TEXT}, "Where it may read, and act; empty: everywhere."),
    },
    "alerts": {"rules": said(TEXT, "The text of a rules file; empty: the rules that come with gpustream.")},
}

GLOBAL: dict[str, dict[str, Any]] = {
    "image": closed(
        repository=said(TEXT, "The image."),
        tag=said(TEXT, "Its tag; empty: the chart's appVersion."),
        digest=said({**TEXT, "pattern": "^(sha256:[0-9a-f]{64})?$"}, "Its digest, which wins over the tag."),
        pullPolicy=said({"enum": ["Always", "IfNotPresent", "Never"]}, "When it is pulled."),
        pullSecrets=said(several(closed(name=TEXT), "name"), "Secrets of its registry, as `- name: NAME`."),
    ),
    "fullnameOverride": said(TEXT, "What the names of all objects begin with; empty: the release's name."),
    "commonLabels": said(TEXTS, "More labels of every object; those of pods are `defaults.podLabels`."),
    "kafkaSecret": said(
        TEXT,
        "A Secret of yours whose files every pod sees in /etc/gpustream/kafka; with `strimzi.users` ca.crt is enough, "
        "and empty is the CA that Strimzi has in the namespace.",
    ),
    "keda": closed(
        enabled=said(SWITCH, "Scale by KEDA on lag and CPU, instead of by a HorizontalPodAutoscaler on CPU."),
        pollingInterval=said(COUNT, "Seconds."),
        authentication=said(
            TEXT, "A TriggerAuthentication of yours, for a Kafka with TLS or SASL; with `strimzi.users` it has a user."
        ),
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
        **{
            "from": said(
                several(of_kubernetes("podSelector namespaceSelector ipBlock")),
                "And only from these peers; empty: from anywhere. The metrics API's port is open: it asks who one is.",
            )
        },
    ),
    "strimzi": closed(
        topics=said(SWITCH, "A KafkaTopic for each topic, instead of the Job."),
        users=said(
            SWITCH,
            "A KafkaUser for each component, with the ACLs that it needs and no more. The component logs in as it: the "
            "user operator must write its Secret into the release's namespace.",
        ),
        cluster=said(TEXT, "The name of the Kafka."),
        namespace=said(TEXT, "Where the Kafka is; empty: the release's namespace."),
        authentication=said(
            {"enum": ["tls", "tls-external", "scram-sha-512"]}, "How the users log in; tls-external: by `kafkaSecret`."
        ),
    ),
    "openshift": said(SWITCH, "The cluster picks the users; the node producer may use its constraints `privileged`."),
    "selinux": said(SWITCH, "The node producer has the type that SELinux lets connect to the kubelet's socket."),
    "extraObjects": said(
        {"type": "array", "items": {"type": ["object", "string"]}},
        "More objects, or texts of objects; they may have templates in them.",
    ),
}


def options_of(command: click.Command) -> dict[str, Any]:
    """The options of a command as properties, by their names without dashes."""
    found = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar:
            takes_several = option.multiple or "[,...]" in option.type.name
            kind: dict[str, Any] = {"type": ["string", "number", "boolean", *(["array"] if takes_several else [])]}
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
    every: dict[str, Any] = {}
    for some in options.values():
        every |= {
            option: value for option, value in some.items() if "array" not in every.get(option, {}).get("type", [])
        }
    of_a_pod = {name: {"$ref": f"#/definitions/{name}"} for name in OF_EVERY_POD}
    components = {
        name: {
            **closed(
                enabled=said(SWITCH, f"Whether `gpustream {words}` runs."),
                **({} if name in {"topics", "node"} else {"replicas": said(COUNT, "How many pods.")}),
                options=said(closed(**options[name]), f"Options of `gpustream {words}`, without the dashes."),
                **of_a_pod,
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
            defaults=said(closed(**of_a_pod), "What every pod has, unless its component says otherwise."),
            **components,
            **{"global": said(ANY_OBJECT, "Helm's own, for a chart that this one is a part of.")},
        ),
        "definitions": OF_EVERY_POD,
    }


def rows(schema: Mapping[str, Any], values: Any, path: str = "") -> Iterator[str]:
    """The table of values: each with its default and what it is for."""
    for name, property_of in schema["properties"].items():
        here, default = f"{path}{name}", values.get(name) if isinstance(values, dict) else None
        value = OF_EVERY_POD[name] if "$ref" in property_of else property_of
        if name == "options" or "properties" not in value or (path and "description" in value):
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


def kafka_topics(of_kafka: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A KafkaTopic for each topic, with as many partitions and replicas as the chart has."""
    made_with = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["topics"]["options"]
    size = {"partitions": made_with["partitions"], "replicas": made_with["replication-factor"]}
    return [
        strimzi_object(
            "KafkaTopic",
            f"gpustream-{topic['name'].replace('.', '-')}",
            "topics",
            {"topicName": topic["name"], **size, "config": topic["config"]},
        )
        for topic in of_kafka["topics"]
    ]


def users_of_components() -> dict[str, str]:
    """The workload of each command, except of the one that makes topics: its name in k8s/, which is also its user's."""
    names = {re.sub("([A-Z])", r"-\1", name).lower(): words for name, words in COMPONENTS.items()}
    return {name: words for name, words in names.items() if name != "topics"}


def kafka_users(of_kafka: Mapping[str, Any]) -> list[dict[str, Any]]:
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
                            "resource": {"type": acl["type"], "name": acl["name"], "patternType": "literal"},
                            "operations": acl["operations"],
                        }
                        for acl in of_kafka["acls"][words]
                    ],
                },
            },
        )
        for name, words in users_of_components().items()
    ]


USERS = "  # written by `python -m gpustream.chart`: the user of each component\n"
"""What stands after it in the kustomization is written; what stands before it is kept."""

OF_ONE_USER = """\
  - target:
      kind: DaemonSet|Deployment|StatefulSet
      name: {name}
      labelSelector: app.kubernetes.io/name=gpustream
    patch: |
      - op: replace
        path: /spec/template/spec/volumes/0/projected/sources/0/secret/name
        value: gpustream-{name}
"""


def as_documents(things: list[dict[str, Any]], what: str) -> str:
    """A file of YAML documents, with a line on what they are."""
    return f"# {what}: written by `python -m gpustream.chart`.\n" + yaml.safe_dump_all(
        things, sort_keys=False, width=120
    )


def files() -> dict[Path, str]:
    """The files as they should be."""
    made, of_kafka = schema(), kafka()
    head, mark, _ = (STRIMZI / "kustomization.yaml").read_text(encoding="utf-8").partition(USERS)
    mounts = head + mark + "".join(OF_ONE_USER.format(name=name) for name in users_of_components())
    return {
        CHART / "values.schema.json": json.dumps(made, indent=2) + "\n",
        CHART / "README.md": readme(made),
        CHART / "files" / "kafka.json": json.dumps(of_kafka, indent=2) + "\n",
        STRIMZI / "topics.yaml": as_documents(kafka_topics(of_kafka), "The topics"),
        STRIMZI / "users.yaml": as_documents(kafka_users(of_kafka), "A user for each component"),
        STRIMZI / "kustomization.yaml": mounts,
    }


if __name__ == "__main__":
    sys.exit(generate(files(), "gpustream.chart", sys.argv[1:]))
