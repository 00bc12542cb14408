"""The dashboards of what there is: the fleet, a node, a GPU with its every metric."""

import re
from collections.abc import Iterator

from k8s.dashboards.panel import (
    BAD_ABOVE_ZERO,
    FULL,
    HOT,
    LOOK_ABOVE_ZERO,
    SHARE_IS_GOOD,
    Column,
    Json,
    choice,
    dashboard,
    graph,
    holders,
    listed,
    row,
    table,
    tile,
)
from k8s.dashboards.queries import (
    DEVICE,
    DIVIDED,
    GPU,
    HOLDERS,
    MEMORY,
    NODE_MATCHERS,
    POD,
    POWER,
    UTILIZATION,
    alone_or_part,
    firing_alerts,
    gpus,
    held_gpus,
    holding,
    holding_pods,
    idle_devices,
    number_of,
    of_devices,
)
from topics.metric import Series
from topics.profiles import PROFILES

CLUSTER = choice("cluster", "k8s_cluster_name", "gpu_holders")
NODE = choice("node", "k8s_node_name", 'gpu_holders{k8s_cluster_name=~"$cluster"}')
IDLE = listed("idle", "idle for", ("1m", "5m", "15m", "1h", "6h"), "15m")

NOT_CUT = f'unless on ({DEVICE}) gpu_info{{{NODE_MATCHERS},mig_mode="enabled",gpu_mig_uuid=""}}'
"""Without the GPUs that are cut into MIG devices: it is those devices that can be held."""


def memory_of_gpus(metric: str, by: str = "") -> str:
    """A sum of memory in which each GPU counts once: by its own value or, without one, by its MIG devices'."""
    own, of_parts = (f'{metric}{{{NODE_MATCHERS},gpu_mig_uuid{match}""}}' for match in ("=", "!="))
    return f"sum by ({by}) ({own} or {of_parts} unless on ({GPU}) {own})"


# -- the fleet: all GPUs, and who has them

