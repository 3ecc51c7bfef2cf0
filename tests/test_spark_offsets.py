"""Positions of a query: their JSON, what lies between two of them, and what is lost."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

import broker
from broker import InvalidOption, TopicPartition
from broker.log import Log
from broker.storage import LocalStorage
from spark_log import planning, schema
from spark_log.losses import DataLoss, Ranges
from spark_log.offsets import LogOffset, TopicOffset
from spark_log.planning import Patience, Sizing, share_offsets, task_count
from spark_log.source import LogStreamReader
from spark_log.task import LogTask

LIMITED = ReadMaxRows(1)


def fill(log: broker.Log, topic: str, *values: str, partition: int = 0) -> None:
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value.encode(), partition=partition)


class Query:
    """Does what Spark does with a stream reader, batch after batch, with a checkpoint in JSON."""

    def __init__(self, root: Path, checkpoint: list[str] | None = None, **options: str) -> None:
        given = {"path": str(root), "subscribe": "orders", "startingOffsets": "earliest"} | options
        given = {name.lower(): value for name, value in given.items() if value}
        self.ends = [] if checkpoint is None else checkpoint
        self.schema = schema.row_schema(include_headers=False)
        self.reader = LogStreamReader(given, self.schema)

    def batch(self, limit: ReadLimit | None = None) -> list[str] | None:
        """Run one batch and return its values, or None if there is nothing new."""
        self.reader.getDefaultReadLimit()
        start = json.loads(self.ends[-1]) if self.ends else self.reader.initialOffset()
        end = self.log_end(start, limit)
        return None if end is None else self.replay(start, end)

    def log_end(self, start: Any, limit: ReadLimit | None = None) -> Any:
        """Let a batch begin: its end is in the checkpoint."""
        end = self.reader.latestOffset(start, limit or LIMITED)
        if self.ends and json.dumps(end) == self.ends[-1]:
            return None
        self.ends.append(json.dumps(end))
        return end

    def replay(self, start: Any, end: Any) -> list[str]:
        return self.values(self.reader.partitions(start, end))

    def values(self, tasks: list[Any]) -> list[str]:
        values = []
        for task in tasks:
            task = pickle.loads(pickle.dumps(task))
            for batch in self.reader.read(task):
                values += [value.decode() for value in batch.column("value").to_pylist()]
        return values


@pytest.fixture
def orders(log: broker.Log) -> broker.Log:
    log.create_topic("orders", partitions=2)
    return log


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, logger="spark_log"):
        yield lambda: [record.getMessage() for record in caplog.records]


# The JSON.


def test_the_json_is_kafkas_with_one_key_more_and_sorted() -> None:
    offset = LogOffset(
        {"b": TopicOffset({10: 7, 2: 5}, 1, 0), "a": TopicOffset({0: 3}, incarnation=2, epoch=4)}
    )
    assert json.dumps(offset.to_json()) == (
        '{"@": {"topics": {"a": [2, 4], "b": [1, 0]}}, "a": {"0": 3}, "b": {"2": 5, "10": 7}}'
    )
    assert LogOffset.from_json(offset.to_json()) == offset


def test_a_start_travels_inside_an_offset() -> None:
    offset = LogOffset({"a": TopicOffset({0: 3}, 1, 0)}).as_start()
    again = LogOffset.from_json(json.loads(json.dumps(offset.to_json())))
    assert again == offset and again.is_initial
    later = LogOffset({"a": TopicOffset({0: 4}, 1, 0)}, offset.start)
    assert not later.is_initial


def test_the_log_is_named_once_for_all_its_topics() -> None:
    topics = {name: TopicOffset({0: 3}, 1, 0, "id") for name in "ab"}
    offset = LogOffset(topics)
    assert offset.to_json()["@"] == {"log": "id", "topics": {"a": [1, 0], "b": [1, 0]}}
    assert LogOffset.from_json(offset.to_json()) == offset


def test_an_offset_of_kafkas_connector_is_understood() -> None:
    offset = LogOffset.from_json({"a": {"0": 3}})
    assert offset.topics == {"a": TopicOffset({0: 3}, None, 0)}


@pytest.mark.parametrize("wrong", [{"a": 1}, {"a": {"x": 1}}, {"@": 1}, {"a": {"0": None}}])
def test_anything_else_in_a_checkpoint_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="not of this source"):
        LogOffset.from_json(wrong)


# One query, batch after batch.


def test_each_batch_reads_what_is_new(orders: broker.Log, root: Path) -> None:
    query = Query(root)
    fill(orders, "orders", "a", "b")
    assert query.batch() == ["a", "b"]
    assert query.batch() is None
    fill(orders, "orders", "c")
    assert query.batch() == ["c"]
    assert json.loads(query.ends[-1]) == {
        "@": {"log": orders.cluster_id, "topics": {"orders": [1, 0]}},
        "orders": {"0": 3, "1": 0},
    }


def test_the_same_offsets_give_the_same_records(orders: broker.Log, root: Path) -> None:
    query = Query(root)
    fill(orders, "orders", "a", "b")
    query.batch()
    fill(orders, "orders", "c", "d")
    query.batch()
    fill(orders, "orders", "e")
    first, second = map(json.loads, query.ends)
    for reader in (query, Query(root)):
        assert reader.replay(first, second) == ["c", "d"]


@pytest.mark.parametrize("start", ["latest", "timestamp"])
def test_a_first_batch_that_is_repeated_keeps_its_start(
    orders: broker.Log, root: Path, start: str
) -> None:
    fill(orders, "orders", "old")
    options = {"startingOffsets": "latest"}
    if start == "timestamp":
        time.sleep(0.01)
        options = {
            "startingTimestamp": str(int(time.time() * 1000)),
            "startingOffsetsByTimestampStrategy": "latest",
        }
    query = Query(root, **options)
    initial = query.reader.initialOffset()
    fill(orders, "orders", "a", "b")
    end = query.log_end(initial)
    # Killed here. Spark asks the next process for a start again, and hands it the logged end.
    fill(orders, "orders", "c")
    time.sleep(0.01)
    if start == "timestamp":
        options["startingTimestamp"] = str(int(time.time() * 1000))
    after = Query(root, query.ends, **options)
    assert after.replay(after.reader.initialOffset(), end) == ["a", "b"]
    assert after.batch() == ["c"]


def test_an_empty_first_batch_that_is_repeated_skips_nothing(
    orders: broker.Log, root: Path
) -> None:
    query = Query(root, startingOffsets="latest")
    end = query.log_end(query.reader.initialOffset())
    fill(orders, "orders", "a")
    after = Query(root, query.ends, startingOffsets="latest")
    assert after.replay(after.reader.initialOffset(), end) == []
    assert after.batch() == ["a"]
    fill(orders, "orders", "b")
    assert after.batch() == ["b"]
    assert "start" not in json.loads(after.ends[-1])["@"]


def test_a_new_partition_is_read_from_its_first_record(orders: broker.Log, root: Path) -> None:
    query = Query(root, startingOffsets="latest")
    fill(orders, "orders", "a")
    query.batch()
    orders.create_partitions("orders", 3)
    fill(orders, "orders", "n", partition=2)
    assert query.batch() == ["n"]


def test_a_new_topic_is_read_from_its_first_record(orders: broker.Log, root: Path) -> None:
    query = Query(root, subscribe="", subscribePattern="ord.*", startingOffsets="latest")
    fill(orders, "orders", "old")
    query.batch()
    orders.create_topic("ord-new")
    orders.create_topic("other")
    fill(orders, "ord-new", "n")
    fill(orders, "other", "o")
    time.sleep(1.1)
    assert query.batch() == ["n"]


def test_a_pattern_without_topics_waits_for_one(log: broker.Log, root: Path) -> None:
    query = Query(root, subscribe="", subscribePattern="ord.*")
    assert query.batch() == []
    log.create_topic("orders")
    fill(log, "orders", "a")
    time.sleep(1.1)
    assert query.batch() == ["a"]


def test_an_idle_query_asks_cheaply(orders: broker.Log, root: Path) -> None:
    query = Query(root, subscribe="", subscribePattern="ord.*")
    fill(orders, "orders", "a")
    query.batch()
    start = json.loads(query.ends[-1])
    began = time.perf_counter()
    for _ in range(200):
        assert query.reader.latestOffset(start, LIMITED) == start
        query.reader.reportLatestOffset()
    assert (time.perf_counter() - began) / 200 < 0.003


def test_the_latest_offset_is_reported_without_limits(orders: broker.Log, root: Path) -> None:
    query = Query(root, maxOffsetsPerTrigger="1")
    fill(orders, "orders", "a", "b", "c")
    query.batch()
    reported = query.reader.reportLatestOffset()
    assert reported is not None and reported["orders"] == {"0": 3, "1": 0}
    assert json.loads(query.ends[-1])["orders"] == {"0": 1, "1": 0}


# Limits.


def test_offsets_are_shared_out_as_kafkas_connector_does() -> None:
    sizes = {("t", 0): 900, ("t", 1): 100, ("t", 2): 0, ("t", 3): 1}
    assert share_offsets(sizes, 100) == {("t", 0): 89, ("t", 1): 9, ("t", 2): 0, ("t", 3): 1}
    assert share_offsets(sizes, 2000) == sizes


def test_a_batch_has_about_as_many_offsets_as_allowed(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", *map(str, range(30)))
    fill(orders, "orders", *map(str, range(30, 40)), partition=1)
    query = Query(root, maxOffsetsPerTrigger="8")
    sizes = []
    while (values := query.batch()) is not None:
        sizes.append(len(values))
    assert sum(sizes) == 40 and max(sizes) <= 9 and len(sizes) >= 5


def test_without_a_limit_from_spark_none_is_applied(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", *map(str, range(30)))
    query = Query(root, maxOffsetsPerTrigger="8", minOffsetsPerTrigger="8")
    assert len(query.batch(ReadAllAvailable()) or []) == 30


def test_a_batch_has_about_as_many_bytes_as_allowed(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", *["x" * 100] * 1000)
    fill(orders, "orders", *["y" * 100] * 1000, partition=1)
    query = Query(root, maxBytesPerTrigger="20000")
    sizes = []
    while (values := query.batch()) is not None:
        sizes.append(sum(map(len, values)))
    assert sum(sizes) == 200_000
    assert max(sizes) <= 20_000 and len(sizes) < 30


def test_a_frame_larger_than_the_limit_is_read_in_parts(orders: broker.Log, root: Path) -> None:
    with orders.producer(linger_ms=100, batch_size=1 << 20) as producer:
        for _ in range(1000):
            producer.send("orders", b"x" * 100, partition=0)
    query = Query(root, maxBytesPerTrigger="30000")
    sizes = []
    while (values := query.batch()) is not None:
        sizes.append(len(values))
    assert sum(sizes) == 1000 and 4 <= len(sizes) <= 8


def test_a_record_larger_than_the_limit_is_read_alone(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "x" * 5000, "y" * 5000)
    query = Query(root, maxBytesPerTrigger="10")
    assert [len(query.batch() or []), len(query.batch() or []), query.batch()] == [1, 1, None]


def test_a_batch_waits_for_enough_records_or_long_enough() -> None:
    now = 100.0
    patience = Patience(10, 5000, lambda: now)
    assert patience.is_over(0)  # the first one never waits
    assert not patience.is_over(9)
    assert patience.is_over(10)
    now += 4.9
    assert not patience.is_over(9)
    now += 0.2
    assert patience.is_over(1)
    assert not patience.is_over(1)


def test_waiting_leaves_the_offset_as_it_is(orders: broker.Log, root: Path) -> None:
    query = Query(root, minOffsetsPerTrigger="3")
    fill(orders, "orders", "a")
    assert query.batch() == ["a"]
    fill(orders, "orders", "b", "c")
    assert query.batch() is None
    fill(orders, "orders", "d")
    assert query.batch() == ["b", "c", "d"]


def test_available_now_reads_what_was_there_at_its_start(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a", "b", "c", "d", "e")
    query = Query(root, maxOffsetsPerTrigger="2", minOffsetsPerTrigger="2")
    query.reader.prepareForTriggerAvailableNow()
    fill(orders, "orders", "f")
    orders.create_partitions("orders", 3)
    fill(orders, "orders", "g", partition=2)
    batches = [query.batch() for _ in range(4)]
    assert batches == [["a", "b"], ["c", "d"], ["e"], None]


@pytest.mark.parametrize("options", [
    {"startingOffsets": "latest"},
    {"startingTimestamp": "99999999999999", "startingOffsetsByTimestampStrategy": "latest"},
])  # fmt: skip
def test_available_now_from_the_end_reads_nothing(
    orders: broker.Log, root: Path, options: dict[str, str]
) -> None:
    query = Query(root, **options)
    query.reader.prepareForTriggerAvailableNow()
    fill(orders, "orders", "a")
    assert [query.batch(), query.batch()] == [[], None]


# Consumer groups.


def test_the_position_is_published_as_the_query_advances(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a", "b", "c")
    query = Query(root, groupId="g", maxOffsetsPerTrigger="2")
    query.batch()
    assert orders.group_positions("g") == places(0, 0)
    query.batch()
    assert orders.group_positions("g") == places(2, 0)
    assert query.batch() is None  # idle, and yet the end of the last batch is told
    assert orders.group_positions("g") == places(3, 0)


def test_a_position_is_published_once(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a")
    query = Query(root, groupId="g")
    query.batch()
    query.batch()
    journal = next((root / "groups").rglob("*.log"))
    size = journal.stat().st_size
    assert [query.batch() for _ in range(5)] == [None] * 5
    assert journal.stat().st_size == size


def places(*offsets: int) -> dict[TopicPartition, int]:
    return {TopicPartition("orders", number): at for number, at in enumerate(offsets)}


def test_a_query_starts_where_a_group_is(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a", "b", "c")
    orders.publish_positions("g", places(1, 0))
    query = Query(root, groupId="g", startingOffsets="group")
    assert query.batch() == ["b", "c"]
    again = Query(root, query.ends, groupId="g", startingOffsets="group")
    assert again.batch() is None


@pytest.mark.parametrize(
    ("fallback", "values"), [("earliest", ["a", "b"]), ("latest", []), ("", [])]
)
def test_a_group_without_positions_has_a_fallback(
    orders: broker.Log, root: Path, fallback: str, values: list[str]
) -> None:
    fill(orders, "orders", "a", "b")
    options = {"groupId": "g", "startingOffsets": "group", "startingOffsetsFallback": fallback}
    assert Query(root, **options).batch() == values


def test_a_partition_that_a_group_does_not_know_is_read_from_its_first_record(
    orders: broker.Log, root: Path
) -> None:
    fill(orders, "orders", "a")
    orders.publish_positions("g", places(1, 0))
    orders.create_partitions("orders", 3)
    fill(orders, "orders", "n", partition=2)
    assert Query(root, groupId="g", startingOffsets="group").batch() == ["n"]


def test_a_position_of_a_group_that_was_removed_is_loss(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a", "b", "c")
    orders.publish_positions("g", places(0, 0))
    orders.delete_records({TopicPartition("orders", 0): 2})
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[0, 2\) were removed"):
        Query(root, groupId="g", startingOffsets="group").batch()


def test_a_position_of_a_deleted_topic_is_not_one_of_the_new(
    orders: broker.Log, root: Path
) -> None:
    fill(orders, "orders", "a", "b")
    orders.publish_positions("g", places(2, 0))
    orders.delete_topic("orders")
    orders.create_topic("orders", partitions=2)
    fill(orders, "orders", "x", "y", "z")
    options = {"startingOffsets": "group", "startingOffsetsFallback": "earliest"}
    assert Query(root, groupId="g", **options).batch() == ["x", "y", "z"]


def test_a_position_that_cannot_be_published_is_one_warning(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    (root / "groups").write_text("not a directory")
    fill(orders, "orders", "a", "b")
    query = Query(root, groupId="g", maxOffsetsPerTrigger="1")
    assert [query.batch(), query.batch(), query.batch()] == [["a"], ["b"], None]
    (text,) = warned()
    assert "could not be published to group 'g'" in text


# Metrics.


def test_a_query_counts_what_it_plans_and_how_far_it_is_behind(
    orders: broker.Log, root: Path
) -> None:
    fill(orders, "orders", "a", "b", "c")
    fill(orders, "orders", "d", partition=1)
    query = Query(root, groupId="g", maxOffsetsPerTrigger="2")
    measured = query.reader._query()
    query.batch()
    counted = measured.metrics()["source-metrics"]
    assert (counted["batch-total"], counted["records-planned-total"]) == (1, 2)
    assert counted["bytes-planned-total"] > 0 and counted["task-total"] == 1
    assert (counted["records-lag"], counted["records-lag-max"]) == (4, 3)
    while query.batch() is not None:
        pass
    counted = measured.metrics()["source-metrics"]
    assert (counted["records-planned-total"], counted["records-lag"]) == (4, 0)
    assert counted["plan-latency-avg"] > 0 and counted["look-latency-avg"] > 0
    published = measured.metrics()["source-group-metrics"]
    assert published["publish-total"] == 3 and published["publish-latency-avg"] > 0
    assert published["publish-error-total"] == 0


def test_losses_and_failed_publications_are_counted(orders: broker.Log, root: Path) -> None:
    (root / "groups").write_text("not a directory")
    fill(orders, "orders", "a", "b", "c")
    query = Query(root, groupId="g", failOnDataLoss="false")
    query.reader.initialOffset()
    orders.delete_records({TopicPartition("orders", 0): 2})
    assert query.batch() == ["c"]
    counted = query.reader._query().metrics()
    assert counted["source-metrics"]["data-loss-total"] == 1
    assert counted["source-metrics"]["records-planned-total"] == 1
    assert counted["source-group-metrics"]["publish-error-total"] == 1


def test_a_port_of_a_query_is_served_until_it_stops(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", "a")
    query = Query(root, metricsPort="0")
    query.batch()
    port = query.reader._query().metrics_port
    assert f"served on port {port}" in warned()[0]
    address = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert b'spark_log_source_metrics_batch_total{client_id="query"} 1.0' in answer.read()
    query.reader.stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=10)


def test_a_port_that_is_taken_ends_the_query_at_its_start(orders: broker.Log, root: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidOption, match=f"metrics port {port}: cannot listen there"):
            Query(root, metricsPort=str(port)).reader.getDefaultReadLimit()


# Sealed history.


@pytest.mark.parametrize("is_limited", [False, True])
def test_records_are_the_same_after_sealing(
    orders: broker.Log, root: Path, is_limited: bool
) -> None:
    values = [str(number) * 50 for number in range(500)]
    fill(orders, "orders", *values)
    before = Query(root)
    start = before.reader.initialOffset()
    end = before.log_end(start)
    planned = before.reader.partitions(start, end)
    orders.maintain("orders", seal=True)
    assert before.values(planned) == values
    assert before.replay(start, end) == Query(root).replay(start, end) == values
    fill(orders, "orders", "new")
    after = Query(root, maxBytesPerTrigger="1000" if is_limited else "")
    found: list[str] = []
    while (batch := after.batch()) is not None:
        found += batch
    assert found == [*values, "new"]
    assert len(after.ends) > 3 if is_limited else len(after.ends) == 1


@pytest.mark.parametrize("limit", ["", "7"])
def test_compaction_leaves_gaps_and_no_loss(log: broker.Log, root: Path, limit: str) -> None:
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
    log.create_topic("orders", config=config)
    with log.producer() as producer:
        for number in range(40):
            producer.send("orders", b"%d" % number, key=b"%d" % (number % 10))
    log.maintain("orders", seal=True)
    log.maintain("orders", seal=True)
    with log.producer() as producer:
        producer.send("orders", b"40", key=b"new")
    query = Query(root, maxOffsetsPerTrigger=limit)
    found: list[int] = []
    while True:
        start = json.loads(query.ends[-1]) if query.ends else query.reader.initialOffset()
        end = query.log_end(start)
        if end is None:
            break
        for task in query.reader.partitions(start, end):
            for batch in query.reader.read(task):
                offsets = batch.column("offset").to_pylist()
                assert [int(value) for value in batch.column("value").to_pylist()] == offsets
                found += offsets
    assert found == [*range(30, 41)]


def test_tasks_over_sealed_files_are_split_as_asked(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", *map(str, range(100)))
    orders.maintain("orders", seal=True)
    fill(orders, "orders", *map(str, range(100, 110)))
    query = Query(root, minPartitions="4")
    start = query.reader.initialOffset()
    tasks = query.reader.partitions(start, query.log_end(start))
    assert [len(query.values([task])) for task in tasks] == [27, 28, 27, 28]


# What is lost.


def test_removed_records_are_named(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", *"abcdef")
    query = Query(root, maxOffsetsPerTrigger="2")
    query.batch()
    orders.delete_records({TopicPartition("orders", 0): 4})
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[2, 4\) were removed by retention"):
        query.batch()


def test_removed_records_are_skipped_with_one_warning(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", *"abcdef")
    query = Query(root, maxOffsetsPerTrigger="2", failOnDataLoss="false")
    query.batch()
    orders.delete_records({TopicPartition("orders", 0): 3})
    assert [query.batch(), query.batch(), query.batch()] == [["d", "e"], ["f"], None]
    (text,) = warned()
    assert "orders-0: offsets [2, 3) were removed" in text


def test_records_removed_between_the_log_and_the_replay_of_a_batch(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", *"abcdef")
    query = Query(root, maxOffsetsPerTrigger="4", failOnDataLoss="false")
    start = query.reader.initialOffset()
    end = query.log_end(start)
    orders.delete_records({TopicPartition("orders", 0): 5})
    assert query.replay(start, end) == []
    assert query.batch() == ["f"]
    assert [text.split("orders-0: ")[1][:15] for text in warned()] == [
        "offsets [0, 4) ",
        "offsets [4, 5) ",
    ]


def test_records_removed_after_a_task_was_planned(
    log: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    log.create_topic("orders", config={"file.delete.delay.ms": 0, "segment.bytes": 4096})
    for letter in "abcdef":
        fill(log, "orders", *[letter * 100] * 30)
    query = Query(root)
    start = query.reader.initialOffset()
    tasks = query.reader.partitions(start, query.log_end(start))
    log.maintain("orders", seal=True)
    log.delete_records({TopicPartition("orders", 0): 45})
    log.maintain("orders")
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[0, 30\) were removed"):
        query.values(tasks)
    lenient = Query(root, failOnDataLoss="false")
    assert len(lenient.values(tasks)) == 135
    # One warning for the task, though each file is a slice of its own.
    (text,) = warned()
    assert text.endswith(
        "=false: orders-0: offsets [0, 45) were removed by retention or delete_records"
    )
    log.delete_topic("orders")
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[0, \d+\) are gone: .* was deleted"):
        query.values(tasks)
    assert lenient.values(tasks) == []


def test_a_task_names_what_is_lost_of_each_partition_in_one_warning(
    log: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    """Its slices go file by file, so that those of two partitions take turns."""
    config = {"file.delete.delay.ms": 0, "segment.bytes": 4096}
    log.create_topic("orders", partitions=2, config=config)
    with log.producer() as producer:
        for letter in b"abcdef":
            for number in range(60):
                producer.send("orders", bytes([letter]) * 100, partition=number % 2)
            producer.flush()
    query = Query(root, failOnDataLoss="false")
    start = query.reader.initialOffset()
    (task,) = query.reader.partitions(start, query.log_end(start))
    assert len(task.slices) > 4
    log.maintain("orders", seal=True)
    log.delete_records({TopicPartition("orders", 0): 100, TopicPartition("orders", 1): 45})
    log.maintain("orders")
    assert len(query.values([task])) == 360 - 145
    (text,) = warned()
    assert "orders-0: offsets [0, 100) were removed" in text
    assert "orders-1: offsets [0, 45) were removed" in text
    assert text.count("offsets") == 2


def test_of_a_loss_that_grows_only_what_is_new_is_said(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", *"abcdefgh")
    query = Query(root, failOnDataLoss="false")
    start = query.reader.initialOffset()
    for offset in (3, 3, 5):
        orders.delete_records({TopicPartition("orders", 0): offset})
        end = query.reader.latestOffset(start, LIMITED)
    assert query.replay(start, end) == ["f", "g", "h"]
    assert [text.split("orders-0: ")[1][:15] for text in warned()] == [
        "offsets [0, 3) ",
        "offsets [3, 5) ",
    ]


def test_the_same_offsets_lost_of_a_newer_topic_are_another_loss(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    query = Query(root, failOnDataLoss="false")
    for _ in range(3):
        fill(orders, "orders", *"ab")
        assert query.batch() == ["a", "b"]
        orders.delete_topic("orders")
        orders.create_topic("orders", partitions=2)
    assert ["orders-0: offsets from 2 on are gone" in text for text in warned()] == [True, True]


def test_a_deleted_topic_is_loss(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a")
    query = Query(root)
    query.batch()
    orders.delete_topic("orders")
    with pytest.raises(DataLoss, match=r"orders-0: offsets from 1 on are gone: .* was deleted"):
        query.batch()


def test_without_its_topic_a_query_goes_on_and_waits_for_the_next(
    orders: broker.Log, root: Path, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", "a")
    query = Query(root, failOnDataLoss="false")
    query.batch()
    orders.delete_topic("orders")
    assert query.batch() == []
    assert query.batch() is None
    assert len(warned()) == 1 and "orders-0: offsets from 1 on" in warned()[0]
    orders.create_topic("orders")
    fill(orders, "orders", "n")
    time.sleep(1.1)
    assert query.batch() == ["n"]
    assert len(warned()) == 1


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_topic_made_again_is_another_topic(
    orders: broker.Log, root: Path, is_restarted: bool, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", "a")
    query = Query(root)
    query.batch()
    orders.delete_topic("orders")
    orders.create_topic("orders", partitions=2)
    fill(orders, "orders", "x", "y", "z")  # goes beyond the position
    if is_restarted:
        query = Query(root, query.ends)
    with pytest.raises(DataLoss, match="orders-0: offsets from 1 on .* deleted and made again"):
        query.batch()
    lenient = Query(root, query.ends, failOnDataLoss="false")
    assert lenient.batch() == ["x", "y", "z"]
    assert lenient.batch() is None
    assert len(warned()) == 1
    assert json.loads(lenient.ends[-1])["@"]["topics"] == {"orders": [2, 0]}


def make_log_again(root: Path, *values: str) -> broker.Log:
    """Remove the whole log, under whoever has it open, and make another at its place."""
    shutil.rmtree(root)
    log = broker.open(root)
    log.create_topic("orders", partitions=2)
    fill(log, "orders", *values)
    return log


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_log_made_again_is_another_log(
    orders: broker.Log, root: Path, is_restarted: bool, warned: Callable[[], list[str]]
) -> None:
    fill(orders, "orders", "a")
    query = Query(root)
    query.batch()
    made = make_log_again(root, "x", "y", "z")  # goes beyond the position
    if is_restarted:
        query = Query(root, query.ends)
    with pytest.raises(DataLoss, match="orders-0: offsets from 1 on .* the log was removed and"):
        query.batch()
    lenient = Query(root, query.ends, failOnDataLoss="false")
    assert lenient.batch() == ["x", "y", "z"]
    assert lenient.batch() is None
    assert json.loads(lenient.ends[-1])["@"]["log"] == made.cluster_id
    make_log_again(root, "u", "v", "w", "x")
    assert lenient.batch() == ["u", "v", "w", "x"]
    assert len(warned()) == 2, "the same offsets of another log are another loss"


def test_a_batch_of_a_log_that_was_made_again_is_not_filled_from_the_new_one(
    orders: broker.Log, root: Path
) -> None:
    fill(orders, "orders", "a", "b")
    query = Query(root, failOnDataLoss="false")
    start = query.reader.initialOffset()
    end = query.log_end(start)
    make_log_again(root, "x", "y", "z")
    assert query.replay(start, end) == []
    assert query.batch() == ["x", "y", "z"]


def test_a_log_put_in_the_place_of_another_is_noticed_by_a_pattern(
    orders: broker.Log, root: Path, tmp_path: Path
) -> None:
    fill(orders, "orders", "a")
    query = Query(root, subscribe="", subscribePattern="ord.*")
    query.batch()
    root.rename(tmp_path / "before")  # All its files keep a name.
    log = broker.open(root)
    log.create_topic("ordinary")
    fill(log, "ordinary", "x")
    time.sleep(1.1)
    with pytest.raises(DataLoss, match="orders-0: offsets from 1 on"):
        query.batch()
    assert Query(root, query.ends, subscribe="", subscribePattern="ord.*",
                 failOnDataLoss="false").batch() == ["x"]  # fmt: skip


def test_a_log_that_is_gone_ends_a_query(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a")
    query = Query(root)
    query.batch()
    shutil.rmtree(root)
    with pytest.raises(broker.LogNotFound):
        query.batch()


def test_a_checkpoint_of_an_earlier_version_names_no_log_and_is_taken(
    orders: broker.Log, root: Path
) -> None:
    fill(orders, "orders", "a")
    query = Query(root)
    query.batch()
    before = json.loads(query.ends[-1])
    del before["@"]["log"], before["@"]["start"]
    query = Query(root, [json.dumps(before)])
    assert query.batch() == [], "only so that the checkpoint names it from now on"
    assert query.batch() is None
    fill(orders, "orders", "b")
    assert query.batch() == ["b"]


def test_a_batch_of_a_topic_that_was_made_again_is_not_filled_from_the_new_one(
    orders: broker.Log, root: Path
) -> None:
    fill(orders, "orders", "a", "b")
    query = Query(root, failOnDataLoss="false")
    start = query.reader.initialOffset()
    end = query.log_end(start)
    orders.delete_topic("orders")
    orders.create_topic("orders", partitions=2)
    fill(orders, "orders", "x", "y", "z")
    assert query.replay(start, end) == []
    assert query.batch() == ["x", "y", "z"]


def cut_power(root: Path, keep: list[str], lose: list[str]) -> None:
    """Write records in one boot of a machine, of which the next boot finds only the first."""
    before = Log(LocalStorage(str(root), boot_id="before"))
    before.create_topic("orders", partitions=1)
    fill(before, "orders", *keep)
    journal = root / "topics/orders/1/journal/00000000000000000000.log"
    length = journal.stat().st_size
    fill(before, "orders", *lose)
    (root / "length").write_text(str(length))


def boot_again(root: Path) -> None:
    journal = root / "topics/orders/1/journal/00000000000000000000.log"
    length = int((root / "length").read_text())
    (root / "length").unlink()
    with journal.open("r+b") as file:
        file.truncate(length)
    for checkpoint in (root / "topics/orders/1/checkpoint").glob("*"):
        checkpoint.unlink()


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_position_in_records_that_a_power_cut_took_is_loss(
    root: Path, is_written_again: bool, warned: Callable[[], list[str]]
) -> None:
    cut_power(root, ["a", "b"], ["c", "d"])
    query = Query(root)
    assert query.batch() == ["a", "b", "c", "d"]
    boot_again(root)
    if is_written_again:
        fill(broker.open(root), "orders", *"xyzuvw")
    after = Query(root, list(query.ends))
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[2, 4\) were read .* power cut"):
        after.batch()
    lenient = Query(root, list(query.ends), failOnDataLoss="false")
    assert lenient.batch() == (list("xyzuvw") if is_written_again else [])
    assert "orders-0: offsets [2, 4)" in warned()[-1]
    assert lenient.batch() is None


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_position_of_a_group_in_records_that_a_power_cut_took_is_loss(
    root: Path, is_written_again: bool, warned: Callable[[], list[str]]
) -> None:
    cut_power(root, ["a", "b"], ["c", "d"])
    before = Log(LocalStorage(str(root), boot_id="before"))
    before.publish_positions("g", {TopicPartition("orders", 0): 4})
    boot_again(root)
    if is_written_again:
        fill(broker.open(root), "orders", *"xyzuvw")
    options = {"groupId": "g", "startingOffsets": "group"}
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[2, 4\) were read .* power cut"):
        Query(root, **options).batch()
    lenient = Query(root, **options, failOnDataLoss="false")
    assert lenient.batch() == (list("xyzuvw") if is_written_again else [])
    assert "orders-0: offsets [2, 4)" in warned()[0]


def test_a_position_of_a_group_that_a_power_cut_spared_is_good(root: Path) -> None:
    cut_power(root, ["a", "b"], ["c", "d"])
    before = Log(LocalStorage(str(root), boot_id="before"))
    before.publish_positions("g", {TopicPartition("orders", 0): 1})
    boot_again(root)
    fill(broker.open(root), "orders", *"xy")
    assert Query(root, groupId="g", startingOffsets="group").batch() == ["b", "x", "y"]


def test_a_query_publishes_its_position_as_one_of_before_the_power_cut(root: Path) -> None:
    cut_power(root, ["a", "b"], ["c", "d"])
    query = Query(root)
    query.batch()
    boot_again(root)
    log = broker.open(root)
    fill(log, "orders", *"xyzuvw")
    with pytest.raises(DataLoss):
        Query(root, list(query.ends), groupId="g").batch()
    (lag,) = log.describe_group("g").partitions
    assert (lag.position, lag.is_lost, lag.lag) == (4, True, 6)
    with log.consumer("orders", group_id="g") as consumer:
        with pytest.raises(broker.LostPosition, match=r"took the offsets \[2, 4\)"):
            while True:
                consumer.poll(100)


def test_a_batch_that_a_power_cut_took_in_part_is_loss(root: Path) -> None:
    cut_power(root, ["a", "b"], ["c", "d"])
    query = Query(root)
    start = query.reader.initialOffset()
    end = query.log_end(start)
    boot_again(root)
    fill(broker.open(root), "orders", *"xyzuvw")
    with pytest.raises(DataLoss, match=r"orders-0: offsets \[2, 4\) were lost in a power cut"):
        Query(root, query.ends).replay(start, end)
    lenient = Query(root, query.ends, failOnDataLoss="false")
    assert lenient.replay(start, end) == ["a", "b"]
    assert lenient.batch() == list("xyzuvw")


def test_a_topic_that_is_no_longer_selected_is_loss(orders: broker.Log, root: Path) -> None:
    orders.create_topic("more")
    query = Query(root, subscribe="orders,more")
    query.batch()
    after = Query(root, query.ends)
    with pytest.raises(DataLoss, match="more-0: offsets from 0 on will not be read"):
        after.batch()


def test_the_error_can_be_pickled_and_says_what_to_do(orders: broker.Log, root: Path) -> None:
    fill(orders, "orders", "a", "b")
    query = Query(root, startingOffsets='{"orders":{"0":0,"1":0}}')
    orders.delete_records({TopicPartition("orders", 0): 1})
    with pytest.raises(DataLoss) as caught:
        query.batch()
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert text == str(caught.value) and "set the source option failOnDataLoss to false" in text


# Tasks.


def test_little_is_read_by_one_task_and_much_by_one_per_core() -> None:
    assert task_count(1000, cores=8) == 1
    assert task_count(9 << 20, cores=8) == 2
    assert task_count(100 << 20, cores=8) == 8
    assert task_count(10 << 30, cores=8) == 160


def views_of(query: Query) -> Any:
    query.batch()
    return query.reader._query()._views


def test_small_topics_share_a_task(log: broker.Log, root: Path) -> None:
    names = [f"t{number}" for number in range(5)]
    for name in names:
        log.create_topic(name, partitions=3)
        fill(log, name, "a", "b", partition=2)
    query = Query(root, subscribe=",".join(names))
    ranges = Ranges({name: {2: (0, 2)} for name in names})
    tasks = planning.plan(ranges, views_of(query), Sizing(), cores=4)
    assert len(tasks) == 1 and sum(piece.record_count for piece in tasks[0]) == 10


@pytest.mark.parametrize(
    ("sizing", "sizes"),
    [
        (Sizing(), [100]),
        (Sizing(task_count_min=4), [25, 25, 25, 25]),
        (Sizing(records_max=40), [33, 33, 34]),
        (Sizing(task_count_min=2, records_max=30), [25, 25, 25, 25]),
        (Sizing(task_count_min=1000), [1] * 100),
    ],
)
def test_a_range_is_split_as_asked(
    orders: broker.Log, root: Path, sizing: Sizing, sizes: list[int]
) -> None:
    fill(orders, "orders", *map(str, range(100)))
    views = views_of(Query(root))
    tasks = planning.plan(Ranges({"orders": {0: (0, 100)}}), views, sizing, cores=2)
    assert [sum(piece.record_count for piece in task) for task in tasks] == sizes


@pytest.mark.slow
def test_planning_over_many_small_frames_is_quick_and_small(log: broker.Log, root: Path) -> None:
    log.create_topic("orders", partitions=4)
    with log.producer() as producer:
        for number in range(100_000):
            producer.send("orders", b"v", partition=number % 4)
            if number % 20 == 0:
                producer.flush()
    query = Query(root)
    start = query.reader.initialOffset()
    end = query.reader.latestOffset(start, ReadAllAvailable())
    query.reader.partitions(start, end)
    began = time.perf_counter()
    tasks = query.reader.partitions(start, end)
    assert time.perf_counter() - began < 1
    assert sum(len(pickle.dumps(task)) for task in tasks) < 200_000
    assert all(isinstance(task, LogTask) for task in tasks)
