"""A topic as one DataFrame, and its maintenance as a Spark job."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F
from test_spark_jobs import run_job

import broker
import spark_log
from broker import InvalidOption, TopicPartition, UnknownTopic

pytestmark = pytest.mark.spark

NAME = "orders"
PARTITIONS = 2
CONFIG = {
    "segment.bytes": 20_000,
    "retention.ms": -1,
    "file.delete.delay.ms": 0,
    # The tests decide when.
    "maintenance.enabled": False,
}
TIME_MS = 1_700_000_000_000
Row = tuple[Any, ...]


@pytest.fixture
def log(root: Path) -> broker.Log:
    made = broker.open(root)
    made.create_topic(NAME, PARTITIONS, config=CONFIG)
    return made


def fill(log: broker.Log, count: int, first: int = 0) -> None:
    """Send records whose value is their number, a millisecond apart, in turn to each partition."""
    numbers = range(first, first + count)
    rows = pa.table(
        {
            "value": [b"%d" % number for number in numbers],
            "key": [None if number % 3 else b"k%d" % (number % 7) for number in numbers],
            "headers": [[("h", b"1")] if number % 5 == 0 else None for number in numbers],
            "timestamp": pa.array([TIME_MS + number for number in numbers], pa.timestamp("ms")),
            "partition": [number % PARTITIONS for number in numbers],
        },
        schema=pa.schema(
            [
                ("value", pa.binary()),
                ("key", pa.binary()),
                ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
                ("timestamp", pa.timestamp("ms")),
                ("partition", pa.int32()),
            ]
        ),
    )
    with log.producer() as producer:
        producer.send_batch(NAME, rows)


def seal(log: broker.Log, *sizes: int, first: int = 0) -> int:
    """Send and seal so many records at a time; return the number of the next one."""
    for size in sizes:
        fill(log, size, first)
        log.maintain(NAME, seal=True)
        first += size
    return first


def rows(frame: Any) -> list[Row]:
    return sorted((tuple(row) for row in frame.collect()), key=lambda row: (row[3], row[4]))


def by_log(spark: Any, log: broker.Log, **options: str) -> Any:
    return spark.read.format("log").options(subscribe=NAME, **options).load(log.root)


def numbers(frame: Any) -> list[int]:
    return sorted(int(bytes(row.value)) for row in frame.select("value").collect())


def test_history_and_tail_are_one_table(spark: Any, log: broker.Log) -> None:
    first = seal(log, 40, 40)
    fill(log, 21, first)
    frame = spark_log.table(spark, log.root, NAME)
    whole = by_log(spark, log)
    assert [(one.name, one.dataType) for one in frame.schema] == [
        (one.name, one.dataType) for one in whole.schema
    ]
    assert rows(frame) == rows(whole)
    assert numbers(frame) == list(range(101))


def test_headers_come_when_asked_for(spark: Any, log: broker.Log) -> None:
    fill(log, 11, seal(log, 10))
    frame = spark_log.table(spark, log.root, NAME, headers=True)
    assert rows(frame) == rows(by_log(spark, log, includeHeaders="true"))
    assert frame.filter("headers IS NOT NULL").count() == 5


@pytest.mark.parametrize("sealed, tail", [(0, 0), (0, 9), (9, 0)])
def test_a_part_may_be_empty(spark: Any, log: broker.Log, sealed: int, tail: int) -> None:
    if sealed:
        seal(log, sealed)
    if tail:
        fill(log, tail, sealed)
    frame = spark_log.table(spark, log.root, NAME)
    assert numbers(frame) == list(range(sealed + tail))
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp",
                             "timestampType"]  # fmt: skip


def test_records_below_the_start_are_not_in_it(spark: Any, log: broker.Log) -> None:
    fill(log, 10, seal(log, 20, 20))
    log.delete_records({TopicPartition(NAME, 0): 15, TopicPartition(NAME, 1): 4})
    frame = spark_log.table(spark, log.root, NAME)
    assert rows(frame) == rows(by_log(spark, log)) and frame.count() == 31


def test_it_stays_what_it_was(spark: Any, log: broker.Log) -> None:
    """Files that are replaced stay for a week, and the tail is found where it is now."""
    fill(log, 30, seal(log, 20, 20))
    frame = spark_log.table(spark, log.root, NAME)
    before = rows(frame)
    log.alter_topic(NAME, {"seal.bytes": 4000})
    seal(log, 30, first=70)
    assert log.describe_topic(NAME).sealed_file_count == PARTITIONS, "all were merged"
    assert rows(frame) == before
    assert rows(spark_log.table(spark, log.root, NAME))[: len(before) // 2] == before[:35]


def test_no_record_is_missing_or_twice_while_others_write_and_seal(
    spark: Any, log: broker.Log
) -> None:
    fill(log, 1000)
    is_over = threading.Event()

    def write() -> None:
        first = 1000
        while not is_over.is_set():
            fill(log, 500, first)
            first += 500

    def keep() -> None:
        while not is_over.is_set():
            log.maintain(NAME, seal=True)

    threads = [threading.Thread(target=act) for act in (write, keep)]
    for thread in threads:
        thread.start()
    try:
        last = 0
        for _ in range(5):
            frame = spark_log.table(spark, log.root, NAME)
            found = frame.groupBy("partition").agg(
                F.count("*"), F.countDistinct("offset"), F.min("offset"), F.max("offset")
            )
            for _partition, count, distinct, low, high in found.collect():
                assert (count, distinct, low) == (high + 1, high + 1, 0)
                last = max(last, count)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert last > 500


def test_names_with_spaces_and_patterns_are_taken_as_they_are(spark: Any, tmp_path: Path) -> None:
    log = broker.open(tmp_path / "a b [1] {x,y}*?")
    log.create_topic(NAME, PARTITIONS, config=CONFIG)
    fill(log, 10, seal(log, 10))
    assert numbers(spark_log.table(spark, log.root, NAME)) == list(range(20))


def test_a_missing_file_is_an_error_that_names_it(spark: Any, log: broker.Log) -> None:
    seal(log, 20)
    frame = spark_log.table(spark, log.root, NAME)
    snapshot = log.snapshot(NAME)
    Path(snapshot.path(snapshot.files[0])).unlink()
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with pytest.raises(Exception, match=Path(snapshot.files[0].name).name):
            frame.collect()
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")


def test_wrong_arguments_are_said_at_once(spark: Any, log: broker.Log) -> None:
    with pytest.raises(UnknownTopic):
        spark_log.table(spark, log.root, "none")
    with pytest.raises(InvalidOption, match="milliseconds"):
        spark_log.table(spark, log.root, NAME, starting_timestamp=1.5)  # type: ignore[arg-type]
    for wrong in ({"starting_timestamp": 10**18}, {"ending_timestamp": -1}):
        with pytest.raises(InvalidOption, match="milliseconds since 1970, at most"):
            spark_log.table(spark, log.root, NAME, **wrong)
    far = spark_log.table(spark, log.root, NAME, ending_timestamp=((1 << 63) - 1) // 1000)
    assert far.count() == log.describe_topic(NAME).record_count


# Pruning.


def plan_of(frame: Any) -> str:
    """Return the plan with all that each node knows."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        frame.explain("formatted")
    return shown.getvalue()


