"""Records by offset range, as small descriptions that another process can open.

A driver plans: which journal files hold the ranges, and how many bytes. A task reads: it finds the
frames in the file's index and opens just those. A description names offsets and files, never
frames, so it stays small over millions of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from broker import index
from broker.errors import CorruptLog, MissingFile, OffsetOutOfRange
from broker.history import Fetched, Offsets, SealedHistory
from broker.index import FileIndex, FrameRef
from broker.reader import FrameFiles, TopicReader, offset_at
from broker.records import TopicPartition
from broker.sealed import SealedFile
from broker.state import JournalFile
from broker.storage import Storage, open_storage

_INDEXES_KEPT = 4
_FETCH_BYTES = 8 << 20
# Frames that a plan names one by one; over more of them only offsets and files.
_FRAMES_NAMED_MAX = 2000


@dataclass(frozen=True, slots=True)
class FileSlice:
    """The records [start, end) of one partition that lie in one journal file or sealed file."""

    topic: str
    incarnation: int
    partition: int
    start: int
    end: int
    file: JournalFile | SealedFile
    byte_count: int
    frames: tuple[FrameRef, ...] = ()

    @property
    def offset_count(self) -> int:
        return self.end - self.start

    @property
    def record_count(self) -> int:
        """How many records there are; the most there can be in a part of a compacted file."""
        if isinstance(self.file, SealedFile):
            return self.file.records_in(self.start, self.end)
        return self.offset_count


class SliceBatch(NamedTuple):
    """Records of one partition, in order, from `base_offset` on.

    `offsets` is None where each record's offset is the one before it plus one.
    """

    topic: str
    partition: int
    base_offset: int
    timestamp_type: int
    batch: pa.RecordBatch
    offsets: Offsets | None = None


def plan(reader: TopicReader, ranges: Mapping[int, tuple[int, int]]) -> list[FileSlice]:
    """Return the slices that hold these offsets, by file and partition.

    Raises:
        OffsetOutOfRange: a partition does not hold all of its range.
    """
    for partition, (start, end) in ranges.items():
        low, high = reader.bounds(partition)
        if not low <= start <= end <= high:
            place = TopicPartition(reader.topic.name, partition)
            raise OffsetOutOfRange(place, start if start < low else end, low, high)
    return list(_slices(reader, ranges))


def _slices(reader: TopicReader, ranges: Mapping[int, tuple[int, int]]) -> Iterator[FileSlice]:
    sealed_ends = reader.state.sealed_ends
    for partition, (start, end) in ranges.items():
        for sealed in reader.state.sealed.of(partition) if start < sealed_ends[partition] else ():
            if max(start, sealed.start) < min(end, sealed.end):
                yield _sealed_slice(reader, sealed, max(start, sealed.start), min(end, sealed.end))
    files = list(reader.journal_files())
    for file, after in zip(files, [*files[1:], None], strict=True):
        for partition, (start, end) in ranges.items():
            first = max(start, offset_at(file.start_offsets, partition), sealed_ends[partition])
            last = end if after is None else min(end, offset_at(after.start_offsets, partition))
            if first < last:
                lengths = reader.frames_of(file, partition, first).lengths(first, last)
                yield FileSlice(
                    topic=reader.topic.name,
                    incarnation=reader.topic.incarnation,
                    partition=partition,
                    start=first,
                    end=last,
                    file=file._replace(start_offsets=()),
                    byte_count=int(lengths.sum()),
                )


def _sealed_slice(reader: TopicReader, file: SealedFile, start: int, end: int) -> FileSlice:
    topic = reader.topic
    share = file.byte_length * (end - start) // (file.end - file.start)
    return FileSlice(topic.name, topic.incarnation, file.partition, start, end, file, max(share, 1))


def pack(
    slices: Sequence[FileSlice],
    reader: TopicReader,
    *,
    task_count: int,
    records_max: int | None = None,
) -> list[list[FileSlice]]:
    """Deal slices out to about `task_count` tasks of like size, cutting at frames where needed.

    Args:
        records_max: no task gets more records than this.
    """
    total = sum(piece.byte_count for piece in slices)
    share = max(1, -(-total // max(1, task_count)))
    tasks: list[list[FileSlice]] = []
    room_bytes, room_records = 0, 0
    for piece in slices:
        rest: FileSlice | None = piece
        while rest is not None:
            if room_bytes <= 0 or room_records <= 0:
                tasks.append([])
                room_bytes, room_records = share, records_max or 1 << 62
            taken, rest = _cut(rest, reader, room_bytes, room_records)
            tasks[-1].append(taken)
            room_bytes -= taken.byte_count
            room_records -= taken.record_count
    return name_frames(tasks, reader)


def _cut(
    piece: FileSlice, reader: TopicReader, bytes_max: int, records_max: int
) -> tuple[FileSlice, FileSlice | None]:
    """Take the front of a slice: whole frames, but for the bound on records."""
    if piece.byte_count <= bytes_max and piece.record_count <= records_max:
        return piece, None
    if isinstance(piece.file, SealedFile):
        return _cut_sealed(piece, reader, bytes_max, records_max)
    columns = reader.frames_of(piece.file, piece.partition, piece.start)
    lengths = columns.lengths(piece.start, piece.end)
    first = columns.find(piece.start)
    rows = slice(first, first + len(lengths))
    ends = np.asarray(columns.base[rows]) + np.asarray(columns.count[rows])
    frame_count = max(1, int(np.searchsorted(np.cumsum(lengths), bytes_max, side="right")))
    middle = min(int(ends[frame_count - 1]), piece.start + records_max)
    if middle >= piece.end:
        return piece, None
    front = replace(piece, end=middle)
    back = replace(piece, start=middle)
    return tuple(  # type: ignore[return-value]
        replace(part, byte_count=int(columns.lengths(part.start, part.end).sum()))
        for part in (front, back)
    )


def _cut_sealed(
    piece: FileSlice, reader: TopicReader, bytes_max: int, records_max: int
) -> tuple[FileSlice, FileSlice | None]:
    """Take the front of a slice of a sealed file; its bytes are taken to be spread evenly."""
    assert isinstance(piece.file, SealedFile)
    fitting = piece.offset_count * bytes_max // piece.byte_count
    middle = piece.start + max(1, min(fitting, records_max))
    if middle >= piece.end:
        return piece, None
    front = _sealed_slice(reader, piece.file, piece.start, middle)
    return front, _sealed_slice(reader, piece.file, middle, piece.end)


def name_frames(tasks: list[list[FileSlice]], reader: TopicReader) -> list[list[FileSlice]]:
    """Name the frames themselves if they are few: then a task needs no index."""
    frame_count = 0
    named: list[list[FileSlice]] = []
    for task in tasks:
        named.append([])
        for piece in task:
            if isinstance(piece.file, SealedFile):
                named[-1].append(piece)
                continue
            columns = reader.frames_of(piece.file, piece.partition, piece.start)
            first, last = columns.find(piece.start), columns.find(piece.end - 1)
            frame_count += last + 1 - first
            if frame_count > _FRAMES_NAMED_MAX:
                return tasks
            frames = tuple(columns.at(row) for row in range(first, last + 1))
            named[-1].append(replace(piece, frames=frames))
    return named


def read(
    root: str, slices: Sequence[FileSlice], options: Mapping[str, str] | None = None
) -> Iterator[SliceBatch]:
    """Open the records of slices, frame by frame or row group by row group.

    A plan may be old: records that were sealed, merged or compacted since are read from where they
    are now.

    Args:
        options: of the store's driver.
    """
    storage = open_storage(root, options)
    for piece in slices:
        offset = piece.start
        try:
            for batch, end in _read_slice(storage, piece):
                yield batch
                offset = end
        except MissingFile:
            yield from _read_elsewhere(storage, piece, offset)


def _read_slice(storage: Storage, piece: FileSlice) -> Iterator[tuple[SliceBatch, int]]:
    """Yield batches, and the offset behind each."""
    directory = f"topics/{piece.topic}/{piece.incarnation}"
    if isinstance(piece.file, SealedFile):
        history = SealedHistory(storage, directory)
        try:
            for fetched in history.read(piece.file, piece.start, piece.end):
                yield _batch(piece, fetched), fetched.end_offset
        finally:
            history.close()
        return
    files = FrameFiles(storage)
    try:
        for fetched in _read_frames(storage, files, directory, piece):
            yield _batch(piece, fetched), fetched.end_offset
    finally:
        files.close()


def _read_frames(
    storage: Storage, files: FrameFiles, directory: str, piece: FileSlice
) -> Iterator[Fetched]:
    path = f"{directory}/journal/{piece.file[0]:020d}.log"
    offset = piece.start
    for ref in piece.frames or _frames(storage, directory, piece):
        if not ref.base_offset <= offset < ref.end_offset:
            raise CorruptLog(storage.locate(path), ref.byte_start, f"offset {offset} is missing")
        fetched = files.open_frame(ref, directory, path, offset)
        fetched = fetched.before(piece.end)
        yield fetched
        offset = fetched.end_offset
    if offset != piece.end:
        raise CorruptLog(storage.locate(path), 0, f"offset {offset} is missing")


def _read_elsewhere(storage: Storage, piece: FileSlice, offset: int) -> Iterator[SliceBatch]:
    """Ask the log of now where the rest of a slice is."""
    reader = TopicReader(storage, piece.topic, piece.incarnation)
    try:
        reader.refresh()
        while offset < piece.end:
            low, high = reader.bounds(piece.partition)
            if not low <= offset < high:
                place = TopicPartition(piece.topic, piece.partition)
                raise OffsetOutOfRange(place, offset, low, high)
            for fetched in reader.fetch(piece.partition, offset, _FETCH_BYTES):
                fetched = fetched.before(piece.end)
                offset = fetched.end_offset
                yield _batch(piece, fetched)
                if offset >= piece.end:
                    return
    finally:
        reader.close()


def _batch(piece: FileSlice, fetched: Fetched) -> SliceBatch:
    return SliceBatch(
        piece.topic,
        piece.partition,
        fetched.base_offset,
        fetched.timestamp_type,
        fetched.batch,
        fetched.offsets,
    )


def _frames(storage: Storage, directory: str, piece: FileSlice) -> Iterator[FrameRef]:
    columns = _index(storage, directory, piece).partition(piece.partition)
    for row in range(columns.find(piece.start), len(columns)):
        if columns.base[row] >= piece.end:
            return
        yield columns.at(row)


# Tasks of one process read the same few files one after the other.
_indexes: OrderedDict[tuple[str, str, int, int], FileIndex] = OrderedDict()


def _index(storage: Storage, directory: str, piece: FileSlice) -> FileIndex:
    assert isinstance(piece.file, JournalFile)
    key = storage.root, directory, piece.file.first_number, piece.file.end_number
    found = _indexes.get(key)
    if found is None:
        found = index.load(
            storage,
            directory,
            incarnation=piece.incarnation,
            file_number=piece.file.first_number,
            end_number=piece.file.end_number,
            byte_length=piece.file.byte_length,
        )
        _indexes[key] = found
        if len(_indexes) > _INDEXES_KEPT:
            _indexes.popitem(last=False)
    return found
