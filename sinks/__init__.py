"""Kafka -> the world: each sink reads what it needs of gpu.attributed, gpu.alerts and gpu.usage, in its own group."""

from delivery.settings import ComponentSpec

SINKS = {
    "remote-write": ComponentSpec(
        component="sinks.remote_write.sink:RemoteWriteSink",
        settings="sinks.remote_write.config:RemoteWriteSettings",
        reads=("gpu.attributed", "gpu.alerts", "gpu.usage"),
        help="Every value to Prometheus, Mimir or any other remote-write receiver, once.",
        example=(
            "gpustream sink remote-write --kafka 127.0.0.1:9092 --url http://127.0.0.1:9090/api/v1/write\n"
            "gpustream sink remote-write --kafka kafka-0:9092,kafka-1:9092 --url https://mimir/api/v1/push \\\n"
            "    --header 'X-Scope-OrgID: ml' --bearer-token-file /etc/gpustream/token"
        ),
    ),
    "scrape": ComponentSpec(
        component="sinks.scrape.sink:ScrapeSink",
        settings="sinks.scrape.config:ScrapeSettings",
        reads=("gpu.attributed",),
        help=(
            "The latest value of every series on /metrics, as Prometheus text. In place of dcgm-exporter with --names"
            " dcgm, of pod-devices-exporter with --names dcgm-legacy --labels pod-devices."
        ),
        example=(
            "gpustream sink scrape --kafka 127.0.0.1:9092 --scrape-listen 0.0.0.0:9400 --names dcgm\n"
            "gpustream sink scrape --kafka 127.0.0.1:9092 --names dcgm-legacy --labels pod-devices"
        ),
    ),
    "alertmanager": ComponentSpec(
        component="sinks.alertmanager:AlertmanagerSink",
        settings="sinks.settings:AlertmanagerSettings",
        reads=("gpu.alerts",),
        help=(
            "The open alerts to one or several Alertmanagers, again and again as they expect, and that they are over."
            " Each Alertmanager gets all, in a consumer group of its own if there are several."
        ),
        example=(
            "gpustream sink alertmanager --kafka 127.0.0.1:9092 --url http://127.0.0.1:9093\n"
            "gpustream sink alertmanager --kafka kafka-0:9092 --url http://alertmanager-0:9093 \\\n"
            "    --url http://alertmanager-1:9093"
        ),
        group_of_each_receiver=True,
    ),
    "webhook": ComponentSpec(
        component="sinks.webhook:WebhookSink",
        settings="sinks.settings:WebhookSettings",
        reads=("gpu.alerts",),
        help=(
            "One JSON POST for each alert that fires or is resolved: the record of gpu.alerts, signed, with the"
            " transition's identity as Idempotency-Key, in order for each alert."
        ),
        example=(
            "gpustream sink webhook --kafka 127.0.0.1:9092 --url https://hooks.example/gpu \\\n"
            "    --secret-file /etc/gpustream/key\n"
            "gpustream sink webhook --kafka 127.0.0.1:9092 --url http://127.0.0.1:8080/ --unsigned"
        ),
    ),
    "metrics-api": ComponentSpec(
        component="sinks.metrics_api.sink:MetricsApiSink",
        settings="sinks.metrics_api.config:MetricsApiSettings",
        reads=("gpu.attributed",),
        dead_letters=False,
        help=(
            "What autoscalers ask: utilization, memory and power by workload as plain JSON, for KEDA; and, with"
            " --custom-metrics, custom.metrics.k8s.io, for a HorizontalPodAutoscaler without Prometheus. Every replica"
            " reads everything, in no group."
        ),
        example=(
            "gpustream sink metrics-api --kafka 127.0.0.1:9092\n"
            "gpustream sink metrics-api --kafka kafka-0:9092 --metrics-listen 0.0.0.0:8443 --serving-cert tls.crt \\\n"
            "    --serving-key tls.key --custom-metrics gpustream/gpustream-metrics-api"
        ),
    ),
    "reclaim": ComponentSpec(
        component="sinks.reclaim.sink:ReclaimSink",
        settings="sinks.reclaim.config:ReclaimSettings",
        reads=("gpu.alerts",),
        keeps=("gpu.actions",),
        help=(
            "What namespaces let be done about workloads that hold GPUs and do nothing with them: an Event, a scale to"
            " 0, a Job suspended, Kueue's Workload inactive. A dry run unless --act is given. gpu.actions has all that"
            " was decided."
        ),
        example=(
            "gpustream sink reclaim --kafka kafka-0:9092 --cluster prod-us-east-1 --dry-run\n"
            "gpustream sink reclaim --kafka kafka-0:9092 --cluster prod-us-east-1 --act --budget 5 --least 4h"
        ),
    ),
    "page": ComponentSpec(
        component="sinks.page.sink:PageSink",
        settings="sinks.page.config:PageSettings",
        reads=("gpu.attributed", "gpu.alerts", "gpu.usage"),
        dead_letters=False,
        help=(
            "The fleet in a browser, live: a map of every GPU, who holds it, the alerts that fire, a GPU's last hour,"
            " GPU-hours by team. Every replica reads everything, in no group; nothing can be changed there."
        ),
        example=(
            "gpustream sink page --kafka 127.0.0.1:9092\n"
            "gpustream sink page --kafka kafka-0:9092 --page-listen 0.0.0.0:9402 --page-prefix /gpus/"
        ),
    ),
    "parquet": ComponentSpec(
        component="sinks.parquet:ParquetSink",
        settings="sinks.settings:ParquetSettings",
        reads=("gpu.usage",),
        help=(
            "Who used what, each hour in a Parquet file below a directory for each date, each key once: for as long as"
            " you keep the files. It needs `pip install 'gpustream[parquet]'`."
        ),
        example="gpustream sink parquet --kafka 127.0.0.1:9092 --path /var/lib/gpustream/usage",
    ),
}
"""Every sink."""