MEMORY_SHARE = f"{memory_of_gpus('gpu_memory_used')} / {memory_of_gpus('gpu_memory_total')}"
WORK = of_devices("gpu_utilization", f'{NODE_MATCHERS},gpu_mig_uuid=""')
OF_HELD = f"{WORK} and on ({DEVICE}) (gpu_holders{{{NODE_MATCHERS}}} > 0)"
BY_NODE, BY_MODEL = "k8s_cluster_name, k8s_node_name", "gpu_model, driver_version"
FLEET_BOARD = dashboard(
    "gpu-fleet",
    "GPU fleet",
    "How many GPUs there are, who holds them, and what they do.",
    [CLUSTER, NODE, IDLE],
    [
        tile("GPUs", "Physical GPUs, those without a pod among them.", number_of(gpus())),
        tile("Held", "GPUs that a pod or batch job holds, alone, shared or in a MIG device.", number_of(held_gpus())),
        tile("Shared", "GPUs and MIG devices that several pods or batch jobs hold.", number_of(f"{HOLDERS} > 1")),
        tile(
            "Held and idle",
            "GPUs and MIG devices that were held for the whole of the time chosen above, and did nothing in it.",
            number_of(idle_devices()),
            steps=LOOK_ABOVE_ZERO,
        ),
        tile("Alerts", "What fires, by the alert stream or by Prometheus.", firing_alerts(), steps=BAD_ABOVE_ZERO),
        tile(
            "Utilization of what is held",
            "The mean over GPUs that are held.",
            f"avg({OF_HELD})",
            "percentunit",
            SHARE_IS_GOOD,
        ),
        tile("Nodes", "Nodes with GPUs.", number_of(f"group by ({BY_NODE}) ({gpus()})")),
        tile("Memory used", "Of the memory of all GPUs.", MEMORY_SHARE, "percentunit", FULL),
        tile("Power", "What all GPUs draw.", f"sum(gpu_power_draw{{{NODE_MATCHERS}}})", "watt"),
        tile(
            "Hottest", "The highest temperature of a GPU.", f"max(gpu_temperature{{{NODE_MATCHERS}}})", "celsius", HOT
        ),
        tile(
            "Slowed down",
            "GPUs that heat keeps below their clocks.",
            number_of(f'max by ({GPU}) (gpu_throttle_reason{{{NODE_MATCHERS},gpu_throttle_cause=~"temp_.*"}}) > 0'),
            steps=BAD_ABOVE_ZERO,
        ),
        tile(
            "Not as the kubelet says",
            "Devices on which something else runs than the kubelet gave them to.",
            number_of(f"group by ({DEVICE}) (gpu_attribution_conflict{{{NODE_MATCHERS}}} == 1)"),
            steps=LOOK_ABOVE_ZERO,
        ),
        graph(
            "GPUs over time",
            "Physical GPUs: all, those that are held, and devices that are held and idle.",
            [
                ("all", number_of(gpus())),
                ("held", number_of(held_gpus())),
                ("held and idle (devices)", number_of(idle_devices())),
            ],
        ),
        graph(
            "Devices by namespace",
            "GPUs and MIG devices that its pods hold; of a shared one each pod has an equal part.",
            [("{{k8s_namespace_name}}", holding(NODE_MATCHERS, "k8s_namespace_name"))],
            stacked=True,
        ),
        graph(
            "Utilization",
            "Of the GPUs that are held: the mean, and what a tenth of them is below and above.",
            [
                ("mean", f"avg({OF_HELD})"),
                ("10 % are below", f"quantile(0.1, {OF_HELD})"),
                ("10 % are above", f"quantile(0.9, {OF_HELD})"),
            ],
            "percentunit",
        ),
        graph(
            "Devices' worth of work by namespace",
            "The sum of its pods' utilization: 1 is a GPU or MIG device that works all the time.",
            [("{{k8s_namespace_name}}", f"sum by (k8s_namespace_name) ({alone_or_part(*UTILIZATION, NODE_MATCHERS)})")],
            stacked=True,
        ),
        graph(
            "Power and its limit",
            "What all GPUs draw, and what they may.",
            [
                ("drawn", f"sum(gpu_power_draw{{{NODE_MATCHERS}}})"),
                ("limit", f"sum(gpu_power_limit{{{NODE_MATCHERS}}})"),
            ],
            "watt",
        ),
        graph(
            "Memory by namespace",
            "What its pods use, alone or as a part of a shared device.",
            [("{{k8s_namespace_name}}", f"sum by (k8s_namespace_name) ({alone_or_part(*MEMORY, NODE_MATCHERS)})")],
            "bytes",
            stacked=True,
        ),
        table(
            "All nodes",
            "Click on a node to see it.",
            "k8s_cluster_name k8s_node_name",
            [
                Column("GPUs", f"count by ({BY_NODE}) ({gpus()})"),
                Column("held", f"count by ({BY_NODE}) ({held_gpus()})"),
                Column("utilization", f"avg by ({BY_NODE}) ({WORK})", "percentunit", SHARE_IS_GOOD),
                Column("memory", memory_of_gpus("gpu_memory_used", BY_NODE), "bytes"),
                Column("power", f"sum by ({BY_NODE}) (gpu_power_draw{{{NODE_MATCHERS}}})", "watt"),
                Column("hottest", f"max by ({BY_NODE}) (gpu_temperature{{{NODE_MATCHERS}}})", "celsius", HOT),
                Column("alerts", f"count by ({BY_NODE}) (gpu_alert_firing{{{NODE_MATCHERS}}})", steps=BAD_ABOVE_ZERO),
            ],
            opens="k8s_node_name",
        ),
        table(
            "Models",
            "GPUs by model and driver.",
            "gpu_model driver_version",
            [Column("GPUs", f"count by ({BY_MODEL}) (group by ({GPU}, {BY_MODEL}) (gpu_info{{{NODE_MATCHERS}}}))")],
        ),
    ],
)


# -- one node: its devices, who holds them, what they do

OF_DEVICE = "gpu_index, gpu_uuid, gpu_mig_uuid, gpu_mig_profile, gpu_model"
BY_INDEX = "{{gpu_index}} {{gpu_mig_profile}}"
OF_INDEX = "gpu_index, gpu_mig_profile, gpu_mig_uuid"


def by_gpu(title: str, says: str, expr: str, unit: str, **more: object) -> Json:
    return graph(title, says, [(BY_INDEX, f"max by ({OF_INDEX}) ({expr})")], unit, **more)  # type: ignore[arg-type]


def by_device(metric: str) -> str:
    return f"max by ({OF_DEVICE}) ({metric}{{{NODE_MATCHERS}}})"


def use_of_pods(matchers: str, by: str) -> list[Column]:
    """What pods hold and use, alone or of shared devices."""
    return [
        Column("devices", holding(matchers, by)),
        Column("Devices' worth of work", f"sum by ({by}) ({alone_or_part(*UTILIZATION, matchers)})"),
        Column("memory", f"sum by ({by}) ({alone_or_part(*MEMORY, matchers)})", "bytes"),
        Column("power", f"sum by ({by}) ({alone_or_part(*POWER, matchers)})", "watt"),
    ]


