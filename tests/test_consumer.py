"""Consumers: positions, polling, waiting, iteration, patterns, times and batches."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import broker
from broker import ConsumerRecord, OffsetAndTimestamp, TopicPartition, ledger
from broker.consumer import Consumer

pytestmark = pytest.mark.any_store

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)


def fill(log: broker.Log, topic: str, count: int, partition: int = 0, first: int = 0) -> None:
    """Send records one commit each, whose values and times are their numbers."""
    with log.producer() as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, partition=partition, timestamp_ms=number)
            producer.flush()


def numbers(polled: dict[TopicPartition, list[ConsumerRecord]]) -> list[int]:
    return [int(record.value) for records in polled.values() for record in records]


def drain(consumer: Consumer) -> list[int]:
    """Return all records there are. A store is asked only now and then: see `poll.ms`."""
    found: list[int] = []
    while polled := consumer.poll(20):
        found += numbers(polled)
    return found


def earliest(log: broker.Log, *topics: str, **options: Any) -> Consumer:
    return log.consumer(*topics, auto_offset_reset="earliest", **options)


@pytest.fixture(autouse=True)
def topic(log: broker.Log) -> None:
    log.create_topic("t", partitions=2)


# Where to read.


def test_a_new_consumer_reads_only_what_comes_unless_told_otherwise(log: broker.Log) -> None:
    fill(log, "t", 3)
    with log.consumer("t") as late, earliest(log, "t") as early:
        fill(log, "t", 2, first=3)
        assert drain(late) == [3, 4]
        assert drain(early) == [0, 1, 2, 3, 4]


def test_reset_none_gives_no_records_until_a_seek(log: broker.Log) -> None:
    fill(log, "t", 3)
    with log.consumer(auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        for _ in range(2):
            with pytest.raises(broker.NoPosition, match="no position for t-0.*seek"):
                consumer.poll(0)
        with pytest.raises(broker.NoPosition):
            consumer.position(T0)
        consumer.seek(T0, 1)
        assert drain(consumer) == [1, 2]


def test_reset_none_lets_a_subscriber_seek_every_partition(log: broker.Log) -> None:
    fill(log, "t", 3)
    fill(log, "t", 2, partition=1, first=3)
    with log.consumer("t", auto_offset_reset="none") as consumer:
        consumer.seek(T0, 2)
        with pytest.raises(broker.NoPosition, match="t-1"):
            consumer.poll(0)
        consumer.seek_to_beginning(T1)
        assert sorted(drain(consumer)) == [2, 3, 4]


@pytest.mark.every_store
def test_seek_goes_anywhere_and_back(log: broker.Log) -> None:
    fill(log, "t", 10)
    with earliest(log, "t") as consumer:
        consumer.seek(T0, 7)
        assert consumer.position(T0) == 7
        assert drain(consumer) == [7, 8, 9]
        consumer.seek(T0, 4)
        assert numbers(consumer.poll(0, max_records=2)) == [4, 5]
        consumer.seek(T0, 5)
        assert drain(consumer) == [5, 6, 7, 8, 9]
        consumer.seek_to_beginning()
        assert drain(consumer) == list(range(10))
        consumer.seek_to_beginning(T0)
        consumer.seek_to_end(T0)
        assert drain(consumer) == []
        assert consumer.position(T0) == 10


@pytest.mark.parametrize("offset", [-1, 1.0, "0", None, True])
def test_a_seek_to_no_offset_is_refused(log: broker.Log, offset: Any) -> None:
    with earliest(log, "t") as consumer, pytest.raises(broker.InvalidOption, match="cannot seek"):
        consumer.seek(T0, offset)


def test_a_partition_that_is_not_assigned_has_no_position(log: broker.Log) -> None:
    with earliest(log) as consumer:
        consumer.assign([T0])
        for call in (consumer.position, consumer.pause, lambda place: consumer.seek(place, 0)):
            with pytest.raises(broker.LogError):
                call(TopicPartition("other", 0))
    with earliest(log, "t") as consumer, pytest.raises(broker.UnknownPartition):
        consumer.position(TopicPartition("t", 2))


@pytest.mark.every_store
def test_the_position_follows_what_was_given(log: broker.Log) -> None:
    fill(log, "t", 5)
    with earliest(log, "t") as consumer:
        assert consumer.position(T0) == 0
        consumer.poll(0, max_records=2)
        assert consumer.position(T0) == 2
        consumer.poll_batches(0)
        assert consumer.position(T0) == 5


def test_beginning_and_end_offsets_are_those_of_now(log: broker.Log) -> None:
    fill(log, "t", 5)
    with log.consumer() as consumer:
        assert consumer.beginning_offsets([T0, T1]) == {T0: 0, T1: 0}
        assert consumer.end_offsets([T0, T1]) == {T0: 5, T1: 0}
        log.delete_records({T0: 2})
        fill(log, "t", 1, partition=1)
        assert consumer.beginning_offsets([T0, T1]) == {T0: 2, T1: 0}
        assert consumer.end_offsets([T0, T1]) == {T0: 5, T1: 1}
        with pytest.raises(broker.UnknownPartition):
            consumer.end_offsets([TopicPartition("t", 2)])


@pytest.mark.every_store
def test_offsets_for_times_are_the_first_at_or_after_each(log: broker.Log) -> None:
    with log.producer() as producer:
        for stamp in (10, 30, 20, 40):
            producer.send("t", b"v", partition=0, timestamp_ms=stamp)
            producer.flush()
    with log.consumer() as consumer:
        answers = {time: consumer.offsets_for_times({T0: time})[T0] for time in (0, 11, 31, 41)}
        assert answers == {
            0: OffsetAndTimestamp(0, 10),
            11: OffsetAndTimestamp(1, 30),
            31: OffsetAndTimestamp(3, 40),
            41: None,
        }
        assert consumer.offsets_for_times({T0: 10, T1: 0}) == {
            T0: OffsetAndTimestamp(0, 10),
            T1: None,
        }
        log.delete_records({T0: 2})
        assert consumer.offsets_for_times({T0: 0}) == {T0: OffsetAndTimestamp(2, 20)}


# Out of range.


@pytest.mark.parametrize("offset", [1, 9], ids=["below the start", "past the end"])
def test_a_read_out_of_range_fails_until_a_seek(log: broker.Log, offset: int) -> None:
    fill(log, "t", 5)
    log.delete_records({T0: 3})
    with earliest(log) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, offset)
        for _ in range(3):
            with pytest.raises(broker.OffsetOutOfRange, match=r"it holds \[3, 5\)") as caught:
                consumer.poll(0)
            assert (caught.value.partition, caught.value.offset) == (T0, offset)
        for read in (lambda: next(consumer), lambda: next(iter(consumer))):
            for _ in range(2):
                with pytest.raises(broker.OffsetOutOfRange):
                    read()
        with pytest.raises(broker.OffsetOutOfRange):
            consumer.poll_batches(0)
        assert consumer.position(T0) == offset
        consumer.seek(T0, 3)
        assert drain(consumer) == [3, 4]


@pytest.mark.every_store
def test_records_deleted_before_they_were_read_are_reported_not_skipped(log: broker.Log) -> None:
    fill(log, "t", 5)
    with earliest(log, "t", max_partition_fetch_bytes=1) as consumer:
        assert numbers(consumer.poll(0)) == [0]
        log.delete_records({T0: 3})
        with pytest.raises(broker.OffsetOutOfRange):
            drain(consumer)


# Polling.


def test_poll_gives_no_more_than_asked_for_and_loses_nothing(log: broker.Log) -> None:
    with log.producer(linger_ms=60_000) as producer:
        for number in range(100):
            producer.send("t", b"%d" % number, partition=0)
    with earliest(log, "t", max_poll_records=30) as consumer:
        sizes = [len(numbers(consumer.poll(0))) for _ in range(5)]
        assert sizes == [30, 30, 30, 10, 0]
        consumer.seek_to_beginning()
        found = []
        while polled := consumer.poll(0, max_records=7):
            assert len(numbers(polled)) <= 7
            found += numbers(polled)
        assert found == list(range(100))
        with pytest.raises(broker.InvalidOption, match="max_records"):
            consumer.poll(0, max_records=0)


def test_poll_without_a_timeout_returns_at_once(log: broker.Log) -> None:
    with earliest(log, "t") as consumer:
        begun = time.monotonic()
        assert consumer.poll() == {}
        assert time.monotonic() - begun < 0.5


def test_poll_waits_as_long_as_it_was_told(log: broker.Log) -> None:
    with earliest(log, "t") as consumer:
        begun = time.monotonic()
        assert consumer.poll(timeout_ms=300) == {}
        assert 0.3 <= time.monotonic() - begun < 5


def test_max_partition_fetch_bytes_bounds_a_fetch_but_lets_one_batch_through(
    log: broker.Log,
) -> None:
    with log.producer() as producer:
        for _ in range(10):
            producer.send("t", b"v" * 10_000, partition=0)
            producer.flush()
    options = {"max_partition_fetch_bytes": 25_000, "max_poll_records": 1000}
    with earliest(log, "t", **options) as consumer:
        assert [len(consumer.poll(0).get(T0, [])) for _ in range(5)] == [3, 3, 3, 1, 0]
    with earliest(log, "t", max_partition_fetch_bytes=1) as consumer:
        assert [len(consumer.poll(0)[T0]) for _ in range(10)] == [1] * 10


def test_fetch_max_bytes_bounds_a_fetch_over_all_partitions(log: broker.Log) -> None:
    for partition in (0, 1):
        fill(log, "t", 1, partition)
    with earliest(log, "t", fetch_max_bytes=1) as consumer:
        assert [len(consumer.poll(0)) for _ in range(3)] == [1, 1, 0]


def test_no_partition_starves_another(log: broker.Log) -> None:
    log.create_topic("wide", partitions=4)
    for partition in range(4):
        fill(log, "wide", 20, partition)
    with earliest(log, "wide", fetch_max_bytes=1) as consumer:
        given = [next(iter(consumer.poll(0))).partition for _ in range(40)]
    for first in range(0, 40, 4):
        assert sorted(given[first : first + 4]) == [0, 1, 2, 3]


def test_a_fetch_waits_for_fetch_min_bytes_up_to_fetch_max_wait_ms(log: broker.Log) -> None:
    fill(log, "t", 1)
    options = {"fetch_min_bytes": 1_000_000, "fetch_max_wait_ms": 300}
    with earliest(log, "t", **options) as consumer:
        begun = time.monotonic()
        assert numbers(consumer.poll(timeout_ms=20_000)) == [0]
        assert 0.3 <= time.monotonic() - begun < 5
        fill(log, "t", 1, first=1)
        begun = time.monotonic()
        assert numbers(consumer.poll(timeout_ms=0)) == [1]
        assert time.monotonic() - begun < 0.3


def test_a_fetch_returns_as_soon_as_there_is_enough(log: broker.Log) -> None:
    with log.producer() as producer:
        producer.send("t", b"v" * 20_000, partition=0)
    options = {"fetch_min_bytes": 10_000, "fetch_max_wait_ms": 60_000}
    with earliest(log, "t", **options) as consumer:
        begun = time.monotonic()
        assert len(consumer.poll(timeout_ms=60_000)[T0]) == 1
        assert time.monotonic() - begun < 10


def test_paused_partitions_give_nothing_and_lose_nothing(log: broker.Log) -> None:
    fill(log, "t", 5)
    fill(log, "t", 5, partition=1, first=5)
    with earliest(log, "t") as consumer:
        consumer.poll(0, max_records=2)
        consumer.pause(T0, T1)
        assert consumer.paused() == {T0, T1}
        assert drain(consumer) == []
        position = consumer.position(T0) + consumer.position(T1)
        assert position == 2
        consumer.resume(T1)
        assert set(drain(consumer)) <= {5, 6, 7, 8, 9}
        consumer.resume(T0)
        drain(consumer)
        assert (consumer.position(T0), consumer.position(T1)) == (5, 5)
        assert consumer.paused() == set()


def test_deserializers_make_anything_of_bytes_but_not_of_null(log: broker.Log) -> None:
    with log.producer() as producer:
        producer.send("t", b"17", key=b"k", partition=0)
        producer.send("t", None, partition=0)
    options = {"key_deserializer": bytes.decode, "value_deserializer": int}
    with earliest(log, "t", **options) as consumer:
        found = [(r.key, r.value) for r in consumer.poll(0)[T0]]
    assert found == [("k", 17), (None, None)]


def test_a_deserializer_that_fails_loses_nothing(log: broker.Log) -> None:
    is_broken = True

    def parse(data: bytes) -> int:
        if is_broken and data == b"2":
            raise KeyError(data)
        return int(data)

    fill(log, "t", 5)
    with earliest(log, "t", value_deserializer=parse) as consumer:
        given = numbers(consumer.poll(0, max_records=2))
        for read in (lambda: consumer.poll(0), lambda: next(consumer)):
            for _ in range(2):
                with pytest.raises(KeyError):
                    read()
        assert consumer.position(T0) == len(given)
        is_broken = False
        assert given + drain(consumer) == [0, 1, 2, 3, 4]


def test_a_deserializer_that_fails_does_not_take_other_partitions_records(log: broker.Log) -> None:
    fill(log, "t", 3)
    with log.producer() as producer:
        producer.send("t", b"poison", partition=1)
    with earliest(log, "t", value_deserializer=int) as consumer:
        found = []
        for _ in range(3):
            try:
                found += [
                    record.value for records in consumer.poll(0).values() for record in records
                ]
            except ValueError:
                continue
        assert found == [0, 1, 2]
        assert (consumer.position(T0), consumer.position(T1)) == (3, 0)


# Iteration.


def test_iteration_ends_when_nothing_comes_for_consumer_timeout_ms(log: broker.Log) -> None:
    fill(log, "t", 5)
    with earliest(log, "t", consumer_timeout_ms=200) as consumer:
        begun = time.monotonic()
        assert [int(record.value) for record in consumer] == [0, 1, 2, 3, 4]
        assert 0.2 <= time.monotonic() - begun < 5
        fill(log, "t", 1, first=5)
        assert [int(record.value) for record in consumer] == [5]


def batch_of_ten(log: broker.Log) -> None:
    """Two commits of five records each: iteration crosses from one into the other."""
    with log.producer(linger_ms=60_000) as producer:
        for number in range(10):
            producer.send("t", b"%d" % number, partition=0)
            if number == 4:
                producer.flush()


def test_the_position_during_iteration_is_behind_the_record_in_hand(log: broker.Log) -> None:
    batch_of_ten(log)
    with earliest(log, "t", consumer_timeout_ms=0) as consumer:
        found = []
        for record in consumer:
            assert consumer.position(T0) == record.offset + 1
            found.append(record.offset)
    assert found == list(range(10))


def test_a_seek_during_iteration_takes_effect_at_once(log: broker.Log) -> None:
    batch_of_ten(log)
    with earliest(log, "t", consumer_timeout_ms=0) as consumer:
        found = []
        for record in consumer:
            found.append(record.offset)
            if len(found) == 3:
                consumer.seek(T0, 8)
    assert found == [0, 1, 2, 8, 9]


def test_a_pause_during_iteration_takes_effect_at_once(log: broker.Log) -> None:
    batch_of_ten(log)
    with earliest(log, "t", consumer_timeout_ms=0) as consumer:
        found = []
        for record in consumer:
            found.append(record.offset)
            if len(found) == 3:
                consumer.pause(T0)
        assert found == [0, 1, 2]
        consumer.resume(T0)
        assert [record.offset for record in consumer] == list(range(3, 10))


@pytest.mark.parametrize("count", [1, 4, 5, 6, 9])
def test_iteration_goes_on_where_it_was_left(log: broker.Log, count: int) -> None:
    batch_of_ten(log)
    with earliest(log, "t", consumer_timeout_ms=0) as consumer:
        first = []
        for record in consumer:
            first.append(record.offset)
            if len(first) == count:
                break
        rest = [record.offset for record in consumer]
    assert first + rest == list(range(10))


@pytest.mark.parametrize("count", [1, 4, 5, 6, 9])
def test_a_poll_after_iteration_goes_on_behind_the_last_record(log: broker.Log, count: int) -> None:
    batch_of_ten(log)
    with earliest(log, "t", consumer_timeout_ms=0) as consumer:
        found = [next(consumer).offset for _ in range(count)]
        polled = consumer.poll(0)[T0]
        assert found + [record.offset for record in polled] == list(range(10))


def test_iteration_over_two_partitions_gives_each_record_once(log: broker.Log) -> None:
    fill(log, "t", 20)
    fill(log, "t", 20, partition=1, first=20)
    with earliest(log, "t", consumer_timeout_ms=0, max_partition_fetch_bytes=600) as consumer:
        found = []
        for number, record in enumerate(consumer):
            found.append(int(record.value))
            if number % 7 == 3:
                consumer.position(T0)
    assert sorted(found) == list(range(40))


def test_next_goes_on_after_the_iteration_had_ended(log: broker.Log) -> None:
    with earliest(log, "t", consumer_timeout_ms=0) as consumer:
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(consumer)
        fill(log, "t", 1)
        assert next(consumer).value == b"0"


# What to read.


def test_assign_reads_exactly_these_partitions(log: broker.Log) -> None:
    fill(log, "t", 2)
    fill(log, "t", 2, partition=1, first=2)
    with earliest(log) as consumer:
        consumer.assign([T1])
        assert consumer.assignment() == {T1}
        assert drain(consumer) == [2, 3]
        with pytest.raises(broker.UnknownPartition):
            consumer.assign([TopicPartition("t", 2)])
        with pytest.raises(broker.UnknownTopic):
            consumer.assign([TopicPartition("none", 0)])


def test_subscribing_anew_starts_anew(log: broker.Log) -> None:
    fill(log, "t", 2)
    log.create_topic("u")
    fill(log, "u", 2, first=10)
    with earliest(log, "t") as consumer:
        drain(consumer)
        consumer.subscribe(["u"])
        assert consumer.subscription() == {"u"}
        assert drain(consumer) == [10, 11]
        consumer.unsubscribe()
        assert (consumer.subscription(), drain(consumer)) == (set(), [])
        consumer.subscribe(["t"])
        assert drain(consumer) == [0, 1]


def test_a_consumer_lists_topics_and_partitions(log: broker.Log) -> None:
    log.create_topic("u")
    with log.consumer() as consumer:
        assert consumer.topics() == {"t", "u"}
        assert consumer.partitions_for_topic("t") == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topics": "t"}, "takes a list"),
        ({"topics": ["t"], "pattern": "t"}, "not both"),
        ({"pattern": "("}, "not a regular expression"),
    ],
)
def test_a_wrong_subscription_is_refused(
    log: broker.Log, arguments: dict[str, Any], message: str
) -> None:
    with log.consumer() as consumer, pytest.raises(broker.InvalidOption, match=message):
        consumer.subscribe(**arguments)


def test_a_subscription_to_no_topic_is_refused(log: broker.Log) -> None:
    with pytest.raises(broker.UnknownTopic):
        log.consumer("none")


def test_partitions_added_later_are_read_from_their_beginning(log: broker.Log) -> None:
    with log.consumer("t") as consumer:
        assert drain(consumer) == []
        log.create_partitions("t", 3)
        fill(log, "t", 2, partition=2)
        assert drain(consumer) == [0, 1]
        assert TopicPartition("t", 2) in consumer.assignment()


def test_a_pattern_takes_whole_names_and_notices_new_topics(log: broker.Log) -> None:
    log.create_topic("orders")
    fill(log, "orders", 1)
    with log.consumer(metadata_max_age_ms=0) as consumer:
        consumer.subscribe(pattern="ord.*s")
        assert drain(consumer) == []
        for name in ("orders2s", "orders2", "my_orders"):
            log.create_topic(name)
            fill(log, name, 1, first=5)
        assert drain(consumer) == [5]
        assert consumer.subscription() == {"orders", "orders2s"}


def test_a_pattern_lets_go_of_deleted_topics_and_takes_them_up_again(log: broker.Log) -> None:
    log.create_topic("orders")
    fill(log, "orders", 2)
    with earliest(log, metadata_max_age_ms=0) as consumer:
        consumer.subscribe(pattern="orders")
        assert drain(consumer) == [0, 1]
        log.delete_topic("orders")
        assert drain(consumer) == []
        log.create_topic("orders")
        fill(log, "orders", 1, first=7)
        assert drain(consumer) == [7]


def test_who_is_held_up_until_the_end_of_a_poll_has_looked(
    log: broker.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a busy machine, in a round in which it was too early to ask a store again."""
    fetch_once = Consumer._fetch_once

    def held_up(consumer: Consumer) -> int:
        time.sleep(0.03)
        return fetch_once(consumer)

    with earliest(log, "t") as consumer:
        assert drain(consumer) == []
        consumer._watch.may_look()
        fill(log, "t", 1)
        monkeypatch.setattr(Consumer, "_fetch_once", held_up)
        assert numbers(consumer.poll(20)) == [0]


