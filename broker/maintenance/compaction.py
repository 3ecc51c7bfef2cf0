"""Compaction: of every key only the last record stays in the sealed files of a partition.

Only sealed files take part, from the log start on; what is not sealed is never touched. Records
keep their offsets, so gaps remain. New files are written beside the old ones, over just the same
offsets, and a `seal` commit puts them in their place; if others have changed any of the old ones
meanwhile, it is dropped. A crash before it leaves files that nobody names.

Which record of a key is the last is found in passes over the keys alone. A pass holds the keys
whose hash lies in one range; where they become too many the range becomes smaller, and another
pass does the rest. So memory is bounded however many keys there are, but for one bit a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker.maintenance.sealing import Advance, write_rows
from broker.parquet import SealedReader
from broker.partitioner import murmur2
from broker.reader import TopicReader
from broker.sealed import SealedFile
from broker.state import TopicState

# Keys held at a time while looking for the last record of each.
KEY_BYTES_MAX = 128 << 20
_HASH_END = 1 << 32
_HASHED_ROWS = 1 << 16
_LAST_ROWS = pa.schema([("key", pa.binary()), ("row", pa.int64())])

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CompactionUnit:
    """Write `files`, as far as [start, end) of a partition, anew without superseded records.

    Tombstones before the offset `cleaned_end` have been through a compaction; those of them that
    are not newer than `tombstone_time` (µs) go.
    """

    partition: int
    start: int
    end: int
    files: tuple[SealedFile, ...]
    cleaned_end: int
    tombstone_time: int

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    @property
    def record_count(self) -> int:
        return sum(file.record_count for file in self.files)


def plan(state: TopicState, now: int) -> list[CompactionUnit]:
    """Return the partitions of which so much is superseded, perhaps, that compaction is due."""
    if "compact" not in state.settings["cleanup.policy"]:
        return []
    units = (_unit(state, partition, now) for partition in range(state.partition_count))
    return [unit for unit in units if unit is not None]


def _unit(state: TopicState, partition: int, now: int) -> CompactionUnit | None:
    files = _old_enough(state.sealed.of(partition), now, state.settings["min.compaction.lag.ms"])
    cleaned_end = state.cleaned_ends[partition]
    dirty = sum(file.byte_length for file in files if file.end > cleaned_end)
    total = sum(file.byte_length for file in files)
    if not dirty or dirty < total * state.settings["min.cleanable.dirty.ratio"]:
        return None
    return CompactionUnit(
        partition,
        max(files[0].start, state.starts[partition]),
        files[-1].end,
        tuple(files),
        cleaned_end,
        max(now - state.settings["delete.retention.ms"], -1) * 1000,
    )


def _old_enough(files: list[SealedFile], now: int, lag: int) -> list[SealedFile]:
    """Return the first files, as far as all their records may be superseded already."""
    if not lag:
        return files
    limit = (now - lag) * 1000
    young = (place for place, file in enumerate(files) if file.max_timestamp > limit)
    return files[: next(young, len(files))]


def write(
    reader: TopicReader,
    unit: CompactionUnit,
    advance: Advance = lambda count: None,
    *,
    key_bytes_max: int = KEY_BYTES_MAX,
) -> list[SealedFile]:
    """Write the records of a unit that stay to files of about the wanted size.

    Raises:
        Stopped: `advance` did; nothing names what was written.
        MissingFile: one of the files is gone: lost, or others have replaced it.
    """
    survivors = _find_survivors(reader, unit, advance, key_bytes_max)
    rows = _remaining(reader, unit, survivors)
    return write_rows(reader, unit.partition, unit.start, unit.end, rows, lambda count: advance(0))


def _remaining(
    reader: TopicReader, unit: CompactionUnit, survivors: Survivors
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield the records that stay, and the offset behind each piece."""
    for opened, group, row in _groups(reader, unit):
        stays = survivors.of(row, opened.group_rows[group])
        if not stays.any():
            continue
        batch = opened.read(group)
        stays &= ~_is_old_tombstone(batch, unit)
        yield batch.filter(pa.array(stays)), opened.group_end(group)


def _is_old_tombstone(batch: pa.RecordBatch, unit: CompactionUnit) -> Flags:
    values = batch.column("value")
    if not values.null_count:
        return np.zeros(batch.num_rows, np.bool_)
    is_old: Flags = values.is_null().to_numpy(zero_copy_only=False)
    is_old &= batch.column("offset").to_numpy() < unit.cleaned_end
    is_old &= batch.column("timestamp").cast(pa.int64()).to_numpy() <= unit.tombstone_time
    return is_old


# Which records stay.


