"""The contract between producers, streams and sinks. Importing a topic loads neither Faust nor a Kafka client."""

TOPICS = {
    "gpu.samples": "topics.samples:TOPIC",
    "gpu.allocations": "topics.allocations:TOPIC",
    "gpu.workloads": "topics.workloads:TOPIC",
    "gpu.attributed": "topics.attributed:TOPIC",
    "gpu.alerts": "topics.alerts:TOPIC",
    "gpu.alert-state": "topics.alerts:STATE",
    "gpu.alert-members": "topics.alerts:MEMBERS",
    "gpu.alert-groups": "topics.alerts:GROUPS",
    "gpu.actions": "topics.actions:TOPIC",
    "gpu.usage-minutes": "topics.usage:MINUTES",
    "gpu.usage": "topics.usage:HOURS",
    "gpu.usage-state": "topics.usage:STATE",
    "gpu.dead-letters": "topics.dead_letters:TOPIC",
}
"""Every topic, as an import string."""
