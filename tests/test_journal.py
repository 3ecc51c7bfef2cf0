"""The journal: numbered commits in files, read without a lock and appended under one."""

from __future__ import annotations

from pathlib import Path

import pytest

import broker
from broker.batch import encode_records
from broker.commit import Author, Kind, pack
from broker.errors import CorruptLog, UnknownTopic
from broker.home import topic_home
from broker.journal import Journal
from broker.ledger import new_token
from broker.storage import Storage
from broker.topic import Topic

FRAME = encode_records([None], [b"v" * 50], None, [1])
DIRECTORY = "topics/t/1"


@pytest.fixture(autouse=True)
def topic(log: broker.Log) -> None:
    log.create_topic("t")


@pytest.fixture
def journal(storage: Storage) -> Journal:
    """A cursor at the beginning, as a reader has it."""
    return Journal(storage, topic_home("t", 1))


def append(log: broker.Log, count: int = 1) -> None:
    writer = log._open_writer("t")
    for _ in range(count):
        writer.append([(0, FRAME)], Author(new_token()))
    writer.close()


def names(storage: Storage) -> list[str]:
    """Return the journal's files, whatever they are made of."""
    return storage.list(f"{DIRECTORY}/journal")


def size(storage: Storage, name: str) -> int:
    file = storage.open_file(f"{DIRECTORY}/journal/{name}")
    assert file is not None
    return file.size()


def files(root: Path) -> list[Path]:
    return sorted((root / DIRECTORY / "journal").iterdir())


def numbers(journal: Journal) -> list[int]:
    return [commit.number for commit in journal.read_new()]


@pytest.mark.every_store
def test_commits_are_read_once_and_in_order(log: broker.Log, journal: Journal) -> None:
    assert numbers(journal) == [0]
    assert numbers(journal) == []
    append(log, 3)
    assert numbers(journal) == [1, 2, 3]
    assert journal.place[2] == 4
    journal.close()


@pytest.mark.every_store
def test_reading_crosses_from_file_to_file(
    log: broker.Log, storage: Storage, journal: Journal
) -> None:
    log.alter_topic("t", {"segment.bytes": 500})
    append(log, 20)
    assert len(names(storage)) > 3
    commits = journal.read_new()
    assert [commit.number for commit in commits] == list(range(commits[-1].number + 1))
    ends = [commit.number + 1 for commit in commits if commit.kind is Kind.END_OF_FILE]
    expected = [0, *ends]
    if storage.is_remote and expected[-1] > commits[-1].number:
        expected.pop()  # A file begins there with its first commit.
    assert [int(name.removesuffix(".log")) for name in names(storage)] == expected
    journal.close()


@pytest.mark.every_store
def test_nothing_is_appended_after_the_end_of_a_file(log: broker.Log, storage: Storage) -> None:
    slow = log._open_writer("t")
    log.alter_topic("t", {"segment.bytes": 1})
    append(log, 2)
    ended = names(storage)[:2]
    sizes = [size(storage, name) for name in ended]
    slow.append([(0, FRAME)], Author(new_token()))
    slow.close()
    assert [size(storage, name) for name in ended] == sizes
    assert log.describe_topic("t").record_count == 3


@pytest.mark.on_disk
@pytest.mark.parametrize("state", ["missing", "empty"])
def test_a_next_file_that_was_not_made_is_made_by_the_next_writer(
    log: broker.Log, root: Path, journal: Journal, state: str
) -> None:
    log.alter_topic("t", {"segment.bytes": 1})
    append(log)
    last = files(root)[-1]
    assert last.stat().st_size == 0
    if state == "missing":
        last.unlink()
    read = len(journal.read_new())
    append(log)
    assert last.stat().st_size > 0
    assert numbers(journal) == [read, read + 1]
    journal.close()


@pytest.mark.on_disk
def test_a_torn_tail_is_waited_for_by_readers(
    log: broker.Log, root: Path, journal: Journal
) -> None:
    append(log)
    (file,) = files(root)
    before = file.stat().st_size
    append(log)
    data = file.read_bytes()
    assert numbers(journal) == [0, 1, 2]
    for length in range(before, len(data)):
        journal.seek(0, before, 2)
        file.write_bytes(data[:length])
        assert numbers(journal) == []
    file.write_bytes(data)
    assert numbers(journal) == [2]
    journal.close()


