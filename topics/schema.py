"""The JSON Schema of each record, for readers that are not ours: ``python -m topics.schema [--check]``.

Out: one file a topic under ``topics/schemas``, written from the record types. No object is closed, for readers let
unknown fields pass; what need not be there may be null, for null is absent.

Source: JSON Schema draft 2020-12; its patterns are ECMA 262's, which has no ``\\A`` and ``\\Z``.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from topics import generated, registry
from topics.topic import SCHEMA, Topic

FOLDER = Path(__file__).parent / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema(topic: Topic) -> dict[str, Any]:
    """The schema of a topic's records.

    :raises ValueError: its values are not JSON of ours.
    """
    if topic.record is None:
        raise ValueError(f"{topic.name} has no record type")
    body = _portable(msgspec.json.schema(topic.record))
    return {
        "$schema": DRAFT,
        "$id": f"urn:gpustream:{topic.name}:{SCHEMA}",
        "title": topic.name,
        "description": topic.promise,
        **body,
        "examples": [topic.example],
    }


def files() -> dict[Path, str]:
    """The schema files as they should be."""
    topics = [topic for topic in registry.load().values() if topic.record is not None]
    return {FOLDER / f"{topic.name}.json": _text(schema(topic)) for topic in topics}


def _portable(node: Any) -> Any:
    """The same schema as a reader in any language may take it."""
    if isinstance(node, list):
        return [_portable(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _portable(value) for key, value in node.items()}
    for key, old, new in (("pattern", r"\A", "^"), ("pattern", r"\Z", "$"), ("description", "``", "`")):
        if isinstance(node.get(key), str):
            node[key] = node[key].replace(old, new)
    if {"type": "number"} in node.get("anyOf", []):
        node["anyOf"] = [option for option in node["anyOf"] if option.get("type") != "integer"]
    if isinstance(node.get("properties"), dict):
        required = node.get("required", [])
        node["properties"] = {
            name: field if name in required else _nullable(field) for name, field in node["properties"].items()
        }
    return node


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    null = {"type": "null"}
    if null in field.get("anyOf", []):
        return field
    default = {"default": field["default"]} if "default" in field else {}
    return {"anyOf": [{key: value for key, value in field.items() if key != "default"}, null], **default}


def _text(document: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


if __name__ == "__main__":
    sys.exit(generated.main(files(), "topics.schema", sys.argv[1:]))
