"""The log in SQL: temporary views and tables, for SELECT and INSERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import broker
from spark_log import sql_table
from spark_log.schema import row_schema

pytestmark = pytest.mark.spark


@pytest.fixture
def orders(log: broker.Log) -> broker.Log:
    log.create_topic("orders", partitions=2)
    with log.producer() as producer:
        for number, value in enumerate([b"a", b"b", b"c"]):
            producer.send("orders", value, partition=number % 2)
    return log


@pytest.fixture
def sql(spark: Any) -> Iterator[Callable[[str], list[Any]]]:
    """Runs statements; the table and view `orders` are dropped in the end."""

    def run(statement: str) -> list[Any]:
        return list(map(tuple, spark.sql(statement).collect()))

    yield run
    spark.sql("DROP VIEW IF EXISTS orders_view")
    spark.sql("DROP TABLE IF EXISTS orders")


VALUES = "SELECT cast(value AS string) FROM {} ORDER BY 1"


def test_a_view_is_read_and_written(
    orders: broker.Log, root: Path, sql: Callable[[str], list[Any]]
) -> None:
    options = f"OPTIONS (path '{root}', subscribe 'orders', topic 'orders')"
    sql(f"CREATE TEMPORARY VIEW orders_view USING log {options}")
    assert sql("SELECT count(*) FROM orders_view WHERE partition = 0") == [(2,)]
    more = "(binary('k'), binary('d')), (NULL, binary('e'))"
    sql(f"INSERT INTO orders_view (key, value) VALUES {more}")
    sql(f"CREATE OR REPLACE TEMPORARY VIEW orders_view USING log {options}")
    assert sql(VALUES.format("orders_view")) == [("a",), ("b",), ("c",), ("d",), ("e",)]


@pytest.mark.parametrize("place", ["OPTIONS ({options}, path '{root}')",
                                   "OPTIONS ({options}) LOCATION '{root}'"])  # fmt: skip
def test_a_table_keeps_its_options(
    spark: Any, orders: broker.Log, root: Path, sql: Callable[[str], list[Any]], place: str
) -> None:
    options = "subscribe 'orders', topic 'orders'"
    sql(f"CREATE TABLE orders USING log {place.format(options=options, root=root)}")
    assert sql(VALUES.format("orders")) == [("a",), ("b",), ("c",)]
    sql("INSERT INTO orders (value) VALUES (binary('d'))")
    assert sql(VALUES.format("orders")) == [("a",), ("b",), ("c",), ("d",)]
    times = "SELECT count(*) FROM orders WITH (startingTimestamp='99999999999999', "
    assert sql(times + "startingOffsetsByTimestampStrategy='latest')") == [(0,)]
    sql("DROP TABLE orders")
    assert orders.describe_topic("orders").record_count == 4


def test_a_stream_goes_from_table_to_table(
    spark: Any, orders: broker.Log, root: Path, tmp_path: Path, sql: Callable[[str], list[Any]]
) -> None:
    options = f"path '{root}', subscribe 'orders', topic 'orders', startingOffsets 'earliest'"
    sql(f"CREATE TABLE orders USING log OPTIONS ({options})")
    query = (
        spark.readStream.table("orders")
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .toTable("orders")
    )
    query.awaitTermination()
    assert sql("SELECT count(*) FROM orders") == [(6,)]


def test_a_table_with_a_list_of_columns_says_what_to_use(
    orders: broker.Log, root: Path, sql: Callable[[str], list[Any]]
) -> None:
    options = f"OPTIONS (path '{root}', subscribe 'orders')"
    sql(f"CREATE TABLE orders (value BINARY) USING log {options}")
    with pytest.raises(Exception, match=r"CREATE TEMPORARY VIEW \.\.\. USING log OPTIONS"):
        sql("SELECT * FROM orders")


def test_wrong_options_fail_when_the_table_is_made(
    orders: broker.Log, root: Path, sql: Callable[[str], list[Any]]
) -> None:
    with pytest.raises(Exception, match="did you mean 'subscribe'"):
        sql(f"CREATE TABLE orders USING log OPTIONS (path '{root}', subscribed 'orders')")


def test_only_a_table_carries_its_options(spark: Any, orders: broker.Log, root: Path) -> None:
    frame = spark.read.format("log").option("subscribe", "orders").load(str(root))
    assert frame.schema == row_schema(include_headers=False)


def test_options_of_the_use_go_before_those_of_the_table() -> None:
    schema = sql_table.carry(row_schema(include_headers=False), {"path": "/log", "topic": "a"})
    assert sql_table.restore(schema, {"topic": "b"}) == {"path": "/log", "topic": "b"}
