"""Importing the contract is cheap: it loads no Kafka client and no Faust."""

import subprocess
import sys

import pytest

from topics import TOPICS
from topics.topic import load_topics

MODULES = sorted(
    {path.split(":")[0] for path in TOPICS.values()}
    | {
        "topics.catalogue",
        "topics.device_ids",
        "topics.reference",
        "topics.topic",
    }
)


def test_importing_the_contract_loads_neither_faust_nor_a_kafka_client() -> None:
    code = f"""
import importlib, sys
for name in {MODULES!r}:
    importlib.import_module(name)
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"aiokafka", "confluent_kafka", "faust", "mode"}}))
"""

    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_is_registered_under_its_own_name(name: str) -> None:
    assert load_topics()[name].name == name
