"""``gpustream reclaim``: what was decided about workloads that waste GPUs, and how to take it back.

In:       gpu.actions, read whole and in no group; for ``undo`` the API server, as whoever asks.
Out:      a table on a terminal, tab-separated fields elsewhere, or the records as JSON lines; ``undo`` changes the
          object that the action changed, and writes that to gpu.actions.
On failure: a sentence and exit code 1. If somebody changed the object since, nothing is done.
"""

import getpass
import logging
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import click
import msgspec

from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.dead_letters import connecting
from delivery.kafka_admin import BrokerError
from delivery.kubernetes.client import Client, Unreachable
from delivery.kubernetes.credentials import ConfigError
from delivery.sender import Sender
from delivery.values import printable
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Argument, Command, CommandGroup, option, options, output_format
from gpustream.output import answer, json_lines, second, show
from producers.cluster.config import ClusterSettings
from sinks.reclaim.cluster import Cluster, Denied
from sinks.reclaim.decide import Objection, describe, unpatch, was_undone
from sinks.reclaim.ledger import OVER
from topics import actions
from topics.actions import Action, kafka_headers
from topics.times import time_of
from topics.topic import decoder

log = logging.getLogger(__name__)

COLUMNS = ("at", "action", "state", "cluster", "what", "when", "why")
_decode = decoder(Action)


@click.group(cls=CommandGroup)
def reclaim() -> None:
    """What was decided about workloads that waste GPUs, and how to take it back."""


@reclaim.command(
    "list",
    cls=Command,
    example=(
        "gpustream reclaim list --kafka 127.0.0.1:9092\n"
        "gpustream reclaim list --kafka kafka-0:9092 --namespace ml-team --format json | jq .message"
    ),
)
@KAFKA
@option("--namespace", help="Only what is about workloads of this namespace.")
@output_format("table", "json", help="json: the last record of each action, one a line.")
@LOG_FORMAT
def list_(connection: Connection, namespace: str | None, form: Literal["table", "json"]) -> None:
    """List what is planned, would be done, was done, refused or undone: the last word on each action."""
    rows = sorted(map(decisive, answer(_actions(connection)).values()), key=lambda action: (action.at, action.id))
    rows = [action for action in rows if namespace in (None, action.namespace)]
    if form == "json":
        json_lines(rows)
        return
    table_rows = []
    for action in rows:
        due, object_text = "", f"namespace {action.namespace}"
        if action.action and action.target:
            object_text = describe(action.action, action.target, action.namespace)
        if action.due_at is not None and action.state == "planned":
            due = second(action.due_at)
        reason = " ".join(f"{action.reason or action.alert}: {action.message}".split())
        cells = (second(action.at), action.id, action.state, action.cluster, object_text, due, reason)
        table_rows.append(tuple(printable(cell, "") for cell in cells))
    show(COLUMNS, table_rows, nothing="nothing was decided")


@reclaim.command("undo", cls=Command, example="gpustream reclaim undo 3f5a0c8e9b1d2c47 --kafka 127.0.0.1:9092")
@click.argument("action", cls=Argument)
@KAFKA
@options(ClusterSettings, only=("kubeconfig",))
@LOG_FORMAT
def undo(action: str, connection: Connection, kubeconfig: Path | None) -> None:
    """Give a workload its replicas back, or let it go on, unless somebody changed it since. ACTION: `list` has it."""
    if not re.fullmatch("[0-9a-f]{16}", action):
        raise click.UsageError(f"{action[:80]!r} is no action: `gpustream reclaim list` has those that there are")
    click.echo(answer(_undo(connection, action, kubeconfig)))


class NotUndone(BrokerError):
    """It can't be undone; the message says why."""


async def _actions(connection: Connection) -> dict[str, list[Action]]:
    actions_by_id: dict[str, list[Action]] = {}
    async with history.opened(connection, [actions.TOPIC.name]) as reader:
        async for records in reader.records(await reader.spans(actions.TOPIC.name)):
            for _, action in history.decoded(records, _decode, log):
                actions_by_id.setdefault(action.id, []).append(action)
    return actions_by_id


def decisive(records: Sequence[Action]) -> Action:
    """Of the records of an action the one that counts: the last one, but nothing after an end except ``undone``."""
    counting = records[0]
    for action in records[1:]:
        if counting.state not in OVER or action.state == "undone":
            counting = action
    return counting


async def _undo(connection: Connection, action_id: str, kubeconfig: Path | None) -> str:
    """Undoes an action, and returns a sentence about it. Raises BrokerError."""
    records = (await _actions(connection)).get(action_id)
    if records is None:
        raise NotUndone(f"there is no action {action_id} in {connection.prefixed(actions.TOPIC.name)}")
    # the API server may have done it after the request was given up, whatever was decided later
    action = decisive([action for action in records if action.state in ("intended", *OVER)] or records)
    if action.state not in ("done", "intended"):
        raise NotUndone(f"action {action_id} is {action.state}: there is nothing to undo")
    api = Client(kubeconfig)
    try:
        await api.start()
        await _give_back(Cluster(api), action)
    except (ConfigError, Unreachable, Denied) as error:
        raise NotUndone(f"{error}") from error
    finally:
        await api.close()
    try:
        user = f"user {getpass.getuser()}"
    except (OSError, KeyError):
        user = f"gpustream reclaim undo at {datetime.now(UTC):%H:%M:%SZ}"
    undone = msgspec.structs.replace(action, state="undone", at=time_of(now_ms()), by=user, reason=None)
    await write_down(connection, undone)
    target = f"{action.target.kind} {action.namespace}/{action.target.name}" if action.target else action.namespace
    return f"undone: {target} {'has its replicas again' if action.action == 'scale' else 'may go on'}"


async def write_down(connection: Connection, undone: Action) -> None:
    """Writes that an action is undone. Raises NotUndone."""
    sender = Sender(connection, client_id="gpustream-reclaim")
    writer = history.Writer(sender)
    async with connecting(sender):
        value, key = msgspec.json.encode(undone), undone.cluster.encode()
        try:
            await writer.write(actions.TOPIC.name, value, key, headers=kafka_headers(undone))
            await writer.settle()
        except BrokerError as error:
            raise NotUndone(f"it was undone, and that could not be written down: {error}") from error


async def _give_back(cluster: Cluster, action: Action) -> None:
    """Changes the object back. Raises NotUndone, Denied and Unreachable."""
    if action.target is None:
        raise NotUndone("not undone: the action is about no object")
    current = await cluster.get(action.target, action.namespace)
    if was_undone(current, action.id):
        return  # by an earlier command, which ended before it could write so to gpu.actions
    patch = unpatch(action, current)
    if isinstance(patch, Objection):
        raise NotUndone(f"not undone: {patch.message}")
    if await cluster.change(action.target, action.namespace, patch) is None:
        raise NotUndone("not undone: somebody changed it at the same time: try again")
