"""On a store: clients that were idle while others removed files, a topic, or the whole log.

They ask seldom whether what they stand on is still there; here, often.
"""

from __future__ import annotations

import time
import uuid

import pytest
from faulty_store import fresh_store
from test_remote import TRIMMED, open_on, seal_and_trim, values

import broker
from broker import ledger
from broker.storage.memory import MemoryStore

ASKS_SECONDS = 0.1
PLACE = broker.TopicPartition("t", 0)


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WRITER_ASKS_SECONDS", "_READER_ASKS_SECONDS"):
        monkeypatch.setattr(ledger, name, ASKS_SECONDS)


@pytest.fixture
def store() -> MemoryStore:
    """A store with a topic of one record."""
    made = fresh_store(uuid.uuid4().hex)
    log = open_on(made)
    log.create_topic("t", partitions=1, config=TRIMMED)
    send(log, b"0")
    return made


def send(log: broker.Log, *some: bytes) -> None:
    with log.producer() as producer:
        for value in some:
            producer.send("t", value).get(20)


def poll(consumer: broker.Consumer, timeout_ms: int = 50) -> list[bytes | None]:
    found = consumer.poll(timeout_ms=timeout_ms)
    return [record.value for records in found.values() for record in records]


def drain(consumer: broker.Consumer, count: int) -> list[bytes | None]:
    """Return so many records, and what a few polls find behind them."""
    found: list[bytes | None] = []
    while len(found) < count:
        found += poll(consumer, 2000)
    return found + [value for _ in range(3) for value in poll(consumer)]


def test_clients_whose_journal_files_were_sealed_and_removed_go_on(store: MemoryStore) -> None:
    """No piece of the file is there in which they stand, nor that file; the topic is."""
    with (
        open_on(store, grace_ms=100).producer(linger_ms=0) as producer,
        open_on(store, grace_ms=100).consumer("t", auto_offset_reset="latest") as consumer,
    ):
        producer.send("t", b"1").get(20)
        poll(consumer)
        assert consumer.position(PLACE) == 2
        seal_and_trim(store, b"2", b"3", b"4")
        time.sleep(ASKS_SECONDS)
        assert producer.send("t", b"5").get(20).offset == 5
        assert drain(consumer, 4) == [b"2", b"3", b"4", b"5"]
    assert values(open_on(store)) == {0: [b"%d" % number for number in range(6)]}


def test_an_idle_consumer_by_pattern_reads_no_record_twice(store: MemoryStore) -> None:
    """If the topic seemed removed, it would be found again, as one that has just been made."""
    with open_on(store, grace_ms=100).consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(pattern="t.*")
        assert drain(consumer, 1) == [b"0"]
        seal_and_trim(store, b"1", b"2", b"3")
        time.sleep(ASKS_SECONDS)
        assert drain(consumer, 3) == [b"1", b"2", b"3"]


def test_a_topic_deleted_long_ago_is_said_to_be_deleted_not_removed(store: MemoryStore) -> None:
    """Its journal, which says so, stays for a time of grace only."""
    log = open_on(store, grace_ms=0)
    with (
        open_on(store, grace_ms=0).producer(linger_ms=0) as producer,
        open_on(store, grace_ms=0).consumer("t", auto_offset_reset="earliest") as consumer,
    ):
        producer.send("t", b"1").get(20)
        drain(consumer, 2)
        log.delete_topic("t")
        log.create_topic("t", partitions=1)
        log.maintain()
        assert not store.entries("topics/t/1")
        time.sleep(ASKS_SECONDS)
        for call in (lambda: producer.send("t", b"2").get(20), lambda: poll(consumer, 500)):
            with pytest.raises(broker.UnknownTopic, match="was deleted; create it again"):
                call()


@pytest.mark.parametrize("is_made_again", [True, False])
def test_that_the_log_was_removed_is_said_by_every_poll(
    store: MemoryStore, is_made_again: bool
) -> None:
    """Also by those that come before it would be time to ask again."""
    with open_on(store).consumer("t", auto_offset_reset="earliest") as consumer:
        drain(consumer, 1)
        for name in store.names():
            store.delete(name)
        if is_made_again:
            log = open_on(store)
            log.create_topic("t", partitions=1)
            send(log, b"a", b"b", b"c")
        time.sleep(ASKS_SECONDS)
        for _ in range(3):
            with pytest.raises(broker.UnknownTopic, match="was removed while it was in use"):
                poll(consumer)


def test_a_handle_whose_log_another_process_made_again_mixes_no_records_of_both(
    store: MemoryStore,
) -> None:
    """Its clients live too shortly to ask later, and it remembers what had the same names."""
    old = open_on(store)
    send(old, b"old", b"old")
    assert values(old) == {0: [b"0", b"old", b"old"]}
    for name in store.names():
        store.delete(name)
    new = open_on(store)
    new.create_topic("t", partitions=1)
    send(new, *(b"new" for _ in range(6)))
    for call in (lambda: values(old), lambda: send(old, b"lost")):
        with pytest.raises(broker.UnknownTopic, match="was removed while it was in use"):
            call()
    assert values(open_on(store)) == {0: [b"new"] * 6}
