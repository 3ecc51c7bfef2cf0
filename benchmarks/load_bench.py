"""Files into a topic, against Spark's own Parquet write of the same rows. `local[2]`, warm."""

from __future__ import annotations

from pathlib import Path

import broker
from benchmarks.spark_bench import PARTITIONS, rate, ratio_row, session
from benchmarks.table import Row
from pipelines.load import Load, load
from pipelines.rows import RowFormat

ROWS = 5_000_000
FILES = 16


def columns(directory: Path) -> list[Row]:
    """Two columns of Parquet files as key and value."""
    source = directory / "source"
    # Random bytes: equal ones would all but vanish in Parquet.
    value = "unhex(repeat(sha2(cast(id as string), 256), 4))"
    session().range(ROWS, numPartitions=FILES).selectExpr(
        "cast(id % 100000 as string) AS key", f"substring({value}, 1, 100) AS value"
    ).write.parquet(str(source))
    rows = RowFormat("parquet", key="key", value="value")
    return [compare(directory, source, rows, "load, 5 M rows of Parquet by key")]


def json_rows(directory: Path) -> list[Row]:
    """Rows of Parquet files as JSON."""
    source = directory / "source"
    session().range(ROWS, numPartitions=FILES).selectExpr(
        "id AS order_id", "id % 100000 AS customer", "rand(1) * 1000 AS amount",
        "substring(sha2(cast(id as string), 256), 1, 40) AS note",
    ).write.parquet(str(source))  # fmt: skip
    rows = RowFormat("parquet", key="customer")
    return [compare(directory, source, rows, "load, 5 M rows of Parquet as JSON")]


def compare(directory: Path, source: Path, rows: RowFormat, work: str) -> Row:
    log = broker.open(directory / "log")
    number = 0

    def ours() -> float:
        nonlocal number
        number += 1
        wanted = Load(str(source), f"t{number}", rows, partitions=PARTITIONS)
        return rate(ROWS, lambda: load(session(), log, wanted))

    def parquet() -> float:
        writer = session().read.parquet(str(source)).write.mode("overwrite")
        return rate(ROWS, lambda: writer.parquet(str(directory / "copy")))

    ours(), parquet()
    return ratio_row(work, "Mrow/s", ours, parquet, "Parquet write", at_least=0.5)


BENCHMARKS = (columns, json_rows)
