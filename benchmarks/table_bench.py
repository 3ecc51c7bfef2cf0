"""History as a table: scans of sealed records, sealing, space, many files, look-ups by time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import broker
import spark_log
from benchmarks.spark_bench import consume, rate, session
from benchmarks.table import Row, best_of_pairs
from broker import TopicPartition, parquet
from broker.commit import Author, FramePlace
from broker.ledger import new_token
from broker.sealed import SealedFile
from broker.storage import LocalStorage
from broker.topic import Topic

ROWS = 10_000_000
ROUND_ROWS = 1_000_000
PARTITIONS = 4
TIME_MS = 1_700_000_000_000
MEGA = 1e6
UNSEALED = {"maintenance.enabled": False, "retention.ms": -1, "file.delete.delay.ms": 0}


def history(directory: Path) -> list[Row]:
    """10 M JSON-like records of about 200 bytes: sealed, weighed, and scanned by Spark."""
    log = broker.open(directory / "log")
    log.create_topic("t", PARTITIONS, config=UNSEALED)
    for first in range(0, ROWS, ROUND_ROWS):
        send(log, records(first, ROUND_ROWS))
    unsealed = log.describe_topic("t").byte_count
    begun = time.perf_counter()
    log.maintain("t", seal=True)
    took = time.perf_counter() - begun
    description = log.describe_topic("t")
    assert sum(description.sealed_ends) == ROWS
    share = description.sealed_byte_count / unsealed
    weight = Row(
        "bytes at rest, 10 M JSON-like records, sealed",
        f"{description.sealed_byte_count / MEGA:,.0f} MB",
        f"{unsealed / MEGA:,.0f} MB unsealed, uncompressed",
        share,
        "under 0.25x",
        share < 0.25,
        (round(took, 1),),
    )
    return [*scans(log), weight]


def scans(log: broker.Log) -> list[Row]:
    spark, root = session(), log.root
    snapshot = log.snapshot("t")
    low, high = TIME_MS + ROWS * 60 // 100, TIME_MS + ROWS * 61 // 100

    def plain() -> float:
        return rate(ROWS, lambda: consume(spark.read.parquet(snapshot.location)))

    def table() -> float:
        return rate(ROWS, lambda: consume(spark_log.table(spark, root, "t")))

    def narrow() -> float:
        def act() -> None:
            frame = spark_log.table(spark, root, "t")
            is_wanted = (
                f"timestamp >= timestamp_millis({low}) AND timestamp < timestamp_millis({high})"
            )
            consume(frame.filter(is_wanted).select("offset"))

        return rate(ROWS, act)

    plain(), table(), narrow()
    return [
        _row("spark_log.table, 10 M sealed records → noop", table, plain, "Parquet scan", 0.8, 5),
        _row("the same: one column, 1 % of the time", narrow, table, "full scan", 8, 5),
    ]


def _row(
    work: str, ours: Callable[[], float], other: Callable[[], float], against: str,
    at_least: float, repeats: int,
) -> Row:  # fmt: skip
    mine, base, ratios = best_of_pairs(ours, other, repeats)
    ratio = statistics.median(ratios)
    return Row(
        work, f"{mine:.2f} M/s", f"{base:.2f} M/s {against}", ratio, f"{at_least}x",
        ratio >= at_least, ratios,
    )  # fmt: skip


def records(first: int, count: int) -> pa.RecordBatch:
    """Return orders as JSON, a millisecond apart: digits at random, words from short lists."""
    random = np.random.default_rng(first)

    def digits(high: int) -> pa.Array:
        return pa.array(random.integers(0, high, count)).cast(pa.string())

    def words(*choices: str) -> pa.Array:
        return pa.array(choices).take(pa.array(random.integers(0, len(choices), count)))

    numbers = pa.array(np.arange(first, first + count))
    text = pc.binary_join_element_wise(
        '{"order_id": ', numbers.cast(pa.string()), ', "customer": "customer-', digits(100_000),
        '", "product": "SKU-', digits(5_000), '", "quantity": ', digits(9), ', "price": ',
        digits(500), ".", digits(99), ', "currency": "', words("EUR", "USD", "GBP", "JPY"),
        '", "status": "', words("paid", "shipped", "returned", "cancelled"), '", "channel": "',
        words("web", "app", "store"), '", "country": "', words("DE", "FR", "US", "JP", "BR"), '"}',
        "",
    )  # fmt: skip
    return pa.record_batch(
        {
            "value": text.cast(pa.binary()),
            "key": pc.binary_join_element_wise("customer-", digits(100_000), "").cast(pa.binary()),
            "timestamp": pc.add(numbers, TIME_MS).cast(pa.timestamp("ms")),
            "partition": pa.array(np.arange(count) * PARTITIONS // count, pa.int32()),
        }
    )


def send(log: broker.Log, batch: pa.RecordBatch) -> None:
    rows = 20_000
    with log.producer() as producer:
        for start in range(0, batch.num_rows, rows):
            producer.send_batch("t", batch.slice(start, rows))


def sealing(directory: Path) -> list[Row]:
    """Sealing 1 M records, against pyarrow writing the same rows with the same settings."""
    log = broker.open(directory / "log")
    log.create_topic("t", PARTITIONS, config=UNSEALED)
    first = 0

    def ours() -> float:
        nonlocal first
        send(log, records(first, ROUND_ROWS))
        first += ROUND_ROWS
        return rate(ROUND_ROWS, lambda: log.maintain("t", seal=True))

    def plain() -> float:
        # The same files, read before the clock starts.
        files = log.snapshot("t").files[-PARTITIONS:]
        tables = [pq.read_table(log.snapshot("t").path(one), partitioning=None) for one in files]
        return rate(ROUND_ROWS, lambda: [write_plainly(one, directory) for one in tables])

    ours(), plain()
    row = _row("sealing, 1 M records", ours, plain, "pyarrow writing Parquet", 0.5, 5)
    return [row]


def write_plainly(table: pa.Table, directory: Path) -> None:
    path = directory / "plain.parquet"
    pq.write_table(
        table, path, compression="zstd", row_group_size=parquet.ROW_GROUP_ROWS,
        use_dictionary=["key", "timestampType"], write_statistics=["offset", "timestamp"],
        column_encoding={"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
        write_page_index=True, write_page_checksum=True, store_schema=False,
    )  # fmt: skip
    path.unlink()


def many_files(directory: Path) -> list[Row]:
    """Opening, asking for the end and reading the tail: with 1,000 sealed files and with 10."""
    storage = LocalStorage(str(directory / "log"))
    log = broker.Log(storage)
    for name, count in (("few", 10), ("many", 1000)):
        log.create_topic(name, 1, config=UNSEALED)
        pretend(storage, name, files=count, records=100)
        with log.producer() as producer:
            for number in range(1000):
                producer.send(name, b"%d" % number, partition=0)

    def use(name: str) -> float:
        begun = time.perf_counter()
        place = TopicPartition(name, 0)
        with log.consumer() as consumer:
            consumer.assign([place])
            end = consumer.end_offsets([place])[place]
            consumer.seek(place, end - 1000)
            assert sum(map(len, consumer.poll(0, max_records=1000).values())) == 1000
        return (time.perf_counter() - begun) * 1000

    use("many"), use("few")
    mine, other, ratios = best_of_pairs(lambda: use("many"), lambda: use("few"), 31)
    ratio = statistics.median(ratios)
    work = "opening, latest offset and a tail read, 1,000 sealed files"
    measured, base = f"{mine:.1f} ms", f"{other:.1f} ms with 10"
    return [Row(work, measured, base, ratio, "under 2x", ratio < 2, ratios)]


def time_look_up(directory: Path) -> list[Row]:
    """100 M records, of which one file is real: the others only have names and bounds."""
    storage = LocalStorage(str(directory / "log"))
    log = broker.Log(storage)
    log.create_topic("t", 1, config=UNSEALED)
    real = pretend(storage, "t", files=100, records=1_000_000, real=60)
    place = TopicPartition("t", 0)
    rng = np.random.default_rng(1)

    def look_up() -> float:
        offset = int(rng.integers(real.start, real.end))
        with log.consumer() as consumer:
            consumer.assign([place])
            consumer.end_offsets([place])
            begun = time.perf_counter()
            found = consumer.offsets_for_times({place: TIME_MS + offset})[place]
            took = (time.perf_counter() - begun) * 1000
        assert found is not None and found.offset == offset
        return took

    look_up()
    runs = tuple(round(look_up(), 3) for _ in range(31))
    middle = statistics.median(runs)
    work = "a look-up by time over 100 M records"
    return [Row(work, f"{middle:.1f} ms", "–", None, "under 10 ms", middle < 10, runs)]


def pretend(
    storage: LocalStorage, name: str, *, files: int, records: int, real: int = 0
) -> SealedFile:
    """Let a topic have sealed files in partition 0, of which only number `real` is written."""
    topic = Topic(storage, name, 1, write=True)
    total = files * records
    newest = (TIME_MS + total) * 1000
    frame = FramePlace("none", 0, 1, total, TIME_MS * 1000, newest)
    topic.append([(0, frame)], Author(new_token()))
    made = []
    for number in range(files):
        start, end = number * records, (number + 1) * records
        low, high = (TIME_MS + start) * 1000, (TIME_MS + end - 1) * 1000
        made.append(
            SealedFile(
                f"partition=0/{number}.parquet", 0, start, end, records, 1, low, high, 0, 0, 0
            )
        )
    made[real] = write_file(storage, topic.directory, made[real])
    assert topic.seal(made, (), {})
    topic.end_file()
    topic.write_checkpoint()
    topic.close()
    return made[real]


def write_file(storage: LocalStorage, directory: str, like: SealedFile) -> SealedFile:
    writer = parquet.SealedWriter(storage, directory, 0, like.start, born_ns=storage.clock())
    step = 100_000
    for start in range(like.start, like.end, step):
        offsets = np.arange(start, min(start + step, like.end))
        values = pa.array([b"x" * 100] * len(offsets), pa.binary())
        nothing = pa.nulls(len(offsets), parquet.SCHEMA.field("headers").type)
        stamps = pa.array((TIME_MS + offsets) * 1000).cast(parquet.SCHEMA.field("timestamp").type)
        kinds = pa.array(np.zeros(len(offsets), np.int32))
        columns = [values, values, nothing, stamps, kinds, pa.array(offsets)]
        writer.add(pa.RecordBatch.from_arrays(columns, schema=parquet.SCHEMA))
    return writer.finish(like.end)


BENCHMARKS = (history, sealing, many_files, time_look_up)
