"""Producers: futures, batching, memory, order, codecs, times, retries and transactions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import broker
from broker import ConsumerRecord, RecordMetadata, TopicPartition, ledger
from broker.batch import CODEC_NAMES, MAGIC
from broker.config import CODECS
from broker.storage import LocalStorage

pytestmark = pytest.mark.any_store

TABLE = pa.table({"value": [b"1", b"2", b"3"]})


@contextmanager
def held_lock(storage: LocalStorage, topic: str = "t") -> Iterator[None]:
    """Hold a topic's lock as another process would: every commit waits."""
    lock = storage.lock(topic)
    lock.acquire(timeout_ms=5000)
    try:
        yield
    finally:
        lock.close()


def read_all(log: broker.Log, topic: str = "t") -> list[ConsumerRecord]:
    found: list[ConsumerRecord] = []
    with log.consumer(topic, auto_offset_reset="earliest", max_poll_records=100_000) as consumer:
        while polled := consumer.poll(0):
            for records in polled.values():
                found += records
    return found


def values(log: broker.Log, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in read_all(log, topic)]


def commit_count(log: broker.Log) -> int:
    return log.describe_topic("t").commit_count


@pytest.fixture(autouse=True)
def topic(log: broker.Log) -> None:
    log.create_topic("t")


# Futures.


def test_a_future_tells_where_the_record_is(log: broker.Log) -> None:
    with log.producer() as producer:
        first = producer.send("t", b"a", timestamp_ms=17).result(10)
        second = producer.send("t", b"b", timestamp_ms=5).get(10)
    assert first == RecordMetadata("t", 0, 0, 17)
    assert second == RecordMetadata("t", 0, 1, 5)


@pytest.mark.every_store
def test_futures_of_one_batch_have_the_offsets_of_their_records(log: broker.Log) -> None:
    log.create_topic("many", partitions=3)
    with log.producer(linger_ms=10_000) as producer:
        futures = [producer.send("many", b"%d" % n, partition=n % 3) for n in range(30)]
    found = {(r.partition, r.offset): r.value for r in read_all(log, "many")}
    for number, future in enumerate(futures):
        place = future.result()
        assert found[place.partition, place.offset] == b"%d" % number


@pytest.mark.every_store
def test_a_batchs_future_tells_the_first_offset_and_count_in_each_partition(
    log: broker.Log,
) -> None:
    log.create_topic("many", partitions=3)
    table = pa.table({"value": [b"a", b"b", b"c", b"d"], "partition": [2, 0, 2, 2]})
    with log.producer() as producer:
        producer.send("many", b"x", partition=2)
        placed = producer.send_batch("many", table).result(10)
    assert placed.offsets == {0: (0, 1), 2: (1, 3)}
    assert [r.value for r in read_all(log, "many") if r.partition == 2] == [b"x", b"a", b"c", b"d"]


@pytest.mark.on_disk
def test_a_future_is_pending_until_its_commit(log: broker.Log, storage: LocalStorage) -> None:
    with log.producer() as producer:
        with held_lock(storage):
            future = producer.send("t", b"v")
            with pytest.raises(TimeoutError, match="not committed within"):
                future.result(timeout=0.05)
            assert (future.done(), future.succeeded(), future.failed()) == (False, False, False)
        assert future.result(10).offset == 0
        assert (future.done(), future.succeeded(), future.failed()) == (True, True, False)
        assert future.exception() is None


def test_callbacks_get_the_place_and_errbacks_the_error(log: broker.Log) -> None:
    placed: list[Any] = []
    failed: list[Any] = []
    with log.producer(partitioner=lambda key, every, available: 0) as producer:
        future = producer.send("t", b"v")
        assert future.add_callback(placed.append) is future
        future.add_errback(failed.append)
        future.result(10)
    future.add_callback(lambda extra, place: placed.append((extra, place)), "late")
    place = future.result()
    assert placed == [place, ("late", place)]
    assert failed == []


def test_an_errback_gets_the_error(log: broker.Log) -> None:
    failed: list[BaseException] = []
    log.create_topic("many", partitions=2)
    with log.producer(partitioner=lambda key, every, available: 9) as producer:
        future = producer.send("many", b"v").add_errback(failed.append)
        future.add_callback(lambda place: failed.append(KeyError()))
        error = future.exception(10)
        producer.flush()
    assert isinstance(error, broker.UnknownPartition)
    assert failed == [error]
    assert future.failed()


