"""An append-only file on a store that cannot append: one object for each append, until merged.

`<file>+/<n, 10 digits>` is what the n-th append wrote. It is put where nothing is, so of several
who append at once one succeeds, and the others learn that the end has moved. When the file has
ended, its pieces are merged into one object, `<file>`, with the same bytes; after a time of grace
the pieces go.

Removing a piece makes its name free again, and somebody who slept meanwhile could put there.
Therefore nobody trusts what it knows of the end for longer than half the time of grace without
asking whether the file was merged, and, if it was not, whether it is still there: all of its
pieces, and the file before it, if there is none behind. Files are removed from the first on, the
first piece first, and the last two only with the whole journal: so what is still there shows that
nothing behind it was removed.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING

import pyarrow as pa

from broker.boot import boot_seconds
from broker.errors import (
    AlreadyExists,
    Conflict,
    CorruptLog,
    MissingFile,
    OutcomeUnknown,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.storage.remote import RemoteStorage

FOLDER_SUFFIX = "+"
# From the moment a file is merged to that at which its pieces may go.
GRACE_MS = 3_600_000
# How many pieces are asked for at once.
_AHEAD_MAX = 32
_NEVER = -1e18
_BLOCK_MIN = 1 << 18
_BLOCK_MAX = 8 << 20


class RangeFile:
    """One object, read in ranges. Who reads on from where it stopped is read ahead for."""

    def __init__(self, storage: RemoteStorage, path: str, size: int) -> None:
        self.path = storage.locate(path)
        self._storage = storage
        self._name = path
        self._size = size
        self._block = b""
        self._start = 0
        self._step = _BLOCK_MIN

    def size(self) -> int:
        return self._size

    def sync(self) -> None:
        """A store that has answered keeps what it was given."""

    def read(self, start: int, length: int) -> bytes:
        """Return up to `length` bytes from `start`: fewer only at the end of the file."""
        length = min(length, self._size - start)
        if length <= 0:
            return b""
        behind = self._start + len(self._block)
        if not self._start <= start <= start + length <= behind:
            self._step = min(self._step * 2, _BLOCK_MAX) if start == behind else _BLOCK_MIN
            self._block = self._get(start, min(max(length, self._step), self._size - start))
            self._start = start
        at = start - self._start
        return self._block[at : at + length]

    def buffer(self, start: int, length: int) -> pa.Buffer:
        return pa.py_buffer(self.read(start, length))

    def map(self, end: int) -> bytes:
        """Return the bytes [0, end)."""
        return self._get(0, end)

    def close(self) -> None:
        self._block = b""

    def _get(self, start: int, length: int) -> bytes:
        data = self._storage.get_range(self._name, start, length)
        if data is None:
            raise MissingFile(self.path, 0, "the file is missing")
        if len(data) < length:
            raise CorruptLog(self.path, start + len(data), "the file is shorter than what it held")
        return data


class PieceFile:
    """A file in pieces. All of one process that have it open share this, so it has a mutex.

    It knows a run of pieces from some piece on: where each begins, and where the last ends.
    """

    def __init__(self, storage: RemoteStorage, path: str, position: int, count: int) -> None:
        self.path = storage.locate(path)
        self._storage = storage
        self._name = path
        self._first = count
        self._bounds = [position]
        self._is_behind = True
        self._mutex = threading.RLock()
        self._merged: RangeFile | None = None
        # When it was last begun to find out, by asking for all of it, where the file ends.
        self._looked = _NEVER

    def size(self) -> int:
        """Ask how far the file has come."""
        with self._mutex:
            if self._merged is None and not self._storage.is_recent(self._looked):
                self._look_again()
            elif self._merged is None:
                self._read_on()
            if self._merged is not None:
                return self._merged.size()
            self._is_behind = False
            return self._bounds[-1]

    def _read_on(self) -> None:
        """Ask for the pieces behind the known ones, until one is absent."""
        ahead = 1
        while True:
            first = self._count
            found = self._storage.get_run([self.piece(first + number) for number in range(ahead)])
            for data in found:
                self._bounds.append(self._bounds[-1] + len(data))
            if len(found) < ahead:
                return
            ahead = min(2 * ahead, _AHEAD_MAX)

    @property
    def _count(self) -> int:
        """How many pieces the file has, as far as is known here."""
        return self._first + len(self._bounds) - 1

    def is_at(self, position: int) -> bool:
        """Tell whether the file ends here as far as anybody here knows; asks nobody."""
        return not self._is_behind and self._merged is None and self._bounds[-1] == position

    def is_removed(self) -> bool:
        """Nothing is held open here that would outlive its name.

        If the file is gone, that may be in order: it is no longer trusted, and who asks next where
        it ends finds out.
        """
        with self._mutex:
            count, merged = self._count, self._merged
        if merged is None and count:
            last = self.piece(count - 1)
            if not self._storage.is_object(last) and not self._storage.is_object(self._name):
                with self._mutex:
                    self._looked, self._is_behind = _NEVER, True
        return False

    def read(self, start: int, length: int) -> bytes:
        """Return up to `length` bytes from `start`: fewer only at the end of the file."""
        with self._mutex:
            merged = self._merged
            if merged is None:
                parts = self._read_pieces(start, length)
                if parts is not None:
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                # That it is merged says nothing of where others have put since: see `_looked`.
                merged = self._merged = self._storage.open_whole(self._name)
        if merged is None:
            raise MissingFile(self.path, start, "a part of the file is missing")
        return merged.read(start, length)

    def buffer(self, start: int, length: int) -> pa.Buffer:
        return pa.py_buffer(self.read(start, length))

    def map(self, end: int) -> bytes:
        """Return the bytes [0, end)."""
        data = self.read(0, end)
        if len(data) < end:
            raise CorruptLog(self.path, len(data), "the file is shorter than what it held")
        return data

    def append(self, parts: Sequence[bytes | memoryview], length: int, position: int) -> None:
        """Put the next piece. All or nothing.

        Raises:
            Conflict: the file does not end at `position` any more.
            OutcomeUnknown: it may have been written, or not.
        """
        data = b"".join(parts)
        with self._mutex:
            if not self.is_at(position):
                self._is_behind = True
                raise Conflict(f"{self.path} does not end at {position}")
            # By these the put is judged afterwards: others of this process go on meanwhile.
            number, looked = self._count, self._looked
        begun = boot_seconds()
        try:
            self._storage.create(self.piece(number), data)
        except AlreadyExists:
            self._is_behind = True
            raise Conflict(f"{self.path}: another writer was first at {position}") from None
        with self._mutex:
            if self._merged is not None or not self._storage.is_recent(looked):
                self._settle(number, data, position)
                self._looked = max(self._looked, begun)
            self._storage.keep(self.piece(number), data)
            if self._bounds[-1] == position:
                self._bounds.append(position + length)

    def sync(self) -> None:
        """A store that has answered keeps what it was given."""

    def truncate(self, position: int) -> None:
        raise AssertionError(f"{self.path}: pieces are whole or absent, so nothing is ever cut")

    def close(self) -> None:
        """Nothing is open; others of this process may go on with it."""

    def piece(self, number: int) -> str:
        return f"{self._name}{FOLDER_SUFFIX}/{number:010d}"

    def _read_pieces(self, start: int, length: int) -> list[bytes] | None:
        """Return the parts of a range; None if a piece is gone."""
        if start < self._bounds[0]:
            self._learn_sizes()
            if start < self._bounds[0]:
                return None
        if start + length > self._bounds[-1]:
            self.size()
            if self._merged is not None:
                return None
        end = min(start + length, self._bounds[-1])
        if start >= end:
            return [b""]
        first = bisect_right(self._bounds, start) - 1
        last = bisect_right(self._bounds, end - 1) - 1
        # Who reads a piece reads the next ones soon, and each costs a request.
        until = min(len(self._bounds) - 1, max(last + 1, first + _AHEAD_MAX))
        numbers = range(first, last + 1)
        cached: Sequence[bytes | None] = [
            self._storage.kept(self.piece(self._first + number)) for number in numbers
        ]
        if any(data is None for data in cached):
            wanted = [self.piece(self._first + number) for number in range(first, until)]
            cached = [*self._storage.get_run(wanted)][: last + 1 - first]
            if len(cached) < last + 1 - first:
                return None
        parts = []
        for number, data in zip(numbers, cached, strict=True):
            assert data is not None
            at = self._bounds[number]
            if at + len(data) != self._bounds[number + 1]:
                raise CorruptLog(self.path, at, "a part of the file has another length")
            parts.append(data[max(start - at, 0) : end - at])
        return parts

    def _learn_sizes(self) -> None:
        """Learn where the pieces before the known ones begin."""
        if self._first == 0:
            return
        sizes = self._sizes(self._name)
        if any(number not in sizes for number in range(self._first)):
            return
        bounds = [0]
        for number in range(self._first):
            bounds.append(bounds[-1] + sizes[number])
        if bounds[-1] != self._bounds[0]:
            raise CorruptLog(self.path, self._bounds[0], "the parts before have other lengths")
        self._bounds = bounds + self._bounds[1:]
        self._first = 0

    def _look_again(self) -> None:
        """Find out where the file ends, and whether it still is what its pieces are.

        Raises:
            MissingFile: it was merged and removed.
        """
        begun = boot_seconds()
        self._merged = self._storage.open_whole(self._name)
        if self._merged is not None:
            return
        self._is_behind = True
        self._read_on()
        numbers = self._live_pieces(self._count)
        if numbers is None:
            raise MissingFile(self.path, self._bounds[-1], "the file was removed")
        while any(number > self._count for number in numbers):
            count = self._count
            self._read_on()  # Others have put some meanwhile; or one is missing.
            if self._count == count:
                raise MissingFile(self.path, self._bounds[-1], f"part {count} is missing")
        self._looked = begun

    def _live_pieces(self, count: int) -> set[int] | None:
        """Return which pieces there are; None if the first ones are not, or the file is not live.

        Somebody else who slept may have put a piece where there was one; that deceives nobody here.
        """
        folder, name = os.path.split(self._name)
        names = self._storage.list(folder)
        later = [other for other in names if other > name]
        earlier = [other for other in names if other < name]
        if later:
            # A piece is a commit, and the next file is named by the number of its first one.
            needed = _first_number(later[0]) - _first_number(name)
            if count > needed:
                return None
            count = needed
        numbers = set(self._sizes(self._name))
        if not numbers >= set(range(count)):
            return None
        if later:
            return numbers
        if not earlier:
            return numbers if _first_number(name) == 0 else None
        before = f"{folder}/{earlier[-1]}"
        needed = _first_number(name) - _first_number(earlier[-1])
        is_there = self._storage.is_object(before) or (
            self._sizes(before).keys() >= set(range(needed))
        )
        return numbers if is_there else None

    def _sizes(self, path: str) -> dict[int, int]:
        """Return how long each piece of a file is that is there."""
        return {
            int(entry.name): entry.size
            for entry in self._storage.entries(f"{path}{FOLDER_SUFFIX}")
            if entry.name.isdigit()
        }

    def _settle(self, number: int, data: bytes, position: int) -> None:
        """After a long pause: find out whether a piece was put where others had been removed.

        Raises:
            Conflict: the file has ended before it.
            OutcomeUnknown: whether an earlier attempt of the same commit succeeded, others know.
        """
        self._is_behind = True
        try:
            self._merged = self._merged or self._storage.open_whole(self._name)
            if self._merged is not None:
                is_in = self._merged.read(position, len(data)) == data
            elif number == 0 and self._is_oldest_of_many():
                # What is removed first is the first piece of the oldest file. So there nothing
                # shows whether this one is alone; it stays, for all that follows may rest on it.
                raise self._lost()
            else:
                is_in = self._live_pieces(number + 1) is not None
            if not is_in:
                self._storage.remove(self.piece(number))
        except (StorageError, CorruptLog) as error:
            raise OutcomeUnknown(
                f"not known whether the last commit is in {self.path}: {error}"
            ) from error
        if is_in:
            self._is_behind = self._merged is not None
        elif self._merged is not None:
            raise Conflict(f"{self.path} has ended meanwhile")
        else:
            raise self._lost()

    def _is_oldest_of_many(self) -> bool:
        folder, name = os.path.split(self._name)
        names = self._storage.list(folder)
        return len(names) > 1 and names[0] == name

    def _lost(self) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"{self.path} was ended and removed while this writer was away; whether its last "
            "commit is in the log is not known"
        )


def _first_number(name: str) -> int:
    return int(name.partition(".")[0])
