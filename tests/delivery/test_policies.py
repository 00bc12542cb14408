"""Namespaces allow actions by annotations; wrong annotations are errors."""

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.policies import (
    ALERTS,
    DEFAULT_BOUNDS,
    IDLE_AFTER,
    RECLAIM,
    Bounds,
    OptIn,
    annotation_errors,
    bounds,
    bounds_text,
    opt_in,
    opted_out,
)

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("event", OptIn({"event": None})),
        (" Event = 30m ,scale=4h, partly", OptIn({"event": HOUR_MS // 2, "scale": 4 * HOUR_MS}, partly=True)),
        ("OFF", OptIn()),
    ],
)
def test_a_namespace_gives_the_allowed_action_and_its_delay(text: str, expected: OptIn) -> None:
    assert opt_in(text) == expected


@pytest.mark.parametrize(
    "text", ["", "scale=", "scale=soon", "kill", "scale,scale", "partly", "off,scale", "partly=1h"]
)
def test_a_malformed_value_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|twice|says nothing"):
        opt_in(text)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert set(opt_in(text).actions) <= {"event", "scale", "suspend", "deactivate"}


def test_a_pod_goes_before_its_namespace_and_an_unreadable_annotation_allows_nothing() -> None:
    assert opted_out({}, {}, HOUR_MS) is None
    assert opted_out({ALERTS: "on"}, {ALERTS: "off"}, HOUR_MS) is None
    assert opted_out({}, {ALERTS: "off"}, HOUR_MS) == "gpustream.dev/alerts is 'off'"
    assert opted_out({IDLE_AFTER: "30m"}, {}, HOUR_MS) is None
    too_soon = opted_out({IDLE_AFTER: "2h"}, {}, HOUR_MS)
    assert too_soon == "gpustream.dev/idle-after is '2h', and the alert has fired for 1h"
    assert opted_out({IDLE_AFTER: "x"}, {}, HOUR_MS) == "gpustream.dev/idle-after is 'x', which is no duration"
    assert opted_out({IDLE_AFTER: ""}, {}, HOUR_MS) == "gpustream.dev/idle-after is '', which is no duration"
    assert opted_out({ALERTS: ""}, {}, HOUR_MS) == "gpustream.dev/alerts is ''"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpustream.dev/idel-after", f"did you mean {IDLE_AFTER}?"),
        ("gpustream.dev/Alerts", f"did you mean {ALERTS}?"),
        ("gpustream.dev/reclam", f"did you mean {RECLAIM}?"),
        ("gpustreem.dev/idle-after", f"did you mean {IDLE_AFTER}?"),
        ("gpustream.io/alerts", f"did you mean {ALERTS}?"),
        ("gpustream.dev/tier", "pods and namespaces have gpustream.dev/alerts,"),
    ],
)
def test_a_misspelt_annotation_is_named_with_the_one_that_was_meant(name: str, expected: str) -> None:
    (error,) = annotation_errors(
        {name: "2h", "kubectl.kubernetes.io/x": "y", "note": "z"}, "ml", DEFAULT_BOUNDS, of_pod=True
    )
    assert error.name == name
    assert error.text.startswith(f"the annotation {name} is not known, and nobody reads it: {expected}")


@pytest.mark.parametrize(
    "name",
    ["prometheus.io/alerts", "example.com/idle-after", "gpustream.dev/reclaimed-by", "app.kubernetes.io/name", ALERTS],
)
def test_an_annotation_that_was_not_meant_for_gpustream_is_no_error(name: str) -> None:
    assert annotation_errors({name: "on"}, "ml", DEFAULT_BOUNDS, of_pod=True) == []


@pytest.mark.parametrize(
    ("annotations", "of_pod", "expected"),
    [
        ({ALERTS: "no"}, True, "the annotation gpustream.dev/alerts is 'no': write on or off"),
        ({IDLE_AFTER: "10d"}, True, "the annotation gpustream.dev/idle-after is '10d', and 1d is the most that"),
        ({RECLAIM: "on"}, True, "the annotation gpustream.dev/reclaim is 'on': on a pod write off; what"),
        ({RECLAIM: "off"}, True, None),
        ({RECLAIM: "scale=4h"}, False, None),
        ({RECLAIM: "scaled"}, False, "the annotation gpustream.dev/reclaim is malformed: 'scaled' is not known"),
    ],
)  # fmt: skip
def test_a_value_that_is_wrong_or_out_of_bounds_is_named(
    annotations: dict[str, str], of_pod: bool, expected: str | None
) -> None:
    errors = annotation_errors(annotations, "ml", DEFAULT_BOUNDS, of_pod=of_pod)
    assert len(errors) == (expected is not None)
    assert all(error.text.startswith(expected or "") for error in errors)


def test_of_thousands_of_unknown_annotations_a_few_are_errors_and_those_of_values_are_all_there() -> None:
    hostile = {f"gpustream.dev/a{number:05d}": "" for number in range(10_000)} | {ALERTS: "no", IDLE_AFTER: "10d"}
    errors = annotation_errors(hostile, "ml", DEFAULT_BOUNDS, of_pod=True)
    assert [error.name for error in errors[-2:]] == [ALERTS, IDLE_AFTER]
    assert len(errors) == 10


def test_values_of_256_kib_are_not_kept() -> None:
    tracemalloc.start()
    try:
        for number in range(20):
            assert annotation_errors({ALERTS: f"{number}" * 100_000}, "ml", DEFAULT_BOUNDS, of_pod=True)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    assert annotation_errors({ALERTS: " " * 1000 + "off"}, "ml", DEFAULT_BOUNDS, of_pod=True) == []


def test_bounds_are_by_namespace() -> None:
    longest = bounds("24h,notebooks-*=72h")
    assert longest == Bounds(24 * HOUR_MS, ((("notebooks-*",), 72 * HOUR_MS),))
    assert bounds_text(longest) == "1d,notebooks-*=3d"
    assert annotation_errors({IDLE_AFTER: "48h"}, "notebooks-a", longest, of_pod=True) == []
    for raw_bounds in ("", "24h,x", "24h,=1h", "24h,x=y"):
        with pytest.raises(ValueError, match="write"):
            bounds(raw_bounds)
