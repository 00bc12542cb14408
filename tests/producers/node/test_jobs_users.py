"""A user has the name that the machine gives, and a lookup never blocks for long."""

import os
import pwd
import threading

import pytest

from producers.node import jobs
from producers.node.jobs import Users, user_of_this_machine

LONG_S = 30.0


def test_a_name_is_returned_at_once() -> None:
    users = Users({1000: "alice"}.get, within_s=LONG_S)
    users.look_up(1000)
    assert users.name(1000) == "alice"


def test_a_user_without_a_name_is_named_by_the_uid() -> None:
    users = Users({1000: "alice"}.get, within_s=LONG_S)
    users.look_up(1001)
    assert users.name(1001) == "1001"
    assert users.name(1000) == "1000", "it was never looked up"


def test_a_name_is_looked_up_until_it_is_found_and_then_no_more() -> None:
    lookups: list[int] = []
    answers = iter([None, "alice"])

    def lookup(uid: int) -> str | None:
        lookups.append(uid)
        return next(answers)

    users = Users(lookup, within_s=LONG_S)
    for _ in range(4):
        users.look_up(1000)
    assert users.name(1000) == "alice"
    assert lookups == [1000, 1000]


def test_a_name_service_that_hangs_costs_the_name_and_only_a_few_threads() -> None:
    hangs, lookup_started = threading.Event(), threading.Semaphore(0)

    def lookup(uid: int) -> str | None:
        lookup_started.release()
        hangs.wait(LONG_S)
        return f"user-{uid}"

    users = Users(lookup, within_s=0.0)
    for uid in (*range(1000, 1010), 1000):
        users.look_up(uid)
    for _ in range(4):
        assert lookup_started.acquire(timeout=LONG_S)
    assert not lookup_started.acquire(blocking=False)
    assert users.name(1000) == "1000"

    asking = [thread for thread in threading.enumerate() if thread.name.startswith("user-10")]
    hangs.set()
    for thread in asking:
        thread.join(LONG_S)
    assert users.name(1000) == "user-1000"


def test_if_the_system_gives_no_thread_the_name_is_looked_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    users = Users({1000: "alice"}.get, within_s=LONG_S)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for uid in range(1000, 1010):
            users.look_up(uid)
    assert users.name(1000) == "1000"
    users.look_up(1000)
    assert users.name(1000) == "alice"


def test_the_cache_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_MAX_CACHED", 2)
    users = Users(lambda uid: f"user-{uid}", within_s=LONG_S)
    users.look_up(1)
    users.look_up(2)
    users.name(1)
    users.look_up(3)
    assert [users.name(uid) for uid in (1, 2, 3)] == ["user-1", "2", "user-3"]


def test_this_machine_knows_who_runs_the_test() -> None:
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        pytest.skip("nobody has this user id here")
    assert user_of_this_machine(os.getuid()) == name


@pytest.mark.parametrize("uid", [4_000_000_000, 2**40])
def test_this_machine_does_not_know_everybody(uid: int) -> None:
    assert user_of_this_machine(uid) is None


def test_a_name_that_can_not_be_printed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        pw_name = "a\udcff"

    monkeypatch.setattr(pwd, "getpwuid", lambda uid: Entry)
    assert user_of_this_machine(1000) is None
