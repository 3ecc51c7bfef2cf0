"""The log on HDFS and on slow stores. `make bench-remote` runs these; they start a real HDFS."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hdfs_native
import pyarrow as pa

import broker
from benchmarks.spark_bench import session
from benchmarks.table import Row, best_of_pairs
from broker.log import Log
from broker.reader import TopicReader
from broker.storage.memory import MemoryStore
from broker.storage.remote import RemoteStorage
from servers import HdfsCluster, S3Server

VALUE = b"x" * 100
PARTITIONS = 4
MEGA = 1e6
_SECONDS = 10.0
# One producer of 100-byte records, as fast as it can for some seconds; prints how many.
_PRODUCER = """
import sys, time, broker
root, seconds = sys.argv[1], float(sys.argv[2])
with broker.open(root).producer() as producer:
    producer.send("t", b"x").get(60)
    print("ready", flush=True)
    sys.stdin.readline()
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for _ in range(200):
            future = producer.send("t", b"x" * 100)
        count += 200
    future.get(120)
print(count, flush=True)
"""


class SlowStore:
    """Adds a wait to every request, and counts them."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self.root = store.root
        self.poll_seconds = store.poll_seconds
        self.is_known = store.is_known
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("get", "put_new", "put", "stat", "entries", "delete", "delete_tree"):
            return method

        def ask(*arguments: Any) -> Any:
            self.requests.append(name)
            time.sleep(self._seconds)
            return method(*arguments)

        return ask


def columnar_append(directory: Path) -> list[Row]:
    """Commits of 16 MB, against writing the same bytes as one file with the same client."""
    with HdfsCluster.start(directory) as cluster:
        root = f"{cluster.address}/{uuid.uuid4().hex}"
        log = broker.open(root)
        log.create_topic("t", partitions=PARTITIONS)
        client = hdfs_native.Client(cluster.address, cluster.client_options)
        table = pa.record_batch({"value": pa.array([VALUE] * 140_000, pa.binary())})
        size, commits = 16 << 20, 8
        piece = os.urandom(size)
        producer = log.producer(buffer_memory=128 << 20)
        producer.send_batch("t", table).result()

        def ours() -> float:
            os.sync()  # What was written before is not written back now.
            begun = time.perf_counter()
            for _ in range(commits):
                producer.send_batch("t", table)
            producer.flush()
            return commits * table.nbytes / (time.perf_counter() - begun) / MEGA

        def plain() -> float:
            os.sync()
            begun = time.perf_counter()
            with client.create(f"/{uuid.uuid4().hex}") as file:
                for _ in range(commits):
                    file.write(piece)
            return commits * size / (time.perf_counter() - begun) / MEGA

        mine, other, ratios = best_of_pairs(ours, plain, 9)
        producer.close()
    ratio = statistics.median(ratios)
    return [
        Row(
            "columnar append on HDFS, commits of about 16 MB",
            f"{mine:,.0f} MB/s",
            f"{other:,.0f} MB/s one file by hdfs-native",
            ratio,
            "0.5x",
            ratio >= 0.5,
            ratios,
        )
    ]


