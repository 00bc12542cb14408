"""The join: every sample is given what the complete logs say, in whatever order the topics arrive."""

import msgspec
from hypothesis import given

from tests.streams.attribution import model
from tests.streams.attribution.reading import Reading
from tests.streams.attribution.stories import Act, Story, schedules, stalls, stories
from topics.attributed import AttributedSample

_decode = msgspec.json.Decoder(AttributedSample).decode


def bytes_by_seq(story: Story, schedule: list[Act]) -> dict[int, bytes]:
    """All outputs, by offset, after a schedule and then everything else."""
    reading = Reading(story)
    for act in schedule:
        reading.act(act)
    reading.drain()
    return reading.outputs


@given(stories(), schedules)
def test_every_sample_is_given_what_the_logs_say_whatever_the_order_of_arrival(
    story: Story, schedule: list[Act]
) -> None:
    outputs = bytes_by_seq(story, schedule)

    assert sorted(outputs) == list(range(len(story.logs.samples)))
    for offset, sample in enumerate(story.logs.samples):
        assert model.answer_of(_decode(outputs[offset])) == model.answer(story.logs, offset), sample


@given(stories(), schedules, schedules)
def test_two_replays_agree_in_every_byte(story: Story, schedule: list[Act], other: list[Act]) -> None:
    assert bytes_by_seq(story, schedule) == bytes_by_seq(story, other)


@given(stories(), stalls, schedules)
def test_workloads_that_arrive_late_change_no_byte(story: Story, stall: list[Act], then_schedule: list[Act]) -> None:
    assert bytes_by_seq(story, [*stall, *then_schedule]) == bytes_by_seq(story, then_schedule)
