"""Other labels for series: Prometheus's own ``metric_relabel_configs``, and presets of them. Pure.

In: a file of rules; the labels of a series, ``__name__`` among them. Out: the rules, or every mistake with its line and
its rule; other labels, or none if a rule drops the series.
Source: Prometheus's configuration reference, and what its package ``model/relabel`` makes of any rules and labels:
expressions are RE2 and match the whole text; ``$1``, ``${1}`` and ``${name}`` expand as in Go; an empty value removes a
label; ``labelmap`` sees the labels by name, then those that rules before it have set, and the last of equal names wins.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import md5
from typing import Literal, NamedTuple, get_args

import re2
import yaml

METRIC_NAME = "__name__"

Action = Literal[
    "replace",
    "keep",
    "drop",
    "hashmod",
    "labelmap",
    "labeldrop",
    "labelkeep",
    "lowercase",
    "uppercase",
    "keepequal",
    "dropequal",
]
Scheme = Literal["utf8", "legacy"]
"""Which names are valid: any text, or those of Prometheus 2."""

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

_LEGACY_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LEGACY_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LEGACY_TEMPLATE = re2.compile(r"^(?:(?:[a-zA-Z_]|\$(?:\{\w+\}|\w+))+\w*)+$")
_ANY_BYTE = re.compile(r"(?<!\\)(?:\\\\)*\\C")
"""What RE2 takes in C++ and not in Go."""

_INTEGER = re.compile(r"\+?(?:0x[0-9a-fA-F]+|0b[01]+|0o[0-7]+|0|[1-9][0-9]*)")
_OCTAL = re.compile(r"\+?0[0-7]+")
_FLOAT = re.compile(r"\+?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_MOST = 2**64 - 1

_EXPRESSION_BYTES = 256 << 20
_REMEMBERED = 65536


class BadRules(ValueError):
    """The file can't be used; ``mistakes`` says where and why, a sentence each."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


Groups = tuple[str, ...]
"""What an expression matched, and each of its groups; empty if a group took no part."""


class Expression:
    """An expression of RE2 that is bound to the whole text. Raises ValueError if it is none."""

    def __init__(self, text: str) -> None:
        options = re2.Options()
        options.max_mem, options.log_errors = _EXPRESSION_BYTES, False
        if _ANY_BYTE.search(text):
            raise ValueError("\\C is none of it")
        try:
            self._compiled = re2.compile(f"^(?s:{text})$", options)
        except re2.error as error:
            raise ValueError(error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)) from error
        self.groups, self.names = self._compiled.groups, dict(self._compiled.groupindex)
        if unlike := [name for name in self.names if not (name.isascii() and re.fullmatch(r"\w+", name))]:
            raise ValueError(f"the name of a group is a word, not {unlike[0]!r}")
        self.match = lru_cache(_REMEMBERED)(self._match)

    def _match(self, text: str) -> Groups | None:
        found = self._compiled.search(text)
        return None if found is None else (found[0], *found.groups(""))

    def replaced(self, text: str, template: "Template") -> str:
        """The text with each match replaced, as Go does: none that is empty and follows another one."""
        pieces, end = [], 0
        for found in self._compiled.finditer(text):
            pieces.append(text[end : found.start()])
            if found.end() > end or found.start() == 0:
                pieces.append(template.expanded((found[0], *found.groups(""))))
            end = found.end()
        return "".join((*pieces, text[end:]))


class Template:
    """A text in which ``$1``, ``${1}`` and ``${name}`` are groups of an expression."""

    def __init__(self, text: str, of: Expression) -> None:
        self._pieces: list[str | int] = []
        before, *parts = text.split("$")
        self._pieces.append(before)
        parts.reverse()
        while parts:
            part = parts.pop()
            if not part and parts:  # $$ is a dollar
                self._pieces.append("$" + parts.pop())
                continue
            name, rest = _group_name(part)
            if not name:
                self._pieces.append("$" + part)
                continue
            number = int(name) if re.fullmatch("0|[1-9][0-9]{0,8}", name) else of.names.get(name, of.groups + 1)
            self._pieces += [number, rest] if number <= of.groups else [rest]

    def expanded(self, groups: Groups) -> str:
        """The text for a match."""
        return "".join([piece if isinstance(piece, str) else groups[piece] for piece in self._pieces])


def _group_name(text: str) -> tuple[str, str]:
    """The name of a group at the start of a text, and what follows it; no name if there is none."""
    start = 1 if text.startswith("{") else 0
    end = start
    while end < len(text) and (text[end].isalpha() or text[end].isdecimal() or text[end] == "_"):
        end += 1
    if start and not text.startswith("}", end):
        return "", text
    return text[start:end], text[end + start :]


class Rule(NamedTuple):
    """A rule; ``scheme`` says which names it may make."""

    action: Action
    source_labels: tuple[str, ...]
    separator: str
    regex: Expression
    modulus: int
    target_label: str
    target: Template
    replacement: Template
    scheme: Scheme


