"""The values of pods, workloads and namespaces, from ticks."""

import json

import pytest

from sinks.metrics_api.holdings import SERVED, STALE_S, Holdings, combined_value, decode, pod_value
from tests.sinks.metrics_api.ticks import device, holder, of_deployment, tick
from topics.attributed import JOB, TOPIC

USED = "gpu_utilization_ratio"


def holdings_of(*ticks: object, now_s: float = 0.0) -> Holdings:
    """The holdings after these ticks."""
    holdings = Holdings()
    for decoded in ticks:
        holdings.add_tick(decoded, now_s, 0.0)  # type: ignore[arg-type]
    return holdings


def test_the_example_of_the_topic_is_decoded() -> None:
    (bert,) = Holdings().pods("ml-team", 0.0) or [None]
    assert bert is None
    holdings = holdings_of(decode(json.dumps(TOPIC.example).encode()))

    (pod_devices,) = holdings.pods("ml-team", 0.0).values()
    assert pod_devices[0].values[USED] == TOPIC.example["devices"][0]["metrics"][USED]
    assert ("Job", "bert-finetune-v3") in pod_devices[0].workloads


def test_what_is_served_is_a_gauge_that_can_be_put_together() -> None:
    assert {"gpu_utilization_ratio", "memory_used_bytes", "power_watts", "tensor_active_ratio"} <= SERVED.keys()
    assert not {"energy_joules_total", "clock_event_reasons", "performance_state"} & SERVED.keys()


def test_several_devices_of_a_pod_are_one_value() -> None:
    metrics = [{USED: 0.2, "memory_used_bytes": 1, "temperature_celsius": 40}, {USED: 0.6, "memory_used_bytes": 2}]
    devices = [device(f"GPU-{n}", holder("p"), metrics=values) for n, values in enumerate(metrics)]
    pod_devices = holdings_of(tick(1, *devices)).pods("ml", 0.0)["p"]

    assert pod_value(pod_devices, USED) == pytest.approx(0.4)
    assert pod_value(pod_devices, "memory_used_bytes") == 3
    assert pod_value(pod_devices, "temperature_celsius") == 40
    assert pod_value(pod_devices, "power_watts") is None


def test_a_device_that_a_tick_has_twice_is_one() -> None:
    twice = [device("GPU-a", holder("p"), metrics={"memory_used_bytes": 1})] * 2
    assert pod_value(holdings_of(tick(1, *twice)).pods("ml", 0.0)["p"], "memory_used_bytes") == 1


def test_zero_is_a_value() -> None:
    assert pod_value(holdings_of(tick(1, device("GPU-a", holder("p"), used=0.0))).pods("ml", 0.0)["p"], USED) == 0.0


def test_each_pod_of_a_shared_device_has_its_part_and_no_more() -> None:
    parts = {"utilization_ratio": 0.3, "memory_used_bytes": 5}
    shared = device("GPU-a", holder("p", parts=parts), holder("q"), used=0.9)
    pods = holdings_of(tick(1, shared)).pods("ml", 0.0)

    assert (pod_value(pods["p"], USED), pod_value(pods["p"], "memory_used_bytes")) == (0.3, 5)
    assert pod_value(pods["q"], USED) is None


def test_a_batch_job_is_no_pod_of_the_namespace_that_is_named_like_its_partition() -> None:
    job = holder("4242", "ml", workload={"kind": JOB, "name": "4242"})
    holdings = holdings_of(tick(1, device("GPU-a", job, used=0.9)), tick(1, device("GPU-b", holder("p")), node="n2"))
    assert (holdings.namespaces(), list(holdings.pods("ml", 0.0))) == (["ml"], ["p"])


def test_two_containers_of_a_pod_are_one_holder_of_the_whole_device() -> None:
    shared = device("GPU-a", holder("p", container="a"), holder("p", container="b"), used=0.9)

    assert pod_value(holdings_of(tick(1, shared)).pods("ml", 0.0)["p"], USED) == 0.9


def test_a_mig_device_is_its_pods_and_says_where_it_is_from() -> None:
    mig = {"uuid": "MIG-1", "parent_uuid": "GPU-a", "profile": "1g.10gb+me"}
    (pod_devices,) = (
        holdings_of(tick(1, device("MIG-1", holder("p"), used=0.5, mig=mig), device("GPU-a"))).pods("ml", 0.0).values()
    )

    assert pod_value(pod_devices, USED) == 0.5
    assert pod_devices[0].labels == {
        "k8s_node_name": "n1",
        "gpu_uuid": "GPU-a",
        "gpu_model": "NVIDIA-H100-80GB-HBM3",
        "gpu_mig_uuid": "MIG-1",
        "gpu_mig_profile": "1g.10gb.me",
    }


def test_what_is_not_known_of_a_device_is_no_label() -> None:
    mig = {"uuid": "MIG-1", "parent_uuid": "GPU-a"}
    ((holding,),) = holdings_of(tick(1, device("MIG-1", holder("p"), model=None, mig=mig))).pods("ml", 0.0).values()

    assert holding.labels == {"k8s_node_name": "n1", "gpu_uuid": "GPU-a", "gpu_mig_uuid": "MIG-1"}


