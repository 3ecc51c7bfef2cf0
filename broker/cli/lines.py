"""Lines of input as Arrow columns, without a Python object for each line."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.errors import InvalidRecord

_READ_BYTES = 1 << 20


class LineReader:
    """Reads a descriptor in blocks of whole lines: as many as are there, up to a size."""

    def __init__(
        self,
        descriptor: int,
        block_bytes: int,
        line_bytes_max: int,
        wait_readable: Callable[[int, float | None], bool],
        linger_seconds: float,
    ) -> None:
        self._descriptor = descriptor
        self._block_bytes = block_bytes
        self._line_bytes_max = line_bytes_max
        self._wait_readable = wait_readable
        self._linger = linger_seconds
        self._parts: list[bytes] = []
        self._is_at_end = False
        self._size = 0
        self._open_line_bytes = 0
        self.line_count = 0

    def next_block(self) -> bytes:
        """Return the next whole lines; nothing when the input has ended or is not wanted."""
        while not self._is_at_end:
            is_line_there = self._size > self._open_line_bytes
            if is_line_there and self._size >= self._block_bytes:
                break
            if not self._wait_readable(self._descriptor, self._linger if is_line_there else None):
                break
            self._read()
        return self._take()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, max(_READ_BYTES, self._block_bytes - self._size))
        except OSError as error:
            raise InvalidRecord(f"cannot read standard input: {error.strerror}") from error
        if not data:
            self._is_at_end = True
            return
        self._parts.append(data)
        self._size += len(data)
        newline = data.rfind(b"\n")
        if newline < 0:
            self._open_line_bytes += len(data)
        else:
            self._open_line_bytes = len(data) - newline - 1
        if self._open_line_bytes > self._line_bytes_max:
            raise InvalidRecord(
                f"a line has over {self._line_bytes_max} bytes, more than max.message.bytes lets "
                "a record have; send shorter lines or raise that setting"
            )

    def _take(self) -> bytes:
        """Return the whole lines read so far; at the end of the input its last one as well."""
        data = b"".join(self._parts)
        if self._is_at_end:
            self._parts, self._size, self._open_line_bytes = [], 0, 0
            return data
        end = len(data) - self._open_line_bytes
        self._parts, self._size = [data[end:]], self._open_line_bytes
        return data[:end]


def split_lines(block: bytes) -> pa.Array:
    """Return a block's lines, without their newlines, as a binary array."""
    if not block.endswith(b"\n"):
        block += b"\n"
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
    offsets = np.zeros(len(ends) + 1, np.int32)
    # Each newline before a line is not there any more when all of them have been removed.
    offsets[1:] = ends - np.arange(len(ends))
    data = block.replace(b"\n", b"")
    return pa.Array.from_buffers(
        pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def split_keys(lines: pa.Array, separator: str) -> tuple[pa.Array, pa.Array]:
    """Return keys and values of the lines up to the first one that has no separator."""
    parts = pc.split_pattern(lines, separator, max_splits=1)
    lacking = np.flatnonzero(pc.list_value_length(parts).to_numpy() < 2)
    if len(lacking):
        parts = parts.slice(0, int(lacking[0]))
    return pc.list_element(parts, 0), pc.list_element(parts, 1)
