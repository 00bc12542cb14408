"""What the checks look at, and what they say."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from delivery.kafka_admin import Acl, Disk, TopicDescription
from delivery.ledger import Partition
from delivery.topic_admin import COMMAND, Mismatch
from delivery.values import duration_words
from gpustream.doctor.evidence import Fold, NodeName


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be."""

    finding: str
    cause: str
    evidence: str
    next: str


class Findings(list[Finding]):
    """What a check finds, as it goes."""

    def say(self, finding: str, cause: str, evidence: str, then: str) -> None:
        """One more thing that is not as it should be; ``then``: what to do next."""
        self.append(Finding(finding, cause, evidence, then))


class Checked(NamedTuple):
    """What a check has seen, in one line, and what it has found; ``looked``: whether it could look at all."""

    summary: str
    findings: Sequence[Finding] = ()
    looked: bool = True


class Kafka(NamedTuple):
    """What a Kafka is, beside its records. ``whom``: as whom it was asked; ``error``: why it could not be.

    ``found`` are the topics by the contract's names. ``elsewhere`` are prefixes under which there are such topics, too.
    ``acls`` is None if this client may not know them, or there are none to know. ``hidden`` are groups that this client
    may not see.
    """

    servers: str
    whom: str
    error: str = ""
    brokers: Mapping[int, str] = MappingProxyType({})
    disks: Sequence[Disk] = ()
    found: Mapping[str, TopicDescription] = MappingProxyType({})
    unchecked: str | None = None
    mismatches: Sequence[Mismatch] = ()
    create: str = COMMAND
    prefix: str = ""
    elsewhere: Sequence[str] = ()
    acls: Sequence[Acl] | None = None
    hidden: Sequence[str] = ()


class Lag(NamedTuple):
    """What a group has not finished of a topic: how many records, in which partitions, and how old the oldest is.

    ``oldest_ms`` is when it was logged; None if that is not known. ``finished`` is how many records it finished in the
    ``watched_s`` after that, and ``grew`` by how many it lags more then; None if nobody looked again.
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
        """What changed while it was watched, as the end of a sentence; no text if nobody looked again."""
        if self.finished is None:
            return ""
        pace = self.finished / self.watched_s if self.watched_s else 0.0
        change = f"{abs(self.grew)} more" if self.grew else "as many"
        if self.grew < 0:
            left_ms = self.records / (-self.grew / self.watched_s) * 1000
            change = f"{-self.grew} less, so {duration_words(left_ms)} more"
        return f"; in {self.watched_s:.0f} s it finished {self.finished} ({pace:.0f}/s), and lags by {change}"


class Group(NamedTuple):
    """A consumer group: its state as the broker calls it, how many members it has, what it has not finished, and the
    offsets that it has committed.

    ``begins`` is where the log of a partition begins, if that is after what the group has committed: what was between
    the two was deleted before the group read it.
    """

    name: str
    state: str
    members: int
    lags: tuple[Lag, ...]
    committed: Mapping[Partition, int] = MappingProxyType({})
    begins: Mapping[Partition, int] = MappingProxyType({})


class Series(NamedTuple):
    """One series of a component's own metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


class OwnMetrics(NamedTuple):
    """What a component says of itself: its metrics, and why it is not ready. ``error``: why it could not be asked."""

    url: str
    series: Sequence[Series] = ()
    not_ready: str = ""
    error: str = ""

    def sums(self, suffix: str) -> dict[tuple[str, str], float]:
        """The counters that end in a suffix and are not zero, by name and reason."""
        found: dict[tuple[str, str], float] = {}
        for one in self.series:
            if one.name.endswith(suffix) and one.value:
                key = (one.name, one.labels.get("reason", ""))
                found[key] = found.get(key, 0) + one.value
        return found

    def since(self, now_ms: int) -> str:
        """For how long it has counted."""
        started = [one.value for one in self.series if one.name == "process_start_time_seconds"]
        return f"since its start {duration_words(now_ms - started[0] * 1000)} ago" if started else "since its start"


class Prometheus(NamedTuple):
    """The newest sample of each node that a Prometheus has. ``error``: why it could not be asked.

    ``receives`` is None if it does not say whether it takes remote write. ``broken_rules`` are those of its own
    rules that fail, with its words; ``reload_failed`` if it does not run with the configuration that it has.
    """

    url: str
    newest_ms: Mapping[NodeName, int]
    error: str = ""
    receives: bool | None = None
    broken_rules: Mapping[str, str] = MappingProxyType({})
    reload_failed: bool = False


Json = dict[str, Any]


class Cluster(NamedTuple):
    """What the Kubernetes API says of a namespace, as it says it. ``refused`` are the questions that it did not answer,
    and why; ``logs`` the last lines of containers that ended, by pod and container; ``missing_rights`` what service
    accounts lack, by account; ``lease_ms`` when the cluster producer's Lease was renewed."""

    namespace: str
    error: str = ""
    pods: Sequence[Json] = ()
    nodes: Sequence[Json] = ()
    owners: Sequence[Json] = ()
    config_maps: Mapping[str, Json] = MappingProxyType({})
    lease_ms: int | None = None
    missing_rights: Mapping[str, Sequence[str]] = MappingProxyType({})
    logs: Mapping[tuple[str, str], str] = MappingProxyType({})
    refused: Mapping[str, str] = MappingProxyType({})


class Situation(NamedTuple):
    """All that the checks look at; ``fold`` is None if the records could not be read, ``unread`` says why.

    ``groups`` is None if they could not be asked.
    """

    since_ms: int
    now_ms: int
    kafka: Kafka = Kafka("", "nobody")
    fold: Fold | None = None
    unread: str = ""
    groups: Sequence[Group] | None = ()
    components: Sequence[OwnMetrics] = ()
    prometheus: Prometheus | None = None
    cluster: Cluster | None = None

    @property
    def window(self) -> str:
        """The time that is looked at."""
        return duration_words(self.now_ms - self.since_ms)

    def ago(self, at_ms: float) -> str:
        """How long ago something was."""
        return f"{duration_words(max(0, self.now_ms - at_ms))} ago"
