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
from topics.reference import filled, generate

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
    """The ACLs that a component needs."""
    topics_by_operation = {"Read": spec.uses.reads, "Write": spec.uses.writes, "Describe": spec.uses.describes}
    acls = [Acl(operation, "Topic", name) for operation, names in topics_by_operation.items() for name in names]
    defaults = {field.name: field.default for field in dataclasses.fields(resolve_name(spec.settings))}
    if "group" in defaults:
        acls.append(Acl("Read", "Group", str(defaults["group"]), prefixed=spec.group_of_each_receiver))
    return acls


def _every_topic(*operations: str) -> list[Acl]:
    return [Acl(operation, "Topic", name) for operation in operations for name in TOPICS]


def of_commands() -> dict[str, list[Acl]]:
    """The ACLs that each command needs, in the order of the flow. Read, Write and AlterConfigs each imply Describe."""
    registries = {"produce": PRODUCERS, "stream": STREAMS, "sink": SINKS}
    components = {
        f"{group} {name}": of_component(spec) for group, specs in registries.items() for name, spec in specs.items()
    }
    return {
        **components,
        "topics create": _every_topic("Create", "Describe", "AlterConfigs"),
        "topics list": _every_topic("Describe", "DescribeConfigs"),
        "top": [Acl("Read", "Topic", name) for name in ("gpu.attributed", "gpu.alerts")],
        "rules test": [Acl("Read", "Topic", "gpu.attributed")],
        "alerts": [Acl("Read", "Topic", "gpu.alerts")],
        "reclaim list": [Acl("Read", "Topic", "gpu.actions")],
        "reclaim undo": [Acl("Read", "Topic", "gpu.actions"), Acl("Write", "Topic", "gpu.actions")],
        "usage": [Acl("Read", "Topic", name) for name in ("gpu.usage", "gpu.usage-minutes")],
        "report": [Acl("Read", "Topic", name) for name in ("gpu.usage", "gpu.usage-minutes", "gpu.alerts")],
        "replay": [
            Acl("Read", "Topic", "gpu.attributed"),
            *(
                Acl(operation, "Topic", name)
                for operation in ("Read", "Write")
                for name in ("gpu.usage", "gpu.usage-minutes")
            ),
        ],
        "doctor": [
            *_every_topic("Read", "DescribeConfigs"),
            *(
                acl._replace(operation="Describe")
                for acls in components.values()
                for acl in acls
                if acl.resource == "Group"
            ),
        ],
        "dead-letters list": [Acl("Read", "Topic", DEAD_LETTERS)],
        "dead-letters show": _every_topic("Read"),
        "dead-letters resubmit": [
            *_every_topic("Read", "Write"),
            Acl("Write", "TransactionalId", "gpustream-dead-letters"),
        ],
    }


def markdown() -> str:
    """The page as it should be."""
    table = ["| command | operation | topics | consumer groups, or transactional id |", "| --- | --- | --- | --- |"]
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
            table.append(f"| `{command}` | {operation} | {topics_cell} | {', '.join(groups)} |")
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
    return filled(PAGE, {"table": "\n".join(table), "commands": "\n".join(["```sh", *shell_lines, "```"])})


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "gpustream.acls", sys.argv[1:]))