def test_a_callback_that_fails_does_not_stop_the_others(log: broker.Log) -> None:
    placed: list[Any] = []
    with log.producer() as producer:
        future = producer.send("t", b"v")
        future.add_callback(lambda place: 1 / 0).add_callback(placed.append)
        producer.send("t", b"w").result(10)
    assert placed == [future.result()]


# Flushing, lingering, batching.


def test_flush_returns_when_all_is_committed(log: broker.Log) -> None:
    with log.producer(linger_ms=60_000) as producer:
        futures = [producer.send("t", b"v") for _ in range(100)]
        batch = producer.send_batch("t", TABLE)
        producer.flush()
        assert all(future.done() for future in [*futures, batch])
        assert log.describe_topic("t").record_count == 103


@pytest.mark.on_disk
def test_flush_says_when_it_took_too_long(log: broker.Log, storage: LocalStorage) -> None:
    with log.producer() as producer:
        with held_lock(storage):
            future = producer.send("t", b"v")
            with pytest.raises(TimeoutError, match="flush"):
                producer.flush(timeout=0.05)
        producer.flush()
        assert future.done()


def test_lingering_records_become_one_commit(log: broker.Log) -> None:
    before = commit_count(log)
    with log.producer(linger_ms=60_000) as producer:
        for _ in range(500):
            producer.send("t", b"v")
    assert commit_count(log) == before + 1


def test_a_record_lingers_no_longer_than_it_may(log: broker.Log) -> None:
    with log.producer(linger_ms=100) as producer:
        begun = time.monotonic()
        producer.send("t", b"v").result(30)
        assert 0.09 <= time.monotonic() - begun < 10


def test_a_full_batch_does_not_linger(log: broker.Log) -> None:
    before = commit_count(log)
    with log.producer(linger_ms=60_000, batch_size=10_000) as producer:
        futures = [producer.send("t", b"v" * 1000) for _ in range(100)]
        futures[80].result(10)
        producer.flush()
        sent = commit_count(log) - before
    # On a store the buffers grow while others are sent, and there are fewer commits.
    fewest = 2 if log.root.startswith("memory:") else 10
    assert fewest <= sent <= 13


@pytest.mark.every_store
def test_what_is_sent_to_a_topic_keeps_its_order_over_records_and_batches(log: broker.Log) -> None:
    with log.producer(linger_ms=60_000) as producer:
        producer.send("t", b"first")
        producer.send_batch("t", TABLE)
        producer.send("t", b"last")
    assert values(log) == [b"first", b"1", b"2", b"3", b"last"]


def test_each_threads_records_keep_their_order(log: broker.Log) -> None:
    def work(name: int) -> None:
        for number in range(500):
            producer.send("t", b"%d %d" % (name, number))

    with log.producer(batch_size=2000) as producer:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [tuple(map(int, value.split())) for value in values(log) if value is not None]
    for name in range(4):
        assert [number for who, number in found if who == name] == list(range(500))


# Memory.


@pytest.mark.on_disk
def test_full_memory_blocks_and_then_refuses(log: broker.Log, storage: LocalStorage) -> None:
    with log.producer(buffer_memory=20_000, batch_size=1000, max_block_ms=200) as producer:
        with held_lock(storage):
            taken = 0
            with pytest.raises(broker.BufferExhausted, match="buffer_memory=20000") as caught:
                while taken < 100:
                    begun = time.monotonic()
                    producer.send("t", b"v" * 1000)
                    taken += 1
            assert time.monotonic() - begun >= 0.19
            assert caught.value.retriable
            assert 10 < taken <= 20
        producer.flush()
        assert producer.send("t", b"after").result(10).offset == taken


@pytest.mark.on_disk
def test_a_batch_waits_for_room_and_is_then_refused(log: broker.Log, storage: LocalStorage) -> None:
    table = pa.table({"value": [b"v" * 3000]})
    with log.producer(buffer_memory=5000, max_block_ms=100) as producer:
        with held_lock(storage):
            producer.send_batch("t", table)
            with pytest.raises(broker.BufferExhausted):
                producer.send_batch("t", table)
    assert len(values(log)) == 1


@pytest.mark.on_disk
def test_a_blocked_send_goes_on_when_there_is_room(log: broker.Log, storage: LocalStorage) -> None:
    with log.producer(buffer_memory=5000, max_block_ms=30_000) as producer:
        with held_lock(storage):
            for _ in range(3):
                producer.send("t", b"v" * 1000)
            sent: list[Any] = []
            thread = threading.Thread(
                target=lambda: sent.append(producer.send("t", b"late" * 1000))
            )
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join(30)
        assert sent[0].result(10).offset == 3


