"""A node's record is due at once, then at most five times a second; new pods wait a short time for their owners."""

from producers.cluster.component import DEFER_S, SPACING_S, RateLimiter


def _never(_: str) -> list[str]:
    return []


def _always(node: str) -> list[str]:
    return [f"pod of {node}"]


def test_the_first_change_of_a_node_is_due_at_once() -> None:
    assert RateLimiter().due(["a", "b"], _never, 100.0) == (["a", "b"], None)


def test_further_changes_wait_until_the_last_record_is_long_enough_ago() -> None:
    limiter = RateLimiter()
    limiter.published("a", 100.0)

    assert limiter.due(["a", "b"], _never, 100.0 + SPACING_S / 2) == (["b"], 100.0 + SPACING_S)
    assert limiter.due(["a"], _never, 100.0 + SPACING_S) == (["a"], None)


def test_a_node_waits_for_the_chain_of_its_first_new_pod_but_not_for_long() -> None:
    limiter = RateLimiter()
    assert limiter.due(["a"], _always, 100.0) == ([], 100.0 + DEFER_S)
    assert limiter.due(["a"], _always, 100.2) == ([], 100.0 + DEFER_S)
    assert limiter.due(["a"], _always, 100.0 + DEFER_S) == (["a"], None)


def test_a_node_is_due_as_soon_as_its_chains_are_known() -> None:
    limiter = RateLimiter()
    limiter.due(["a"], _always, 100.0)

    assert limiter.due(["a"], _never, 100.01) == (["a"], None)


def test_each_pod_waits_for_its_own_second() -> None:
    limiter = RateLimiter()
    limiter.due(["a"], lambda _: ["first"], 100.0)
    limiter.due(["a"], lambda _: ["first", "second"], 100.9)

    assert limiter.due(["a"], lambda _: ["first", "second"], 100.0 + DEFER_S)[0] == ["a"]
    assert limiter.deferred(["first", "second"], 100.0 + DEFER_S) == {"second"}
    assert limiter.deferred(["first", "second"], 100.9 + DEFER_S) == set()


def test_old_nodes_and_pods_are_forgotten() -> None:
    limiter = RateLimiter()
    for second in range(10_000):
        limiter.due([f"n{second}"], _always, float(second))
        limiter.published(f"n{second}", float(second))

    assert (len(limiter._published_s), len(limiter._deferred_since_s)) < (3, 100)
