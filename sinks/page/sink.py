"""The page: gpu.attributed, gpu.alerts and gpu.usage -> the fleet in a browser, on ``--page-listen``.

In:       gpu.attributed, gpu.alerts and gpu.usage, every record at every replica: in no group, nothing is committed.
Out:      the page, and what it shows (:mod:`sinks.page.server`).
State:    what is shown (:mod:`sinks.page.fleet`). At its start it reads the last 2 minutes of ticks and at least the
          last 500 of each partition, all alerts and the last day of usage. It is ready then, and the history of devices
          begins there.
On failure: it waits while Kafka is away, and shows nodes as silent. It counts records that can't be decoded; a consumer
          that reads the topic in a group writes their dead letters.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from delivery import clock
from delivery.dead_letters import Record
from delivery.instruments import Instrument, Instruments
from delivery.positions import Back, StartFrom
from delivery.tail import Tail
from delivery.values import Address
from sinks import alerts, http_server, outcomes
from sinks.outcomes import Undecodable, decoded
from sinks.page.config import PAGE_ADDRESS, PageSettings
from sinks.page.fleet import SILENT_S, USAGE_HOURS, Fleet
from sinks.page.server import CAUGHT_UP, OPENED, REQUESTS, PageServer
from topics.alerts import TOPIC as ALERTS
from topics.attributed import TOPIC as ATTRIBUTED
from topics.attributed import AttributedSample
from topics.samples import silent_after_s
from topics.topic import decoder
from topics.usage import HOUR_MS, HOURS, Usage

log = logging.getLogger(__name__)

READ = "gpustream_page_records_read_total"
DELIVERED = "gpustream_page_records_delivered_total"
DUPLICATE = "gpustream_page_records_duplicate_total"
DROPPED = "gpustream_page_records_dropped_total"
DELAY = "gpustream_page_delay_seconds"
NODES = "gpustream_page_nodes"
DEVICES = "gpustream_page_devices"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(READ, "counter", "Records read."),
    Instrument(DELIVERED, "counter", "Records that are, or were, what is shown."),
    Instrument(DUPLICATE, "counter", "Records that say nothing new: replays, usage that is known or old."),
    Instrument(DROPPED, "counter", "Records that are not used: not to be decoded (undecodable).", ("reason",)),
    outcomes.delay_instrument(DELAY, "the page has it"),
    Instrument(NODES, "gauge", "Nodes that are shown."),
    Instrument(DEVICES, "gauge", "GPUs and MIG devices that are shown."),
    Instrument(OPENED, "gauge", "Pages that are open."),
    Instrument(REQUESTS, "counter", "Requests by the status of the answer.", ("code",)),
    Instrument(
        CAUGHT_UP, "counter", "How often a page that took its frames too slowly was given the whole fleet instead."
    ),
)

_TICKS = Back(120.0, records=500)
_EXPIRE_EVERY_S = 1.0

_decode_tick, _decode_usage = decoder(AttributedSample), decoder(Usage)


class PageSink:
    """A component: :meth:`run` it until it is to stop."""

    name = "page"

    def __init__(self, settings: PageSettings) -> None:
        self.settings = settings
        self.address: tuple[str, int] | None = None
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self.fleet = Fleet(clock.now_ms(), settings.team_label)
        from_: dict[str, StartFrom] = {
            ATTRIBUTED.name: _TICKS,
            ALERTS.name: "earliest",
            HOURS.name: USAGE_HOURS * 3600.0,
        }
        client_id = f"gpustream-sink-{self.name}"
        self.tail = Tail(settings.connection(), from_, self.handle, client_id=client_id, on_new_log=self.begin_again)

    async def run(self, stop: asyncio.Event) -> None:
        """Read and serve until ``stop``. Raises ListenError and MustRestart."""
        settings = self.settings
        hosts = None if settings.is_public and not settings.page_host else settings.page_host
        server = PageServer(self.fleet, self._instruments, settings.page_prefix, hosts)
        address = settings.page_listen or PAGE_ADDRESS
        async with contextlib.AsyncExitStack() as stack:
            listening = http_server.listening(
                server.routes(),
                address,
                option="--page-listen",
                middlewares=[server.guard],
                closing=server.end,
                cancel_on_leave=False,  # an open page counts as a request when it is closed
            )
            self.address = await stack.enter_async_context(listening)
            log.info("the page is at %s", self.url)
            if settings.is_public:
                log.warning(
                    "--page-listen %s: whoever can connect sees the fleet and the names of its pods; put a reverse"
                    " proxy with TLS and a log-in in front, and let nobody else connect",
                    address,
                )
            for background in (server.run(), self._expire()):
                stack.callback(asyncio.ensure_future(background).cancel)
            await self.tail.run(stop)

    @property
    def url(self) -> str:
        """The URL for a browser on this machine; empty until it is served."""
        if self.address is None:
            return ""
        host, port = self.address
        local = Address("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)  # noqa: S104 - that is everywhere
        return f"http://{local}{self.settings.page_prefix}"

    def not_ready(self) -> list[str]:
        """The reasons why not everything is shown yet; empty when it is."""
        return ["not started"] if self.address is None else self.tail.not_ready()

    def handle(self, topic: str, records: Sequence[Record]) -> None:
        """Show the content of these records."""
        counter = self._instruments.counter
        counter(READ).inc(len(records))
        for record in records:
            key, is_new = record.key or b"", True
            try:
                if topic == ALERTS.name:
                    self.fleet.set_alert(key, alerts.read_alert(record))
                elif topic == ATTRIBUTED.name:
                    # a tick is as old as its node's clock or the log says, whichever is less; a log without times: -1
                    tick, now_ms, now_s = decoded(record, _decode_tick, topic), clock.now_ms(), time.monotonic()
                    age_s = self.tail.age_s((now_ms - max(tick.ts_ms, record.timestamp)) / 1000, now_s)
                    is_new = self.fleet.add_tick(tick, now_s, age_s) != "replay"
                    if is_new and age_s < silent_after_s(tick.interval_ms, SILENT_S):
                        self._instruments.histogram(DELAY).observe(max(0.0, (now_ms - tick.ts_ms) / 1000))
                elif record.value is None:  # its key was deleted: its hour is more than a day ago
                    is_new = False
                else:
                    is_new = self.fleet.add_usage(key, decoded(record, _decode_usage, topic))
            except Undecodable:
                counter(DROPPED, "undecodable").inc()
            else:
                counter(DELIVERED if is_new else DUPLICATE).inc()

    def begin_again(self, topic: str) -> None:
        """Forget the alerts if their topic was created again: the new log has no ends of those in the old one."""
        if topic == ALERTS.name:
            self.fleet.clear_alerts()

    async def _expire(self) -> None:
        last_hour = 0
        while True:
            self.fleet.expire(time.monotonic())
            if (hour := int(time.time()) // 3600) != last_hour:
                self.fleet.expire_usage(hour * HOUR_MS)
                last_hour = hour
            self._instruments.gauge(NODES).set(len(self.fleet.nodes))
            self._instruments.gauge(DEVICES).set(sum(len(node.devices) for node in self.fleet.nodes.values()))
            await asyncio.sleep(_EXPIRE_EVERY_S)
