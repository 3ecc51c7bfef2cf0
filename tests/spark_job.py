"""Spark drivers in processes of their own, for what one shared session cannot show.

    python spark_job.py NAME ROOT [ARGUMENT...]

Each job works on the log at ROOT by `format("log")`; what it found it prints as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

import broker
import spark_log
from spark_log.datasource import LogDataSource
from spark_log.source import LogStreamReader

CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    # The job is over before the better code of the JVM's second compiler would pay.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

# Delta reads its own log by a Spark job of as many tasks.
SMALL_DELTA = {
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "1",
}


def make_session(name: str, **conf: str) -> SparkSession:
    spark: SparkSession = spark_log.session(name, **CONF, **conf)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def copy(root: str, topic: str, start: str, checkpoint: str, gates: str, mode: str) -> None:
    """Copy a topic to `<topic>-copy`: to its present end if `mode` is finish, or for ever.

    Args:
        gates: a directory; while `hold-start` or `hold-task` is in it, the query waits there, and
            says so by the files `at-start` and `at-task`.
    """
    spark = make_session("copy", **{"spark.master": "local[2]"})
    spark.dataSource.register(GatedLog)
    options = {"subscribe": topic, "maxOffsetsPerTrigger": "3000", "startingOffsets": start}
    if start == "timestamp":
        del options["startingOffsets"]
        options["startingTimestamp"] = str(int(time.time() * 1000))
        options["startingOffsetsByTimestampStrategy"] = "latest"
    trigger = {"availableNow": True} if mode == "finish" else {"processingTime": "0 seconds"}

    def pass_gate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            wait_at(gates, "task")
            yield batch

    (
        spark.readStream.format("gated-log")
        .options(**options, gates=gates)
        .load(root)
        .select("value")
        .mapInArrow(pass_gate, "value binary")
        .writeStream.format("log")
        .option("topic", f"{topic}-copy")
        .option("checkpointLocation", checkpoint)
        .trigger(**trigger)
        .start(root)
        .awaitTermination()
    )


def wait_at(gates: str, place: str) -> None:
    if Path(gates, f"hold-{place}").exists():
        Path(gates, f"at-{place}").touch()
    while Path(gates, f"hold-{place}").exists():
        time.sleep(0.01)


class GatedLog(LogDataSource):
    """The log's own source, which can be held when it has found where to start."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__({key: value for key, value in options.items() if key != "gates"})
        self.gates = options["gates"]

    @classmethod
    def name(cls) -> str:
        return "gated-log"

    def streamReader(self, schema: StructType) -> LogStreamReader:
        return GatedReader(self.options, schema, self.gates)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ({**self.options, "gates": self.gates},)


class GatedReader(LogStreamReader):
    def __init__(self, options: dict[str, str], schema: StructType, gates: str) -> None:
        super().__init__(options, schema)
        self._gates = gates

    def initialOffset(self) -> dict[str, Any]:
        found = super().initialOffset()
        wait_at(self._gates, "start")
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Tasks get the plain one: they have no part in the start.
        return LogStreamReader(self._given, self._schema).__reduce__()


def retry(root: str) -> None:
    """Find the format by its name alone, and write with tasks that fail at first."""
    # Spark asks a shell, without quotes, whether there is such a Python: the way to it must have no
    # spaces, or Spark does not look for formats at all.
    home = Path(root).with_name("python-home")
    home.symlink_to(sys.prefix)
    os.environ["PYSPARK_PYTHON"] = str(home / "bin" / "python")
    builder = SparkSession.builder.master("local[2,4]")
    for key, value in CONF.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    append(numbers(spark, 40_000).mapInArrow(fail_at_first, "value string"), root)
    (
        spark.readStream.format("log")
        .option("subscribe", "out")
        .option("startingOffsets", "earliest")
        .load(root)
        .select("value")
        .mapInArrow(fail_at_first, "value binary")
        .writeStream.format("log")
        .option("topic", "again")
        .option("checkpointLocation", f"{root}-checkpoint")
        .trigger(availableNow=True)
        .start(root)
        .awaitTermination()
    )


def fail_at_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    for number, batch in enumerate(batches):
        yield batch
        if number == 0 and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails")


