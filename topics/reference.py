"""What is written from the tables of topics and metrics: ``python -m topics.reference [--check]``.

Out: the pages ``topics.md`` and ``metrics.md`` of ``docs/reference``, and the JSON Schema of each record in
``topics/schemas``, for readers that are not ours. In a schema no object is closed, because readers let unknown fields
pass; what need not be there may be null, because null is absent.

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
from topics.topic import FIRST_VERSION, PARTITIONS, REPLICATION_FACTOR, SCHEMA, Topic, load_topics

DOCS = Path(__file__).parent.parent / "docs" / "reference"
SCHEMAS = Path(__file__).parent / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
MARK = "<!-- Written by `python -m topics.reference`: change the tables in `topics/`, not this file. -->"

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

_PROFILES: Mapping[str, str] = {
    "otel": "The default: OpenTelemetry's names for GPUs, with underscores for dots and without unit suffixes.",
    "otel-suffixed": "The names of `otel` with their unit at the end, as Prometheus makes them of metrics that come by "
    "OTLP: the form of l9gpu's dashboards and alerts.",
    "dcgm": "The names, units and labels of dcgm-exporter up to 4.8, of the fields that NVML has. The power limit is "
    "the one in force, under both of its names.",
    "dcgm-4.9": "The names and labels of dcgm-exporter from 4.9 on, with its units, which are base units.",
    "dcgm-legacy": "The names and units of dcgm-exporter 1.x.",
}

_CHANGES = f"""\
## What may change

Within `schema: {SCHEMA}` a later version may add fields to any object, keys to `metrics`, `info`, `xids` and labels,
and words to a field that has one of a few. No required field goes, none changes its type, unit or meaning, and no
topic's key changes. A reader takes what it does not know as not known, and the rest of the record as ever:

| a word that is not known in | is taken as |
|---|---|
| `state` of a device | its values count as any others; it is judged neither lost nor well |
| `attribution` | the holders count, and are not taken for exact |
| `kind` of an event, `conflict`, `service`, `phase`, `resolved_because` | something else than what is known |
| `severity` of an alert | a severity of its own, below those that are known |
| `category` of usage, `policy` | something else than what is known |
| `state` of an alert | the alert is open: only `resolved` ends one |

Any other change gets another `schema`, whose records readers of this version write to gpu.dead-letters.