class Survivors:
    """A bit for each record of a unit, in order: whether it stays."""

    def __init__(self, record_count: int) -> None:
        self._bits = np.zeros(record_count // 8 + 1, np.uint8)

    def keep(self, rows: Rows) -> None:
        np.bitwise_or.at(self._bits, rows >> 3, np.uint8(1) << (rows & 7).astype(np.uint8))

    def of(self, start: int, count: int) -> Flags:
        """Return whether each of the records [start, start + count) stays."""
        held = self._bits[start >> 3 : (start + count + 7) >> 3]
        bits = np.unpackbits(held, bitorder="little")
        return bits[start & 7 :][:count].view(np.bool_)


class LastRows:
    """The last row of each key whose hash lies in [start, end). `end` comes down if need be."""

    def __init__(self, start: int, key_bytes_max: int) -> None:
        self.start, self.end = start, _HASH_END
        self._bytes_max = key_bytes_max
        self._held: list[pa.RecordBatch] = []
        self._byte_count = 0

    def add(self, keys: pa.Array, rows: Rows) -> None:
        """Take in keys, none of them null, and their rows."""
        batch = pa.RecordBatch.from_arrays([keys, pa.array(rows)], schema=_LAST_ROWS)
        batch = self._within(batch)
        self._held.append(batch)
        self._byte_count += batch.nbytes
        if self._byte_count > self._bytes_max:
            self._reduce()

    def rows(self) -> Rows:
        found: Rows = self._last().column("row").to_numpy()
        return found

    def _reduce(self) -> None:
        """Forget all but the last row of each key, and keys until half of the room is free."""
        self._hold(self._last().to_batches())
        while self._byte_count > self._bytes_max // 2 and self.end - self.start > 1:
            self.end = (self.start + self.end) // 2
            self._hold([self._within(batch) for batch in self._held])

    def _hold(self, batches: list[pa.RecordBatch]) -> None:
        self._held = batches
        self._byte_count = sum(batch.nbytes for batch in batches)

    def _last(self) -> pa.Table:
        # By the keys themselves: two keys that have one hash stay two.
        table = pa.Table.from_batches(self._held, _LAST_ROWS)
        found = table.group_by("key", use_threads=False).aggregate([("row", "max")])
        return pa.table([found.column("key"), found.column("row_max")], schema=_LAST_ROWS)

    def _within(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows whose key's hash is in the range."""
        if (self.start, self.end) == (0, _HASH_END):
            return batch
        keys = batch.column("key")
        pieces = [np.empty(0, np.uint32)]
        for start in range(0, len(keys), _HASHED_ROWS):  # Hashing takes several times their room.
            pieces.append(murmur2(keys.slice(start, _HASHED_ROWS)))
        hashes = np.concatenate(pieces)
        return batch.filter(pa.array((hashes >= self.start) & (hashes < self.end)))


def _find_survivors(
    reader: TopicReader, unit: CompactionUnit, advance: Advance, key_bytes_max: int
) -> Survivors:
    survivors = Survivors(unit.record_count)
    start = 0
    while start < _HASH_END:
        last = LastRows(start, key_bytes_max)
        for keys, rows in _keys(reader, unit):
            advance(len(keys) if start == 0 else 0)
            if keys.null_count:
                # From before the topic was compacted: nothing supersedes them.
                is_null = keys.is_null().to_numpy(zero_copy_only=False)
                survivors.keep(rows[is_null])
                keys, rows = keys.drop_null(), rows[~is_null]
            last.add(keys, rows)
        survivors.keep(last.rows())
        start = last.end
    return survivors


def _keys(reader: TopicReader, unit: CompactionUnit) -> Iterator[tuple[pa.Array, Rows]]:
    """Yield the keys of the unit's records, and which rows of the unit they are."""
    for opened, group, row in _groups(reader, unit):
        rows = np.arange(row, row + opened.group_rows[group])
        if opened.group_starts[group] >= unit.start:
            yield opened.read(group, ["key"]).column(0), rows
            continue
        # Records below the log start are gone: they supersede nothing, and none of them stays.
        batch = opened.read(group, ["key", "offset"])
        first = int(np.searchsorted(batch.column(1).to_numpy(), unit.start))
        yield batch.column(0).slice(first), rows[first:]


def _groups(reader: TopicReader, unit: CompactionUnit) -> Iterator[tuple[SealedReader, int, int]]:
    """Yield each row group: its open file, its number there, and its first row in the unit."""
    row = 0
    for file in unit.files:
        opened = SealedReader(reader.topic.storage, reader.topic.directory, file)
        try:
            for group in range(opened.group_count):
                yield opened, group, row
                row += opened.group_rows[group]
        finally:
            opened.close()
