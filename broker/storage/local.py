"""Files on a local disk: with `append_file` and `locks` the only place that touches any.

Promises the log builds on:
- `create` is whole or not at all, never overwrites, and is on disk when it returns (`sync=True`).
- `AppendFile.append` writes at the end in one call; what a killed writer leaves is a prefix.
- A lock belongs to a process; it goes away with the process, and its file is never removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import BinaryIO

from broker.boot import read_boot_id
from broker.errors import (
    AlreadyExists,
    OutcomeUnknown,
)
from broker.storage.append_file import AppendFile
from broker.storage.disk_error import translate
from broker.storage.locks import FileLock
from broker.storage.temporary import TEMPORARY
from broker.storage.watch import Watch

# Copying so few bytes together costs less than handing the kernel a list.
_JOIN_BYTES_MAX = 1 << 14
# From here on mapping a file costs less than copying out of it.
_MAP_BYTES_MIN = 1 << 17
_REMOVE_TRIES = 100
_REMOVE_PAUSE_SECONDS = 0.01
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalStorage:
    """One log's files below `root`. Paths are relative, with forward slashes."""

    # What was written may be torn, and lost in a power cut until it is synced.
    is_remote = False
    # How many appends a file may have; any number.
    pieces_max: int | None = None
    # To ask whether there is something new costs next to nothing.
    poll_seconds = 0.0
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, root: str, boot_id: str | None = None, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.root = os.path.abspath(root)
        self.clock = clock  # Nanoseconds since 1970.
        self.boot_id = boot_id or read_boot_id()

    def locate(self, path: str) -> str:
        return os.path.join(self.root, path)

    def read(self, path: str) -> bytes | None:
        """Return the whole file, or None if there is none."""
        try:
            with open(self.locate(path), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate(error, self.locate(path)) from error

    def create(self, path: str, data: bytes, *, sync: bool = True) -> None:
        """Put `data` at `path` whole or not at all; `AlreadyExists` if the name is taken."""
        target = self.locate(path)
        temporary = os.path.join(os.path.dirname(target), TEMPORARY + uuid.uuid4().hex)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.link(temporary, target)
        except FileExistsError:
            raise AlreadyExists(f"{target} exists already") from None
        except OSError as error:
            raise translate(error, target) from error
        finally:
            _remove_quietly(temporary)
        if sync:
            self.sync_directory(os.path.dirname(path))

    def create_appended(self, path: str, data: bytes) -> None:
        """Make a file that will be appended to, with its first bytes."""
        self.create(path, data)

    @contextmanager
    def create_stream(self, path: str) -> Iterator[BinaryIO]:
        """Write a file piece by piece; it appears, durable, when the block ends without error."""
        target = self.locate(path)
        temporary = os.path.join(os.path.dirname(target), TEMPORARY + uuid.uuid4().hex)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, target)
        except FileExistsError:
            raise AlreadyExists(f"{target} exists already") from None
        except OSError as error:
            raise translate(error, target) from error
        finally:
            _remove_quietly(temporary)
        self.sync_directory(os.path.dirname(path))

    @contextmanager
    def guard(self, path: str) -> Iterator[None]:
        """Turn what goes wrong while a file is written by others' code into our errors."""
        try:
            yield
        except OSError as error:
            raise translate(error, self.locate(path)) from error

    def link(self, path: str, to: str) -> None:
        """Let a file have a second name; that it has it already is fine."""
        target = self.locate(to)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.link(self.locate(path), target)
        except FileExistsError:
            return
        except OSError as error:
            raise translate(error, target) from error

    def overwrite(self, path: str, data: bytes) -> None:
        """Replace the bytes at `path` in place: only for small hints that carry a checksum."""
        try:
            descriptor = os.open(self.locate(path), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, data, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise translate(error, self.locate(path)) from error

    def unfinished(self, path: str) -> list[str]:
        """Return the names of files in the making, or left so by a killed process."""
        try:
            names = os.listdir(self.locate(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translate(error, self.locate(path)) from error
        return sorted(name for name in names if name.startswith(TEMPORARY))

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory, without temporary ones; none if it is absent."""
        try:
            names = os.listdir(self.locate(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translate(error, self.locate(path)) from error
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def stamps(self, path: str) -> Sequence[tuple[str, int, int]]:
        """Return name, size and time of change (ns) of what a directory has, sorted."""
        try:
            with os.scandir(self.locate(path)) as entries:
                found = [(entry.name, entry.stat()) for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translate(error, self.locate(path)) from error
        return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)

    def exists(self, path: str) -> bool:
        return os.path.exists(self.locate(path))

    def is_file(self, path: str) -> bool:
        """Tell whether there is something that is not a directory."""
        return os.path.isfile(self.locate(path))

    def touch(self, path: str) -> None:
        """Let a file, which is made if need be, have been changed now."""
        target = self.locate(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "ab"):
                os.utime(target)
        except OSError as error:
            raise translate(error, target) from error

    def age_ms(self, path: str) -> int | None:
        """Return how long ago a file was changed, by the store's clock; None if it is absent."""
        try:
            changed = os.stat(self.locate(path)).st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate(error, self.locate(path)) from error
        return (time.time_ns() - changed) // 1_000_000

    def remove(self, path: str) -> None:
        """Remove a file; that it is gone already is fine."""
        try:
            os.unlink(self.locate(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translate(error, self.locate(path)) from error

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; that it is gone already is fine."""
        target = self.locate(path)
        for rest in reversed(range(_REMOVE_TRIES)):
            try:
                shutil.rmtree(target)
                return
            except OSError as error:
                if not os.path.exists(target):
                    return
                # Others, who have not heard of it yet, may still put files in or take some out.
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or not rest:
                    raise translate(error, target) from error
                time.sleep(_REMOVE_PAUSE_SECONDS)

    def rename(self, path: str, to: str) -> None:
        try:
            os.makedirs(os.path.dirname(self.locate(to)), exist_ok=True)
            os.rename(self.locate(path), self.locate(to))
        except OSError as error:
            raise translate(error, self.locate(path)) from error

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory, and the directory's own up to the root, durable."""
        while True:
            try:
                descriptor = os.open(self.locate(path), os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise OutcomeUnknown(
                    f"could not sync {self.locate(path)}: {error.strerror}; what was named in it "
                    "last may be lost in a power cut"
                ) from error
            if not path:
                return
            path = os.path.dirname(path)

    def open_file(
        self, path: str, *, write: bool = False, create: bool = False
    ) -> AppendFile | None:
        """Open a file for reading, or for appending too; None if it is absent and not created."""
        flags = (os.O_RDWR | os.O_APPEND) if write else os.O_RDONLY
        target = self.locate(path)
        try:
            if create:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                flags |= os.O_CREAT
            return self._file(target, os.open(target, flags | os.O_CLOEXEC, 0o644))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate(error, target) from error

    def open_appended(
        self, path: str, *, write: bool, create: bool, position: int, count: int
    ) -> AppendFile | None:
        """Open a file that may still grow; the place at which it is read on does not matter."""
        return self.open_file(path, write=write, create=create)

    def _file(self, target: str, descriptor: int) -> AppendFile:
        return AppendFile(target, descriptor)

    def merge(self, path: str, byte_length: int) -> None:
        """An appended file is one file here already."""

    def may_remove(self, path: str) -> bool:
        """Who has a file open can read on when its name is gone."""
        return True

    def remove_pieces(self, path: str) -> bool:
        """There are none."""
        return False

    def writer_lock(self, name: str) -> FileLock:
        """Return the lock under which files are appended to."""
        return self.lock(name)

    def delta_options(self) -> dict[str, str]:
        """Return what the library `deltalake` needs to know to get here."""
        return {}

    def abort_uploads(self, path: str, older_than_ms: int) -> None:
        """There are none: what is not finished is listed."""

    identity: tuple[str, bytes] | None = None

    def identify(self, path: str, data: bytes) -> None:
        """Files that are open here stay what they were, whatever is at their names."""

    def holds(self, identity: tuple[str, bytes] | None) -> bool:
        """Whether a file has lost its name says the file itself."""
        return True

    def lock(self, name: str) -> FileLock:
        return FileLock(self.locate(f"locks/{name}"))

    def watch(self) -> Watch:
        return Watch(self.root)


def _remove_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
