"""What the system says about a file, in one line: what, where, and what to do."""

from __future__ import annotations

import errno

from broker.errors import DiskFull, StorageError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def translate(error: OSError, path: str) -> StorageError:
    """Turn the system's error into ours: what, where, and what to do."""
    if error.errno in _NO_ROOM:
        return DiskFull(
            f"no room to write {path}: {error.strerror}; nothing was written. Free some, outside "
            "of the log or by deleting a topic"
        )
    if error.errno == errno.EROFS:
        return StorageError(
            f"not allowed to write {path}: {error.strerror}; mount it for writing, or only read"
        )
    if isinstance(error, PermissionError):
        return StorageError(
            f"not allowed to write or read {path}: {error.strerror}; check its owner"
        )
    if isinstance(error, (NotADirectoryError, IsADirectoryError)):
        return StorageError(f"{path}: {error.strerror}; check the path")
    return StorageError(f"{path}: {error.strerror or error}")