@pytest.mark.on_disk
def test_a_blocked_send_does_not_wait_for_others_to_linger(
    log: broker.Log, storage: LocalStorage
) -> None:
    log.create_topic("other")
    options = {"linger_ms": 60_000, "buffer_memory": 10_000, "max_block_ms": 10_000}
    with log.producer(**options) as producer:
        with held_lock(storage):
            producer.send_batch("t", TABLE)
            producer.send("other", b"v" * 8000)
            sent: list[Any] = []
            thread = threading.Thread(
                target=lambda: sent.append(producer.send("other", b"w" * 8000))
            )
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join(5)
        assert sent, "the buffer that filled the memory lingered on"


def test_a_record_larger_than_all_memory_is_refused(log: broker.Log) -> None:
    with log.producer(buffer_memory=1000) as producer:
        with pytest.raises(broker.RecordTooLarge, match="buffer_memory=1000"):
            producer.send("t", b"v" * 1000)


def test_a_batch_larger_than_all_memory_goes_alone(log: broker.Log) -> None:
    table = pa.table({"value": [b"v" * 100] * 100})
    with log.producer(buffer_memory=1000, batch_size=100) as producer:
        assert producer.send_batch("t", table).result(10).offsets == {0: (0, 100)}
        assert producer.send_batch("t", table).result(10).offsets == {0: (100, 100)}


# What is stored.


def frame_codecs(root: Path) -> list[str]:
    data = b"".join(path.read_bytes() for path in sorted(root.glob("topics/t/1/journal/*.log")))
    found, at = [], data.find(MAGIC)
    while at >= 0:
        found.append(CODEC_NAMES[data[at + 9]])
        at = data.find(MAGIC, at + 1)
    return found


@pytest.mark.on_disk
@pytest.mark.parametrize("codec", CODECS)
def test_records_are_kept_in_the_producers_codec(log: broker.Log, root: Path, codec: str) -> None:
    with log.producer(compression_type=codec) as producer:
        producer.send("t", b"v" * 1000)
        producer.send_batch("t", TABLE)
    assert frame_codecs(root) == [codec, codec]
    assert values(log) == [b"v" * 1000, b"1", b"2", b"3"]


@pytest.mark.on_disk
def test_a_topics_codec_goes_before_the_producers(log: broker.Log, root: Path) -> None:
    log.alter_topic("t", {"compression.type": "lz4"})
    with log.producer(compression_type="gzip") as producer:
        producer.send("t", b"v")
    assert frame_codecs(root) == ["lz4"]


def test_everything_a_record_has_comes_back(log: broker.Log) -> None:
    headers = [("h", b"1"), ("schlüssel", b""), ("h", b"2")]
    with log.producer(linger_ms=60_000) as producer:
        producer.send("t", b"v", key=b"k", headers=headers, timestamp_ms=5)
        producer.send("t", None, key=b"", headers=[], timestamp_ms=4)
        producer.send("t", bytearray(b"v"), key=memoryview(b"k"), timestamp_ms=3)
    assert read_all(log) == [
        ConsumerRecord("t", 0, 0, 5, 0, b"k", b"v", headers),
        ConsumerRecord("t", 0, 1, 4, 0, b"", None, []),
        ConsumerRecord("t", 0, 2, 3, 0, b"k", b"v", []),
    ]


def test_serializers_make_bytes_of_anything(log: broker.Log) -> None:
    options = {"key_serializer": str.encode, "value_serializer": lambda n: b"%d" % n}
    with log.producer(**options) as producer:
        producer.send("t", 17, key="k")
    assert [(r.key, r.value) for r in read_all(log)] == [(b"k", b"17")]


def test_a_serializer_that_fails_fails_the_call(log: broker.Log) -> None:
    with log.producer(value_serializer=lambda value: value.encode()) as producer:
        with pytest.raises(AttributeError):
            producer.send("t", 17)
        producer.send("t", "v").result(10)
    assert values(log) == [b"v"]


def test_without_a_timestamp_a_record_gets_the_time_of_its_send(log: broker.Log) -> None:
    before = time.time_ns() // 1_000_000
    with log.producer() as producer:
        stamp = producer.send("t", b"v").result(10).timestamp
        producer.send_batch("t", TABLE)
    after = time.time_ns() // 1_000_000
    found = read_all(log)
    assert found[0].timestamp == stamp
    assert all(before <= record.timestamp <= after for record in found)
    assert {record.timestamp_type for record in found} == {0}


