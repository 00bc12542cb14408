"""Streams: Kafka -> Kafka."""

from delivery.settings import ComponentSpec

STREAMS = {
    "attribution": ComponentSpec(
        component="streams.attribution.component:Attribution",
        settings="streams.settings:AttributionSettings",
        reads=("gpu.samples", "gpu.allocations", "gpu.workloads"),
        writes=("gpu.attributed",),
        help="Join samples with who held the GPUs, and send gpu.attributed.",
        example="gpustream stream attribution --kafka 127.0.0.1:9092 --instance-id attribution-0",
    ),
    "alerts": ComponentSpec(
        component="streams.alerts.component:Alerts",
        settings="streams.settings:AlertSettings",
        reads=("gpu.attributed", "gpu.workloads"),
        writes=("gpu.alerts",),
        keeps=("gpu.alert-state", "gpu.alert-members", "gpu.alert-groups"),
        describes=("gpu.samples",),
        help="Judge gpu.attributed by the alert rules, and send gpu.alerts.",
        example="gpustream stream alerts --kafka 127.0.0.1:9092 --rules rules.toml",
    ),
    "usage": ComponentSpec(
        component="streams.usage.component:UsageStream",
        settings="streams.settings:UsageSettings",
        reads=("gpu.attributed",),
        writes=("gpu.usage-minutes", "gpu.usage"),
        keeps=("gpu.usage-state",),
        describes=("gpu.samples",),
        help="Count who had each GPU and what of it was used, in gpu.usage-minutes and gpu.usage (hours).",
        example="gpustream stream usage --kafka 127.0.0.1:9092 --instance-id usage-0",
    ),
}
