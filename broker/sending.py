"""Units of sending: what waits in a producer, and how it becomes frames of one commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker import batch as frames_of
from broker.batch import Frame
from broker.columns import to_records
from broker.commit import ROW, Placeable, results
from broker.data_file import DataFile
from broker.errors import TransactionError, UnknownPartition
from broker.futures import Completion
from broker.ledger import Appended
from broker.partitioner import PartitionChooser
from broker.records import BatchMetadata, RecordMetadata

# A transaction's commit holds so many bytes of frames itself; the rest it names.
_INLINE_BYTES_MAX = 8 << 20

Placed = list[tuple[int, Placeable]]


class Unit(Completion):
    """Something to be committed at once to one topic."""

    __slots__ = ("_appended", "byte_count", "created", "topic")

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.topic = topic
        self.created = time.monotonic()
        self.byte_count = 0
        self._appended: Appended | None = None

    def check_incarnation(self, incarnation: int) -> None:
        """Refuse what was made for a topic that was deleted, and another has taken its place."""

    def encode(self, chooser: PartitionChooser, partition_count: int, codec: str) -> Placed:
        """Choose partitions and return the frames, in the order to be kept."""
        raise NotImplementedError

    @property
    def record_count(self) -> int:
        """How many records wait here to be committed."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of the records once they are encoded; what futures need is kept."""

    def succeed(self, appended: Appended, is_log_append: bool) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        self.finish(error)


class RecordBuffer(Unit):
    """Records sent one by one, as columns."""

    __slots__ = (
        "_is_log_append", "_offsets", "_partitions", "given", "headers", "keys", "timestamps",
        "values",
    )  # fmt: skip

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: dict[int, Any] = {}
        self.timestamps: list[int] = []
        self.given: dict[int, int] = {}
        self._partitions: Any = None
        self._offsets: Any = None
        self._is_log_append = False

    def add(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Any,
        timestamp: int,
        partition: int | None,
        size: int,
    ) -> int:
        """Add a record and return its place among the others."""
        values = self.values
        index = len(values)
        values.append(value)
        self.keys.append(key)
        self.timestamps.append(timestamp)
        if headers:
            self.headers[index] = headers
        if partition is not None:
            self.given[index] = partition
        self.byte_count += size
        return index

    def encode(self, chooser: PartitionChooser, partition_count: int, codec: str) -> Placed:
        count = len(self.values)
        given = [self.given.get(row) for row in range(count)] if self.given else None
        some_keys = self.keys if self.keys.count(None) < count else None
        self._partitions = chosen = chooser.choose(given, some_keys, count, partition_count)
        headers = [self.headers.get(row) for row in range(count)] if self.headers else None
        if isinstance(chosen, int):
            frame = frames_of.encode_records(
                self.keys, self.values, headers, self.timestamps, codec
            )
            return [(chosen, frame)]
        _check_range(chosen, self.topic, partition_count)
        placed: Placed = []
        for partition in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == partition).tolist()
            keys = [self.keys[row] for row in rows]
            values = [self.values[row] for row in rows]
            stamps = [self.timestamps[row] for row in rows]
            some_headers = None if headers is None else [headers[row] for row in rows]
            frame = frames_of.encode_records(keys, values, some_headers, stamps, codec)
            placed.append((partition, frame))
        return placed

    @property
    def record_count(self) -> int:
        return len(self.values)

    def release(self) -> None:
        self.keys, self.values, self.headers, self.given = [], [], {}, {}

    def succeed(self, appended: Appended, is_log_append: bool) -> None:
        """Keep just what the futures need: a future that is kept must not keep the records."""
        self._appended = appended._replace(table=b"")
        self._is_log_append = is_log_append
        self._offsets = results(appended.table)
        self.release()
        self.finish()

    def metadata(self, index: int) -> RecordMetadata:
        assert self._appended is not None
        if isinstance(self._partitions, int):
            partition, rank = self._partitions, index
        else:
            partition = int(self._partitions[index])
            rank = int(np.count_nonzero(self._partitions[:index] == partition))
        stamp = self._appended.time if self._is_log_append else self.timestamps[index] // 1000
        return RecordMetadata(self.topic, partition, self._offsets[partition][0] + rank, stamp)


