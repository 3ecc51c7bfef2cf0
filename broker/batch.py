"""Frames: record batches as bytes. Records <-> Arrow record batch <-> frame.

A frame is a fixed header and one Arrow IPC record-batch message, compressed as a whole by the
producer and kept so until a consumer opens it. It does not know its offsets: a commit gives them.
The checksum covers everything after itself, so any changed bit is found when the frame is read.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import google_crc32c
import pyarrow as pa

from broker import arrow_message
from broker.arrow_message import SCHEMA
from broker.errors import CorruptLog, UnsupportedFormat

MAGIC = b"SLF1"
VERSION = 1
SCHEMA_KAFKA = 0
# magic, crc, version, codec, schema id, payload bytes, uncompressed bytes, records, min/max µs
HEADER = struct.Struct("<4sIBBHIIIqq")
CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
CODEC_IDS = {name: number for number, name in enumerate(CODEC_NAMES)}
FRAME_BYTES_MAX = 1 << 30

_CHECKED = struct.Struct("<BBHIIIqq")
_CHECKED_START = HEADER.size - _CHECKED.size
_PREFIX = struct.Struct("<4sI")


class Frame(NamedTuple):
    """An encoded batch, not yet placed. Timestamps are in microseconds."""

    parts: tuple[Any, ...]
    byte_length: int
    record_count: int
    min_timestamp: int
    max_timestamp: int


def encode_records(
    keys: list[bytes | None],
    values: list[bytes | None],
    headers: list[Any] | None,
    timestamps: list[int],
    codec: str = "none",
) -> Frame:
    """Encode records given as columns of Python values; timestamps in microseconds."""
    payload, low, high = arrow_message.encode_columns(keys, values, headers, timestamps)
    return _frame((payload,), len(payload), len(values), low, high, codec)


def encode_batch(batch: pa.RecordBatch, codec: str = "none") -> Frame:
    """Encode an Arrow batch that has the schema of a record."""
    timestamps = batch.column(3).view(pa.int64()).to_numpy()
    low, high = int(timestamps.min()), int(timestamps.max())
    parts = arrow_message.parts_of(batch)
    length = sum(map(len, parts))
    return _frame(parts, length, batch.num_rows, low, high, codec)


def decode(data: pa.Buffer, path: str, position: int) -> pa.RecordBatch:
    """Check and open the frame that `data` is, exactly. Zero copy if it is not compressed."""
    header = check(data, path, position)
    codec, plain_length, record_count = header[3], header[6], header[7]
    try:
        payload = data.slice(HEADER.size)
        if codec:
            payload = pa.decompress(payload, plain_length, CODEC_NAMES[codec])
        batch = pa.ipc.read_record_batch(payload, SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptLog(path, position, f"a frame does not open: {error}") from error
    if batch.num_rows != record_count:
        raise CorruptLog(path, position, "a frame holds another number of records than it says")
    return batch


def check(data: pa.Buffer, path: str, position: int) -> tuple[Any, ...]:
    """Return the header's fields if `data` is exactly one frame, unchanged, that we can open."""
    if data.size < HEADER.size:
        raise CorruptLog(path, position, "a frame is shorter than its header")
    header = HEADER.unpack_from(data)
    magic, crc, version, codec, schema_id, payload_length = header[:6]
    if magic != MAGIC:
        raise CorruptLog(path, position, "this is not a frame")
    if data.size != HEADER.size + payload_length:
        raise CorruptLog(path, position, "a frame's length does not match its place")
    if google_crc32c.value(data.slice(_CHECKED_START)) != crc:
        raise CorruptLog(path, position, "a frame's checksum does not match")
    if version != VERSION or schema_id != SCHEMA_KAFKA or codec >= len(CODEC_NAMES):
        raise UnsupportedFormat(
            f"the frame at byte {position} of {path}",
            f"{version}, schema {schema_id}, codec {codec}",
            f"{VERSION} with schema {SCHEMA_KAFKA} and codecs 0 to {len(CODEC_NAMES) - 1}",
        )
    return header


def _frame(
    payload: tuple[Any, ...], plain_length: int, count: int, low: int, high: int, codec: str
) -> Frame:
    """Put a header before a payload, which is given in parts that are kept as they are."""
    length = plain_length
    if codec != "none":
        whole = payload[0] if len(payload) == 1 else b"".join(payload)
        payload = (pa.compress(whole, codec, asbytes=True),)
        length = len(payload[0])
    checked = _CHECKED.pack(
        VERSION, CODEC_IDS[codec], SCHEMA_KAFKA, length, plain_length, count, low, high
    )
    crc = google_crc32c.value(checked)
    for part in payload:
        crc = google_crc32c.extend(crc, part)
    return Frame(
        (_PREFIX.pack(MAGIC, crc), checked, *payload), HEADER.size + length, count, low, high
    )
