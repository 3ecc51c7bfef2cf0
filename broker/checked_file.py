"""Files that the journal can be without: one Arrow batch behind a checksum of its own.

Layout: magic `SLA1`, CRC32C of the rest, then an Arrow IPC stream. Unknown columns are ignored.
"""

from __future__ import annotations

import struct

import google_crc32c
import pyarrow as pa

from broker.errors import CorruptLog

MAGIC = b"SLA1"
_PREFIX = struct.Struct("<4sI")


def encode(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    crc: int = google_crc32c.value(body)
    return _PREFIX.pack(MAGIC, crc) + body


def decode(data: bytes, path: str) -> pa.RecordBatch:
    if len(data) < _PREFIX.size or data[:4] != MAGIC:
        raise CorruptLog(path, 0, "the file's beginning is not what was written")
    body = data[_PREFIX.size :]
    if google_crc32c.value(body) != _PREFIX.unpack_from(data)[1]:
        raise CorruptLog(path, 0, "the file's checksum does not match")
    try:
        return pa.ipc.open_stream(body).read_next_batch()
    except (pa.ArrowException, StopIteration) as error:
        raise CorruptLog(path, 0, f"the file does not open: {error}") from error
