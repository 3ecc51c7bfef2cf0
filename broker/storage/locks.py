"""Locks between processes: of the system on a disk; by an object, or none, on a store."""

from __future__ import annotations

import fcntl
import os
import random
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from broker.errors import AlreadyExists, LockTimeout
from broker.storage.disk_error import translate

if TYPE_CHECKING:
    from broker.storage.remote import RemoteStorage

# Who maintains a topic may be taken for dead after this time; then two may do the same work.
LEASE_MS = 900_000


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


class NoLock:
    """Stands where a lock between processes would."""

    def acquire(self, timeout_ms: int) -> None:
        """There is nothing to wait for."""

    def release(self) -> None:
        """There is nothing to let go of."""

    def close(self) -> None:
        """Nothing is open."""


class LeaseLock:
    """A lock that saves work: held by an object, which is taken over when it has grown old."""

    def __init__(self, storage: RemoteStorage, path: str) -> None:
        self.path = path
        self._storage = storage
        self._token = uuid.uuid4().hex.encode()

    def acquire(self, timeout_ms: int) -> None:
        try:
            self._storage.create(self.path, self._token)
            return
        except AlreadyExists:
            age = self._storage.age_ms(self.path)
        if age is not None and age > LEASE_MS:
            self._storage.remove(self.path)
            try:
                self._storage.create(self.path, self._token)
                return
            except AlreadyExists:
                pass
        raise LockTimeout(self._storage.locate(self.path), timeout_ms, "another process")

    def release(self) -> None:
        if self._storage.read(self.path) == self._token:
            self._storage.remove(self.path)

    def close(self) -> None:
        """Nothing is open."""


def describe_process(process_id: int) -> str:
    """Say which process this is, and whether it is stopped."""
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return f"process {process_id}"
    stopped = ", stopped" if stat.rpartition(")")[2].split()[0] in "tT" else ""
    return f"process {process_id}{stopped} ({command.decode(errors='replace')[:80]})"
