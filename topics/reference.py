"""The docs and schemas of topics and metrics, written from their tables: ``python -m topics.reference [--check]``.

Out: the tables in the pages ``topics.md`` and ``metrics.md`` of ``docs/reference``, and the JSON Schema of each record
in ``topics/schemas``, for readers in other languages. The schemas allow unknown fields, as readers must. A field that
may be absent may also be null, because null means absent.

Source: JSON Schema draft 2020-12; its patterns are ECMA 262's, which has no ``\\A`` and ``\\Z``.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from topics import dead_letters
from topics.alerts import CLOUD_EVENT, Alert
from topics.catalogue import ALERT_FIRING, CATALOGUE, FAMILIES, FURTHER, HOLDERS, POD_INFO, USAGE, XIDS
from topics.metric import Info, Labels
from topics.profiles import PROFILES, Profile
from topics.topic import FIRST_VERSION, SCHEMA, Topic, load_topics

DOCS = Path(__file__).parent.parent / "docs" / "reference"
SCHEMAS = Path(__file__).parent / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

_SYMBOLS: Mapping[str, str] = {
    "ratio": "0-1",
    "percent": "0-100",
    "bytes": "bytes",
    "mebibytes": "MiB",
    "bytes_per_second": "bytes/s",
    "kilobytes_per_second": "kB/s",
    "megabytes_per_second": "MB/s",
    "watts": "W",
    "joules": "J",
    "millijoules": "mJ",
    "celsius": "°C",
    "hertz": "Hz",
    "megahertz": "MHz",
    "microseconds": "us",
    "nanoseconds": "ns",
    "bool": "0 or 1",
}

_NVML_NAME = re.compile(r"(\S+)(?=, |$)")  # the call or the field in a metric's source
_WRITTEN = re.compile(r"(<!-- written: ([\w.-]+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def topics_markdown() -> str:
    """The page of the topics, with the tables of their records."""
    topics = list(load_topics().values())
    rows = [
        (
            f"[`{topic.name}`](#{topic.name.replace('.', '')})",
            topic.key,
            topic.cleanup,
            _kept_for(topic.retention_hours),
        )
        for topic in topics
    ]
    described: set[str] = set()
    sections = "\n\n".join([_topic(topic, described) for topic in topics])
    return filled(
        DOCS / "topics.md", {"topics": table(("topic", "key", "cleanup", "kept for"), rows), "sections": sections}
    )


def metrics_markdown() -> str:
    """The page of the metrics, with the table of their keys and of their names in each profile."""
    keys = [
        (f"`{metric.key}`", _unit(metric.unit), metric.kind, metric.help, _NVML_NAME.sub(r"`\1`", metric.nvml, count=1))
        for metric in CATALOGUE.values()
    ]
    families = [
        (f"`{name}`", f"`{family.label}`", family.total or "means nothing", family.mean or "")
        for name, family in FAMILIES.items()
    ]
    infos = {"further": FURTHER, "alerts": (ALERT_FIRING,), "usage": USAGE.values()}
    return filled(
        DOCS / "metrics.md",
        {
            "keys": table(("key", "unit", "kind", "meaning", "NVML"), keys),
            "families": table(("series", "by", "their sum", "their mean and maximum"), families),
            "cut": ", ".join(f"`{metric.key}`" for metric in CATALOGUE.values() if metric.mig) + ".",
            **{name: _profile(profile) for name, profile in PROFILES.items()},
            **{name: table(("series", "unit", "kind", "meaning"), map(_info, rows)) for name, rows in infos.items()},
        },
    )


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """A page with each part between its marks ``<!-- written: NAME -->`` and ``<!-- end -->``; the rest stays.

    Raises ValueError if the marks of the page are not exactly those of the parts.
    """
    text = page.read_text(encoding="utf-8")
    marks = [name for _, name, _ in _WRITTEN.findall(text)]
    if sorted(marks) != sorted(parts):
        raise ValueError(f"{page} has marks for {', '.join(marks)}; it needs them for {', '.join(parts)}")
    return _WRITTEN.sub(lambda match: match[1] + parts[match[2]] + match[3], text)


def series_name(name: str, labels: Labels) -> str:
    """The name of a series with the labels that are part of it, as code."""
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"`{name}{{{inside}}}`" if inside else f"`{name}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def files() -> dict[Path, str]:
    """The text that each generated file must have."""
    schemas = {
        SCHEMAS / f"{topic.name}.json": _indented(json_schema(topic)) + "\n"
        for topic in load_topics().values()
        if topic.record is not None
    }
    return {DOCS / "topics.md": topics_markdown(), DOCS / "metrics.md": metrics_markdown()} | schemas


def json_schema(topic: Topic) -> dict[str, Any]:
    """The schema of the records of a topic that has a record type."""
    body = _portable(msgspec.json.schema(topic.record))
    return {
        "$schema": DRAFT,
        "$id": f"urn:gpustream:{topic.name}:{SCHEMA}",
        "title": topic.name,
        "description": topic.promise,
        **body,
        "examples": [topic.example],
    }


def stale(files: Mapping[Path, str]) -> list[Path]:
    """The files that are missing or have another text."""
    return [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def generate(files: Mapping[Path, str], module: str, arguments: Sequence[str]) -> int:
    """Write the files, or with ``--check`` only list stale ones. Returns the exit code: 1 if stale, 2 for misuse."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write(f"usage: python -m {module} [--check]\n")
        return 2
    stale_files = stale(files)
    if not arguments:
        for path in stale_files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        return 0
    for path in stale_files:
        sys.stderr.write(f"{path} is stale: `make format` writes it\n")
    return 1 if stale_files else 0


