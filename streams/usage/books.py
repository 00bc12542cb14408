"""The books of a node: its GPUs, the accounts to which their time is booked, and its open windows. Integers only. Pure.

In: rows of amounts, by account. Out: records of usage. The books are written to gpu.usage-state as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import add
from typing import Annotated, NamedTuple

import msgspec

from streams.usage.measure import Split
from streams.usage.tick import JSON_NULL, kept
from topics.attributed import Workload, team_of
from topics.topic import UInt, decoder, lenient
from topics.usage import HOUR_MS, MINUTE_MS, Usage, UsageState

FINAL_AFTER_MS = 20 * MINUTE_MS
"""A minute is final after this time, which is longer than the producers' --buffer. A node has to be silent for at least
as long before its windows are closed without a tick."""

FIELDS = (
    "device_ms", "slice_ms", "used_us", "idle_ms", "tensor_us", "energy_mj", "memory_byte_ms", "exact_ms", "late_ms",
    "none_ms",
)  # fmt: skip
DEVICE, SLICE, USED, IDLE, TENSOR, ENERGY, MEMORY, EXACT, LATE, NONE = range(10)
Amounts = Annotated[list[UInt], msgspec.Meta(min_length=len(FIELDS), max_length=len(FIELDS))]
Rows = dict[int, Amounts]  # by account number


class Accounting(NamedTuple):
    """How shared devices are divided, the label that names the team, and the generation of the records.
    ``live``: the windows of a silent node are closed; in a replay only its own ticks close them."""

    split: Split = "used"
    team_label: str = "team"
    generation: int = 0
    live: bool = True


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """What time is booked to: a device and its holder, or the reason why it has none. Workload and labels are JSON."""

    gpu_uuid: str
    uuid: str
    category: str
    namespace: str | None = None
    pod: str | None = None
    pod_uid: str | None = None
    container: str | None = None
    workload: msgspec.Raw = JSON_NULL
    labels: msgspec.Raw = JSON_NULL
    namespace_labels: msgspec.Raw = JSON_NULL

    @property
    def name(self) -> tuple[str | None, ...]:
        """What identifies it in a window. Accounts with the same name differ in workload or labels only."""
        return self.gpu_uuid, self.uuid, self.category, self.namespace, self.pod, self.pod_uid, self.container

    @property
    def owner(self) -> list[msgspec.Raw]:
        """What may change of its holder."""
        return [self.workload, self.labels, self.namespace_labels]

    @property
    def owner_bytes(self) -> int:
        return sum(map(len, map(bytes, self.owner)))


class Meter(msgspec.Struct, omit_defaults=True):
    """What is known of a physical GPU: its model, its slices, and the last reading of its energy counter."""

    model: str | None = None
    slices: UInt = 1
    energy_mj: UInt | None = None
    at_ms: UInt = 0


class Closed(msgspec.Struct):
    """A closed minute that is not final; ``rows`` is the JSON of its :data:`Rows`."""

    start_ms: UInt
    rows: msgspec.Raw
    written: bool = False


class Hour(msgspec.Struct):
    """An hour that is not final.

    ``of`` has the slices of its GPUs. ``closed`` is the number of its closed minutes, and ``rows`` is their sum;
    ``written`` of them are in its last record. ``minute`` is the open minute, ``minutes`` are closed and not final.
    """

    start_ms: UInt
    of: dict[str, UInt] = {}
    closed: UInt = 0
    written: UInt = 0
    rows: Rows = {}
    minute: Rows = {}
    minutes: list[Closed] = []

    @property
    def end_ms(self) -> int:
        return self.start_ms + HOUR_MS


class Books(UsageState, kw_only=True):
    """The books of a node: its GPUs, the accounts to which their time is booked, and its open windows."""

    node_labels: msgspec.Raw = JSON_NULL
    accounts: dict[int, Account] = msgspec.field(default_factory=dict)
    meters: dict[str, Meter] = msgspec.field(default_factory=dict)
    hours: list[Hour] = msgspec.field(default_factory=list)

    @property
    def order(self) -> tuple[int, ...]:
        """The later of two books of a node has the greater one."""
        return self.logs, self.offset, self.booked_ms, self.final_ms


_decode = decoder(Books)
encode = msgspec.json.Encoder().encode
rows_of = msgspec.json.Decoder(Rows).decode
labels_of = lenient(msgspec.json.Decoder(dict[str, str] | None).decode)
workload_of = lenient(msgspec.json.Decoder(Workload | None).decode)


def decode(value: bytes) -> Books:
    """The books of a node. Raises ``msgspec.DecodeError``, also if no record can be made of the rows: the account of a
    row is missing, or its GPU, or the labels are malformed."""
    books = _decode(value)
    books.node_labels = kept(books.node_labels)
    labels_of(books.node_labels)
    for number, account in books.accounts.items():
        workload_of(account.workload), labels_of(account.labels), labels_of(account.namespace_labels)
        owner = dict(zip(("workload", "labels", "namespace_labels"), map(kept, account.owner), strict=True))
        books.accounts[number] = msgspec.structs.replace(account, **owner)
    for hour in books.hours:
        for minute in hour.minutes:
            minute.rows = minute.rows.copy()
        closed_rows = [rows_of(minute.rows) for minute in hour.minutes]
        accounts = [books.accounts.get(number) for rows in (hour.rows, hour.minute, *closed_rows) for number in rows]
        known_gpus = hour.of.keys() & books.meters.keys()
        if not all(account is not None and account.gpu_uuid in known_gpus for account in accounts):
            raise msgspec.DecodeError("a row is of no account, or of no GPU, of the books")
    return books


def of_team(account: Account, team_label: str) -> Account:
    """The account with no labels of its pod and namespace but the team's."""
    labels, namespace_labels = (
        msgspec.Raw(encode({name: text for name, text in (labels_of(raw) or {}).items() if name == team_label}))
        for raw in (account.labels, account.namespace_labels)
    )
    return msgspec.structs.replace(account, labels=labels, namespace_labels=namespace_labels)


