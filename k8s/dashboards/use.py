"""The dashboards of who has what and what comes of it: workloads, idle GPUs, and what was used, by hour."""

from k8s.dashboards.gpus import CLUSTER, IDLE, NODE, NOT_CUT, use_of_pods
from k8s.dashboards.panel import (
    BAD_ABOVE_ZERO,
    LOOK_ABOVE_ZERO,
    SHARE_IS_BAD,
    SHARE_IS_GOOD,
    Column,
    choice,
    dashboard,
    graph,
    row,
    table,
    tile,
    typed,
)
from k8s.dashboards.queries import (
    DEVICE,
    HOLDERS,
    MEMORY,
    NODE_MATCHERS,
    ONE_HOUR,
    POD,
    POWER,
    UTILIZATION,
    WORKLOAD,
    WORKLOAD_MATCHERS,
    alone_or_part,
    holding,
    idle_devices,
    idle_pods,
    number_of,
    of_devices,
    or_zero,
)

NAMESPACE = choice("namespace", "k8s_namespace_name", 'gpu_pod_info{k8s_cluster_name=~"$cluster"}')


# -- what workloads hold and do

DID, MEMORY_USED, DREW = (alone_or_part(*metrics, WORKLOAD_MATCHERS) for metrics in (UTILIZATION, MEMORY, POWER))
OF_ALONE = (
    f'gpu_utilization{{{WORKLOAD_MATCHERS},gpu_mig_uuid=""}} and on ({DEVICE}) gpu_holders{{{WORKLOAD_MATCHERS}}}'
)
LEGEND = "{{k8s_namespace_name}}/{{k8s_workload_name}}"
CHOSEN = choice(
    "workload", "k8s_workload_name", 'gpu_pod_info{k8s_cluster_name=~"$cluster",k8s_namespace_name=~"$namespace"}'
)
PODS = "k8s_namespace_name, k8s_pod_name, k8s_node_name"
XIDS = f"sum_over_time(gpu_pod_xid_errors{{{WORKLOAD_MATCHERS}}}[$__range])"


def by_workload(quantity: str) -> str:
    return f"sum by ({WORKLOAD}) ({quantity})"


WORKLOADS_BOARD = dashboard(
    "gpu-workload",
    "GPU workloads",
    "What each workload holds and does, on GPUs of its own and on shared ones.",
    [CLUSTER, NAMESPACE, CHOSEN],
    [
        tile(
            "Workloads",
            "Deployments, Jobs and other owners of pods that hold a GPU.",
            number_of(f"group by ({WORKLOAD}) (gpu_pod_info{{{WORKLOAD_MATCHERS}}})"),
        ),
        tile("Pods", "Pods that hold a device.", number_of(f"gpu_pod_info{{{WORKLOAD_MATCHERS}}}")),
        tile(
            "Devices",
            "GPUs and MIG devices that they hold; a shared one counts by their part.",
            or_zero(f"sum({holding(WORKLOAD_MATCHERS, 'k8s_namespace_name')})"),
        ),
        tile(
            "Devices' worth of work",
            "The sum of their utilization: 1 is a GPU or MIG device that works all the time.",
            f"sum({DID})",
        ),
        tile("Memory", "What they use.", f"sum({MEMORY_USED})", "bytes"),
        tile("Power", "What their work draws.", f"sum({DREW})", "watt"),
        *[
            graph(f"{title} by workload", f"By workload{says}.", [(LEGEND, query)], unit, stacked=True)
            for title, says, query, unit in (
                ("Devices", "; a shared device counts by its part", holding(WORKLOAD_MATCHERS, WORKLOAD), "short"),
                ("Devices' worth of work", ": the sum of its pods' utilization", by_workload(DID), "short"),
                ("Memory", "", by_workload(MEMORY_USED), "bytes"),
                ("Power", "", by_workload(DREW), "watt"),
            )
        ],
        graph(
            "Tensor cores",
            "Share of the time in which they work, of the devices that a workload holds alone; Hopper and later.",
            [(LEGEND, f"avg by ({WORKLOAD}) (gpu_pipe_tensor_active{{{WORKLOAD_MATCHERS}}})")],
            "percentunit",
        ),
        graph(
            "Utilization",
            "Mean of the devices that a workload holds alone.",
            [(LEGEND, f"avg by ({WORKLOAD}) ({OF_ALONE})")],
            "percentunit",
        ),
        table(
            "Workloads and what they hold",
            "Now.",
            "k8s_cluster_name k8s_namespace_name k8s_workload_kind k8s_workload_name",
            [
                *use_of_pods(WORKLOAD_MATCHERS, WORKLOAD),
                Column(
                    "alerts", f"count by ({WORKLOAD}) (gpu_alert_firing{{{WORKLOAD_MATCHERS}}})", steps=BAD_ABOVE_ZERO
                ),
            ],
            opens="k8s_workload_name",
        ),
        table(
            "Pods and what they do",
            "Now.",
            "k8s_namespace_name k8s_pod_name k8s_node_name",
            use_of_pods(WORKLOAD_MATCHERS, PODS)[:-1],
        ),
        table(
            "XID errors of its pods",
            "Those that came while the pod alone held the GPU, in the time shown.",
            "k8s_namespace_name k8s_pod_name xid",
            [Column("errors", f"sum by ({POD}, xid) ({XIDS})", steps=BAD_ABOVE_ZERO)],
        ),
    ],
)


