"""Arrow IPC record-batch messages, built straight from Python values.

Building Arrow arrays costs 25 µs even for one record: more than the whole commit. But the message
of a batch in which each column is all present or all null differs from that of any other such
batch only in a few numbers at fixed places: row count, null counts, buffer places. So the message
that Arrow itself writes for one record is kept as a template and those numbers are written into
it. The same template spares a large Arrow batch of that shape a copy: its own buffers follow the
metadata. The result is an Arrow message like any other; all else goes through Arrow.
"""

from __future__ import annotations

import struct
from array import array
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_TYPE),
        ("timestamp", TIMESTAMP_TYPE),
    ]
)
DATA_BYTES_MAX = (1 << 31) - 1

_NODES = struct.Struct("<14q")  # 7 fields, each: length, null count
_BUFFERS = struct.Struct("<34q")  # 17 buffers, each: place, length
_PADDING = [b"\0" * count for count in (0, 7, 6, 5, 4, 3, 2, 1)]
_HEADS_KEPT = 4096
# From here on Arrow's own conversion is the faster one.
_TEMPLATE_RECORDS_MAX = 256
_ABSENT = -1


def encode_columns(
    keys: list[bytes | None],
    values: list[bytes | None],
    headers: list[Any] | None,
    timestamps: list[int],
) -> tuple[bytes | pa.Buffer, int, int]:
    """Return the message of these records and the bounds of their timestamps, in microseconds."""
    count = len(values)
    if headers is not None or count > _TEMPLATE_RECORDS_MAX:
        return _through_arrow(keys, values, headers, timestamps)
    if count == 1:
        return _encode_one(keys[0], values[0], timestamps[0])
    key_column = _plain_column(keys, count)
    value_column = _plain_column(values, count)
    if key_column is None or value_column is None:
        return _through_arrow(keys, values, headers, timestamps)
    head = _head(count, key_column[0], value_column[0])
    stamps = array("q", timestamps).tobytes()
    parts = (head, *key_column[1], *value_column[1], _null_column(count), stamps)
    return b"".join(parts), min(timestamps), max(timestamps)


def parts_of(batch: pa.RecordBatch) -> tuple[Any, ...]:
    """Return the message of a batch that has the schema of a record, in parts.

    The parts share the batch's memory where its shape allows that, so it is not copied.
    """
    count = batch.num_rows
    key, value, headers, stamps = batch.columns
    if headers.null_count == count and not stamps.null_count:
        key_column, value_column = _shared_column(key), _shared_column(value)
        if key_column is not None and value_column is not None:
            head = _head(count, key_column[0], value_column[0])
            times = stamps.buffers()[1].slice(8 * stamps.offset, 8 * count)
            return head, *key_column[1], *value_column[1], _null_column(count), times
    return (batch.serialize(),)


def _encode_one(key: bytes | None, value: bytes | None, timestamp: int) -> tuple[bytes, int, int]:
    """One record alone: the message that small commits are made of."""
    key_bytes = value_bytes = _ABSENT
    key_part = value_part = _NULL
    if key is not None:
        key_bytes = len(key)
        key_part = _TWO_INTS(0, key_bytes) + key + _PADDING[key_bytes & 7]
    if value is not None:
        value_bytes = len(value)
        value_part = _TWO_INTS(0, value_bytes) + value + _PADDING[value_bytes & 7]
    head = _heads.get((1, key_bytes, value_bytes)) or _head(1, key_bytes, value_bytes)
    message = b"".join((head, key_part, value_part, _NULL, _ONE_LONG(timestamp)))
    return message, timestamp, timestamp


_ONE_LONG = struct.Struct("<q").pack
_TWO_INTS = struct.Struct("<ii").pack
_heads: dict[tuple[int, int, int], bytes] = {}
_null_columns: dict[int, bytes] = {}


def _plain_column(column: list[Any], count: int) -> tuple[int, tuple[bytes, ...]] | None:
    """Return data length and body parts of a column without nulls or of nulls only."""
    null_count = column.count(None)
    if null_count:
        return (_ABSENT, (_null_column(count),)) if null_count == count else None
    ends = array("i", accumulate(map(len, column), initial=0))
    offsets = ends.tobytes()
    size = ends[-1]
    padding = _PADDING[len(offsets) & 7], _PADDING[size & 7]
    return size, (offsets, padding[0], b"".join(column), padding[1])


