"""Commits as bytes: header, table of frames, meta, frames.

The header has a checksum of its own, and says which topic incarnation, commit number and byte
position it was written for, so bytes that moved or belong to another topic are not believed. Its
checksum is checked before its lengths are used: a damaged length must be corruption, not a long
wait for the rest. Table and meta have the second checksum; each frame has its own (see `batch`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np

from broker import shapes
from broker.batch import Frame
from broker.errors import CorruptLog, UnsupportedFormat

MAGIC = b"SLC1"
VERSION = 1
# crc, then what it covers: version, kind, flags, incarnation, number, position, length, meta
# length, meta crc, frame count, commit time ms, token, producer id, sequence, epoch, zero
HEADER = struct.Struct("<4sIBBHIQQIIIIq16sQqII")
ROW = struct.Struct("<IHHqIIQqq")
ROW_TYPE = np.dtype(
    [
        ("partition", "<u4"),
        ("flags", "<u2"),
        ("file", "<u2"),
        ("base_offset", "<i8"),
        ("record_count", "<u4"),
        ("byte_length", "<u4"),
        ("byte_start", "<u8"),
        ("min_timestamp", "<i8"),
        ("max_timestamp", "<i8"),
    ]
)
COMMIT_BYTES_MAX = (1 << 31) - 8

# Flags of a row.
BY_REFERENCE = 1
LOG_APPEND = 2
# Flags of a commit.
TRANSACTIONAL = 1

NO_PRODUCER = 0

_CHECKED = struct.Struct("<BBHIQQIIIIq16sQqII")
_PREFIX = struct.Struct("<4sI")
_PADDING = [b"\0" * count for count in (0, 7, 6, 5, 4, 3, 2, 1)]
_SPACES = [b" " * count for count in (0, 7, 6, 5, 4, 3, 2, 1)]


class Kind(IntEnum):
    """What a commit does."""

    CREATE = 1
    APPEND = 2
    CONFIG = 3
    TRUNCATE = 4
    DELETE = 5
    END_OF_FILE = 6
    RECOVER = 7
    EXPIRE = 8
    SEAL = 9
    TRIM = 10
    # Numbers from 32 on are those of groups.
    JOIN = 32
    LEAVE = 33
    EVICT = 34
    RELEASE = 35
    ASSIGN = 36
    POSITION = 37
    FORGET = 38


_KINDS = {int(kind): kind for kind in Kind}


class Author(NamedTuple):
    """Who commits. The token is made once for a commit, and kept when it is tried again."""

    token: bytes
    producer_id: int = NO_PRODUCER
    sequence: int = 0
    epoch: int = 0
    is_transactional: bool = False


class Commit(NamedTuple):
    """A commit as it was read. `table` and `meta` are raw bytes: most readers need only some."""

    kind: Kind
    flags: int
    number: int
    position: int
    length: int
    time: int
    token: bytes
    producer_id: int
    sequence: int
    epoch: int
    table: bytes
    meta: bytes

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the frames' rows, in the order of `ROW_TYPE`."""
        return list(ROW.iter_unpack(self.table))

    def details(self) -> dict[str, Any]:
        """Return the meta data of the commit.

        Raises:
            ValueError: they do not have the shape that a commit of this kind has.
        """
        loaded: dict[str, Any] = json.loads(self.meta) if self.meta else {}
        shapes.check(self.kind.name, loaded)
        return loaded


@dataclass(frozen=True, slots=True)
class FramePlace:
    """A frame that lies in a file under `data/`, written before the commit that names it."""

    file: str
    byte_start: int
    byte_length: int
    record_count: int
    min_timestamp: int
    max_timestamp: int


Placeable = Frame | FramePlace


def pack(
    kind: Kind,
    author: Author,
    *,
    incarnation: int,
    number: int,
    position: int,
    time: int,
    frames: Sequence[tuple[int, int, Placeable]] = (),
    log_append: bool = False,
    details: dict[str, Any] | None = None,
) -> tuple[list[Any], int, bytes]:
    """Return the parts to write, their length, and the table with the details.

    Args:
        frames: (partition, base offset, frame) in the order they are to lie.
        log_append: the records' time is the commit's time.
    """
    meta, body, length = _many_frames(frames, time, log_append, details)
    checked = _CHECKED.pack(
        VERSION, kind, TRANSACTIONAL if author.is_transactional else 0, incarnation, number,
        position, length, len(meta), google_crc32c.value(meta), len(frames), time, author.token,
        author.producer_id, author.sequence, author.epoch, 0,
    )  # fmt: skip
    prefix = _PREFIX.pack(MAGIC, google_crc32c.value(checked))
    return [prefix, checked, meta, *body], length, meta


def pack_one(
    author: Author, incarnation: int, number: int, position: int, time: int,
    partition: int, base_offset: int, frame: Frame, log_append: bool,
) -> tuple[tuple[Any, ...], int, bytes, int]:  # fmt: skip
    """Pack an append of one frame: what `pack` does, in half the time.

    Returns:
        The parts to write, their length, the table, and the largest timestamp.
    """
    frame_parts, size, record_count, low, high = frame
    token, producer_id, sequence, epoch, is_transactional = author
    flags = 0
    if log_append:
        low = high = time * 1000
        flags = LOG_APPEND
    table = _PACK_ROW(partition, flags, 0, base_offset, record_count, size, _ONE_START, low, high)
    padding = _PADDING[size & 7]
    length = _ONE_START + size + len(padding)
    checked = _PACK_CHECKED(
        VERSION, _APPEND, TRANSACTIONAL if is_transactional else 0, incarnation, number, position,
        length, ROW.size, _crc32c(table), 1, time, token, producer_id, sequence, epoch, 0,
    )  # fmt: skip
    prefix = _PACK_PREFIX(MAGIC, _crc32c(checked))
    return (prefix, checked, table, *frame_parts, padding), length, table, high


