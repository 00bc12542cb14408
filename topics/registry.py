"""Every topic, loaded. Only the definitions: no client, no Faust."""

from pkgutil import resolve_name

from topics import TOPICS
from topics.topic import Topic


def load() -> dict[str, Topic]:
    """Every topic of the contract by its name, in the order of the flow."""
    topics: list[Topic] = [resolve_name(path) for path in TOPICS.values()]
    return {topic.name: topic for topic in topics}
