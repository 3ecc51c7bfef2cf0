"""What callers give: a wrong type is refused where it comes in, and leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import broker
from broker import OffsetAndMetadata, Position, TopicPartition, checks
from broker.consumer import Consumer

FIRST = TopicPartition("orders", 0)
NO_PARTITIONS: list[Any] = [False, 0.0, "0", None]
NO_NUMBERS: list[Any] = [True, 2.5, 1.0, "1", None, 1 << 63]


@pytest.fixture
def log(root: Path) -> broker.Log:
    log = broker.open(root)
    log.create_topic("orders", partitions=2)
    with log.producer() as producer:
        table = pa.table({"value": ["v"] * 10, "partition": [0] * 10})
        producer.send_batch("orders", table).result()
    return log


@pytest.fixture
def reader(log: broker.Log) -> Iterator[Consumer]:
    with log.consumer("orders", auto_offset_reset="earliest") as consumer:
        yield consumer


def is_as_it_was(log: broker.Log) -> bool:
    described = broker.open(log.root).describe_topic("orders")
    return log.verify().is_sound and described.record_count == 10


# Commits that would be for ever.


@pytest.mark.parametrize("partition", NO_PARTITIONS)
def test_records_are_deleted_of_partitions_that_are_numbers(
    log: broker.Log, partition: Any
) -> None:
    with pytest.raises(broker.InvalidOption, match="is not a partition"):
        log.delete_records({TopicPartition("orders", partition): 4})
    assert is_as_it_was(log)


@pytest.mark.parametrize("offset", [*NO_NUMBERS, -2])
def test_records_are_deleted_before_offsets_that_are_numbers(log: broker.Log, offset: Any) -> None:
    with pytest.raises(broker.InvalidOption, match="cannot delete the records of orders-0 before"):
        log.delete_records({FIRST: offset})
    assert is_as_it_was(log)


@pytest.mark.parametrize("partition", [*NO_PARTITIONS, "x"])
def test_positions_are_published_for_partitions_that_are_numbers(
    log: broker.Log, partition: Any
) -> None:
    with pytest.raises(broker.InvalidOption, match="is not a partition"):
        log.publish_positions("billing", {TopicPartition("orders", partition): 3})
    assert log.groups() == []


@pytest.mark.parametrize("partition", [-1, 2])
def test_positions_are_published_for_partitions_that_exist(log: broker.Log, partition: int) -> None:
    with pytest.raises(broker.UnknownPartition):
        log.publish_positions("billing", {TopicPartition("orders", partition): 3})


@pytest.mark.parametrize(
    "position",
    [Position(1.5, 1, 0), Position(1, "1", 0), Position(1, 1, None), Position(1, 1, 0, 0, 5)],
)
def test_a_position_is_made_of_numbers_and_text(log: broker.Log, position: Position) -> None:
    with pytest.raises(broker.InvalidOption):
        log.publish_positions("billing", {FIRST: position})
    assert log.groups() == []


@pytest.mark.parametrize("partition", NO_PARTITIONS)
def test_a_member_commits_partitions_that_are_numbers(log: broker.Log, partition: Any) -> None:
    with log.consumer("orders", group_id="billing", enable_auto_commit=False) as member:
        while not member.assignment():
            member.poll(100)
        with pytest.raises(broker.InvalidOption, match="is not a partition"):
            member.commit({TopicPartition("orders", partition): 3})
        member.commit({FIRST: 4})
    assert log.group_positions("billing") == {FIRST: 4}


@pytest.mark.parametrize(
    "given", [*NO_NUMBERS, (3, "a", "b"), OffsetAndMetadata(3, "\ud800"), OffsetAndMetadata(3, 5)]
)
def test_a_consumer_commits_offsets_that_are_numbers(log: broker.Log, given: Any) -> None:
    with log.consumer(group_id="billing") as consumer:
        consumer.assign([FIRST])
        with pytest.raises(broker.InvalidOption):
            consumer.commit({FIRST: given})
        with pytest.raises(broker.InvalidOption, match="is not a dict"):
            consumer.commit([FIRST])
    assert log.verify().is_sound


@pytest.mark.parametrize(
    "transaction", [(5, 1), ("", 1), ("\ud800", 1), ("job", 1.5), ("job", True), ("job",), "jo"]
)
def test_a_transaction_has_text_and_a_number(log: broker.Log, transaction: Any) -> None:
    with pytest.raises(broker.InvalidOption):
        log.commit_staged("orders", [], transaction)
    assert is_as_it_was(log)


def test_numpys_whole_numbers_are_numbers(log: broker.Log, reader: Consumer) -> None:
    first = TopicPartition("orders", np.int64(0))
    assert log.delete_records({first: np.int64(3)}) == {FIRST: 3}
    with log.producer() as producer:
        assert producer.send("orders", b"v", partition=np.int32(1)).result().partition == 1
    reader.seek(first, np.int16(5))
    assert reader.position(FIRST) == 5
    log.create_partitions("orders", np.int64(3))
    assert type(log.verify().is_sound) is bool and log.verify().is_sound


# Everything else.


def strategy_of(answer: Any) -> Callable[..., Any]:
    return lambda members, partitions: answer(members[0].member_id)


CALLS: list[tuple[Callable[[broker.Log], Any], str]] = [
    (lambda log: broker.open(None), "the log's path is None"),  # type: ignore[arg-type]
    (lambda log: broker.open(b"x"), "the log's path is b'x'"),  # type: ignore[arg-type]
    (lambda log: broker.open("a\0b"), "has a character NUL"),
    (lambda log: log.create_topic(123), "topic name 123 is of type int, not text"),
    (lambda log: log.create_topic(""), "topic name '' is empty"),
    (lambda log: log.describe_topic([]), "topic name [] is of type list"),
    (lambda log: log.describe_group(5), "group name '5' is of type int, not text"),
    (lambda log: log.create_topic("t", config="x"), "config='x' is not a dict"),
    (lambda log: log.create_topic("t", config={5: 1}), "config={5: 1} is not a dict"),
    (lambda log: log.create_topic("t", "2"), "partitions='2' of topic 't'"),
    (lambda log: log.alter_topic("orders", None), "config=None is not a dict"),
    (lambda log: log.alter_group("g", None), "config=None is not a dict"),
    (lambda log: log.create_partitions("orders", 100_001), "use a whole number from 1 to 100000"),
    (lambda log: log.create_partitions("orders", 5.0), "partitions=5.0 of topic"),
    (lambda log: log.delete_records({FIRST: 11}), "It is past the end: choose an offset in that"),
    (lambda log: log.producer(transactional_id="\ud800"), "not text that UTF-8 can hold"),
    (lambda log: log.producer(client_id=5), "client_id=5 is not a text"),
    (lambda log: log.consumer("orders", group_id="g", client_id=5), "client_id=5 is not a text"),
    (lambda log: log.consumer(5), "topic name 5 is of type int"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_a_wrong_type_is_refused_in_one_line(
    log: broker.Log, call: Callable[[broker.Log], Any], words: str
) -> None:
    with pytest.raises(broker.LogError, match=re.escape(words)) as raised:
        call(log)
    assert "\n" not in str(raised.value)
    assert is_as_it_was(log)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.poll("x"), "timeout_ms='x' is not a number of milliseconds"),
        (lambda c: c.poll(None), "timeout_ms=None is not a number of milliseconds"),
        (lambda c: c.poll(float("nan")), "timeout_ms=nan is not"),
        (lambda c: c.poll_batches("x"), "timeout_ms='x' is not"),
        (lambda c: c.poll(0, "x"), "max_records cannot be 'x'"),
        (lambda c: c.poll(0, 1.5), "max_records cannot be 1.5"),
        (lambda c: c.seek("orders", 0), "'orders' is not a partition"),
        (lambda c: c.position("orders"), "'orders' is not a partition"),
        (lambda c: c.pause("orders"), "'orders' is not a partition"),
        (lambda c: c.pause([FIRST]), "is not a partition; give TopicPartition(text, int)"),
        (lambda c: c.resume([FIRST]), "is not a partition"),
        (lambda c: c.end_offsets(FIRST), "is not a list of partitions"),
        (lambda c: c.end_offsets(["orders"]), "'orders' is not a partition"),
        (lambda c: c.offsets_for_times({FIRST: "x"}), "cannot look in orders-0 for the time 'x'"),
        (lambda c: c.offsets_for_times([FIRST]), "is not a dict"),
        (lambda c: c.assign(["orders"]), "'orders' is not a partition"),
        (lambda c: c.assign(5), "5 is not a list of partitions"),
        (lambda c: c.subscribe(5), "subscribe takes a list of topics, not 5"),
        (lambda c: c.subscribe(None), "subscribe takes a list of topics, not None"),
        (lambda c: c.subscribe([[]]), "topic name [] is of type list"),
        (lambda c: c.subscribe(pattern=5), "pattern 5 is not text"),
        (lambda c: c.subscribe(pattern=re.compile("O", re.I)), "write them into its text"),
        (lambda c: c.partitions_for_topic([]), "topic name [] is of type list"),
    ],
)
@pytest.mark.parametrize("group", [None, "billing"])
def test_a_consumer_refuses_a_wrong_type_and_goes_on(
    log: broker.Log, group: str | None, call: Callable[[Any], Any], words: str
) -> None:
    with log.consumer(group_id=group, auto_offset_reset="earliest") as consumer:
        consumer.assign([FIRST])
        with pytest.raises(broker.LogError, match=re.escape(words)):
            call(consumer)
        assert len(consumer.poll(1000)[FIRST]) == 10


def test_a_pair_is_a_partition(reader: Consumer) -> None:
    pair: Any = ("orders", 0)
    assert reader.end_offsets([pair]) == {FIRST: 10}
    reader.seek(pair, 4)
    reader.pause(pair)
    assert reader.paused() == {FIRST}


def test_a_compiled_pattern_is_a_pattern(log: broker.Log) -> None:
    pattern: Any = re.compile("ord.*")
    for group in (None, "billing"):
        with log.consumer(group_id=group, auto_offset_reset="earliest") as consumer:
            consumer.subscribe(pattern=pattern)
            while not consumer.assignment():
                consumer.poll(100)


@pytest.mark.parametrize(
    ("topic", "partition", "words"),
    [
        ([], None, "topic name [] is of type list"),
        (None, None, "topic name None is of type NoneType"),
        ("orders", "1", "has no partition '1'; give a whole number (int)"),
        ("orders", True, "has no partition True; give a whole number (int)"),
        ("orders", 9, "has no partition 9; it has 2"),
    ],
)
def test_a_producer_refuses_a_wrong_type(
    log: broker.Log, topic: Any, partition: Any, words: str
) -> None:
    with log.producer() as producer, pytest.raises(broker.LogError, match=re.escape(words)):
        producer.send(topic, b"v", partition=partition)
    assert is_as_it_was(log)


@pytest.mark.parametrize("answer", [None, 1.7, "x", True])
def test_a_partitioner_returns_a_whole_number(log: broker.Log, answer: Any) -> None:
    with log.producer(partitioner=lambda key, known, available: answer) as producer:
        future = producer.send("orders", b"v")
        with pytest.raises(broker.InvalidRecord, match="the partitioner cannot return"):
            future.result()
    assert is_as_it_was(log)


@pytest.mark.parametrize(
    "answer",
    [
        lambda member: None,
        lambda member: {member: None},
        lambda member: {member: ["x"]},
        lambda member: {member: [TopicPartition("orders", 0.0)]},
        lambda member: {member: [TopicPartition("orders", True)]},
    ],
)
def test_an_assignment_function_returns_partitions(log: broker.Log, answer: Any) -> None:
    strategy = strategy_of(answer)
    with (
        log.consumer(
            "orders", group_id="billing", partition_assignment_strategy=strategy
        ) as member,
        pytest.raises(broker.InvalidOption, match="the assignment function"),
    ):
        for _ in range(50):
            member.poll(100)
    assert log.verify().is_sound


@pytest.mark.parametrize("strategy", [5, [5], [None]])
def test_a_strategy_is_a_name_or_a_function(log: broker.Log, strategy: Any) -> None:
    with pytest.raises(broker.InvalidOption, match="is not one of range, roundrobin, sticky"):
        log.consumer(group_id="g", partition_assignment_strategy=strategy)


def test_the_largest_number_is_one_that_files_can_hold() -> None:
    assert checks.whole_number(checks.NUMBER_MAX, "cannot be") == (1 << 63) - 1
    with pytest.raises(broker.InvalidOption, match="cannot be 9223372036854775808"):
        checks.whole_number(checks.NUMBER_MAX + 1, "cannot be")
