"""Producers: the world -> Kafka."""

from delivery.settings import ComponentSpec

PRODUCERS = {
    "node": ComponentSpec(
        component="producers.node.component:NodeProducer",
        settings="producers.node.config:NodeSettings",
        writes=("gpu.samples", "gpu.allocations"),
        optional=("gpu.workloads",),
        help="This machine's GPUs, and the pods and processes that have them.",
        example=(
            "gpustream produce node --kafka kafka-0:9092 --cluster prod-us-east-1\n"
            "gpustream produce node --kafka kafka-0:9092 --pod-resources-socket off    # a machine without Kubernetes"
        ),
        light=True,
    ),
    "cluster": ComponentSpec(
        component="producers.cluster.component:ClusterProducer",
        settings="producers.cluster.config:ClusterSettings",
        writes=("gpu.workloads",),
        keeps=("gpu.workloads",),
        optional=("gpu.samples", "gpu.allocations"),
        help=(
            "What the Kubernetes API server says of the pods that have GPUs, for all nodes: owners, labels, life times."
            " Run two; a Lease decides which of them publishes."
        ),
        example=(
            "gpustream produce cluster --kafka kafka-0:9092 --cluster prod-us-east-1\n"
            "gpustream produce cluster --kafka 127.0.0.1:9092 --kubeconfig ~/.kube/config --lease off"
        ),
    ),
    "replay": ComponentSpec(
        component="producers.replay.component:TraceReplay",
        settings="producers.replay.config:ReplaySettings",
        writes=("gpu.samples", "gpu.allocations", "gpu.workloads"),
        help=(
            "A published trace of a GPU cluster, with its own times: who used what, to be counted by anybody. A second"
            " replay of a trace needs another --topic-prefix or --cluster, because no time is counted twice."
        ),
        example=(
            "gpustream produce replay --kafka 127.0.0.1:9092 --trace alibaba-genai ./cluster-trace-v2026-GenAI\n"
            "gpustream produce replay --kafka 127.0.0.1:9092 --speed 600 \\\n"
            "    --trace alibaba-gpu-2023 ./cluster-trace-gpu-v2023"
        ),
    ),
    "simulated": ComponentSpec(
        component="producers.simulated.component:SimulatedFleet",
        settings="producers.simulated.config:SimulatedSettings",
        writes=("gpu.samples", "gpu.allocations", "gpu.workloads"),
        help="A fleet that is not there: nodes, GPUs, pods that come and go, and a kubelet that lags.",
        example="gpustream produce simulated --kafka 127.0.0.1:9092 --fleet 100x8 --seed 1 --truth truth.jsonl",
    ),
}
