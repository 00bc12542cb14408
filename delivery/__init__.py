"""The one way on and off Kafka: sender, consumer group, positions, ledger, dead letters, topic administration; and the
Kubernetes API's client."""
