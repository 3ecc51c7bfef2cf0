"""Reading a topic's sealed history: from offsets to row groups to Arrow batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker import parquet
from broker.parquet import SealedReader
from broker.records import OffsetAndTimestamp
from broker.sealed import SealedFile
from broker.storage import Storage

# Each holds a file descriptor and a footer.
_FILES_KEPT = 4

# Compaction may have left nothing of a file.
_EMPTY = pa.RecordBatch.from_arrays(
    [pa.array([], field.type) for field in parquet.SCHEMA], schema=parquet.SCHEMA
)

Offsets = npt.NDArray[np.int64]


class Fetched(NamedTuple):
    """Records of one partition, in order: all that [base_offset, end_offset) still holds.

    `offsets` is None where no offset between is missing.
    """

    base_offset: int
    end_offset: int
    batch: pa.RecordBatch
    timestamp_type: int
    byte_count: int
    offsets: Offsets | None = None

    def before(self, end: int) -> Fetched:
        """Return what lies before `end`."""
        if self.end_offset <= end:
            return self
        offsets = self.offsets
        if offsets is None:
            count = end - self.base_offset
        else:
            count = int(np.searchsorted(offsets, end))
            offsets = offsets[:count]
        return self._replace(end_offset=end, batch=self.batch.slice(0, count), offsets=offsets)


class SealedHistory:
    """The sealed files of a topic; a few stay open."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._open: OrderedDict[str, SealedReader] = OrderedDict()
        self._last: tuple[str, int, pa.RecordBatch] | None = None

    def fetch(self, file: SealedFile, offset: int, byte_count_max: int) -> list[Fetched]:
        """Return records from `offset` on: at least a row group's, or what is left of the file."""
        fetched: list[Fetched] = []
        taken = 0
        for one in self.read(file, offset, file.end):
            fetched.append(one)
            taken += one.byte_count
            if taken >= byte_count_max:
                break
        return fetched

    def read(self, file: SealedFile, start: int, end: int) -> Iterator[Fetched]:
        """Yield all records of [start, end), row group by row group; the ranges have no gap."""
        opened = self._reader(file)
        first = opened.group_at(start)
        for group in range(first, max(opened.group_count, 1)):
            group_end = opened.group_end(group)
            batch = self._read_group(opened, group) if opened.group_count else _EMPTY
            yield from _cut(batch, start, min(end, group_end))
            start = min(end, group_end)
            if start >= end:
                return

    def first_at_time(
        self, file: SealedFile, timestamp: int, start: int
    ) -> OffsetAndTimestamp | None:
        """Return the first record from `start` on at or after a time."""
        opened = self._reader(file)
        for group in opened.groups_at_time(timestamp, opened.group_at(start)):
            batch = opened.read(group, ["timestamp", "offset"])
            stamps = batch.column(0).cast(pa.int64()).to_numpy()
            offsets = batch.column(1).to_numpy()
            rows = np.flatnonzero((stamps >= timestamp) & (offsets >= start))
            if len(rows):
                row = int(rows[0])
                return OffsetAndTimestamp(int(offsets[row]), int(stamps[row]) // 1000)
        return None

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()
        self._last = None

    def _reader(self, file: SealedFile) -> SealedReader:
        opened = self._open.get(file.name)
        if opened is None:
            opened = SealedReader(self._storage, self._directory, file)
        self._open[file.name] = opened
        self._open.move_to_end(file.name)
        if len(self._open) > _FILES_KEPT:
            self._open.popitem(last=False)[1].close()
        return opened

    def _read_group(self, opened: SealedReader, group: int) -> pa.RecordBatch:
        """Read a row group; the last one is kept, for a reader that takes little at a time."""
        if self._last is None or self._last[:2] != (opened.file.name, group):
            self._last = opened.file.name, group, opened.read(group)
        return self._last[2]


def _cut(batch: pa.RecordBatch, start: int, end: int) -> Iterator[Fetched]:
    """Yield what a batch holds of [start, end), each part with one timestamp type."""
    offsets = parquet.offsets(batch)
    first, last = np.searchsorted(offsets, [start, end]).tolist()
    batch, offsets = batch.slice(first, last - first), offsets[first:last]
    kinds = batch.column("timestampType").to_numpy()
    borders = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    row = 0
    for border in borders:
        stop = end if border == len(kinds) else int(offsets[border])
        part = parquet.records(batch.slice(row, border - row))
        is_dense = stop - start == border - row
        kind = int(kinds[row]) if border > row else 0
        yield Fetched(
            start, stop, part, kind, part.nbytes, None if is_dense else offsets[row:border]
        )
        start, row = stop, border
