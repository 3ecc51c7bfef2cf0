"""Sealed records as Parquet: the columns of the Spark source, one sorted run of offsets a file.

Row groups are small enough that a look-up by time or offset reads little, and carry bounds of
offset and timestamp. Pages have checksums, which are checked when they are read; the footer's own
checksum is in the commit that names the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from broker.arrow_message import HEADERS_TYPE, TIMESTAMP_TYPE
from broker.arrow_message import SCHEMA as RECORD_SCHEMA
from broker.errors import CorruptLog, LogError, MissingFile, OutcomeUnknown
from broker.naming import new_name
from broker.sealed import SealedFile
from broker.storage import Storage

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_TYPE),
        ("timestamp", TIMESTAMP_TYPE),
        ("timestampType", pa.int32()),
        ("offset", pa.int64()),
    ]
)
ROW_GROUP_BYTES = 16 << 20
ROW_GROUP_ROWS = 1 << 17
_TAIL = 8  # Length of the footer, and the magic.
_CRC_BLOCK = 1 << 20


class SealedWriter:
    """Writes one file; `finish` makes it durable, `discard` removes it. Nobody sees it before."""

    def __init__(
        self, storage: Storage, directory: str, partition: int, start: int, *, born_ns: int
    ) -> None:
        """Args:
        born_ns: the time that the file's name begins with.
        """
        self._storage = storage
        self._name = f"partition={partition}/{new_name(born_ns, '.parquet')}"
        self._path = f"{directory}/sealed/{self._name}"
        self._partition = partition
        self._start = start
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows, self._waiting_bytes = 0, 0
        self._count, self._low, self._high = 0, -1, -1
        self._stack = ExitStack()
        self._sink = self._stack.enter_context(storage.create_stream(self._path))
        self._writer = pq.ParquetWriter(
            self._sink,
            SCHEMA,
            compression="zstd",
            use_dictionary=["key", "timestampType"],
            column_encoding={"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
            write_statistics=["offset", "timestamp"],
            write_page_index=True,
            write_page_checksum=True,
            store_schema=False,
        )

    @property
    def byte_count(self) -> int:
        """How large the file is so far, without the rows that are still gathered."""
        return self._sink.tell()

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows of `SCHEMA`, whose offsets follow those before."""
        for piece in _pieces(batch):
            self._waiting.append(piece)
            self._waiting_rows += piece.num_rows
            self._waiting_bytes += piece.nbytes
            if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
                self._write_group()

    def finish(self, end: int) -> SealedFile:
        """Make the file durable and describe it: it covers the offsets before `end`."""
        try:
            self._write_group()
            self._guard(self._writer.close)
            self._stack.close()
        except BaseException:
            self.discard()
            raise
        file = SealedFile(
            self._name, self._partition, self._start, end, self._count, 0, self._low, self._high,
            0, 0, 0,
        )  # fmt: skip
        return _describe(self._storage, self._path, file)

    def discard(self) -> None:
        """Remove the file; after an error its rest may not be writable any more."""
        # Before its file is: Arrow's writer would complain on stderr when it is collected.
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self._writer.close()
        self._writer.is_open = False
        with contextlib.suppress(LogError, _Discarded):
            self._stack.__exit__(_Discarded, _Discarded(), None)

    def _write_group(self) -> None:
        if not self._waiting_rows:
            return
        group = pa.Table.from_batches(self._waiting, SCHEMA)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        bounds = pc.min_max(group.column("timestamp").cast(pa.int64())).as_py()
        self._low = bounds["min"] if not self._count else min(self._low, bounds["min"])
        self._high = max(self._high, bounds["max"])
        self._count += group.num_rows
        self._guard(lambda: self._writer.write_table(group, row_group_size=group.num_rows))

    def _guard(self, call: Callable[[], None]) -> None:
        with self._storage.guard(self._path):
            call()


