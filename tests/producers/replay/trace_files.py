"""Trace files in the published formats: the headers are as published, the rows are invented."""

from pathlib import Path

DUTY = "pod_gpu_duty_cycle_anon.csv"
MEMORY = "pod_gpu_memory_used_bytes_anon.csv"
NODES = "openb_node_list_gpu_node.csv"
PODS = "openb_pod_list_default.csv"
PODS_HEAD = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
)


def genai(folder: Path, duty: list[str], memory: list[str]) -> Path:
    """A folder of alibaba-genai: rows of value,timestamp,container and timestamp,value,container, as published."""
    (folder / DUTY).write_text("\n".join(["value,timestamp_anon,container_ip", *duty]) + "\n")
    (folder / MEMORY).write_text("\n".join(["timestamp_anon,value,container_ip", *memory]) + "\n")
    return folder


def gpu_2023(folder: Path, nodes: list[str], pods: list[str]) -> Path:
    """A folder of alibaba-gpu-2023 with these rows; they lie in its ``csv``, as published."""
    (folder / "csv").mkdir()
    (folder / "csv" / NODES).write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *nodes]) + "\n")
    (folder / "csv" / PODS).write_text("\n".join([PODS_HEAD, *pods]) + "\n")
    return folder


def pod(name: str, gpus: int, milli: int, start_s: int, end_s: int, spec: str = "") -> str:
    """A row of a pod that ran."""
    return f"{name},4000,15258,{gpus},{milli},{spec},LS,Running,{start_s},{end_s},{start_s}"
