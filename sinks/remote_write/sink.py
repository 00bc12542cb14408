"""The remote-write sink: gpu.attributed, gpu.alerts and gpu.usage -> a receiver of remote write, once, in order.

In: gpu.attributed; gpu.alerts, read back whole; gpu.usage. Out: requests to ``--url``; gpu.dead-letters.
State: none that a restart does not read back.
On failure: an outage of the receiver or of Kafka is waited for; what the receiver refuses is found out and left out.
"""

import asyncio

from delivery.dead_letters import DeadLetters, connecting
from delivery.instruments import Instrument, Instruments, named
from delivery.positions import NOTHING, WHOLE_LOG, Back
from delivery.sender import Sender
from delivery.tasks import Turns
from sinks import counters_reload, outcomes
from sinks.consumer import GroupReader, Source
from sinks.counters_reload import following
from sinks.outcomes import OnOutcome, Outcomes
from sinks.remote_write.alerts import AlertPartition, AlertSeries
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.nodes import OpenSeries
from sinks.remote_write.partition import RemoteWritePartition, RemoteWriteShared
from sinks.remote_write.queue import Queue
from sinks.remote_write.refusals import Deliverer
from sinks.remote_write.send import Client, RemoteWriteSender
from sinks.remote_write.usage import UsagePartition
from sinks.series.relabel import WITHHELD
from sinks.series.translation import Translator
from topics.alerts import TOPIC as ALERTS
from topics.attributed import TOPIC
from topics.usage import HOURS

COMPONENT = "remote_write"

INSTRUMENTS: tuple[Instrument, ...] = (
    *named(
        outcomes.COMMON,
        "gpustream_remote_write_records_read_total",
        "gpustream_remote_write_records_delivered_total",
        "gpustream_remote_write_records_duplicate_total",
        "gpustream_remote_write_records_dropped_total",
        "gpustream_remote_write_records_dead_lettered_total",
        "gpustream_remote_write_records_released_total",
        "gpustream_remote_write_records_held",
        "gpustream_remote_write_records_expired_total",
        "gpustream_remote_write_new_logs_total",
        "gpustream_remote_write_commits_total",
        "gpustream_remote_write_partitions",
        "gpustream_remote_write_lag_records",
        "gpustream_remote_write_loop_late_seconds",
    ),
    *counters_reload.INSTRUMENTS,
    outcomes.delay_instrument("gpustream_remote_write_delay_seconds", "the receiver's answer that it has the tick"),
    Instrument(
        "gpustream_remote_write_values_delivered_total",
        "counter",
        "Values of metrics that the receiver accepted, without derived series and staleness markers.",
    ),
    Instrument(
        "gpustream_remote_write_values_refused_total",
        "counter",
        "Values of metrics that the receiver refused, by reason; at most so many, if it did not say which of a tick it "
        "took.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_values_left_out_total",
        "counter",
        "Values of metrics that were not sent, because the receiver refused their series in the ten minutes before, by "
        "the reason of that.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_series_left_out",
        "gauge",
        "Series that are not sent for ten minutes, because the receiver refused them.",
    ),
    Instrument(
        "gpustream_remote_write_labels_cut_total",
        "counter",
        "Labels of pods and namespaces that --max-labels has no room for, neither on gpu_pod_info nor on the devices'"
        " series; counted when a pod's labels are made.",
    ),
    Instrument(
        "gpustream_remote_write_samples_withheld_total",
        "counter",
        f"Samples that were not written because of their labels. {WITHHELD}",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_alert_samples_refused_total",
        "counter",
        "Samples of gpu_alert_firing that the receiver refused, by reason; left_out: not sent for that.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_usage_samples_refused_total",
        "counter",
        "Samples of gpu_usage_* that the receiver refused, by reason; left_out: not sent for that.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_samples_accepted_total", "counter", "Samples accepted, with derived ones and markers."
    ),
    Instrument("gpustream_remote_write_markers_total", "counter", "Series ended with a staleness marker."),
    Instrument(
        "gpustream_remote_write_requests_total",
        "counter",
        "Attempts, by protocol and what the answer meant.",
        ("protocol", "result"),
    ),
    Instrument(
        "gpustream_remote_write_request_seconds",
        "histogram",
        "How long an attempt took.",
        buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    ),
    Instrument("gpustream_remote_write_request_bytes_total", "counter", "Bytes sent, compressed."),
    Instrument(
        "gpustream_remote_write_receiver_failing",
        "gauge",
        "1 while the receiver does not answer, answers with a failure, or refuses everything, else 0.",
    ),
)


class RemoteWriteSink:
    """A component: :meth:`run` it until it is to stop. ``settings`` are to be without errors."""

    name = "remote-write"

    def __init__(self, settings: RemoteWriteSettings, on_outcome: OnOutcome | None = None) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._outcomes = Outcomes(COMPONENT, self._instruments, on_outcome)
        self._reader: GroupReader | None = None
        self._receiver: RemoteWriteSender | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        settings, instruments = self.settings, self._instruments
        client, sender = Client(settings), Sender(settings.connection(), client_id=settings.group)
        self._receiver = RemoteWriteSender(client.post, settings.protocol, instruments)
        shared = RemoteWriteShared(
            deliverer=Deliverer(self._receiver, instruments, at_once=settings.max_in_flight),
            letters=DeadLetters(sender, "sink remote-write"),
            outcomes=self._outcomes,
            instruments=instruments,
            slots=asyncio.Semaphore(settings.max_in_flight),
            max_samples=settings.max_request_samples,
            stale_after_s=settings.stale_after_s,
            turns=Turns(),
        )

        queue = Queue(shared.deliverer, at_once=settings.max_in_flight, max_samples=settings.max_request_samples)
        relabelling = settings.relabelling()
        translator = Translator(
            settings.profiles(),
            settings.max_labels,
            relabelling=relabelling,
            by_pod=settings.parts_by_pod,
            on_cut=instruments.counter("gpustream_remote_write_labels_cut_total").inc,
        )

        resolution = settings.resolution()

        def samples(number: int) -> RemoteWritePartition:
            return RemoteWritePartition(number, OpenSeries(translator, resolution), shared, queue)

        def alerts(_: int) -> AlertPartition:
            return AlertPartition(AlertSeries(settings.max_labels, relabelling), shared)

        def usage(_: int) -> UsagePartition:
            return UsagePartition(translator.profiles[0].labels, settings.max_labels, shared, relabelling)

        sources = [
            Source(TOPIC.name, samples, settings.from_, Back(settings.stale_after_s), holds=bool(resolution)),
            Source(ALERTS.name, alerts, settings.from_, WHOLE_LOG),
            Source(HOURS.name, usage, settings.from_, NOTHING),
        ]
        self._reader = GroupReader(settings, sources, self._outcomes, shared.letters, shared.turns)
        try:
            async with following(settings, translator, instruments, COMPONENT), connecting(sender):
                await self._reader.run(stop)
        finally:
            await queue.close()
            await client.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        if self._reader is None or self._receiver is None:
            return ["not started"]
        failing = self._receiver.failing
        return [*self._reader.not_ready(), *([f"the receiver does not accept: {failing}"] if failing else [])]
