"""The OpenTelemetry Collector, as a yardstick: it reads OTLP from Kafka and writes remote write 1.0.

It is given what remote write has made of gpu.attributed: the same series, labels, values and times, one message a node
tick. So it has nothing to join, makes no labels, ends no series, and commits what it has read before it is written.
``make collector`` builds it.
"""

import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

from delivery.connection import Connection
from delivery.sender import Sender
from sinks.remote_write.nodes import OpenSeries
from sinks.series.model import SampleGroup
from sinks.series.tick import decode
from sinks.series.translation import Translator
from tests.bench.attribution import cpu_s
from tests.real.process import Server
from tests.real.servers import Missing, real_dir
from tests.sinks.remote_write.wire import messages
from topics.profiles import PROFILES

TOPIC, CUMULATIVE, PATIENCE_S = "otlp_metrics", 2, 120.0
CONFIGURATION = """
receivers:
  kafka:
    brokers: ["{kafka}"]
    initial_offset: earliest
    metrics: {{topics: [{topic}], encoding: otlp_proto}}
processors:
  batch: {{}}
exporters:
  prometheus_remote_write:
    endpoint: {url}
    translation_strategy: UnderscoreEscapingWithoutSuffixes
    resource_to_telemetry_conversion: {{enabled: true}}
    target_info: {{enabled: false}}
    disable_scope_info: true
service:
  telemetry:
    logs: {{level: warn}}
    metrics: {{readers: [{{pull: {{exporter: {{prometheus: {{host: 127.0.0.1, port: {port}}}}}}}}}]}}
  pipelines:
    metrics: {{receivers: [kafka], processors: [batch], exporters: [prometheus_remote_write]}}
"""


class CollectorServer(Server):
    """The Collector, which reads OTLP from a Kafka and writes to a URL; raises :class:`Missing` if it is not built."""

    def __init__(self, directory: Path, kafka: str, url: str) -> None:
        super().__init__(directory)
        self.program = real_dir() / "collector-0.155.0" / "otelcol"
        if not self.program.is_file():
            raise Missing(f"no Collector at {self.program}: run `make collector`")
        port = self.ports[0].number
        self.configuration = CONFIGURATION.format(kafka=kafka, url=url, topic=TOPIC, port=port)

    def prepare(self) -> None:
        """Writes the configuration."""
        (self.directory / "collector.yaml").write_text(self.configuration)

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return [str(self.program), f"--config=file:{self.directory / 'collector.yaml'}"]

    def ready(self) -> bool:
        """Whether it serves its own metrics."""
        try:
            return bool(self.metrics())
        except OSError:
            return False

    def metrics(self) -> str:
        """Its own metrics, as text."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0].number}/metrics", timeout=2) as answer:
            text: str = answer.read().decode()
            return text

    def written(self) -> int:
        """How many samples the receiver took."""
        lines = [line for line in self.metrics().splitlines() if line.startswith("otelcol_exporter_sent_metric_points")]
        return sum(int(float(line.split()[-1])) for line in lines)

    def cpu_s_of(self, points: int) -> float:
        """CPU seconds from now until that many samples have been written; raises ``TimeoutError`` if they never are."""
        before_s, until_s = cpu_s(self.pid), time.monotonic() + PATIENCE_S
        while self.written() < points:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.written()} of {points} samples written: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)
        return cpu_s(self.pid) - before_s


class Otlp:
    """Ticks of gpu.attributed as OTLP, and how many samples they have."""

    def __init__(self, records: Iterable[bytes]) -> None:
        series = OpenSeries(Translator([PROFILES["otel"]]))
        ticks = [series.tick(decode(record)).groups for record in records]
        self.messages = [message(groups) for groups in ticks]
        self.points = sum(len(group.values) for groups in ticks for group in groups)

    async def send(self, kafka: str) -> None:
        """Put them onto the Collector's topic."""
        sender = Sender(Connection(kafka), client_id="bench", max_batch_bytes=512 * 1024)
        await sender.start()
        for sent in [
            await sender.send(TOPIC, message, key=b"%d" % number) for number, message in enumerate(self.messages)
        ]:
            await sent
        await sender.stop()


def message(groups: Iterable[SampleGroup]) -> bytes:
    """One tick: a device, with its labels, is a resource, and has a metric of one point for each series."""
    export = messages("otlp_metrics").ExportMetricsServiceRequest()
    for group in groups:
        resource = export.resource_metrics.add()
        for label, text in group.series.labels:
            resource.resource.attributes.add(key=label).value.string_value = text
        scope = resource.scope_metrics.add()
        for row, value in zip(group.series.rows, group.values, strict=True):
            metric = scope.metrics.add(name=row.name)
            if row.kind == "counter":
                metric.sum.aggregation_temporality, metric.sum.is_monotonic = CUMULATIVE, True
            points = metric.sum.data_points if row.kind == "counter" else metric.gauge.data_points
            point = points.add(time_unix_nano=group.ts_ms * 1_000_000, as_double=value)
            for label, text in row.labels:
                point.attributes.add(key=label).value.string_value = text
    content: bytes = export.SerializeToString()
    return content
