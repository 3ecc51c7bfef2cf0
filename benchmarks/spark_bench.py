"""The log through Spark: scans, catch-up, the sink, small batches, planning. `local[2]`, warm."""

from __future__ import annotations

import json
import os
import pickle
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

import broker
import spark_log
from benchmarks.table import Row, best_of_pairs
from broker import batch
from broker.commit import Author
from broker.storage import LocalStorage
from broker.topic import Topic, create
from spark_log.schema import row_schema
from spark_log.source import LogBatchReader

PARTITIONS = 4
SCAN_ROWS = 10_000_000
BATCH_ROWS = 2_000_000
SINK_ROWS = 4_000_000
FRAMES = 1_000_000
MEGA = 1e6
# A topic that stays as it is written: what is measured is the tail.
UNSEALED = {"maintenance.enabled": False}


@cache
def session() -> Any:
    conf = {"spark.master": "local[2]", "spark.ui.enabled": False, "spark.driver.memory": "4g"}
    spark = spark_log.session("benchmarks", **conf)
    spark.sparkContext.setLogLevel("OFF")  # Queries that are stopped in a batch say so.
    return spark


def scans(directory: Path) -> list[Row]:
    """Whole scans: of the log, of one column, as a stream; against Spark's own Parquet scan."""
    root = str(directory / "log")
    fill(broker.open(root))
    log = session().read.format("log").option("subscribe", "t")
    parquet = str(directory / "parquet")
    log.load(root).write.parquet(parquet)

    def scan() -> float:
        return rate(SCAN_ROWS, lambda: consume(log.load(root)))

    def scan_values() -> float:
        frame = session().read.format("log").option("subscribe", "t").schema("value BINARY")
        return rate(SCAN_ROWS, lambda: consume(frame.load(root)))

    def scan_parquet() -> float:
        return rate(SCAN_ROWS, lambda: consume(session().read.parquet(parquet)))

    def catch_up() -> float:
        return stream_rate(root, directory)

    scan(), scan_parquet(), catch_up()
    return [
        ratio_row(
            "batch scan of the tail, 10 M records → noop", "Mrow/s", scan, scan_parquet,
            "Parquet scan", at_least=0.35, floor=2.5,
        ),
        ratio_row(
            'the same with schema("value BINARY")', "Mrow/s", scan_values, scan,
            "full scan", at_least=1.3,
        ),
        ratio_row(
            "streaming catch-up, AvailableNow, 2 M a batch", "Mrow/s", catch_up, scan,
            "batch scan", at_least=0.8,
        ),
    ]  # fmt: skip


def fill(log: broker.Log) -> None:
    log.create_topic("t", partitions=PARTITIONS, config=UNSEALED)
    rows = 10_000
    with log.producer() as producer:
        for number in range(SCAN_ROWS // rows):
            values = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(100), rows, [None, pa.py_buffer(os.urandom(100 * rows))]
            )
            partition = pa.repeat(pa.scalar(number % PARTITIONS, pa.int32()), rows)
            producer.send_batch("t", pa.record_batch({"value": values, "partition": partition}))


