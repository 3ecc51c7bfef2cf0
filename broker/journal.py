"""The journal on local disk: numbered commits, appended to files under a lock.

`journal/<first commit number, 20 digits>.log` holds commits one after the other; the last commit of
a file that is complete is an end-of-file commit, and nothing is ever appended after it. Readers
take no lock. What a killed writer leaves is a prefix of a commit at the end of the last file:
readers stop before it and wait, the next writer keeps it aside and cuts it. Bytes that are all
there and wrong are corruption: reported, never cut, never skipped.

A `Journal` is a cursor over the commits, for one thread at a time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

from broker.commit import Commit, Kind, unpack
from broker.errors import CorruptLog, LogError, MissingFile
from broker.home import Home
from broker.storage import GrowingFile, Storage
from broker.synced import Synced

_BLOCK = 1 << 16


class Journal:
    """A place in one journal, from which commits are read and, at the end, appended."""

    def __init__(self, storage: Storage, home: Home, *, write: bool = False) -> None:
        self.storage = storage
        self.home = home
        self.incarnation = home.incarnation
        self.directory = home.directory
        self.file_number = 0
        self.position = 0
        self.number = 0
        self._write = write
        self._file: GrowingFile | None = None
        self._lock = storage.writer_lock(home.lock)
        self.is_locked = False

    def seek(self, file_number: int, position: int, number: int) -> None:
        """Go to a place that a checkpoint names."""
        self._close_file()
        self.file_number, self.position, self.number = file_number, position, number

    @property
    def place(self) -> tuple[int, int, int]:
        """File number, byte position in it, and number of the next commit."""
        return self.file_number, self.position, self.number

    @property
    def path(self) -> str:
        """The current file, for messages."""
        return self.storage.locate(self.file_path(self.file_number))

    def file_path(self, file_number: int) -> str:
        return f"{self.directory}/journal/{file_number:020d}.log"

    def read_new(self) -> list[Commit]:
        """Return the commits after the cursor and move behind them."""
        if self.is_locked:
            return self._read_on()
        place = self.place
        try:
            return self._read_on()
        except CorruptLog as damage:
            self.seek(*place)
            return self._confirm(damage)

    def has_later_file(self) -> bool:
        """Tell whether the journal goes on after the current file.

        A file is only made after the one before it was ended, so reading on brings more commits;
        if it does not, the end of the current file is lost.
        """
        names = self.storage.list(f"{self.directory}/journal")
        return bool(names) and names[-1] > os.path.basename(self.file_path(self.file_number))

    def refuse_cut_file(self) -> None:
        """Raise that the current file was cut; after a power cut that is for recovery to say."""
        hint = Synced.read(self.storage, self.directory)
        if hint is not None and hint.boot_id == self.storage.boot_id:
            raise CorruptLog(self.path, self.position, "the rest of the file is missing")

    def check_exists(self) -> None:
        """Raise if the incarnation is gone, with all its files."""
        is_there = self.storage.exists(self.directory)
        # The mark goes when a later incarnation exists; what was read once was there.
        if self.storage.exists(self.home.deletion_mark) or (not is_there and self.number):
            raise self.home.deleted()
        if not is_there:
            raise self.home.absent()

    def read_one(self) -> Commit | None:
        """Return the next commit of the current file, or None if no whole one is there."""
        commits: list[Commit] = []
        file = self.open_current()
        if file is not None:
            self._scan(file, file.size(), commits, limit=1)
        return commits[0] if commits else None

    def lock(self, timeout_ms: int) -> None:
        """Take the journal's lock: from here to `unlock` the journal's end is ours."""
        self._lock.acquire(timeout_ms)
        self.is_locked = True

    def unlock(self) -> None:
        self.is_locked = False
        self._lock.release()

    def is_behind(self) -> bool:
        """Tell whether others are known to have written since the cursor moved. Cheap."""
        file = self._file
        return file is None or not file.is_at(self.position)

    def is_removed(self) -> bool:
        """Tell whether the file at the cursor, which is at its end, was taken away from under us.

        A file that is not needed any more goes only after its end-of-file commit, and a deleted
        journal after its `delete`: whoever is behind that reads it first.
        """
        file = self._file
        if file is None or not file.is_removed():
            return False
        # What was appended before the name went can be seen by now.
        return file.is_at(self.position)

    def append(self, parts: Sequence[Any], length: int) -> None:
        """Write one commit at the end. Only under the lock, with the cursor at the end."""
        assert self._file is not None and self.is_locked
        self._file.append(parts, length, self.position)
        self.number += 1
        self.position += length

    def cut_torn_tail(self) -> None:
        """Under the lock: remove what a killed writer left after the last commit; keep a copy."""
        file = self._file
        if file is None or self.storage.is_remote or (size := file.size()) == self.position:
            return
        self._keep_aside(file, size)
        file.truncate(self.position)

    def begin_file(self) -> None:
        """Under the lock, after an end-of-file commit: make the file that it names."""
        self._close_file()
        self.file_number, self.position = self.number, 0
        self._file = self._open(write=True, create=True)

    def open_current(self) -> GrowingFile | None:
        """Return the file at the cursor; None if it does not exist."""
        if self._file is None:
            self._file = self._open(write=self._write, create=False)
        return self._file

    def _open(self, *, write: bool, create: bool) -> GrowingFile | None:
        return self.storage.open_appended(
            self.file_path(self.file_number),
            write=write,
            create=create,
            position=self.position,
            count=self.number - self.file_number,
        )

    def close(self) -> None:
        self._close_file()
        self._lock.close()

    def _read_on(self) -> list[Commit]:
        commits: list[Commit] = []
        while True:
            file = self.open_current()
            if file is None:
                self._explain_absence()
                return commits
            size = file.size()
            if size < self.position:
                raise CorruptLog(file.path, size, "the file is shorter than what it held")
            if size > self.position:
                self._scan(file, size, commits)
            if not commits or commits[-1].kind is not Kind.END_OF_FILE:
                return commits
            if self.number == self.file_number:
                return commits
            self._close_file()
            self.file_number, self.position = self.number, 0

    def _scan(
        self, file: GrowingFile, size: int, commits: list[Commit], limit: int = 1 << 62
    ) -> None:
        """Read whole commits up to `size`, or to the end-of-file commit."""
        block, block_start = b"", self.position
        while self.position < size and len(commits) < limit:
            commit, needed = unpack(
                block,
                self.position - block_start,
                incarnation=self.incarnation,
                number=self.number,
                position=self.position,
                path=file.path,
            )
            if commit is None:
                if self.position + needed > size:
                    return
                wanted = max(needed, min(_BLOCK, size - self.position))
                block, block_start = file.read(self.position, wanted), self.position
                if len(block) < needed:
                    return
                continue
            if self.position + commit.length > size:
                return
            commits.append(commit)
            self.number += 1
            self.position += commit.length
            if commit.kind is Kind.END_OF_FILE:
                return

    def _confirm(self, damage: CorruptLog) -> list[Commit]:
        """Read again with no writer at work."""
        try:
            self.lock(timeout_ms=10_000)
        except LogError:
            raise damage from None
        try:
            return self._read_on()
        finally:
            self.unlock()

    def _explain_absence(self) -> None:
        """The file at the cursor is absent: not yet made, or gone with its topic, or lost."""
        self.check_exists()
        names = self.storage.list(f"{self.directory}/journal")
        is_next = self.position == 0 and self.number == self.file_number and self.number > 0
        later = [name for name in names if name > os.path.basename(self.path)]
        if not is_next or later:
            raise MissingFile(self.path, 0, "the file is missing")

    def _keep_aside(self, file: GrowingFile, size: int) -> None:
        rest = file.read(self.position, size - self.position)
        name = f"{self.file_number:020d}-{self.position}-{uuid.uuid4().hex[:8]}.cut"
        self.storage.create(f"{self.directory}/aside/{name}", rest)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