def scanned(frame: Any) -> int:
    """Run a query, and return how many rows of Parquet files it had to look at."""
    execution = frame._jdf.queryExecution()
    execution.toRdd().count()
    leaves = execution.executedPlan().collectLeaves()
    scans = [leaves.apply(number) for number in range(leaves.size())]
    parquet = [one for one in scans if "parquet" in one.nodeName().lower()]
    assert parquet
    return sum(one.metrics().apply("numOutputRows").value() for one in parquet)


@pytest.fixture
def long(log: broker.Log) -> broker.Log:
    """Ten sealed files of 100 records in each partition, and a tail of 50 records."""
    fill(log, 50, seal(log, *[200] * 10))
    return log


def test_filters_and_columns_reach_the_files(spark: Any, long: broker.Log) -> None:
    frame = spark_log.table(spark, long.root, NAME)
    time = "timestamp >= timestamp_millis(1700000001700)"
    plan = plan_of(frame.filter(time).filter("offset < 900").select("offset"))
    assert "ReadSchema: struct<offset:bigint,timestamp:timestamp>" in plan
    assert "GreaterThanOrEqual(timestamp,2023-11-14" in plan and "LessThan(offset,900)" in plan
    plan = plan_of(frame.filter("partition = 1").select("value"))
    assert "ReadSchema: struct<value:binary>" in plan
    assert re.search(r"PartitionFilters: .*\(partition#\d+ = 1\)", plan)


@pytest.mark.parametrize(
    "condition, expected",
    [
        ("offset >= 950", 200),
        ("offset BETWEEN 420 AND 430", 200),
        ("timestamp < timestamp_millis(1700000000100)", 200),
        ("partition = 1 AND offset = 777", 100),
        ("offset < 0", 0),
    ],
)
def test_a_filter_reads_just_the_files_that_may_match(
    spark: Any, long: broker.Log, condition: str, expected: int
) -> None:
    """Each file has 100 records, so the rows that were looked at tell how many files were read."""
    frame = spark_log.table(spark, long.root, NAME)
    assert scanned(frame) == 2000
    assert scanned(frame.filter(condition)) == expected
    assert rows(frame.filter(condition)) == rows(by_log(spark, long).filter(condition))


def test_a_time_range_leaves_files_out_of_the_plan(spark: Any, long: broker.Log) -> None:
    low, high = TIME_MS + 390, TIME_MS + 810
    frame = spark_log.table(spark, long.root, NAME, starting_timestamp=low, ending_timestamp=high)
    assert numbers(frame) == list(range(390, 810))
    # [390, 810) touches the records 200 to 999: four files in each partition, of ten.
    assert len(frame.inputFiles()) == 4 * PARTITIONS
    late = spark_log.table(spark, long.root, NAME, starting_timestamp=TIME_MS + 2000)
    assert late.inputFiles() == [] and numbers(late) == list(range(2000, 2050))


