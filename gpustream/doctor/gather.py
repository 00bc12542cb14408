"""Asks Kafka, the Kubernetes API, the components and a Prometheus for what the checks look at.

In:       a connection, a time, addresses.
Out:      a :class:`Situation`.
State:    none. It joins no consumer group and commits nothing.
On failure: whatever does not answer is in the :class:`Situation`, with the reason, and the others are asked.

The order of the questions matters. gpu.samples is asked first where it ends, then the groups what they have finished,
then the other topics where they end: so what is finished of the samples is in the others. Everything is read to these
ends, however much comes meanwhile. Groups that are behind are asked a second time, to see whether they catch up.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from delivery import kafka_admin
from delivery.clients import OffsetClient
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError, GroupDescription
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.positions import STATE_WINDOW_MS
from gpustream import history
from gpustream.doctor import brokers, pods, readers
from gpustream.doctor.evidence import Fold, NodeName
from gpustream.doctor.readers import ATTRIBUTION
from gpustream.doctor.seen import Cluster, Group, Lag, OwnMetrics, Prometheus, Series, Situation
from gpustream.history import History, Span
from gpustream.output import now_ms
from topics import allocations, attributed, dead_letters, samples, workloads

GROUPS = "gpustream-"

_ANSWER_S = 10.0
_BROKERS_DIFFER_MS = 60_000
"""How much the clocks of two brokers may differ: what is made of a sample may have an earlier log time than that."""

WATCH_S = 3.0
"""After this a group that is behind is asked again: it commits every second."""

_QUERY = "max by (k8s_cluster_name, k8s_node_name, cluster, hostname, node) (timestamp(gpu_info))"
_CLUSTER_LABELS = ("k8s_cluster_name", "cluster")
_NODE_LABELS = ("k8s_node_name", "hostname", "node")
_STATES = (allocations.TOPIC.name, workloads.TOPIC.name)
_IN_ORDER = (dead_letters.TOPIC.name, *_STATES, attributed.TOPIC.name, samples.TOPIC.name)


class Scope(NamedTuple):
    """What is looked at: how far back, whose metrics, which Prometheus, which namespace of which cluster if any."""

    since_s: float
    metrics: Sequence[str] = ()
    prometheus: str | None = None
    namespace: str | None = None
    kubeconfig: Path | None = None


async def gather(connection: Connection, wanted: Scope) -> Situation:
    """Everything that the checks look at."""

    async def kube() -> Cluster | None:
        return await pods.ask(wanted.kubeconfig, wanted.namespace) if wanted.namespace is not None else None

    asked, components, cluster = await asyncio.gather(brokers.ask(connection), ask_components(wanted.metrics), kube())
    at_ms = now_ms()  # only now: what hangs takes seconds, and the records are read after that
    since_ms = at_ms - int(wanted.since_s * 1000)
    seen = Situation(since_ms, at_ms, asked, components=components, cluster=cluster)
    if asked.error:
        seen = seen._replace(groups=None, unread=asked.error)
    else:
        seen = await _read(connection, seen)
    return seen._replace(prometheus=await ask_prometheus(wanted.prometheus) if wanted.prometheus else None)


async def _read(connection: Connection, seen: Situation) -> Situation:
    """What the records say, and the groups. Partitions without a leader are left out."""
    readable = brokers.known_topics(seen.kafka.found)
    unread = brokers.readable(seen.kafka, _IN_ORDER)
    leaderless = [Partition(name, number) for name, one in seen.kafka.found.items() for number in one.leaderless]
    try:
        async with history.opened(connection, readable, without=leaderless) as past:
            spans = {} if unread else {samples.TOPIC.name: await past.spans(samples.TOPIC.name, seen.since_ms)}
            groups = await _groups(connection)
            fold = None if unread else await _fold(past, spans, seen.since_ms, groups or ())
            known = None if groups is None else await _with_lags(past, groups)
            seen = seen._replace(fold=fold, unread=unread, groups=known)
            behind = [
                lag for group in seen.groups or () for lag in group.lags if readers.is_behind(seen, lag.oldest_ms)
            ]
            return await _watched(past, seen) if behind else seen
    except BrokerError as error:
        return seen._replace(unread=str(error), groups=seen.groups or None)


async def _groups(connection: Connection) -> list[GroupDescription] | None:
    """The groups; None if no broker answers for them."""
    try:
        async with kafka_admin.connect(connection) as admin:
            return await admin.groups(GROUPS)
    except BrokerError:
        return None


async def _fold(
    past: History, spans: dict[str, dict[Partition, Span]], since_ms: int, groups: Iterable[GroupDescription]
) -> Fold:
    """The records, folded. ``spans`` are those of gpu.samples, which were asked for before the groups."""
    for topic in _IN_ORDER[:-1]:
        before_ms = STATE_WINDOW_MS if topic in _STATES else _BROKERS_DIFFER_MS
        spans[topic] = await past.spans(topic, since_ms - before_ms)
    finished = {
        tp.partition: offset
        for group in groups
        for tp, offset in group.committed.items()
        if group.name == ATTRIBUTION and tp.topic == samples.TOPIC.name
    }
    wholes = {tp: span for topic in _IN_ORDER[-2:] for tp, span in (await past.spans(topic)).items()}
    begins = {tp: all_of.start for tp, all_of in wholes.items() if spans[tp.topic][tp].start <= all_of.start}
    fold = Fold(finished, past.connection.unprefixed, begins)
    for topic in _IN_ORDER:
        with history.progress(topic, spans[topic]) as advanced:
            async for records in past.records(spans[topic], advanced):
                for record in records:
                    fold.take(record)
    return fold


async def _watched(past: History, seen: Situation) -> Situation:
    """The same, after some seconds, with what each group has done in them."""
    began_s = time.monotonic()
    await asyncio.sleep(WATCH_S)
    again = await _groups(past.connection)
    watched_s = time.monotonic() - began_s
    later = {group.name: group for group in await _with_lags(past, again or ())}
    return seen._replace(
        groups=[
            _moved(group, after, watched_s) if (after := later.get(group.name)) else group
            for group in seen.groups or ()
        ]
    )


def _moved(group: Group, later: Group, watched_s: float) -> Group:
    """A group, with what it finished in ``watched_s`` until it was as it is ``later``."""
    left = {lag.topic: lag.records for lag in later.lags}
    lags = [
        lag._replace(
            finished=sum(
                max(0, at - group.committed.get(tp, 0)) for tp, at in later.committed.items() if tp.topic == lag.topic
            ),
            grew=left.get(lag.topic, 0) - lag.records,
            watched_s=watched_s,
        )
        for lag in group.lags
    ]
    return group._replace(lags=tuple(lags))


async def _with_lags(past: History, groups: Sequence[GroupDescription]) -> list[Group]:
    """The groups, each with what it has not finished of the topics in which it has committed something."""
    topics = {tp.topic for group in groups for tp in group.committed} & past.partitions.keys()
    spans = {tp: span for topic in topics for tp, span in (await past.spans(topic)).items()}
    behind: dict[str, dict[Partition, int]] = {}
    for group in groups:
        mine = {tp.topic for tp in group.committed}
        at = {tp: max(group.committed.get(tp, one.start), one.start) for tp, one in spans.items() if tp.topic in mine}
        behind[group.name] = {tp: offset for tp, offset in at.items() if offset < spans[tp].end}
    times = await _times(past, [place for places in behind.values() for place in places.items()])
    found = []
    for group in groups:
        lags = []
        for topic in sorted({tp.topic for tp in behind[group.name]}):
            places = {tp: at for tp, at in behind[group.name].items() if tp.topic == topic}
            records = sum(spans[tp].end - at for tp, at in places.items())
            oldest_ms = min((at_ms for place in places.items() if (at_ms := times[place])), default=None)
            lags.append(Lag(topic, records, tuple(tp.partition for tp in places), oldest_ms))
        lost = {tp: spans[tp].start for tp, at in group.committed.items() if tp in spans and at < spans[tp].start}
        found.append(Group(group.name, group.state, group.members, tuple(lags), group.committed, lost))
    return found


async def _times(past: History, places: Iterable[tuple[Partition, int]]) -> dict[tuple[Partition, int], int | None]:
    """When the records at these offsets were logged. A question has one offset of each partition."""
    asked: dict[Partition, set[int]] = {}
    for tp, at in places:
        asked.setdefault(tp, set()).add(at)
    offsets, times = (
        OffsetClient(past.connection, client_id="gpustream-doctor"),
        dict[tuple[Partition, int], int | None](),
    )
    while asked:
        some = {tp: left.pop() for tp, left in asked.items()}
        asked = {tp: left for tp, left in asked.items() if left}
        times |= {(tp, some[tp]): at_ms for tp, at_ms in (await offsets.times(some)).items()}
    return times


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
    """The newest sample of each node, by ``gpu_info``, which each device has in each profile; and how it is itself."""
    base = url.rstrip("/")
    found: dict[NodeName, int] = {}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
            for labels, value in await _instant(session, base, _QUERY):
                cluster = next((labels[label] for label in _CLUSTER_LABELS if label in labels), "")
                node = next((labels[label] for label in _NODE_LABELS if label in labels), "")
                name = NodeName(cluster, node)
                found[name] = max(found.get(name, 0), int(value * 1000))
            flags = await _of_api(session, base, "status/flags")
            rules = await _of_api(session, base, "rules")
            reloads = await _instant(session, base, "prometheus_config_last_reload_successful")
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        return Prometheus(_without_password(base), {}, describe(error))
    receives = flags.get("web.enable-remote-write-receiver") if flags else None
    broken = {
        str(rule.get("name")): str(rule.get("lastError"))
        for group in (rules or {}).get("groups", [])
        for rule in group.get("rules", [])
        if rule.get("health") == "err"
    }
    return Prometheus(
        _without_password(base),
        found,
        receives=None if receives is None else receives == "true",
        broken_rules=broken,
        reload_failed=any(value == 0 for _, value in reloads),
    )


async def _instant(session: aiohttp.ClientSession, base: str, query: str) -> list[tuple[dict[str, str], float]]:
    """What an instant query answers: labels and value."""
    async with session.get(f"{base}/api/v1/query", params={"query": query}) as answer:
        answer.raise_for_status()
        said: Any = await answer.json()
    return [(row["metric"], float(row["value"][1])) for row in said["data"]["result"]]


async def _of_api(session: aiohttp.ClientSession, base: str, path: str) -> dict[str, Any] | None:
    """What Prometheus says of itself; None from a receiver that has no such page."""
    async with session.get(f"{base}/api/v1/{path}") as answer:
        said: Any = await answer.json() if answer.ok else None
    data = said.get("data") if isinstance(said, dict) else None
    return data if isinstance(data, dict) else None


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