class Rules(NamedTuple):
    """Rules in their order, which names they may make, and whether one of them may speak of ``__meta_`` labels."""

    rules: tuple[Rule, ...] = ()
    scheme: Scheme = "utf8"
    with_meta: bool = False


# -- what rules make of labels


class _Labels:
    """Labels while rules change them: those that were given, by name, and those that were set, in that order."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.given = {name: value for name, value in sorted(labels.items()) if value}
        self.set: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self.set.get(name) or self.given.get(name, "")

    def __setitem__(self, name: str, value: str) -> None:
        self.given.pop(name, None)
        if value:
            self.set[name] = value
        else:
            self.set.pop(name, None)

    def items(self) -> list[tuple[str, str]]:
        return [*self.given.items(), *self.set.items()]


def relabelled(rules: Iterable[Rule], labels: Mapping[str, str]) -> dict[str, str] | None:
    """What the rules make of a series' labels, sorted by name; None if one drops it."""
    now = _Labels(labels)
    for rule in rules:
        value = rule.separator.join([now[name] for name in rule.source_labels])
        match rule.action:
            case "keep" | "drop":
                if (rule.regex.match(value) is None) == (rule.action == "keep"):
                    return None
            case "keepequal" | "dropequal":
                if (now[rule.target_label] == value) == (rule.action == "dropequal"):
                    return None
            case "labelmap" | "labeldrop" | "labelkeep":
                _change_names(rule, now)
            case _:
                _set_target(rule, now, value)
    return dict(sorted(now.items()))


def _change_names(rule: Rule, now: _Labels) -> None:
    """Copy or remove labels by their names. What is copied to here is not looked at again."""
    for name, value in now.items():
        matches = rule.regex.match(name) is not None
        if rule.action == "labelmap" and matches:
            now[rule.regex.replaced(name, rule.replacement)] = value
        elif rule.action != "labelmap" and matches == (rule.action == "labeldrop"):
            now[name] = ""


def _set_target(rule: Rule, now: _Labels, value: str) -> None:
    """Give a label another value; an empty one removes it."""
    match rule.action:
        case "replace":
            groups = rule.regex.match(value)
            if groups is not None and is_label_name(target := rule.target.expanded(groups), rule.scheme):
                now[target] = rule.replacement.expanded(groups)
        case "hashmod":
            digest = md5(value.encode(), usedforsecurity=False).digest()
            now[rule.target_label] = str(int.from_bytes(digest[8:]) % rule.modulus)
        case "lowercase":
            now[rule.target_label] = lowercase(value)
        case "uppercase":
            now[rule.target_label] = uppercase(value)


def lowercase(text: str) -> str:
    """A text in lower case, each letter by itself."""
    return text.lower() if text.isascii() else "".join([letter.lower()[0] for letter in text])


def uppercase(text: str) -> str:
    """A text in upper case, each letter by itself; one that has no single capital stays."""
    if text.isascii():
        return text.upper()
    forms = [(letter.upper(), letter.title(), letter) for letter in text]
    return "".join([next(form for form in three if len(form) == 1) for three in forms])


def is_label_name(name: str, scheme: Scheme) -> bool:
    """Whether a label may have this name."""
    return bool(name) if scheme == "utf8" else _LEGACY_LABEL.fullmatch(name) is not None


def is_metric_name(name: str, scheme: Scheme) -> bool:
    """Whether a metric may have this name."""
    return bool(name) if scheme == "utf8" else _LEGACY_METRIC.fullmatch(name) is not None


# -- a file of rules


