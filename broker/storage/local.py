"""Files on a local disk: the only place that opens, writes, maps, locks or removes any.

Promises the log builds on:
- `create` is whole or not at all, never overwrites, and is on disk when it returns (`sync=True`).
- `AppendFile.append` writes at the end in one call; what a killed writer leaves is a prefix.
- A lock belongs to a process; it goes away with the process, and its file is never removed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol, TypeVar

import pyarrow as pa

from broker.errors import (
    AlreadyExists,
    CorruptLog,
    DiskFull,
    LockTimeout,
    OutcomeUnknown,
    StorageError,
)
from broker.storage.temporary import TEMPORARY
from broker.storage.watch import Watch

# Copying so few bytes together costs less than handing the kernel a list.
_JOIN_BYTES_MAX = 1 << 14
# From here on mapping a file costs less than copying out of it.
_MAP_BYTES_MIN = 1 << 17
_REMOVE_TRIES = 100
_REMOVE_PAUSE_SECONDS = 0.01
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Closes(Protocol):
    def close(self) -> None: ...


Closeable = TypeVar("Closeable", bound=_Closes)


class LocalStorage:
    """One log's files below `root`. Paths are relative, with forward slashes."""

    # What was written may be torn, and lost in a power cut until it is synced.
    is_remote = False
    # How many appends a file may have; any number.
    pieces_max: int | None = None
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

    def check_is_safe(self) -> None:
        """A local disk is known to be."""

    def lock(self, name: str) -> FileLock:
        return FileLock(self.locate(f"locks/{name}"))

    def watch(self) -> Watch:
        return Watch(self.root)


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


class FileLock:
    """An exclusive lock between processes. Threads of one process need a mutex in front of it."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self, timeout_ms: int) -> None:
        """Take the lock, or raise `LockTimeout`, which names who holds it."""
        if self._descriptor < 0:
            self._open()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait(timeout_ms)
        except OSError as error:
            raise translate(error, self.path) from error

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> None:
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise translate(error, self.path) from error

    def _wait(self, timeout_ms: int) -> None:
        """Ask again until the deadline: a blocking flock could not be bounded in time."""
        deadline = time.monotonic() + timeout_ms / 1000
        pause = 20e-6
        while time.monotonic() < deadline:
            time.sleep(pause * (0.5 + random.random()))
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pause = min(pause * 1.5, 2e-3)
        raise LockTimeout(self.path, timeout_ms, self._holder())

    def _holder(self) -> str:
        """Name the process that holds the lock, from the kernel's own table."""
        status = os.fstat(self._descriptor)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        try:
            rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        except OSError:
            return "another process"
        for row in rows:
            if len(row) > 5 and row[1] == "FLOCK" and row[5] == place:
                return describe_process(int(row[4]))
        return "another process"


def describe_process(process_id: int) -> str:
    """Say which process this is, and whether it is stopped."""
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return f"process {process_id}"
    stopped = ", stopped" if stat.rpartition(")")[2].split()[0] in "tT" else ""
    return f"process {process_id}{stopped} ({command.decode(errors='replace')[:80]})"


def read_boot_id() -> str:
    """Return an id that changes with every boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Elsewhere the time of boot, to the minute, serves: wall clock less uptime.
        return f"{uuid.getnode():x}-{int(time.time() - time.monotonic()) // 60}"


def translate(error: OSError, path: str) -> StorageError:
    """Turn the system's error into ours: what, where, and what to do."""
    if error.errno in _NO_ROOM:
        return DiskFull(
            f"no room to write {path}: {error.strerror}; nothing was written. Free some"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StorageError(
            f"not allowed to write or read {path}: {error.strerror}; check its owner"
        )
    if isinstance(error, (NotADirectoryError, IsADirectoryError)):
        return StorageError(f"{path}: {error.strerror}; check the path")
    return StorageError(f"{path}: {error.strerror or error}")


def _remove_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


@contextmanager
def closing_file(file: Closeable) -> Iterator[Closeable]:
    try:
        yield file
    finally:
        file.close()
