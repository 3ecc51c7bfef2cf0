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
import numpy.typing as npt
import pyarrow as pa

from broker import index
from broker.errors import CorruptLog, OffsetOutOfRange
from broker.index import FileIndex, FrameColumns, FrameRef
from broker.reader import FrameFiles, TopicReader, offset_at
from broker.records import TopicPartition
from broker.state import JournalFile
from broker.storage import LocalStorage, open_storage

_INDEXES_KEPT = 4
# Frames that a plan names one by one; over more of them only offsets and files.
_FRAMES_NAMED_MAX = 2000


@dataclass(frozen=True, slots=True)
class FileSlice:
    """The records [start, end) of one partition that lie in one journal file."""

    topic: str
    incarnation: int
    partition: int
    start: int
    end: int
    file: JournalFile
    byte_count: int
    frames: tuple[FrameRef, ...] = ()

    @property
    def record_count(self) -> int:
        return self.end - self.start


class SliceBatch(NamedTuple):
    """Records of one partition, in order, from `base_offset` on."""

    topic: str
    partition: int
    base_offset: int
    timestamp_type: int
    batch: pa.RecordBatch


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
    files = list(reader.journal_files())
    for file, after in zip(files, [*files[1:], None], strict=True):
        for partition, (start, end) in ranges.items():
            first = max(start, offset_at(file.start_offsets, partition))
            last = end if after is None else min(end, offset_at(after.start_offsets, partition))
            if first < last:
                lengths = _lengths(reader.frames_of(file, partition, first), first, last)
                yield FileSlice(
                    topic=reader.topic.name,
                    incarnation=reader.topic.incarnation,
                    partition=partition,
                    start=first,
                    end=last,
                    file=file._replace(start_offsets=()),
                    byte_count=int(lengths.sum()),
                )


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
    return _with_frames(tasks, reader)


def _cut(
    piece: FileSlice, reader: TopicReader, bytes_max: int, records_max: int
) -> tuple[FileSlice, FileSlice | None]:
    """Take the front of a slice: whole frames, but for the bound on records."""
    if piece.byte_count <= bytes_max and piece.record_count <= records_max:
        return piece, None
    columns = reader.frames_of(piece.file, piece.partition, piece.start)
    lengths = _lengths(columns, piece.start, piece.end)
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
        replace(part, byte_count=int(_lengths(columns, part.start, part.end).sum()))
        for part in (front, back)
    )


def _with_frames(tasks: list[list[FileSlice]], reader: TopicReader) -> list[list[FileSlice]]:
    """Name the frames themselves if they are few: then a task needs no index."""
    frame_count = 0
    named: list[list[FileSlice]] = []
    for task in tasks:
        named.append([])
        for piece in task:
            columns = reader.frames_of(piece.file, piece.partition, piece.start)
            first, last = columns.find(piece.start), columns.find(piece.end - 1)
            frame_count += last + 1 - first
            if frame_count > _FRAMES_NAMED_MAX:
                return tasks
            frames = tuple(columns.at(row) for row in range(first, last + 1))
            named[-1].append(replace(piece, frames=frames))
    return named


def _lengths(columns: FrameColumns, start: int, end: int) -> npt.NDArray[np.int64]:
    """Return the byte lengths of the frames that hold [start, end)."""
    first, last = columns.find(start), columns.find(end - 1)
    return np.asarray(columns.length[first : last + 1], np.int64)


def read(root: str, slices: Sequence[FileSlice]) -> Iterator[SliceBatch]:
    """Open the records of slices, frame by frame."""
    storage = open_storage(root)
    files = FrameFiles(storage)
    try:
        for piece in slices:
            yield from _read_slice(storage, files, piece)
    finally:
        files.close()


def _read_slice(storage: LocalStorage, files: FrameFiles, piece: FileSlice) -> Iterator[SliceBatch]:
    directory = f"topics/{piece.topic}/{piece.incarnation}"
    path = f"{directory}/journal/{piece.file.first_number:020d}.log"
    offset = piece.start
    for ref in piece.frames or _frames(storage, directory, piece):
        if not ref.base_offset <= offset < ref.end_offset:
            raise CorruptLog(storage.locate(path), ref.byte_start, f"offset {offset} is missing")
        fetched = files.open_frame(ref, directory, path, offset)
        batch = fetched.batch
        if fetched.end_offset > piece.end:
            batch = batch.slice(0, piece.end - offset)
        yield SliceBatch(piece.topic, piece.partition, offset, fetched.timestamp_type, batch)
        offset += batch.num_rows
    if offset != piece.end:
        raise CorruptLog(storage.locate(path), 0, f"offset {offset} is missing")


def _frames(storage: LocalStorage, directory: str, piece: FileSlice) -> Iterator[FrameRef]:
    columns = _index(storage, directory, piece).partition(piece.partition)
    for row in range(columns.find(piece.start), len(columns)):
        if columns.base[row] >= piece.end:
            return
        yield columns.at(row)


# Tasks of one process read the same few files one after the other.
_indexes: OrderedDict[tuple[str, str, int, int], FileIndex] = OrderedDict()


def _index(storage: LocalStorage, directory: str, piece: FileSlice) -> FileIndex:
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
