"""The state that a group's journal describes: a pure function of its commits.

Nothing in this module reads a clock or a file; what depends on time was decided by whoever noticed
it, and is in the commits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker.commit import Commit, Kind
from broker.errors import CorruptLog
from broker.records import TopicPartition


class Position(NamedTuple):
    """Where a group goes on in one partition: the offset of the next record it wants.

    Incarnation and epoch are those of the topic when it was committed: a position in a topic that
    was deleted since, or above what survived a power cut, is not one in the topic of today.
    """

    offset: int
    incarnation: int
    epoch: int
    time: int
    metadata: str = ""


@dataclass(slots=True)
class GroupState:
    """What the commits before `number` say."""

    incarnation: int
    number: int = 0
    time: int = 0
    epoch: int = 0
    file_number: int = 0
    position: int = 0
    is_deleted: bool = False
    positions: dict[TopicPartition, Position] = field(default_factory=dict)

    def apply(self, commit: Commit, path: str) -> None:
        """Move on by one commit; its number and position were checked when it was read."""
        act = _APPLY.get(commit.kind)
        if act is None:
            raise CorruptLog(path, commit.position, f"a group has no {commit.kind.name} commit")
        act(self, commit)
        self.number = commit.number + 1
        self.time = commit.time
        self.position = commit.position + commit.length
        if commit.kind is Kind.END_OF_FILE:
            self.file_number, self.position = self.number, 0

    def _nothing(self, commit: Commit) -> None:
        pass

    def _delete(self, commit: Commit) -> None:
        self.is_deleted = True

    def _recover(self, commit: Commit) -> None:
        self.epoch = commit.details()["epoch"]

    def _take_positions(self, commit: Commit) -> None:
        details = commit.details()
        metadata: dict[str, Any] = details.get("metadata", {})
        for topic, (incarnation, epoch, offsets) in details["positions"].items():
            notes = metadata.get(topic, {})
            for partition, offset in offsets.items():
                self.positions[TopicPartition(topic, int(partition))] = Position(
                    offset, incarnation, epoch, commit.time, notes.get(partition, "")
                )


_APPLY = {
    Kind.CREATE: GroupState._nothing,
    Kind.DELETE: GroupState._delete,
    Kind.END_OF_FILE: GroupState._nothing,
    Kind.RECOVER: GroupState._recover,
    Kind.POSITION: GroupState._take_positions,
}
