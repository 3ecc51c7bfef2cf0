"""Indexes: where the frames of a journal file are, as stored, as scanned, and as it grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import broker
from broker import index
from broker.batch import encode_records
from broker.commit import BY_REFERENCE, ROW_TYPE, Author, Commit
from broker.data_file import DataFile
from broker.errors import CorruptLog
from broker.index import FileIndex, FrameColumns, FrameRef, TailIndex
from broker.ledger import new_token
from broker.state import JournalFile, TopicState
from broker.storage import LocalStorage
from broker.topic import Topic

DIRECTORY = "topics/t/1"


def frame_of(count: int, first_stamp: int) -> object:
    stamps = [first_stamp + number for number in range(count)]
    return encode_records([None] * count, [b"v"] * count, None, stamps)


class Watcher:
    """Builds a tail index from the commits it sees, as a reader does."""

    def __init__(self) -> None:
        self.tail = TailIndex(())

    def on_load(self, state: TopicState) -> None:
        pass

    def on_commit(self, commit: Commit, state: TopicState) -> None:
        self.tail.add(commit)


@pytest.fixture
def file(log: broker.Log, storage: LocalStorage) -> JournalFile:
    """A complete journal file: two partitions, several frames, some of them elsewhere."""
    log.create_topic("t", partitions=3)
    topic = log._open_writer("t")
    for number in range(10):
        frames = [(number % 2, frame_of(number + 1, 100 * number))]
        if number % 3 == 0:
            frames.append((1, frame_of(2, 50)))
        topic.append(frames, Author(new_token()))  # type: ignore[arg-type]
    data = DataFile(storage, DIRECTORY)
    topic.append([(0, data.add(frame_of(4, 7)))], Author(new_token()))  # type: ignore[arg-type]
    data.finish()
    state = topic.state
    topic.close()
    return JournalFile(0, state.number, state.position, 0, (0, 0, 0))


def scan(storage: LocalStorage, file: JournalFile) -> FileIndex:
    return index.scan(
        storage,
        DIRECTORY,
        incarnation=1,
        file_number=0,
        end_number=file.end_number,
        byte_length=file.byte_length,
    )


def load(storage: LocalStorage, file: JournalFile) -> FileIndex:
    return index.load(
        storage,
        DIRECTORY,
        incarnation=1,
        file_number=0,
        end_number=file.end_number,
        byte_length=file.byte_length,
    )


def rows(columns: FrameColumns) -> list[FrameRef]:
    return [columns.at(row) for row in range(len(columns))]


def all_rows(found: FileIndex | TailIndex) -> list[list[FrameRef]]:
    return [rows(found.partition(number)) for number in range(3)]


def test_a_scan_finds_every_frame_in_order(storage: LocalStorage, file: JournalFile) -> None:
    found = scan(storage, file)
    first, second, third = all_rows(found)
    assert [ref.record_count for ref in first] == [1, 3, 5, 7, 9, 4]
    assert [ref.record_count for ref in second] == [2, 2, 4, 2, 6, 2, 8, 10, 2]
    assert third == []
    assert len(found) == len(first) + len(second)
    for refs in (first, second):
        assert [ref.base_offset for ref in refs[1:]] == [ref.end_offset for ref in refs[:-1]]
    assert [bool(ref.flags & BY_REFERENCE) for ref in first] == [False] * 5 + [True]
    assert [bool(ref.file) for ref in first] == [False] * 5 + [True]


def test_the_index_of_a_growing_file_says_the_same(
    storage: LocalStorage, file: JournalFile
) -> None:
    watcher = Watcher()
    Topic(storage, "t", 1, observer=watcher).close()
    assert all_rows(watcher.tail) == all_rows(scan(storage, file))


def test_a_stored_index_says_the_same(storage: LocalStorage, file: JournalFile) -> None:
    made = scan(storage, file)
    assert all_rows(FileIndex.decode(made.encode(), "a file")) == all_rows(made)


def test_a_missing_or_damaged_index_is_made_from_the_file(
    storage: LocalStorage, file: JournalFile, root: Path
) -> None:
    made = scan(storage, file)
    assert all_rows(load(storage, file)) == all_rows(made)
    index.write(storage, DIRECTORY, 0, made)
    path = root / index.index_path(DIRECTORY, 0)
    for damage in (path.read_bytes()[:-1], b"", b"SLA1", path.read_bytes() + b"x"):
        path.write_bytes(damage)
        assert all_rows(load(storage, file)) == all_rows(made)


def test_a_stored_index_is_not_written_twice(
    storage: LocalStorage, file: JournalFile, root: Path
) -> None:
    made = scan(storage, file)
    index.write(storage, DIRECTORY, 0, made)
    before = (root / index.index_path(DIRECTORY, 0)).read_bytes()
    index.write(storage, DIRECTORY, 0, FileIndex(np.zeros(0, ROW_TYPE), {}))
    assert (root / index.index_path(DIRECTORY, 0)).read_bytes() == before


@pytest.mark.parametrize("change", [-8, -1])
def test_a_scan_of_another_length_is_damage(
    storage: LocalStorage, file: JournalFile, change: int
) -> None:
    with pytest.raises(CorruptLog):
        scan(storage, file._replace(byte_length=file.byte_length + change))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_scan_of_another_number_of_commits_is_damage(
    storage: LocalStorage, file: JournalFile, change: int
) -> None:
    with pytest.raises(CorruptLog, match="another number of commits"):
        scan(storage, file._replace(end_number=file.end_number + change))


def test_a_scan_past_the_end_or_of_no_file_is_damage(
    storage: LocalStorage, file: JournalFile, root: Path
) -> None:
    with pytest.raises(CorruptLog, match="shorter than what it held"):
        scan(storage, file._replace(byte_length=file.byte_length + 8))
    (root / DIRECTORY / f"journal/{0:020d}.log").unlink()
    with pytest.raises(CorruptLog, match="missing"):
        scan(storage, file)


def columns_of(*frames: tuple[int, int, int]) -> FrameColumns:
    """Frames of (record count, bytes, largest time), one after the other."""
    base = np.cumsum([0, *[count for count, _, _ in frames]])[:-1]
    count, length, high = (np.array(column) for column in zip(*frames, strict=True))
    zeros = np.zeros(len(frames), np.int64)
    return FrameColumns((base, count, zeros, length, zeros, high, zeros), {})


def test_reading_starts_in_the_frame_that_holds_the_offset() -> None:
    columns = columns_of((3, 10, 0), (1, 10, 0), (6, 10, 0))
    starts = [columns.from_offset(offset, 1)[0].base_offset for offset in range(10)]
    assert starts == [0, 0, 0, 3, 4, 4, 4, 4, 4, 4]
    assert columns.from_offset(10, 1) == []


def test_reading_takes_one_frame_and_then_as_many_as_the_bytes_allow() -> None:
    columns = columns_of(*[(1, 10, 0)] * 6)
    taken = [len(columns.from_offset(1, byte_count)) for byte_count in (0, 1, 10, 11, 30, 1000)]
    assert taken == [1, 1, 1, 2, 3, 5]


def test_a_time_is_looked_up_from_an_offset_on() -> None:
    columns = columns_of((2, 10, 50), (2, 10, 20), (2, 10, 70))

    def found(time: int, offset: int) -> int | None:
        ref = columns.first_at_time(time, offset)
        return None if ref is None else ref.base_offset

    assert [found(time, 0) for time in (10, 50, 51, 70, 71)] == [0, 0, 4, 4, None]
    assert [found(10, offset) for offset in (0, 1, 2, 4, 6)] == [0, 0, 2, 4, None]
