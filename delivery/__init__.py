"""On and off Kafka: the consumer group that streams and sinks read with, and what keeps count of what they finished."""
