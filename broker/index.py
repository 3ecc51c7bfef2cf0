"""Where the frames of a journal file are: columns, never an object for each frame.

`index/<file number>.arrow` describes a journal file that is complete; it can be made again from
that file at any time, so it may be missing or damaged. `TailIndex` is the same for the file that
still grows.
"""

from __future__ import annotations

import json
import logging
import mmap
import struct
from array import array
from bisect import bisect_right
from contextlib import closing
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker import checked_file
from broker.commit import BY_REFERENCE, HEADER, ROW_TYPE, Commit
from broker.errors import AlreadyExists, CorruptLog, MissingFile
from broker.storage import Storage

logger = logging.getLogger(__name__)

_SCHEMA = pa.schema(
    [
        ("partition", pa.uint32()),
        ("flags", pa.uint16()),
        ("base_offset", pa.int64()),
        ("record_count", pa.uint32()),
        ("byte_length", pa.uint32()),
        ("byte_start", pa.uint64()),
        ("min_timestamp", pa.int64()),
        ("max_timestamp", pa.int64()),
        ("file", pa.string()),
    ]
)
_HEADER_TYPE = np.dtype(
    {
        "names": ["crc", "incarnation", "number", "position", "length", "meta_length", "meta_crc",
                  "frame_count"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4"],
        "offsets": [4, 12, 16, 24, 32, 36, 40, 44],
        "itemsize": HEADER.size,
    }
)  # fmt: skip
_LENGTH = struct.Struct("<I")
_LENGTH_AT = 32

Integers = npt.NDArray[np.int64]
Mapped = mmap.mmap | bytes


class FrameRef(NamedTuple):
    """One frame, placed: its offsets and its bytes. `file` is empty for the journal file itself."""

    base_offset: int
    record_count: int
    byte_start: int
    byte_length: int
    min_timestamp: int
    max_timestamp: int
    flags: int
    file: str

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.record_count


class FrameColumns:
    """The frames of one partition in one journal file, in order. Columns of arrays or of numpy."""

    __slots__ = ("base", "count", "files", "flags", "high", "length", "low", "start")

    def __init__(self, columns: tuple[Any, ...], files: dict[int, str]) -> None:
        (self.base, self.count, self.start, self.length, self.low, self.high, self.flags) = columns
        self.files = files  # only those few that lie outside the journal

    def __len__(self) -> int:
        return len(self.base)

    def at(self, row: int) -> FrameRef:
        return FrameRef(
            int(self.base[row]), int(self.count[row]), int(self.start[row]), int(self.length[row]),
            int(self.low[row]), int(self.high[row]), int(self.flags[row]), self.files.get(row, ""),
        )  # fmt: skip

    def find(self, offset: int) -> int:
        """Return the row that holds `offset`, or the one after which it would come."""
        return max(bisect_right(self.base, offset) - 1, 0)

    def lengths(self, start: int, end: int) -> Integers:
        """Return the byte lengths of the frames that hold [start, end)."""
        first, last = self.find(start), self.find(end - 1)
        return np.asarray(self.length[first : last + 1], np.int64)

    def from_offset(self, offset: int, byte_count_max: int) -> list[FrameRef]:
        """Return the frames from `offset` on: at least one, then as many as the bytes allow."""
        row = self.find(offset)
        found: list[FrameRef] = []
        taken = 0
        while row < len(self.base) and (not found or taken < byte_count_max):
            frame = self.at(row)
            if frame.end_offset > offset:
                found.append(frame)
                taken += frame.byte_length
            row += 1
        return found

    def first_at_time(self, timestamp: int, offset: int) -> FrameRef | None:
        """Return the first frame with a record at or after `timestamp` and from `offset` on."""
        ends = np.asarray(self.base) + np.asarray(self.count)
        rows = np.flatnonzero((np.asarray(self.high) >= timestamp) & (ends > offset))
        return self.at(int(rows[0])) if len(rows) else None


class FileIndex:
    """All frames of one complete journal file."""

    def __init__(self, rows: npt.NDArray[Any], files: dict[int, str]) -> None:
        """Args:
        rows: `ROW_TYPE`, sorted by partition and offset, with byte places in the file.
        files: the names of those that lie elsewhere, by row.
        """
        self._rows = rows
        self._files = files
        self._columns: dict[int, FrameColumns] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def partition(self, partition: int) -> FrameColumns:
        columns = self._columns.get(partition)
        if columns is None:
            columns = self._columns[partition] = self._slice(partition)
        return columns

    def _slice(self, partition: int) -> FrameColumns:
        start, end = np.searchsorted(self._rows["partition"], [partition, partition + 1])
        rows = self._rows[start:end]
        names = ("base_offset", "record_count", "byte_start", "byte_length", "min_timestamp",
                 "max_timestamp", "flags")  # fmt: skip
        columns = tuple(rows[name].astype(np.int64) for name in names)
        files = {row - start: name for row, name in self._files.items() if start <= row < end}
        return FrameColumns(columns, files)

    def data_files(self) -> set[str]:
        """Return the names under `data/` of frames that lie there."""
        return set(self._files.values())

    def encode(self) -> bytes:
        columns = [
            pa.array(np.ascontiguousarray(self._rows[field.name]), field.type)
            for field in _SCHEMA
            if field.name != "file"
        ]
        names = [None] * len(self._rows) if not self._files else [
            self._files.get(row) for row in range(len(self._rows))
        ]  # fmt: skip
        columns.append(pa.array(names, pa.string()))
        return checked_file.encode(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))

    @classmethod
    def decode(cls, data: bytes, path: str) -> FileIndex:
        batch = checked_file.decode(data, path)
        rows = np.zeros(batch.num_rows, ROW_TYPE)
        try:
            for field in _SCHEMA:
                if field.name != "file":
                    rows[field.name] = batch.column(field.name).to_numpy()
            names = batch.column("file")
        except (KeyError, pa.ArrowException) as error:
            raise CorruptLog(path, 0, f"not an index: {error}") from error
        files = {}
        if names.null_count != len(names):
            files = {row: name for row, name in enumerate(names.to_pylist()) if name is not None}
        return cls(rows, files)


