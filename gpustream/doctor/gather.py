"""Collects what the checks look at: from Kafka, from the components' /metrics, from Prometheus.

The order of the questions matters. gpu.samples is asked first where it ends, then the groups what they have finished,
then the other topics where they end: so what is finished of the samples is in the others. Everything is read to these
ends, however much comes meanwhile.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from delivery import kafka_admin, topic_admin
from delivery.clients import OffsetClient
from delivery.connection import Connection
from delivery.kafka_admin import GroupFound
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.positions import STATE_WINDOW_MS
from gpustream import history
from gpustream.doctor.checks import ATTRIBUTION
from gpustream.doctor.evidence import Fold, NodeName
from gpustream.doctor.seen import Group, Lag, OwnMetrics, Prometheus, Series, Situation
from gpustream.history import History
from topics import allocations, attributed, dead_letters, samples, workloads

GROUPS = "gpustream-"

_ANSWER_S = 10.0
_BROKERS_DIFFER_MS = 60_000
"""By so much the clocks of two brokers may differ: what comes of a sample may have an earlier log time."""

_QUERY = "max by (k8s_cluster_name, k8s_node_name, cluster, hostname, node) (timestamp(gpu_info))"
_CLUSTER_LABELS = ("k8s_cluster_name", "cluster")
_NODE_LABELS = ("k8s_node_name", "hostname", "node")
_STATES = (allocations.TOPIC.name, workloads.TOPIC.name)
_IN_ORDER = (dead_letters.TOPIC.name, *_STATES, attributed.TOPIC.name, samples.TOPIC.name)


async def gather(connection: Connection, since_s: float, metrics: Sequence[str], prometheus: str | None) -> Situation:
    """Everything that the checks look at. Raises BrokerError."""
    now_ms = time.time_ns() // 1_000_000
    since_ms = now_ms - int(since_s * 1000)
    found, _ = await topic_admin.inspect(connection)
    mismatches = topic_admin.mismatches(topic_admin.contract(connection).values(), found)
    command = topic_admin.command(connection)
    seen = Situation(since_ms, now_ms, mismatches, create=command, components=await ask_components(metrics))
    there = {connection.unprefixed(topic) for topic in found}
    if not there.issuperset(_IN_ORDER):
        return seen
    async with history.opened(connection, list(there)) as past:
        spans = {samples.TOPIC.name: await past.spans(samples.TOPIC.name, since_ms)}
        async with kafka_admin.connect(connection) as admin:
            groups = await admin.groups(GROUPS)
        for topic in _IN_ORDER[:-1]:
            before_ms = STATE_WINDOW_MS if topic in _STATES else _BROKERS_DIFFER_MS
            spans[topic] = await past.spans(topic, since_ms - before_ms)
        finished = {
            tp.partition: offset
            for group in groups
            for tp, offset in group.committed.items()
            if group.name == ATTRIBUTION and tp.topic == samples.TOPIC.name
        }
        fold = Fold(finished, connection.unprefixed)
        for topic in _IN_ORDER:
            with history.progress(topic, spans[topic]) as advanced:
                async for records in past.records(spans[topic], advanced):
                    for record in records:
                        fold.take(record)
        lags = await _lags(past, groups)
    return seen._replace(
        fold=fold,
        groups=[Group(group.name, group.state, group.members, lags[group.name]) for group in groups],
        prometheus=await ask_prometheus(prometheus) if prometheus else None,
    )


async def _lags(past: History, groups: Iterable[GroupFound]) -> dict[str, tuple[Lag, ...]]:
    """What each group has not finished, of the topics in which it has committed something."""
    topics = {tp.topic for group in groups for tp in group.committed} & past.partitions.keys()
    spans = {topic: await past.spans(topic) for topic in topics}
    behind: dict[str, dict[Partition, int]] = {}
    for group in groups:
        for topic in {tp.topic for tp in group.committed} & topics:
            for tp, span in spans[topic].items():
                at = max(group.committed.get(tp, span.start), span.start)
                if at < span.end:
                    behind.setdefault(group.name, {})[tp] = at
    asked: dict[Partition, set[int]] = {}
    for places in behind.values():
        for tp, at in places.items():
            asked.setdefault(tp, set()).add(at)
    times: dict[tuple[Partition, int], int | None] = {}
    offsets = OffsetClient(past.connection, client_id="gpustream-doctor")
    while asked:  # one offset of each partition at a time
        some = {tp: offsets_left.pop() for tp, offsets_left in asked.items()}
        asked = {tp: offsets_left for tp, offsets_left in asked.items() if offsets_left}
        times |= {(tp, some[tp]): at_ms for tp, at_ms in (await offsets.times(some)).items()}
    return {
        group.name: tuple(
            Lag(
                topic,
                sum(spans[topic][tp].end - at for tp, at in places.items() if tp.topic == topic),
                tuple(tp.partition for tp in places if tp.topic == topic),
                min(
                    (at_ms for tp, at in places.items() if tp.topic == topic and (at_ms := times[tp, at])), default=None
                ),
            )
            for topic in sorted({tp.topic for tp in places})
        )
        for group in groups
        for places in [behind.get(group.name, {})]
    }


# -- over HTTP


async def ask_components(urls: Sequence[str]) -> list[OwnMetrics]:
    """What components say of themselves."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        return list(await asyncio.gather(*(_component(session, url) for url in urls)))


async def _component(session: aiohttp.ClientSession, url: str) -> OwnMetrics:
    """What a component says at its own address, with or without ``/metrics``."""
    base = url.rstrip("/").removesuffix("/metrics")
    shown = _without_password(base)
    try:
        async with session.get(f"{base}/metrics") as answer:
            answer.raise_for_status()
            text = await answer.text()
        async with session.get(f"{base}/readyz") as answer:
            not_ready = "" if answer.ok else "; ".join((await answer.text()).splitlines())
        series = [
            Series(one.name, one.labels, one.value)
            for family in text_string_to_metric_families(text)
            for one in family.samples
        ]
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return OwnMetrics(shown, error=describe(error))
    return OwnMetrics(shown, series, not_ready)


async def ask_prometheus(url: str) -> Prometheus:
    """The newest sample of each node, by ``gpu_info``, which every device has with every profile."""
    base = url.rstrip("/")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session,
            session.get(f"{base}/api/v1/query", params={"query": _QUERY}) as answer,
        ):
            answer.raise_for_status()
            said: Any = await answer.json()
        found: dict[NodeName, int] = {}
        for row in said["data"]["result"]:
            cluster = next((row["metric"][label] for label in _CLUSTER_LABELS if label in row["metric"]), "")
            node = next((row["metric"][label] for label in _NODE_LABELS if label in row["metric"]), "")
            name = NodeName(cluster, node)
            found[name] = max(found.get(name, 0), int(float(row["value"][1]) * 1000))
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        return Prometheus(_without_password(base), {}, describe(error))
    return Prometheus(_without_password(base), found)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
