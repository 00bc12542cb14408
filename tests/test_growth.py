"""What the tests of growth measure with."""

from tests.growth import steps


def test_the_first_call_of_a_function_takes_as_many_steps_as_the_next_one() -> None:
    def add() -> int:
        return sum(number for number in range(10))

    first, second = steps(add), steps(add)
    assert first == second > 10
