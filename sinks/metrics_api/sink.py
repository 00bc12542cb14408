"""The metrics API: gpu.attributed -> what autoscalers ask, on ``--metrics-listen``.

In:       every record of gpu.attributed of this cluster, at every replica: there is no group, and nothing is committed.
Out:      answers to requests (:mod:`sinks.metrics_api.server`).
State:    what every pod holds now; a replica that starts reads the last 40 s, and at least the last 500 ticks of each
          partition, and is ready when it has.
On failure: what is not known is not answered, so that an autoscaler leaves its replicas as they are. An outage of Kafka
          is waited for, and values that are 30 s old by then are gone. A record that can't be decoded is counted;
          whoever reads the topic in a group dead-letters it.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial

from delivery import clock
from delivery.dead_letters import Record
from delivery.instruments import Instrument, Instruments
from delivery.kubernetes.client import Client, requests_instrument
from delivery.positions import Back
from delivery.tail import Tail
from sinks import http_server, outcomes
from sinks.metrics_api.cluster import ApiServer
from sinks.metrics_api.config import METRICS_ADDRESS, MetricsApiSettings
from sinks.metrics_api.holdings import STALE_S, Holdings, decode
from sinks.metrics_api.server import Access, Api
from sinks.metrics_api.tls import ServerTls
from sinks.outcomes import Undecodable, decoded
from topics.attributed import TOPIC
from topics.samples import silent_after_s
from topics.topic import node_key

READ = "gpustream_metrics_api_records_read_total"
DELIVERED = "gpustream_metrics_api_records_delivered_total"
DUPLICATE = "gpustream_metrics_api_records_duplicate_total"
DROPPED = "gpustream_metrics_api_records_dropped_total"
DELAY = "gpustream_metrics_api_delay_seconds"
NODES = "gpustream_metrics_api_nodes"
REQUESTS = "gpustream_metrics_api_requests_total"
API_REQUESTS = "gpustream_metrics_api_kubernetes_requests_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(READ, "counter", "Records read."),
    Instrument(DELIVERED, "counter", "Records that are, or were, what is answered."),
    Instrument(DUPLICATE, "counter", "Records that say nothing new: replays."),
    Instrument(
        DROPPED,
        "counter",
        "Records that are not used: of another cluster (other_cluster), or not to be decoded (undecodable).",
        ("reason",),
    ),
    outcomes.delay_instrument(DELAY, "it is what is answered"),
    Instrument(NODES, "gauge", "Nodes whose last tick is not too old."),
    Instrument(REQUESTS, "counter", "Requests by the status of the answer.", ("code",)),
    requests_instrument(API_REQUESTS),
)

_READ_BACK = Back(STALE_S + 10.0, records=500)
"""What was logged before is too old, and clocks differ a little; but of nodes that are read seldom it is not."""

_FORGET_EVERY_S = 1.0

_MAX_HEADERS_OF_PROXY = 512
"""The API server sends a header for each group of a user, of which directories give hundreds."""


class MetricsApiSink:
    """A component: :meth:`run` it until it is to stop."""

    name = "metrics-api"

    def __init__(self, settings: MetricsApiSettings) -> None:
        self.settings = settings
        self.address: tuple[str, int] | None = None
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._holdings = Holdings()
        self._key_prefix = node_key(settings.cluster, "")
        self.tail = Tail(
            settings.connection(), {TOPIC.name: _READ_BACK}, self.take, client_id=f"gpustream-sink-{self.name}"
        )
        self._cluster: ApiServer | None = None
        if settings.custom_metrics is not None:
            client = Client(settings.kubeconfig, partial(self._instruments.counter, API_REQUESTS))
            self._cluster = ApiServer(client, settings.custom_metrics)

    async def run(self, stop: asyncio.Event) -> None:
        """Read and serve until ``stop``. Raises ListenError, CertificateError, GroupTaken, ConfigError, MustRestart."""
        settings, cluster = self.settings, self._cluster
        async with contextlib.AsyncExitStack() as stack:
            if cluster is not None:
                stack.push_async_callback(cluster.close)
                is_configured = settings.client_ca is not None and bool(settings.client_names)
                await cluster.start(stop, ask_front_proxy=settings.serving_cert is not None and not is_configured)
                if stop.is_set():
                    return
                stack.callback(asyncio.ensure_future(cluster.refresh()).cancel)
            tls = None
            if settings.serving_cert is not None and settings.serving_key is not None:
                optional = settings.client_token_file is not None
                tls = ServerTls(settings.serving_cert, settings.serving_key, self._client_ca, optional=optional)
            guarded = (tls is not None and self._client_ca() is not None) or settings.client_token_file is not None
            own_ca = settings.client_ca is not None
            access = Access(guarded=guarded, names=self._names, token_file=settings.client_token_file, own_ca=own_ca)
            api = Api(self._holdings, access, cluster, partial(self._instruments.counter, REQUESTS))
            served = http_server.listening(
                api.routes(),
                settings.metrics_listen or METRICS_ADDRESS,
                option="--metrics-listen",
                context=tls.context if tls is not None else None,
                middlewares=[api.guard],
                max_headers=http_server.MAX_HEADERS if cluster is None else _MAX_HEADERS_OF_PROXY,
            )
            self.address = await stack.enter_async_context(served)
            stack.callback(asyncio.ensure_future(self._forget()).cancel)
            await self.tail.run(stop)

    def not_ready(self) -> list[str]:
        """Why not everything is answered that could be; empty when it is."""
        of_cluster = self._cluster.not_ready() if self._cluster is not None else []
        return of_cluster or (["not started"] if self.address is None else self.tail.not_ready())

    def take(self, _: str, records: Sequence[Record]) -> None:
        """Take the ticks in these records for what is answered from now on."""
        counter = self._instruments.counter
        for record in records:
            counter(READ).inc()
            if record.key is not None and not record.key.startswith(self._key_prefix):
                counter(DROPPED, "other_cluster").inc()
                continue
            try:
                tick = decoded(record, decode, TOPIC.name)
            except Undecodable:
                counter(DROPPED, "undecodable").inc()
                continue
            if tick.cluster != self.settings.cluster:
                counter(DROPPED, "other_cluster").inc()
            else:
                # a tick is as old as its node's clock or the log says, whichever is more; a log without times says -1
                now_ms, now_s = clock.now_ms(), time.monotonic()
                age_s = (now_ms - tick.ts_ms) / 1000
                if record.timestamp > 0:
                    age_s = max(age_s, self.tail.age_s((now_ms - record.timestamp) / 1000, now_s))
                verdict = self._holdings.add_tick(tick, now_s, age_s)
                self._instruments.counter(DUPLICATE if verdict == "replay" else DELIVERED).inc()
                if verdict != "replay" and age_s < silent_after_s(tick.interval_ms, STALE_S):
                    self._instruments.histogram(DELAY).observe(max(0.0, now_ms / 1000 - tick.ts_ms / 1000))

    async def _forget(self) -> None:
        while True:
            self._holdings.expire(time.monotonic())
            self._instruments.gauge(NODES).set(len(self._holdings))
            await asyncio.sleep(_FORGET_EVERY_S)

    def _client_ca(self) -> str | None:
        """The present CA of the clients."""
        if self.settings.client_ca is not None:
            return self.settings.client_ca.read_text(encoding="utf-8", errors="replace")
        return self._cluster.front_proxy.ca if self._cluster is not None else None

    def _names(self) -> frozenset[str]:
        """The allowed names of front proxies; empty: any name."""
        from_cluster = self._cluster.front_proxy.names if self._cluster is not None else frozenset[str]()
        return frozenset(self.settings.client_names) or from_cluster
