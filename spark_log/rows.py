"""From the log's batches to the Arrow batches that Spark takes.

Each column of a batch that crosses to Spark costs time, so only those asked for are made. Large
frames pass without a copy; small ones are put together first. Columns that hold one value
throughout are made once and cut to length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from broker import SliceBatch
from spark_log import schema as schemas

# Batches of this size and more pass as they are.
_ROWS_PASSED = 4096
_BYTES_PASSED = 1 << 20
_ROWS_MAX = 1 << 16
Offsets = npt.NDArray[np.int64]

_STORED = {"key": 0, "value": 1, "headers": 2, "timestamp": 3}


class Rows:
    """Makes batches of exactly one schema. For one task."""

    def __init__(self, schema: StructType) -> None:
        self._schema = schemas.arrow_schema(schema)
        self._names = schemas.column_names(schema)
        self._constants: dict[tuple[str, object], pa.Array] = {}

    def batches(self, pieces: Iterable[SliceBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all pieces, in order."""
        waiting: list[SliceBatch] = []
        row_count, byte_count = 0, 0
        for piece in pieces:
            if not piece.batch.num_rows:
                continue
            size = piece.batch.nbytes if piece.batch.num_rows < _ROWS_PASSED else _BYTES_PASSED
            if waiting and (size >= _BYTES_PASSED or byte_count + size > _BYTES_PASSED):
                yield self._merge(waiting)
                waiting, row_count, byte_count = [], 0, 0
            if size >= _BYTES_PASSED:
                yield from map(self._build, _cut(piece))
                continue
            waiting.append(piece)
            row_count += piece.batch.num_rows
            byte_count += size
            if row_count >= _ROWS_PASSED * 2:
                yield self._merge(waiting)
                waiting, row_count, byte_count = [], 0, 0
        if waiting:
            yield self._merge(waiting)

    def _merge(self, pieces: list[SliceBatch]) -> pa.RecordBatch:
        if len(pieces) == 1:
            return self._build(pieces[0])
        columns = []
        for name, field in zip(self._names, self._schema, strict=True):
            place = _STORED.get(name)
            if place is not None:
                parts = [piece.batch.column(place) for piece in pieces]
                columns.append(_as_type(pa.concat_arrays(parts), field.type))
            else:
                columns.append(_REPEATED[name](pieces, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _build(self, piece: SliceBatch) -> pa.RecordBatch:
        columns = [
            self._column(piece, name, field.type)
            for name, field in zip(self._names, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, piece: SliceBatch, name: str, kind: pa.DataType) -> pa.Array:
        place = _STORED.get(name)
        if place is not None:
            return _as_type(piece.batch.column(place), kind)
        count = piece.batch.num_rows
        if name == "offset":
            return pa.array(_offsets_of(piece), kind)
        value = _constant_of(piece, name)
        made = self._constants.get((name, value))
        if made is None or len(made) < count:
            made = self._constants[name, value] = pa.repeat(pa.scalar(value, kind), count)
        return made.slice(0, count)


def _cut(piece: SliceBatch) -> Iterator[SliceBatch]:
    count = piece.batch.num_rows
    if count <= _ROWS_MAX:
        yield piece
        return
    offsets = _offsets_of(piece)
    for start in range(0, count, _ROWS_MAX):
        own = offsets[start : start + _ROWS_MAX]
        batch = piece.batch.slice(start, _ROWS_MAX)
        yield piece._replace(base_offset=int(own[0]), batch=batch, offsets=own)


def _constant_of(piece: SliceBatch, name: str) -> str | int:
    if name == "topic":
        return piece.topic
    return piece.partition if name == "partition" else piece.timestamp_type


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


def _counts(pieces: list[SliceBatch]) -> np.ndarray:
    return np.array([piece.batch.num_rows for piece in pieces])


def _offsets_of(piece: SliceBatch) -> Offsets:
    """Return each record's offset; compaction leaves gaps."""
    if piece.offsets is not None:
        return piece.offsets
    return np.arange(piece.base_offset, piece.base_offset + piece.batch.num_rows)


def _offsets(pieces: list[SliceBatch], kind: pa.DataType) -> pa.Array:
    return pa.array(np.concatenate([_offsets_of(piece) for piece in pieces]), kind)


def _topics(pieces: list[SliceBatch], kind: pa.DataType) -> pa.Array:
    names = list(dict.fromkeys(piece.topic for piece in pieces))
    if len(names) == 1:
        return pa.repeat(pa.scalar(names[0], kind), int(_counts(pieces).sum()))
    rows = np.repeat([names.index(piece.topic) for piece in pieces], _counts(pieces))
    return pa.array(names, kind).take(pa.array(rows))


def _partitions(pieces: list[SliceBatch], kind: pa.DataType) -> pa.Array:
    return pa.array(np.repeat([piece.partition for piece in pieces], _counts(pieces)), kind)


def _timestamp_types(pieces: list[SliceBatch], kind: pa.DataType) -> pa.Array:
    return pa.array(np.repeat([piece.timestamp_type for piece in pieces], _counts(pieces)), kind)


_REPEATED: dict[str, Callable[[list[SliceBatch], pa.DataType], pa.Array]] = {
    "offset": _offsets,
    "topic": _topics,
    "partition": _partitions,
    "timestampType": _timestamp_types,
}
