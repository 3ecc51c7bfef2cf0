"""The log on local disk: producing, consuming, waiting, opening, memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import broker
from benchmarks.table import Row, best_of_pairs
from broker import batch
from broker.commit import Author
from broker.ledger import new_token
from broker.storage import LocalStorage
from broker.topic import Topic, create

VALUE = b"x" * 100
PARTITIONS = 4
MEGA = 1e6


def columnar_append(directory: Path) -> list[Row]:
    """Commits of 10,000 records from Arrow, against writing the same bytes in the same pieces."""
    log = broker.open(directory / "log")
    log.create_topic("t", partitions=PARTITIONS)
    commits = 300
    table = pa.record_batch({"value": pa.array([VALUE] * 10_000, pa.binary())})
    producer = log.producer(buffer_memory=64 << 20)
    producer.send_batch("t", table).result()
    before = log.describe_topic("t")
    producer.send_batch("t", table).result()
    size = log.describe_topic("t").byte_count - before.byte_count
    piece = os.urandom(size)

    def ours() -> float:
        begun = time.perf_counter()
        for _ in range(commits):
            producer.send_batch("t", table)
        producer.flush()
        return commits * size / (time.perf_counter() - begun) / MEGA

    def plain() -> float:
        path = directory / "plain"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        begun = time.perf_counter()
        for _ in range(commits):
            os.write(descriptor, piece)
        rate = commits * size / (time.perf_counter() - begun) / MEGA
        os.close(descriptor)
        path.unlink()
        return rate

    mine, other, ratios = best_of_pairs(ours, plain, 5)
    producer.close()
    ratio = statistics.median(ratios)
    rows_rate = mine * MEGA / size * 10_000 / MEGA
    return [
        Row(
            "columnar append, 10,000 records a commit",
            f"{mine:,.0f} MB/s ({rows_rate:.1f} M rec/s)",
            f"{other:,.0f} MB/s plain write",
            ratio,
            "0.5x",
            ratio >= 0.5,
            ratios,
        )
    ]


def single_commits(directory: Path) -> list[Row]:
    """Commits of one record, encoded each time, idempotent; against write() of as many bytes."""
    storage = LocalStorage(str(directory / "log"))
    create(storage, "t", 1, partitions=PARTITIONS, config={})
    topic = Topic(storage, "t", 1, write=True)
    prefix, count = os.urandom(8), 20_000
    done = 0
    topic.append([(0, batch.encode_records([None], [VALUE], None, [1]))], Author(new_token()))
    size = topic.state.position
    topic.append([(0, batch.encode_records([None], [VALUE], None, [1]))], Author(new_token()))
    piece = os.urandom(topic.state.position - size)

    def ours() -> float:
        nonlocal done
        begun = time.perf_counter()
        for number in range(done, done + count):
            now = time.time_ns() // 1000
            frame = batch.encode_records([None], [VALUE], None, [now])
            author = Author(prefix + number.to_bytes(8, "little"), 7, number, 0)
            topic.append(((number & 3, frame),), author)
        done += count
        return count / (time.perf_counter() - begun)

    def plain() -> float:
        path = directory / "plain"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        begun = time.perf_counter()
        for _ in range(count):
            os.write(descriptor, piece)
        rate = count / (time.perf_counter() - begun)
        os.close(descriptor)
        path.unlink()
        return rate

    mine, other, ratios = best_of_pairs(ours, plain, 9)
    topic.close()
    ratio = statistics.median(ratios)
    return [
        Row(
            "commits of one record, one writer",
            f"{mine:,.0f}/s",
            f"{other:,.0f}/s plain write()",
            ratio,
            "0.15x and 20,000/s",
            ratio >= 0.15 and mine >= 20_000,
            ratios,
        )
    ]


def producer_send(directory: Path) -> list[Row]:
    """`producer.send` record by record with default settings, to the last acknowledgement."""
    log = broker.open(directory / "log")
    log.create_topic("t", partitions=PARTITIONS)
    count = 500_000

    def ours() -> float:
        with log.producer() as producer:
            send = producer.send
            begun = time.perf_counter()
            for _ in range(count):
                send("t", VALUE)
            producer.flush()
            return count / (time.perf_counter() - begun) / MEGA

    return [_absolute("producer.send record by record", ours, 5, 0.4)]


def consumer_iteration(directory: Path) -> list[Row]:
    """`for record in consumer`, every record an object."""
    log = broker.open(directory / "log")
    count = _fill(log, batches=100)

    def ours() -> float:
        with log.consumer("t", auto_offset_reset="earliest") as consumer:
            begun = time.perf_counter()
            for seen, _record in enumerate(consumer, start=1):
                if seen == count:
                    break
            return count / (time.perf_counter() - begun) / MEGA

    return [_absolute("consumer iteration record by record", ours, 5, 1.0)]


def consumer_batches(directory: Path) -> list[Row]:
    """`poll_batches`, uncompressed, against reading the same files from one end to the other."""
    log = broker.open(directory / "log")
    count = _fill(log, batches=600)
    files = sorted((directory / "log/topics/t/1/journal").iterdir())
    size = sum(path.stat().st_size for path in files)
    buffer = bytearray(1 << 20)

    def ours() -> float:
        with log.consumer("t", auto_offset_reset="earliest") as consumer:
            begun = time.perf_counter()
            seen = 0
            while seen < count:
                seen += sum(part.num_rows for part in consumer.poll_batches(1000).values())
            return size / (time.perf_counter() - begun) / MEGA

    def plain() -> float:
        begun = time.perf_counter()
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return size / (time.perf_counter() - begun) / MEGA

    mine, other, ratios = best_of_pairs(ours, plain, 7)
    ratio = statistics.median(ratios)
    return [
        Row(
            "poll_batches, uncompressed",
            f"{mine:,.0f} MB/s",
            f"{other:,.0f} MB/s plain read",
            ratio,
            "0.5x",
            ratio >= 0.5,
            ratios,
        )
    ]


def latency(directory: Path) -> list[Row]:
    """From `send` to a consumer in another process that waits; and what waiting costs."""
    root = str(directory / "log")
    log = broker.open(root)
    log.create_topic("t", partitions=PARTITIONS)
    waiter = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.waiter", root], stdout=subprocess.PIPE, text=True
    )
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "ready\n"
    time.sleep(3.0)  # The waiter measures what waiting costs in this time.
    with log.producer() as producer:
        for _ in range(2000):
            producer.send("t", str(time.monotonic_ns()).encode())
            time.sleep(0.002)
        producer.send("t", b"end").result()
    idle, *seen = (float(word) for word in waiter.communicate(timeout=60)[0].split())
    seen.sort()
    middle, late = seen[len(seen) // 2], seen[int(len(seen) * 0.99)]
    return [
        Row(
            "send → seen by a waiting consumer in another process",
            f"p50 {middle:.2f} ms, p99 {late:.2f} ms",
            "–",
            None,
            "p50 under 1 ms, p99 under 5 ms",
            middle < 1 and late < 5,
            (middle, late),
        ),
        Row(
            "an idle consumer's share of a core",
            f"{idle:.2f} %",
            "–",
            None,
            "under 2 %",
            idle < 2,
            (idle,),
        ),
    ]


def opening(directory: Path) -> list[Row]:
    """Opening a topic and asking for its end, after 1,000 and after 1,000,000 commits."""
    storage = LocalStorage(str(directory / "log"))
    for name, commits in (("small", 1_000), ("large", 1_000_000)):
        create(storage, name, 1, partitions=PARTITIONS, config={})
        topic = Topic(storage, name, 1, write=True)
        frame = batch.encode_records([None], [VALUE], None, [1])
        prefix = os.urandom(8)
        for number in range(commits):
            topic.append(((number & 3, frame),), Author(prefix + number.to_bytes(8, "little")))
        topic.close()

    def open_once(name: str) -> float:
        begun = time.perf_counter()
        topic = Topic(storage, name, 1)
        topic.refresh()
        took = time.perf_counter() - begun
        topic.close()
        return took * 1000

    mine, other, ratios = best_of_pairs(lambda: open_once("large"), lambda: open_once("small"), 31)
    ratio = statistics.median(ratios)
    return [
        Row(
            "opening after 1,000,000 commits",
            f"{mine:.2f} ms",
            f"{other:.2f} ms after 1,000",
            ratio,
            "under 3x",
            ratio < 3,
            ratios,
        )
    ]


def memory(directory: Path) -> list[Row]:
    """A producer and a consumer over 10 GB: the most memory each held beyond the interpreter."""
    root = str(directory / "log")
    broker.open(root).create_topic("t", partitions=PARTITIONS)
    rows = []
    for role in ("send", "send_batch", "iterate", "poll_batches"):
        command = [sys.executable, "-m", "benchmarks.memory", role, root]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        used = float(done.stdout)
        work = f"memory over 10 GB: {role}"
        rows.append(Row(work, f"{used:,.0f} MB", "–", None, "under 300 MB", used < 300, (used,)))
    return rows


def _absolute(work: str, ours: Callable[[], float], repeats: int, target: float) -> Row:
    runs = tuple(round(ours(), 4) for _ in range(repeats))
    middle = statistics.median(runs)
    return Row(work, f"{middle:.2f} M/s", "–", None, f"{target} M/s", middle >= target, runs)


def _fill(log: broker.Log, batches: int) -> int:
    log.create_topic("t", partitions=PARTITIONS)
    table = pa.record_batch({"value": pa.array([VALUE] * 10_000, pa.binary())})
    with log.producer() as producer:
        for _ in range(batches):
            producer.send_batch("t", table)
    return batches * 10_000


BENCHMARKS = (
    columnar_append,
    single_commits,
    producer_send,
    consumer_iteration,
    consumer_batches,
    latency,
    opening,
    memory,
)
