"""The commands that run one component each, as a table: what they are called, what help says, what they take."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gpustream import options as o
from gpustream.options import option
from producers import PRODUCERS
from sinks import SINKS


class Served(NamedTuple):
    """A command that runs one component for as long as the process lives; a ``light`` one in little memory."""

    group: Literal["produce", "sink"]
    name: str
    registry: Mapping[str, str]
    help: str
    example: str
    options: tuple[o.Decorator[Any], ...]
    light: bool = False


SERVED = (
    Served(
        group="produce",
        name="node",
        registry=PRODUCERS,
        help="This machine's GPUs, and the pods and processes that have them.",
        example=(
            "gpustream produce node --kafka kafka-0:9092 --cluster prod-us-east-1\n"
            "gpustream produce node --kafka kafka-0:9092 --pod-resources-socket off    # a machine without Kubernetes"
        ),
        options=(
            o.NODE,
            o.INTERVAL,
            o.reading_a_node,
            o.BUFFER,
            option(
                "--buffer-size", type=o.SIZE, default="16MiB", help="And how many bytes of them; the oldest give way."
            ),
        ),
        light=True,
    ),
    Served(
        group="produce",
        name="cluster",
        registry=PRODUCERS,
        help=(
            "What the Kubernetes API server says of the pods that have GPUs, for all nodes: owners, labels, life times."
            " Run two; a Lease decides which of them publishes."
        ),
        example=(
            "gpustream produce cluster --kafka kafka-0:9092 --cluster prod-us-east-1\n"
            "gpustream produce cluster --kafka 127.0.0.1:9092 --kubeconfig ~/.kube/config --lease off"
        ),
        options=(o.reading_a_cluster,),
    ),
    Served(
        group="produce",
        name="simulated",
        registry=PRODUCERS,
        help="A fleet that is not there: nodes, GPUs, pods that come and go, and a kubelet that lags.",
        example="gpustream produce simulated --kafka 127.0.0.1:9092 --fleet 100x8 --seed 1 --truth truth.jsonl",
        options=(
            option("--fleet", type=o.FLEET_SIZE, default="4x8", help="So many nodes of so many GPUs."),
            o.INTERVAL,
            o.simulation,
            o.BUFFER,
        ),
    ),
    Served(
        group="sink",
        name="remote-write",
        registry=SINKS,
        help="Every value to Prometheus, Mimir or any other remote-write receiver, once.",
        example=(
            "gpustream sink remote-write --kafka 127.0.0.1:9092 --url http://127.0.0.1:9090/api/v1/write\n"
            "gpustream sink remote-write --kafka kafka-0:9092,kafka-1:9092 --url https://mimir/api/v1/push \\\n"
            "    --header 'X-Scope-OrgID: ml' --bearer-token-file /etc/gpustream/token"
        ),
        options=(
            option("--url", type=o.URL, required=True, help="Where to write to, as given."),
            o.PROTOCOL,
            o.over_http,
            o.naming,
            o.MAX_LABELS,
            o.consuming,
            o.start_from("1h"),
        ),
    ),
    Served(
        group="sink",
        name="scrape",
        registry=SINKS,
        help=(
            "The latest value of every series on /metrics, as Prometheus text or OpenMetrics, whichever the scraper"
            " asks for. In place of dcgm-exporter with --names dcgm, of pod-devices-exporter with --names dcgm-legacy"
            " --labels pod-devices."
        ),
        example=(
            "gpustream sink scrape --kafka 127.0.0.1:9092 --scrape-listen 0.0.0.0:9400 --names dcgm\n"
            "gpustream sink scrape --kafka 127.0.0.1:9092 --names dcgm-legacy --labels pod-devices"
        ),
        options=(
            option(
                "--scrape-listen",
                type=o.LISTEN,
                default="127.0.0.1:9400",
                help="Where the GPUs' /metrics is served; --listen stays this process's own.",
            ),
            o.naming,
            o.MAX_LABELS,
            o.consuming,
            o.start_from("latest"),
        ),
    ),
    Served(
        group="sink",
        name="alertmanager",
        registry=SINKS,
        help=(
            "The open alerts to one or several Alertmanagers, again and again as they expect, and that they are over."
            " Each Alertmanager gets all, in a consumer group of its own where there are several."
        ),
        example=(
            "gpustream sink alertmanager --kafka 127.0.0.1:9092 --url http://127.0.0.1:9093\n"
            "gpustream sink alertmanager --kafka kafka-0:9092 --url http://alertmanager-0:9093 \\\n"
            "    --url http://alertmanager-1:9093"
        ),
        options=(
            option(
                "--url",
                type=o.URL,
                multiple=True,
                required=True,
                help="An Alertmanager, without /api/v2/alerts. Repeatable; in the variable, separated by spaces.",
            ),
            option(
                "--resend",
                type=o.DURATION,
                default="1m",
                help="How often what is open is told again. Where this sink is gone, alerts end after four times that.",
            ),
            option("--generator-url", type=o.URL, help="Where notifications link to as the source of an alert."),
            o.over_http,
            o.in_a_group,
            o.start_from("1h"),
        ),
    ),
    Served(
        group="sink",
        name="webhook",
        registry=SINKS,
        help=(
            "One JSON POST for each alert that fires or is resolved: the record of gpu.alerts, signed, with the"
            " transition's identity as Idempotency-Key, in order for each alert."
        ),
        example=(
            "gpustream sink webhook --kafka 127.0.0.1:9092 --url https://hooks.example/gpu \\\n"
            "    --secret-file /etc/gpustream/key\n"
            "gpustream sink webhook --kafka 127.0.0.1:9092 --url http://127.0.0.1:8080/ --unsigned"
        ),
        options=(
            option("--url", type=o.URL, required=True, help="Where to post to, as given."),
            o.SIGNED,
            o.over_http,
            o.in_a_group,
            o.start_from("1h"),
        ),
    ),
)
