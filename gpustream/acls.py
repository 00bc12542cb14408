"""The ACLs that each command needs in Kafka, and no more: the tables of ``docs/how-to/kafka.md``.

``python -m gpustream.acls [--check]``. In: the registries' rows. Out: the page, with a table and the commands of
``kafka-acls.sh`` below their marks; the rest of the page is as it was.
"""

import dataclasses
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from delivery.settings import DEAD_LETTERS, ComponentSpec
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS
from topics import TOPICS
from topics.reference import filled, generate, table

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "kafka.md"

_OPTIONS = {"Topic": "topic", "Group": "group", "TransactionalId": "transactional-id"}
"""The option of ``kafka-acls.sh`` for each kind of resource."""


class Acl(NamedTuple):
    """One ACL in Kafka's words; ``resource`` is Topic, Group or TransactionalId. ``prefixed``: it is for all names that
    begin with ``name``."""

    operation: str
    resource: str
    name: str
    prefixed: bool = False


def of_component(spec: ComponentSpec) -> list[Acl]:
    topics_by_operation = {"Read": spec.uses.reads, "Write": spec.uses.writes, "Describe": spec.uses.describes}
    acls = [acl for operation, names in topics_by_operation.items() for acl in _on_topics(operation, *names)]
    defaults = {field.name: field.default for field in dataclasses.fields(resolve_name(spec.settings))}
    if "group" in defaults:
        acls.append(Acl("Read", "Group", str(defaults["group"]), prefixed=spec.group_of_each_receiver))
    return acls


def _on_topics(operations: str, *names: str) -> list[Acl]:
    return [Acl(operation, "Topic", name) for operation in operations.split() for name in names]


def of_components() -> dict[str, list[Acl]]:
    """The ACLs that each component needs, by its subcommand, in the order of the flow."""
    registries = {"produce": PRODUCERS, "stream": STREAMS, "sink": SINKS}
    return {
        f"{group} {name}": of_component(spec) for group, specs in registries.items() for name, spec in specs.items()
    }


def of_commands() -> dict[str, list[Acl]]:
    """The ACLs that each command needs. Read, Write and AlterConfigs each imply Describe."""
    components = of_components()
    groups = [acl for acls in components.values() for acl in acls if acl.resource == "Group"]
    return {
        **components,
        "topics create": _on_topics("Create Describe AlterConfigs", *TOPICS),
        "topics list": _on_topics("Describe DescribeConfigs", *TOPICS),
        "top": _on_topics("Read", "gpu.attributed", "gpu.alerts"),
        "rules test": _on_topics("Read", "gpu.attributed"),
        "alerts": _on_topics("Read", "gpu.alerts"),
        "reclaim list": _on_topics("Read", "gpu.actions"),
        "reclaim undo": _on_topics("Read Write", "gpu.actions"),
        "usage": _on_topics("Read", "gpu.usage", "gpu.usage-minutes"),
        "report": _on_topics("Read", "gpu.usage", "gpu.usage-minutes", "gpu.alerts"),
        "replay": [*_on_topics("Read", "gpu.attributed"), *_on_topics("Read Write", "gpu.usage", "gpu.usage-minutes")],
        "doctor": [
            *_on_topics("Read DescribeConfigs", *TOPICS),
            *(acl._replace(operation="Describe") for acl in groups),
        ],
        "dead-letters list": _on_topics("Read", DEAD_LETTERS),
        "dead-letters show": _on_topics("Read", *TOPICS),
        "dead-letters resubmit": [
            *_on_topics("Read Write", *TOPICS),
            Acl("Write", "TransactionalId", "gpustream-dead-letters"),
        ],
    }


def markdown() -> str:
    """The page as it should be."""
    rows: list[tuple[str, str, str, str]] = []
    shell_lines: list[str] = []
    for command, acls in of_commands().items():
        acls_by_operation: dict[str, list[Acl]] = {}
        for acl in acls:
            acls_by_operation.setdefault(acl.operation, []).append(acl)
        operations_by_acls: dict[tuple[Acl, ...], list[str]] = {}  # operations on the same things are given together
        for operation, granted in acls_by_operation.items():
            topics = [f"`{acl.name}`" for acl in granted if acl.resource == "Topic"]
            groups = [f"`{acl.name}{'*' * acl.prefixed}`" for acl in granted if acl.resource != "Topic"]
            is_every_topic = len(topics) == len(TOPICS)
            topics_cell = "every topic" if is_every_topic else ", ".join(topics)
            rows.append((f"`{command}`", operation, topics_cell, ", ".join(groups)))
            for prefixed in (False, True):  # a command of the shell is for the one or the other
                if resources := tuple(acl._replace(operation="") for acl in granted if acl.prefixed == prefixed):
                    operations_by_acls.setdefault(resources, []).append(operation)
        for resources, operations in operations_by_acls.items():
            options = [f"--allow-principal User:gpustream-{command.replace(' ', '-')}"]
            options += [f"--operation {name}" for name in operations]
            options += ["--resource-pattern-type prefixed"] if resources[0].prefixed else []
            shell_lines.append(" ".join(["$ACLS", *options, "\\"]))
            shell_lines += [f'  --{_OPTIONS[acl.resource]} "${{PREFIX}}{acl.name}" \\' for acl in resources]
            shell_lines[-1] = shell_lines[-1].removesuffix(" \\")
    head = ("command", "operation", "topics", "consumer groups, or transactional id")
    return filled(PAGE, {"table": table(head, rows), "commands": "\n".join(["```sh", *shell_lines, "```"])})


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "gpustream.acls", sys.argv[1:]))
