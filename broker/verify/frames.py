"""Checking the frames of one commit: their places, their bytes, and what their rows say of them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from broker import batch as frames_of
from broker.commit import BY_REFERENCE, HEADER, LOG_APPEND, ROW, Commit
from broker.errors import CorruptLog, LogError
from broker.storage import File, Storage
from broker.verify.findings import Damage

_ZEROS = bytes(7)


class ByteSource(Protocol):
    """A file to read from."""

    @property
    def path(self) -> str: ...

    def read(self, start: int, length: int) -> bytes: ...


class FrameCheck:
    """Checks the frames that commits hold or name. Keeps one data file open."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._file: File | None = None
        self.named: set[str] = set()

    def check(self, commit: Commit, journal: ByteSource) -> list[Damage]:
        """Return all that is wrong with a commit's frames; every byte of its body is read."""
        found: list[Damage] = []
        body = HEADER.size + len(commit.table) + len(commit.meta)
        for row in ROW.iter_unpack(commit.table):
            try:
                if row[1] & BY_REFERENCE:
                    _check_frame(self._data_file(commit, row, journal), row[6], row, commit)
                else:
                    _check_place(journal, commit, row, body)
                    body += _padded(row[5])
                    _check_frame(journal, commit.position + row[6], row, commit)
            except CorruptLog as damage:
                found.append(Damage(damage.path, damage.position, damage.what))
            except LogError as error:
                found.append(Damage(journal.path, commit.position, f"a frame: {error}"))
        if body != commit.length and not found:
            found.append(
                Damage(journal.path, commit.position + body, "bytes that no frame of it names")
            )
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _data_file(self, commit: Commit, row: tuple[Any, ...], journal: ByteSource) -> File:
        try:
            name = str(commit.details()["files"][row[2]])
        except (ValueError, LookupError, TypeError):
            raise CorruptLog(
                journal.path, commit.position, "a frame is elsewhere, and its file is not named"
            ) from None
        self.named.add(name)
        path = self._storage.locate(f"{self._directory}/data/{name}")
        if self._file is None or self._file.path != path:
            self.close()
            self._file = self._storage.open_file(f"{self._directory}/data/{name}")
        if self._file is None:
            raise CorruptLog(path, row[6], f"the file is missing; commit {commit.number} names it")
        return self._file


def _check_place(
    journal: ByteSource, commit: Commit, row: tuple[Any, ...], expected_start: int
) -> None:
    if row[6] != expected_start or row[6] + _padded(row[5]) > commit.length:
        raise CorruptLog(journal.path, commit.position, "a frame's place is outside its commit")


def _check_frame(file: ByteSource, at: int, row: tuple[Any, ...], commit: Commit) -> None:
    length, record_count, low, high = row[5], row[4], row[7], row[8]
    data = file.read(at, _padded(length))
    if len(data) < length:
        raise CorruptLog(file.path, at, "the file ends inside a frame")
    batch = frames_of.decode(pa.py_buffer(data).slice(0, length), file.path, at)
    if data[length:] != _ZEROS[: _padded(length) - length]:
        raise CorruptLog(file.path, at + length, "the bytes between two frames are not zero")
    if batch.num_rows != record_count:
        raise CorruptLog(
            file.path, at, f"a frame holds {batch.num_rows} records, its row says {record_count}"
        )
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise CorruptLog(file.path, at, f"a frame's columns are wrong: {error}") from error
    bounds = _time_bounds(batch)
    if frames_of.HEADER.unpack_from(data)[8:10] != bounds:
        raise CorruptLog(file.path, at, "a frame's header has other time bounds than its records")
    if row[1] & LOG_APPEND:
        bounds = commit.time * 1000, commit.time * 1000
    if (low, high) != bounds:
        raise CorruptLog(file.path, at, "a frame's row has other time bounds than its records")


def _time_bounds(batch: pa.RecordBatch) -> tuple[int, int]:
    column = batch.column(3)
    if not len(column) or column.null_count:
        return -1, -1
    stamps = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
    return int(stamps.min()), int(stamps.max())


def _padded(length: int) -> int:
    return (length + 7) & ~7
