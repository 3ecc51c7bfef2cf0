"""Records written ahead of their commit, by many tasks at once, and committed by one driver.

A task writes frames into a file of its own under `data/`; nobody sees them. The driver names all
files of all tasks in one commit: then all of it is there, or, if anything fails before, nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from broker import checks
from broker.batch import Frame
from broker.columns import check_sizes
from broker.commit import Author, FramePlace
from broker.data_file import DataFile
from broker.errors import InvalidOption, InvalidRecord, LogError
from broker.ledger import new_token
from broker.partitioner import PartitionChooser
from broker.sending import make_columnar
from broker.topic import Topic


@dataclass(frozen=True, slots=True)
class Staged:
    """What one task has written for one topic; small, and fit to be sent to the driver."""

    topic: str
    incarnation: int
    frames: tuple[tuple[int, FramePlace], ...]

    @property
    def record_count(self) -> int:
        return sum(place.record_count for _, place in self.frames)


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit of staged records; `is_repeated` if the log had it already.

    `last_version` is the last one of the transaction's application, if there is one.
    """

    topic: str
    record_count: int
    is_repeated: bool
    last_version: int | None = None


class Stage:
    """Writes records of one topic to a file; `finish` makes it durable, `discard` removes it."""

    def __init__(
        self, topic: Topic, *, compression_type: str = "none", frame_bytes: int = 4 << 20
    ) -> None:
        settings = topic.state.settings
        self._topic = topic
        self._codec = settings["compression.type"]
        if self._codec == "producer":
            self._codec = compression_type
        self._frame_bytes = frame_bytes
        self._chooser = PartitionChooser("sticky")
        self._file = DataFile(topic.storage, topic.directory)
        self._frames: list[tuple[int, FramePlace]] = []

    def write(self, table: pa.Table | pa.RecordBatch) -> None:
        """Add records: columns as for `producer.send_batch`."""
        name, state = self._topic.name, self._topic.state
        unit, batch = make_columnar(name, table, self._frame_bytes)
        check_sizes(batch, name, state.settings["max.message.bytes"])
        if "compact" in state.settings["cleanup.policy"] and batch.column(0).null_count:
            raise InvalidRecord(f"topic {name!r} is compacted: every record needs a key")
        unit.check_partitions(state.partition_count, lambda: state.partition_count)
        for partition, frame in unit.encode(self._chooser, state.partition_count, self._codec):
            assert isinstance(frame, Frame)
            self._frames.append((partition, self._file.add(frame)))

    def finish(self) -> Staged:
        self._file.finish()
        return Staged(self._topic.name, self._topic.incarnation, tuple(self._frames))

    def discard(self) -> None:
        self._file.discard()

    def close(self) -> None:
        self._topic.close()


def commit(
    topic: Topic, staged: Sequence[Staged], transaction: tuple[str, int] | None
) -> Committed:
    """Commit what tasks have staged for one topic, once.

    Args:
        transaction: (application, version); a version not above the last one adds nothing.
    """
    for one in staged:
        if one.incarnation != topic.incarnation:
            raise InvalidRecord(
                f"topic {topic.name!r} was deleted and made again while records were written to "
                "it; nothing was committed. Write them again."
            )
    transaction = _check_transaction(transaction)
    frames = [frame for one in staged for frame in one.frames]
    count = sum(one.record_count for one in staged)
    appended = topic.append(frames, Author(new_token()), durable=True, transaction=transaction)
    last = None if transaction is None else topic.state.transactions[transaction[0]].version
    return Committed(topic.name, count, appended.number < 0, last)


def _check_transaction(given: Any) -> tuple[str, int] | None:
    if given is None:
        return None
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidOption(f"transaction={given!r} is not a pair of application and version")
    application = checks.text(given[0], "application")
    version = checks.whole_number(
        given[1], "a transaction cannot have the version", at_least=-checks.NUMBER_MAX
    )
    return application, version


def discard(topic: Topic, staged: Sequence[Staged]) -> None:
    """Remove the files of tasks whose commit will never come."""
    for name in {place.file for one in staged for _, place in one.frames}:
        with contextlib.suppress(LogError):
            topic.storage.remove(f"{topic.directory}/data/{name}")