class _Discarded(Exception):
    """Tells the storage that a file in the making is not wanted."""


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = max(1, min(ROW_GROUP_ROWS, batch.num_rows * ROW_GROUP_BYTES // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _describe(storage: Storage, path: str, file: SealedFile) -> SealedFile:
    """Read the file back for its checksums; a file that was not stored as it was fails here."""
    opened = storage.open_file(path)
    if opened is None:
        raise OutcomeUnknown(f"{storage.locate(path)} is gone just after it was written")
    try:
        size = opened.size()
        crc = 0
        for at in range(0, size, _CRC_BLOCK):
            crc = google_crc32c.extend(crc, opened.read(at, min(_CRC_BLOCK, size - at)))
        footer_length = int.from_bytes(opened.read(size - _TAIL, 4), "little") + _TAIL
        footer_crc = google_crc32c.value(opened.read(size - footer_length, footer_length))
    finally:
        opened.close()
    return file._replace(
        byte_length=size, footer_length=footer_length, footer_crc=footer_crc, crc=crc
    )


class SealedReader:
    """One sealed file, open. Its row groups are read one by one."""

    def __init__(self, storage: Storage, directory: str, file: SealedFile) -> None:
        self.file = file
        self.path = storage.locate(f"{directory}/sealed/{file.name}")
        opened = storage.open_file(f"{directory}/sealed/{file.name}")
        if opened is None:
            raise MissingFile(self.path, 0, "the file is missing")
        self._opened = opened
        try:
            self._check_footer()
            self._parquet = self._guard(
                lambda: pq.ParquetFile(
                    pa.PythonFile(_Bytes(opened, file.byte_length), mode="r"),
                    page_checksum_verification=True,
                )
            )
            self.group_starts, self._group_high = self._guard(self._group_bounds)
            self.group_rows = self._guard(self._count_rows)
        except BaseException:
            opened.close()
            raise

    @property
    def group_count(self) -> int:
        return len(self.group_starts)

    def group_end(self, group: int) -> int:
        """Return the offset behind those that a row group covers."""
        is_last = group >= self.group_count - 1
        return self.file.end if is_last else int(self.group_starts[group + 1])

    @property
    def offset_bounds(self) -> tuple[int, int] | None:
        """Return the first and the last offset of its records; None if it has none."""
        if not self.group_count:
            return None
        last = self.read(self.group_count - 1, ["offset"])
        return int(self.group_starts[0]), int(offsets(last)[-1])

    def group_at(self, offset: int) -> int:
        """Return the row group from which records at or after `offset` come."""
        return max(int(np.searchsorted(self.group_starts, offset, side="right")) - 1, 0)

    def groups_at_time(self, timestamp: int, first: int) -> Iterator[int]:
        """Yield the row groups from `first` on that have a record at or after `timestamp`."""
        for group in range(first, self.group_count):
            if self._group_high[group] >= timestamp:
                yield group

    def read(self, group: int, columns: list[str] | None = None) -> pa.RecordBatch:
        """Return the records of a row group: all columns of `SCHEMA`, or some."""
        table = self._guard(lambda: self._parquet.read_row_group(group, columns=columns))
        schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
        batch = self._guard(lambda: table.select(schema.names).cast(schema).combine_chunks())
        batches = batch.to_batches()
        if len(batches) != 1:
            raise CorruptLog(self.path, 0, f"row group {group} is empty, or over 2 GiB")
        return batches[0]

    def close(self) -> None:
        self._opened.close()

    def _check_footer(self) -> None:
        file = self.file
        size = self._opened.size()
        if size != file.byte_length:
            raise CorruptLog(self.path, size, f"it has {size} bytes instead of {file.byte_length}")
        footer = self._opened.read(size - file.footer_length, file.footer_length)
        if google_crc32c.value(footer) != file.footer_crc:
            at = size - file.footer_length
            raise CorruptLog(self.path, at, "the footer's checksum does not match")

    def _group_bounds(self) -> tuple[npt.NDArray[np.int64], list[int]]:
        meta = self._parquet.metadata
        names = [meta.schema.column(place).path for place in range(meta.num_columns)]
        offset, timestamp = names.index("offset"), names.index("timestamp")
        starts, high = [], []
        for group in range(meta.num_row_groups):
            row_group = meta.row_group(group)
            starts.append(row_group.column(offset).statistics.min)
            # The logical value is a datetime, which cannot hold all times that a record may have.
            high.append(row_group.column(timestamp).statistics.max_raw)
        return np.array(starts, np.int64), high

    def _count_rows(self) -> list[int]:
        meta = self._parquet.metadata
        counts = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
        if sum(counts) != self.file.record_count:
            raise ValueError(f"{sum(counts)} records instead of {self.file.record_count}")
        return counts

    def _guard(self, call: Any) -> Any:
        """Turn what Arrow says about damaged bytes into our words."""
        try:
            return call()
        except (pa.ArrowException, OSError, ValueError, AttributeError) as error:
            raise CorruptLog(self.path, 0, f"it does not open as Parquet: {error}") from error


class _Bytes:
    """What Arrow wants of a file, over ours."""

    closed = False

    def __init__(self, opened: Any, size: int) -> None:
        self._opened = opened
        self._size = size
        self._at = 0

    def read(self, count: int = -1) -> bytes:
        if count < 0:
            count = self._size - self._at
        data: bytes = self._opened.read(self._at, min(count, self._size - self._at))
        self._at += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        base = (0, self._at, self._size)[whence]
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None: ...

    def close(self) -> None: ...


def with_offsets(batch: pa.RecordBatch, offsets: pa.Array, timestamp_type: int) -> pa.RecordBatch:
    """Return records as they are fetched (key, value, headers, timestamp) as rows of a file."""
    kind = pa.repeat(pa.scalar(timestamp_type, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, kind, offsets], schema=SCHEMA)


def records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of a record, without offset and timestamp type."""
    return batch.select(RECORD_SCHEMA.names)


def offsets(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = batch.column("offset").to_numpy()
    return found
