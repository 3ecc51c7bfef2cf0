"""Reading a topic: from offsets to frames to Arrow batches."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker import batch as frames_of
from broker import index
from broker.arrow_message import SCHEMA, TIMESTAMP_TYPE
from broker.commit import BY_REFERENCE, LOG_APPEND, Commit, Kind
from broker.errors import CorruptLog, MissingFile, OffsetOutOfRange, UnknownPartition, UnknownTopic
from broker.history import Fetched, SealedHistory
from broker.home import topic_home
from broker.index import FileIndex, FrameColumns, FrameRef, TailIndex
from broker.records import CREATE_TIME, LOG_APPEND_TIME, OffsetAndTimestamp, TopicPartition
from broker.state import JournalFile, TopicState
from broker.storage import File, Storage
from broker.topic import Topic

# Each may be mapped whole, which counts as memory of this process.
_FILES_KEPT = 2
_INDEXES_KEPT = 8
# How often maintenance may move records away from under one read.
_RETRIES_MAX = 20

Found = TypeVar("Found")


class TopicReader:
    """Reads one topic incarnation. For one thread at a time."""

    def __init__(self, storage: Storage, name: str, incarnation: int) -> None:
        self._storage = storage
        self._tail = TailIndex(())
        self._tail_file = 0
        self._head: tuple[int, int, FileIndex] | None = None
        self._indexes: OrderedDict[int, FileIndex | TailIndex] = OrderedDict()
        self._files = FrameFiles(storage)
        self._sealed = SealedHistory(storage, topic_home(name, incarnation).directory)
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
        return self._retry(lambda: self._fetch(partition, offset, byte_count_max))

    def _retry(self, call: Callable[[], Found]) -> Found:
        """Do it again if a file is gone: its records may have moved since this reader looked.

        A file goes only after a commit that stopped naming it. So if there is none that this
        reader has not seen, it is lost.
        """
        for _ in range(_RETRIES_MAX):
            try:
                return call()
            except MissingFile:
                number = self.state.number
                if self.refresh().number == number:
                    raise
        return call()

    def _fetch(self, partition: int, offset: int, byte_count_max: int) -> list[Fetched]:
        start, end = self.bounds(partition)
        if not start <= offset <= end:
            place = TopicPartition(self.topic.name, partition)
            raise OffsetOutOfRange(place, offset, start, end)
        if offset == end:
            return []
        if offset < self.state.sealed_ends[partition]:
            file = self.state.sealed.holding(partition, offset)
            if file is not None:
                return self._sealed.fetch(file, offset, byte_count_max)
        file_number, columns = self._frames_at(partition, offset)
        refs = columns.from_offset(offset, byte_count_max)
        path = self.topic.journal.file_path(file_number)
        if not refs or not refs[0].base_offset <= offset < refs[0].end_offset:
            raise CorruptLog(
                self._storage.locate(path),
                0,
                f"offset {offset} of partition {partition} is missing",
            )
        return [self._files.open_frame(ref, self.topic.directory, path, offset) for ref in refs]

    def bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset and the one after the last, as of the last refresh."""
        state = self.state
        if not 0 <= partition < state.partition_count:
            raise UnknownPartition(self.topic.name, partition, state.partition_count)
        return state.starts[partition], state.ends[partition]

    def offset_for_time(self, partition: int, timestamp: int) -> OffsetAndTimestamp | None:
        """Return the first record at or after `timestamp` (microseconds).

        Opens one frame, or one row group of one sealed file.
        """
        return self._retry(lambda: self._offset_for_time(partition, timestamp))

    def _offset_for_time(self, partition: int, timestamp: int) -> OffsetAndTimestamp | None:
        start, _end = self.bounds(partition)
        for file in self.state.sealed.of(partition):
            if file.max_timestamp >= timestamp and file.end > start:
                found = self._sealed.first_at_time(file, timestamp, start)
                if found is not None:
                    return found
        start = max(start, self.state.sealed_ends[partition])
        for file_number, columns in self._files_by_time(partition, timestamp, start):
            path = self.topic.journal.file_path(file_number)
            offset = start
            while (ref := columns.first_at_time(timestamp, offset)) is not None:
                fetched = self._files.open_frame(
                    ref, self.topic.directory, path, max(start, ref.base_offset)
                )
                stamps = _timestamps(fetched.batch)
                rows = np.flatnonzero(stamps >= timestamp)
                if len(rows):
                    row = int(rows[0])
                    return OffsetAndTimestamp(fetched.base_offset + row, int(stamps[row]) // 1000)
                # Its records of that time are below the log start: look behind it.
                offset = ref.end_offset
        return None

    def close(self) -> None:
        self._files.close()
        self._sealed.close()
        self.topic.close()

    def on_load(self, state: TopicState) -> None:
        self._tail = TailIndex(tuple(state.ends))
        self._tail_file = state.file_number
        self._head = None

    def on_commit(self, commit: Commit, state: TopicState) -> None:
        if commit.kind is Kind.END_OF_FILE:
            complete = state.files[-1]
            if self._tail.start_offsets == complete.start_offsets:
                self._keep_index(complete.first_number, self._tail)
            self._tail = TailIndex(state.file_starts)
            self._tail_file = state.file_number
        elif commit.kind is Kind.APPEND:
            self._tail.add(commit)

    def _frames_at(self, partition: int, offset: int) -> tuple[int, FrameColumns]:
        """Return the journal file that holds `offset` and its frames of the partition."""
        state = self.state
        if offset >= self._tail.start_of(partition):
            return self._tail_file, self._tail.partition(partition)
        if offset >= offset_at(state.file_starts, partition):
            return state.file_number, self._head_index().partition(partition)
        place = bisect_right(
            state.files, offset, key=lambda file: offset_at(file.start_offsets, partition)
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
        starts = [offset_at(file.start_offsets, partition) for file in state.files]
        ends = [*starts[1:], offset_at(state.file_starts, partition)] if starts else []
        for file, file_end in zip(state.files, ends, strict=True):
            if file.max_timestamp >= timestamp and file_end > start:
                yield file.first_number, self._file_index(file).partition(partition)
        if self._tail.start_of(partition) > max(start, offset_at(state.file_starts, partition)):
            yield state.file_number, self._head_index().partition(partition)
        yield self._tail_file, self._tail.partition(partition)

    def journal_files(self) -> Iterator[JournalFile]:
        """Yield the journal files in order; the last one as far as it has grown."""
        state = self.state
        yield from state.files
        yield JournalFile(
            state.file_number,
            state.number,
            state.position,
            state.file_max_timestamp,
            state.file_starts,
        )

    def frames_of(self, file: JournalFile, partition: int, offset: int) -> FrameColumns:
        """Return the partition's frames in a file: all of those from `offset` on."""
        if file.first_number != self.state.file_number:
            return self._file_index(file).partition(partition)
        if offset >= self._tail.start_of(partition):
            return self._tail.partition(partition)
        return self._head_index(self.state.number).partition(partition)

    def data_files(self) -> set[str]:
        """Return the names of all files under `data/` that commits of the journal name."""
        names = set()
        for file in self.state.files:
            names |= index.load(
                self._storage,
                self.topic.directory,
                incarnation=self.topic.incarnation,
                file_number=file.first_number,
                end_number=file.end_number,
                byte_length=file.byte_length,
            ).data_files()
        return names | self._head_index(self.state.number).data_files()

    def byte_count(self, file: JournalFile, partition: int, start: int, end: int) -> int:
        """Return how many bytes the frames that hold [start, end) have, as stored."""
        return int(self.frames_of(file, partition, start).lengths(start, end).sum())

    def _head_index(self, end_number: int = 0) -> FileIndex:
        """Return the frames of the growing file that were there before this reader came.

        Args:
            end_number: and those of the commits before this one.
        """
        state = self.state
        known = self._head
        if known is None or known[0] != state.file_number or known[1] < end_number:
            made = index.scan(
                self._storage,
                self.topic.directory,
                incarnation=self.topic.incarnation,
                file_number=state.file_number,
                end_number=state.number,
                byte_length=state.position,
            )
            known = self._head = state.file_number, state.number, made
        return known[2]

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
        self._keep_index(file.first_number, found)
        return found

    def _keep_index(self, file_number: int, found: FileIndex | TailIndex) -> None:
        self._indexes[file_number] = found
        self._indexes.move_to_end(file_number)
        if len(self._indexes) > _INDEXES_KEPT:
            self._indexes.popitem(last=False)


class FrameFiles:
    """The files that frames are read from; a few stay open."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files: OrderedDict[str, File] = OrderedDict()

    def open_frame(self, ref: FrameRef, directory: str, path: str, offset: int) -> Fetched:
        """Return a frame's records from `offset` on. `path` is the journal file that names it."""
        if ref.flags & BY_REFERENCE:
            path = f"{directory}/data/{ref.file}"
        file = self._file(path)
        batch = frames_of.decode(
            file.buffer(ref.byte_start, ref.byte_length), file.path, ref.byte_start
        )
        if batch.num_rows != ref.record_count:
            raise CorruptLog(file.path, ref.byte_start, "another frame is expected here")
        kind = CREATE_TIME
        if ref.flags & LOG_APPEND:
            kind = LOG_APPEND_TIME
            stamps = pa.array(np.full(batch.num_rows, ref.max_timestamp), TIMESTAMP_TYPE)
            batch = pa.RecordBatch.from_arrays([*batch.columns[:3], stamps], schema=SCHEMA)
        if offset > ref.base_offset:
            batch = batch.slice(offset - ref.base_offset)
        first = max(offset, ref.base_offset)
        return Fetched(first, first + batch.num_rows, batch, kind, ref.byte_length)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, path: str) -> File:
        file = self._files.get(path)
        if file is None:
            file = self._storage.open_file(path)
            if file is None:
                raise MissingFile(self._storage.locate(path), 0, "the file is missing")
        self._files[path] = file
        self._files.move_to_end(path)
        if len(self._files) > _FILES_KEPT:
            self._files.popitem(last=False)[1].close()
        return file


def _timestamps(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    stamps: npt.NDArray[np.int64] = batch.column(3).cast(pa.int64()).to_numpy()
    return stamps


def offset_at(offsets: tuple[int, ...], partition: int) -> int:
    """Return a partition's offset; one that was added later began at 0."""
    return offsets[partition] if partition < len(offsets) else 0