Two versions run side by side while one takes the other's place. Upgrade readers before writers: sinks, then
`stream alerts`, then `stream attribution`, then producers; to go back, the other way round. A stream writes the fields
that it knows: what a later producer adds is in gpu.attributed as soon as attribution is of that version, too. The same
holds for gpu.alert-state, where an older version that takes over keeps what it knows."""


def topics_markdown() -> str:
    """The reference of the topics."""
    topics = list(load_topics().values())
    rows = [
        (
            f"[`{topic.name}`](#{topic.name.replace('.', '')})",
            topic.key,
            topic.cleanup,
            "the last of each key" if topic.retention_hours is None else f"{topic.retention_hours} h",
        )
        for topic in topics
    ]
    known: set[str] = set()
    sections = [_topic(topic, known) for topic in topics]
    parts = [
        "# Topics",
        MARK,
        f"A record is one JSON object in UTF-8 and carries `schema: {SCHEMA}`; under one version no field changes its "
        "unit or its meaning. Absent and null mean the same: not known. Readers ignore fields that they do not know.",
        _table(("topic", "key", "cleanup", "kept for"), rows),
        _CHANGES,
        f"`gpustream topics create` makes them, with {PARTITIONS} partitions and a replication factor of "
        f"{REPLICATION_FACTOR} unless they are given. Topics that keep a node in one partition (all but gpu.alerts, "
        "gpu.actions and gpu.dead-letters) need one number of partitions, so that one worker sees all of a node, and "
        "none can be given another number later: a node's records would then be in two partitions. Run again, it sets "
        "what has come to differ; a longer retention and larger messages may stay. Such a topic that something else "
        "made with another number of partitions is deleted and created again with `--recreate-empty`, if it holds no "
        "record.",
        "Nothing else makes topics, also where the broker has `auto.create.topics.enable`. A component whose topics "
        "are missing, or not as they must be, waits, neither reads nor writes them, says why in its log and at "
        "`/readyz`, and goes on by itself when that is mended; producers keep their ticks meanwhile, as in an outage. "
        "A consumer of your own that starts first may make a topic where the broker allows that: "
        "`allow.auto.create.topics=false`, where its client has it, prevents it.",
        "A topic may be deleted and created again while all of it runs, one alone too: what it held is gone, and its "
        "new log is read from its beginning. Where that was gpu.allocations or gpu.workloads, a worker that starts "
        "before they have been sent again, which takes 5 minutes at most, knows no holders, or no workloads.",
        "## How to read the tables of fields",
        "Each record has a table, and so has each kind of object in it, with the first topic that has such objects. A "
        "field that is `required` is always there. If another one is absent, it has its default; if that is empty, "
        "there is nothing, or it is not known. `since` is the version of gpustream that first wrote the field; all of "
        f"them are of `schema: {SCHEMA}`. The JSON Schemas say the same, with the unit as `x-unit`.",
        *sections,
    ]
    return "\n\n".join(parts) + "\n"


def metrics_markdown() -> str:
    """The reference of the metrics and of their names in each profile."""
    rows = [
        (f"`{metric.key}`", _unit(metric.unit), metric.kind, metric.help, _code(metric.nvml))
        for metric in CATALOGUE.values()
    ]
    parts = [
        "# Metrics",
        MARK,
        "What a device's `metrics` may hold, in base units. A value that is not known is absent; zero is zero.",
        _table(("key", "unit", "kind", "meaning", "NVML"), rows),
        "## Names",
        "`--names` picks what sinks call them, one or several: `--names otel,dcgm` writes every device in both, and "
        "what two of them call alike, with the same labels, once. A key without a name in a profile is not emitted in "
        "it. Each series says its type and its unit: in the help and the type of a scrape, in the metadata of remote "
        "write 2.0.",
        *(_profile(profile) for profile in PROFILES.values()),
        *_adding_up(),
        "### With all names",
        "What a device has beside its metrics, called the same in every profile. These series carry the device's own "
        "labels, never those of who holds it; the `gpu_pod_` ones, one for each device and pod, carry the pod's as "
        "well, but no container's. A pod's part and a device's rest are there where the device is split between the "
        "pods that share it, and of what is known of it. `gpu_info` has its labels with every label set, "
        "`pod-devices` too.",
        _table(("series", "unit", "kind", "meaning"), map(_info, FURTHER)),
        "### Of alerts",
        "From gpu.alerts, with the alert's own labels, whatever the profile. 1 at its start and again every minute; it "
        "ends with a staleness marker when the alert does.",
        _table(("series", "unit", "kind", "meaning"), [_info(ALERT_FIRING)]),
        "### Of usage",
        "From gpu.usage, once an hour for each device and holder: one sample at the end of the hour, when it is final. "
        "They carry the labels that the device's series have with this holder, and those that are named here. The time "
        "is the device's: an hour of a MIG device is an hour.",
        _table(("series", "unit", "kind", "meaning"), map(_info, USAGE.values())),
    ]
    return "\n\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """The files as they should be."""
    schemas = {
        SCHEMAS / f"{topic.name}.json": _indented(json_schema(topic)) + "\n"
        for topic in load_topics().values()
        if topic.record is not None
    }
    return {DOCS / "topics.md": topics_markdown(), DOCS / "metrics.md": metrics_markdown()} | schemas


def json_schema(topic: Topic) -> dict[str, Any]:
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


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Those of the files that are missing or whose text is another one."""
    return [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def generate(files: Mapping[Path, str], module: str, arguments: Sequence[str]) -> int:
    """Write the files, or with ``--check`` only name those that are stale and return 1; 2 for wrong arguments."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write(f"usage: python -m {module} [--check]\n")
        return 2
    found = stale(files)
    if not arguments:
        for path in found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        return 0
    for path in found:
        sys.stderr.write(f"{path.name} is stale: run python -m {module}\n")
    return 1 if found else 0


def _portable(node: Any) -> Any:
    """The same schema as a reader in any language may take it."""
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
                said = {"description", "x-unit", "x-since", "default"} & field.keys()
                outside = {key: field.pop(key) for key in sorted(said)}
                node["properties"][name] = {"anyOf": [field, null], **outside}
    return node


def _topic(topic: Topic, known: set[str]) -> str:
    """The section of a topic. ``known`` are the kinds of objects that a section before it describes."""
    settings = _table(("setting", "value"), [(f"`{name}`", f"`{value}`") for name, value in topic.settings().items()])
    parts = [f"## {topic.name}", topic.promise, settings]
    if topic.record is not None:
        parts += [
            f"JSON Schema: [`topics/schemas/{topic.name}.json`](../../topics/schemas/{topic.name}.json).",
            f"The record is {_link(topic.record.__name__)}.",
            "```json\n" + _indented(topic.example) + "\n```",
        ]
    if topic.name == "gpu.alerts":
        parts += _cloud_event(msgspec.convert(topic.example, Alert))
    if topic.name == "gpu.attributed":
        parts.append("Read it with Python, Faust, kcat and jq, or ClickHouse: [examples](../consumers/README.md).")
    if topic.record is not None:
        parts += _records(topic, known)
    if topic.name == dead_letters.TOPIC.name:
        rows = [(f"`{name}`", unit or "", meaning) for name, (meaning, unit) in dead_letters.HEADERS.items()]
        parts.append(_table(("header", "unit", "meaning"), rows))
    return "\n\n".join(parts)


def _records(topic: Topic, known: set[str]) -> Iterator[str]:
    """The tables of the topic's record and of the objects in it, each unless a topic before has it."""
    schema = json_schema(topic)
    outermost = schema["$ref"].rpartition("/")[2]
    for name, kind in sorted(schema["$defs"].items(), key=lambda one: one[0] != outermost):
        if name in known:
            continue
        known.add(name)
        if kind["type"] == "array":
            fields = {f"at {place}": (item, True) for place, item in enumerate(kind["prefixItems"])}
        else:
            fields = {f"`{key}`": (item, key in kind["required"]) for key, item in kind["properties"].items()}
        rows = [
            (
                key,
                _kind(field),
                "required" if required else _default(field),
                field.get("x-unit", ""),
                re.sub(r"docs/reference/((\w+)\.md)", r"[\2](\1)", field["description"]),
                field.get("x-since", FIRST_VERSION),
            )
            for key, (field, required) in fields.items()
        ]
        yield from (f"### {name}", kind["description"])
        yield _table(("field", "type", "default", "unit", "meaning", "since"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a field in words."""
    match schema:
        case {"$ref": str(ref)}:
            return _link(ref.rpartition("/")[2])
        case {"anyOf": options}:
            return " or ".join(dict.fromkeys(_kind(one) for one in options if one != {"type": "null"}))
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


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return f"`{_json(default)}`" if default or default in (False, 0) else ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _cloud_event(example: Alert) -> Sequence[str]:
    """The headers of an alert's record."""
    rows = [(f"`{one.header}`", f"`{one.of(example)}`", one.meaning) for one in CLOUD_EVENT]
    return (
        "The headers make each record a CloudEvent, in the binary mode of CloudEvents' Kafka protocol binding. They"
        " depend on the record alone, so that a repeat has the same ones. A record without a value is no event and has"
        " none. Readers of gpustream look at no header.",
        _table(("header", "in the example", "meaning"), rows),
    )


def _profile(profile: Profile) -> str:
    rows: list[Sequence[str]] = [
        (
            _name(one.name, one.labels),
            _unit(one.unit),
            one.kind,
            f"`{key}`" + ("" if one.bits is None else f" & {one.bits:#x}"),
        )
        for key, many in profile.series.items()
        for one in many
    ]
    rows += [
        (_name(one.name, one.labels), _unit(one.unit), "gauge", " / ".join(map(_sum, filter(None, one[1:3]))))
        for one in profile.ratios
    ]
    said = (HOLDERS, XIDS, POD_INFO) if profile.labels.tenants else (HOLDERS, XIDS)
    table = _table(("series", "unit", "kind", "from"), [*rows, *map(_info, said)])
    return "\n\n".join((f"### {profile.name}", _PROFILES[profile.name], table))


def _sum(keys: Sequence[str]) -> str:
    text = " + ".join(f"`{key}`" for key in keys)
    return f"({text})" if len(keys) > 1 else text


def _adding_up() -> Sequence[str]:
    """What the series of one name are together, and which of them are in others."""
    rows = [
        (f"`{name}`", f"`{family.label}`", family.total or "means nothing", family.mean or "")
        for name, family in FAMILIES.items()
    ]
    cut = ", ".join(f"`{metric.key}`" for metric in CATALOGUE.values() if metric.mig)
    return (
        "### Adding up",
        "All series of a name have one unit, are of one kind and measure one thing, so that a query that leaves out a "
        "label gets no nonsense. A name has one series for each device, but for these:",
        _table(("series", "by", "their sum", "their mean and maximum"), rows),
        "**MIG.** A GPU that is in MIG mode and its MIG devices both have some values, and the GPU's covers theirs: "
        f'{cut}. Add up one or the other: whole GPUs with `gpu_mig_uuid=""` (`GPU_I_ID=""` with the labels of '
        "`dcgm`), or what can be held, which leaves out the GPUs in MIG mode: `unless on (k8s_cluster_name, gpu_uuid, "
        'gpu_mig_uuid) gpu_info{mig_mode="enabled",gpu_mig_uuid=""}`. What pods hold (`k8s_pod_name!=""`) is never '
        "there twice.",
    )


def _info(info: Info) -> Sequence[str]:
    name = f"{info.name}{{{','.join(info.labels)}}}" if info.labels else info.name
    return f"`{name}`", _unit(info.unit), info.kind, info.help


def _name(name: str, labels: Labels) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"`{name}{{{inside}}}`" if inside else f"`{name}`"


def _unit(unit: str) -> str:
    return _SYMBOLS.get(unit, unit)


def _code(nvml: str) -> str:
    """An NVML source with its first name, the call or field, as code."""
    words = nvml.split(", ")
    call = words[0].split()
    return ", ".join([" ".join([*call[:-1], f"`{call[-1]}`"]), *words[1:]])


def _indented(document: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(generate(files(), "topics.reference", sys.argv[1:]))
