"""Storage that dies at its n-th change, as a killed process does: what is on disk stays, no more.

Every operation that changes something counts. At the chosen one the process "dies": before it,
after it, or half-way. From then on every call raises `Died`, so no clean-up of the code under test
reaches the disk. `bury` lets go of files and locks, as the kernel does for a dead process.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from broker.errors import DiskFull, OutcomeUnknown
from broker.storage import AppendFile, FileLock, LocalStorage
from broker.storage.local import TEMPORARY
from broker.topic import Topic


class Died(BaseException):
    """The process is dead. Not an `Exception`: nothing may catch it and go on."""


@dataclass
class Fuse:
    """Counts changes and says when to die.

    Args:
        at: the number of the change to die at, from 1 on; None never dies.
        manner: "before", "after", or "half" the change; or "fail": the change is not made, the
            store says that it is full, and the process lives on.
        prefix: of a half append or overwrite: how many bytes are written; negative counts from
            the end.
    """

    at: int | None = None
    manner: str = "before"
    prefix: int = 1
    is_dead: bool = False
    trace: list[tuple[str, int]] = field(default_factory=list)

    def check(self) -> None:
        if self.is_dead:
            raise Died

    def change(
        self,
        name: str,
        act: Callable[[], Any],
        half: Callable[[], None] | None = None,
        size: int = 0,
    ) -> Any:
        """Do one change, or die at it."""
        self.check()
        self.trace.append((name, size))
        if len(self.trace) != self.at:
            return act()
        if self.manner == "fail":
            is_sync = name in ("sync", "sync_directory")
            raise OutcomeUnknown(f"no {name}") if is_sync else DiskFull(f"no {name}")
        self.is_dead = True
        if self.manner == "after":
            act()
        elif self.manner == "half":
            assert half is not None, f"{name} is not done in parts"
            half()
        raise Died(name)

    def cut(self, data: bytes) -> bytes:
        assert abs(self.prefix) < len(data), "a half change must not be a whole one"
        return data[: self.prefix]


class FaultyFile(AppendFile):
    """A file of `FaultyStorage`. It is not really synced: a killed process loses no pages."""

    __slots__ = ("_fuse",)

    def __init__(self, path: str, descriptor: int, fuse: Fuse) -> None:
        super().__init__(path, descriptor)
        self._fuse = fuse

    def size(self) -> int:
        self._fuse.check()
        return super().size()

    def read(self, start: int, length: int) -> bytes:
        self._fuse.check()
        return super().read(start, length)

    def append(self, parts: Sequence[bytes | memoryview], length: int, position: int) -> None:
        def half() -> None:
            os.write(self._descriptor, self._fuse.cut(b"".join(parts)))

        whole = super().append
        self._fuse.change("append", lambda: whole(parts, length, position), half, length)

    def truncate(self, position: int) -> None:
        whole = super().truncate
        self._fuse.change("truncate", lambda: whole(position))

    def sync(self) -> None:
        self._fuse.change("sync", lambda: None)


class FaultyLock(FileLock):
    """A lock of `FaultyStorage`; taking it counts, since it makes the lock file."""

    __slots__ = ("_fuse",)

    def __init__(self, path: str, fuse: Fuse) -> None:
        super().__init__(path)
        self._fuse = fuse

    def acquire(self, timeout_ms: int) -> None:
        whole = super().acquire
        self._fuse.change("lock", lambda: whole(timeout_ms))

    def release(self) -> None:
        if not self._fuse.is_dead:
            super().release()


class FaultyStorage(LocalStorage):
    """`LocalStorage` with a fuse."""

    def __init__(self, root: str, fuse: Fuse | None = None, boot_id: str | None = None) -> None:
        super().__init__(root, boot_id)
        self.fuse = fuse or Fuse()
        self._opened: list[AppendFile | FileLock] = []

    def bury(self) -> None:
        """Let go of all files and locks."""
        for handle in self._opened:
            handle.close()

    def read(self, path: str) -> bytes | None:
        self.fuse.check()
        return super().read(path)

    def list(self, path: str) -> list[str]:
        self.fuse.check()
        return super().list(path)

    def stamps(self, path: str) -> Sequence[tuple[str, int, int]]:
        self.fuse.check()
        return super().stamps(path)

    def exists(self, path: str) -> bool:
        self.fuse.check()
        return super().exists(path)

    def create(self, path: str, data: bytes, *, sync: bool = True) -> None:
        def half() -> None:
            target = self.locate(path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(os.path.join(os.path.dirname(target), f"{TEMPORARY}half"), "wb") as file:
                file.write(data[: len(data) // 2])

        whole = super().create
        self.fuse.change("create", lambda: whole(path, data, sync=False), half, len(data))
        if sync:
            self.sync_directory(os.path.dirname(path))

    @contextmanager
    def create_stream(self, path: str) -> Iterator[BinaryIO]:
        """Dies when the file is complete: half-way it is a temporary file that nobody sees."""
        content = io.BytesIO()
        yield content
        self.create(path, content.getvalue())

    def link(self, path: str, to: str) -> None:
        whole = super().link
        self.fuse.change("link", lambda: whole(path, to))

    def overwrite(self, path: str, data: bytes) -> None:
        whole = super().overwrite
        self.fuse.change(
            "overwrite",
            lambda: whole(path, data),
            lambda: whole(path, self.fuse.cut(data)),
            len(data),
        )

    def remove(self, path: str) -> None:
        whole = super().remove
        self.fuse.change("remove", lambda: whole(path))

    def remove_tree(self, path: str) -> None:
        def half() -> None:
            names = sorted(
                os.path.join(folder, name)
                for folder, _, files in os.walk(self.locate(path))
                for name in files
            )
            for name in names[: len(names) // 2]:
                os.unlink(name)

        whole = super().remove_tree
        self.fuse.change("remove_tree", lambda: whole(path), half)

    def rename(self, path: str, to: str) -> None:
        whole = super().rename
        self.fuse.change("rename", lambda: whole(path, to))

    def sync_directory(self, path: str) -> None:
        self.fuse.change("sync_directory", lambda: None)

    def open_file(
        self, path: str, *, write: bool = False, create: bool = False
    ) -> AppendFile | None:
        whole = super().open_file
        if not create:
            self.fuse.check()
            return whole(path, write=write)
        opened: AppendFile | None = self.fuse.change(
            "open_file", lambda: whole(path, write=write, create=True)
        )
        return opened

    def _file(self, target: str, descriptor: int) -> AppendFile:
        file = FaultyFile(target, descriptor, self.fuse)
        self._opened.append(file)
        return file

    def lock(self, name: str) -> FileLock:
        lock = FaultyLock(self.locate(f"locks/{name}"), self.fuse)
        self._opened.append(lock)
        return lock


class InlineExecutor:
    """Does background work at once, in the calling thread, so that changes come in one order."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done

    def close(self) -> None:
        pass


class DroppingExecutor(InlineExecutor):
    """Never comes to its work, as when the process ends right after."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done


def open_writer(
    storage: LocalStorage, name: str, incarnation: int, executor: InlineExecutor | None = None
) -> Topic:
    """Open a topic for writing whose background work is done at once, or as `executor` does it."""
    topic = Topic(storage, name, incarnation, write=True)
    topic._finisher = executor or InlineExecutor()  # type: ignore[assignment]
    return topic