def test_a_mig_device_without_a_utilization_has_how_busy_its_engines_were() -> None:
    mig = {"uuid": "MIG-1", "parent_uuid": "GPU-a", "profile": "1g.10gb"}
    busy = device("MIG-1", holder("p"), metrics={"graphics_engine_active_ratio": 0.4}, mig=mig)
    whole = device("GPU-b", holder("q"), metrics={"graphics_engine_active_ratio": 0.4})
    pods = holdings_of(tick(1, busy, whole)).pods("ml", 0.0)

    assert pod_value(pods["p"], USED) == 0.4
    assert pod_value(pods["q"], USED) is None


def test_a_pod_is_gone_with_its_nodes_next_tick() -> None:
    holdings = holdings_of(tick(1, device("GPU-a", holder("p"), used=0.5)), tick(2, device("GPU-a", used=0.0)))

    assert holdings.pods("ml", 0.0) == {}
    assert holdings.namespaces() == []


def test_the_pods_of_other_nodes_stay_when_a_node_has_none_any_more() -> None:
    others = tick(1, device("GPU-b", holder("q")), node="n2")
    holdings = holdings_of(tick(1, device("GPU-a", holder("p"))), others, tick(2, device("GPU-a")))

    assert list(holdings.pods("ml", 0.0)) == ["q"]


def test_of_two_pods_that_have_a_name_on_a_node_one_after_the_other_one_counts() -> None:
    first, second = (holder("p", pod_uid=uid) for uid in ("u1", "u2"))
    pods = holdings_of(tick(1, device("GPU-a", first), device("GPU-b", second))).pods("ml", 0.0)

    assert len(pods["p"]) == 1


def test_a_value_is_gone_when_it_is_thirty_seconds_old_and_the_age_on_arrival_counts() -> None:
    holdings = Holdings()
    holdings.add_tick(tick(1, device("GPU-a", holder("p"), used=0.5)), now_s=100.0, age_s=10.0)

    assert "p" in holdings.pods("ml", 100.0 + STALE_S - 10.1)
    assert holdings.pods("ml", 100.0 + STALE_S - 10.0) == {}
    holdings.expire(100.0 + STALE_S - 10.0)
    assert (len(holdings), holdings.namespaces()) == (0, [])


def test_a_value_of_a_node_that_is_seldom_read_is_gone_after_three_of_its_intervals() -> None:
    holdings = Holdings()
    holdings.add_tick(tick(1, device("GPU-a", holder("p"), used=0.5), interval_ms=60_000), now_s=0.0, age_s=0.0)

    assert "p" in holdings.pods("ml", 179.9)
    assert holdings.pods("ml", 180.0) == {}


def test_a_tick_of_a_clock_that_is_ahead_is_not_good_for_longer() -> None:
    holdings = Holdings()
    holdings.add_tick(tick(1, device("GPU-a", holder("p"), used=0.5)), now_s=0.0, age_s=-3600.0)

    assert holdings.pods("ml", STALE_S) == {}


def test_a_replay_brings_nothing_back() -> None:
    first = tick(1, device("GPU-a", holder("p"), used=0.5))
    holdings = holdings_of(first, tick(2, device("GPU-a")))

    assert holdings.add_tick(first, 0.0, 0.0) == "replay"
    assert holdings.pods("ml", 0.0) == {}


def test_of_two_pods_of_one_name_the_one_that_was_heard_of_last_counts() -> None:
    old = tick(1, device("GPU-a", holder("p", pod_uid="old"), used=0.1), node="n1")
    new = tick(5, device("GPU-b", holder("p", pod_uid="new"), used=0.9), node="n2")

    for order in ([old, new], [new, old]):
        assert pod_value(holdings_of(*order).pods("ml", 0.0)["p"], USED) == 0.9


def test_a_device_whose_holder_has_no_uid_is_of_the_pod_of_its_name() -> None:
    memory = {"memory_used_bytes": 1}
    devices = [device("GPU-a", holder("p"), metrics=memory), device("GPU-b", holder("p", pod_uid="u"), metrics=memory)]

    for order in (devices, devices[::-1]):
        assert pod_value(holdings_of(tick(1, *order)).pods("ml", 0.0)["p"], "memory_used_bytes") == 2


@pytest.mark.parametrize("known", [{"pod_uid": "u"}, {}])
def test_a_pod_of_a_node_that_has_another_name_now_does_not_count_twice(known: dict[str, str]) -> None:
    holdings = Holdings()
    memory = {"memory_used_bytes": 1000}
    holdings.add_tick(tick(1, device("GPU-a", holder("p", **known), metrics=memory)), 0.0, 0.0)
    holdings.add_tick(tick(2, device("GPU-a", holder("p", **known), metrics=memory), node="renamed"), 1.0, 0.0)
    pods = holdings.pods("ml", 2.0)

    assert combined_value(pods, "memory_used_bytes") == 1000
    assert [holding.labels["k8s_node_name"] for holding in pods["p"]] == ["renamed"]


def test_pods_of_one_workload_together_are_the_mean_of_ratios_and_the_sum_of_amounts() -> None:
    devices = [
        device("GPU-a", of_deployment("p"), metrics={USED: 0.2, "power_watts": 100}),
        device("GPU-b", of_deployment("q"), metrics={USED: 0.8, "power_watts": 300}),
        device("GPU-c", of_deployment("r"), metrics={}),
    ]
    pods = holdings_of(tick(1, *devices)).pods("ml", 0.0)

    assert combined_value(pods, USED) == 0.5
    assert combined_value(pods, "power_watts") == 400
    assert combined_value(pods, "tensor_active_ratio") is None
