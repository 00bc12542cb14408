"""The join: every sample is given what the complete logs say, in whatever order the topics arrive."""

import msgspec
from hypothesis import given

from tests.streams.attribution import model
from tests.streams.attribution.reading import Reading
from tests.streams.attribution.stories import Act, Story, schedules, stories
from topics.attributed import AttributedSample

_decode = msgspec.json.Decoder(AttributedSample).decode


def read(story: Story, schedule: list[Act], *, workloads_first: bool = True) -> dict[int, bytes]:
    """All outputs, by offset, after a schedule and then everything else."""
    reading = Reading(story, workloads_first=workloads_first)
    for act in schedule:
        reading.act(act)
    reading.drain()
    return reading.out


@given(stories(), schedules)
def test_every_sample_is_given_what_the_logs_say_whatever_the_order_of_arrival(
    story: Story, schedule: list[Act]
) -> None:
    out = read(story, schedule)

    assert sorted(out) == list(range(len(story.logs.samples)))
    for offset, sample in enumerate(story.logs.samples):
        assert model.given(_decode(out[offset])) == model.answer(story.logs, sample), sample


@given(stories(), schedules, schedules)
def test_two_replays_agree_in_every_byte(story: Story, schedule: list[Act], other: list[Act]) -> None:
    assert read(story, schedule) == read(story, other)


@given(stories(), schedules)
def test_who_holds_a_device_depends_on_when_the_workloads_arrive_only_for_pods_that_had_ended(
    story: Story, schedule: list[Act]
) -> None:
    out, untold = read(story, schedule, workloads_first=False), story.logs._replace(workloads=())

    for offset, sample in enumerate(story.logs.samples):
        found = model.given(_decode(out[offset])).without_labels()
        least, most = (model.answer(logs, sample).without_labels() for logs in (story.logs, untold))
        assert found.attribution == most.attribution
        for uuid, holders in found.holders.items():
            assert holders == tuple(h for h in most.holders[uuid] if h in holders)
            assert set(least.holders[uuid]) <= set(holders)
