"""The source through Spark: rows, options, checkpoints, and what happens when things go wrong."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import TopicPartition

pytestmark = pytest.mark.spark

JOB = Path(__file__).with_name("spark_source_job.py")


def fill(log: broker.Log, topic: str, *values: str, partition: int = 0) -> None:
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value.encode(), partition=partition)


@pytest.fixture
def orders(log: broker.Log) -> broker.Log:
    """Partition 0 holds a, b, c; partition 1 holds d, e."""
    log.create_topic("orders", partitions=2)
    fill(log, "orders", "a", "b", "c")
    fill(log, "orders", "d", "e", partition=1)
    return log


class Reads:
    """Batch reads of one log."""

    def __init__(self, spark: Any, root: Path) -> None:
        self._spark = spark
        self._root = str(root)

    def frame(self, schema: str | None = None, **options: str) -> Any:
        reader = self._spark.read.format("log").options(**({"subscribe": "orders"} | options))
        if schema is not None:
            reader = reader.schema(schema)
        return reader.load(self._root)

    def values(self, **options: str) -> str:
        rows = self.frame(**options).select("value").collect()
        return "".join(sorted(row.value.decode() for row in rows))


@pytest.fixture
def reads(spark: Any, root: Path) -> Reads:
    return Reads(spark, root)


class Streams:
    """Streaming queries of one log into Parquet files, from one checkpoint."""

    def __init__(self, spark: Any, root: Path, directory: Path) -> None:
        self.spark = spark
        self.root = str(root)
        self.output = directory / "output"
        self.checkpoint = directory / "checkpoint"

    def frame(self, **options: str) -> Any:
        given = {"subscribe": "orders", "startingOffsets": "earliest"} | options
        given = {name: value for name, value in given.items() if value}
        return self.spark.readStream.format("log").options(**given).load(self.root)

    def start(self, trigger: dict[str, Any] | None = None, **options: str) -> Any:
        return (
            self.frame(**options)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start(str(self.output))
        )

    def run(self, trigger: dict[str, Any] | None = None, **options: str) -> Any:
        query = self.start(trigger, **options)
        query.awaitTermination()
        return query

    def values(self) -> str:
        rows = self.spark.read.parquet(str(self.output)).select("value").collect()
        return "".join(sorted(row.value.decode() for row in rows))

    def ends(self) -> list[dict[str, Any]]:
        """Return the end of each batch, as the checkpoint has it."""
        files = [path for path in (self.checkpoint / "offsets").iterdir() if path.name.isdigit()]
        files.sort(key=lambda path: int(path.name))
        return [json.loads(path.read_text().splitlines()[2]) for path in files]


@pytest.fixture
def streams(spark: Any, root: Path, tmp_path: Path) -> Iterator[Streams]:
    yield Streams(spark, root, tmp_path)
    for query in spark.streams.active:
        query.stop()


def failure(action: Any) -> str:
    with pytest.raises(Exception) as caught:
        action()
    return str(caught.value)


# Rows.


def test_rows_have_the_columns_of_sparks_kafka_connector(orders: broker.Log, reads: Reads) -> None:
    frame = reads.frame()
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    rows = frame.orderBy("partition", "offset").collect()
    assert [(row.topic, row.partition, row.offset, bytes(row.value)) for row in rows] == [
        ("orders", 0, 0, b"a"),
        ("orders", 0, 1, b"b"),
        ("orders", 0, 2, b"c"),
        ("orders", 1, 0, b"d"),
        ("orders", 1, 1, b"e"),
    ]
    assert {(row.key, row.timestampType) for row in rows} == {(None, 0)}


def test_every_field_of_a_record_comes_through(log: broker.Log, reads: Reads) -> None:
    log.create_topic("orders")
    with log.producer() as producer:
        producer.send("orders", None, key=b"k", timestamp_ms=1_700_000_000_123)
        producer.send("orders", b"v", headers=[("h", b"1"), ("h", None)], timestamp_ms=5)
        producer.send("orders", b"", key=b"")
    frame = reads.frame(includeHeaders="true").selectExpr("*", "unix_millis(timestamp) as ms")
    first, second, third = frame.orderBy("offset").collect()
    assert (first.key, first.value, first.headers, first.ms) == (b"k", None, None, 1700000000123)
    assert [(header.key, header.value) for header in second.headers] == [("h", b"1"), ("h", None)]
    assert (second.key, second.ms) == (None, 5)
    assert (third.key, third.value, third.headers) == (b"", b"", None)


def test_the_logs_own_time_is_marked(log: broker.Log, reads: Reads) -> None:
    log.create_topic("orders", config={"message.timestamp.type": "LogAppendTime"})
    with log.producer() as producer:
        producer.send("orders", b"a", timestamp_ms=5)
    (row,) = reads.frame().selectExpr("timestampType", "unix_millis(timestamp) ms").collect()
    assert row.timestampType == 1 and row.ms > 1_600_000_000_000


def test_a_schema_with_fewer_columns_sends_only_those(orders: broker.Log, reads: Reads) -> None:
    frame = reads.frame("offset BIGINT, VALUE BINARY", startingOffsets="earliest")
    assert frame.columns == ["offset", "VALUE"]
    assert sorted((row.offset, bytes(row.VALUE)) for row in frame.collect()) == [
        (0, b"a"),
        (0, b"d"),
        (1, b"b"),
        (1, b"e"),
        (2, b"c"),
    ]
    assert reads.frame("topic STRING").distinct().collect()[0].topic == "orders"
    assert reads.frame("headers ARRAY<STRUCT<key: STRING, value: BINARY>>").count() == 5


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("price INT", "the schema names column 'price'; a log has key, value"),
        ("value STRING", "column 'value' the type string; in a log it is binary"),
        ("value BINARY NOT NULL", "NOT NULL; a record may lack it"),
    ],
)
def test_a_schema_the_log_cannot_fill_is_refused(
    orders: broker.Log, reads: Reads, schema: str, text: str
) -> None:
    assert text in failure(reads.frame(schema).collect)


def test_small_and_large_frames_of_all_codecs_are_put_together(
    log: broker.Log, reads: Reads
) -> None:
    log.create_topic("orders", partitions=2)
    log.create_topic("more")
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        with log.producer(compression_type=codec) as producer:
            for number in range(60):
                producer.send("orders", f"{codec}-{number}".encode(), partition=number % 2)
                if number % 20 == 0:
                    producer.flush()
    with log.producer() as producer:
        for number in range(70_000):
            producer.send("more", b"%d" % number)
    frame = reads.frame(subscribe="orders,more")
    counts = {(row.topic, row.partition): row["count"]
              for row in frame.groupBy("topic", "partition").count().collect()}  # fmt: skip
    assert counts == {("orders", 0): 150, ("orders", 1): 150, ("more", 0): 70_000}
    wrong = frame.where("topic = 'more' and cast(value as string) != cast(offset as string)")
    assert wrong.count() == 0
    assert frame.where("topic = 'orders'").select("partition", "offset").distinct().count() == 300


# Batch ranges.


def test_a_batch_reads_from_the_first_to_the_last_record(orders: broker.Log, reads: Reads) -> None:
    assert reads.values() == "abcde"
    assert reads.values(startingOffsets="earliest", endingOffsets="latest") == "abcde"


@pytest.mark.parametrize(
    ("start", "end", "values"),
    [
        ({"0": 1, "1": -2}, {"0": 2, "1": -1}, "bde"),
        ({"0": 2, "1": 2}, {"0": -1, "1": -1}, "c"),
        ({"0": 0, "1": 0}, {"0": 0, "1": 0}, ""),
    ],
)
def test_offsets_bound_a_batch(
    orders: broker.Log, reads: Reads, start: dict[str, int], end: dict[str, int], values: str
) -> None:
    starting, ending = json.dumps({"orders": start}), json.dumps({"orders": end})
    assert reads.values(startingOffsets=starting, endingOffsets=ending) == values


def test_times_bound_a_batch(log: broker.Log, reads: Reads) -> None:
    log.create_topic("orders", partitions=2)
    with log.producer() as producer:
        for number, letter in enumerate(b"abcdef"):
            producer.send(
                "orders", bytes([letter]), partition=number % 2, timestamp_ms=1000 + number
            )
    assert reads.values(startingTimestamp="1002") == "cdef"
    assert reads.values(startingTimestamp="1001", endingTimestamp="1004") == "bcd"
    assert reads.values(endingTimestamp="9000") == "abcdef"
    by_partition = {
        "startingOffsetsByTimestamp": '{"orders":{"0":1002,"1":1003}}',
        "endingOffsetsByTimestamp": '{"orders":{"0":1004,"1":1009}}',
    }
    assert reads.values(**by_partition) == "cdf"
    late = {"startingTimestamp": "9000"}
    text = failure(lambda: reads.values(**late))
    assert "No offset matched from request of topic-partition orders-0 and timestamp 9000" in text
    assert reads.values(**late, startingOffsetsByTimestampStrategy="latest") == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingOffsets": '{"orders":{"0":0}}'}, "you must specify all TopicPartitions"),
        ({"startingOffsets": '{"orders":{"0":0,"1":9}}'},
         "startingOffsets for orders-1 is 9, but the partition holds [0, 2)"),
        ({"endingOffsets": '{"orders":{"0":4,"1":0}}'}, "endingOffsets for orders-0 is 4"),
        ({"startingOffsets": "latest"}, "starting offset can't be latest for batch queries"),
        ({"startingOffsets": '{"orders":{"0":2,"1":0}}', "endingTimestamp": "0"},
         "The resolved start offset 2 (startingOffsets) is greater than the end offset 0"),
    ],
)  # fmt: skip
def test_a_range_that_makes_no_sense_is_refused(
    orders: broker.Log, reads: Reads, options: dict[str, str], text: str
) -> None:
    assert text in failure(lambda: reads.values(**options))


def test_the_end_of_a_batch_is_fixed_at_its_first_action(orders: broker.Log, reads: Reads) -> None:
    frame = reads.frame()
    fill(orders, "orders", "f")
    assert frame.count() == 6
    fill(orders, "orders", "g")
    assert frame.count() == 6
    assert reads.frame().count() == 7


def test_topics_are_chosen_by_name_pattern_or_partition(orders: broker.Log, reads: Reads) -> None:
    orders.create_topic("border")
    fill(orders, "border", "x")
    assert reads.values(subscribe="orders, border") == "abcdex"
    frame = reads._spark.read.format("log").option("subscribePattern", "order$")
    assert [bytes(row.value) for row in frame.load(reads._root).collect()] == [b"x"]
    frame = reads._spark.read.format("log").option("assign", '{"orders":[1],"border":[0]}')
    assert sorted(bytes(row.value) for row in frame.load(reads._root).collect()) == [
        b"d",
        b"e",
        b"x",
    ]


def test_removed_records_fail_a_batch_or_are_skipped(orders: broker.Log, reads: Reads) -> None:
    orders.delete_records({TopicPartition("orders", 0): 2})
    assert reads.values() == "cde"
    start = {"startingOffsets": '{"orders":{"0":0,"1":0}}'}
    assert "orders-0: offsets [0, 2) were removed" in failure(lambda: reads.values(**start))
    assert reads.values(**start, failOnDataLoss="false") == "cde"


def test_an_empty_topic_has_no_rows(log: broker.Log, reads: Reads) -> None:
    log.create_topic("orders", partitions=3)
    assert reads.frame().collect() == []


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({}, 1), ({"minPartitions": "4"}, 4), ({"maxRecordsPerPartition": "2"}, 3)],
)
def test_tasks_are_few_unless_asked_for(
    orders: broker.Log, reads: Reads, options: dict[str, str], tasks: int
) -> None:
    frame = reads.frame(**options)
    assert frame.rdd.getNumPartitions() == tasks
    assert frame.count() == 5


# Mistakes are found as early as Spark lets us.


@pytest.mark.parametrize("kind", ["read", "readStream"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribe": "none"}, "topic 'none' does not exist"),
        ({"assign": '{"orders":[7]}'}, "topic 'orders' has no partition 7"),
        ({}, "One of the following options must be specified"),
        ({"subscribe": "orders", "startOffset": "x"}, "did you mean 'startingOffsets'?"),
        ({"subscribe": "orders", "failOnDataLoss": "maybe"}, "failOnDataLoss='maybe' is not"),
        ({"subscribe": "orders", "groupId": "g" * 300}, "has 300 bytes when percent-encoded"),
        ({"subscribe": "orders", "startingOffsets": "group"}, "needs the option groupId as well"),
    ],
)
def test_wrong_options_fail_at_load(
    spark: Any, orders: broker.Log, root: Path, kind: str, options: dict[str, str], text: str
) -> None:
    reader = getattr(spark, kind).format("log").options(**options)
    assert text in failure(lambda: reader.load(str(root)))


def test_a_missing_log_fails_at_load(spark: Any, tmp_path: Path) -> None:
    reader = spark.read.format("log").option("subscribe", "a")
    assert "no log at" in failure(lambda: reader.load(str(tmp_path / "none")))
    assert "needs the path of the log" in failure(reader.load)
    assert not (tmp_path / "none").exists()


def test_a_stream_with_an_end_fails_at_its_start(orders: broker.Log, streams: Streams) -> None:
    text = failure(lambda: streams.run(endingOffsets="latest"))
    assert "ending offset not valid in streaming queries" in text


def test_the_options_of_a_kafka_job_are_accepted(orders: broker.Log, streams: Streams) -> None:
    options = {
        "kafka.bootstrap.servers": "",
        "kafka.group.id": "g",
        "kafka.security.protocol": "SASL_SSL",
        "groupIdPrefix": "p",
        "subscribe": "orders",
        "startingOffsets": "earliest",
        "failOnDataLoss": "false",
        "maxOffsetsPerTrigger": "1000",
        "minOffsetsPerTrigger": "1",
        "maxTriggerDelay": "1s",
        "minPartitions": "2",
        "maxRecordsPerPartition": "1000",
        "includeHeaders": "true",
        "kafkaConsumer.pollTimeoutMs": "1000",
        "fetchOffset.numRetries": "3",
        "fetchOffset.retryIntervalMs": "10",
    }
    streams.run(**options)
    assert streams.values() == "abcde"


# Streaming.


def test_the_checkpoint_has_kafkas_json_and_a_restart_goes_on_from_it(
    orders: broker.Log, streams: Streams
) -> None:
    streams.run()
    extra = {"log": orders.cluster_id, "topics": {"orders": [1, 0]}}
    start = {"@": extra, "orders": {"0": 0, "1": 0}}
    assert streams.ends() == [{"@": {**extra, "start": start}, "orders": {"0": 3, "1": 2}}]
    fill(orders, "orders", "f")
    streams.run(startingOffsets="latest")
    assert streams.ends()[1:] == [{"@": extra, "orders": {"0": 4, "1": 2}}]
    assert streams.values() == "abcdef"


def test_available_now_keeps_the_limit_and_once_does_not(
    orders: broker.Log, streams: Streams
) -> None:
    streams.run(maxOffsetsPerTrigger="2")
    assert [end["orders"] for end in streams.ends()] == [
        {"0": 1, "1": 1},
        {"0": 2, "1": 2},
        {"0": 3, "1": 2},
    ]
    fill(orders, "orders", *"fghij")
    streams.run({"once": True}, maxOffsetsPerTrigger="2")
    assert len(streams.ends()) == 4
    assert streams.values() == "abcdefghij"


def test_a_running_query_follows_the_log(orders: broker.Log, streams: Streams) -> None:
    query = streams.start({"processingTime": "50 milliseconds"}, startingOffsets="latest")
    wait_for(lambda: query.lastProgress is not None)
    fill(orders, "orders", "f")
    wait_for(lambda: len(streams.ends()) >= 2)
    orders.create_partitions("orders", 3)
    fill(orders, "orders", "g", partition=2)
    query.processAllAvailable()
    progress = json.loads(query.lastProgress.json)["sources"][0]
    query.stop()
    assert streams.values() == "fg"
    assert progress["latestOffset"]["orders"] == {"0": 4, "1": 2, "2": 1}


def test_a_run_to_the_end_publishes_its_last_position_unless_it_is_once(
    orders: broker.Log, streams: Streams
) -> None:
    """Once: Spark does not call the source again after the batch, until the next run."""
    ends = {TopicPartition("orders", 0): 3, TopicPartition("orders", 1): 2}
    streams.run(groupId="g")
    assert orders.group_positions("g") == ends
    fill(orders, "orders", "f")
    streams.run({"once": True}, groupId="g")
    assert streams.values() == "abcdef"
    assert orders.group_positions("g") == ends
    streams.run({"once": True}, groupId="g")
    assert orders.group_positions("g") == {**ends, TopicPartition("orders", 0): 4}


def test_a_running_query_serves_its_metrics(orders: broker.Log, streams: Streams) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    query = streams.start({"processingTime": "50 milliseconds"}, metricsPort=str(port))
    query.processAllAvailable()

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    text = scrape()
    assert 'spark_log_source_metrics_records_planned_total{client_id="query"} 5.0' in text
    fill(orders, "orders", *"fgh")
    query.processAllAvailable()
    planned = 'spark_log_source_metrics_records_planned_total{client_id="query"} 8.0'
    idle = 'spark_log_source_metrics_records_lag{client_id="query"} 0.0'
    wait_for(lambda: planned in scrape() and idle in scrape())
    query.stop()

    def is_closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_for(is_closed)


def test_a_limit_by_bytes_reaches_the_end(orders: broker.Log, streams: Streams) -> None:
    fill(orders, "orders", *["x" * 100] * 50)
    streams.run(maxBytesPerTrigger="4000")
    assert len(streams.ends()) > 2
    assert len(streams.values()) == 5005


def test_start_options(orders: broker.Log, spark: Any, root: Path, tmp_path: Path) -> None:
    middle = int(time.time() * 1000) + 5
    time.sleep(0.02)
    fill(orders, "orders", "f")
    fill(orders, "orders", "g", partition=1)
    cases = [
        ({"startingOffsets": '{"orders":{"0":2,"1":-1}}'}, "cf"),
        ({"startingOffsets": '{"orders":{"0":-1,"1":-2}}'}, "deg"),
        ({"startingTimestamp": str(middle)}, "fg"),
        ({"startingOffsetsByTimestamp": json.dumps({"orders": {"0": middle, "1": 0}})}, "fdeg"),
        ({"startingOffsets": "latest"}, ""),
    ]
    for number, (options, values) in enumerate(cases):
        streams = Streams(spark, root, tmp_path / str(number))
        streams.run(**options)
        assert streams.values() == "".join(sorted(values)), options


def test_data_loss_ends_a_query_with_its_name(orders: broker.Log, streams: Streams) -> None:
    streams.run()
    fill(orders, "orders", "f", "g")
    orders.delete_records({TopicPartition("orders", 0): 4})
    text = failure(streams.run)
    assert "DataLoss" in text and "orders-0: offsets [3, 4) were removed" in text
    streams.run(failOnDataLoss="false")
    assert streams.values() == "abcdeg"


def test_a_topic_made_again_ends_a_query(orders: broker.Log, streams: Streams) -> None:
    streams.run()
    orders.delete_topic("orders")
    orders.create_topic("orders", partitions=2)
    fill(orders, "orders", *"uvwxyz")
    text = failure(streams.run)
    assert "orders-0: offsets from 3 on are gone: the topic was deleted and made again" in text
    streams.run(failOnDataLoss="false")
    assert streams.values() == "abcdeuvwxyz"


# Stateful queries, with a restart in the middle.


def send_at(log: broker.Log, topic: str, *rows: tuple[int, str]) -> None:
    """Send values with their event times, in seconds."""
    with log.producer() as producer:
        for second, value in rows:
            producer.send(topic, value.encode(), partition=0, timestamp_ms=second * 1000)


def run_to_table(frame: Any, streams: Streams) -> list[tuple[Any, ...]]:
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(streams.checkpoint))
        .trigger(availableNow=True)
        .start(str(streams.output))
    )
    query.awaitTermination()
    return sorted(tuple(row) for row in streams.spark.read.parquet(str(streams.output)).collect())


def test_windows_with_a_watermark_survive_a_restart(log: broker.Log, streams: Streams) -> None:
    log.create_topic("orders", partitions=2)

    def counts() -> list[tuple[Any, ...]]:
        frame = streams.frame().withWatermark("timestamp", "5 seconds")
        spans = frame.selectExpr("window(timestamp, '10 seconds') as span", "timestamp")
        windows = spans.groupBy("span").count()
        return run_to_table(windows.selectExpr("unix_seconds(span.start) s", "count"), streams)

    send_at(log, "orders", (100, "a"), (101, "b"), (112, "c"))
    assert counts() == []
    send_at(log, "orders", (103, "d"), (130, "e"))
    assert counts() == [(100, 3), (110, 1)]
    send_at(log, "orders", (101, "late"), (150, "f"))
    assert counts() == [(100, 3), (110, 1), (130, 1)]


def test_a_join_of_two_topics_survives_a_restart(log: broker.Log, streams: Streams) -> None:
    log.create_topic("orders")
    log.create_topic("payments")

    def joined() -> list[tuple[Any, ...]]:
        left = streams.frame().selectExpr("cast(value as string) id", "offset as o")
        right = streams.frame(subscribe="payments")
        right = right.selectExpr("cast(value as string) id", "offset as p")
        return run_to_table(left.join(right, "id"), streams)

    fill(log, "orders", "x", "y")
    assert joined() == []
    fill(log, "payments", "y", "z")
    assert joined() == [("y", 1, 0)]
    fill(log, "orders", "z")
    fill(log, "payments", "x")
    assert joined() == [("x", 0, 2), ("y", 1, 0), ("z", 2, 1)]


def test_duplicates_are_dropped_over_a_restart(log: broker.Log, streams: Streams) -> None:
    log.create_topic("orders", partitions=2)

    def distinct() -> list[tuple[Any, ...]]:
        frame = streams.frame().selectExpr("cast(value as string) v").dropDuplicates(["v"])
        return run_to_table(frame, streams)

    fill(log, "orders", "a", "b", "a")
    assert distinct() == [("a",), ("b",)]
    fill(log, "orders", "b", "c", partition=1)
    assert distinct() == [("a",), ("b",), ("c",)]


def wait_for(is_true: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