def _kept_for(hours: int | None) -> str:
    """How long a topic keeps a record, as people say it."""
    if hours is None:
        return "the last of each key"
    return f"{hours // 24} d" if hours > 48 and hours % 24 == 0 else f"{hours} h"


def _portable(node: Any) -> Any:
    """A schema in the form that readers in any language accept."""
    if isinstance(node, list):
        return [_portable(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _portable(value) for key, value in node.items()}
    for key, old, new in (("pattern", r"\A", "^"), ("pattern", r"\Z", "$"), ("description", "``", "`")):
        if isinstance(node.get(key), str):
            node[key] = inspect.cleandoc(node[key].replace(old, new))
    if {"type": "number"} in node.get("anyOf", []):
        node["anyOf"] = [option for option in node["anyOf"] if option.get("type") != "integer"]
    if isinstance(node.get("properties"), dict):
        null = {"type": "null"}
        for name, field in node["properties"].items():
            if name not in node.get("required", []) and null not in field.get("anyOf", []):
                annotations = {"description", "x-unit", "x-since", "default"} & field.keys()
                outside = {key: field.pop(key) for key in sorted(annotations)}
                node["properties"][name] = {"anyOf": [field, null], **outside}
    return node


def _topic(topic: Topic, described: set[str]) -> str:
    """The section of a topic. ``described`` are the object types that an earlier section has."""
    settings = table(("setting", "value"), [(f"`{name}`", f"`{value}`") for name, value in topic.settings().items()])
    parts = [f"## {topic.name}", topic.promise, settings]
    if topic.record is not None:
        parts += [
            f"JSON Schema: [`topics/schemas/{topic.name}.json`](../../topics/schemas/{topic.name}.json).",
            f"The record is {_link(topic.record.__name__)}.",
            "```json\n" + _indented(topic.example) + "\n```",
        ]
    if topic.name == "gpu.alerts":
        example = msgspec.convert(topic.example, Alert)
        rows = [
            (f"`{attribute.header}`", f"`{attribute.value(example)}`", attribute.meaning) for attribute in CLOUD_EVENT
        ]
        parts += [
            "The headers make each record a CloudEvent, in the binary mode of CloudEvents' Kafka protocol binding."
            " They depend on the record alone, so that a repeat has the same ones. A record without a value is no event"
            " and has none. Readers of gpustream look at no header.",
            table(("header", "in the example", "meaning"), rows),
        ]
    if topic.name == "gpu.attributed":
        parts.append("Read it with Python, Faust, kcat and jq, or ClickHouse: [examples](../consumers/README.md).")
    if topic.record is not None:
        parts += _records(topic, described)
    if topic.name == dead_letters.TOPIC.name:
        rows = [(f"`{name}`", unit or "", meaning) for name, (meaning, unit) in dead_letters.HEADERS.items()]
        parts.append(table(("header", "unit", "meaning"), rows))
    return "\n\n".join(parts)


def _records(topic: Topic, described: set[str]) -> Iterator[str]:
    """The tables of the topic's record and of the objects in it, except those that are in ``described``."""
    schema = json_schema(topic)
    outermost = schema["$ref"].rpartition("/")[2]
    for name, kind in sorted(schema["$defs"].items(), key=lambda definition: definition[0] != outermost):
        if name in described:
            continue
        described.add(name)
        if kind["type"] == "array":
            fields = {f"at {index}": (item, True) for index, item in enumerate(kind["prefixItems"])}
        else:
            fields = {f"`{key}`": (item, key in kind["required"]) for key, item in kind["properties"].items()}
        rows = []
        for key, (field, required) in fields.items():
            default = field.get("default")
            shown = "required" if required else f"`{_json(default)}`" if default or default in (False, 0) else ""
            meaning = re.sub(r"docs/reference/((\w+)\.md)", r"[\2](\1)", field["description"])
            since = field.get("x-since", FIRST_VERSION)
            rows.append((key, _kind(field), shown, field.get("x-unit", ""), meaning, since))
        yield from (f"### {name}", kind["description"])
        yield table(("field", "type", "default", "unit", "meaning", "since"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"$ref": str(ref)}:
            return _link(ref.rpartition("/")[2])
        case {"anyOf": options}:
            return " or ".join(dict.fromkeys(_kind(option) for option in options if option != {"type": "null"}))
        case {"enum": words}:
            return " or ".join(f"`{_json(word)}`" for word in words)
        case {"type": "array", "items": item}:
            return f"array of {_kind(item)}"
        case {"type": "object", "additionalProperties": value}:
            return f"object of {_kind(value)}"
        case {"type": "string", "examples": words}:
            return f"string: {' or '.join(f'`{word}`' for word in words)}"
        case {"type": "string", "format": "date-time"}:
            return "string, RFC 3339"
        case {"type": kind}:
            return str(kind)
    return "any"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _profile(profile: Profile) -> str:
    rows: list[Sequence[str]] = [
        (
            series_name(series.name, series.labels),
            _unit(series.unit),
            series.kind,
            f"`{key}`" + ("" if series.bits is None else f" & {series.bits:#x}"),
        )
        for key, all_series in profile.series.items()
        for series in all_series
    ]
    for ratio in profile.ratios:
        sums = [" + ".join(f"`{key}`" for key in keys) for keys in (ratio.numerators, ratio.denominators) if keys]
        formula = " / ".join(f"({text})" if " + " in text else text for text in sums)
        rows.append((series_name(ratio.name, ratio.labels), _unit(ratio.unit), "gauge", formula))
    infos = (HOLDERS, XIDS, POD_INFO) if profile.labels.tenants else (HOLDERS, XIDS)
    return table(("series", "unit", "kind", "from"), [*rows, *map(_info, infos)])


def _info(info: Info) -> Sequence[str]:
    name = f"{info.name}{{{','.join(info.labels)}}}" if info.labels else info.name
    return f"`{name}`", _unit(info.unit), info.kind, info.help


def _unit(unit: str) -> str:
    return _SYMBOLS.get(unit, unit)


def _indented(document: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


if __name__ == "__main__":
    sys.exit(generate(files(), "topics.reference", sys.argv[1:]))