def row_of(rows: Rows, number: int) -> Amounts:
    """The row of an account, added if it is missing."""
    row = rows.get(number)
    if row is None:
        row = rows[number] = [0] * len(FIELDS)
    return row


def add_amounts(rows: Rows, number: int, amounts: Sequence[int], slices: int, idle: bool, attribution: int) -> None:
    """Book the amounts of a piece of time: milliseconds, used time, used time of tensor cores, energy and memory."""
    ms, used, tensor, energy, memory = amounts
    row = rows.get(number) or row_of(rows, number)
    row[DEVICE] += ms
    row[SLICE] += ms * slices
    row[USED] += used
    row[TENSOR] += tensor
    row[ENERGY] += energy
    row[MEMORY] += memory
    row[attribution] += ms
    if idle:
        row[IDLE] += ms


def add_rows(rows: Rows, others: Rows) -> None:
    """Add the amounts of other rows to these."""
    for number, amounts in others.items():
        rows[number] = list(map(add, row_of(rows, number), amounts))


class Window(NamedTuple):
    """A minute or an hour, and how much of it is closed."""

    start_ms: int
    end_ms: int
    revision: int
    final: bool


def records_of(
    books: Books, policy: Accounting, rows: Rows, slices: Mapping[str, int], window: Window
) -> Iterator[Usage]:
    """The records of a window: one for each holder and category, with the last workload and labels of the holder.
    ``slices``: those of its GPUs."""
    merged: dict[tuple[str | None, ...], tuple[Account, Amounts]] = {}
    for number in sorted(rows):
        account = books.accounts[number]
        earlier = merged.get(account.name)
        amounts = rows[number] if earlier is None else list(map(add, earlier[1], rows[number]))
        merged[account.name] = account, amounts
    for account, amounts in merged.values():
        labels, namespace_labels = labels_of(account.labels) or {}, labels_of(account.namespace_labels) or {}
        yield Usage(
            schema=1,
            cluster=books.cluster,
            node=books.node,
            gpu_uuid=account.gpu_uuid,
            uuid=account.uuid,
            start_ms=window.start_ms,
            end_ms=window.end_ms,
            category=account.category,
            generation=policy.generation,
            revision=window.revision,
            final=window.final,
            policy=policy.split,
            namespace=account.namespace,
            pod=account.pod,
            pod_uid=account.pod_uid,
            container=account.container,
            workload=workload_of(account.workload),
            team=team_of(labels, namespace_labels, policy.team_label),
            labels=labels,
            node_labels=labels_of(books.node_labels) or {},
            model=books.meters[account.gpu_uuid].model,
            of=slices[account.gpu_uuid],
            **dict(zip(FIELDS, amounts, strict=True)),
        )