def test_with_log_append_time_records_get_the_time_of_their_commit(log: broker.Log) -> None:
    log.alter_topic("t", {"message.timestamp.type": "LogAppendTime"})
    before = time.time_ns() // 1_000_000
    with log.producer(linger_ms=60_000) as producer:
        futures = [producer.send("t", b"v", timestamp_ms=stamp) for stamp in (5, 9)]
        producer.flush()
        batch = producer.send_batch("t", TABLE).result(10)
    found = read_all(log)
    assert [r.timestamp for r in found[:2]] == [f.result().timestamp for f in futures]
    assert [r.timestamp for r in found[2:]] == [batch.timestamp] * 3
    assert before <= found[0].timestamp <= found[4].timestamp <= time.time_ns() // 1_000_000
    assert {record.timestamp_type for record in found} == {1}


# Columns.


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(),
        pa.string(),
        pa.large_binary(),
        pa.large_string(),
        pa.binary(1),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_a_batch_takes_all_kinds_of_bytes(log: broker.Log, kind: pa.DataType) -> None:
    texts = ["1", "2", "3", "1"]
    made = pa.array(texts if "string" in str(kind) else [one.encode() for one in texts])
    column = made.dictionary_encode() if pa.types.is_dictionary(kind) else made.cast(kind)
    with log.producer() as producer:
        producer.send_batch("t", pa.table({"value": column, "key": column}))
    assert [(r.key, r.value) for r in read_all(log)] == [(t.encode(), t.encode()) for t in texts]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2], pa.int64()),
        pa.array([1, 2], pa.uint32()),
        pa.array([1, 2], pa.timestamp("ms")),
        pa.array([1_000, 2_000], pa.timestamp("us", tz="Europe/Berlin")),
        pa.array([1_000_000, 2_000_000], pa.timestamp("ns")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_batch_takes_all_kinds_of_times(log: broker.Log, column: pa.Array) -> None:
    with log.producer() as producer:
        producer.send_batch("t", pa.table({"value": [b"a", b"b"], "timestamp": column}))
    assert [record.timestamp for record in read_all(log)] == [1, 2]


def test_times_before_1970_are_refused_one_by_one_and_in_a_batch(log: broker.Log) -> None:
    times = pa.array([5, None, -1], pa.int64())
    with log.producer() as producer:
        with pytest.raises(broker.InvalidRecord, match="since 1970"):
            producer.send("t", b"v", timestamp_ms=-1)
        with pytest.raises(
            broker.InvalidRecord, match="row 2 of column 'timestamp' for 't' .*1970"
        ):
            producer.send_batch("t", pa.table({"value": [b"a", b"b", b"c"], "timestamp": times}))
    assert values(log) == []


def test_a_batch_carries_headers_and_fills_missing_times(log: broker.Log) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.array([[("h", b"1")], None], kind)
    stamps = pa.array([5, None], pa.int64())
    before = time.time_ns() // 1_000_000
    with log.producer() as producer:
        producer.send_batch(
            "t", pa.table({"value": [b"a", None], "headers": headers, "timestamp": stamps})
        )
    first, second = read_all(log)
    assert (first.headers, first.timestamp, first.value) == ([("h", b"1")], 5, b"a")
    assert (second.headers, second.value) == ([], None)
    assert second.timestamp >= before


def test_an_empty_batch_commits_nothing(log: broker.Log) -> None:
    before = commit_count(log)
    with log.producer() as producer:
        assert producer.send_batch("t", TABLE.slice(0, 0)).result(10).offsets == {}
    assert commit_count(log) == before


def test_a_batch_of_many_chunks_is_one_commit(log: broker.Log) -> None:
    before = commit_count(log)
    with log.producer() as producer:
        producer.send_batch("t", pa.concat_tables([TABLE] * 5))
    assert commit_count(log) == before + 1
    assert values(log) == [b"1", b"2", b"3"] * 5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"valu": [b"v"]}, "did you mean 'value'"),
        ({"key": [b"k"]}, "one column named 'value'"),
        ({"value": [1]}, "'value' for 't' is int64; it must be binary or string"),
        ({"value": [b"v"], "key": [1.5]}, "'key' for 't' is double"),
        ({"value": [b"v"], "headers": ["h"]}, "'headers' for 't' is string"),
        ({"value": [b"v"], "headers": [[1]]}, "'headers'"),
        ({"value": [b"v"], "timestamp": ["now"]}, "'timestamp' for 't' is string"),
        ({"value": [b"v"], "timestamp": [1 << 62]}, "'timestamp' for 't' does not fit"),
        ({"value": [b"v"], "partition": ["0"]}, "'partition' for 't' is string"),
    ],
)
def test_a_batch_with_wrong_columns_is_refused(
    log: broker.Log, columns: dict[str, list[Any]], message: str
) -> None:
    with log.producer() as producer, pytest.raises(broker.InvalidRecord, match=message):
        producer.send_batch("t", pa.table(columns))
    assert values(log) == []