@pytest.mark.on_disk
def test_a_torn_tail_is_cut_and_kept_aside_by_the_next_writer(
    log: broker.Log, root: Path, journal: Journal
) -> None:
    append(log)
    (file,) = files(root)
    torn = file.read_bytes()[-100:-3]
    whole = file.stat().st_size
    with file.open("ab") as end:
        end.write(file.read_bytes()[:60])
    assert torn and numbers(journal) == [0, 1]
    append(log)
    assert numbers(journal) == [2]
    (aside,) = (root / DIRECTORY / "aside").iterdir()
    assert aside.read_bytes() == file.read_bytes()[:60]
    assert aside.name.startswith(f"{0:020d}-{whole}-")
    journal.close()


@pytest.mark.on_disk
def test_bytes_that_are_all_there_and_wrong_are_never_cut(log: broker.Log, root: Path) -> None:
    (file,) = files(root)
    with file.open("ab") as end:
        end.write(b"x" * 500)
    size = file.stat().st_size
    with pytest.raises(CorruptLog, match="no commit begins here"):
        append(log)
    with pytest.raises(CorruptLog):
        log.describe_topic("t")
    assert file.stat().st_size == size


@pytest.mark.on_disk
def test_a_file_shorter_than_it_was_is_damage(
    log: broker.Log, root: Path, journal: Journal
) -> None:
    append(log, 3)
    journal.read_new()
    (file,) = files(root)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CorruptLog, match="shorter than what it held"):
        journal.read_new()
    journal.close()


@pytest.mark.on_disk
def test_a_commit_of_another_topic_is_not_believed(log: broker.Log, root: Path) -> None:
    append(log)
    (file,) = files(root)
    parts, _, _ = pack(
        Kind.APPEND,
        Author(new_token()),
        incarnation=2,
        number=2,
        position=file.stat().st_size,
        time=1,
    )
    with file.open("ab") as end:
        end.write(b"".join(parts))
    with pytest.raises(CorruptLog, match="incarnation 1 is expected here"):
        log.describe_topic("t")


@pytest.mark.on_disk
def test_a_file_cut_while_later_ones_exist_is_damage_for_readers_and_writers(
    log: broker.Log, root: Path
) -> None:
    log.alter_topic("t", {"segment.bytes": 1})
    append(log, 3)
    for path in (root / DIRECTORY / "checkpoint").iterdir():
        path.unlink()
    first = files(root)[0]
    first.write_bytes(first.read_bytes()[:-5])
    with pytest.raises(CorruptLog, match="rest of the file is missing"):
        log.describe_topic("t")
    with pytest.raises(CorruptLog, match="rest of the file is missing"):
        append(log)


@pytest.mark.any_store
def test_a_reader_opened_while_others_roll_sees_no_damage(
    log: broker.Log, storage: Storage
) -> None:
    import threading

    log.alter_topic("t", {"segment.bytes": 1})
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            append(log)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = 0
        for _ in range(150):
            opened = Topic(storage, "t", 1)
            assert opened.state.ends[0] >= seen
            seen = opened.state.ends[0]
            opened.close()
    finally:
        is_over.set()
        thread.join()


@pytest.mark.on_disk  # On a store the last file stays for a while, and is read to its `delete`.
def test_a_topic_that_is_gone_is_told_from_one_that_is_damaged(
    log: broker.Log, journal: Journal
) -> None:
    journal.read_new()
    log.delete_topic("t")
    other = Journal(journal.storage, topic_home("t", 1))
    with pytest.raises(UnknownTopic, match="was deleted"):
        other.read_new()
    with pytest.raises(UnknownTopic):
        Journal(journal.storage, topic_home("never", 1)).read_new()
    journal.close()


@pytest.mark.every_store
def test_a_writer_that_holds_the_lock_sees_all_before_it_writes(log: broker.Log) -> None:
    first, second = log._open_writer("t"), log._open_writer("t")
    for number in range(20):
        writer = (first, second)[number % 2]
        appended = writer.append([(0, FRAME)], Author(new_token()))
        assert appended.number == number + 1
    first.close()
    second.close()
    assert log.describe_topic("t").record_count == 20


@pytest.mark.every_store
def test_commit_times_never_go_back(log: broker.Log, journal: Journal) -> None:
    append(log, 50)
    times = [commit.time for commit in journal.read_new()]
    assert times == sorted(times)
    journal.close()
