"""Asks Kafka, the Kubernetes API, the components and a Prometheus for what the checks look at.

In:       a connection, a time, addresses.
Out:      a :class:`Situation`.
State:    none. It joins no consumer group and commits nothing.
On failure: the :class:`Situation` has the reason why something does not answer, and the rest is still asked.

The order of the requests matters: first the end offsets of gpu.samples, then the groups' committed offsets, then the
end offsets of the other topics. So these have the output of every finished sample. Every topic is read to its end
offset, however much comes meanwhile. If a group is behind, the groups are asked again, to see whether they catch up.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from delivery import kafka_admin
from delivery.clients import OffsetClient
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError, GroupDescription
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.positions import STATE_WINDOW_MS
from delivery.proxy import proxy_of
from gpustream import history
from gpustream.doctor import brokers, kubernetes, readers
from gpustream.doctor.evidence import Evidence, NodeName
from gpustream.doctor.readers import ATTRIBUTION
from gpustream.doctor.situation import Cluster, Group, Lag, OpenTransaction, OwnMetrics, Prometheus, Situation
from gpustream.history import History, Span
from topics import allocations, attributed, dead_letters, samples, workloads

GROUP_PREFIX = "gpustream-"

_TIMEOUT = aiohttp.ClientTimeout(total=10.0)

_BROKERS_DIFFER_MS = 60_000
"""How much the clocks of two brokers may differ: the output of a tick may have an earlier log time than the tick."""

WATCH_S = 3.0
"""How long a group that is behind is watched. It commits every second."""

_QUERY = "max by (k8s_cluster_name, k8s_node_name, cluster, hostname, node) (timestamp({name}))"
_COUNTERS_QUERY = 'count by (__name__) ({__name__=~"DCGM_.+|dcgm_.+"})'
_CLUSTER_LABELS = ("k8s_cluster_name", "cluster")
_NODE_LABELS = ("k8s_node_name", "hostname", "node")
_STATES = (allocations.TOPIC.name, workloads.TOPIC.name)
_READ_ORDER = (dead_letters.TOPIC.name, *_STATES, attributed.TOPIC.name, samples.TOPIC.name)


class Scope(NamedTuple):
    """What to look at: how far back, whose metrics, which Prometheus, and which Kubernetes namespace, if any."""

    since_s: float
    metrics: Sequence[str] = ()
    prometheus: str | None = None
    namespace: str | None = None
    kubeconfig: Path | None = None


async def gather(connection: Connection, scope: Scope) -> Situation:
    """Collects everything that the checks look at."""

    async def query_kubernetes() -> Cluster | None:
        return await kubernetes.inspect(scope.kubeconfig, scope.namespace) if scope.namespace is not None else None

    kafka, components, cluster = await asyncio.gather(
        brokers.inspect(connection), query_components(scope.metrics), query_kubernetes()
    )
    current_ms = now_ms()  # only now: a request that hangs takes seconds, and the records are read after it
    since_ms = current_ms - int(scope.since_s * 1000)
    situation = Situation(since_ms, current_ms, kafka, components=components, cluster=cluster)
    if kafka.error:
        situation = situation._replace(groups=None, unread=kafka.error)
    else:
        situation = await _read(connection, situation)
    return situation._replace(prometheus=await query_prometheus(scope.prometheus) if scope.prometheus else None)


async def _read(connection: Connection, situation: Situation) -> Situation:
    """Adds the evidence of the records, and the groups. Partitions without a leader are left out."""
    topics = brokers.readable_topics(situation.kafka.topics)
    unread = brokers.unreadable_reason(situation.kafka, _READ_ORDER)
    leaderless = [
        Partition(name, number) for name, layout in situation.kafka.topics.items() for number in layout.leaderless
    ]
    try:
        async with history.opened(connection, topics, without=leaderless) as reader:
            spans = {} if unread else {samples.TOPIC.name: await reader.spans(samples.TOPIC.name, situation.since_ms)}
            groups = await _groups(connection)
            situation = situation._replace(open_transactions=await _open_transactions(reader))
            evidence = None if unread else await _collect_evidence(reader, spans, situation, groups or ())
            groups_with_lags = None if groups is None else await _with_lags(reader, groups)
            silent = "" if groups is not None else "no broker answers for the groups"
            situation = situation._replace(evidence=evidence, unread=unread, silent=silent, groups=groups_with_lags)
            behind = any(readers.late_lags(situation, group) for group in situation.groups or ())
            return await _with_progress(reader, situation) if behind else situation
    except BrokerError as error:
        return situation._replace(unread=str(error), silent=str(error), groups=situation.groups or None)


async def _groups(connection: Connection) -> list[GroupDescription] | None:
    """The consumer groups; None if no broker answers for them."""
    try:
        async with kafka_admin.connect(connection) as admin:
            return await admin.groups(GROUP_PREFIX)
    except BrokerError:
        return None


async def _open_transactions(reader: History) -> dict[Partition, OpenTransaction]:
    """The transactions that keep readers from the end of a partition.

    What the groups have finished was there before this: where no transaction is open, all that came of it can be read.
    """
    tps = [tp for topic in reader.partitions for tp in reader.partitions_of(topic)]
    client = OffsetClient(
        reader.connection,
        client_id="gpustream-doctor",
        isolation_level="read_uncommitted",
        connect_within_s=history.STALLED_S,
    )
    try:
        await client.connect()
        ends = await client.ends(tps)
        readable = {tp: end for topic in reader.partitions for tp, end in (await reader.ends(topic)).items()}
        offsets = {tp: readable[tp] for tp, end in ends.items() if readable[tp] < end}
        times = await client.times(offsets) if offsets else {}
    finally:
        await client.close()
    return {tp: OpenTransaction(offset, ends[tp] - offset, times[tp]) for tp, offset in offsets.items()}


async def _collect_evidence(
    reader: History, spans: dict[str, dict[Partition, Span]], situation: Situation, groups: Iterable[GroupDescription]
) -> Evidence:
    """Reads all records. ``spans`` has those of gpu.samples, which were asked for before the groups."""
    for topic in _READ_ORDER[:-1]:
        before_ms = STATE_WINDOW_MS if topic in _STATES else _BROKERS_DIFFER_MS
        spans[topic] = await reader.spans(topic, situation.since_ms - before_ms)
    finished = {
        tp.partition: offset
        for group in groups
        for tp, offset in group.committed.items()
        if group.name == ATTRIBUTION and tp.topic == samples.TOPIC.name
    }
    full_spans = {tp: span for topic in _READ_ORDER[-2:] for tp, span in (await reader.spans(topic)).items()}
    log_starts = {
        tp: full_span.start for tp, full_span in full_spans.items() if spans[tp.topic][tp].start <= full_span.start
    }
    evidence = Evidence(finished, reader.connection.unprefixed, log_starts, situation.open_transactions)
    for topic in _READ_ORDER:
        with history.progress(topic, spans[topic]) as advanced:
            async for records in reader.records(spans[topic], advanced):
                for record in records:
                    evidence.add(record)
    return evidence


async def _with_progress(reader: History, situation: Situation) -> Situation:
    """Waits some seconds, and adds what each group has finished meanwhile."""
    began_s = time.monotonic()
    await asyncio.sleep(WATCH_S)
    later_groups = await _groups(reader.connection)
    watched_s = time.monotonic() - began_s
    later_by_name = {group.name: group for group in await _with_lags(reader, later_groups or ())}
    groups = []
    for group in situation.groups or ():
        if (later := later_by_name.get(group.name)) is None:
            groups.append(group)
            continue
        later_lags = {lag.topic: lag.records for lag in later.lags}
        lags = []
        for lag in group.lags:
            committed = {tp: offset for tp, offset in later.committed.items() if tp.topic == lag.topic}
            finished = sum(max(0, offset - group.committed.get(tp, 0)) for tp, offset in committed.items())
            grew = later_lags.get(lag.topic, 0) - lag.records
            lags.append(lag._replace(finished=finished, grew=grew, watched_s=watched_s))
        groups.append(group._replace(lags=tuple(lags)))
    return situation._replace(groups=groups)


async def _with_lags(reader: History, groups: Sequence[GroupDescription]) -> list[Group]:
    """The groups, each with its lag in every topic in which it has committed an offset."""
    topics = {tp.topic for group in groups for tp in group.committed} & reader.partitions.keys()
    spans = {tp: span for topic in topics for tp, span in (await reader.spans(topic)).items()}
    behind: dict[str, dict[Partition, int]] = {}
    for group in groups:
        committed_topics = {tp.topic for tp in group.committed}
        behind[group.name] = {
            tp: offset
            for tp, span in spans.items()
            if tp.topic in committed_topics and (offset := max(group.committed.get(tp, 0), span.start)) < span.end
        }
    times = await _log_times(reader, [position for positions in behind.values() for position in positions.items()])
    result = []
    for group in groups:
        lags = []
        for topic in sorted({tp.topic for tp in behind[group.name]}):
            positions = {tp: offset for tp, offset in behind[group.name].items() if tp.topic == topic}
            records = sum(spans[tp].end - offset for tp, offset in positions.items())
            oldest_ms = min((at_ms for position in positions.items() if (at_ms := times[position])), default=None)
            lags.append(Lag(topic, records, tuple(tp.partition for tp in positions), oldest_ms))
        log_starts = {
            tp: spans[tp].start for tp, offset in group.committed.items() if tp in spans and offset < spans[tp].start
        }
        result.append(Group(group.name, group.state, group.members, tuple(lags), group.committed, log_starts))
    return result


async def _log_times(
    reader: History, positions: Iterable[tuple[Partition, int]]
) -> dict[tuple[Partition, int], int | None]:
    """When the records at these offsets were logged. One request can have one offset of each partition."""
    remaining: dict[Partition, set[int]] = {}
    for tp, offset in positions:
        remaining.setdefault(tp, set()).add(offset)
    client = OffsetClient(reader.connection, client_id="gpustream-doctor", connect_within_s=history.STALLED_S)
    times: dict[tuple[Partition, int], int | None] = {}
    while remaining:
        batch = {tp: offsets_left.pop() for tp, offsets_left in remaining.items()}
        remaining = {tp: offsets_left for tp, offsets_left in remaining.items() if offsets_left}
        times |= {(tp, batch[tp]): at_ms for tp, at_ms in (await client.times(batch)).items()}
    return times


# -- over HTTP


async def query_components(urls: Sequence[str]) -> list[OwnMetrics]:
    """The components' own metrics."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        return list(await asyncio.gather(*(_query_component(session, url) for url in urls)))