class TailIndex:
    """The frames of the file that grows, from `start_offsets` on."""

    def __init__(self, start_offsets: tuple[int, ...]) -> None:
        self.start_offsets = start_offsets
        self._columns: dict[int, FrameColumns] = {}

    def add(self, commit: Commit) -> None:
        files = None
        for row in commit.rows():
            columns = self.partition(row[0])
            flags, start = row[1], row[6]
            if flags & BY_REFERENCE:
                files = files or commit.details()["files"]
                columns.files[len(columns)] = files[row[2]]
            else:
                start += commit.position
            columns.base.append(row[3])
            columns.count.append(row[4])
            columns.start.append(start)
            columns.length.append(row[5])
            columns.low.append(row[7])
            columns.high.append(row[8])
            columns.flags.append(flags)

    def partition(self, partition: int) -> FrameColumns:
        columns = self._columns.get(partition)
        if columns is None:
            empty = tuple(array("q") for _ in range(7))
            columns = self._columns[partition] = FrameColumns(empty, {})
        return columns

    def start_of(self, partition: int) -> int:
        """Return the first offset this index would know, were it there."""
        return self.start_offsets[partition] if partition < len(self.start_offsets) else 0


def load(
    storage: Storage,
    directory: str,
    *,
    incarnation: int,
    file_number: int,
    end_number: int,
    byte_length: int,
) -> FileIndex:
    """Return a complete file's index: as stored, or made from the file again."""
    path = index_path(directory, file_number)
    data = storage.read(path)
    if data is not None:
        try:
            return FileIndex.decode(data, storage.locate(path))
        except CorruptLog as error:
            logger.warning("%s Reading the journal file instead.", error)
    return scan(
        storage,
        directory,
        incarnation=incarnation,
        file_number=file_number,
        end_number=end_number,
        byte_length=byte_length,
    )


def write(storage: Storage, directory: str, file_number: int, index: FileIndex) -> None:
    try:
        storage.create(index_path(directory, file_number), index.encode())
    except AlreadyExists:
        return


