"""NVML is opened again for GPUs that work for others, and less and less often where that is in vain."""

from producers.node.nvml.reopening import LONGEST_S, Reopening
from tests.producers.node.nvml.fake import Clock


def test_there_is_no_reason_while_all_that_work_work_here() -> None:
    reopening = Reopening(40, Clock())
    assert reopening.why(set(), set()) is None
    assert reopening.why({"GPU-0"}, {"GPU-0", "GPU-1", None}) is None


def test_a_gpu_that_works_for_others_is_one() -> None:
    why = Reopening(40, Clock()).why({"GPU-2", "GPU-1", "GPU-0"}, {"GPU-0"})
    assert why == "GPU-1, GPU-2 would answer a new process, and not this one"


def test_what_was_in_vain_is_tried_again_after_twice_the_time_each_time() -> None:
    clock = Clock()
    reopening = Reopening(40, clock)
    began_s, tried_s = clock.now_s, []
    while clock.now_s < began_s + 6 * LONGEST_S:
        if reopening.why({"GPU-1"}, set()):
            tried_s.append(clock.now_s - began_s)
        clock.now_s += 10
    assert tried_s[:5] == [0, 40, 120, 280, 600]
    assert tried_s[-1] - tried_s[-2] == LONGEST_S


def test_another_gpu_does_not_wait_for_it() -> None:
    reopening = Reopening(40, Clock())
    reopening.why({"GPU-1"}, set())
    assert reopening.why({"GPU-1", "GPU-2"}, set()) == "GPU-2 would answer a new process, and not this one"


def test_one_that_worked_since_is_tried_at_once() -> None:
    reopening = Reopening(40, Clock())
    assert reopening.why({"GPU-1"}, set())
    reopening.worked("GPU-1")
    assert reopening.why({"GPU-1"}, set())