def pack_details(
    kind: Kind, token: bytes, incarnation: int, number: int, position: int, time: int, details: str
) -> tuple[list[bytes], int]:
    """Pack a commit of details that are JSON text already: what `pack` does, in less time.

    Returns:
        The parts to write and their length.
    """
    meta = details.encode()
    meta += _SPACES[len(meta) & 7]
    length = HEADER.size + len(meta)
    checked = _PACK_CHECKED(
        VERSION, kind, 0, incarnation, number, position, length, len(meta), _crc32c(meta), 0,
        time, token, NO_PRODUCER, 0, 0, 0,
    )  # fmt: skip
    return [_PACK_PREFIX(MAGIC, _crc32c(checked)), checked, meta], length


_PACK_ROW, _PACK_CHECKED, _PACK_PREFIX = ROW.pack, _CHECKED.pack, _PREFIX.pack
_ONE_START = HEADER.size + ROW.size
_crc32c = google_crc32c.value
_APPEND = int(Kind.APPEND)


def _many_frames(
    frames: Sequence[tuple[int, int, Placeable]],
    time: int,
    log_append: bool,
    details: dict[str, Any] | None,
) -> tuple[bytes, list[Any], int]:
    """Return the table with the details, the frames' parts, and the commit's length."""
    details = dict(details or {})
    files = sorted({frame.file for _, _, frame in frames if isinstance(frame, FramePlace)})
    if files:
        details["files"] = files
    text = json.dumps(details, separators=(",", ":")).encode() if details else b""
    text += _SPACES[len(text) & 7]
    start = HEADER.size + ROW.size * len(frames) + len(text)
    rows: list[bytes] = []
    body: list[Any] = []
    for partition, base_offset, frame in frames:
        low, high, flags = frame.min_timestamp, frame.max_timestamp, 0
        if log_append:
            low = high = time * 1000
            flags = LOG_APPEND
        if isinstance(frame, FramePlace):
            flags |= BY_REFERENCE
            file, byte_start = files.index(frame.file), frame.byte_start
        else:
            file, byte_start = 0, start
            padding = _PADDING[frame.byte_length & 7]
            body += [*frame.parts, padding] if padding else frame.parts
            start += frame.byte_length + len(padding)
        rows.append(
            ROW.pack(
                partition, flags, file, base_offset, frame.record_count, frame.byte_length,
                byte_start, low, high,
            )
        )  # fmt: skip
    return b"".join(rows) + text, body, start


def unpack(
    data: bytes, at: int, *, incarnation: int, number: int, position: int, path: str
) -> tuple[Commit | None, int]:
    """Read the commit that starts at `data[at]` and must be this one.

    Returns:
        The commit, or None if `data` ends before its table and meta do; and the number of bytes
        from `at` that are needed to read it.

    Raises:
        CorruptLog: the bytes are there and are not that commit.
    """
    if len(data) - at < HEADER.size:
        return None, HEADER.size
    header = HEADER.unpack_from(data, at)
    magic, crc, version, kind_number, flags = header[:5]
    if magic != MAGIC:
        raise CorruptLog(path, position, "no commit begins here")
    if google_crc32c.value(data[at + 8 : at + HEADER.size]) != crc:
        raise CorruptLog(path, position, "a commit header's checksum does not match")
    kind = _KINDS.get(kind_number)
    if version != VERSION or kind is None:
        raise UnsupportedFormat(
            f"the commit at byte {position} of {path}",
            f"{version}, kind {kind_number}",
            f"{VERSION} with kinds {min(_KINDS)} to {max(_KINDS)}",
        )
    length, meta_length, meta_crc, frame_count, time, token = header[8:14]
    if header[5:8] != (incarnation, number, position):
        raise CorruptLog(
            path, position, f"commit {number} of incarnation {incarnation} is expected here, "
            f"but this is commit {header[6]} of incarnation {header[5]} for byte {header[7]}",
        )  # fmt: skip
    meta_start = at + HEADER.size
    needed = HEADER.size + meta_length
    if len(data) < at + needed:
        return None, needed
    meta = data[meta_start : meta_start + meta_length]
    if google_crc32c.value(meta) != meta_crc:
        raise CorruptLog(path, position, "a commit's table does not match its checksum")
    split = frame_count * ROW.size
    producer_id, sequence, epoch = header[14:17]
    return Commit(
        kind, flags, number, position, length, time, token, producer_id, sequence, epoch,
        meta[:split], meta[split:],
    ), needed  # fmt: skip


class Applicable(Protocol):
    """A state that commits move on."""

    def apply(self, commit: Commit, path: str) -> None: ...


def apply(state: Applicable, commit: Commit, path: str) -> None:
    """Let the state move on by a commit that was read.

    Raises:
        CorruptLog: whole as it is, it says what no writer may say.
    """
    try:
        state.apply(commit, path)
    except (LookupError, TypeError, ValueError) as error:
        what = f"commit {commit.number} ({commit.kind.name}) cannot be applied: {error!r}"
        raise CorruptLog(path, commit.position, what) from error


def results(table: bytes) -> dict[int, tuple[int, int]]:
    """Return what a producer wants to know: {partition: (first offset, record count)}."""
    found: dict[int, tuple[int, int]] = {}
    for row in ROW.iter_unpack(table):
        partition, base_offset, count = row[0], row[3], row[4]
        first, before = found.get(partition, (base_offset, 0))
        found[partition] = (first, before + count)
    return found
