"""Units of work: ranges of offsets whose files are written anew, here or by others.

Whoever keeps a topic plans the units and commits what was written. Who writes one needs only the
root and the unit, and may be any process on any machine that sees the files. What is written twice,
or for nothing, are files that nobody names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from broker import slices
from broker.errors import CorruptLog, MissingFile
from broker.maintenance import compaction, sealing
from broker.maintenance.compaction import CompactionUnit
from broker.maintenance.sealing import Unit
from broker.reader import TopicReader
from broker.sealed import SealedFile
from broker.storage import open_storage

AnyUnit = Unit | CompactionUnit
# None: others have replaced the files that it was to be made of. An error: they are damaged.
Written = list[SealedFile] | CorruptLog | None


class Progress(Protocol):
    """Somebody who is told what is being done, and may end it by raising `Stopped`."""

    def begin(self, what: str, total: int) -> None:
        """Something of so many records begins."""

    def advance(self, count: int) -> None:
        """So many more are done."""


# Yields each unit with the files that hold it, for a commit to name.
Write = Callable[[TopicReader, Sequence[AnyUnit], Progress], Iterable[tuple[AnyUnit, Written]]]


def write_here(
    reader: TopicReader, units: Sequence[AnyUnit], progress: Progress
) -> Iterator[tuple[AnyUnit, Written]]:
    """Write units one after the other, in this process."""
    for unit in units:
        what = f"{_verb(unit)} {reader.topic.name}-{unit.partition}"
        progress.begin(what, record_count(unit))
        yield unit, _write(reader, unit, progress.advance)


def write_elsewhere(
    root: str, storage: Mapping[str, str], topic: str, incarnation: int, unit: AnyUnit
) -> Written:
    """Write one unit, or a part of one, in any process that sees the files."""
    reader = TopicReader(open_storage(root, storage), topic, incarnation)
    try:
        reader.refresh()
        return _write(reader, unit, lambda count: None)
    finally:
        reader.close()


def cut(reader: TopicReader, unit: AnyUnit) -> Sequence[AnyUnit]:
    """Return parts that follow each other, each of them about one file's worth.

    Only for what is not sealed yet. Small files that become one are one part, and so is a
    partition that is compacted: which record of a key is the last is known only over all of them.
    """
    if unit.removed or isinstance(unit, CompactionUnit):
        return [unit]
    count = max(1, round(_byte_count(reader, unit) / reader.state.settings["seal.bytes"]))
    size = unit.end - unit.start
    ends = [unit.start + size * number // count for number in range(count + 1)]
    return [replace(unit, start=start, end=end) for start, end in pairwise(ends) if start < end]


def record_count(unit: AnyUnit) -> int:
    return unit.record_count if isinstance(unit, CompactionUnit) else unit.end - unit.start


def _write(reader: TopicReader, unit: AnyUnit, advance: Callable[[int], None]) -> Written:
    try:
        if isinstance(unit, CompactionUnit):
            return compaction.write(reader, unit, advance)
        return sealing.write(reader, unit, advance)
    except CorruptLog as damage:
        # Not raised: damage in one file must not keep all else from being done.
        is_replaced = isinstance(damage, MissingFile) and not _is_current(reader, unit)
        return None if is_replaced else damage


def _is_current(reader: TopicReader, unit: AnyUnit) -> bool:
    """Tell whether the state still names all files that a unit is made of."""
    return {file.name for file in reader.refresh().sealed}.issuperset(unit.removed)


def _verb(unit: AnyUnit) -> str:
    if isinstance(unit, CompactionUnit):
        return "compacting"
    return "merging" if unit.removed else "sealing"


def _byte_count(reader: TopicReader, unit: Unit) -> int:
    """Return how large the files will be: as others of the partition, else as the journal is."""
    known = [file for file in reader.state.sealed.of(unit.partition) if file.record_count]
    if known:
        records, size = known[-1].record_count, known[-1].byte_length
        return (unit.end - unit.start) * size // records
    planned = slices.plan(reader, {unit.partition: (unit.start, unit.end)})
    return sum(piece.byte_count for piece in planned)
