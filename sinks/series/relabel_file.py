"""Reads relabelling files: Prometheus' ``metric_relabel_configs`` as YAML, and presets of them. Pure.

In: the text of a file. Out: its rules, or every error with its line and its rule.
Source: Prometheus' configuration reference, and the validation of its package ``model/relabel``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

import re2
import yaml

from delivery import files
from delivery.files import TooLarge, YamlLoader
from sinks.series.labels import META
from sinks.series.relabel import Action, Expression, Rule, Rules, Scheme, Template, is_label_name, lowercase
from sinks.series.relabel_presets import PRESET, PRESETS

_DEFAULTS = {
    "separator": ";",
    "regex": "(.*)",
    "modulus": "0",
    "target_label": "",
    "replacement": "$1",
    "action": "replace",
}
_FIELDS = ("source_labels", *_DEFAULTS)
_WITH_TARGET = {"replace", "hashmod", "lowercase", "uppercase", "keepequal", "dropequal"}
_ONLY = {
    "keepequal": ("source_labels", "target_label"),
    "dropequal": ("source_labels", "target_label"),
    "labeldrop": ("regex",),
    "labelkeep": ("regex",),
}
"""The fields of an action that takes no others."""

_SECTIONS = ("metric_relabel_configs", "write_relabel_configs")
_SCHEME = "metric_name_validation_scheme"

_LEGACY_TEMPLATE = re2.compile(r"^(?:(?:[a-zA-Z_]|\$(?:\{\w+\}|\w+))+\w*)+$")
_INTEGER = re.compile(r"\+?(?:0x[0-9a-fA-F]+|0b[01]+|0o[0-7]+|0|[1-9][0-9]*)")
_OCTAL = re.compile(r"\+?0[0-7]+")
_FLOAT = re.compile(r"\+?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_MOST = 2**64 - 1
_MOST_DIGITS = 400


class BadRules(ValueError):
    """The file can't be used. ``errors`` has a sentence for each error, with its place."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors


