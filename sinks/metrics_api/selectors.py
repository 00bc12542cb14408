"""Label selectors in Kubernetes' text form: ``gpu_model=H100,tier in (a,b),!x``. Pure.

Source: the grammar of k8s.io/apimachinery/pkg/labels; ``>`` and ``<`` are refused, because the response repeats
the selector as a ``metav1.LabelSelector``, which does not have them.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

_NAME = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
_KEY = rf"(?:{_NAME}/)?{_NAME}"
_REQUIREMENT = re.compile(
    rf"\s*(?:(?P<absent>!)\s*(?P<lacking>{_KEY})"
    rf"|(?P<key>{_KEY})(?:\s*(?P<equal>==|=|!=)\s*(?P<value>{_NAME}?)"
    rf"|\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*(?:,|\Z)"
)
_VALUE = re.compile(rf"{_NAME}?")


class SelectorError(ValueError):
    """The text is not a selector. The message quotes where."""


class Requirement(NamedTuple):
    """A requirement on labels."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels match it. As in Kubernetes, labels without the key match ``NotIn``."""
        match self.operator:
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values


class Selector(NamedTuple):
    """Requirements that all have to match. Without any, everything matches."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels match all requirements."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    def as_object(self) -> dict[str, Any] | None:
        """The selector as a ``metav1.LabelSelector``; None if everything matches."""
        rows = [
            {"key": key, "operator": operator, **({"values": list(values)} if values else {})}
            for key, operator, values in self.requirements
        ]
        return {"matchExpressions": rows} if rows else None


EVERYTHING = Selector()


def parse(text: str) -> Selector:
    """Parse a selector. Raises SelectorError."""
    requirements, position = [], 0
    while text[position:].strip():
        match = _REQUIREMENT.match(text, position)
        if match is None or (match.end() == len(text) and match[0].endswith(",")):
            raise SelectorError(
                f"{text[position:][:80]!r} is no label selector: write key=value, key in (a,b), key, !key"
            )
        position, key = match.end(), match["key"] or match["lacking"]
        if match["absent"]:
            requirement = Requirement(key, "DoesNotExist")
        elif match["equal"]:
            requirement = Requirement(key, "NotIn" if match["equal"] == "!=" else "In", (match["value"],))
        elif not match["set"]:
            requirement = Requirement(key, "Exists")
        else:
            values = tuple(dict.fromkeys(value.strip() for value in match["values"].split(",")))
            if invalid := [value for value in values if not _VALUE.fullmatch(value)]:
                raise SelectorError(f"{invalid[0][:80]!r} can't be the value of a label")
            requirement = Requirement(key, "In" if match["set"] == "in" else "NotIn", values)
        requirements.append(requirement)
    return Selector(tuple(requirements))