def test_a_batch_that_is_no_table_is_refused(log: broker.Log) -> None:
    with log.producer() as producer, pytest.raises(broker.InvalidRecord, match="not list"):
        producer.send_batch("t", [b"v"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"value": "text"},
        {"value": 17},
        {"value": b"v", "key": "text"},
        {"value": b"v", "headers": [("h", "text")]},
        {"value": b"v", "headers": [(b"h", b"1")]},
        {"value": b"v", "headers": {"h": b"1"}},
        {"value": b"v", "headers": [("\ud800", b"1")]},
        {"value": b"v", "headers": 5},
        {"value": b"v", "timestamp_ms": -1},
        {"value": b"v", "timestamp_ms": 1.5},
        {"value": b"v", "timestamp_ms": 1 << 60},
        {"value": b"v", "timestamp_ms": True},
    ],
    ids=repr,
)
def test_a_record_of_wrong_types_is_refused(log: broker.Log, arguments: dict[str, Any]) -> None:
    with log.producer() as producer:
        with pytest.raises(broker.InvalidRecord):
            producer.send("t", **arguments)
        producer.send("t", b"good")
    assert values(log) == [b"good"]


def test_a_record_over_the_topics_limit_is_refused(log: broker.Log) -> None:
    log.alter_topic("t", {"max.message.bytes": 100})
    with log.producer() as producer:
        for extra in ({"key": b"k"}, {"headers": [("h", b"")]}):
            with pytest.raises(broker.RecordTooLarge, match="101 bytes.*max.message.bytes=100"):
                producer.send("t", b"v" * 100, **extra)
        with pytest.raises(broker.RecordTooLarge):
            producer.send_batch("t", pa.table({"value": [b"", b"v" * 100], "key": [b"k", b"k"]}))
        producer.send("t", b"v" * 100)
        producer.send_batch("t", pa.table({"value": [b"v" * 60, b"w" * 100]}))
    assert [len(value or b"") for value in values(log)] == [100, 60, 100]


def test_a_raised_limit_is_noticed(log: broker.Log) -> None:
    log.alter_topic("t", {"max.message.bytes": 10})
    with log.producer() as producer:
        producer.send("t", b"small").result(10)
        with pytest.raises(broker.RecordTooLarge):
            producer.send("t", b"v" * 100)
        log.alter_topic("t", {"max.message.bytes": 1000})
        with pytest.raises(broker.RecordTooLarge, match="max.message.bytes=10;|=1000"):
            producer.send("t", b"v" * 1001)
        assert producer.send("t", b"v" * 100).result(10).offset == 1


def test_a_compacted_topic_needs_keys(log: broker.Log) -> None:
    log.create_topic("compacted", config={"cleanup.policy": "compact"})
    with log.producer() as producer:
        with pytest.raises(broker.InvalidRecord, match="every record needs a key"):
            producer.send("compacted", b"v")
        with pytest.raises(broker.InvalidRecord, match="every record needs a key"):
            producer.send_batch("compacted", pa.table({"value": [b"v"] * 2, "key": [b"k", None]}))
        producer.send("compacted", None, key=b"k").result(10)
    assert values(log, "compacted") == [None]


# Topics that come and go; producers that are closed.


def test_an_unknown_topic_fails_the_call(log: broker.Log) -> None:
    with log.producer() as producer:
        with pytest.raises(broker.UnknownTopic, match="create_topic"):
            producer.send("none", b"v")
        with pytest.raises(broker.UnknownTopic, match="create_topic"):
            producer.send_batch("none", TABLE)


def test_a_topic_made_again_is_found_after_one_failure(log: broker.Log) -> None:
    with log.producer() as producer:
        producer.send("t", b"old").result(10)
        log.delete_topic("t")
        with pytest.raises(broker.UnknownTopic):
            producer.send("t", b"lost").result(10)
        with pytest.raises(broker.UnknownTopic):
            producer.send("t", b"lost").result(10)
        log.create_topic("t", partitions=2)
        assert producer.send("t", b"new", partition=1).result(10).offset == 0
        assert producer.partitions_for("t") == {0, 1}
    assert values(log) == [b"new"]