def load(text: str, file: str) -> Rules:
    """The rules of a file: a list of them, or a mapping that has them as Prometheus's configuration does.

    Raises BadRules with every mistake.
    """
    try:
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node()
    except (yaml.YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = f"{file}:{where.line + 1}" if where is not None else file
        raise BadRules(
            [f"{line}: not YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"]
        ) from error
    mistakes: list[str] = []
    section, scheme = _section(document, file, mistakes)
    rules = []
    for number, node in enumerate(section.value if section is not None else (), 1):
        at = f"{file}:{node.start_mark.line + 1}: rule {number}"
        if not isinstance(node, yaml.MappingNode):
            mistakes.append(f"{at}: a rule has fields, such as source_labels and action; this has none")
            continue
        wrong: list[str] = []
        fields = _fields(node, loader, f"{file}:{{line}}: rule {number}", wrong)
        if not wrong and (rule := _rule(fields, scheme, wrong)) is not None:
            rules.append(rule)
        mistakes += [one if one.startswith(f"{file}:") else f"{at}: {one}" for one in wrong]
    if mistakes:
        raise BadRules(mistakes)
    return Rules(tuple(rules), scheme, "__meta_" in text)


def _section(document: yaml.Node | None, file: str, mistakes: list[str]) -> tuple[yaml.SequenceNode | None, Scheme]:
    """The list of rules in a document, and which names are valid."""
    scheme: Scheme = "utf8"
    section = document
    if isinstance(document, yaml.MappingNode):
        found = {key.value: value for key, value in document.value}
        unknown = [key for key in found if key not in (*_SECTIONS, _SCHEME)]
        if unknown:
            mistakes.append(f"{file}: only {', '.join(_SECTIONS)} and {_SCHEME} belong here, not {', '.join(unknown)}")
        if _SCHEME in found and (given := found[_SCHEME].value) not in get_args(Scheme):
            mistakes.append(f"{file}:{found[_SCHEME].start_mark.line + 1}: {_SCHEME} is utf8 or legacy, not {given!r}")
        elif _SCHEME in found:
            scheme = found[_SCHEME].value
        sections = [found[name] for name in _SECTIONS if name in found]
        section = sections[0] if len(sections) == 1 else None
        if len(sections) != 1 and not unknown:
            mistakes.append(f"{file}: it has to have one of {' and '.join(_SECTIONS)}")
            return None, scheme
    if isinstance(section, yaml.SequenceNode):
        return section, scheme
    if not mistakes:
        mistakes.append(f"{file}: a list of rules is expected, as under metric_relabel_configs")
    return None, scheme


def _fields(node: yaml.MappingNode, loader: yaml.SafeLoader, at: str, wrong: list[str]) -> dict[str, yaml.Node]:
    """The fields of a rule by name."""
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    for key, value in node.value:
        line = at.format(line=key.start_mark.line + 1)
        if not isinstance(key, yaml.ScalarNode) or key.value not in (*_FIELDS, "<<"):
            wrong.append(f"{line}: there is no field {key.value!r}; there are {', '.join(_FIELDS)}")
        elif keys.count(key.value) > 1:
            wrong.append(f"{line}: {key.value} is given twice")
        elif isinstance(value, yaml.ScalarNode) == (key.value == "source_labels") and not _is_null(value):
            kind = "a list" if key.value == "source_labels" else "a text"
            wrong += [f"{line}: {key.value} is {kind}"] if key.value != "<<" else []
    if not wrong:
        loader.flatten_mapping(node)
    return {key.value: value for key, value in node.value} if not wrong else {}


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _rule(fields: Mapping[str, yaml.Node], scheme: Scheme, wrong: list[str]) -> Rule | None:
    """A rule of its fields; adds to ``wrong`` why there is none."""
    sources = fields.get("source_labels")
    names = sources.value if isinstance(sources, yaml.SequenceNode) else []
    if [one for one in names if not isinstance(one, yaml.ScalarNode) or not (one.value or _is_null(one))]:
        wrong.append("source_labels is a list of names")
    given = {name: "" if _is_null(one) else str(one.value) for name, one in fields.items() if name != "source_labels"}
    modulus = _modulus(fields.get("modulus"))
    if modulus is None:
        wrong.append(f"modulus is a whole number from 0 to {_MOST}, not {given['modulus']!r}")
    elif "modulus" in given:
        given["modulus"] = str(modulus)
    regex, expression = None, given.get("regex", _DEFAULTS["regex"])
    try:
        regex = Expression(expression)
    except ValueError as error:
        wrong.append(f"regex '{expression}' is not an expression of RE2: {error}")
    changed = [name for name, text in given.items() if text != _DEFAULTS[name] or name == "regex"]
    text = _DEFAULTS | given
    action = lowercase(text["action"])
    wrong += _misfits(
        action, text, scheme, [*changed, *(["source_labels"] if sources and not _is_null(sources) else [])]
    )
    if wrong or modulus is None or regex is None:
        return None
    source_labels = tuple("" if _is_null(one) else one.value for one in names)
    target, replacement = Template(text["target_label"], regex), Template(text["replacement"], regex)
    made = (source_labels, text["separator"], regex, modulus, text["target_label"], target, replacement, scheme)
    return Rule(action, *made)  # type: ignore[arg-type] # _misfits has seen that it is one of them


def _modulus(node: yaml.Node | None) -> int | None:
    """A number that is not negative and has 64 bits, as YAML 1.1 writes it; None if it is none."""
    if node is None or _is_null(node):
        return 0
    text = node.value.replace("_", "")
    found: int | None = None
    if getattr(node, "style", None) is not None:
        return None  # in quotes it is a text
    if _INTEGER.fullmatch(text):
        found = int(text, 0)
    elif _OCTAL.fullmatch(text):
        found = int(text, 8)
    elif _FLOAT.fullmatch(text):
        found = int(float(text)) if float(text) <= _MOST else None
    return found if found is not None and found <= _MOST else None


def _misfits(action: str, text: Mapping[str, str], scheme: Scheme, changed: Iterable[str]) -> Iterator[str]:
    """What of a rule does not go together; ``changed`` are the fields that say something else than their defaults."""
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
    further = [name for name in _FIELDS if name in changed and name not in ("action", *_ONLY.get(action, _FIELDS))]
    if further:
        yield f"{action} takes only {' and '.join(_ONLY[action])}, not {', '.join(further)}"


def _is_template(text: str, scheme: Scheme) -> bool:
    """Whether the name of a label may come of a text in which groups are put."""
    return bool(text) if scheme == "utf8" else _LEGACY_TEMPLATE.search(text) is not None