# -- what is held and not used

HERE = f'{NODE_MATCHERS},k8s_namespace_name=~"$namespace"'
IDLE_PODS, ON_DEVICE = idle_pods(HERE), f"{DEVICE}, {POD}"
IDLE_DEVICES = idle_devices()
MEMORY_BLOCKED = alone_or_part(*MEMORY, HERE)
POWER_DRAWN = alone_or_part(*POWER, HERE)
ALERTED = f'sum_over_time(gpu_alert_firing{{{HERE},alertname="GPUHeldIdle"}}[$__range:1m])'


def of_idle(quantity: str) -> str:
    """A quantity of the pods that idle, on the devices on which they do."""
    return f"sum by ({ON_DEVICE}) ({quantity}) and on ({ON_DEVICE}) ({IDLE_PODS})"


ON_GPU = f"k8s_node_name, gpu_uuid, {POD}"
IDLE_BOARD = dashboard(
    "gpu-idle",
    "Idle GPUs and waste",
    "What is held and not used. A pod idles if it did nothing for all of the time chosen above.",
    [CLUSTER, NODE, NAMESPACE, IDLE],
    [
        tile(
            "Held and idle",
            "GPUs and MIG devices that were held for the whole time and did nothing.",
            number_of(IDLE_DEVICES),
            steps=LOOK_ABOVE_ZERO,
        ),
        tile(
            "Of what is held",
            "The share of held devices that idle.",
            f"({number_of(IDLE_DEVICES)}) / count({HOLDERS} > 0)",
            "percentunit",
            SHARE_IS_BAD,
        ),
        tile(
            "Held by nobody",
            "GPUs and MIG devices that could be used, without GPUs that are cut into MIG devices.",
            number_of(f"({HOLDERS} == 0) {NOT_CUT}"),
        ),
        tile(
            "Pods that idle",
            "Also those whose part of a shared GPU does nothing.",
            number_of(f"group by (k8s_cluster_name, k8s_node_name, {POD}) ({IDLE_PODS})"),
            steps=LOOK_ABOVE_ZERO,
        ),
        tile(
            "Memory that they block",
            "On the devices on which they do nothing.",
            or_zero(f"sum({of_idle(MEMORY_BLOCKED)})"),
            "bytes",
        ),
        tile(
            "Power for nothing",
            "What devices that are held and idle draw.",
            or_zero(f"sum({of_devices('gpu_power_draw')} and on ({DEVICE}) ({IDLE_DEVICES}))"),
            "watt",
        ),
        graph(
            "Pods that idle, by namespace",
            "Each pod counts once for each device.",
            [("{{k8s_namespace_name}}", f"count by (k8s_namespace_name) ({IDLE_PODS})")],
            stacked=True,
        ),
        graph(
            "Devices",
            "GPUs and MIG devices.",
            [("held and idle", number_of(IDLE_DEVICES)), ("held", number_of(f"{HOLDERS} > 0"))],
        ),
        table(
            "Pods and what they block",
            "For all of the time chosen above.",
            "k8s_node_name gpu_uuid k8s_namespace_name k8s_pod_name",
            [
                Column("memory", f"sum by ({ON_GPU}) ({of_idle(MEMORY_BLOCKED)})", "bytes"),
                Column("power", f"sum by ({ON_GPU}) ({of_idle(POWER_DRAWN)})", "watt"),
            ],
        ),
        table(
            "Idle GPU-hours by alerts",
            "For how long alerts of GPUHeldIdle fired in the time shown, times the GPUs that they were about."
            " A MIG device counts as one, and a shared GPU once for each of its idle pods.",
            "k8s_namespace_name",
            [Column("hours", f"sum by (k8s_namespace_name) ({ALERTED}) / 60", "h", LOOK_ABOVE_ZERO)],
        ),
    ],
)


USED = 'k8s_cluster_name=~"$cluster",k8s_namespace_name=~"$namespace",team=~"$team"'