@pytest.mark.every_store
@pytest.mark.parametrize("is_made_again", [True, False])
def test_nothing_is_acknowledged_into_a_log_that_was_removed(
    log: broker.Log,
    root: Path | str,
    remove_log: Callable[[], None],
    is_made_again: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "_WRITER_ASKS_SECONDS", 1.0)  # By itself it asks a store seldom.
    with log.producer() as producer:
        producer.send("t", b"old").result(10)
        producer.send("t", b"old").result(10)
        remove_log()
        if is_made_again:
            log = broker.open(root)
            log.create_topic("t")
        time.sleep(1.1)
        with pytest.raises(broker.UnknownTopic, match="removed while it was in use"):
            producer.send("t", b"lost").result(10)
        if not is_made_again:
            with pytest.raises(broker.UnknownTopic):
                producer.send("t", b"lost").result(10)
            log = broker.open(root)
            log.create_topic("t")
        assert producer.send("t", b"new").result(10).offset == 0
    assert values(log) == [b"new"]


@pytest.mark.parametrize("end", [sys.exit, lambda *_: 1 / 0])
def test_a_callback_that_fails_or_would_end_the_process_leaves_others_alone(
    log: broker.Log, end: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with log.producer(linger_ms=50) as producer:
        first = producer.send("t", b"1").add_callback(end)
        same = producer.send("t", b"2")
        assert [first.result(10).offset, same.result(10).offset] == [0, 1]
        assert producer.send("t", b"3").result(10).offset == 2
    assert values(log) == [b"1", b"2", b"3"]
    assert "a callback of send() failed" in caplog.text


def test_closing_sends_what_is_left(log: broker.Log) -> None:
    producer = log.producer(linger_ms=60_000)
    future = producer.send("t", b"v")
    producer.close()
    producer.close()
    assert future.result(0).offset == 0


def test_a_closed_producer_refuses_everything(log: broker.Log) -> None:
    producer = log.producer()
    producer.close()
    for call in (
        lambda: producer.send("t", b"v"),
        lambda: producer.send_batch("t", TABLE),
        lambda: producer.flush(),
        lambda: producer.begin_transaction(),
        lambda: producer.partitions_for("t"),
    ):
        with pytest.raises(broker.Closed, match="producer is closed"):
            call()


@pytest.mark.on_disk
def test_closing_in_bounded_time_fails_what_was_not_sent(
    log: broker.Log, storage: LocalStorage
) -> None:
    producer = log.producer(batch_size=1, request_timeout_ms=1000)
    with held_lock(storage):
        futures = [producer.send("t", b"v") for _ in range(5)]
        begun = time.monotonic()
        producer.close(timeout=0.1)
        assert time.monotonic() - begun < 5
        assert all(isinstance(one.exception(10), broker.LogError) for one in futures)
    assert values(log) == []


@pytest.mark.on_disk
def test_a_process_that_ends_sends_what_is_left(log: broker.Log, root: Path) -> None:
    code = (
        "import broker, sys\n"
        "producer = broker.open(sys.argv[1]).producer(linger_ms=60_000)\n"
        "producer.send('t', b'last words')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True, timeout=60)
    assert values(log) == [b"last words"]


@pytest.mark.on_disk
def test_what_a_process_sends_at_its_end_may_end_a_file(log: broker.Log, root: Path) -> None:
    log.alter_topic("t", {"segment.bytes": 1000})
    code = (
        "import atexit, sys\n"
        "futures = []\n"
        # The last that is done: what imports register later comes before.
        "atexit.register(lambda: print([one.result(0).offset for one in futures]))\n"
        "import broker\n"
        "log = broker.open(sys.argv[1])\n"
        "producer = log.producer(linger_ms=60_000)\n"
        "futures += [producer.send('t', b'x' * 1000) for _ in range(3)]\n"
    )
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[0, 1, 2]\n", "")
    assert values(log) == [b"x" * 1000] * 3


def test_an_unknown_option_suggests_the_nearest(log: broker.Log) -> None:
    with pytest.raises(broker.InvalidOption, match="did you mean 'linger_ms'"):
        log.producer(linger=5)


@pytest.mark.parametrize(
    "option",
    [
        {"linger_ms": -1},
        {"batch_size": 0},
        {"compression_type": "zip"},
        {"partitioner": "nearest"},
        {"durability": "hope"},
        {"transactional_id": ""},
        {"key_serializer": "utf-8"},
    ],
    ids=repr,
)
def test_a_wrong_option_is_named(log: broker.Log, option: dict[str, Any]) -> None:
    with pytest.raises(broker.InvalidOption, match=next(iter(option))):
        log.producer(**option)


def test_records_sent_with_fsync_are_committed(log: broker.Log) -> None:
    with log.producer(durability="fsync") as producer:
        assert [producer.send("t", b"v").result(10).offset for _ in range(3)] == [0, 1, 2]


# Retries.


@pytest.mark.on_disk
def test_a_commit_that_had_to_wait_is_there_once(log: broker.Log, storage: LocalStorage) -> None:
    with log.producer(request_timeout_ms=50) as producer:
        with held_lock(storage):
            future = producer.send("t", b"v")
            with pytest.raises(TimeoutError):
                future.result(0.3)
        assert future.result(10).offset == 0
    assert values(log) == [b"v"]


@pytest.mark.on_disk
def test_a_lock_held_too_long_fails_the_send_and_names_the_holder(
    log: broker.Log, storage: LocalStorage
) -> None:
    with log.producer(request_timeout_ms=50, delivery_timeout_ms=200) as producer:
        with held_lock(storage):
            error = producer.send("t", b"v").exception(10)
            assert isinstance(error, broker.LockTimeout)
            assert "pytest" in str(error)
        assert producer.send("t", b"w").result(10).offset == 0
    assert values(log) == [b"w"]


# Transactions.


def test_a_transaction_is_one_commit_over_all_partitions(log: broker.Log) -> None:
    log.create_topic("many", partitions=3)
    before = log.describe_topic("many").commit_count
    with log.producer(batch_size=200) as producer:
        with producer.transaction():
            futures = [producer.send("many", b"%d" % n, partition=n % 3) for n in range(100)]
            batch = producer.send_batch("many", TABLE)
            assert values(log, "many") == []
            assert not futures[0].done()
    assert log.describe_topic("many").commit_count == before + 1
    found = {(r.partition, r.offset): r.value for r in read_all(log, "many")}
    assert len(found) == 103
    for number, future in enumerate(futures):
        place = future.result(0)
        assert found[place.partition, place.offset] == b"%d" % number
    for partition, (first, count) in batch.result(0).offsets.items():
        assert [found[partition, first + row] for row in range(count)] == [b"1", b"2", b"3"]


def test_leaving_a_transaction_by_an_exception_sends_nothing(log: broker.Log) -> None:
    with log.producer() as producer:
        with pytest.raises(KeyError):
            with producer.transaction():
                future = producer.send("t", b"never")
                raise KeyError
        assert isinstance(future.exception(0), broker.TransactionError)
        with producer.transaction():
            producer.send("t", b"kept")
        producer.send("t", b"after")
    assert values(log) == [b"kept", b"after"]


def test_a_transaction_open_at_close_is_aborted(log: broker.Log) -> None:
    producer = log.producer()
    producer.begin_transaction()
    future = producer.send("t", b"never")
    producer.close()
    assert isinstance(future.exception(0), broker.TransactionError)
    assert values(log) == []


def test_a_producer_closed_inside_a_transaction_says_what_became_of_it(log: broker.Log) -> None:
    producer = log.producer()
    with pytest.raises(broker.TransactionError, match="is closed, and a transaction .* aborted"):
        with producer.transaction():
            producer.send("t", b"never")
            producer.close()
    producer = log.producer()
    with pytest.raises(KeyError), producer.transaction():
        producer.close()
        raise KeyError
    assert values(log) == []


def test_an_empty_transaction_commits_nothing(log: broker.Log) -> None:
    before = commit_count(log)
    with log.producer() as producer, producer.transaction():
        pass
    assert commit_count(log) == before


def test_transaction_calls_in_the_wrong_order_are_refused(log: broker.Log) -> None:
    with log.producer() as producer:
        with pytest.raises(broker.TransactionError, match="no transaction is open"):
            producer.commit_transaction()
        with pytest.raises(broker.TransactionError, match="no transaction is open"):
            producer.abort_transaction()
        producer.begin_transaction()
        with pytest.raises(broker.TransactionError, match="open already"):
            producer.begin_transaction()
        producer.abort_transaction()
        with pytest.raises(broker.TransactionError, match="needs transactional_id"):
            producer.init_transactions()


def test_a_transaction_does_not_span_topics(log: broker.Log) -> None:
    log.create_topic("other")
    with log.producer() as producer:
        with pytest.raises(broker.TransactionError, match="topic 't'.*'other'"):
            with producer.transaction():
                producer.send("t", b"a")
                producer.send("other", b"b")
    assert values(log) + values(log, "other") == []


def test_a_transactional_producer_sends_only_in_transactions(log: broker.Log) -> None:
    with log.producer(transactional_id="mine") as producer:
        producer.init_transactions()
        with pytest.raises(broker.TransactionError, match="only inside a transaction"):
            producer.send("t", b"v")
        with pytest.raises(broker.TransactionError, match="only inside a transaction"):
            producer.send_batch("t", TABLE)
        with producer.transaction():
            producer.send("t", b"v")
        with producer.transaction():
            producer.send("t", b"w")
    assert values(log) == [b"v", b"w"]


def test_a_new_owner_of_a_transactional_id_fences_the_old_one(log: broker.Log) -> None:
    old, new = (log.producer(transactional_id="mine") for _ in range(2))
    with old, new:
        with old.transaction():
            old.send("t", b"old")
        with new.transaction():
            new.send("t", b"new")
        for _ in range(2):
            with pytest.raises(broker.ProducerFenced, match="transactional_id 'mine'"):
                with old.transaction():
                    future = old.send("t", b"zombie")
            assert isinstance(future.exception(0), broker.ProducerFenced)
        with new.transaction():
            new.send("t", b"still new")
    with log.producer(transactional_id="another") as other, other.transaction():
        other.send("t", b"not concerned")
    assert values(log) == [b"old", b"new", b"still new", b"not concerned"]


def test_a_transaction_that_could_not_take_a_record_cannot_be_committed(log: broker.Log) -> None:
    log.create_topic("many", partitions=2)
    with log.producer(batch_size=1, partitioner=lambda key, every, available: 5) as producer:
        producer.begin_transaction()
        with pytest.raises(broker.UnknownPartition):
            producer.send("many", b"nowhere")
        with pytest.raises(broker.LogError):
            producer.commit_transaction()
    assert values(log, "many") == []


def test_records_of_a_transaction_that_fails_to_encode_have_futures_that_fail(
    log: broker.Log,
) -> None:
    log.create_topic("many", partitions=2)
    with log.producer(partitioner=lambda key, every, available: 5) as producer:
        with pytest.raises(broker.UnknownPartition):
            with producer.transaction():
                future = producer.send("many", b"nowhere")
        assert isinstance(future.exception(1), broker.LogError)


@pytest.mark.on_disk
def test_a_large_transaction_spills_to_a_file_that_its_commit_names(
    log: broker.Log, root: Path
) -> None:
    value = bytes(range(256)) * 2048
    with log.producer() as producer, producer.transaction():
        for number in range(40):
            producer.send("t", b"%02d" % number + value)
    assert len(list((root / "topics/t/1/data").iterdir())) == 1
    assert [(found or b"")[:2] for found in values(log)] == [b"%02d" % n for n in range(40)]
    assert all((found or b"")[2:] == value for found in values(log))


@pytest.mark.on_disk
def test_an_aborted_large_transaction_leaves_no_file(log: broker.Log, root: Path) -> None:
    with log.producer() as producer:
        with pytest.raises(KeyError):
            with producer.transaction():
                for _ in range(40):
                    producer.send("t", b"v" * (1 << 19))
                assert len(list((root / "topics/t/1/data").iterdir())) == 1
                raise KeyError
    assert list((root / "topics/t/1/data").iterdir()) == []


MEASURE = """
import broker, resource, sys
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with broker.open(sys.argv[1]).producer() as producer:
    with producer.transaction():
        producer.send("t", b"warm")
    before = peak()
    with producer.transaction():
        for _ in range(400):
            producer.send("t", b"v" * (1 << 19))
    print(peak() - before)
"""


@pytest.mark.on_disk
def test_a_large_transaction_takes_bounded_memory(log: broker.Log, root: Path) -> None:
    run = [sys.executable, "-c", MEASURE, str(root)]
    done = subprocess.run(run, check=True, timeout=120, capture_output=True, text=True)
    assert int(done.stdout) < 64 << 10, "KiB more than before, for 200 MiB of records"
    assert log.describe_topic("t").record_count == 401


def test_readers_see_a_transaction_whole_or_not_at_all(log: broker.Log) -> None:
    log.create_topic("many", partitions=2)
    seen: list[tuple[int, ...]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            parts = log.describe_topic("many").partitions
            seen.append(tuple(part.end_offset for part in parts))

    thread = threading.Thread(target=watch)
    thread.start()
    with log.producer() as producer:
        for _ in range(100):
            with producer.transaction():
                for partition in (0, 1):
                    producer.send("many", b"v", partition=partition)
    is_over.set()
    thread.join()
    assert all(first == second for first, second in seen)
    place = TopicPartition("many", 0)
    with log.consumer("many") as consumer:
        assert consumer.end_offsets([place]) == {place: 100}
