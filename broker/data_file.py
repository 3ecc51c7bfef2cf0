"""Frames written before the commit that names them: `data/<time>-<uuid>.frames`, one by one.

Until a commit names the file nobody reads it, so a crash leaves only garbage. A commit may name it
only for some days (`broker.naming`), and only after more days is it removed as nobody's.
"""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from typing import BinaryIO

from broker.batch import Frame
from broker.commit import FramePlace
from broker.errors import LogError
from broker.naming import new_name
from broker.storage import Storage

_PADDING = [b"\0" * count for count in (0, 7, 6, 5, 4, 3, 2, 1)]


class DataFile:
    """A file of frames in the making. It is made when the first frame comes."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = f"{directory}/data"
        self._name = new_name(storage.clock(), ".frames")
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._position = 0
        self._is_finished = False

    def add(self, frame: Frame) -> FramePlace:
        """Write a frame; it may be named in a commit once `finish` has returned."""
        if self._file is None:
            path = f"{self._directory}/{self._name}"
            self._file = self._stack.enter_context(self._storage.create_stream(path))
        padding = _PADDING[frame.byte_length & 7]
        start, length = self._position, frame.byte_length + len(padding)
        with self._storage.guard(f"{self._directory}/{self._name}"):
            for part in (*frame.parts, padding):
                self._file.write(part)
        self._position += length
        return FramePlace(
            self._name,
            start,
            frame.byte_length,
            frame.record_count,
            frame.min_timestamp,
            frame.max_timestamp,
        )

    def finish(self) -> None:
        """Make the file durable under its name."""
        self._file = None
        self._stack.close()
        self._is_finished = self._position > 0

    def discard(self) -> None:
        """Remove it, finished or not.

        One that could not be finished is left to be garbage, should it have got its name: the
        store that has just failed is not asked again.
        """
        if self._file is not None:
            self._file = None
            with contextlib.suppress(LogError, _Discarded):
                self._stack.__exit__(_Discarded, _Discarded(), None)
        elif self._is_finished:
            self._storage.remove(f"{self._directory}/{self._name}")


class _Discarded(Exception):
    """Tells the storage that a file in the making is not wanted."""