class ColumnarUnit(Unit):
    """An Arrow batch of records."""

    __slots__ = ("_batch", "_frame_bytes", "_offsets", "_partitions")

    def __init__(
        self,
        topic: str,
        batch: pa.RecordBatch,
        partitions: npt.NDArray[np.int64] | None,
        frame_bytes: int,
    ) -> None:
        super().__init__(topic)
        self._batch = batch
        self._partitions = partitions
        self._frame_bytes = frame_bytes
        self._offsets: dict[int, tuple[int, int]] = {}
        self.byte_count = batch.nbytes

    def check_partitions(self, partition_count: int, refresh: Callable[[], int]) -> None:
        """Refuse partitions that do not exist, even after looking whether some were added."""
        if self._partitions is None or not len(self._partitions):
            return
        low, high = int(self._partitions.min()), int(self._partitions.max())
        if high >= partition_count:
            partition_count = refresh()
        if low < -1 or high >= partition_count:
            raise UnknownPartition(self.topic, low if low < -1 else high, partition_count)

    def encode(self, chooser: PartitionChooser, partition_count: int, codec: str) -> Placed:
        batch = self._batch
        if batch.num_rows == 0:
            return []
        keys = batch.column(0) if batch.column(0).null_count < batch.num_rows else None
        given = None if self._partitions is None else self._partitions.tolist()
        if given is not None:
            given = [None if one == -1 else one for one in given]
        chosen = chooser.choose(given, keys, batch.num_rows, partition_count)
        if isinstance(chosen, int):
            return self._slices(chosen, batch, codec)
        _check_range(chosen, self.topic, partition_count)
        placed: Placed = []
        # Numbers of 16 bits are sorted several times faster.
        narrow = chosen.astype(np.uint16) if partition_count <= 1 << 16 else chosen
        order = np.argsort(narrow, kind="stable")
        if (np.diff(order) != 1).any():
            batch = batch.take(pa.array(order))
        ordered = chosen[order]
        edges = np.flatnonzero(np.diff(ordered)) + 1
        starts = [0, *edges.tolist()]
        for start, end in zip(starts, [*edges.tolist(), batch.num_rows], strict=True):
            placed += self._slices(int(ordered[start]), batch.slice(start, end - start), codec)
        return placed

    def _slices(self, partition: int, batch: pa.RecordBatch, codec: str) -> Placed:
        """Cut a batch into frames of a size that a consumer can hold several of."""
        count = max(1, -(-batch.nbytes // self._frame_bytes))
        step = -(-batch.num_rows // count)
        return [
            (partition, frames_of.encode_batch(batch.slice(start, step), codec))
            for start in range(0, batch.num_rows, step)
        ]

    @property
    def record_count(self) -> int:
        return 0 if self._batch is None else int(self._batch.num_rows)

    def release(self) -> None:
        self._batch = self._partitions = None

    def succeed(self, appended: Appended, is_log_append: bool) -> None:
        self._appended = appended._replace(table=b"")
        self._offsets = results(appended.table)
        self.release()
        self.finish()

    def metadata(self, index: int) -> BatchMetadata:
        assert self._appended is not None
        return BatchMetadata(self.topic, self._offsets, self._appended.time)


class TransactionUnit(Unit):
    """Several units that become one commit. They are encoded as they fill up."""

    __slots__ = ("_incarnation", "_inline_bytes", "_placed", "_spill", "_units")

    def __init__(self, topic: str, incarnation: int, spill: DataFile) -> None:
        super().__init__(topic)
        self._incarnation = incarnation
        self._units: list[tuple[Unit, int]] = []
        self._placed: Placed = []
        self._inline_bytes = 0
        self._spill = spill

    def check_incarnation(self, incarnation: int) -> None:
        """What is in its file is in the folder of the topic that is gone."""
        if incarnation != self._incarnation:
            self._spill.discard()
            raise TransactionError(
                f"topic {self.topic!r} was deleted and made again since the transaction began; "
                "nothing of it was sent"
            )

    def add(self, unit: Unit, chooser: PartitionChooser, partition_count: int, codec: str) -> None:
        """Encode a unit now; what is much goes to a file, so that memory stays bounded."""
        placed = unit.encode(chooser, partition_count, codec)
        for partition, frame in placed:
            assert isinstance(frame, Frame)
            self._inline_bytes += frame.byte_length
            is_much = self._inline_bytes > _INLINE_BYTES_MAX
            self._placed.append((partition, self._spill.add(frame) if is_much else frame))
        unit.release()
        self._units.append((unit, len(placed)))

    def encode(self, chooser: PartitionChooser, partition_count: int, codec: str) -> Placed:
        self._spill.finish()
        return self._placed

    @property
    def record_count(self) -> int:
        return sum(frame.record_count for _, frame in self._placed)

    def succeed(self, appended: Appended, is_log_append: bool) -> None:
        """Give each unit its part of the table: the frames lie in the order of the units."""
        start = 0
        for unit, frame_count in self._units:
            end = start + frame_count * ROW.size
            unit.succeed(appended._replace(table=appended.table[start:end]), is_log_append)
            start = end
        self._placed = []
        self.finish()

    def fail(self, error: BaseException) -> None:
        for unit, _ in self._units:
            unit.fail(error)
        self._placed = []
        self.finish(error)

    def discard(self, error: BaseException) -> None:
        """Give up before any attempt to commit: nothing names the file."""
        self._spill.discard()
        self.fail(error)


def make_columnar(topic: str, table: Any, frame_bytes: int) -> tuple[ColumnarUnit, pa.RecordBatch]:
    batch, partitions = to_records(table, topic, time.time_ns() // 1_000_000)
    return ColumnarUnit(topic, batch, partitions, frame_bytes), batch


def _check_range(chosen: npt.NDArray[np.int64], topic: str, partition_count: int) -> None:
    low, high = int(chosen.min()), int(chosen.max())
    if low < 0 or high >= partition_count:
        raise UnknownPartition(topic, low if low < 0 else high, partition_count)
