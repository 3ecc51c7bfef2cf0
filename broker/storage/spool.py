"""A file in the making that is kept here until a store has taken all of it.

In memory while it is small, as the file of a producer's batch is, then on this machine's disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from broker.storage.disk_error import translate

# A producer's batch is smaller.
_MEMORY_BYTES_MAX = 32 << 20


class Spool:
    """A file without a name, gone when it is closed; all of it can be read again and again."""

    def __init__(self) -> None:
        with _disk_errors():
            self.file = cast(BinaryIO, tempfile.SpooledTemporaryFile(_MEMORY_BYTES_MAX))
        self._count = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        with _disk_errors():
            self.file.write(data)
        length = memoryview(data).nbytes
        self._count += length
        return length

    # What writers of Parquet ask of a file.

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        with _disk_errors():
            self.file.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        return self.file.closed

    def close(self) -> None:
        """Whoever made this closes it."""


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Tell this machine's errors from those of the store."""
    try:
        yield
    except OSError as error:
        raise translate(error, f"a temporary file in {tempfile.gettempdir()}") from error