NODE_BOARD = dashboard(
    "gpu-node",
    "GPU node",
    "The devices of a node, who holds them, and what they do.",
    [CLUSTER, choice("node", "k8s_node_name", 'gpu_holders{k8s_cluster_name=~"$cluster"}', single=True)],
    [
        tile("GPUs", "Physical GPUs of the node.", number_of(gpus())),
        tile("Held", "GPUs that at least one pod holds.", number_of(held_gpus())),
        tile("Pods", "Pods that hold a device.", number_of(f"gpu_pod_info{{{NODE_MATCHERS}}}")),
        tile("Power", "What its GPUs draw.", f"sum(gpu_power_draw{{{NODE_MATCHERS}}})", "watt"),
        tile(
            "Hottest", "The highest temperature of a GPU.", f"max(gpu_temperature{{{NODE_MATCHERS}}})", "celsius", HOT
        ),
        tile(
            "Alerts",
            "What the alert stream says of the node.",
            number_of(f"gpu_alert_firing{{{NODE_MATCHERS}}}"),
            steps=BAD_ABOVE_ZERO,
        ),
        table(
            "Devices",
            "GPUs and MIG devices. Click on a UUID to see all of the GPU.",
            "gpu_index gpu_uuid gpu_mig_profile gpu_mig_uuid gpu_model",
            [
                Column("pods", by_device("gpu_holders")),
                Column("utilization", of_devices("gpu_utilization", by=OF_DEVICE), "percentunit", SHARE_IS_GOOD),
                Column("memory", of_devices("gpu_memory_used", by=OF_DEVICE), "bytes"),
                Column("memory in all", by_device("gpu_memory_total"), "bytes"),
                Column("power", of_devices("gpu_power_draw", by=OF_DEVICE), "watt"),
                Column("temperature", by_device("gpu_temperature"), "celsius", HOT),
            ],
            opens="gpu_uuid",
        ),
        holders(
            "Which pod holds which GPU, and in which MIG device.",
            holding_pods(NODE_MATCHERS, OF_INDEX),
            f"{BY_INDEX} {{{{k8s_namespace_name}}}}/{{{{k8s_pod_name}}}}",
        ),
        by_gpu(
            "Utilization",
            "Share of the time in which a kernel ran.",
            of_devices("gpu_utilization", by=OF_DEVICE),
            "percentunit",
        ),
        by_gpu("Memory", "Memory in use.", of_devices("gpu_memory_used", by=OF_DEVICE), "bytes"),
        by_gpu("Power by GPU", "Power drawn.", of_devices("gpu_power_draw", by=OF_DEVICE), "watt"),
        by_gpu("Temperature", "Of the GPU.", f"gpu_temperature{{{NODE_MATCHERS}}}", "celsius", steps=HOT),
        by_gpu(
            "PCIe",
            "What goes over PCIe in both directions.",
            f"sum without (gpu_interconnect_direction) (gpu_pcie_throughput{{{NODE_MATCHERS}}})",
            "Bps",
        ),
        by_gpu(
            "NVLink",
            "What goes over NVLink in both directions; Hopper and later.",
            f"sum without (gpu_interconnect_direction) (gpu_interconnect_throughput{{{NODE_MATCHERS}}})",
            "Bps",
        ),
        table(
            "What pods use",
            "What each pod uses, alone or of shared devices.",
            "k8s_namespace_name k8s_pod_name",
            use_of_pods(NODE_MATCHERS, POD),
        ),
    ],
)


# -- one GPU: its every metric, and its holders as a timeline

THIS = f'{NODE_MATCHERS},gpu_uuid="$gpu"'
INSTANCE = "gpu_mig_uuid, gpu_mig_profile"
INFO = (
    "gpu_model gpu_mig_profile gpu_mig_uuid gpu_index serial driver_version cuda_version vbios_version mig_mode"
    " processes_visible"
)

TOPICS = {
    "Utilization": r"gpu_(utilization|memory_utilization|encode_utilization|decode_utilization)(_avg|_min|_max)?",
    "Engines": r"gpu_(gr_engine|sm|pipe|dram)_\w+",
    "Memory": r"gpu_memory_(used|free|total|reserved)",
    "Power": r"gpu_(power_draw|power_limit|energy_consumption)(_avg|_min|_max)?",
    "Temperature": r"gpu_(memory_)?temperature",
    "Clocks": r"gpu_(memory_)?clock_frequency",
    "PCIe and NVLink": r"gpu_(pcie|interconnect)_throughput",
    "Why the clocks are down": r"gpu_throttle_reason",
    "Time with the clocks kept down": r"gpu_violation_time",
    "Memory errors": r"gpu_(ecc|row_remap|retired_pages)\w*",
    "Link errors": r"gpu_(pcie_replay|interconnect_(crc|replays|recoveries))\w*",
}
"""The panels of a GPU's metrics, and the names in each; what is in none has a panel of its own."""

UNITS = {
    "ratio": "percentunit",
    "percent": "percent",
    "bytes": "bytes",
    "bytes_per_second": "Bps",
    "watts": "watt",
    "millijoules": "watt",
    "celsius": "celsius",
    "megahertz": "rotmhz",
    "seconds": "percentunit",
}
"""Grafana's unit by that of a series, as it is shown: energy by its rate, which is power, and time by its share. All
else is a number."""


