"""Label selectors in their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.metrics_api.selectors import Requirement, Selector, SelectorError, parse

LABELS = {"gpu_model": "H100", "tier": "a", "empty": ""}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("gpu_model=H100", True),
        ("gpu_model==H100,tier!=b", True),
        ("gpu_model=A100", False),
        ("tier in (a,b),gpu_model notin (A100)", True),
        ("tier in ( a , b ), x notin (y)", True),
        ("tier notin (a)", False),
        ("x!=y", True),
        ("gpu_model", True),
        ("!gpu_model", False),
        ("! x", True),
        ("x", False),
        ("empty=", True),
        ("tier=", False),
        ("nvidia.com/gpu.product", False),
    ],
)
def test_a_selector_takes_what_kubernetes_would_take(text: str, *, matches: bool) -> None:
    assert parse(text).matches(LABELS) is matches


@pytest.mark.parametrize("text", ["a b", "=x", "a in b", "a in (b", "a=b,", ",a", "a=b c", "a in (b c)", "a>1", "a=-"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(SelectorError):
        parse(text)


names = st.from_regex(r"[a-z]([a-z0-9._-]{0,5}[a-z0-9])?", fullmatch=True)
values = st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)
requirements = st.one_of(
    st.builds(Requirement, names, st.sampled_from(["In", "NotIn"]), values),
    st.builds(Requirement, names, st.sampled_from(["Exists", "DoesNotExist"]), st.just(())),
)


def written(requirement: Requirement) -> str:
    """A requirement as Kubernetes writes it."""
    values = f"({','.join(requirement.values)})"
    forms = {
        "In": f"{requirement.key} in {values}",
        "NotIn": f"{requirement.key} notin {values}",
        "Exists": requirement.key,
    }
    return forms.get(requirement.operator, f"!{requirement.key}")


@given(st.lists(requirements, max_size=4).map(tuple))
def test_what_kubernetes_writes_is_read_back(given_: tuple[Requirement, ...]) -> None:
    assert parse(",".join(map(written, given_))) == Selector(given_)


def test_a_selector_is_written_as_kubernetes_objects_have_it() -> None:
    assert parse("").as_object() is None
    assert parse("a=b,!c").as_object() == {
        "matchExpressions": [
            {"key": "a", "operator": "In", "values": ["b"]},
            {"key": "c", "operator": "DoesNotExist"},
        ]
    }
