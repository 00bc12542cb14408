"""``make upgrade``: this tree and an older commit side by side on a real Kafka, in both directions, and back.

In:       the older commit, by default that of ``tests/real/upgrade_records``, which ``--record`` writes.
Out:      a line for each step. Exit code 1 if a tick or an alert was lost, came twice or was dead-lettered, or if the
          usage of a minute is not that of its ticks.

The older commit is checked out into a folder of its own, and runs with this tree's Python and libraries. Usage is tried
if it has that stream, and alerts if it has those of several GPUs: an older one leaves these open.
"""

import argparse
import asyncio
import gzip
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from delivery import topic_admin
from streams.alerts import groups
from streams.alerts.node import Replay
from streams.alerts.rules import rules_file
from streams.alerts.tick import decode as decode_tick
from tests.eventually import eventually
from tests.real.pipeline import Gpustream, Truth, lag, read_all, usage_of
from tests.real.process import Server
from tests.real.servers import KafkaServer
from tests.usage_sums import UsageSums
from topics.alerts import Alert, AlertGroup, transition_id
from topics.topic import decoder
from topics.usage import MINUTE_MS, MINUTES, Usage

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).parent / "upgrade_records"
OLD = "d9fbcfc"
"""The last commit before the topics of usage, and before the consumer groups of today."""

TOPICS = ("gpu.samples", "gpu.allocations", "gpu.workloads", "gpu.attributed", "gpu.alerts", "gpu.alert-state")
GROUP = "gpustream-attribution"
TICKS = 20
RULES = """
[rules.GPUHeldIdle]
for = "300ms"
grace = "0s"
keep_firing_for = "0s"
[rules.NodeSilent]
enabled = false
"""


class Version(Gpustream):
    """A process of the tree in a folder."""

    def __init__(self, tree: Path, directory: Path, *arguments: str) -> None:
        super().__init__(directory, *arguments)
        run = f"import os, sys, runpy; os.chdir({str(tree)!r}); sys.path.insert(0, {str(tree)!r}); "
        self.python = ["-c", run + "sys.argv[0] = 'gpustream'; runpy.run_module('gpustream', run_name='__main__')"]

    def stop(self) -> None:
        """Ends it in good order. Its own metrics are checked by its own version only."""
        Server.stop(self)