def _shared_column(column: pa.Array) -> tuple[int, tuple[Any, ...]] | None:
    """Return what `_plain_column` does, of an Arrow column of bytes and without copying those."""
    count = len(column)
    if column.null_count:
        return (_ABSENT, (_null_column(count),)) if column.null_count == count else None
    _validity, places, data = column.buffers()
    offsets = np.frombuffer(places, np.int32, count + 1, 4 * column.offset)
    start, end = int(offsets[0]), int(offsets[-1])
    size = end - start
    places = (
        (offsets - start).tobytes() if start else places.slice(4 * column.offset, 4 * (count + 1))
    )
    padding = _PADDING[len(places) & 7], _PADDING[size & 7]
    return size, (places, padding[0], data.slice(start, size) if size else b"", padding[1])


def _null_column(count: int) -> bytes:
    """Return validity and offsets of `count` nulls: zeros, all of them."""
    zeros = _null_columns.get(count)
    if zeros is None:
        zeros = bytes(_padded((count + 7) // 8) + _padded(4 * (count + 1)))
        if count <= _TEMPLATE_RECORDS_MAX:
            _null_columns[count] = zeros
    return zeros


def _padded(size: int) -> int:
    return (size + 7) & ~7


def _head(count: int, key_bytes: int, value_bytes: int) -> bytes:
    """Return the message's metadata for a batch of this shape."""
    known = _heads.get((count, key_bytes, value_bytes))
    if known is not None:
        return known
    buffers: list[int] = []
    place = 0
    validity, offsets = (count + 7) // 8, 4 * (count + 1)
    lengths: list[int] = []
    for size in (key_bytes, value_bytes):
        lengths += [validity, offsets, 0] if size == _ABSENT else [0, offsets, size]
    lengths += [validity, offsets, 0, 0, 0, 0, 0, 0, 0, 0, 8 * count]
    for length in lengths:
        buffers += (place, length)
        place += _padded(length)
    nulls = [count if size == _ABSENT else 0 for size in (key_bytes, value_bytes)]
    head = bytearray(_TEMPLATE.head)
    struct.pack_into("<q", head, _TEMPLATE.body_length_at, place)
    struct.pack_into("<q", head, _TEMPLATE.row_count_at, count)
    _NODES.pack_into(
        head, _TEMPLATE.nodes_at, count, nulls[0], count, nulls[1], count, count, *[0] * 6, count, 0
    )
    _BUFFERS.pack_into(head, _TEMPLATE.buffers_at, *buffers)
    if len(_heads) >= _HEADS_KEPT:
        _heads.clear()
    made = _heads[(count, key_bytes, value_bytes)] = bytes(head)
    return made


def _through_arrow(
    keys: list[bytes | None],
    values: list[bytes | None],
    headers: list[Any] | None,
    timestamps: list[int],
) -> tuple[pa.Buffer, int, int]:
    count = len(values)
    stamps = pa.array(timestamps, pa.int64())
    numbers = stamps.to_numpy()
    has_keys = keys.count(None) < count
    arrays = [
        pa.array(keys, pa.binary()) if has_keys else pa.nulls(count, pa.binary()),
        pa.array(values, pa.binary()),
        pa.nulls(count, HEADERS_TYPE) if headers is None else pa.array(headers, HEADERS_TYPE),
        stamps.view(TIMESTAMP_TYPE),
    ]
    message = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize()
    return message, int(numbers.min()), int(numbers.max())


class _Template:
    """The message Arrow writes for one record, and where its numbers are."""

    def __init__(self) -> None:
        message = _through_arrow([b"k"], [b"v"], None, [1])[0].to_pybytes()
        metadata_length = struct.unpack_from("<i", message, 4)[0]
        self.head = message[: 8 + metadata_length]
        root = 8 + struct.unpack_from("<I", self.head, 8)[0]
        batch = self._follow(self._field(root, 2))
        self.body_length_at = self._field(root, 3)
        self.row_count_at = self._field(batch, 0)
        self.nodes_at = self._vector(self._field(batch, 1), _NODES.size)
        self.buffers_at = self._vector(self._field(batch, 2), _BUFFERS.size)

    def _field(self, table: int, slot: int) -> int:
        """Return the place of a flatbuffer table's field."""
        vtable = table - struct.unpack_from("<i", self.head, table)[0]
        place: int = struct.unpack_from("<H", self.head, vtable + 4 + 2 * slot)[0]
        assert place, "Arrow left out a field the template needs"
        return table + place

    def _follow(self, place: int) -> int:
        target: int = struct.unpack_from("<I", self.head, place)[0]
        return place + target

    def _vector(self, place: int, size: int) -> int:
        start = self._follow(place)
        count: int = struct.unpack_from("<I", self.head, start)[0]
        assert 16 * count == size, "Arrow writes another number of buffers than the template has"
        return start + 4


_NULL = _null_column(1)
_TEMPLATE = _Template()
