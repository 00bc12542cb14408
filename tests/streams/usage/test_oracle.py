"""The books against an oracle that looks at every half second by itself, in fractions."""

from collections import defaultdict
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.usage.books import Accounting, UsageReplay, decode, encode
from streams.usage.measure import divide
from tests.streams.usage.made import START_MS, Json, Kept, gpu, holder, mig, tick
from topics.usage import HOUR_MS, MINUTE_MS, Usage

STEP_MS = 500
FIELDS = (
    "device_ms", "slice_ms", "used_us", "idle_ms", "tensor_us", "energy_mj", "memory_byte_ms", "exact_ms", "late_ms",
    "none_ms",
)  # fmt: skip


class Step(NamedTuple):
    """A tick: how long after the one before (below 0: a new run, with a clock that was set back), and what it says."""

    after_ms: int
    devices: list[Json]
    attribution: str
    interval_ms: int


@st.composite
def devices(draw: st.DrawFn) -> list[Json]:
    found: list[Json] = []
    for uuid in draw(st.lists(st.sampled_from(["GPU-a", "GPU-b"]), unique=True, max_size=2)):
        kind = draw(st.sampled_from(["free", "held", "shared", "cut", "lost"]))
        busy = draw(st.sampled_from([0.0, 0.004, 0.37, 1.0]))
        more: Json = {"metrics": {"tensor_active_ratio": 0.25, "memory_used_bytes": 1001}, "busy": busy}
        if kind == "lost":
            found.append(gpu(uuid, holder("a"), state=draw(st.sampled_from(["lost", "timeout"]))))
        elif kind == "cut":
            parts = draw(st.lists(st.sampled_from(["1g.10gb", "2g.20gb", "1c.3g.40gb", "7g.80gb"]), max_size=3))
            found.append(gpu(uuid, **more))
            found += [
                mig(f"MIG-{uuid}-{at}", profile, *([holder("a")] if at else []), parent=uuid)
                for at, profile in enumerate(parts)
            ]
        else:
            parts_of = [0.3 * busy, 0.5 * busy, None][: {"free": 0, "held": 1, "shared": draw(st.integers(2, 3))}[kind]]
            found.append(gpu(uuid, *[holder(f"pod-{at}", part) for at, part in enumerate(parts_of)], **more))
    return found


gaps = st.sampled_from([500, 1000, 1000, 1000, 2500, 3000, 3500, 61_000, 900_000, 4_000_000, -1000, -70_000])
steps = st.lists(
    st.builds(Step, gaps, devices(), st.sampled_from(["exact", "late", "none"]), st.sampled_from([1000, 2000])),
    min_size=2,
    max_size=25,
)


def records_of(story: list[Step]) -> list[Any]:
    """The ticks of a story, and a last one hours later that closes all."""
    found, at_ms, run_id = [], 3_000_000, 1
    for seq, step in enumerate(story, 1):
        at_ms, run_id = at_ms + step.after_ms, run_id + (step.after_ms < 0)
        more = {"attribution": step.attribution, "interval_ms": step.interval_ms}
        found.append(tick(at_ms, *step.devices, run_id=run_id, seq=seq, offset=seq, **more))
    newest_ms = max(one.ts_ms for one in found) - START_MS
    found.append(tick(newest_ms + 3 * HOUR_MS, run_id=10_000, seq=1, offset=10_000))
    return found


def shares_of(device: Any) -> list[tuple[str, str | None, Fraction]]:
    """Category, pod and share of a device: each pod's part, and what nobody used in equal parts."""
    if device.state != "ok":
        return [("lost", None, Fraction(1))]
    if not device.holders:
        return [("free", None, Fraction(1))]
    if len(device.holders) == 1:
        return [("held", device.holders[0].pod, Fraction(1))]
    parts = [round((one.parts.utilization_ratio if one.parts else 0) * 10**6) for one in device.holders]
    rest = Fraction(max(0, 10**6 - sum(parts)), len(parts))
    return [
        ("held", one.pod, (part + rest) / (sum(parts) + rest * len(parts)))
        for one, part in zip(device.holders, parts, strict=True)
    ]


SLICES = {"1g.10gb": 1, "2g.20gb": 2, "1c.3g.40gb": 1, "7g.80gb": 7}