def index_path(directory: str, file_number: int) -> str:
    return f"{directory}/index/{file_number:020d}.arrow"


def scan(
    storage: Storage,
    directory: str,
    *,
    incarnation: int,
    file_number: int,
    end_number: int,
    byte_length: int,
) -> FileIndex:
    """Read commits [file_number, end_number), `byte_length` bytes of valid commits, at once."""
    path = f"{directory}/journal/{file_number:020d}.log"
    file = storage.open_file(path)
    if file is None:
        raise MissingFile(storage.locate(path), 0, "the file is missing")
    with closing(file):
        view = file.map(byte_length) if byte_length else b""
    starts = _commit_starts(view, byte_length, file.path)
    if len(starts) != end_number - file_number:
        raise CorruptLog(file.path, byte_length, "the file holds another number of commits")
    raw = np.frombuffer(view, np.uint8)
    headers = _gather(raw, starts, HEADER.size).view(_HEADER_TYPE)[:, 0]
    expected = np.arange(file_number, end_number, dtype=np.uint64)
    wrong = (headers["number"] != expected) | (headers["position"] != starts)
    wrong |= headers["incarnation"] != incarnation
    if wrong.any():
        raise CorruptLog(file.path, int(starts[wrong][0]), "another commit is expected here")
    _check(view, starts, headers, file.path)
    return _index_of(raw, view, starts, headers)


def _commit_starts(view: Mapped, end: int, path: str) -> Integers:
    starts = array("q")
    position = 0
    unpack_length = _LENGTH.unpack_from
    while position < end:
        if position + HEADER.size > end:
            raise CorruptLog(path, position, "the last commit is cut short")
        starts.append(position)
        (length,) = unpack_length(view, position + _LENGTH_AT)
        if length < HEADER.size or position + length > end:
            raise CorruptLog(path, position, "a commit's length is wrong")
        position += length
    return np.frombuffer(starts, np.int64) if starts else np.empty(0, np.int64)


def _check(view: Mapped, starts: Integers, headers: npt.NDArray[Any], path: str) -> None:
    crc32c = google_crc32c.value
    rows = zip(
        starts.tolist(),
        headers["crc"].tolist(),
        headers["meta_crc"].tolist(),
        headers["meta_length"].tolist(),
        strict=True,
    )
    for start, crc, meta_crc, meta_length in rows:
        meta = start + HEADER.size
        if crc32c(view[start + 8 : meta]) != crc:
            raise CorruptLog(path, start, "a commit header's checksum does not match")
        if crc32c(view[meta : meta + meta_length]) != meta_crc:
            raise CorruptLog(path, start, "a commit's table does not match its checksum")


def _gather(raw: npt.NDArray[np.uint8], starts: Integers, size: int) -> npt.NDArray[np.uint8]:
    gathered: npt.NDArray[np.uint8] = raw[starts[:, None] + np.arange(size)]
    return gathered


def _index_of(
    raw: npt.NDArray[np.uint8], view: Mapped, starts: Integers, headers: npt.NDArray[Any]
) -> FileIndex:
    counts = headers["frame_count"].astype(np.int64)
    total = int(counts.sum())
    commits = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    places = starts[commits] + HEADER.size + within * ROW_TYPE.itemsize
    rows = np.ascontiguousarray(_gather(raw, places, ROW_TYPE.itemsize)).view(ROW_TYPE)[:, 0]
    inline = (rows["flags"] & BY_REFERENCE) == 0
    rows["byte_start"][inline] += starts[commits][inline].astype(np.uint64)
    order = np.argsort(rows["partition"], kind="stable")
    files = {}
    for place in np.flatnonzero(~inline[order]).tolist():
        commit = int(commits[order[place]])
        meta_start = int(starts[commit]) + HEADER.size + int(counts[commit]) * ROW_TYPE.itemsize
        meta_end = int(starts[commit]) + HEADER.size + int(headers["meta_length"][commit])
        details = json.loads(view[meta_start:meta_end])
        files[place] = details["files"][int(rows["file"][order[place]])]
    return FileIndex(rows[order], files)