class Trial:
    """Runs processes of two trees on one Kafka."""

    def __init__(self, kafka: KafkaServer, directory: Path, *, has_usage: bool, has_groups: bool) -> None:
        self._kafka, self._directory, self._count = kafka, directory, 0
        self._has_usage, self._has_groups = has_usage, has_groups
        self.minute_rows: list[Usage] = []
        self._rules = directory / "rules.toml"
        self._rules.write_text(RULES)

    def process(self, tree: Path, *arguments: str) -> Version:
        self._count += 1
        directory = self._directory / f"{self._count}"
        return Version(tree, directory, *arguments, "--kafka", self._kafka.address)

    async def sample(self, tree: Path) -> Truth:
        """A fleet of that tree samples some ticks; what it sampled."""
        truth = self._directory / f"truth-{self._count}.jsonl"
        fleet = (
            "produce",
            "simulated",
            "--fleet",
            "2x4",
            "--interval",
            "100ms",
            "--pod-life",
            "3s",
            "--truth",
            str(truth),
        )
        with self.process(tree, *fleet) as sampling:
            await eventually(lambda: truth.exists() and len(Truth.read(truth).ticks) >= TICKS)
            sampling.stop()
        return Truth.read(truth)

    async def attribute(self, tree: Path, expected: Truth) -> None:
        """The streams of that tree go on in their groups until they have taken everything."""

        async def taken() -> bool:
            inputs = [(GROUP, "gpu.samples"), ("gpustream-alerts", "gpu.attributed")]
            inputs += [("gpustream-alerts", "gpu.alert-members")] if self._has_groups else []
            return not any([await lag(self._kafka.address, group, [topic]) for group, topic in inputs])

        streams = [
            self.process(tree, "stream", "attribution"),
            self.process(tree, "stream", "alerts", "--rules", str(self._rules)),
            *([self.process(tree, "stream", "usage")] if self._has_usage else []),
        ]
        with ExitStack() as running:
            for stream in streams:
                running.enter_context(stream)
            await eventually(lambda: self.all_there(expected))
            await eventually(taken)
            if self._has_usage:
                await eventually(self.usage_is_right, "the usage of each minute that has ended is that of its ticks")
            for stream in streams:
                stream.stop()

    async def all_there(self, expected: Truth) -> bool:
        return {tick for tick, _ in await self.attributed()} >= expected.ticks

    async def attributed(self) -> list[tuple[tuple[str, str, int, int], str]]:
        """The ticks of gpu.attributed, and how they were joined."""
        rows = [json.loads(record.value) for record in await read_all(self._kafka.address, "gpu.attributed")]
        return [((row["cluster"], row["node"], row["run_id"], row["seq"]), row["attribution"]) for row in rows]

    async def usage_is_right(self) -> bool:
        """Whether the records of all minutes that have ended on all nodes are the sums of the ticks there."""
        sums, last_ms = UsageSums(), dict[str, int]()
        for record in await read_all(self._kafka.address, "gpu.attributed"):
            tick = json.loads(record.value)
            sums.add(tick, tick.get("logged_ms") or record.timestamp)
            last_ms[tick["node"]] = tick["ts_ms"]
        until_ms = min(last_ms.values()) // MINUTE_MS * MINUTE_MS
        records = (await usage_of(self._kafka.address, MINUTES.name)).values()
        self.minute_rows = [record for record in records if record.start_ms < until_ms]
        differences = sums.differences(self.minute_rows, MINUTE_MS, until_ms)
        return all(difference.startswith("not final") for difference in differences)

    async def check_alerts(self) -> str:
        """Whether the alerts of single GPUs are those that this tree finds in the ticks, and those of several GPUs what
        it makes of the reports; none was resolved twice. Raises AssertionError."""
        rules, address = rules_file.load(self._rules), self._kafka.address
        replay, group_by_key = Replay(rules, grouped=False), dict[str, AlertGroup]()
        expected, found, grouped = list[Alert](), list[Alert](), list[Alert]()
        for record in await read_all(address, "gpu.attributed"):
            expected += replay.judge(decode_tick(record.value), record.timestamp)
        for record in await read_all(address, "gpu.alert-members"):
            report = groups.decode_report(record.value)
            found += report.alerts
            step = groups.step(group_by_key.get(report.group), report, record.offset, rules)
            group_by_key[report.group] = step.group
            grouped += step.alerts
        alerts = [decoder(Alert)(record.value) for record in await read_all(address, "gpu.alerts")]
        of_groups = [alert for alert in alerts if alert.fingerprint in group_by_key]
        found += [alert for alert in alerts if alert.fingerprint not in group_by_key]
        assert _transitions(found) == _transitions(expected)
        assert _transitions(of_groups) == _transitions(grouped)
        ends = Counter(transition_id(alert) for alert in alerts if not alert.is_open)
        assert set(ends.values()) <= {1}
        return f"{len(_transitions(alerts))} transitions of alerts"

    async def check(self, expected: Truth) -> str:
        """Whether each tick came once, exactly, and nothing was dead-lettered. Raises AssertionError."""
        attributions = await self.attributed()
        assert Counter(tick for tick, _ in attributions) == Counter(expected.ticks)
        assert {attribution for _, attribution in attributions} == {"exact"}
        assert await read_all(self._kafka.address, "gpu.dead-letters") == []
        facts = [f"{len(attributions)} ticks, each once, all exact, no dead letter"]
        if self._has_groups:
            facts.append(await self.check_alerts())
        if self._has_usage:
            facts.append(f"{len(self.minute_rows)} rows of usage")
        return ", ".join(facts)

    async def record(self) -> dict[str, list[dict[str, Any]]]:
        """The contents of the topics."""
        return {
            topic: [
                {"partition": row.partition, "ts_ms": row.timestamp, "key": _text(row.key), "value": _text(row.value)}
                for row in await read_all(self._kafka.address, topic)
            ]
            for topic in TOPICS
        }


def _transitions(alerts: Iterable[Alert]) -> set[tuple[str, str, datetime, str]]:
    """What began and ended, without updates."""
    return {(alert.name, alert.fingerprint, alert.starts_at, alert.state) for alert in alerts}


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode()


def both(*truths: Truth) -> Truth:
    return Truth(set().union(*(truth.ticks for truth in truths)))


async def trial(kafka: KafkaServer, directory: Path, old: Path, *, record: bool) -> None:
    """All the steps: old with old, new streams, new producers, and old streams again."""
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    has_usage, has_groups = (old / "streams" / "usage").is_dir(), (old / "streams" / "alerts" / "groups.py").is_file()
    on = Trial(kafka, directory, has_usage=has_usage, has_groups=has_groups)
    sampled = await on.sample(old)
    await on.attribute(old, sampled)
    click.echo(f"old producers, old streams: {await on.check(sampled)}")
    if record:
        text = json.dumps(await on.record()).encode()
        (RECORDS / "records.json.gz").write_bytes(gzip.compress(text, mtime=0))
        for schema in sorted((old / "topics" / "schemas").glob("*.json")):
            (RECORDS / schema.name).write_bytes(schema.read_bytes())
    for producers, streams in (("old", "new"), ("new", "new"), ("new", "old"), ("old", "new")):
        trees = {"old": old, "new": ROOT}
        sampled = both(sampled, await on.sample(trees[producers]))
        await on.attribute(trees[streams], sampled)
        click.echo(f"{producers} producers, {streams} streams: {await on.check(sampled)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default=OLD)
    parser.add_argument("--record", action="store_true", help="write the older commit's records and schemas, too")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        old = directory / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), options.commit], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(old)], check=True)
        kafka = stack.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(trial(kafka, directory, old, record=options.record))


if __name__ == "__main__":
    main()