def speculate(root: str, master: str, marks: str) -> None:
    """Write with a task whose first attempt waits until Spark has started a second."""
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "500ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.01",
        "spark.speculation.efficiency.enabled": "false",
    }
    spark = make_session("speculate", **on_cluster(master), **speculation)

    def wait_for_the_second(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        place = f"{context.partitionId()}-{context.attemptNumber()}"
        yield from batches
        Path(marks, place).touch()
        end = time.monotonic() + 90
        while place == "0-0" and not Path(marks, "0-1").exists() and time.monotonic() < end:
            time.sleep(0.01)

    append(numbers(spark, 4000).mapInArrow(wait_for_the_second, "value string"), root)


def lack(root: str, master: str, python: str) -> None:
    """Read and write by executors whose Python is one that lacks our package."""
    spark = make_session("lack", **on_cluster(master), **{"spark.pyspark.python": python})
    spark_log.register(spark)
    read = spark.read.format("log").option("subscribe", "out").load(root)
    report(
        read=failure(lambda: read.collect()),
        write=failure(lambda: append(numbers(spark, 10), root)),
    )


def failure(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def on_cluster(master: str) -> dict[str, str]:
    return {
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
    }


def numbers(spark: SparkSession, count: int) -> DataFrame:
    numbered = spark.range(0, count, numPartitions=4)
    return numbered.select(F.col("id").cast("string").alias("value"))


def append(frame: DataFrame, root: str) -> None:
    frame.write.format("log").option("topic", "out").mode("append").save(root)


def connect(root: str) -> None:
    """Write and read, batch and stream, by Spark Connect."""
    # Then Spark takes any free port.
    os.environ["SPARK_TESTING"] = "1"
    spark = spark_log.session("connect", **CONF, **{"spark.remote": "local[2]"})
    assert "connect" in type(spark).__module__
    values = spark.range(0, 100).select(F.col("id").cast("string").alias("value"))
    pair = {"topic": "out", "txnAppId": "load", "txnVersion": "1"}
    for _ in range(2):
        values.write.format("log").options(**pair).mode("append").save(root)
    stream = spark.readStream.format("log").option("subscribe", "out")
    for _ in range(2):
        (
            stream.option("startingOffsets", "earliest")
            .load(root)
            .select("value")
            .writeStream.format("log")
            .option("topic", "again")
            .option("checkpointLocation", f"{root}-checkpoint")
            .trigger(availableNow=True)
            .start(root)
            .awaitTermination()
        )
    read = spark.read.format("log").option("subscribe", "again").load(root)
    wrong = spark.read.format("log").option("subscribe", "none").load(root)
    report(
        count=read.count(),
        distinct=read.select("value").distinct().count(),
        error=failure(lambda: wrong.count()),
    )


def delta(root: str, path: str, topic: str, sealed_end: str) -> None:
    """Read a topic's table by Delta Lake: now, at its first version, as a stream."""
    conf = CONF | SMALL_DELTA | {"spark.master": "local[2]"}
    spark = spark_log.session("delta", delta=True, **conf)
    spark.sparkContext.setLogLevel("OFF")
    table = spark.read.format("delta").load(path)
    stream = (
        spark.readStream.format("delta")
        .option("startingVersion", "0")
        .load(path)
        .writeStream.format("parquet")
        .option("checkpointLocation", f"{root}-delta-checkpoint")
        .trigger(availableNow=True)
        .start(f"{root}-delta-stream")
    )
    stream.awaitTermination()
    whole = spark_log.table(spark, root, topic)
    report(
        delta=totals(table),
        first=totals(spark.read.format("delta").option("versionAsOf", 0).load(path)),
        stream=totals(spark.read.parquet(f"{root}-delta-stream")),
        bounds=list(table.agg(F.min("offset"), F.max("offset")).first()),
        table=totals(whole.filter(F.col("offset") < int(sealed_end))),
        whole=whole.count(),
    )


def outsiders(root: str, path: str, topic: str) -> None:
    """Do to a topic's table what others may, and maintain the topic after each."""
    check = {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}
    conf = CONF | SMALL_DELTA | check | {"spark.master": "local[2]"}
    spark = spark_log.session("outsiders", delta=True, **conf)
    spark.sparkContext.setLogLevel("OFF")
    log = broker.open(root)
    found = {}
    for name, statements in OUTSIDERS.items():
        for statement in statements:
            spark.sql(statement.format(f"delta.`{path}`")).collect()
        between = totals(spark_log.table(spark, root, topic))
        log.maintain(topic)
        found[name] = [between, totals(spark.read.format("delta").load(path))]
    report(**found)


OUTSIDERS = {
    "optimize": ["OPTIMIZE {0}"],
    "optimize_and_vacuum": ["OPTIMIZE {0}", "VACUUM {0} RETAIN 0 HOURS"],
    "update": ["UPDATE {0} SET value = binary('7') WHERE offset < 20"],
    "constraint": ["ALTER TABLE {0} ADD CONSTRAINT small CHECK (offset < 1000000)"],
    "deletion_vectors": [
        "ALTER TABLE {0} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')",
        "DELETE FROM {0} WHERE offset = 3",
    ],
    "append_only": ["ALTER TABLE {0} SET TBLPROPERTIES ('delta.appendOnly' = 'true')"],
}


def totals(frame: DataFrame) -> list[int]:
    """Count the records; sum their values and their offsets."""
    number = F.col("value").cast("string").cast("long")
    row = frame.agg(F.count("*"), F.sum(number), F.sum("offset")).first()
    assert row is not None
    return list(row)


def connect_table(root: str, topic: str) -> None:
    """Read and maintain a topic by Spark Connect."""
    spark = spark_log.session("connect", **CONF, **{"spark.remote": "local[2]"})
    before = spark_log.table(spark, root, topic).count()
    done = spark_log.maintain(spark, root, topic, seal=True)
    late = spark_log.table(spark, root, topic, starting_timestamp=1_700_000_000_090)
    report(
        before=before,
        sealed=done.sealed_records,
        after=spark_log.table(spark, root, topic).count(),
        late=late.count(),
    )


def session(root: str) -> None:
    """Report what the session helper has set."""
    given = {"spark.master": "local[1]", "spark.sql.shuffle.partitions": 3}
    java = {"spark.driver.extraJavaOptions": "-Dmine=kept"}
    spark = spark_log.session("helper", **given, **java, **{"spark.ui.enabled": False})
    value = spark.sql("SELECT 'a' AS value")
    value.write.format("log").option("topic", "out").mode("append").save(root)
    left = Path(f"{root}-checkpoint/offsets/.0.7ab5.tmp")  # By a driver killed in its first batch.
    left.parent.mkdir(parents=True)
    left.write_text("v1")
    stream = spark.readStream.format("log").option("subscribe", "out").load(root)
    writer = stream.writeStream.format("noop").option("checkpointLocation", left.parent.parent)
    writer.trigger(availableNow=True).start().awaitTermination()
    again = spark_log.session("other")
    report(
        name=spark.sparkContext.appName,
        master=spark.sparkContext.master,
        python=spark.sparkContext.pythonExec,
        socket=spark.conf.get("spark.python.unix.domain.socket.enabled"),
        shuffle=spark.conf.get("spark.sql.shuffle.partitions"),
        ui=spark.conf.get("spark.ui.enabled"),
        is_same=again is spark,
        mine=spark._jvm.System.getProperty("mine"),
        delta=failure(lambda: spark_log.session("late", delta=True)),
        catalog=spark.conf.get("spark.sql.catalog.spark_catalog", None),
    )


def delta_session(root: str) -> None:
    """Use Delta Lake's catalog, SQL and format beside the log's, and report what came."""
    given = {"spark.master": "local[1]", "spark.sql.warehouse.dir": f"{root}-warehouse"}
    spark = spark_log.session("helper", delta=True, **(CONF | SMALL_DELTA | given))
    spark.sparkContext.setLogLevel("OFF")
    spark.sql("CREATE TABLE numbers (value STRING) USING delta")
    spark.range(20).selectExpr("CAST(id AS STRING) AS value").write.insertInto("numbers")
    table = spark.read.format("delta").load(f"{root}-warehouse/numbers")
    append(table, root)
    history = spark.sql("DESCRIBE HISTORY numbers").collect()
    report(operations=[row.operation for row in history], count=table.count())


def report(**found: Any) -> None:
    print(json.dumps(found))


JOBS = {
    job.__name__: job
    for job in (
        copy,
        retry,
        speculate,
        lack,
        connect,
        delta,
        outsiders,
        connect_table,
        session,
        delta_session,
    )  # fmt: skip
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
