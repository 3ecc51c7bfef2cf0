"""Sealing: records of complete journal files become Parquet files, and small ones larger ones.

A unit of work is one range of offsets of one partition. Its files are written first, beside the
log; a `seal` commit then names them. A crash before it leaves files that nobody names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from broker import parquet
from broker.errors import LogError
from broker.history import Fetched
from broker.parquet import SealedWriter
from broker.reader import TopicReader, offset_at
from broker.sealed import SealedFile
from broker.state import TopicState

# So many small files in a row are merged even if together they are still small.
_SMALL_FILES_MAX = 16
_FETCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Unit:
    """Write [start, end) of a partition anew, in place of the files `removed`."""

    partition: int
    start: int
    end: int
    removed: tuple[str, ...] = ()


def is_roll_due(state: TopicState, now: int) -> bool:
    """Tell whether the growing file has waited so long that its records are to be sealed."""
    return (
        bool(state.file_time)
        and now - state.file_time >= state.settings["seal.ms"]
        and (state.ends != list(state.file_starts))
    )


def plan(state: TopicState, now: int, *, is_forced: bool = False) -> list[Unit]:
    """Return what is worth sealing: of all partitions at once, so that journal files become free.

    Args:
        is_forced: whatever is in a complete file, however little and young.
    """
    waiting = state.files[len(state.freed_files()) :]
    if not waiting:
        return []
    byte_count = sum(file.byte_length for file in waiting)
    is_old = now - waiting[0].time >= state.settings["seal.ms"]
    if not (is_forced or is_old or byte_count >= state.settings["seal.bytes"]):
        return []
    units = []
    for partition in range(state.partition_count):
        start = max(state.starts[partition], state.sealed_ends[partition])
        end = offset_at(state.file_starts, partition)
        if start < end:
            units.append(Unit(partition, start, end))
    return units


def plan_merges(state: TopicState) -> list[Unit]:
    """Return runs of small files that are worth being one, and files that reach below the start."""
    target = state.settings["seal.bytes"]
    units = []
    for partition in range(state.partition_count):
        log_start = state.starts[partition]
        run: list[SealedFile] = []
        for file in state.sealed.of(partition):
            if file.start == state.cleaned_ends[partition]:
                run = []  # Together with what is compacted it would all count as not compacted.
            if file.start < log_start:
                removed = (file.name,)
                units.append(Unit(partition, log_start, file.end, removed))
                continue
            if file.byte_length >= target // 2:
                run = []
                continue
            run.append(file)
            if sum(one.byte_length for one in run) >= target or len(run) >= _SMALL_FILES_MAX:
                names = tuple(one.name for one in run)
                units.append(Unit(partition, run[0].start, run[-1].end, names))
                run = []
    return units


# Told after each piece how many offsets it covered; may raise `Stopped`.
Advance = Callable[[int], None]


class Stopped(Exception):
    """Somebody asked to stop in the middle of writing."""


def write(
    reader: TopicReader, unit: Unit, advance: Advance = lambda count: None
) -> list[SealedFile]:
    """Write a unit's records to files of about the wanted size. The reader must hold the range.

    Raises:
        Stopped: `advance` did; nothing names what was written.
    """
    rows = _rows(reader, unit)
    return write_rows(reader, unit.partition, unit.start, unit.end, rows, advance)


def write_rows(
    reader: TopicReader,
    partition: int,
    start: int,
    end: int,
    pieces: Iterable[tuple[pa.RecordBatch, int]],
    advance: Advance,
) -> list[SealedFile]:
    """Write rows to files that together cover [start, end); none is left if that fails.

    Args:
        pieces: rows in order, and the offset behind each piece.
    """
    target = reader.state.settings["seal.bytes"]
    writer = _begin(reader, partition, start)
    written: list[SealedFile] = []
    try:
        done = start
        for batch, piece_end in pieces:
            writer.add(batch)
            advance(piece_end - done)
            done = piece_end
            if writer.byte_count >= target and piece_end < end:
                written.append(writer.finish(piece_end))
                writer = _begin(reader, partition, piece_end)
        written.append(writer.finish(end))
        return written
    except BaseException:
        writer.discard()
        discard(reader, written)
        raise


def discard(reader: TopicReader, files: list[SealedFile]) -> None:
    """Remove files that no commit will name."""
    for file in files:
        with contextlib.suppress(LogError):
            reader.topic.storage.remove(f"{reader.topic.directory}/sealed/{file.name}")


def _begin(reader: TopicReader, partition: int, start: int) -> SealedWriter:
    storage = reader.topic.storage
    # By the journal's time if the clock was set back: too old a name no commit would take.
    born_ns = max(storage.clock(), reader.state.time * 1_000_000)
    return SealedWriter(storage, reader.topic.directory, partition, start, born_ns=born_ns)


def _rows(reader: TopicReader, unit: Unit) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield the unit's records as rows of a file, and the offset behind each piece."""
    offset = unit.start
    while offset < unit.end:
        for fetched in reader.fetch(unit.partition, offset, _FETCH_BYTES):
            piece = fetched.before(unit.end)
            offset = piece.end_offset
            if piece.batch.num_rows:
                yield rows(piece), offset
            if offset >= unit.end:
                return


def rows(fetched: Fetched) -> pa.RecordBatch:
    """Return fetched records as rows of a sealed file."""
    offsets = fetched.offsets
    if offsets is None:
        offsets = np.arange(fetched.base_offset, fetched.end_offset, dtype=np.int64)
    return parquet.with_offsets(fetched.batch, pa.array(offsets), fetched.timestamp_type)
