"""Checkpoints say what the journal says; any of them may be missing, damaged or too new."""

from __future__ import annotations

import logging
import shutil
import uuid
from pathlib import Path

import pytest
from faulty_store import LossyStore, fresh_store

import broker
from broker import TopicPartition, checkpoint
from broker.batch import encode_records
from broker.commit import Author
from broker.errors import CorruptLog
from broker.ledger import new_token
from broker.state import TopicState
from broker.storage import LocalStorage, RemoteStorage, Storage
from broker.storage.store import Entry
from broker.topic import Topic

pytestmark = pytest.mark.any_store

FOLDER = "topics/t/1/checkpoint"
FRAME = encode_records([None, None], [b"a", b"b"], None, [5000, 3000])


def full_state(log: broker.Log) -> TopicState:
    """A state in which every part of a state holds something."""
    log.create_topic("t", partitions=2, config={"segment.bytes": 700, "retention.ms": 5})
    writer = log._open_writer("t")
    for number in range(6):
        author = Author(new_token(), producer_id=(1 << 63) - 1, sequence=number)
        writer.append([(0, FRAME)], author, transaction=("app", number))
    writer.fence(9)
    log.delete_records({TopicPartition("t", 0): 3})
    log.create_partitions("t", 3)
    state = writer.refresh()
    writer.close()
    state.epochs.append((1, (2, 3)))
    return state


@pytest.mark.every_store
def test_a_state_comes_back_as_it_was(log: broker.Log) -> None:
    state = full_state(log)
    found, boot_id = checkpoint.decode(checkpoint.encode(state, "this boot"), "a file")
    assert found == state
    assert boot_id == "this boot"
    assert state.files and state.producers and state.transactions


def test_an_empty_state_comes_back_as_it_was() -> None:
    state = TopicState(incarnation=7)
    assert checkpoint.decode(checkpoint.encode(state, ""), "a file") == (state, "")


def test_a_changed_bit_or_a_cut_is_found() -> None:
    data = checkpoint.encode(TopicState(1, starts=[0], ends=[0]), "")
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 4
        with pytest.raises(CorruptLog):
            checkpoint.decode(bytes(damaged), "a file")
        with pytest.raises(CorruptLog):
            checkpoint.decode(data[:position], "a file")


def stored(storage: Storage) -> list[str]:
    return storage.list(FOLDER)


def put(storage: Storage, number: int, boot_id: str = "", incarnation: int = 1) -> None:
    state = TopicState(incarnation, number=number)
    data = checkpoint.encode(state, boot_id)
    checkpoint.write(storage, FOLDER, number, data, soft=bool(boot_id))


def newest(storage: Storage) -> int | None:
    state = checkpoint.read_newest(storage, FOLDER, 1, checkpoint.decode)
    return None if state is None else state.number


@pytest.mark.every_store
def test_the_newest_one_is_read(storage: Storage) -> None:
    assert newest(storage) is None
    for number in (5, 100, 20):
        put(storage, number)
    assert newest(storage) == 100


@pytest.mark.every_store
def test_two_of_each_sort_are_kept(storage: Storage) -> None:
    for number in range(1, 6):
        put(storage, number)
        put(storage, number + 10, storage.boot_id)
    assert stored(storage) == [
        f"{number:020d}{suffix}"
        for number, suffix in (
            (4, ".arrow"),
            (5, ".arrow"),
            (14, ".soft.arrow"),
            (15, ".soft.arrow"),
        )
    ]


@pytest.mark.on_disk
def test_a_soft_one_is_believed_only_in_its_own_boot(storage: Storage, root: Path) -> None:
    put(storage, 5)
    put(storage, 9, storage.boot_id)
    assert newest(storage) == 9
    assert newest(LocalStorage(str(root), boot_id="another boot")) == 5


@pytest.mark.on_disk
def test_a_damaged_one_is_passed_over_with_a_warning(
    storage: Storage, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (5, 9):
        put(storage, number)
    path = root / FOLDER / stored(storage)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert newest(storage) == 5
    assert str(path) in caplog.text


def test_one_that_newer_ones_replace_while_it_is_looked_for_leads_to_the_newest() -> None:
    """Or it would seem that there is none, and a journal from which files are gone be damaged."""
    storage = RemoteStorage(fresh_store(uuid.uuid4().hex))

    class Slow(LossyStore):
        def entries(self, path: str) -> list[Entry]:
            found = self._store.entries(path)
            while newer:
                put(storage, newer.pop())
            return found

    newer = [9, 8, 7]
    put(storage, 5)
    assert newest(RemoteStorage(Slow(storage._store))) == 9
    assert stored(storage) == [f"{number:020d}.arrow" for number in (8, 9)]


@pytest.mark.every_store
def test_one_of_another_incarnation_is_not_believed(storage: Storage) -> None:
    put(storage, 9, incarnation=2)
    put(storage, 5)
    assert newest(storage) == 5


@pytest.mark.on_disk
def test_one_that_is_there_already_is_left_as_it_is(storage: Storage, root: Path) -> None:
    put(storage, 5)
    before = (root / FOLDER / stored(storage)[0]).read_bytes()
    checkpoint.write(storage, FOLDER, 5, b"other", soft=False)
    assert (root / FOLDER / stored(storage)[0]).read_bytes() == before


def test_after_a_power_cut_only_those_of_what_is_left_stay(storage: Storage) -> None:
    for number in (5, 9):
        put(storage, number)
    put(storage, 4, storage.boot_id)
    checkpoint.drop_unsynced(storage, FOLDER, 8)
    assert stored(storage) == [f"{5:020d}.arrow"]
    checkpoint.drop_unsynced(storage, FOLDER, 5)
    assert stored(storage) == [f"{5:020d}.arrow"]


@pytest.mark.on_disk
def test_a_topic_is_the_same_from_any_checkpoint_or_none(
    log: broker.Log, storage: Storage, root: Path
) -> None:
    log.create_topic("t", config={"segment.bytes": 600, "checkpoint.commits": 3})
    for number in range(30):
        with log.producer() as producer:
            producer.send("t", b"%d" % number)
    assert len(stored(storage)) == 4
    opened = Topic(storage, "t", 1)
    expected = opened.state
    opened.close()
    for name in reversed(stored(storage)):
        (root / FOLDER / name).unlink()
        opened = Topic(storage, "t", 1)
        assert opened.state == expected
        opened.close()
    shutil.rmtree(root / FOLDER)
    opened = Topic(storage, "t", 1)
    assert opened.state == expected
    opened.close()


@pytest.mark.on_disk
def test_opening_from_a_checkpoint_does_not_read_the_files_before_it(
    log: broker.Log, root: Path
) -> None:
    log.create_topic("t", config={"segment.bytes": 600})
    for number in range(30):
        with log.producer() as producer:
            producer.send("t", b"%d" % number)
    first = sorted((root / "topics/t/1/journal").iterdir())[0]
    first.unlink()
    assert log.describe_topic("t").record_count == 30