async def _query_component(session: aiohttp.ClientSession, url: str) -> OwnMetrics:
    """The metrics and readiness of a component. Its URL may end in ``/metrics`` or not."""
    base = url.rstrip("/").removesuffix("/metrics")
    shown_url = _without_password(base)
    try:
        proxy = proxy_of(base)
        async with session.get(f"{base}/metrics", proxy=proxy) as response:
            response.raise_for_status()
            text = await response.text()
        async with session.get(f"{base}/readyz", proxy=proxy) as response:
            not_ready = "" if response.ok else "; ".join((await response.text()).splitlines())
        families = text_string_to_metric_families(text)
        series = [sample for family in families for sample in family.samples if math.isfinite(sample.value)]
    except (aiohttp.ClientError, TimeoutError, *kubernetes.ODD_ANSWERS) as error:
        return OwnMetrics(shown_url, error=describe(error))
    return OwnMetrics(shown_url, series, not_ready)


async def query_prometheus(url: str) -> Prometheus:
    """A Prometheus: the newest sample of each node, its rules and its configuration.

    Every device has ``gpu_info`` in every profile; with ``--counters`` there is only what the file names, of which the
    counter of most devices is taken."""
    base = url.rstrip("/")
    newest_ms: dict[NodeName, int] = {}
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT, proxy=proxy_of(base)) as session:
            rows = await _instant(session, base, _QUERY.format(name="gpu_info"))
            if not rows and (counters := await _instant(session, base, _COUNTERS_QUERY)):
                most, _ = max(counters, key=lambda row: row[1])
                rows = await _instant(session, base, _QUERY.format(name=most["__name__"]))
            for labels, value in rows:
                cluster = next((labels[label] for label in _CLUSTER_LABELS if label in labels), "")
                node = next((labels[label] for label in _NODE_LABELS if label in labels), "")
                name = NodeName(cluster, node)
                newest_ms[name] = max(newest_ms.get(name, 0), int(value * 1000))
            flags = await _api(session, base, "status/flags")
            rules = await _api(session, base, "rules")
            reloads = await _instant(session, base, "prometheus_config_last_reload_successful")
        broken = {
            str(rule.get("name")): str(rule.get("lastError"))
            for group in (rules or {}).get("groups") or []
            for rule in group.get("rules") or []
            if rule.get("health") == "err"
        }
    except (aiohttp.ClientError, TimeoutError, *kubernetes.ODD_ANSWERS) as error:
        return Prometheus(_without_password(base), {}, describe(error))
    accepts_remote_write = flags.get("web.enable-remote-write-receiver") if flags else None
    return Prometheus(
        _without_password(base),
        newest_ms,
        accepts_remote_write=None if accepts_remote_write is None else accepts_remote_write == "true",
        broken_rules=broken,
        reload_failed=any(value == 0 for _, value in reloads),
    )


async def _instant(session: aiohttp.ClientSession, base: str, query: str) -> list[tuple[dict[str, str], float]]:
    async with session.get(f"{base}/api/v1/query", params={"query": query}) as response:
        response.raise_for_status()
        body: Any = await response.json()
    return [(row["metric"], float(row["value"][1])) for row in body["data"]["result"]]


async def _api(session: aiohttp.ClientSession, base: str, path: str) -> dict[str, Any] | None:
    """The data of a page of Prometheus' HTTP API; None from a receiver that has no such page."""
    async with session.get(f"{base}/api/v1/{path}") as response:
        body: Any = await response.json() if response.ok else None
    data = body.get("data") if isinstance(body, dict) else None
    return data if isinstance(data, dict) else None


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