def read(source: str) -> Rules:
    """The rules of a preset (``preset:NAME``) or of a file. Raises BadRules with every error."""
    if source.startswith(PRESET):
        texts = {preset.name: preset.rules for preset in PRESETS}
        name = source.removeprefix(PRESET)
        if name not in texts:
            raise BadRules([f"there is no preset {name!r}; there are {', '.join(texts)}"])
        return load(texts[name], source)
    try:
        text = files.read(Path(source)).decode()
    except TooLarge as error:
        raise BadRules([f"{source}: {error}"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadRules([f"{source}: {getattr(error, 'strerror', None) or 'not UTF-8'}"]) from error
    return load(text, source)


def load(text: str, file: str) -> Rules:
    """The rules of a file: a list of them, or a mapping that has them as Prometheus's configuration does.

    Raises BadRules with every error.
    """
    try:
        loader = YamlLoader(text)
        document = loader.get_single_node()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{file}:{mark.line + 1}" if mark is not None else file
        deep = "nested too deeply" if isinstance(error, RecursionError) else None
        problem = deep or getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadRules([f"{line}: not YAML: {problem}"]) from error
    errors: list[str] = []
    section, scheme = _section(document, file, errors)
    rules = []
    for number, node in enumerate(section.value if section is not None else (), 1):
        rule_at = f"{file}:{node.start_mark.line + 1}: rule {number}"
        if not isinstance(node, yaml.MappingNode):
            errors.append(f"{rule_at}: a rule has fields, such as source_labels and action; this has none")
            continue
        rule_errors: list[str] = []
        fields = _fields(node, loader, f"{file}:{{line}}: rule {number}", rule_errors)
        if not rule_errors and (rule := _rule(fields, scheme, rule_errors)) is not None:
            rules.append(rule)
        errors += [error if error.startswith(f"{file}:") else f"{rule_at}: {error}" for error in rule_errors]
    if errors:
        raise BadRules(errors)
    return Rules(tuple(rules), scheme, META in text)


def _section(document: yaml.Node | None, file: str, errors: list[str]) -> tuple[yaml.SequenceNode | None, Scheme]:
    """The list of rules in a document, and which names are valid."""
    scheme: Scheme = "utf8"
    section = document
    if isinstance(document, yaml.MappingNode):
        fields = {str(key.value): value for key, value in document.value}
        unknown = [
            key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
            for key, _ in document.value
            if not isinstance(key, yaml.ScalarNode) or key.value not in (*_SECTIONS, _SCHEME)
        ]
        if unknown:
            errors.append(f"{file}: only {', '.join(_SECTIONS)} and {_SCHEME} belong here, not {', '.join(unknown)}")
        if _SCHEME in fields and (value := fields[_SCHEME].value) not in get_args(Scheme):
            line = fields[_SCHEME].start_mark.line + 1
            errors.append(f"{file}:{line}: {_SCHEME} is utf8 or legacy, not {value!r}")
        elif _SCHEME in fields:
            scheme = fields[_SCHEME].value
        sections = [fields[name] for name in _SECTIONS if name in fields]
        section = sections[0] if len(sections) == 1 else None
        if len(sections) != 1 and not unknown:
            errors.append(f"{file}: it has to have one of {' and '.join(_SECTIONS)}")
            return None, scheme
    if isinstance(section, yaml.SequenceNode):
        return section, scheme
    if not errors:
        errors.append(f"{file}: a list of rules is expected, as under metric_relabel_configs")
    return None, scheme


def _fields(node: yaml.MappingNode, loader: yaml.SafeLoader, at: str, errors: list[str]) -> dict[str, yaml.Node]:
    """The fields of a rule by name."""
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    errors += [
        f"{at.format(line=key.start_mark.line + 1)}: {key.value} is given twice"
        for key, _ in node.value
        if isinstance(key, yaml.ScalarNode) and key.value in _FIELDS and keys.count(key.value) > 1
    ]
    try:
        loader.flatten_mapping(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else node.start_mark.line
        errors.append(f"{at.format(line=line + 1)}: {error.problem}")
    for key, value in node.value:
        line = at.format(line=key.start_mark.line + 1)
        if not isinstance(key, yaml.ScalarNode) or key.value not in _FIELDS:
            name = repr(key.value) if isinstance(key, yaml.ScalarNode) else "whose name is no text"
            errors.append(f"{line}: there is no field {name}; there are {', '.join(_FIELDS)}")
        elif isinstance(value, yaml.ScalarNode) == (key.value == "source_labels") and not _is_null(value):
            errors.append(f"{line}: {key.value} is {'a list' if key.value == 'source_labels' else 'a text'}")
    return {key.value: value for key, value in node.value} if not errors else {}


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _rule(fields: Mapping[str, yaml.Node], scheme: Scheme, errors: list[str]) -> Rule | None:
    """The rule of these fields, or None; then ``errors`` has got the reasons."""
    sources = fields.get("source_labels")
    names = sources.value if isinstance(sources, yaml.SequenceNode) else []
    if [node for node in names if not isinstance(node, yaml.ScalarNode) or not (node.value or _is_null(node))]:
        errors.append("source_labels is a list of names")
    texts = {
        name: "" if _is_null(node) else str(node.value) for name, node in fields.items() if name != "source_labels"
    }
    modulus = _modulus(fields.get("modulus"))
    if modulus is None:
        errors.append(f"modulus is a whole number from 0 to {_MOST}, not {texts['modulus']!r}")
    elif "modulus" in texts:
        texts["modulus"] = str(modulus)
    regex, expression = None, texts.get("regex", _DEFAULTS["regex"])
    try:
        regex = Expression(expression)
    except ValueError as error:
        errors.append(f"regex '{expression}' is not an expression of RE2: {error}")
    changed = [name for name, text in texts.items() if text != _DEFAULTS[name] or name == "regex"]
    all_texts = _DEFAULTS | texts
    action = lowercase(all_texts["action"])
    errors += _inconsistencies(
        action, all_texts, scheme, [*changed, *(["source_labels"] if sources and not _is_null(sources) else [])]
    )
    if errors or modulus is None or regex is None:
        return None
    source_labels = tuple("" if _is_null(node) else node.value for node in names)
    target, replacement = Template(all_texts["target_label"], regex), Template(all_texts["replacement"], regex)
    separator, target_name = all_texts["separator"], all_texts["target_label"]
    rest = (source_labels, separator, regex, modulus, target_name, target, replacement, scheme)
    return Rule(action, *rest)  # type: ignore[arg-type] # _inconsistencies has checked the action


def _modulus(node: yaml.Node | None) -> int | None:
    """A whole number of 64 bits that is not negative, as YAML 1.1 writes it; None if it is anything else."""
    if node is None or _is_null(node):
        return 0
    text = node.value.replace("_", "")
    number: int | None = None
    if getattr(node, "style", None) is not None:
        return None  # in quotes it is a text
    if len(text) > _MOST_DIGITS:
        return None
    if _INTEGER.fullmatch(text):
        number = int(text, 0)
    elif _OCTAL.fullmatch(text):
        number = int(text, 8)
    elif _FLOAT.fullmatch(text):
        number = int(float(text)) if float(text) <= _MOST else None
    return number if number is not None and number <= _MOST else None


def _inconsistencies(action: str, text: Mapping[str, str], scheme: Scheme, changed: Iterable[str]) -> Iterator[str]:
    """What does not fit together in a rule. ``changed``: the fields that differ from their defaults."""
    target, replacement = text["target_label"], text["replacement"]
    if action not in get_args(Action):
        yield f"there is no action {text['action']!r}; there are {', '.join(get_args(Action))}"
    if action == "hashmod" and text["modulus"] == "0":
        yield "hashmod needs a modulus above 0"
    if action in _WITH_TARGET and not target:
        yield f"{action} needs a target_label"
    elif action in _WITH_TARGET and not (
        _is_template(target, scheme) if action == "replace" and "$" in target else is_label_name(target, scheme)
    ):
        yield f"target_label {target!r} is not the name of a label"
    if action == "labelmap" and not _is_template(replacement, scheme):
        yield f"replacement {replacement!r} is not the name of a label"
    if action in {"lowercase", "uppercase"} and "replacement" in changed:
        yield f"{action} takes no replacement"
    unexpected = [name for name in _FIELDS if name in changed and name not in ("action", *_ONLY.get(action, _FIELDS))]
    if unexpected:
        yield f"{action} takes only {' and '.join(_ONLY[action])}, not {', '.join(unexpected)}"


def _is_template(text: str, scheme: Scheme) -> bool:
    """Whether a text may become the name of a label once groups are filled in."""
    return bool(text) if scheme == "utf8" else _LEGACY_TEMPLATE.search(text) is not None