def test_a_pattern_takes_up_a_topic_that_was_made_again_at_once(log: broker.Log) -> None:
    log.create_topic("orders")
    fill(log, "orders", 2)
    with earliest(log) as consumer:
        consumer.subscribe(pattern="orders")
        assert drain(consumer) == [0, 1]
        log.delete_topic("orders")
        log.create_topic("orders")
        fill(log, "orders", 1, first=7)
        assert numbers(consumer.poll(20)) == [7]


def test_a_deleted_topic_is_an_error_for_those_who_named_it(log: broker.Log) -> None:
    fill(log, "t", 2)
    with earliest(log, "t") as consumer:
        drain(consumer)
        log.delete_topic("t")
        for _ in range(2):
            with pytest.raises(broker.UnknownTopic, match="deleted|does not exist"):
                consumer.poll(1000)  # A store is not asked at every poll.
        log.create_topic("t")
        fill(log, "t", 1, first=9)
        consumer.subscribe(["t"])
        assert drain(consumer) == [9]


@pytest.mark.every_store
@pytest.mark.parametrize("is_made_again", [True, False])
def test_a_log_removed_under_a_consumer_is_an_error(
    log: broker.Log,
    root: Path | str,
    remove_log: Callable[[], None],
    is_made_again: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "_READER_ASKS_SECONDS", 0.0)  # By itself it asks a store seldom.
    fill(log, "t", 2)
    with earliest(log, "t") as consumer:
        drain(consumer)
        remove_log()
        if is_made_again:
            log = broker.open(root)
            log.create_topic("t", partitions=2)
            fill(log, "t", 5)
        for _ in range(2):
            with pytest.raises(broker.UnknownTopic, match="removed while it was in use"):
                consumer.poll(1000)