# Maintenance as a Spark job.


def test_a_spark_job_seals_as_the_log_itself_does(spark: Any, log: broker.Log, root: Path) -> None:
    other = broker.open(root.with_name("other"))
    other.create_topic(NAME, PARTITIONS, config=CONFIG)
    for one in (log, other):
        one.alter_topic(NAME, {"seal.bytes": 30_000})
        fill(one, 5000)
    done = spark_log.maintain(spark, log.root, NAME, seal=True)
    (same,) = other.maintain(NAME, seal=True)
    assert (done.sealed_records, same.sealed_records) == (5000, 5000)
    assert done.sealed_files > PARTITIONS, "it was cut into parts"
    assert rows(by_log(spark, log)) == rows(by_log(spark, other))
    assert log.describe_topic(NAME).sealed_ends == other.describe_topic(NAME).sealed_ends
    assert DeltaTable(log.table_path(NAME)).to_pyarrow_table().num_rows == 5000
    assert numbers(spark_log.table(spark, log.root, NAME)) == list(range(5000))


def test_a_spark_job_merges_small_files_too(spark: Any, log: broker.Log) -> None:
    seal(log, 30, 30)
    log.alter_topic(NAME, {"seal.bytes": 4000})
    fill(log, 30, 60)
    done = spark_log.maintain(spark, log.root, NAME, seal=True)
    assert done.merged_files == 3 * PARTITIONS
    assert numbers(by_log(spark, log)) == list(range(90))
    again = spark_log.maintain(spark, log.root, NAME)
    assert (again.sealed_records, again.merged_files, again.is_held) == (0, 0, False)


def test_a_spark_job_compacts_too(spark: Any, root: Path) -> None:
    logs = [broker.open(root), broker.open(root.with_name("other"))]
    for log in logs:
        log.create_topic(NAME, PARTITIONS, config=CONFIG | {"cleanup.policy": "compact"})
        with log.producer() as producer:
            for number in range(300):
                producer.send(
                    NAME, b"%d" % number, key=b"k%d" % (number % 20), timestamp_ms=TIME_MS
                )
    done = spark_log.maintain(spark, logs[0].root, NAME, seal=True)
    (same,) = logs[1].maintain(NAME, seal=True)
    assert done.compacted_records == same.compacted_records == 280
    assert rows(by_log(spark, logs[0])) == rows(by_log(spark, logs[1]))
    assert numbers(spark_log.table(spark, logs[0].root, NAME)) == list(range(280, 300))


# With Delta Lake on Spark, and by Spark Connect.


def test_all_who_count_and_sum_agree(log: broker.Log) -> None:
    first = seal(log, 100, 100)
    log.alter_topic(NAME, {"seal.bytes": 6000, "table.delete.delay.ms": 604_800_000})
    fill(log, 30, seal(log, 100, first=first))
    table = DeltaTable(log.table_path(NAME)).to_pyarrow_table()
    expected = [300, sum(range(300)), 2 * sum(range(150))]
    sums = [
        sum(map(int, table.column("value").to_pylist())),
        sum(table.column("offset").to_pylist()),
    ]
    assert [table.num_rows, *sums] == expected
    found = run_job("delta", log.root, log.table_path(NAME), NAME, 150)
    assert found["delta"] == found["table"] == expected
    assert found["first"] == [100, sum(range(100)), 2 * sum(range(50))], "time travel"
    assert found["stream"] == expected, "a stream sees each record once, merged or not"
    assert found["bounds"] == [0, 149], "answered from the bounds in the Delta log"
    assert found["whole"] == 330


def test_what_others_do_by_delta_lake_on_spark_is_mended_and_never_reaches_the_log(
    log: broker.Log,
) -> None:
    seal(log, 100, 100)
    expected = [200, sum(range(200)), 2 * sum(range(100))]
    found = run_job("outsiders", log.root, log.table_path(NAME), NAME)
    assert set(found) == {"optimize", "optimize_and_vacuum", "update", "constraint",
                          "deletion_vectors", "append_only"}  # fmt: skip
    for act, (by_log, by_delta) in found.items():
        assert by_log == expected, act
        assert by_delta == expected, act
    assert log.verify().damage == ()


@pytest.mark.parametrize("root", ["disk", "s3"], indirect=True)
def test_spark_connect_has_the_table_and_maintains(log: broker.Log) -> None:
    fill(log, 50, seal(log, 50))
    found = run_job("connect_table", log.root, NAME)
    assert found == {"before": 100, "sealed": 50, "after": 100, "late": 10}
    assert log.describe_topic(NAME).sealed_ends == (50, 50)
