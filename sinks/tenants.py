"""What tenants write on pods and namespaces, as labels that no tenant can break a series with. Pure.

In: the labels of a pod and of its namespace. Out: (name, value) pairs, each name once, no value empty.
"""

import re
from collections.abc import Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
Pairs = Iterable[tuple[str, str | int | None]]

MAX_VALUE_BYTES = 1024
"""Longer values are cut, at a character: receivers commonly refuse a series for a value beyond 2 KiB."""

MAX_NAME = 200
"""Longer names of labels are cut: receivers commonly refuse names beyond 1024."""

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def tenant_labels(pod: Mapping[str, str], namespace: Mapping[str, str]) -> list[tuple[str, str]]:
    """The labels of a pod, then those of its namespace, each in the order of their keys; empty values are left out."""
    return [*_prefixed("k8s_pod_label_", pod), *_prefixed("k8s_namespace_label_", namespace)]


def sanitised(value: str) -> str:
    """A value that any receiver takes: valid UTF-8 (lone surrogates become ``?``), at most 1024 bytes of it.

    Control characters and newlines stay: a label value may hold them.
    """
    if value.isascii() and len(value) <= MAX_VALUE_BYTES:
        return value
    return value.encode("utf-8", "replace")[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


def _prefixed(prefix: str, labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Keys that become one name are told apart as kube-state-metrics does: ``_conflict1``, ``_conflict2``, ..."""
    names: dict[str, list[str]] = {}
    for key in sorted(labels):
        if labels[key]:
            names.setdefault(_NOT_IN_A_NAME.sub("_", prefix + key)[:MAX_NAME], []).append(sanitised(labels[key]))
    found = [(name, value) for name, values in names.items() if len(values) == 1 for value in values]
    clashes = [
        (f"{name}_conflict{n}", value)
        for name, values in names.items()
        if len(values) > 1
        for n, value in enumerate(values, 1)
    ]
    taken = {name for name, _ in found}
    return [*found, *((name, value) for name, value in clashes if name not in taken)]
