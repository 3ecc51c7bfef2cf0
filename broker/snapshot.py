"""A topic at one moment: which files hold its sealed records, and where each partition ends.

Made from one state, so history and tail fit together: what lies below a partition's `sealed_end` is
in the files, what lies from there to its `end` is not. Files that are replaced later stay for
`table.delete.delay.ms`, so a snapshot can be read for as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.sealed import SealedFile
from broker.state import TopicState


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """One partition: [start, sealed_end) is in files, [sealed_end, end) is not yet."""

    partition: int
    start: int
    sealed_end: int
    end: int


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as of one commit. `location` is the directory of its sealed files."""

    topic: str
    incarnation: int
    location: str
    files: tuple[SealedFile, ...]
    partitions: tuple[PartitionSnapshot, ...]

    def path(self, file: SealedFile) -> str:
        return f"{self.location}/{file.name}"


def take(topic: str, location: str, state: TopicState) -> TopicSnapshot:
    """Return what a state says of the topic."""
    return TopicSnapshot(
        topic=topic,
        incarnation=state.incarnation,
        location=location,
        files=tuple(state.sealed),
        partitions=tuple(
            PartitionSnapshot(partition, start, max(start, sealed_end), end)
            for partition, (start, sealed_end, end) in enumerate(
                zip(state.starts, state.sealed_ends, state.ends, strict=True)
            )
        ),
    )
