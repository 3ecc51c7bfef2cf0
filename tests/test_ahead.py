"""While a commit is on its way to a store, the next ones are made ready, and in order."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from faulty_store import LossyStore, fresh_store

import broker
from broker.log import Log
from broker.storage.remote import RemoteStorage
from broker.storage.store import ObjectStore

PATIENCE_SECONDS = 20


class Gate:
    """A store that holds back the commits after the first; tells when a request is asked for."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.root = store.root
        self.poll_seconds = 0.005
        self.is_known = True
        self.opened = threading.Event()
        self.opened.set()
        self.files = threading.Semaphore(0)  # Data files that are written.
        self.commits = threading.Semaphore(0)  # Commits that are asked for.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_new(self, path: str, data: bytes) -> None:
        if "/journal/" in path:
            self.commits.release()
            assert self.opened.wait(PATIENCE_SECONDS)
        self._store.put_new(path, data)

    def put_file(self, path: str, file: Any) -> None:
        self._store.put_file(path, file)
        self.files.release()

    def await_files(self, count: int) -> None:
        for _ in range(count):
            assert self.files.acquire(timeout=PATIENCE_SECONDS), "no file was written meanwhile"

    def await_commit(self) -> None:
        assert self.commits.acquire(timeout=PATIENCE_SECONDS)


@pytest.fixture
def gate() -> Gate:
    return Gate(fresh_store(uuid.uuid4().hex))


@pytest.fixture
def log(gate: Gate) -> Log:
    log = Log(RemoteStorage(gate, patience_seconds=10))  # type: ignore[arg-type]
    log.create_topic("t", partitions=1, config={"maintenance.enabled": False})
    gate.await_commit()
    return log


def large(number: int) -> pa.Table:
    """Records so many that they go to a file of their own."""
    return pa.table({"value": [b"%d" % number, bytes(1 << 20), bytes(1 << 20)]})


def values(log: Log) -> list[bytes]:
    """Return the short values, in order."""
    found: list[bytes] = []
    with log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        found += [record.value or b"" for record in consumer]
    return [value for value in found if len(value) < 100]


def test_the_next_files_are_written_while_a_commit_is_on_its_way(gate: Gate, log: Log) -> None:
    gate.opened.clear()
    with log.producer(buffer_memory=64 << 20) as producer:
        futures = [producer.send_batch("t", large(0))]
        gate.await_commit()
        futures += [producer.send_batch("t", large(number)) for number in range(1, 5)]
        gate.await_files(3)  # That of the commit on its way, and of the two behind it.
        time.sleep(0.1)
        assert not gate.files.acquire(blocking=False), "too much is under way at once"
        assert not futures[0].done()
        gate.opened.set()
        assert [future.result(20).offsets[0] for future in futures] == [
            (3 * number, 3) for number in range(5)
        ]
    assert values(log) == [b"%d" % number for number in range(5)]


def test_what_is_ready_when_its_turn_comes_is_one_commit(gate: Gate, log: Log) -> None:
    gate.opened.clear()
    before = log.describe_topic("t").commit_count
    with log.producer(buffer_memory=64 << 20) as producer:
        futures = [producer.send_batch("t", large(0))]
        gate.await_commit()
        futures += [producer.send_batch("t", large(number)) for number in (1, 2)]
        empty = producer.send_batch("t", large(9).slice(0, 0))
        gate.await_files(3)
        gate.opened.set()
        assert [one.result(20).offsets for one in futures] == [{0: (3 * n, 3)} for n in range(3)]
        assert empty.result(20).offsets == {}
    assert log.describe_topic("t").commit_count == before + 2
    assert producer.metrics()["producer-metrics"]["batch-total"] == 2
    assert values(log) == [b"0", b"1", b"2"]


