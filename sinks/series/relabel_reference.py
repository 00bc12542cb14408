"""The tables of the page ``docs/how-to/labels.md``: ``python -m sinks.series.relabel_reference [--check]``.

In: the page; the presets, and what rules of relabelling can see. Out: the page with these as Markdown, each below its
mark; the rest of the page is as it was.
"""

import sys
from pathlib import Path
from typing import get_args

from sinks.series.labels import META
from sinks.series.relabel_presets import PRESETS
from topics.profiles import Attribute
from topics.reference import filled, generate, table

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "labels.md"

_MEANING = {
    "uuid": "the device's UUID: a MIG device's own",
    "gpu_uuid": "the UUID of the physical GPU",
    "index": "the GPU's number",
    "instance": "the node and port 9400",
    "device": "`nvidia0`, `nvidia1`, ...",
    "gpu_instance": "the number of the MIG device's GPU instance",
    "job_id": "the id of the batch job that runs on the GPU",
    "job_user": "the batch job's user",
    "job_partition": "the batch job's partition",
    "job_account": "the batch job's account",
    "zone": "the node's zone",
    "region": "the node's region",
    "host_type": "the type of the machine",
    "service": "`gpustream`",
    "mig_uuid": "the MIG device's own UUID",
    "mig_profile": "the MIG device's profile, such as `1g.10gb`",
    "mig_mode": "`enabled` or `disabled`",
    "processes_visible": "`true` if its processes can be seen, or `false`",
    "job": "the Kubernetes Job that owns the pod",
    "statefulset": "the StatefulSet that owns the pod",
    "deployment": "the Deployment that owns the pod",
    "workload_kind": "the kind of the pod's workload, such as `CronJob`",
    "workload_name": "the name of the pod's workload",
}


def markdown() -> str:
    """The page as it is to be."""
    presets = [(f"`{preset.name}`", preset.purpose) for preset in PRESETS]
    meta = [(f"`{META}{name}`", _MEANING.get(name, f"the {name.replace('_', ' ')}")) for name in get_args(Attribute)]
    meta += [
        (f"`{META}pod_label_NAME`", "what is written on the pod; what may not be in a name is `_`"),
        (f"`{META}namespace_label_NAME`", "what is written on the pod's namespace"),
    ]
    tables = {
        "presets": table(("preset", "adds"), presets),
        "meta": table(("label", "what it says"), meta),
    }
    return filled(PAGE, tables)


if __name__ == "__main__":
    sys.exit(generate({PAGE: markdown()}, "sinks.series.relabel_reference", sys.argv[1:]))
