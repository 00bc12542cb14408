"""Policies of admission as many clusters have them by Gatekeeper and Kyverno, for a real API server.

They warn, instead of refusing, because a refusal names the first of them only. They look at the objects and pods of one
release: the API server is other tests', too.
"""

from typing import Any

from tests.k8s.manifests import Manifest

RELEASE = "policed"
OF_THE_RELEASE = f"object.metadata.?labels['app.kubernetes.io/instance'].orValue('') == '{RELEASE}'"

POD = "object.spec"
EACH = f"{POD}.containers.all(c, {{}})"
AMOUNTS = ("cpu", "memory", "ephemeral-storage")
ASKING = "['-cluster', '-reclaim', '-metrics-api']"

OF_PODS = {
    "an image of our registry, by digest": EACH.format(
        "c.image.matches('^registry[.]example[.]com/.+@sha256:[0-9a-f]{64}$')"
    ),
    "labels": "['team', 'cost-center'].all(l, l in object.metadata.labels)",
    "an annotation": "'example.com/contact' in object.metadata.?annotations.orValue({})",
    "requests and limits": EACH.format(
        " && ".join(
            f"'{name}' in c.?resources.{kind}.orValue({{}})" for kind in ("requests", "limits") for name in AMOUNTS
        )
    ),
    "a read-only root": EACH.format("c.?securityContext.readOnlyRootFilesystem.orValue(false)"),
    "no capability": EACH.format("c.?securityContext.capabilities.drop.orValue([]) == ['ALL']"),
    "no path of the host": f"{POD}.?volumes.orValue([]).all(v, !has(v.hostPath))",
    "a limit of temporary files": f"{POD}.?volumes.orValue([]).all(v, !has(v.emptyDir) || has(v.emptyDir.sizeLimit))",
    "probes": f"{POD}.restartPolicy != 'Always' || {EACH.format('has(c.livenessProbe) && has(c.readinessProbe)')}",
    "a priority class": f"{POD}.?priorityClassName.orValue('') == 'platform'",
    "a spread over zones": f"{POD}.?topologySpreadConstraints.orValue([])"
    ".exists(s, s.topologyKey == 'topology.kubernetes.io/zone')",
    "no token without need": f"{POD}.?automountServiceAccountToken.orValue(true) == false"
    f" || {ASKING}.exists(e, {POD}.?serviceAccountName.orValue('').endsWith(e))",
    "an account of its own": f"!({POD}.?serviceAccountName.orValue('') in ['', 'default'])",
    "a secret of the registry": f"size({POD}.?imagePullSecrets.orValue([])) > 0",
    "nodes with Linux": f"{POD}.?nodeSelector['kubernetes.io/os'].orValue('') == 'linux'",
    "a toleration": f"{POD}.?tolerations.orValue([]).exists(t, t.?key.orValue('') == 'dedicated')",
    "a proxy": EACH.format("c.?env.orValue([]).exists(e, e.name == 'HTTPS_PROXY')"),
    "DNS": f"{POD}.?dnsConfig.hasValue()",
}
"""What a pod has to have, and how the API server looks for it."""

OF_OBJECTS = {
    "labels of the object": "['team', 'cost-center'].all(l, l in object.metadata.?labels.orValue({}))",
    "an annotation of the object": "'example.com/contact' in object.metadata.?annotations.orValue({})",
    "few revisions": "!(object.kind in ['Deployment', 'StatefulSet', 'DaemonSet'])"
    " || object.spec.?revisionHistoryLimit.orValue(10) <= 3",
    "no wildcard in a role": "!(object.kind in ['Role', 'ClusterRole']) || object.rules.all(r,"
    " !('*' in r.verbs) && !('*' in r.?resources.orValue([])) && !('*' in r.?apiGroups.orValue([])))",
    "no service that is open to the outside": "object.kind != 'Service' || object.spec.type == 'ClusterIP'",
}
"""What an object has to have."""


def policies() -> list[Manifest]:
    """The policies and what binds them: to pods, and to all other objects."""
    anything = {"apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*"]}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    return [
        *_policy("pods", OF_PODS, pods, OF_THE_RELEASE),
        *_policy("objects", OF_OBJECTS, anything, f"object.kind != 'Pod' && {OF_THE_RELEASE}"),
    ]


def _policy(name: str, rules: dict[str, str], resources: dict[str, Any], of: str) -> list[Manifest]:
    kind = {"apiVersion": "admissionregistration.k8s.io/v1"}
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**resources, "operations": ["CREATE", "UPDATE"]}]},
        "matchConditions": [{"name": "ours", "expression": of}],
        "validations": [{"expression": rule, "message": message} for message, rule in rules.items()],
    }
    binding = {"policyName": name, "validationActions": ["Warn"]}
    return [
        {**kind, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": policy},
        {**kind, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": binding},
    ]
