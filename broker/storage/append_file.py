"""A file on a local disk that grows at its end, read by copying or by mapping."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import pyarrow as pa

from broker.errors import CorruptLog, OutcomeUnknown
from broker.storage.disk_error import translate

# Copying so few bytes together costs less than handing the kernel a list.
_JOIN_BYTES_MAX = 1 << 14
# From here on mapping a file costs less than copying out of it.
_MAP_BYTES_MIN = 1 << 17


class AppendFile:
    """A file that only grows, but for cuts made under the topic's lock.

    Readers must not map past the last valid commit: a cut under a mapping is a SIGBUS.
    """

    __slots__ = ("_descriptor", "_map", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def size(self) -> int:
        try:
            return os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise translate(error, self.path) from error

    def read(self, start: int, length: int) -> bytes:
        """Return up to `length` bytes from `start`: fewer only at the end of the file."""
        try:
            data = os.pread(self._descriptor, length, start)
            if len(data) == length or not data:
                return data
            parts = [data]
            while data and (length := length - len(data)):
                start += len(data)
                data = os.pread(self._descriptor, length, start)
                parts.append(data)
            return b"".join(parts)
        except OSError as error:
            raise translate(error, self.path) from error

    @property
    def mapped(self) -> int:
        """How many bytes are mapped already."""
        return 0 if self._map is None else len(self._map)

    def map(self, end: int) -> mmap.mmap:
        """Map [0, at least `end`); `end` must lie within valid commits."""
        if self._map is None or len(self._map) < end:
            try:
                if os.fstat(self._descriptor).st_size < end:
                    raise CorruptLog(self.path, end, "the file is shorter than what it held")
                self._map = mmap.mmap(self._descriptor, end, access=mmap.ACCESS_READ)
            except OSError as error:
                raise translate(error, self.path) from error
        return self._map

    def buffer(self, start: int, length: int) -> pa.Buffer:
        """Return bytes that lie within valid commits: a copy of few, a mapping of many."""
        end = start + length
        if length >= _MAP_BYTES_MIN or self.mapped >= end:
            return pa.py_buffer(self.map(end)).slice(start, length)
        return pa.py_buffer(self.read(start, length))

    def is_at(self, position: int) -> bool:
        """Tell whether the file ends here. Cheap: one system call."""
        return self.size() == position

    def is_removed(self) -> bool:
        """Tell whether the file has no name any more: what is appended to it is lost."""
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            raise translate(error, self.path) from error

    def append(self, parts: Sequence[bytes | memoryview], length: int, position: int) -> None:
        """Write `parts`, `length` bytes in all, at the end, which is `position`. All or nothing.

        A short write is cut off again. If even that fails, what is there is a prefix, which no
        reader takes for a commit and the next writer cuts.
        """
        try:
            if length <= _JOIN_BYTES_MAX:
                written = os.write(self._descriptor, b"".join(parts))
            else:
                written = os.writev(self._descriptor, parts)
        except OSError as error:
            raise translate(error, self.path) from error
        if written == length:
            return
        failure = self._write_rest(parts, written)
        if failure is None:
            return
        try:
            os.ftruncate(self._descriptor, position)
        except OSError:
            pass
        raise translate(failure, self.path) from failure

    def _write_rest(self, parts: Sequence[bytes | memoryview], written: int) -> OSError | None:
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                return error
        return None

    def truncate(self, position: int) -> None:
        try:
            os.ftruncate(self._descriptor, position)
        except OSError as error:
            raise translate(error, self.path) from error

    def sync(self) -> None:
        """Make the file's bytes durable, or raise `OutcomeUnknown`."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise OutcomeUnknown(
                f"could not sync {self.path}: {error.strerror}; what was written last may be lost "
                "in a power cut"
            ) from error

    def close(self) -> None:
        self._map = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
