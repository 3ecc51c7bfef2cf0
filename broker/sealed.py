"""Which Parquet files hold a topic's history, and which offsets each of them covers.

A sealed file covers the offsets [start, end) of one partition. Compaction may have removed records
from it, so it may hold fewer records than offsets; the offsets that are left keep their numbers.
The files of a partition follow each other without a gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("partition", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("record_count", pa.int64()),
        ("byte_length", pa.int64()),
        ("min_timestamp", pa.int64()),
        ("max_timestamp", pa.int64()),
        ("footer_length", pa.int64()),
        ("footer_crc", pa.int64()),
        ("crc", pa.int64()),
    ]
)


class SealedFile(NamedTuple):
    """One Parquet file, `sealed/<name>`. Times are microseconds; an empty file has none (-1)."""

    name: str
    partition: int
    start: int
    end: int
    record_count: int
    byte_length: int
    min_timestamp: int
    max_timestamp: int
    footer_length: int
    footer_crc: int
    crc: int

    def records_in(self, start: int, end: int) -> int:
        """Return how many records of [start, end) it has, without opening it.

        True for a whole file, and wherever no offset is missing. Of a part of a file that was
        compacted it is the most that there can be.
        """
        return min(self.record_count, max(0, min(end, self.end) - max(start, self.start)))


class SealedFiles:
    """All sealed files of a topic. As they come from a checkpoint until somebody looks at them.

    A topic has thousands of them, and most who open it want only its end.
    """

    def __init__(self, stored: pa.StructArray | None = None) -> None:
        self._stored: Any = stored
        self._by_partition: dict[int, list[SealedFile]] | None = None if stored is not None else {}

    def __len__(self) -> int:
        if self._by_partition is None:
            return len(self._stored)
        return sum(map(len, self._by_partition.values()))

    def __iter__(self) -> Iterator[SealedFile]:
        """Yield all files by partition and offset."""
        for _, files in sorted(self._files().items()):
            yield from files

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SealedFiles) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def of(self, partition: int) -> list[SealedFile]:
        """Return the files of a partition in the order of their offsets."""
        return self._files().get(partition, [])

    def holding(self, partition: int, offset: int) -> SealedFile | None:
        files = self.of(partition)
        place = bisect_right(files, offset, key=lambda file: file.start)
        return files[place - 1] if place and offset < files[place - 1].end else None

    def replace(self, removed: Iterable[str], added: Iterable[SealedFile]) -> list[SealedFile]:
        """Take files out and put others in; return those taken out.

        Raises:
            KeyError: one that is to be removed is not there.
        """
        names = set(removed)
        taken: list[SealedFile] = []
        files = self._files()
        if names:
            taken = [file for file in self if file.name in names]
            for partition in {file.partition for file in taken}:
                files[partition] = [file for file in files[partition] if file.name not in names]
        if missing := names - {file.name for file in taken}:
            raise KeyError(min(missing))
        # Only those partitions that change: there may be thousands, each with a commit of its own.
        changed = set()
        for file in added:
            files.setdefault(file.partition, []).append(file)
            changed.add(file.partition)
        for partition in changed:
            files[partition].sort(key=lambda file: file.start)
        return taken

    def encode(self) -> pa.StructArray:
        if self._by_partition is None:
            return self._stored
        rows = [file._asdict() for file in self]
        return pa.array(rows, pa.struct(list(SCHEMA)))

    def _files(self) -> dict[int, list[SealedFile]]:
        if self._by_partition is None:
            found: dict[int, list[SealedFile]] = {}
            columns = [self._stored.field(field.name).to_pylist() for field in SCHEMA]
            for row in zip(*columns, strict=True):
                file = SealedFile(*row)
                found.setdefault(file.partition, []).append(file)
            self._by_partition, self._stored = found, None
        return self._by_partition


def fits(state: Sealable, added: Sequence[SealedFile], removed: Sequence[str]) -> bool:
    """Tell whether `added` covers just what `removed` covered, and what comes behind it unsealed.

    Decided again at each commit: what was sealed, merged or removed by others meanwhile does not
    fit any more.
    """
    names = set(removed)
    known = {file.name: file for file in state.sealed if file.name in names} if names else {}
    if len(known) != len(names):
        return False
    for partition in {file.partition for file in (*added, *known.values())}:
        old = sorted(file[2:4] for file in known.values() if file.partition == partition)
        new = sorted(file[2:4] for file in added if file.partition == partition)
        if not new or not (_is_run(old) and _is_run(new)):
            return False
        log_start, sealed_end = state.starts[partition], state.sealed_ends[partition]
        start = max(old[0][0], log_start) if old else max(sealed_end, log_start)
        end = old[-1][1] if old else sealed_end
        # Behind the last sealed offset it may go on; in the midst of others it may not.
        is_end_right = new[-1][1] == end or (
            end >= sealed_end and end < new[-1][1] <= state.ends[partition]
        )
        if new[0][0] != start or not is_end_right:
            return False
    return True


def _is_run(ranges: list[tuple[int, int]]) -> bool:
    return all(one[1] == other[0] for one, other in pairwise(ranges))


class Sealable(Protocol):
    """What of a topic's state decides whether files fit."""

    sealed: SealedFiles
    starts: list[int]
    ends: list[int]
    sealed_ends: list[int]
