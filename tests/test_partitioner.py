"""Which partition: by key as Kafka's clients do, otherwise as configured or as given."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

import broker
from broker.partitioner import PartitionChooser, murmur2

# From Kafka's own test of its murmur2.
KAFKA_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def reference(data: bytes) -> int:
    """Kafka's murmur2, byte by byte."""
    mask, m, length = 0xFFFFFFFF, 0x5BD1E995, len(data)
    h = 0x9747B28C ^ length
    for at in range(0, length - length % 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    if length % 4:
        h = (h ^ int.from_bytes(data[length - length % 4 :], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_hashes_are_those_kafka_publishes() -> None:
    hashes = murmur2(pa.array(list(KAFKA_HASHES), pa.binary())).astype(np.int32)
    assert hashes.tolist() == list(KAFKA_HASHES.values())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=20), st.integers(0, 5))
def test_hashes_are_those_of_the_plain_algorithm(keys: list[bytes | None], skip: int) -> None:
    sliced = pa.array([b"before"] * skip + keys, pa.binary()).slice(skip)
    expected = [reference(key or b"") for key in keys]
    assert murmur2(sliced).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=20), st.integers(2, 50))
def test_a_keys_partition_is_its_positive_hash_modulo_the_count(
    keys: list[bytes], partition_count: int
) -> None:
    chosen = PartitionChooser("sticky").choose(None, keys, len(keys), partition_count)
    assert not isinstance(chosen, int)
    expected = [(reference(key) & 0x7FFFFFFF) % partition_count for key in keys]
    assert chosen.tolist() == expected


def test_send_and_send_batch_put_a_key_into_the_same_partition(log: broker.Log) -> None:
    log.create_topic("t", partitions=7)
    keys = [str(number).encode() for number in range(200)]
    with log.producer() as producer:
        futures = [producer.send("t", b"one", key=key) for key in keys]
        one_by_one = [future.result().partition for future in futures]
        table = pa.table({"key": keys, "value": keys})
        producer.send_batch("t", table).result()
    assert one_by_one == [(reference(key) & 0x7FFFFFFF) % 7 for key in keys]
    columnar = {}
    with log.consumer("t", auto_offset_reset="earliest", max_poll_records=1000) as consumer:
        while polled := consumer.poll(0):
            for records in polled.values():
                columnar.update({r.key: r.partition for r in records if r.value != b"one"})
    assert [columnar[key] for key in keys] == one_by_one


def test_without_a_key_a_batch_sticks_to_one_partition_and_the_next_takes_another() -> None:
    chooser = PartitionChooser("sticky")
    chosen = [chooser.choose(None, None, 10, 3) for _ in range(6)]
    assert all(isinstance(one, int) for one in chosen)
    assert chosen[:3] == chosen[3:]
    assert set(chosen) == {0, 1, 2}


def test_records_without_a_key_among_keyed_ones_stick_together() -> None:
    keys = [b"a", None, b"b", None, None]
    chosen = PartitionChooser("sticky").choose(None, keys, 5, 50)
    assert not isinstance(chosen, int)
    assert len({int(chosen[row]) for row in (1, 3, 4)}) == 1
    assert [chosen[0], chosen[2]] == [(reference(key) & 0x7FFFFFFF) % 50 for key in (b"a", b"b")]


def test_an_empty_key_is_a_key() -> None:
    chosen = PartitionChooser("sticky").choose(None, [b"", b""], 2, 50)
    assert not isinstance(chosen, int)
    assert chosen.tolist() == [(reference(b"") & 0x7FFFFFFF) % 50] * 2


def test_round_robin_takes_the_partitions_in_turn_across_batches() -> None:
    chooser = PartitionChooser("round_robin")
    chosen = [*chooser.choose(None, None, 5, 3), *chooser.choose(None, None, 4, 3)]  # type: ignore[misc]
    assert all((after - before) % 3 == 1 for before, after in zip(chosen, chosen[1:], strict=False))


def test_round_robin_spreads_a_producers_records_evenly(log: broker.Log) -> None:
    log.create_topic("t", partitions=4)
    with log.producer(partitioner="round_robin") as producer:
        futures = [producer.send("t", b"v") for _ in range(400)]
    assert Counter(future.result().partition for future in futures) == dict.fromkeys(range(4), 100)


def test_a_users_function_gets_key_and_partitions_and_decides(log: broker.Log) -> None:
    log.create_topic("t", partitions=3)
    calls = []

    def choose(key: bytes | None, every: list[int], available: list[int]) -> int:
        calls.append((key, every, available))
        return 2 if key is None else 1

    with log.producer(partitioner=choose) as producer:
        keyed = producer.send("t", b"v", key=b"k")
        without = producer.send("t", b"v")
        given_one = producer.send("t", b"v", partition=0)
    assert [f.result().partition for f in (keyed, without, given_one)] == [1, 2, 0]
    assert calls == [(b"k", [0, 1, 2], [0, 1, 2]), (None, [0, 1, 2], [0, 1, 2])]


def test_a_users_function_that_names_no_partition_fails_the_send(log: broker.Log) -> None:
    log.create_topic("t", partitions=3)
    with log.producer(partitioner=lambda key, every, available: 3) as producer:
        with pytest.raises(broker.UnknownPartition, match="no partition 3"):
            producer.send("t", b"v").result()


def test_a_given_partition_goes_before_the_key(log: broker.Log) -> None:
    log.create_topic("t", partitions=5)
    with log.producer() as producer:
        futures = [producer.send("t", b"v", key=b"k", partition=number) for number in range(5)]
        table = pa.table({"key": [b"k"] * 4, "value": [b"v"] * 4, "partition": [4, None, 3, -1]})
        batch = producer.send_batch("t", table)
    assert [future.result().partition for future in futures] == list(range(5))
    by_key = (reference(b"k") & 0x7FFFFFFF) % 5
    expected = Counter({4: 1, 3: 1}) + Counter({by_key: 2})
    assert {part: count for part, (_, count) in batch.result().offsets.items()} == expected


@pytest.mark.parametrize("partition", [-1, 3, True, 1.0, "0"])
def test_a_partition_that_is_none_is_refused(log: broker.Log, partition: object) -> None:
    log.create_topic("t", partitions=3)
    with log.producer() as producer, pytest.raises(broker.UnknownPartition):
        producer.send("t", b"v", partition=partition)  # type: ignore[arg-type]


@pytest.mark.parametrize("partition", [-2, 3])
def test_a_batch_with_a_partition_that_is_none_is_refused(log: broker.Log, partition: int) -> None:
    log.create_topic("t", partitions=3)
    table = pa.table({"value": [b"v", b"v"], "partition": [0, partition]})
    with log.producer() as producer, pytest.raises(broker.UnknownPartition):
        producer.send_batch("t", table)
    assert log.describe_topic("t").record_count == 0


def test_a_given_partition_is_kept_even_if_the_topic_has_only_one_now() -> None:
    chosen = PartitionChooser("sticky").choose([None, 3, 0], None, 3, 1)
    assert not isinstance(chosen, int)
    assert chosen.tolist() == [0, 3, 0]
    assert PartitionChooser("sticky").choose([None, 0], None, 2, 1) == 0


def test_a_partition_added_meanwhile_is_found(log: broker.Log) -> None:
    log.create_topic("t")
    with log.producer() as producer:
        producer.send("t", b"v", partition=0).result()
        log.create_partitions("t", 3)
        assert producer.send("t", b"v", partition=2).result().partition == 2
