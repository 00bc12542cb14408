"""Rules of relabelling by name, for labels that people have in their dashboards."""

from typing import NamedTuple

from sinks.series.labels import META

PRESET = "preset:"


class Preset(NamedTuple):
    """Rules by name. ``purpose`` says who needs them."""

    name: str
    purpose: str
    rules: str


def _copies(**labels: str) -> str:
    """Rules that give labels what is known of the device and its holder; what is not known changes nothing."""
    rules = [f"- {{source_labels: [{META}{of}], regex: (.+), target_label: {name}}}\n" for name, of in labels.items()]
    return "".join(rules)


PRESETS: tuple[Preset, ...] = (
    Preset(
        "hostname",
        "`Hostname`, as dcgm-exporter called the node before 4.8.3, beside `hostname`.",
        _copies(Hostname="node"),
    ),
    Preset(
        "exported",
        "`exported_namespace`, `exported_pod` and `exported_container`: so Prometheus calls the workload's labels when"
        " it scrapes dcgm-exporter without `honor_labels`. `namespace`, `pod` and `container` stay the workload's.",
        _copies(exported_namespace="namespace", exported_pod="pod", exported_container="container"),
    ),
    Preset(
        "pod-uid",
        "The pod's uid as `pod_uid`, as dcgm-exporter has it, and as `uid`, as kube-state-metrics has it.",
        _copies(pod_uid="pod_uid", uid="pod_uid"),
    ),
    Preset(
        "hpc-job",
        "`hpc_job`: the id of the batch job that runs on the GPU, as dcgm-exporter calls it.",
        _copies(hpc_job="job_id"),
    ),
    Preset(
        "instance",
        "`instance`: the node and port 9400, as if an exporter on each node were scraped. With the labels of `dcgm` it"
        " is there anyway. `job`, a scrape's other label, is a constant: `--external-label job=dcgm-exporter`.",
        _copies(instance="instance"),
    ),
    Preset(
        "kubernetes",
        "`namespace`, `pod`, `container` and `node`, with any label set: by these names series are joined with those of"
        " kube-state-metrics and of the kubelet.",
        _copies(namespace="namespace", pod="pod", container="container", node="node"),
    ),
    Preset(
        "pod-labels",
        "What is written on the pod: each label as `label_NAME`, as kube-state-metrics calls it.",
        f"- {{action: labelmap, regex: {META}pod_label_(.+), replacement: label_$1}}\n",
    ),
)
"""What ``--relabel preset:NAME`` picks from. None of them takes a label away."""
