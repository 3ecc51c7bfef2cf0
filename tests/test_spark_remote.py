"""Spark over a log on a real HDFS: source, sink, table, maintenance; options of the store."""

from __future__ import annotations

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


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_the_whole_topic_as_a_table_while_part_of_it_is_sealed(
    spark: Any, place: tuple[str, dict[str, str]]
) -> None:
    root, _ = place
    log = broker.open(root)
    log.create_topic("t", partitions=2)
    with log.producer() as producer:
        for number in range(400):
            producer.send("t", b"%d" % number, key=b"%d" % (number % 7))
    done = spark_log.maintain(spark, root, "t", seal=True)
    assert done.sealed_records == 400
    with log.producer() as producer:
        for number in range(400, 500):
            producer.send("t", b"%d" % number)
    table = spark_log.table(spark, root, "t")
    values = [int(row.v) for row in table.selectExpr("cast(value as string) v").collect()]
    assert sorted(values) == list(range(500))


def test_a_misspelt_option_of_the_store_is_refused_with_the_nearest_name(spark: Any) -> None:
    with pytest.raises(Exception, match="unknown storage option 'secrt'; did you mean 'secret'"):
        spark.read.format("log").options(subscribe="t", **{"storage.secrt": "x"}).load(
            "s3://nowhere/log"
        )