def legend_and_query(series: Series) -> tuple[str, str]:
    """The legend and the query of a name: counters by how fast they count, each event by itself."""
    labels = [label for label, _ in series.labels]
    by = ", ".join([INSTANCE, *labels])
    legend = " ".join(
        ["{{gpu_mig_profile}}", series.name.removeprefix("gpu_"), *(f"{{{{{label}}}}}" for label in labels)]
    )
    if series.name in DIVIDED:
        return legend, of_devices(series.name, THIS, by)
    if series.kind != "counter":
        return legend, f"max by ({by}) ({series.name}{{{THIS}}})"
    if series.unit == "millijoules":
        return f"{legend}, as power", f"sum by ({by}) (rate({series.name}{{{THIS}}}[$__rate_interval])) / 1000"
    function = "rate" if series.unit in UNITS else "increase"
    return legend, f"sum by ({by}) ({function}({series.name}{{{THIS}}}[$__rate_interval]))"


def metrics() -> Iterator[Json]:
    """A panel for each topic, and one for each name that is in no topic."""
    otel = PROFILES["otel"]
    remaining = {series.name: series for group in otel.series.values() for series in group}
    remaining |= {
        series.name: Series(series.name, series.labels, unit=series.unit, help=series.help) for series in otel.ratios
    }
    panels = [
        (title, [remaining.pop(name) for name in [*remaining] if re.fullmatch(pattern, name)])
        for title, pattern in TOPICS.items()
    ]
    panels += [
        (name.removeprefix("gpu_").replace("_", " ").capitalize(), [series]) for name, series in remaining.items()
    ]
    for title, panel_series in panels:
        description = " ".join(dict.fromkeys(series.help for series in panel_series))
        yield graph(
            title,
            description,
            [legend_and_query(series) for series in panel_series],
            UNITS.get(panel_series[0].unit, "short"),
        )


GPU_BOARD = dashboard(
    "gpu-device",
    "GPU",
    "One GPU: its holders, and every metric that it has.",
    [
        CLUSTER,
        NODE,
        choice("gpu", "gpu_uuid", 'gpu_info{k8s_cluster_name=~"$cluster",k8s_node_name=~"$node"}', single=True),
    ],
    [
        holders(
            "Which pod holds the GPU, or which MIG device of it.",
            holding_pods(THIS, INSTANCE),
            "{{gpu_mig_profile}} {{k8s_namespace_name}}/{{k8s_pod_name}}",
        ),
        tile("Pods", "How many hold it, or the MIG device that most hold.", f"max(gpu_holders{{{THIS}}})", width=6),
        tile(
            "Alerts",
            "What the alert stream says of it.",
            number_of(f"gpu_alert_firing{{{THIS}}}"),
            steps=BAD_ABOVE_ZERO,
            width=6,
        ),
        tile("Temperature now", "Of the GPU.", f"max(gpu_temperature{{{THIS}}})", "celsius", HOT, width=6),
        tile("Power now", "What it draws.", f"max({of_devices('gpu_power_draw', THIS)})", "watt", width=6),
        table(
            "What it is",
            "The GPU and its MIG devices.",
            INFO,
            [Column("there", f"max by ({', '.join(INFO.split())}) (gpu_info{{{THIS}}})")],
        ),
        *metrics(),
        row("Of pods"),
        *[
            graph(
                f"{title} by pod",
                "The parts of the pods that share it, and what is nobody's.",
                [
                    (
                        "{{gpu_mig_profile}} {{k8s_namespace_name}}/{{k8s_pod_name}}",
                        f"sum by ({INSTANCE}, {POD}) ({part}{{{THIS}}})",
                    ),
                    ("{{gpu_mig_profile}} nobody's", f"sum by ({INSTANCE}) ({rest}{{{THIS}}})"),
                ],
                unit,
                stacked=True,
                width=8,
            )
            for title, part, rest, unit in (
                ("Utilization", "gpu_pod_utilization_ratio", "gpu_unattributed_utilization_ratio", "percentunit"),
                ("Memory", "gpu_pod_memory_used_bytes", "gpu_unattributed_memory_used_bytes", "bytes"),
                ("Power", "gpu_pod_power_watts", "gpu_unattributed_power_watts", "watt"),
            )
        ],
        graph(
            "XID errors",
            "Counted by code since the node's producer started.",
            [("XID {{xid}}", f"sum by (xid) (gpu_xid_errors_total{{{THIS}}})")],
        ),
        graph(
            "Doubts",
            "1 while the processes say otherwise than the kubelet, and while parts were scaled down to the device.",
            [
                ("{{reason}}", f"max by (reason) (gpu_attribution_conflict{{{THIS}}})"),
                ("scaled", f"max(gpu_split_scaled{{{THIS}}})"),
            ],
        ),
    ],
)