def test_what_is_sent_during_a_commit_is_one_commit(gate: Gate, log: Log) -> None:
    """A buffer that still grows is not taken ahead: that would make two commits of it."""
    with log.producer() as producer:
        gate.opened.clear()
        futures = [producer.send("t", b"first")]
        gate.await_commit()
        before = log.describe_topic("t").commit_count
        for number in range(100):
            futures.append(producer.send("t", b"%d" % number))
            time.sleep(0.001)
        gate.opened.set()
        assert [future.result(20).offset for future in futures] == list(range(101))
    assert log.describe_topic("t").commit_count == before + 2


def test_a_record_of_another_topic_is_not_kept_waiting_by_large_batches(
    gate: Gate, log: Log
) -> None:
    log.create_topic("quiet", config={"maintenance.enabled": False})
    slow = gate.put_file

    def put_file_slowly(path: str, file: Any) -> None:
        time.sleep(0.05)
        slow(path, file)

    gate.put_file = put_file_slowly  # type: ignore[method-assign]
    stop = threading.Event()
    with log.producer(buffer_memory=64 << 20) as producer:

        def feed() -> None:
            while not stop.is_set():
                producer.send_batch("t", large(0))
                time.sleep(0.03)

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            time.sleep(0.5)
            for _ in range(3):
                producer.send("quiet", b"v").result(5)
        finally:
            stop.set()
            feeder.join()


def test_a_file_that_cannot_be_written_fails_its_own_batch_only(gate: Gate, log: Log) -> None:
    written, whole = itertools.count(), gate.put_file

    def refuse_the_third(path: str, file: Any) -> None:
        if next(written) == 2:
            gate.files.release()
            raise broker.StorageError(f"{path}: not allowed")
        whole(path, file)

    gate.put_file = refuse_the_third  # type: ignore[method-assign]
    gate.opened.clear()
    with log.producer(buffer_memory=64 << 20) as producer:
        futures = []
        for number in range(3):
            futures.append(producer.send_batch("t", large(number)))
            gate.await_files(1)
            if number == 0:
                gate.await_commit()
        time.sleep(0.1)
        gate.opened.set()
        assert isinstance(futures[2].exception(20), broker.StorageError)
        assert [one.result(20).offsets for one in futures[:2]] == [{0: (0, 3)}, {0: (3, 3)}]
    assert values(log) == [b"0", b"1"]


def test_a_batch_behind_one_that_cannot_be_written_is_committed(gate: Gate, log: Log) -> None:
    with log.producer(buffer_memory=64 << 20) as producer:
        gate.opened.clear()
        first = producer.send("t", b"first")
        gate.await_commit()

        def refuse(path: str, file: Any) -> None:
            gate.files.release()
            raise broker.StorageError(f"{path}: not allowed")

        gate.put_file = refuse  # type: ignore[method-assign]
        refused = producer.send_batch("t", large(1))
        gate.await_files(1)
        behind = producer.send_batch("t", pa.table({"value": [b"behind"]}))
        time.sleep(0.1)
        gate.opened.set()
        assert isinstance(refused.exception(20), broker.StorageError)
        assert (first.result(20).offset, behind.result(20).offsets) == (0, {0: (1, 1)})
    assert values(log) == [b"first", b"behind"]


def test_a_callback_may_close_its_producer(log: Log) -> None:
    producer = log.producer()
    closed = threading.Event()

    def close(_: object) -> None:
        producer.close()
        closed.set()

    future = producer.send("t", b"v").add_callback(close)
    assert future.result(20).offset == 0
    assert closed.wait(10)
    with pytest.raises(broker.Closed):
        producer.send("t", b"late")
    assert values(log) == [b"v"]


def test_small_and_large_units_keep_their_order_whatever_takes_how_long() -> None:
    dice = random.Random(5)

    class Uneven(LossyStore):
        """Some requests are slow, and some get no answer."""

        def put_file(self, path: str, file: Any) -> None:
            time.sleep(dice.random() * 0.05)
            if dice.random() < 0.2:
                raise broker.errors.StoreUnavailable(f"{path}: the connection broke")
            self._store.put_file(path, file)

    log = Log(RemoteStorage(Uneven(fresh_store(uuid.uuid4().hex), share=0.1), patience_seconds=10))  # type: ignore[arg-type]
    log.create_topic("t", partitions=1, config={"segment.bytes": 2000})
    with log.producer(buffer_memory=64 << 20) as producer:
        for number in range(60):
            if number % 3:
                producer.send_batch("t", large(number))
            else:
                producer.send("t", b"%d" % number)
        producer.flush(60)
    assert values(log) == [b"%d" % number for number in range(60)]
    assert log.verify("t").is_sound


