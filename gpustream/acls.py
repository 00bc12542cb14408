"""The ACLs that each command needs in Kafka, and no more: the tables of ``docs/how-to/kafka.md``.

``python -m gpustream.acls [--check]``. In: the registries' rows. Out: the page, with a table and the commands of
``kafka-acls.sh`` below their marks; the rest of the page is as it was.
"""

import dataclasses
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from delivery.settings import DEAD_LETTERS, ComponentSpec
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS
from topics import TOPICS
from topics.reference import generate

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "kafka.md"

_MARKED = re.compile(r"(<!-- acls: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


_OPTIONS = {"Topic": "topic", "Group": "group", "TransactionalId": "transactional-id"}
"""Of ``kafka-acls.sh``."""


class Acl(NamedTuple):
    """One thing that a user may do, in Kafka's words; ``resource`` is Topic, Group or TransactionalId."""

    operation: str
    resource: str
    name: str


def of_component(row: ComponentSpec) -> list[Acl]:
    """What a component needs."""
    needed = {"Read": row.uses.reads, "Write": row.uses.writes, "Describe": row.uses.describes}
    found = [Acl(operation, "Topic", name) for operation, names in needed.items() for name in names]
    defaults = {field.name: field.default for field in dataclasses.fields(resolve_name(row.settings))}
    return found + ([Acl("Read", "Group", str(defaults["group"]))] if "group" in defaults else [])


def _every_topic(*operations: str) -> list[Acl]:
    return [Acl(operation, "Topic", name) for operation in operations for name in TOPICS]


def of_commands() -> dict[str, list[Acl]]:
    """What each command needs, in the order of the flow. Read, Write and AlterConfigs each imply Describe."""
    words = {"produce": PRODUCERS, "stream": STREAMS, "sink": SINKS}
    components = {f"{word} {name}": of_component(row) for word, rows in words.items() for name, row in rows.items()}
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


def _by_operation(acls: list[Acl]) -> dict[str, list[Acl]]:
    found: dict[str, list[Acl]] = {}
    for acl in acls:
        found.setdefault(acl.operation, []).append(acl)
    return found


def _table() -> str:
    lines = ["| command | operation | topics | consumer groups, or transactional id |", "| --- | --- | --- | --- |"]
    for command, acls in of_commands().items():
        for operation, some in _by_operation(acls).items():
            topics = [f"`{acl.name}`" for acl in some if acl.resource == "Topic"]
            groups = [f"`{acl.name}`" for acl in some if acl.resource != "Topic"]
            every = len(topics) == len(TOPICS)
            shown = "every topic" if every else ", ".join(topics)
            lines.append(f"| `{command}` | {operation} | {shown} | {', '.join(groups)} |")
    return "\n".join(lines)


def _commands() -> str:
    lines = []
    for command, acls in of_commands().items():
        same: dict[tuple[Acl, ...], list[str]] = {}  # operations on the same things are given together
        for operation, some in _by_operation(acls).items():
            same.setdefault(tuple(acl._replace(operation="") for acl in some), []).append(operation)
        for things, operations in same.items():
            user = f"--allow-principal User:gpustream-{command.replace(' ', '-')}"
            lines.append(" ".join([f"$ACLS {user}", *(f"--operation {operation}" for operation in operations)]) + " \\")
            lines += [f'  --{_OPTIONS[thing.resource]} "${{PREFIX}}{thing.name}" \\' for thing in things]
            lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(["```sh", *lines, "```"])


def markdown() -> str:
    """The page as it should be."""
    parts = {"table": _table(), "commands": _commands()}
    return _MARKED.sub(lambda found: found[1] + parts[found[2]] + found[3], PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "gpustream.acls", sys.argv[1:]))