def eight_producers(directory: Path) -> list[Row]:
    """Records in all by eight producers at once, against one alone."""
    with HdfsCluster.start(directory) as cluster:

        def run(count: int) -> float:
            root = f"{cluster.address}/{uuid.uuid4().hex}"
            broker.open(root).create_topic("t", partitions=PARTITIONS)
            started = [
                subprocess.Popen(
                    [sys.executable, "-c", _PRODUCER, root, str(_SECONDS)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for _ in range(count)
            ]
            for one in started:
                assert one.stdout is not None and one.stdout.readline() == "ready\n"
            begun = time.perf_counter()
            for one in started:
                assert one.stdin is not None
                one.stdin.write("\n")
                one.stdin.flush()
            total = 0
            for one in started:
                assert one.stdout is not None
                total += int(one.stdout.readline())
            seconds = time.perf_counter() - begun
            for one in started:
                one.wait()
            return total / seconds / MEGA

        mine, other, ratios = best_of_pairs(lambda: run(8), lambda: run(1), 7)
    ratio = statistics.median(ratios)
    return [
        Row(
            "8 producers, 100-byte records, one topic on HDFS",
            f"{mine:.2f} M rec/s in sum",
            f"{other:.2f} M rec/s one alone",
            ratio,
            "1x",
            ratio >= 1,
            ratios,
        )
    ]


def spark_scan(directory: Path) -> list[Row]:
    """Spark's scan of a log with large frames on HDFS, against the same log on local disk."""
    table = pa.record_batch({"value": pa.array([VALUE] * 140_000, pa.binary())})
    spark = session()
    with HdfsCluster.start(directory) as cluster:
        roots = {"hdfs": f"{cluster.address}/scan", "disk": str(directory / "log")}
        for root in roots.values():
            log = broker.open(root)
            log.create_topic("t", partitions=PARTITIONS)
            with log.producer(buffer_memory=128 << 20) as producer:
                for _ in range(20):
                    producer.send_batch("t", table)

        def scan(root: str) -> float:
            begun = time.perf_counter()
            frame = spark.read.format("log").option("subscribe", "t").load(root)
            frame.write.format("noop").mode("overwrite").save()
            return 20 * 140_000 / (time.perf_counter() - begun) / MEGA

        for root in roots.values():
            scan(root)
        mine, other, ratios = best_of_pairs(
            lambda: scan(roots["hdfs"]), lambda: scan(roots["disk"]), 5
        )
    ratio = statistics.median(ratios)
    return [
        Row(
            "Spark scan of a log on HDFS, large frames, 2.8 M records",
            f"{mine:.2f} Mrow/s",
            f"{other:.2f} Mrow/s on local disk",
            ratio,
            "0.5x",
            ratio >= 0.5,
            ratios,
        )
    ]


def small_commits(directory: Path) -> list[Row]:
    """A consumer over 10,000 commits of one record, on a store that takes 5 ms a request."""
    store = MemoryStore(f"memory://{uuid.uuid4().hex}")
    _fill(store, 10_000)
    slow = SlowStore(store, 0.005)
    sample = [name for name in store.names() if "/journal/" in name][:400]

    def ours() -> float:
        log = Log(RemoteStorage(slow))  # type: ignore[arg-type]
        begun = time.perf_counter()
        count = 0
        with log.consumer(auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
            consumer.assign([broker.TopicPartition("t", p) for p in range(PARTITIONS)])
            while count < 10_000:
                count += sum(len(records) for records in consumer.poll(timeout_ms=1000).values())
        return count / (time.perf_counter() - begun)

    def one_by_one() -> float:
        begun = time.perf_counter()
        for name in sample:
            slow.get(name)
        return len(sample) / (time.perf_counter() - begun)

    mine, other, ratios = best_of_pairs(ours, one_by_one, 3)
    ratio = statistics.median(ratios)
    return [
        Row(
            "consumer over 10,000 small commits, 5 ms a request",
            f"{mine:,.0f} commits/s",
            f"{other:,.0f} commits/s one by one",
            ratio,
            "10x",
            ratio >= 10,
            ratios,
        )
    ]


def idle_consumer(directory: Path) -> list[Row]:
    """Requests of a consumer that waits on S3, by default settings, counted by the server."""
    with S3Server.start(directory) as server:
        log = broker.open(f"{server.address}/idle", storage=server.client_options)
        log.create_topic("t", partitions=PARTITIONS)
        with log.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign([broker.TopicPartition("t", p) for p in range(PARTITIONS)])
            consumer.poll(timeout_ms=5000)
            before, begun = len(server.requests()), time.monotonic()
            consumer.poll(timeout_ms=20_000)
            seconds = time.monotonic() - begun
            requests = server.requests()[before:]
    rate = len(requests) / seconds
    lists = sum("list-type=" in request for request in requests)
    return [
        Row(
            "requests of an idle consumer on S3",
            f"{rate:.2f} a second, {lists} LIST",
            "",
            None,
            "at most 1 a second, no LIST",
            rate <= 1 and not lists,
        )
    ]


def opening(directory: Path) -> list[Row]:
    """Opening a topic and asking for its end, on a store that takes 5 ms a request."""

    def opener(count: int) -> Callable[[], float]:
        store = MemoryStore(f"memory://{uuid.uuid4().hex}")
        _fill(store, count)
        slow = SlowStore(store, 0.005)

        def open_once() -> float:
            begun = time.perf_counter()
            reader = TopicReader(RemoteStorage(slow), "t", 1)  # type: ignore[arg-type]
            assert sum(reader.refresh().ends) == count
            reader.close()
            return time.perf_counter() - begun

        return open_once

    large, small, ratios = best_of_pairs(opener(100_000), opener(100), 5)
    ratio = statistics.median(ratios)
    return [
        Row(
            "opening a topic with 100,000 commits, 5 ms a request",
            f"{large * 1000:.0f} ms",
            f"{small * 1000:.0f} ms with 100 commits",
            ratio,
            "under 3x",
            ratio < 3,
            ratios,
        )
    ]


def _fill(store: MemoryStore, count: int) -> None:
    """Make a topic of commits of one record each."""
    log = Log(RemoteStorage(store))
    log.create_topic("t", partitions=PARTITIONS, config={"maintenance.enabled": False})
    with log.producer() as producer:
        for number in range(count):
            producer.send("t", VALUE, partition=number % PARTITIONS).get(60)


BENCHMARKS = [
    columnar_append,
    eight_producers,
    spark_scan,
    small_commits,
    idle_consumer,
    opening,
]
