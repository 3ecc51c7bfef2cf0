"""Reading a topic: from offsets to frames to Arrow batches."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker import batch as frames_of
from broker import index
from broker.arrow_message import SCHEMA, TIMESTAMP_TYPE
from broker.commit import BY_REFERENCE, LOG_APPEND, Commit, Kind
from broker.errors import CorruptLog, OffsetOutOfRange, UnknownPartition, UnknownTopic
from broker.index import FileIndex, FrameColumns, FrameRef, TailIndex
from broker.records import CREATE_TIME, LOG_APPEND_TIME, OffsetAndTimestamp, TopicPartition
from broker.state import JournalFile, TopicState
from broker.storage import AppendFile, LocalStorage
from broker.topic import Topic

# From here on mapping a file costs less than copying out of it.
_MAP_BYTES_MIN = 1 << 17
# Each may be mapped whole, which counts as memory of this process.
_FILES_KEPT = 2
_INDEXES_KEPT = 8


class Fetched(NamedTuple):
    """Records of one partition, in order, from `base_offset` on."""

    base_offset: int
    batch: pa.RecordBatch
    timestamp_type: int
    byte_count: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + int(self.batch.num_rows)


class TopicReader:
    """Reads one topic incarnation. For one thread at a time."""

    def __init__(self, storage: LocalStorage, name: str, incarnation: int) -> None:
        self._storage = storage
        self._tail = TailIndex(())
        self._tail_file = 0
        self._head: tuple[int, int, FileIndex] | None = None
        self._indexes: OrderedDict[int, FileIndex | TailIndex] = OrderedDict()
        self._files: OrderedDict[str, AppendFile] = OrderedDict()
        self.topic = Topic(storage, name, incarnation, observer=self)

    @property
    def state(self) -> TopicState:
        return self.topic.state

    def refresh(self) -> TopicState:
        """See what has been committed since; raises if the topic is gone."""
        state = self.topic.refresh()
        if state.is_deleted:
            raise UnknownTopic(self.topic.name, "was deleted", "create it again or choose another")
        return state

    def fetch(self, partition: int, offset: int, byte_count_max: int) -> list[Fetched]:
        """Return records from `offset` on: at least one frame's if there are any.

        Raises:
            OffsetOutOfRange: the partition does not hold it: removed, or past the end.
        """
        start, end = self.bounds(partition)
        if not start <= offset <= end:
            place = TopicPartition(self.topic.name, partition)
            raise OffsetOutOfRange(place, offset, start, end)
        if offset == end:
            return []
        file_number, columns = self._frames_at(partition, offset)
        refs = columns.from_offset(offset, byte_count_max)
        path = self.topic.journal.file_path(file_number)
        if not refs or not refs[0].base_offset <= offset < refs[0].end_offset:
            raise CorruptLog(
                self._storage.locate(path),
                0,
                f"offset {offset} of partition {partition} is missing",
            )
        return [self._open_frame(ref, path, offset) for ref in refs]

    def bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset and the one after the last, as of the last refresh."""
        state = self.state
        if not 0 <= partition < state.partition_count:
            raise UnknownPartition(self.topic.name, partition, state.partition_count)
        return state.starts[partition], state.ends[partition]

    def offset_for_time(self, partition: int, timestamp: int) -> OffsetAndTimestamp | None:
        """Return the first record at or after `timestamp` (microseconds), opening one frame."""
        start, _end = self.bounds(partition)
        for file_number, columns in self._files_by_time(partition, timestamp, start):
            path = self.topic.journal.file_path(file_number)
            offset = start
            while (ref := columns.first_at_time(timestamp, offset)) is not None:
                fetched = self._open_frame(ref, path, max(start, ref.base_offset))
                stamps = _timestamps(fetched.batch)
                rows = np.flatnonzero(stamps >= timestamp)
                if len(rows):
                    row = int(rows[0])
                    return OffsetAndTimestamp(fetched.base_offset + row, int(stamps[row]) // 1000)
                # Its records of that time are below the log start: look behind it.
                offset = ref.end_offset
        return None

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self.topic.close()

    def on_load(self, state: TopicState) -> None:
        self._tail = TailIndex(tuple(state.ends))
        self._tail_file = state.file_number
        self._head = None

    def on_commit(self, commit: Commit, state: TopicState) -> None:
        if commit.kind is Kind.END_OF_FILE:
            complete = state.files[-1]
            if self._tail.start_offsets == complete.start_offsets:
                self._keep(self._indexes, complete.first_number, self._tail, _INDEXES_KEPT)
            self._tail = TailIndex(state.file_starts)
            self._tail_file = state.file_number
        elif commit.kind is Kind.APPEND:
            self._tail.add(commit)

    def _frames_at(self, partition: int, offset: int) -> tuple[int, FrameColumns]:
        """Return the journal file that holds `offset` and its frames of the partition."""
        state = self.state
        if offset >= self._tail.start_of(partition):
            return self._tail_file, self._tail.partition(partition)
        if offset >= _at(state.file_starts, partition):
            return state.file_number, self._head_index().partition(partition)
        place = bisect_right(
            state.files, offset, key=lambda file: _at(file.start_offsets, partition)
        )
        if place == 0:
            raise CorruptLog(
                self._storage.locate(self.topic.directory), 0, f"no file holds offset {offset}"
            )
        file = state.files[place - 1]
        return file.first_number, self._file_index(file).partition(partition)

    def _files_by_time(
        self, partition: int, timestamp: int, start: int
    ) -> Iterator[tuple[int, FrameColumns]]:
        """Yield the frames of the files that may hold the time, in order."""
        state = self.state
        starts = [_at(file.start_offsets, partition) for file in state.files]
        ends = [*starts[1:], _at(state.file_starts, partition)] if starts else []
        for file, file_end in zip(state.files, ends, strict=True):
            if file.max_timestamp >= timestamp and file_end > start:
                yield file.first_number, self._file_index(file).partition(partition)
        if self._tail.start_of(partition) > max(start, _at(state.file_starts, partition)):
            yield state.file_number, self._head_index().partition(partition)
        yield self._tail_file, self._tail.partition(partition)

    def _head_index(self) -> FileIndex:
        """Return the frames of the growing file that were there before this reader came."""
        state = self.state
        if self._head is None or self._head[0] != state.file_number:
            made = index.scan(
                self._storage,
                self.topic.directory,
                incarnation=self.topic.incarnation,
                file_number=state.file_number,
                end_number=state.number,
                byte_length=state.position,
            )
            self._head = state.file_number, state.number, made
        return self._head[2]

    def _file_index(self, file: JournalFile) -> FileIndex | TailIndex:
        found = self._indexes.get(file.first_number)
        if found is None:
            found = index.load(
                self._storage,
                self.topic.directory,
                incarnation=self.topic.incarnation,
                file_number=file.first_number,
                end_number=file.end_number,
                byte_length=file.byte_length,
            )
        self._keep(self._indexes, file.first_number, found, _INDEXES_KEPT)
        return found

    def _open_frame(self, ref: FrameRef, path: str, offset: int) -> Fetched:
        if ref.flags & BY_REFERENCE:
            path = f"{self.topic.directory}/data/{ref.file}"
        file = self._file(path)
        data = _read(file, ref)
        batch = frames_of.decode(data, file.path, ref.byte_start)
        if batch.num_rows != ref.record_count:
            raise CorruptLog(file.path, ref.byte_start, "another frame is expected here")
        kind = CREATE_TIME
        if ref.flags & LOG_APPEND:
            kind = LOG_APPEND_TIME
            stamps = pa.array(np.full(batch.num_rows, ref.max_timestamp), TIMESTAMP_TYPE)
            batch = pa.RecordBatch.from_arrays([*batch.columns[:3], stamps], schema=SCHEMA)
        if offset > ref.base_offset:
            batch = batch.slice(offset - ref.base_offset)
        return Fetched(max(offset, ref.base_offset), batch, kind, ref.byte_length)

    def _file(self, path: str) -> AppendFile:
        file = self._files.get(path)
        if file is None:
            file = self._storage.open_file(path)
            if file is None:
                self.refresh()  # Gone with its topic: that is the better thing to say.
                raise CorruptLog(self._storage.locate(path), 0, "the file is missing")
        self._keep(self._files, path, file, _FILES_KEPT)
        return file

    def _keep(self, kept: OrderedDict[Any, Any], key: Any, value: Any, count_max: int) -> None:
        kept[key] = value
        kept.move_to_end(key)
        if len(kept) > count_max:
            _, oldest = kept.popitem(last=False)
            if isinstance(oldest, AppendFile):
                oldest.close()


def _read(file: AppendFile, ref: FrameRef) -> pa.Buffer:
    """Return a frame's bytes: a copy of few, a mapping of many."""
    end = ref.byte_start + ref.byte_length
    if ref.byte_length >= _MAP_BYTES_MIN or file.mapped >= end:
        return pa.py_buffer(file.map(end)).slice(ref.byte_start, ref.byte_length)
    return pa.py_buffer(file.read(ref.byte_start, ref.byte_length))


def _timestamps(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    stamps: npt.NDArray[np.int64] = batch.column(3).cast(pa.int64()).to_numpy()
    return stamps


def _at(offsets: tuple[int, ...], partition: int) -> int:
    """Return a partition's offset; one that was added later began at 0."""
    return offsets[partition] if partition < len(offsets) else 0