def stream_rate(root: str, directory: Path) -> float:
    """Return the rate from the first batch to the last, without the start of the query."""
    stream = session().readStream.format("log").option("subscribe", "t")
    checkpoint = directory / f"checkpoint-{time.monotonic_ns()}"
    query = (
        stream.option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", BATCH_ROWS)
        .load(root)
        .writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return SCAN_ROWS / sum(trigger_times(query)) / MEGA


def sink(directory: Path) -> list[Row]:
    """Rows with keys into four partitions, against Spark's own Parquet write of the same rows."""
    root = str(directory / "log")
    broker.open(root)
    source = str(directory / "source")
    # Random bytes: equal ones would all but vanish in Parquet.
    value = "unhex(repeat(sha2(cast(id as string), 256), 4))"
    session().range(SINK_ROWS, numPartitions=4).selectExpr(
        "cast(id % 100000 as string) AS key", f"substring({value}, 1, 100) AS value"
    ).write.parquet(source)
    number = 0

    def write() -> float:
        nonlocal number
        number += 1
        writer = session().read.parquet(source).write.format("log").mode("append")
        options = {"topic": f"t{number}", "createTopic": "true", "numPartitions": PARTITIONS}
        return rate(SINK_ROWS, lambda: writer.options(**options).save(root))

    def write_parquet() -> float:
        writer = session().read.parquet(source).write.mode("overwrite")
        return rate(SINK_ROWS, lambda: writer.parquet(str(directory / "copy")))

    write(), write_parquet()
    return [
        ratio_row(
            "sink, 4 M rows by key", "Mrow/s", write, write_parquet, "Parquet write", at_least=0.5
        )
    ]


def micro_batches(directory: Path) -> list[Row]:
    """Small batches, one after the other, against Spark's own source of small batches."""
    root = str(directory / "log")
    log = broker.open(root)
    log.create_topic("t", partitions=PARTITIONS)
    table = pa.record_batch(
        {"value": pa.array([b"x" * 100] * 100), "key": pa.array(range(100)).cast("string")}
    )

    def ours() -> float:
        stream = session().readStream.format("log").option("subscribe", "t").load(root)
        with log.producer() as producer:
            return trigger_ms(stream, lambda: producer.send_batch("t", table).result())

    def rates() -> float:
        stream = session().readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
        return trigger_ms(stream, lambda: None)

    ours(), rates()
    mine, other, ratios = best_of_pairs(ours, rates, 5)
    ratio = statistics.median(ratios)
    return [
        Row(
            "micro-batch at low rate, source → noop, 4 partitions", f"{mine:.0f} ms",
            f"{other:.0f} ms rate-micro-batch", ratio, "under 1.6x", ratio < 1.6, ratios,
        )
    ]  # fmt: skip


def trigger_ms(stream: Any, feed: Callable[[], object], batch_count: int = 25) -> float:
    """Return the median time of one trigger, of those that had something to do."""
    query = stream.writeStream.format("noop").trigger(processingTime="0 seconds").start()
    seen = 0
    while seen < batch_count:
        feed()
        time.sleep(0.2)
        seen = len(trigger_times(query))
    times = trigger_times(query)
    query.stop()
    return statistics.median(times[5:]) * 1000


def trigger_times(query: Any) -> list[float]:
    """Return how many seconds each batch with records took."""
    found = [json.loads(progress.json) for progress in query.recentProgress]
    return [one["durationMs"]["triggerExecution"] / 1000 for one in found if one["numInputRows"]]


def planning(directory: Path) -> list[Row]:
    """The driver's share of a batch over many small frames: from opening the log to the tasks."""
    storage = LocalStorage(str(directory / "log"))
    broker.open(directory / "log")
    create(storage, "t", 1, partitions=PARTITIONS, config=UNSEALED)
    topic = Topic(storage, "t", 1, write=True)
    frame = batch.encode_records([None], [b"x" * 100], None, [1])
    prefix = os.urandom(8)
    for number in range(FRAMES):
        topic.append(((number & 3, frame),), Author(prefix + number.to_bytes(8, "little")))
    topic.close()
    options = {"path": str(directory / "log"), "subscribe": "t"}
    runs, size = [], 0
    for _ in range(5):
        begun = time.perf_counter()
        tasks = LogBatchReader(options, row_schema(include_headers=False)).partitions()
        runs.append(round(time.perf_counter() - begun, 4))
        size = sum(len(pickle.dumps(task)) for task in tasks)
    middle = statistics.median(runs)
    return [
        Row(
            "planning over 1,000,000 frames", f"{middle:.2f} s, {size / 1000:,.0f} kB", "–", None,
            "under 1 s and 1 MB", middle < 1 and size < MEGA, tuple(runs),
        )
    ]  # fmt: skip


def consume(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def rate(count: int, work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return count / (time.perf_counter() - begun) / MEGA


def ratio_row(
    work: str,
    unit: str,
    ours: Callable[[], float],
    baseline: Callable[[], float],
    name: str,
    *,
    at_least: float,
    floor: float = 0.0,
) -> Row:
    mine, other, ratios = best_of_pairs(ours, baseline, 5)
    ratio = statistics.median(ratios)
    target = f"{at_least}x" + (f" and {floor} {unit}" if floor else "")
    is_met = ratio >= at_least and mine >= floor
    measured = f"{mine:.2f} {unit}"
    return Row(work, measured, f"{other:.2f} {unit} {name}", ratio, target, is_met, ratios)


BENCHMARKS = (scans, sink, micro_batches, planning)