def oracle(ticks: list[Any], lasts_ms: int) -> dict[tuple[Any, ...], Fraction]:
    """The milliseconds times slices of each window, GPU, device, category and pod."""
    stands: dict[int, Any] = {}  # by half second, the tick that stands for it
    shown: dict[int, set[str]] = defaultdict(set)  # by hour, the GPUs that a tick shows
    booked_ms, before = 0, ticks[0]
    for one in ticks:
        same = before is not one and before.run_id == one.run_id
        since_ms = max(before.ts_ms, one.ts_ms - 3 * one.interval_ms) if same else one.ts_ms
        uuids = {device.mig.parent_uuid if device.mig else device.uuid for device in one.devices}
        for at_ms in range(max(since_ms, booked_ms), one.ts_ms, STEP_MS):
            stands[at_ms] = one
            shown[at_ms // HOUR_MS] |= uuids
        if one.ts_ms > booked_ms and max(since_ms, booked_ms) == one.ts_ms:
            shown[one.ts_ms // HOUR_MS] |= uuids
        booked_ms, before = max(booked_ms, one.ts_ms), one
    found: dict[tuple[Any, ...], Fraction] = defaultdict(Fraction)
    for hour, uuids in shown.items():
        for at_ms in range(hour * HOUR_MS, (hour + 1) * HOUR_MS, STEP_MS):
            window = at_ms // lasts_ms * lasts_ms
            for uuid in uuids:
                mine = [one for one in (stands[at_ms].devices if at_ms in stands else ()) if uuid == one.uuid]
                if not mine:
                    found[window, uuid, uuid, "unobserved", None] += STEP_MS * 7
                    continue
                cut, left = [one for one in stands[at_ms].devices if one.mig and one.mig.parent_uuid == uuid], 7
                for device in [*cut, *mine]:
                    slices = min(left, SLICES[device.mig.profile]) if device.mig else left
                    left -= slices
                    for category, pod, share in shares_of(device):
                        found[window, uuid, device.uuid, category, pod] += STEP_MS * slices * share
    return found


@given(steps)
def test_every_window_is_what_an_oracle_says_of_each_half_second(story: list[Step]) -> None:
    ticks = records_of(story)
    kept = Kept().play(*ticks)
    for lasts_ms in (MINUTE_MS, HOUR_MS):
        expected = oracle(ticks[:-1], lasts_ms)
        found = {
            (one.start_ms, one.gpu_uuid, one.uuid, one.category, one.pod): one
            for one in kept.records.values()
            if one.end_ms - one.start_ms == lasts_ms
        }
        assert {key for key, share in expected.items() if share} <= found.keys()
        for key, one in found.items():
            whole = expected[key].denominator == 1 and "pod-1" not in {other.pod for other in found.values()}
            assert abs(one.slice_ms - expected[key]) <= (0 if whole else len(ticks) * 7)


@given(steps, st.randoms(use_true_random=False))
def test_windows_close_hours_are_their_minutes_and_a_restart_changes_nothing(story: list[Step], chance: Any) -> None:
    ticks = records_of(story)
    kept, again = Kept().play(*ticks), Kept()
    for one in ticks:
        again.take(one)
        if chance.random() < 0.3:
            again.keeper = type(again.keeper)(decode(encode(again.keeper.books)), again.policy)
    assert again.written == kept.written
    sums: dict[tuple[int, int, str], int] = defaultdict(int)
    minutes: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(FIELDS))
    hours: dict[tuple[Any, ...], list[int]] = {}
    for one in kept.records.values():
        assert one.final
        assert one.exact_ms + one.late_ms + one.none_ms == (0 if one.category == "unobserved" else one.device_ms)
        sums[one.end_ms - one.start_ms, one.start_ms, one.gpu_uuid] += one.slice_ms
        amounts = [getattr(one, field) for field in FIELDS]
        name = (one.start_ms // HOUR_MS, *one.key._replace(start_ms=0))
        if one.end_ms - one.start_ms == HOUR_MS:
            hours[name] = amounts
        else:
            minutes[name] = [a + b for a, b in zip(minutes[name], amounts, strict=True)]
    assert hours == minutes
    assert {total - lasts_ms * 7 for (lasts_ms, _, _), total in sums.items()} <= {0}
    assert all((MINUTE_MS, start_ms, uuid) in sums for lasts_ms, start_ms, uuid in sums if lasts_ms == HOUR_MS)


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
def test_what_is_divided_sums_and_is_off_by_less_than_one(total: int, weights: list[int]) -> None:
    parts = divide(total, weights)
    assert sum(parts) == total
    if sum(weights):
        assert all(
            abs(part - Fraction(total * weight, sum(weights))) < 1 for part, weight in zip(parts, weights, strict=True)
        )


@given(steps)
def test_the_policy_moves_time_between_pods_and_nothing_else(story: list[Step]) -> None:
    used, equal = (Kept(Accounting(split)).play(*records_of(story)) for split in ("used", "equal"))

    def totals(kept: Kept) -> dict[tuple[Any, ...], int]:
        found: dict[tuple[Any, ...], int] = defaultdict(int)
        for one in kept.records.values():
            for field in ("device_ms", "slice_ms", "used_us", "energy_mj", "memory_byte_ms"):
                found[one.end_ms - one.start_ms, one.start_ms, one.uuid, one.category, field] += getattr(one, field)
        return found

    assert totals(used) == totals(equal)


@given(steps)
def test_a_replay_gives_the_same_records_but_for_the_generation(story: list[Step]) -> None:
    ticks = records_of(story)
    replay = UsageReplay(Accounting(generation=7), START_MS - HOUR_MS)
    found = [record for one in ticks for record in replay.take(one, one.ts_ms)] + replay.end()
    live = {_named(one): one for one in Kept().play(*ticks).records.values() if one.final}
    booked = {_named(one): msgspec.structs.replace(one, generation=0) for one in found}
    assert live.keys() <= booked.keys()
    assert {name: one for name, one in booked.items() if name in live or one.device_ms} == live
    assert {one.generation for one in found} <= {7}


def _named(one: Usage) -> tuple[Any, ...]:
    return (one.end_ms - one.start_ms, *one.key)
