"""The one way on and off Kafka: connection, sender, consumer group, positions, ledger, dead letters, administration.

Also what producers, streams and sinks share beside records: options and their values, instruments, the watchdog, the
Kubernetes API's client, and the rules about prices, policies and replays.
"""
