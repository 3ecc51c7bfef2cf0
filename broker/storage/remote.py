"""A log's files on a store of whole objects: HDFS, S3.

The same promises as `local`, kept by other means: `create` is put-if-absent, appending is putting
the next piece (`pieces`), and there is no lock between writers, because of two that append at once
only one succeeds. What the store has answered is durable: nothing is synced, and no power cut here
takes anything away.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import random
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

from broker.boot import boot_seconds
from broker.errors import (
    AlreadyExists,
    InvalidOption,
    MissingFile,
    OutcomeUnknown,
    StorageError,
    StoreUnavailable,
)
from broker.storage.locks import LeaseLock, NoLock
from broker.storage.pieces import FOLDER_SUFFIX, GRACE_MS, PieceFile, RangeFile
from broker.storage.spool import Spool
from broker.storage.store import Entry, ObjectStore
from broker.storage.temporary import TEMPORARY
from broker.storage.watch import Pause
from broker.workers import Workers

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# How long the store may be silent before a call gives up.
PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.05
_PAUSE_MAX_SECONDS = 2.0
_REQUESTS_AT_ONCE = 32
# How long the store's clock and ours are taken to run alike.
_CLOCK_SECONDS = 60.0
_KEPT_BYTES = 96 << 20
# An appended file is ended after so many appends, each of which is an object.
_PIECES_MAX = 1000


class RemoteStorage:
    """One log's objects below a store's root. Paths are relative, with forward slashes."""

    is_remote = True
    pieces_max: int | None = _PIECES_MAX
    boot_id = "remote"

    def __init__(
        self,
        store: ObjectStore,
        clock: Callable[[], int] = time.time_ns,
        patience_seconds: float = PATIENCE_SECONDS,
        grace_ms: int = GRACE_MS,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        # What others need to open the same store.
        self.options = dict(options or {})
        self.root = store.root
        self.clock = clock  # Nanoseconds since 1970.
        self._patience = patience_seconds
        self._grace_ms = grace_ms
        self._mutex = threading.Lock()
        self._kept: OrderedDict[str, bytes]
        self._kept_bytes: int
        self._files: weakref.WeakValueDictionary[str, PieceFile]
        self._forget()
        # When the store was asked what time it is, and what it said.
        self._clock_there: tuple[float, int] | None = None
        self._pool: tuple[int, Workers] | None = None
        self._is_safe = False
        # The file that tells this log from others that were, or will be, in its place.
        self.identity: tuple[str, bytes] | None = None
        _known.add(self)

    def locate(self, path: str) -> str:
        return self._store.locate(path)

    def read(self, path: str) -> bytes | None:
        """Return the whole file, or None if there is none."""
        return self._ask(lambda: self._store.get(path))

    def create(self, path: str, data: bytes, *, sync: bool = True) -> None:
        """Put `data` at `path` whole or not at all; `AlreadyExists` if the name is taken.

        An answer that does not come is settled by asking again: what is there then is ours or
        another's, and all that is created for good carries a name or a token of its own.

        Raises:
            OutcomeUnknown: the store stayed silent after it was asked.
        """
        if not self._is_safe:
            self._check_is_safe()
        tries = itertools.count()
        try:
            self._put_new(path, data, tries)
        except AlreadyExists:
            raise
        except StorageError as error:
            # What a refusal says is true of the try that was refused, not of those before it.
            if next(tries) == 1 and not isinstance(error, StoreUnavailable):
                raise
            raise OutcomeUnknown(
                f"not known whether {self.locate(path)} was written: {error}"
            ) from error

    def _put_new(self, path: str, data: bytes, tries: Iterator[int]) -> None:
        def put() -> None:
            next(tries)
            self._store.put_new(path, data)

        try:
            self._ask(put)
        except AlreadyExists:
            # By another, or by ourselves when we asked before and were not answered.
            found = self.read(path)
            if found == data:
                return
            if found is None and next(tries) > 1:
                raise StorageError(f"{self.locate(path)} was there and is gone") from None
            if found is not None and f"{FOLDER_SUFFIX}/" in path:
                self.keep(path, found)  # Who lost here reads on with it.
            raise

    def create_appended(self, path: str, data: bytes) -> None:
        """Make a file that will be appended to, with its first bytes."""
        self.create(f"{path}{FOLDER_SUFFIX}/{0:010d}", data)

    @contextmanager
    def create_stream(self, path: str) -> Iterator[BinaryIO]:
        """Write a file piece by piece; it appears when the block ends without error.

        It is written here first: should the store fail in the middle, all of it is put again.
        """
        with Spool() as spool:
            yield spool  # type: ignore[misc]
            spool.flush()
            self._put_file(path, spool)

    def _put_file(self, path: str, spool: Spool) -> None:
        try:
            self._ask(lambda: self._store.put_file(path, spool.file))
        except AlreadyExists:
            # By ourselves, when we asked before and were not answered: no other uses this name.
            entry = self._ask(lambda: self._store.stat(path))
            if entry is None or entry.size != spool.tell():
                raise

    @contextmanager
    def guard(self, path: str) -> Iterator[None]:
        """Turn what goes wrong while a file is written by others' code into our errors."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise self._store.translate(error, path) from error

    def overwrite(self, path: str, data: bytes) -> None:
        """Replace what is at `path`: only for small hints."""
        self._ask(lambda: self._store.put(path, data))

    def unfinished(self, path: str) -> list[str]:
        """Return the names of files in the making, or left so by a killed process."""
        names = [entry.name for entry in self.entries(path)]
        return sorted(name for name in names if name.startswith(TEMPORARY))

    def abort_uploads(self, path: str, older_than_ms: int) -> None:
        """Let go of parts of files below a folder that no listing shows, if so old."""
        try:
            self._ask(lambda: self._store.abort_uploads(path, older_than_ms))
        except (StorageError, FileNotFoundError) as error:
            # It may not be allowed to whoever may do all the rest, or not be known to the store;
            # it only costs room.
            logger.info("could not look for unfinished uploads: %s", error)

    def list(self, path: str) -> list[str]:
        """Return the sorted names in a directory, without temporary ones; none if it is absent.

        A file in pieces has its own name here.
        """
        names = {entry.name.removesuffix(FOLDER_SUFFIX) for entry in self.entries(path)}
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def stamps(self, path: str) -> Sequence[tuple[str, int, int]]:
        """Return name, size and time of change (ns) of what a directory has, sorted."""
        found = self.entries(path)
        return sorted((one.name, one.size, one.changed_ms * 1_000_000) for one in found)

    def entries(self, path: str) -> Sequence[Entry]:
        return self._ask(lambda: self._store.entries(path))

    def exists(self, path: str) -> bool:
        return self._ask(lambda: self._store.stat(path)) is not None or bool(
            self.entries(path) or self.entries(f"{path}{FOLDER_SUFFIX}")
        )

    def touch(self, path: str) -> None:
        """Let a file, which is made if need be, have been changed now."""
        self.overwrite(path, uuid.uuid4().bytes)

    def age_ms(self, path: str) -> int | None:
        """Return how long ago a file was changed; None if it is absent."""
        entry = self._ask(lambda: self._store.stat(path))
        return None if entry is None else max(0, self._now_there_ms() - entry.changed_ms)

    def remove(self, path: str) -> None:
        """Remove a file; that it is gone already is fine."""
        if path.endswith(".log"):
            self._delete_pieces(path)
        self._ask(lambda: self._store.delete(path))

    def _delete_pieces(self, path: str) -> None:
        """Remove the first piece first: where it is, others see that none was removed."""
        folder = f"{path}{FOLDER_SUFFIX}"
        self._ask(lambda: self._store.delete(f"{folder}/{0:010d}"))
        self._ask(lambda: self._store.delete_tree(folder))

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; that it is gone already is fine."""
        self._ask(lambda: self._store.delete_tree(path))

    def rename(self, path: str, to: str) -> None:
        """Move a folder of small files: what a store cannot rename is copied."""
        for entry in self.entries(path):
            if entry.is_folder:
                self.rename(f"{path}/{entry.name}", f"{to}/{entry.name}")
            else:
                data = self.read(f"{path}/{entry.name}")
                if data is not None:
                    self.overwrite(f"{to}/{entry.name}", data)
        self.remove_tree(path)

    def sync_directory(self, path: str) -> None:
        """What the store has answered is durable."""

    def open_file(self, path: str) -> RangeFile | PieceFile | None:
        """Open a file for reading; None if it is absent."""
        if path.endswith(".log"):
            known = self._files.get(path)
            if known is not None:
                return known
        whole = self.open_whole(path)
        if whole is None and path.endswith(".log") and self.entries(f"{path}{FOLDER_SUFFIX}"):
            return self._pieces(path, 0, 0)
        return whole

    def open_appended(
        self, path: str, *, write: bool, create: bool, position: int, count: int
    ) -> PieceFile:
        """Open a file that may still grow, at the end of its first `count` appends."""
        return self._pieces(path, position, count)

    def is_object(self, path: str) -> bool:
        """Tell whether there is an object, not a folder."""
        entry = self._ask(lambda: self._store.stat(path))
        return entry is not None and not entry.is_folder

    def open_whole(self, path: str) -> RangeFile | None:
        """Open one object for reading; None if it is absent."""
        entry = self._ask(lambda: self._store.stat(path))
        if entry is None or entry.is_folder:
            return None
        return RangeFile(self, path, entry.size)

    def merge(self, path: str, byte_length: int) -> None:
        """Make one object of the pieces of a file that has ended, with the same bytes."""
        if self._ask(lambda: self._store.stat(path)) is not None:
            return
        data = self._pieces(path, 0, 0).map(byte_length)
        try:
            self.create(path, data)
        except AlreadyExists:
            raise StorageError(f"{self.locate(path)} holds other bytes than its parts") from None

    def may_remove(self, path: str) -> bool:
        """Tell whether all who may still trust in the pieces of a file have asked again.

        Of a file that nobody merged: whether all pieces are so old that they have seen its end.
        """
        entry = self._ask(lambda: self._store.stat(path))
        if entry is None and path.endswith(".log"):
            pieces = self.entries(f"{path}{FOLDER_SUFFIX}")
            entry = max(pieces, key=lambda piece: piece.changed_ms, default=None)
        return entry is not None and self._now_there_ms() - entry.changed_ms >= self._grace_ms

    def remove_pieces(self, path: str) -> bool:
        """Remove the pieces of a file that was merged long ago; tell whether there were any."""
        if not self.entries(f"{path}{FOLDER_SUFFIX}") or not self.may_remove(path):
            return False
        self._delete_pieces(path)
        return True

    def writer_lock(self, name: str) -> NoLock:
        """Who appends needs no lock here: of two, one fails."""
        return NoLock()

    def lock(self, name: str) -> LeaseLock:
        return LeaseLock(self, f"locks/{name}")

    def delta_options(self) -> dict[str, str]:
        """Return what the library `deltalake` needs to know to get here."""
        return self._store.delta_options()

    def _check_is_safe(self) -> None:
        """Refuse a store that lets an object be created twice: a log on it would lose records.

        The log may have been made on another one that serves the same objects.
        """
        if not self._is_safe and not self._store.is_known and self._creates_twice():
            raise InvalidOption(
                f"{self.root} cannot hold a log: the store let an object be created twice, so "
                "records would be lost; use one with conditional writes"
            )
        self._is_safe = True

    def _creates_twice(self) -> bool:
        path = f"locks/probe-{uuid.uuid4().hex}"
        try:
            for data in (b"first", b"second"):
                self._ask(functools.partial(self._store.put_new, path, data))
        except AlreadyExists:  # By nobody else: if by the first, then by its repetition.
            return False
        finally:
            with contextlib.suppress(StorageError):  # What went wrong before is to be said.
                self._store.delete(path)
        return True

    def identify(self, path: str, data: bytes) -> None:
        """Learn which log this is: of one that was here before, nothing is remembered."""
        with self._mutex:
            if self.identity not in (None, (path, data)):
                self._forget()
            self.identity = path, data

    def holds(self, identity: tuple[str, bytes] | None) -> bool:
        """Tell whether the log in this place is that one."""
        return identity is None or self.read(identity[0]) == identity[1]

    def _forget(self) -> None:
        self._files = weakref.WeakValueDictionary()
        self._kept = OrderedDict()
        self._kept_bytes = 0

    def begin_anew(self) -> None:
        """In a forked child: a lock may be held by a thread that is not here."""
        self._mutex = threading.Lock()
        self._forget()
        self._store.begin_anew()

    @property
    def poll_seconds(self) -> float:
        """How often who waits asks again."""
        return self._store.poll_seconds

    def watch(self) -> Pause:
        return Pause(self.poll_seconds)

    def close(self) -> None:
        self._store.close()

    # For the files.

    def is_recent(self, looked: float) -> bool:
        """Tell whether what was seen then is still so: nothing is removed within the grace."""
        return boot_seconds() - looked < self._grace_ms / 2000

    def get_range(self, path: str, start: int, length: int | None) -> bytes | None:
        return self._ask(lambda: self._store.get(path, start, length))

    def get_run(self, paths: Sequence[str]) -> Sequence[bytes]:
        """Return the objects up to the first one that is absent; asks for all at once."""
        found = [self.kept(path) for path in paths]
        missing = [path for path, data in zip(paths, found, strict=True) if data is None]
        if len(missing) == 1:
            answers = {missing[0]: self.read(missing[0])}
        elif missing:
            answers = dict(zip(missing, self._threads().map(self.read, missing), strict=True))
        run = []
        for path, data in zip(paths, found, strict=True):
            if data is None:
                data = answers[path]
                if data is None:
                    break
                self.keep(path, data)
            run.append(data)
        return run

    def keep(self, path: str, data: bytes) -> None:
        """Remember a piece, which never changes."""
        with self._mutex:
            if path in self._kept:
                return
            self._kept[path] = data
            self._kept_bytes += len(data)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def kept(self, path: str) -> bytes | None:
        return self._kept.get(path)

    def _pieces(self, path: str, position: int, count: int) -> PieceFile:
        with self._mutex:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = PieceFile(self, path, position, count)
            return file

    def _threads(self) -> Workers:
        process_id = os.getpid()
        if self._pool is None or self._pool[0] != process_id:
            self._pool = process_id, Workers(_REQUESTS_AT_ONCE, "spark-log-requests")
        return self._pool[1]

    def _now_there_ms(self) -> int:
        """Return the time by the store's clock, or a little less: nothing is older than it is.

        Ours may be wrong, and an object that is taken for old is removed.
        """
        if self._clock_there is None or boot_seconds() - self._clock_there[0] > _CLOCK_SECONDS:
            changed_ms = self._ask_time_ms()
            self._clock_there = boot_seconds(), changed_ms
        seen, then_ms = self._clock_there
        return then_ms + int((boot_seconds() - seen) * 1000)

    def _ask_time_ms(self) -> int:
        path = f"locks/clock-{uuid.uuid4().hex}"
        self.overwrite(path, b"now")
        try:
            entry = self._ask(lambda: self._store.stat(path))
        finally:
            self._ask(lambda: self._store.delete(path))
        if entry is None:
            raise MissingFile(self.locate(path), 0, "it was written just now and is gone")
        return entry.changed_ms

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        """Ask again while the store does not answer, for as long as patience lasts."""
        deadline = time.monotonic() + self._patience
        pause = _PAUSE_SECONDS
        while True:
            try:
                return request()
            except StoreUnavailable:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, _PAUSE_MAX_SECONDS)


_known: weakref.WeakSet[RemoteStorage] = weakref.WeakSet()


def _begin_anew() -> None:
    for storage in list(_known):
        storage.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