# -- who uses the fleet: hours that are final, each one sample at its end


def over_time(name: str, window: str = "$__range") -> str:
    return f"sum_over_time(gpu_usage_{name}{{{USED}}}[{window}])"


def hours(category: str, window: str = "$__range") -> str:
    """GPU-hours, in seconds: what was used and wasted of a device, in proportion to the part of a GPU that it is."""
    held = over_time("held_gpu_seconds", window)
    if category == "held":
        return held
    return f"{over_time(f'{category}_seconds', window)} * {held} / {over_time('held_seconds', window)}"


ENERGY = f"{over_time('energy_joules')} and {over_time('held_seconds')}"


def columns(by: str) -> list[Column]:
    held = hours("held")
    return [
        Column("held", f"sum by ({by}) ({held}) / 3600", "h"),
        Column("used", f"sum by ({by}) ({hours('used')}) / 3600", "h"),
        Column("wasted", f"sum by ({by}) ({hours('idle')}) / 3600", "h", LOOK_ABOVE_ZERO),
        Column("share used", f"sum by ({by}) ({hours('used')}) / sum by ({by}) ({held})", "percentunit", SHARE_IS_GOOD),
        Column("energy", f"sum by ({by}) ({ENERGY}) / 3600", "watth"),
        Column("cost", f"sum by ({by}) ({held}) / 3600 * $price"),
    ]


total, team = "sum({}) / 3600", "{{team}}"
FREE = 'sum_over_time(gpu_usage_free_gpu_seconds{k8s_cluster_name=~"$cluster"}[$__range])'
HELD_SECONDS = 'gpu_usage_held_seconds{k8s_cluster_name=~"$cluster"}'
USAGE_BOARD = dashboard(
    "gpu-usage",
    "Who uses the fleet",
    "GPU-hours that were held, used and wasted, by whom. An hour of gpu.usage is here when it is final.",
    [
        choice("cluster", "k8s_cluster_name", "gpu_usage_held_seconds"),
        choice("namespace", "k8s_namespace_name", HELD_SECONDS),
        choice("team", "team", HELD_SECONDS),
        typed("price", "price of a GPU-hour", "2.50"),
    ],
    [
        tile(
            "Held",
            "GPU-hours that somebody held: a MIG device counts by its compute slices.",
            total.format(hours("held")),
            "h",
        ),
        tile("Used", "GPU-hours of work.", total.format(hours("used")), "h"),
        tile(
            "Wasted",
            "GPU-hours that were held while nothing was done.",
            total.format(hours("idle")),
            "h",
            LOOK_ABOVE_ZERO,
        ),
        tile("Free", "GPU-hours that nobody held, of the clusters chosen.", total.format(FREE), "h"),
        tile("Energy", "Of what was held.", f"sum({ENERGY}) / 3600", "watth"),
        tile("Cost", "Of what was held, by the price above.", f"sum({hours('held')}) / 3600 * $price"),
        tile(
            "Used of what was held",
            "The share of it that was work.",
            f"sum({hours('used')}) / sum({hours('held')})",
            "percentunit",
            SHARE_IS_GOOD,
        ),
        tile(
            "Wasted of what was held",
            "The share in which nothing was done.",
            f"sum({hours('idle')}) / sum({hours('held')})",
            "percentunit",
            SHARE_IS_BAD,
        ),
        tile(
            "Cost of what was wasted",
            "By the price above.",
            f"sum({hours('idle')}) / 3600 * $price",
            steps=LOOK_ABOVE_ZERO,
        ),
        row("Over time"),
        *[
            graph(
                f"{title} by team",
                "GPU-hours of each hour.",
                [(team, f"sum by (team) ({hours(category, window=ONE_HOUR)}) / 3600")],
                "h",
                stacked=True,
                bars=True,
                interval="1h",
            )
            for title, category in (("Held", "held"), ("Used", "used"), ("Wasted", "idle"))
        ],
        graph(
            "Cost by team",
            "Of what was held in each hour, by the price above.",
            [(team, f"sum by (team) ({hours('held', window=ONE_HOUR)}) / 3600 * $price")],
            stacked=True,
            bars=True,
            interval="1h",
        ),
        table("Teams", "In the time shown.", "team", columns("team")),
        table(
            "Namespaces",
            "In the time shown.",
            "k8s_cluster_name k8s_namespace_name",
            columns("k8s_cluster_name, k8s_namespace_name"),
        ),
        table(
            "Workloads",
            "In the time shown.",
            "k8s_cluster_name k8s_namespace_name k8s_workload_kind k8s_workload_name",
            columns(WORKLOAD),
        ),
    ],
    since="now-7d",
)
