"""Retention: where the log start may move to, by age and size. Whole files go, oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker.reader import TopicReader, offset_at
from broker.state import TopicState

_DELETE = "delete"


class Stretch(NamedTuple):
    """The offsets before `end` that go together, how new they are (µs), and their bytes."""

    end: int
    max_timestamp: int
    byte_count: int


def is_roll_due(state: TopicState, now: int) -> bool:
    """Tell whether all records of the growing file are too old, so that it must end to go."""
    limit = _oldest(state, now)
    return limit is not None and 0 <= state.file_max_timestamp < limit


def plan(reader: TopicReader, now: int) -> dict[int, int]:
    """Return the new log start of each partition that has something to remove."""
    state = reader.state
    limit, bytes_max = _oldest(state, now), state.settings["retention.bytes"]
    if _DELETE not in state.settings["cleanup.policy"] or (limit is None and bytes_max < 0):
        return {}
    starts = {}
    for partition in range(state.partition_count):
        stretches = [*_sealed(state, partition), *_unsealed(reader, partition, bytes_max >= 0)]
        start = _start(stretches, limit, bytes_max)
        if start > state.starts[partition]:
            starts[partition] = start
    return starts


def _start(stretches: list[Stretch], limit: int | None, bytes_max: int) -> int:
    """Return the end of the last stretch that goes; the newest never does."""
    start = 0
    rest = sum(stretch.byte_count for stretch in stretches)
    for stretch in stretches[:-1]:
        is_old = limit is not None and stretch.max_timestamp < limit
        is_over = 0 <= bytes_max <= rest - stretch.byte_count
        if not (is_old or is_over):
            break
        start = stretch.end
        rest -= stretch.byte_count
    return start


def _oldest(state: TopicState, now: int) -> int | None:
    """Return the time (µs) before which records go, or None."""
    retention: int = state.settings["retention.ms"]
    if retention < 0 or _DELETE not in state.settings["cleanup.policy"]:
        return None
    return (now - retention) * 1000


def _sealed(state: TopicState, partition: int) -> Iterator[Stretch]:
    for file in state.sealed.of(partition):
        yield Stretch(file.end, file.max_timestamp, file.byte_length)


def _unsealed(reader: TopicReader, partition: int, with_bytes: bool) -> Iterator[Stretch]:
    """Yield the journal files, the growing one last, though it may hold nothing of the partition.

    That one stays: new records may come among its old ones at any time.
    """
    state = reader.state
    start = max(state.starts[partition], state.sealed_ends[partition])
    files = list(reader.journal_files())
    ends = [offset_at(file.start_offsets, partition) for file in files[1:]]
    for file, end in zip(files, [*ends, state.ends[partition]], strict=True):
        byte_count = 0
        if with_bytes and start < end:
            byte_count = reader.byte_count(file, partition, start, end)
        if start < end or file is files[-1]:
            yield Stretch(end, file.max_timestamp, byte_count)
        start = max(start, end)