# Waiting.


SEND = """
import broker, sys, time
log = broker.open(sys.argv[1])
with log.producer() as producer:
    producer.send("t", b"warm", partition=1).result()
    for line in sys.stdin:
        producer.send("t", str(time.time()).encode(), partition=0).result()
"""


@contextmanager
def sender(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that sends the time whenever it gets a line."""
    run = [sys.executable, "-c", SEND, str(root)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.on_disk
def test_a_waiting_poll_wakes_at_once_when_another_process_sends(
    log: broker.Log, root: Path
) -> None:
    delays = []
    with earliest(log) as consumer, sender(root) as process:
        consumer.assign([T1])
        assert consumer.poll(30_000)
        consumer.assign([T0])
        assert consumer.poll(300) == {}
        for _ in range(20):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            (record,) = consumer.poll(30_000)[T0]
            delays.append(time.time() - float(record.value))
    assert sorted(delays)[10] < 0.05


def test_a_waiting_poll_takes_no_processor_time(log: broker.Log) -> None:
    fill(log, "t", 1)
    with log.consumer("t") as consumer:
        consumer.poll(100)
        used = time.process_time()
        consumer.poll(timeout_ms=2000)
        assert time.process_time() - used < 0.1


@pytest.mark.on_disk
def test_waiting_for_fetch_min_bytes_takes_no_processor_time(log: broker.Log) -> None:
    fill(log, "t", 1)
    options = {"fetch_min_bytes": 1_000_000, "fetch_max_wait_ms": 2000}
    with earliest(log, "t", **options) as consumer:
        used = time.process_time()
        assert numbers(consumer.poll(timeout_ms=10_000)) == [0]
        assert time.process_time() - used < 0.2


def test_a_poll_with_all_partitions_paused_waits_quietly(log: broker.Log) -> None:
    fill(log, "t", 1)
    with earliest(log, "t") as consumer:
        consumer.pause(T0, T1)
        used = time.process_time()
        assert consumer.poll(timeout_ms=1000) == {}
        assert time.process_time() - used < 0.1


def test_a_poll_with_nothing_to_read_waits_quietly(log: broker.Log) -> None:
    with log.consumer() as consumer:
        used, begun = time.process_time(), time.monotonic()
        assert consumer.poll(timeout_ms=1000) == {}
        assert time.process_time() - used < 0.1
        assert time.monotonic() - begun >= 1


# Batches.


def test_batches_have_the_records_columns_and_their_offsets(log: broker.Log) -> None:
    headers = [("h", b"1")]
    with log.producer(linger_ms=60_000) as producer:
        producer.send("t", b"a", key=b"k", partition=0, headers=headers, timestamp_ms=5)
        producer.send("t", None, partition=0, timestamp_ms=6)
    log.delete_records({T0: 1})
    with earliest(log, "t") as consumer:
        batch = consumer.poll_batches(0)[T0]
        assert consumer.poll_batches(0) == {}
    assert batch.schema.names == ["key", "value", "headers", "timestamp", "offset"]
    assert batch.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    (row,) = batch.to_pylist()
    assert (row["key"], row["value"], row["headers"], row["offset"]) == (None, None, None, 1)


def test_small_batches_are_merged(log: broker.Log) -> None:
    fill(log, "t", 50)
    with earliest(log, "t") as consumer:
        batch = consumer.poll_batches(0)[T0]
    assert batch.column("offset").to_pylist() == list(range(50))
    assert batch.column("value").to_pylist() == [b"%d" % number for number in range(50)]


def test_large_batches_come_without_a_copy(log: broker.Log) -> None:
    table = pa.table({"value": [b"v" * 1000] * 3000})
    with log.producer(batch_size=1 << 20) as producer:
        for _ in range(3):
            producer.send_batch("t", table.append_column("partition", pa.array([0] * 3000)))
    with earliest(log, "t") as consumer:
        before = pa.total_allocated_bytes()
        batches = []
        while polled := consumer.poll_batches(0):
            batches.append(polled[T0])
        taken = pa.total_allocated_bytes() - before
        assert sum(batch.num_rows for batch in batches) == 9000
        offsets = [offset for batch in batches for offset in batch.column("offset").to_pylist()]
        assert offsets == list(range(9000))
    assert taken < 1 << 20, "for 9 MB of records"


def test_batches_stay_readable_after_the_consumer_is_closed(log: broker.Log) -> None:
    table = pa.table({"value": [b"%d" % number * 100 for number in range(3000)]})
    with log.producer() as producer:
        producer.send_batch("t", table.append_column("partition", pa.array([0] * 3000)))
    with earliest(log, "t") as consumer:
        batch = consumer.poll_batches(0)[T0]
    assert batch.column("value").to_pylist() == table.column("value").to_pylist()


def test_polls_of_records_and_of_batches_may_be_mixed(log: broker.Log) -> None:
    batch_of_ten(log)
    with earliest(log, "t") as consumer:
        first = [record.offset for record in consumer.poll(0, max_records=3)[T0]]
        rest = []
        while polled := consumer.poll_batches(0):
            rest += polled[T0].column("offset").to_pylist()
    assert first + rest == list(range(10))


# The end.


def test_a_consumer_is_closed_as_kafka_pythons_is(log: broker.Log) -> None:
    for autocommit in (True, False):
        earliest(log, "t").close(autocommit=autocommit)


def test_a_closed_consumer_refuses_everything(log: broker.Log) -> None:
    consumer = earliest(log, "t")
    consumer.close()
    consumer.close()
    for call in (
        lambda: consumer.poll(0),
        lambda: consumer.poll_batches(0),
        lambda: next(consumer),
        lambda: next(iter(consumer)),
        lambda: consumer.position(T0),
        lambda: consumer.seek(T0, 0),
        lambda: consumer.subscribe(["t"]),
        lambda: consumer.assign([T0]),
        lambda: consumer.end_offsets([T0]),
        lambda: consumer.offsets_for_times({T0: 0}),
    ):
        with pytest.raises(broker.Closed, match="consumer is closed"):
            call()


def test_an_unknown_option_suggests_the_nearest(log: broker.Log) -> None:
    with pytest.raises(broker.InvalidOption, match="did you mean 'auto_offset_reset'"):
        log.consumer("t", offset_reset="earliest")


@pytest.mark.parametrize(
    "option",
    [
        {"auto_offset_reset": "first"},
        {"max_poll_records": 0},
        {"fetch_min_bytes": -1},
        {"consumer_timeout_ms": "soon"},
        {"value_deserializer": "utf-8"},
    ],
    ids=repr,
)
def test_a_wrong_option_is_named(log: broker.Log, option: dict[str, Any]) -> None:
    with pytest.raises(broker.InvalidOption, match=next(iter(option))):
        log.consumer("t", **option)


def test_many_consumers_opened_and_closed_leave_no_files_open(log: broker.Log) -> None:
    fill(log, "t", 3)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        with earliest(log, "t") as consumer:
            drain(consumer)
    assert len(list(descriptors.iterdir())) <= before
