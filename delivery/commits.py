"""Commits offsets of a consumer group, of many partitions in few requests.

In: offsets of finished records. Out: commits, one request at a time, because the client sends no two at once. What is
to be committed meanwhile goes together into the next request.
On failure: each commit has its own outcome. If a request fails, each commit of it is sent by itself.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError


@dataclass(slots=True, eq=False)
class _Commit:
    """Offsets to commit, and whether they were, or the error; None: not known yet."""

    offsets: Mapping[TopicPartition, int]
    outcome: bool | KafkaError | None = None


class Commits:
    """The commits of one consumer."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._commits: list[_Commit] = []
        self._lock = asyncio.Lock()

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> bool:
        """Commit these offsets; False if some of the partitions are not assigned any more. Raises KafkaError."""
        commit = _Commit(offsets)
        self._commits.append(commit)
        try:
            async with self._lock:
                if commit.outcome is None:  # no other commit has sent it along with its own
                    await self._send([other for other in self._commits if other.outcome is None])
        finally:
            self._commits.remove(commit)
        if isinstance(commit.outcome, KafkaError):
            raise commit.outcome
        return commit.outcome is True

    async def _send(self, commits: Sequence[_Commit]) -> None:
        """Send commits in one request. If it fails, each by itself: the offsets of one topic may be refused."""
        assigned = self._consumer.assignment()
        offsets = {tp: offset for commit in commits for tp, offset in commit.offsets.items()}
        sent = {tp: offset for tp, offset in offsets.items() if tp in assigned}
        try:
            if sent:
                await self._consumer.commit(sent)
        except (CommitFailedError, IllegalStateError):
            sent = {}
        except KafkaError as error:
            if len(commits) == 1:
                commits[0].outcome = error
                return
            for commit in commits:
                await self._send([commit])
            return
        for commit in commits:
            commit.outcome = all(tp in sent for tp in commit.offsets)
