"""How much one batch reads, and how it is dealt out to tasks.

A task costs tens of milliseconds, so little data goes to one task; much data goes to about one task
for each core, or more where a task would read too long.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import broker
from broker import FileSlice, TopicReader
from spark_log.losses import Ranges
from spark_log.topics import Views

# From here on a second task is worth its cost.
_TASK_BYTES_MIN = 4 << 20
_TASK_BYTES_MAX = 64 << 20
# Offsets looked at first to find out how many make up `maxBytesPerTrigger`.
_WINDOW_OFFSETS = 100_000

Place = tuple[str, int]
Task = list[FileSlice]


def core_count() -> int:
    """Return how many tasks this machine runs at once; executors are taken to be like it."""
    return len(os.sched_getaffinity(0))


def task_count(byte_count: int, cores: int) -> int:
    """Return how many tasks so many bytes are worth."""
    by_cores = min(cores, byte_count // _TASK_BYTES_MIN)
    return max(1, by_cores, -(-byte_count // _TASK_BYTES_MAX))


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the user wants of the number and size of tasks."""

    task_count_min: int | None = None
    records_max: int | None = None

    def task_count(self, offset_count: int) -> int:
        """Return how many tasks are wanted: none of them without an offset."""
        by_records = 1 if self.records_max is None else -(-offset_count // self.records_max)
        return min(offset_count, max(1, self.task_count_min or 1, by_records))


def plan(ranges: Ranges, views: Views, sizing: Sizing, cores: int) -> list[Task]:
    """Return the tasks that read these ranges; none if they are empty."""
    slices = {
        name: broker.plan_slices(views[name].reader, wanted)
        for name, wanted in ranges.found.items()
        if any(start < end for start, end in wanted.values())
    }
    byte_count = sum(piece.byte_count for pieces in slices.values() for piece in pieces)
    count = task_count(byte_count, cores)
    wished = sizing.task_count(ranges.offset_count)
    if wished > count or sizing.records_max is not None:
        return _split_evenly(ranges, views, max(wished, count))
    share = max(1, -(-byte_count // count))
    tasks: list[Task] = []
    for name, pieces in slices.items():
        tasks += broker.pack_slices(
            pieces,
            views[name].reader,
            task_count=max(1, round(sum(piece.byte_count for piece in pieces) / share)),
        )
    return _merge(tasks, share)


def _merge(tasks: list[Task], bytes_max: int) -> list[Task]:
    """Put small tasks of different topics together."""
    merged: list[Task] = []
    byte_count = 0
    for task in tasks:
        task_bytes = sum(piece.byte_count for piece in task)
        if merged and byte_count + task_bytes <= bytes_max:
            merged[-1] += task
            byte_count += task_bytes
        else:
            merged.append(list(task))
            byte_count = task_bytes
    return merged


def _split_evenly(ranges: Ranges, views: Views, count: int) -> list[Task]:
    """Return just so many tasks, each with as many offsets as the others, or one more."""
    count = min(count, ranges.offset_count)
    tasks: list[Task] = [[] for _ in range(count)]
    parts = _cut_evenly(ranges, count)
    for name in ranges.found:
        reader = views[name].reader
        pieces = [broker.plan_slices(reader, part.get(name, {})) for part in parts]
        for task, own in zip(tasks, broker.name_frames(pieces, reader), strict=True):
            task += own
    return tasks


def _cut_evenly(ranges: Ranges, count: int) -> list[dict[str, dict[int, tuple[int, int]]]]:
    """Lay the ranges end to end and cut that into parts of like numbers of offsets."""
    total = ranges.offset_count
    cuts = [total * number // count for number in range(count + 1)]
    parts: list[dict[str, dict[int, tuple[int, int]]]] = [{} for _ in range(count)]
    at = 0
    for name, partition, start, end in ranges:
        while start < end:
            number = bisect_right(cuts, at) - 1
            stop = min(end, start + cuts[number + 1] - at)
            parts[number].setdefault(name, {})[partition] = start, stop
            at, start = at + stop - start, stop
    return parts


def share_offsets(sizes: dict[Place, int], limit: int) -> dict[Place, int]:
    """Share a number of offsets out in proportion to each partition's backlog, as Kafka's does.

    Everybody who has something gets at least one, so the sum may be a little over the limit.
    """
    total = sum(sizes.values())
    if total <= limit:
        return dict(sizes)
    return {place: min(size, -(-limit * size // total) if limit * size < total
                       else limit * size // total)
            for place, size in sizes.items()}  # fmt: skip


def limit_offsets(ranges: Ranges, limit: int) -> Ranges:
    """Return the front of each range: about `limit` offsets in all."""
    sizes = {(name, number): end - start for name, number, start, end in ranges}
    shares = share_offsets(sizes, limit)
    return _cut(ranges, {place: shares[place] for place in sizes})


def limit_bytes(ranges: Ranges, views: Views, limit: int) -> Ranges:
    """Return the front of each range: about `limit` bytes in all, as stored."""
    window = _WINDOW_OFFSETS
    while True:
        front = limit_offsets(ranges, window)
        slices = {name: broker.plan_slices(views[name].reader, wanted)
                  for name, wanted in front.found.items()}  # fmt: skip
        total = sum(piece.byte_count for pieces in slices.values() for piece in pieces)
        if total >= limit or front.offset_count >= ranges.offset_count:
            break
        window *= 4
    if total <= limit:
        return front
    taken: dict[Place, int] = {}
    for name, pieces in slices.items():
        for partition in front.found[name]:
            own = [piece for piece in pieces if piece.partition == partition]
            room = limit * sum(piece.byte_count for piece in own) // total
            taken[name, partition] = _offsets_in(own, views[name].reader, room)
    return _cut(front, taken)


def _offsets_in(slices: list[FileSlice], reader: TopicReader, room: int) -> int:
    """Return how many offsets from the front lie in `room` bytes: at least one if there are any."""
    count = 0
    for piece in slices:
        if piece.byte_count > room:
            return max(count + _offsets_in_one(piece, reader, room), 1)
        room -= piece.byte_count
        count += piece.offset_count
    return count


def _offsets_in_one(piece: FileSlice, reader: TopicReader, room: int) -> int:
    """Return how many offsets of one slice lie in `room` bytes, by frames and within the first."""
    if room <= 0:
        return 0
    parts = broker.pack_slices([piece], reader, task_count=-(-piece.byte_count // room))
    first = parts[0][0]
    if first.byte_count <= room:
        return first.offset_count
    (named,) = broker.pack_slices([first], reader, task_count=1)
    if not named[0].frames:
        return 0  # One record of a sealed file, larger than the room.
    # One frame, perhaps read in part before: records of it are taken to be of like size.
    frame = named[0].frames[0]
    return min(first.offset_count, frame.record_count * room // frame.byte_length)


def _cut(ranges: Ranges, counts: dict[Place, int]) -> Ranges:
    found = {
        name: {
            number: (start, min(end, start + counts[name, number]))
            for number, (start, end) in wanted.items()
        }
        for name, wanted in ranges.found.items()
    }
    return Ranges(found, ranges.losses)


class Patience:
    """Waits for `offsets_min` offsets, but never longer than `delay_ms_max` since the last batch.

    The first batch does not wait.
    """

    def __init__(self, offsets_min: int, delay_ms_max: int, clock: Callable[[], float]) -> None:
        self._offsets_min = offsets_min
        self._delay = delay_ms_max / 1000
        self._clock = clock
        self._fired: float | None = None

    def is_over(self, offset_count: int) -> bool:
        """Tell whether to read now; if so, the waiting begins anew."""
        now = self._clock()
        is_due = self._fired is None or now - self._fired >= self._delay
        if offset_count >= self._offsets_min or is_due:
            self._fired = now
            return True
        return False