def test_what_is_ready_behind_one_that_meets_a_deleted_topic_is_made_anew(
    gate: Gate, log: Log
) -> None:
    other = Log(RemoteStorage(gate._store))
    with log.producer(buffer_memory=64 << 20) as producer:
        producer.send_batch("t", large(0)).result(20)
        gate.await_commit()
        gate.await_files(1)
        gate.opened.clear()
        futures = [producer.send_batch("t", large(1))]
        gate.await_commit()
        futures.append(producer.send_batch("t", large(2)))
        gate.await_files(2)
        other.delete_topic("t")  # Its commit is first where the one on its way will be put.
        other.create_topic("t", partitions=1)
        gate.opened.set()
        assert isinstance(futures[0].exception(20), broker.UnknownTopic)
        assert futures[1].result(20).offsets == {0: (0, 3)}
    assert values(log) == [b"2"]
    assert log.verify("t").is_sound


def test_a_transaction_does_not_go_to_a_topic_that_took_the_place_of_its_own(
    gate: Gate, log: Log
) -> None:
    """Its file lies in the folder of the topic that is gone: nobody could read the commit."""
    with log.producer(buffer_memory=64 << 20) as producer:
        with pytest.raises(broker.TransactionError, match="deleted and made again"):  # noqa: SIM117
            with producer.transaction():
                for number in range(6):
                    producer.send_batch("t", large(number))
                log.delete_topic("t")
                log.create_topic("t", partitions=1)
                # Somebody else's send through the same producer finds the topic gone, and opens
                # the new one.
                producer._sender._forget("t")
        producer.send("t", b"after").result(20)
    assert values(log) == [b"after"]
    assert log.verify("t").is_sound


def test_of_what_was_ready_for_a_deleted_topic_only_transactions_fail(gate: Gate, log: Log) -> None:
    other = Log(RemoteStorage(gate._store))
    with log.producer(buffer_memory=64 << 20) as producer:
        producer.send_batch("t", large(0)).result(20)
        gate.await_commit()
        gate.await_files(1)
        gate.opened.clear()
        first = producer.send_batch("t", large(1))
        gate.await_commit()
        producer.begin_transaction()
        inside = producer.send("t", b"inside")
        ending = threading.Thread(target=suppressing, args=(producer.commit_transaction,))
        ending.start()
        behind = producer.send_batch("t", large(2))
        gate.await_files(2)
        other.delete_topic("t")
        other.create_topic("t", partitions=1)
        gate.opened.set()
        ending.join(20)
        assert isinstance(first.exception(20), broker.UnknownTopic)
        assert isinstance(inside.exception(20), broker.TransactionError)
        assert behind.result(20).offsets == {0: (0, 3)}
    assert values(log) == [b"2"]


def suppressing(act: Callable[[], None]) -> None:
    with contextlib.suppress(broker.LogError):
        act()


def test_closing_in_bounded_time_also_fails_what_was_ready(gate: Gate, log: Log) -> None:
    producer = log.producer(buffer_memory=64 << 20)
    gate.opened.clear()
    futures = [producer.send_batch("t", large(0))]
    gate.await_commit()
    futures += [producer.send_batch("t", large(number)) for number in range(1, 5)]
    gate.await_files(3)
    begun = time.monotonic()
    producer.close(timeout=0.1)
    assert time.monotonic() - begun < 5
    assert all(isinstance(one.exception(0), broker.Closed) for one in futures[3:])
    gate.opened.set()
    assert futures[0].result(20).offsets == {0: (0, 3)}
    assert all(isinstance(one.exception(20), broker.Closed) for one in futures[1:3])
    assert values(log) == [b"0"]
