"""The input of the checks (a :class:`Situation`), and their output (a :class:`CheckResult` with its findings)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from prometheus_client.samples import Sample

from delivery.kafka_admin import Acl, Disk, TopicDescription
from delivery.ledger import Partition
from delivery.topic_admin import COMMAND, Mismatch
from delivery.values import duration_words
from gpustream.doctor.evidence import Evidence, NodeName
from topics.topic import Topic


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong: what it is, its cause, what shows it, and what to do next."""

    finding: str
    cause: str
    evidence: str
    next: str


MAX_NAMED = 5
"""A finding names at most this many of the same kind."""


def first_of(texts: Sequence[str], separator: str = "; ") -> str:
    """The first of some texts, and how many more there are."""
    more = len(texts) - MAX_NAMED
    return separator.join(texts[:MAX_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


class Findings(list[Finding]):
    """The findings of one check."""

    def add(self, finding: str, cause: str, evidence: str, next_step: str) -> None:
        """Adds a finding. ``next_step``: what to do next."""
        self.append(Finding(finding, cause, evidence, next_step))


class CheckResult(NamedTuple):
    """The result of a check: a summary in one line, and its findings. ``looked`` is False if it could not run."""

    summary: str
    findings: Sequence[Finding] = ()
    looked: bool = True


class Kafka(NamedTuple):
    """A Kafka, without its records. ``principal``: the user of this client; ``error``: why no broker could be asked.

    ``topics`` has the topics by the contract's names. ``settings_error`` is why their settings are not known.
    ``other_prefixes`` are prefixes under which there are such topics, too. ``create_command`` makes the topics.
    ``acls`` is None if there are none, or this client may not list them. ``hidden_groups`` are groups that this client
    may not describe.
    """

    servers: str
    principal: str
    error: str = ""
    brokers: Mapping[int, str] = MappingProxyType({})
    disks: Sequence[Disk] = ()
    topics: Mapping[str, TopicDescription] = MappingProxyType({})
    settings_error: str | None = None
    mismatches: Sequence[Mismatch] = ()
    create_command: str = COMMAND
    prefix: str = ""
    other_prefixes: Sequence[str] = ()
    acls: Sequence[Acl] | None = None
    hidden_groups: Sequence[str] = ()


class Lag(NamedTuple):
    """What a group has not finished of a topic: how many records, in which partitions, and how old the oldest is.

    ``oldest_ms`` is when it was logged; None if that is not known. ``finished`` is how many records it finished in the
    next ``watched_s``, and ``grew`` by how much the lag grew meanwhile; None if the group was not asked again.
    """

    topic: str
    records: int
    partitions: tuple[int, ...]
    oldest_ms: int | None
    finished: int | None = None
    grew: int = 0
    watched_s: float = 0.0

    @property
    def movement(self) -> str:
        """What changed in ``watched_s``, as the end of a sentence; empty if the group was not asked again."""
        if self.finished is None:
            return ""
        rate = self.finished / self.watched_s if self.watched_s else 0.0
        change = f"{abs(self.grew)} more" if self.grew else "as many"
        if self.grew < 0:
            left_ms = self.records / (-self.grew / self.watched_s) * 1000
            change = f"{-self.grew} less, so {duration_words(left_ms)} more"
        return f"; in {self.watched_s:.0f} s it finished {self.finished} ({rate:.0f}/s), and lags by {change}"


class Group(NamedTuple):
    """A consumer group: its state as the broker calls it, the number of its members, its lags and committed offsets.

    ``log_starts`` has the log start offset of each partition in which it is higher than the committed offset: the
    records between the two were deleted before the group read them.
    """

    name: str
    state: str
    members: int
    lags: tuple[Lag, ...]
    committed: Mapping[Partition, int] = MappingProxyType({})
    log_starts: Mapping[Partition, int] = MappingProxyType({})


class OpenTransaction(NamedTuple):
    """A transaction that is open in a partition: nobody can read its records, and what came after them.

    ``offset`` is that of its first record, ``since_ms`` is when that was logged, None if that is not known. ``hidden``
    is how many offsets can't be read.
    """

    offset: int
    hidden: int
    since_ms: int | None


class OwnMetrics(NamedTuple):
    """A component's own metrics, and why it is not ready. ``error``: why it could not be asked."""

    url: str
    series: Sequence[Sample] = ()
    not_ready: str = ""
    error: str = ""

    def sums(self, suffix: str) -> dict[tuple[str, str], float]:
        """The sums of the series whose names end in ``suffix``, by name and reason, without those that are zero."""
        sums: dict[tuple[str, str], float] = {}
        for series in self.series:
            if series.name.endswith(suffix) and series.value:
                key = (series.name, series.labels.get("reason", ""))
                sums[key] = sums.get(key, 0) + series.value
        return sums

    def since(self, now_ms: int) -> str:
        """For how long its counters have counted, as text."""
        for series in self.series:
            if series.name == "process_start_time_seconds":
                return f"since its start {duration_words(now_ms - series.value * 1000)} ago"
        return "since its start"


class Prometheus(NamedTuple):
    """The newest sample of each node that a Prometheus has. ``error``: why it could not be asked.

    ``accepts_remote_write`` is None if it does not report that. ``broken_rules`` has the error of each of its rules
    that fails. ``reload_failed``: it could not load its newest configuration, and runs with an older one.
    """

    url: str
    newest_ms: Mapping[NodeName, int]
    error: str = ""
    accepts_remote_write: bool | None = None
    broken_rules: Mapping[str, str] = MappingProxyType({})
    reload_failed: bool = False


Json = dict[str, Any]


class Cluster(NamedTuple):
    """The objects of a namespace, as the Kubernetes API returns them.

    ``leases`` has when each cluster producer's Lease, ``NAMESPACE/NAME``, was renewed; None: it does not exist.
    ``missing_rights`` has, by service account, what it may not do. ``logs`` has the last lines of containers that
    ended, by pod and container. ``refusals`` has, by kind of request, why the API server refused it.
    """

    namespace: str
    error: str = ""
    pods: Sequence[Json] = ()
    nodes: Sequence[Json] = ()
    owners: Sequence[Json] = ()
    config_maps: Mapping[str, Json] = MappingProxyType({})
    leases: Mapping[str, int | None] = MappingProxyType({})
    missing_rights: Mapping[str, Sequence[str]] = MappingProxyType({})
    logs: Mapping[tuple[str, str], str] = MappingProxyType({})
    refusals: Mapping[str, str] = MappingProxyType({})


class Situation(NamedTuple):
    """Everything that the checks look at. ``evidence`` is None if the records could not be read; ``unread`` is why.

    ``silent`` is why Kafka, which had answered, did not answer any more; empty if it did.
    ``groups`` is None if no broker answers for them. ``open_transactions`` has the first one of each partition.
    """

    since_ms: int
    now_ms: int
    kafka: Kafka = Kafka("", "nobody")
    evidence: Evidence | None = None
    unread: str = ""
    silent: str = ""
    groups: Sequence[Group] | None = ()
    components: Sequence[OwnMetrics] = ()
    prometheus: Prometheus | None = None
    cluster: Cluster | None = None
    open_transactions: Mapping[Partition, OpenTransaction] = MappingProxyType({})

    @property
    def window(self) -> str:
        """The time that is looked at."""
        return duration_words(self.now_ms - self.since_ms)

    def ago(self, at_ms: float) -> str:
        """How long ago a time was, as text."""
        return f"{duration_words(max(0, self.now_ms - at_ms))} ago"

    def sums(self, metric: str) -> dict[str, float]:
        """The sums of a metric over the components that were asked, by reason."""
        sums: dict[str, float] = {}
        for component in self.components:
            for (_, reason), value in component.sums(metric).items():
                sums[reason] = sums.get(reason, 0) + value
        return sums

    def hides(self, topic: Topic, partition: int) -> bool:
        """Whether a transaction hides the newest records of a partition."""
        return Partition(topic.name, partition) in self.open_transactions
