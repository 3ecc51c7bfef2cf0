"""A query goes on over sealing, compaction and retention by maintainers that are killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import TopicPartition

pytestmark = pytest.mark.spark

MAINTAINER = Path(__file__).with_name("maintainer.py")
PARTITIONS = 2
CONFIG = {
    "segment.bytes": 20_000,
    "seal.bytes": 20_000,
    "file.delete.delay.ms": 0,
    "table.delete.delay.ms": 0,
    "retention.ms": -1,
    # Of each key all records stay: each has a key of its own. Still every file is compacted.
    "cleanup.policy": "compact,delete",
    "min.cleanable.dirty.ratio": 0,
    "maintenance.enabled": False,
}


class Load:
    """A producer of numbers, a maintainer that is killed at random, and retention behind a query.

    Retention is `delete_records`, a good way behind what the query has written: by time or size it
    would remove what a query on a slow machine has not read yet, and that is no fault.
    """

    def __init__(self, log: broker.Log, seed: int) -> None:
        self._log = log
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=act) for act in (self._write, self._maintain)]
        self.written = 0
        self.kill_count = 0
        self.removal_count = 0
        self.read: dict[int, int] = {}

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        with self._log.producer() as producer:
            while not self._is_over.is_set():
                for _ in range(200):
                    text = b"%d" % self.written
                    producer.send("in", text, key=text, partition=self.written % PARTITIONS)
                    self.written += 1
                producer.flush()
                time.sleep(0.02)

    def _maintain(self) -> None:
        while not self._is_over.is_set():
            command = [sys.executable, str(MAINTAINER), self._log.root, "in"]
            maintainer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            time.sleep(0.7 + 1.5 * self._random.random())
            assert maintainer.poll() is None, maintainer.communicate()[1][-3000:]
            maintainer.send_signal(signal.SIGKILL)
            maintainer.communicate()
            self.kill_count += 1
            for partition, offset in list(self.read.items()):
                if offset > 500:
                    start = offset - 200 - self._random.randrange(300)
                    self._log.delete_records({TopicPartition("in", partition): start})
                    self.removal_count += 1


def follow(spark: Any, log: broker.Log, checkpoint: Path) -> Any:
    return (
        spark.readStream.format("log")
        .option("subscribe", "in")
        .option("startingOffsets", "earliest")
        .load(log.root)
        .selectExpr("value", "CAST(offset AS STRING) AS key")
        .writeStream.format("log")
        .option("topic", "out")
        .option("checkpointLocation", str(checkpoint))
        .start(log.root)
    )


def positions(query: Any) -> dict[int, int]:
    """Return up to where a query has written, by partition."""
    progress = query.lastProgress
    if not progress or not progress["sources"][0]["endOffset"]:
        return {}
    ends = progress["sources"][0]["endOffset"]
    ends = json.loads(ends) if isinstance(ends, str) else ends
    return {int(partition): offset for partition, offset in ends["in"].items()}


def run(spark: Any, log: broker.Log, tmp_path: Path, *, seconds: float, seed: int) -> None:
    log.create_topic("in", PARTITIONS, config=CONFIG)
    log.create_topic("out", 1, config={"retention.ms": -1})
    query = follow(spark, log, tmp_path / "checkpoint")
    try:
        # Its Python processes have ten seconds to start in, which a busy machine may need.
        query.processAllAvailable()
        with Load(log, seed) as load:
            end = time.monotonic() + seconds
            while time.monotonic() < end or load.kill_count < 3 or load.removal_count < 3:
                time.sleep(0.2)
                assert query.exception() is None, str(query.exception())
                load.read = positions(query)
        query.processAllAvailable()
    finally:
        query.stop()
    copied = []
    with log.consumer("out", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        for record in consumer:
            copied.append((int(record.value) % PARTITIONS, int(record.key), int(record.value)))
    expected = [
        (number % PARTITIONS, number // PARTITIONS, number) for number in range(load.written)
    ]
    assert sorted(copied) == sorted(expected)
    log.maintain("in", seal=True)
    description = log.describe_topic("in")
    assert description.sealed_ends == tuple(one.end_offset for one in description.partitions)
    assert any(one.start_offset for one in description.partitions)


def test_a_query_over_maintainers_that_are_killed_copies_exactly_its_input(
    spark: Any, log: broker.Log, tmp_path: Path
) -> None:
    run(spark, log, tmp_path, seconds=10, seed=7)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_query_over_maintainers_killed_for_minutes_copies_exactly_its_input(
    spark: Any, log: broker.Log, tmp_path: Path
) -> None:
    run(spark, log, tmp_path, seconds=240, seed=random.randrange(1 << 30))
