"""Spark over a log on a real HDFS: source, sink, table, maintenance; options of the store."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import broker
import spark_log
from servers import HdfsCluster, S3Server

pytestmark = pytest.mark.spark


@pytest.fixture(params=["hdfs", "s3"])
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """An address and the options that open it."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        return f"{server.address}/{name}", server.client_options
    cluster: HdfsCluster = request.getfixturevalue("hdfs_cluster")
    return f"{cluster.address}/{name}", {}


def values_of(log: broker.Log) -> list[int]:
    with log.consumer("t", auto_offset_reset="earliest", consumer_timeout_ms=3000) as consumer:
        return [int(record.value or b"") for record in consumer]


def prefixed(storage: dict[str, str]) -> dict[str, str]:
    return {f"storage.{name}": value for name, value in storage.items()}


def test_a_stream_from_topic_to_topic_and_a_batch_over_both(
    spark: Any, place: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    root, storage = place
    log = broker.open(root, storage=storage)
    for topic in ("in", "out"):
        log.create_topic(topic, partitions=2)
    for turn in range(2):
        with log.producer() as producer:
            for number in range(300):
                producer.send("in", b"%d" % (300 * turn + number))
        query = (
            spark.readStream.format("log")
            .options(subscribe="in", startingOffsets="earliest", **prefixed(storage))
            .load(root)
            .selectExpr("value")
            .writeStream.format("log")
            .options(topic="out", checkpointLocation=str(tmp_path / "c"), **prefixed(storage))
            .trigger(availableNow=True)
            .start(root)
        )
        query.awaitTermination()
        if turn == 0:
            log.maintain("in", seal=True)
    rows = (
        spark.read.format("log")
        .options(subscribe="in,out", **prefixed(storage))
        .load(root)
        .selectExpr("topic", "cast(value as string) as value")
        .collect()
    )
    for topic in ("in", "out"):
        values = sorted(int(row.value) for row in rows if row.topic == topic)
        assert values == list(range(600))
    assert not log.verify().damage


def test_the_whole_topic_as_a_table_while_part_of_it_is_sealed(
    spark: Any, place: tuple[str, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """On S3 without Hadoop's driver for it, which is large: Spark comes without."""
    root, storage = place
    log = broker.open(root, storage=storage)
    log.create_topic("t", partitions=2)
    with log.producer() as producer:
        for number in range(400):
            producer.send("t", b"%d" % number, key=b"%d" % (number % 7))
    done = spark_log.maintain(spark, root, "t", seal=True, storage=storage)
    assert done.sealed_records == 400
    with log.producer() as producer:
        for number in range(400, 500):
            producer.send("t", b"%d" % number)
    log.delete_records({broker.TopicPartition("t", 0): 3})
    table = spark_log.table(spark, root, "t", storage=storage)
    assert ("Spark cannot read s3://" in caplog.text) == root.startswith("s3:")
    values = [int(row.v) for row in table.selectExpr("cast(value as string) v").collect()]
    kept = values_of(log)
    assert sorted(values) == sorted(kept) and len(kept) == 497
    late = spark_log.table(spark, root, "t", storage=storage, starting_timestamp=1 << 50)
    assert late.count() == 0


def test_a_misspelt_option_of_the_store_is_refused_with_the_nearest_name(spark: Any) -> None:
    with pytest.raises(
        Exception, match="unknown storage option of s3 'secrt'; did you mean 'secret'"
    ):
        spark.read.format("log").options(subscribe="t", **{"storage.secrt": "x"}).load(
            "s3://nowhere/log"
        )


@pytest.mark.parametrize("selection", ["subscribe", "subscribePattern"])
def test_an_idle_query_asks_s3_for_the_next_commit_now_and_then(
    spark: Any, s3_server: S3Server, selection: str, tmp_path: Path
) -> None:
    root = f"{s3_server.address}/{uuid.uuid4().hex}"
    storage = {**s3_server.client_options, "poll.ms": "500"}
    log = broker.open(root, storage=storage)
    log.create_topic("t")
    query = (
        spark.readStream.format("log")
        .options(**{selection: "t"}, startingOffsets="earliest", **prefixed(storage))
        .load(root)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "c"))
        .start()
    )
    try:
        with log.producer() as producer:
            producer.send("t", b"a").get(20)
        while not any(progress.numInputRows for progress in query.recentProgress):
            assert query.isActive
            time.sleep(0.1)
        time.sleep(3)  # At first it asks more often: more may follow.
        before, begun = len(s3_server.requests()), time.monotonic()
        time.sleep(4)
        asked = s3_server.requests()[before:]
        waited = time.monotonic() - begun
    finally:
        query.stop()
    assert waited - 2 <= len(asked) <= waited / 0.5 + 1, asked
    assert not [one for one in asked if "list-type" in one]


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize(
    ("root", "storage", "message"),
    [
        ("hdfs://nowhere.invalid:9000/x", {}, "there is no host 'nowhere.invalid'"),
        ("s3://no-such-bucket/x", {}, "there is no bucket 'no-such-bucket'; create it first"),
        ("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:1"}, "nobody answers at 127.0.0.1:1"),
        ("s3://bucket/x", {"profile": "nobodys"}, "profile (nobodys) could not be found"),
        ("gs://bucket/x", {}, "Google Cloud Storage was not shown to be safe for a log"),
    ],
)
def test_a_store_that_is_not_there_is_said_in_one_line_by_spark(
    spark: Any,
    s3_server: S3Server,
    root: str,
    storage: dict[str, str],
    message: str,
    direction: str,
) -> None:
    options = prefixed({**(s3_server.client_options if root[:2] == "s3" else {}), **storage})
    with pytest.raises(Exception) as failed:
        if direction == "read":
            spark.read.format("log").options(subscribe="t", **options).load(root).count()
        else:
            frame = spark.sql("SELECT 'a' AS value")
            frame.write.format("log").options(topic="t", **options).mode("append").save(root)
    lines = [line for line in str(failed.value).splitlines() if message in line]
    assert lines and any(name in lines[0] for name in ("InvalidOption", "StorageError")), lines
