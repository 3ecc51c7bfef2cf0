"""Arrow IPC record-batch messages, built straight from Python values.

Building Arrow arrays costs 25 µs even for one record: more than the whole commit. But the message
of a batch in which each column is all present or all null differs from that of any other such
batch only in a few numbers at fixed places: row count, null counts, buffer places. So the message
that Arrow itself writes for one record is kept as a template and those numbers are written into
it. The result is the same Arrow message; batches of any other shape go through Arrow.
"""

from __future__ import annotations

import struct
from array import array
from itertools import accumulate
from typing import Any

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
_ABSENT = -1


def encode_columns(
    keys: list[bytes | None],
    values: list[bytes | None],
    headers: list[Any] | None,
    timestamps: list[int],
) -> bytes:
    """Return the message of these records."""
    count = len(values)
    key_column = _plain_column(keys, count)
    value_column = _plain_column(values, count)
    if headers is not None or key_column is None or value_column is None:
        return _through_arrow(keys, values, headers, timestamps)
    key_bytes, key_parts = key_column
    value_bytes, value_parts = value_column
    shape = (count, key_bytes, value_bytes)
    head = _heads.get(shape)
    if head is None:
        head = _make_head(*shape)
    stamps = _ONE_LONG(timestamps[0]) if count == 1 else array("q", timestamps).tobytes()
    return b"".join((head, *key_parts, *value_parts, _null_column(count), stamps))


_ONE_LONG = struct.Struct("<q").pack
_TWO_INTS = struct.Struct("<ii").pack
_heads: dict[tuple[int, int, int], bytes] = {}
_null_columns: dict[int, bytes] = {}


def _plain_column(column: list[Any], count: int) -> tuple[int, tuple[bytes, ...]] | None:
    """Return data length and body parts of a column without nulls or of nulls only."""
    if count == 1:
        only = column[0]
        if only is None:
            return _ABSENT, (_null_column(1),)
        size = len(only)
        return size, (_TWO_INTS(0, size), only, _PADDING[size & 7])
    try:
        ends = array("i", accumulate(map(len, column), initial=0))
    except TypeError:
        if any(item is not None for item in column):
            return None
        return _ABSENT, (_null_column(count),)
    offsets = ends.tobytes()
    size = ends[-1]
    padding = _PADDING[len(offsets) & 7], _PADDING[size & 7]
    return size, (offsets, padding[0], b"".join(column), padding[1])


def _null_column(count: int) -> bytes:
    """Return validity and offsets of `count` nulls: zeros, all of them."""
    zeros = _null_columns.get(count)
    if zeros is None:
        zeros = bytes(_padded((count + 7) // 8) + _padded(4 * (count + 1)))
        if count <= 64:
            _null_columns[count] = zeros
    return zeros


def _padded(size: int) -> int:
    return (size + 7) & ~7


def _make_head(count: int, key_bytes: int, value_bytes: int) -> bytes:
    """Return the message's metadata for a batch of this shape."""
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
) -> bytes:
    count = len(values)
    arrays = [
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.nulls(count, HEADERS_TYPE) if headers is None else pa.array(headers, HEADERS_TYPE),
        pa.array(timestamps, pa.int64()).cast(TIMESTAMP_TYPE),
    ]
    serialized: bytes = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA).serialize().to_pybytes()
    return serialized


class _Template:
    """The message Arrow writes for one record, and where its numbers are."""

    def __init__(self) -> None:
        message = _through_arrow([b"k"], [b"v"], None, [1])
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


_TEMPLATE = _Template()
