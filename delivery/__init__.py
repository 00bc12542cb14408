"""Everything that talks to Kafka: connection, sender, consumer group, positions, ledger, dead letters, administration.

It also has what producers, streams and sinks share besides records: options and their values, instruments, the
watchdog, the client of the Kubernetes API, and the rules about prices, policies and replays.
"""
