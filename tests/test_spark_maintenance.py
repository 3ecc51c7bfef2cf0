"""A query goes on over sealing, compaction and retention by maintainers that are killed.

Three topics get the same numbers. Retention must not overtake the query, or its failure would be no
fault; nor may compaction, which removes superseded records whether or not anybody has read them. So
each limit is one that stays behind the query however slow the machine is, and then the output is
exactly the input:

- `sized` keeps more bytes (`retention.bytes`) than those of all records that are ever unread at
  once: the producer waits for the query.
- `aged` and `keyed` have records of an old time of their own, ten seconds from each to the next.
  `retention.ms` and `min.compaction.lag.ms` are set anew as the query advances, to the age of what
  it read a while ago. Until they are set again, real time would have to pass for an hour to reach
  what is unread.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import broker

pytestmark = pytest.mark.spark

MAINTAINER = Path(__file__).with_name("maintainer.py")
TOPICS = ["aged", "keyed", "sized"]
PARTITIONS = 2
KEYS = 50
UNREAD_MAX = 1500
BEHIND = 500
STEP_MS = 10_000
YEARS_MS = 10 * 365 * 86_400_000
CONFIG = {
    "segment.bytes": 20_000,
    "seal.bytes": 20_000,
    "file.delete.delay.ms": 0,
    "table.delete.delay.ms": 0,
    "retention.ms": -1,
    "maintenance.enabled": False,
}
CONFIGS = {
    "aged": CONFIG,
    # A record takes about 120 bytes before it is sealed, and half of that after.
    "sized": CONFIG | {"retention.bytes": 200 * UNREAD_MAX},
    "keyed": CONFIG
    | {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": 0,
        "min.compaction.lag.ms": YEARS_MS,
    },
}


class Load:
    """A producer of numbers, a maintainer that is killed at random, and limits behind a query."""

    def __init__(self, log: broker.Log, seed: int) -> None:
        self._log = log
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self._actors = (self._write, self._maintain, self._set_limits)
        self._threads = [threading.Thread(target=self._run, args=[act]) for act in self._actors]
        self._born_ms = int(time.time() * 1000) - YEARS_MS
        self.failures: list[BaseException] = []
        self.written = 0
        self.read_offset = 0
        self.kill_count = 0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, act: Any) -> None:
        try:
            act()
        except BaseException as failure:
            self.failures.append(failure)

    def _write(self) -> None:
        with self._log.producer() as producer:
            while not self._is_over.wait(0.1):
                if self.written > (self.read_offset + UNREAD_MAX) * PARTITIONS - 200:
                    continue
                for number in range(self.written, self.written + 200):
                    for topic in TOPICS:
                        producer.send(
                            topic,
                            b"%d %s" % (number, self._random.randbytes(40).hex().encode()),
                            key=key(number) if topic == "keyed" else None,
                            partition=number % PARTITIONS,
                            timestamp_ms=self._time_of(number),
                        )
                producer.flush()
                self.written += 200

    def _maintain(self) -> None:
        while not self._is_over.is_set():
            command = [sys.executable, str(MAINTAINER), self._log.root, *TOPICS]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen(command, text=True, **pipes) as maintainer:
                assert maintainer.stdout is not None and maintainer.stderr is not None
                is_ready = maintainer.stdout.readline() == "ready\n"
                time.sleep(1.5 * self._random.random())
                is_alive = maintainer.poll() is None
                maintainer.kill()
                assert is_ready and is_alive, maintainer.stderr.read()[-3000:]
            self.kill_count += 1

    def _set_limits(self) -> None:
        while not self._is_over.wait(0.5):
            if self.read_offset <= BEHIND:
                continue
            now = int(time.time() * 1000)
            age = now - self._time_of((self.read_offset - BEHIND) * PARTITIONS)
            self._log.alter_topic("aged", {"retention.ms": age})
            self._log.alter_topic("keyed", {"min.compaction.lag.ms": age})

    def _time_of(self, number: int) -> int:
        return self._born_ms + number * STEP_MS


def key(number: int) -> bytes:
    return b"%d" % (number % (KEYS * PARTITIONS))


def follow(spark: Any, log: broker.Log, checkpoint: Path) -> Any:
    return (
        spark.readStream.format("log")
        .option("subscribe", ",".join(TOPICS))
        .option("startingOffsets", "earliest")
        .load(log.root)
        .selectExpr(
            "substring_index(CAST(value AS STRING), ' ', 1) AS value",
            "concat_ws(' ', topic, partition, offset) AS key",
        )
        .writeStream.format("log")
        .option("topic", "out")
        .option("checkpointLocation", str(checkpoint))
        .start(log.root)
    )


def read_offset(query: Any) -> int:
    """Return the offset up to which a query has written all topics and partitions."""
    progress = query.lastProgress
    if not progress or not progress["sources"][0]["endOffset"]:
        return 0
    ends = progress["sources"][0]["endOffset"]
    ends = json.loads(ends) if isinstance(ends, str) else ends
    return min(offset for topic in TOPICS for offset in ends[topic].values())


def starts(log: broker.Log, topic: str) -> list[int]:
    return [one.start_offset for one in log.describe_topic(topic).partitions]


def superseded_count(log: broker.Log) -> int:
    """Return how many records compaction has removed."""
    partitions = log.describe_topic("keyed").partitions
    return sum(one.end_offset - one.start_offset - one.record_count for one in partitions)


def has_all_happened(log: broker.Log, load: Load) -> bool:
    """Tell whether kills, retention of both sorts and compaction are behind us."""
    are_starts_moved = all(map(all, (starts(log, "aged"), starts(log, "sized"))))
    return load.kill_count >= 3 and are_starts_moved and superseded_count(log) > 500


def run(spark: Any, log: broker.Log, tmp_path: Path, *, seconds: float, seed: int) -> None:
    for topic in TOPICS:
        log.create_topic(topic, PARTITIONS, config=CONFIGS[topic])
    log.create_topic("out", 1, config={"retention.ms": -1})
    query = follow(spark, log, tmp_path / "checkpoint")
    try:
        # Its Python processes have ten seconds to start in, which a busy machine may need.
        query.processAllAvailable()
        with Load(log, seed) as load:
            begun = time.monotonic()
            while time.monotonic() < begun + seconds or not has_all_happened(log, load):
                time.sleep(0.5)
                assert query.exception() is None, str(query.exception())
                assert not load.failures, load.failures
                assert time.monotonic() < begun + seconds + 200, "not all has happened"
                load.read_offset = read_offset(query)
        assert not load.failures, load.failures
        query.processAllAvailable()
    finally:
        query.stop()
    assert copied(log) == {
        f"{topic} {number % PARTITIONS} {number // PARTITIONS}": number
        for topic in TOPICS
        for number in range(load.written)
    }
    assert starts(log, "keyed") == [0] * PARTITIONS
    check_the_end(log, load.written)


def copied(log: broker.Log) -> dict[str, int]:
    """Return the numbers that the query wrote, by the place where it read them; none twice."""
    found: dict[str, int] = {}
    with log.consumer("out", auto_offset_reset="earliest") as consumer:
        while batches := consumer.poll_batches(timeout_ms=0):
            for batch in batches.values():
                places, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
                for place, value in zip(places, values, strict=True):
                    assert place.decode() not in found, place
                    found[place.decode()] = int(value)
    return found


def check_the_end(log: broker.Log, written: int) -> None:
    """Check that all is sealed and sound, and that of each key the last record is left."""
    log.alter_topic("keyed", {"min.compaction.lag.ms": 0})
    for topic in TOPICS:
        (done,) = log.maintain(topic, seal=True)
        assert not done.is_held
        description = log.describe_topic(topic)
        assert description.sealed_ends == tuple(one.end_offset for one in description.partitions)
        assert description.sealed_ends == (written // PARTITIONS,) * PARTITIONS
    with log.consumer("keyed", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        left = {record.key: int(record.value.split()[0]) for record in consumer}
    assert left == {key(number): number for number in range(written)}
    assert log.describe_topic("keyed").record_count == len(left) == KEYS * PARTITIONS
    assert log.verify().damage == ()


def test_a_query_over_maintainers_that_are_killed_copies_exactly_its_input(
    spark: Any, log: broker.Log, tmp_path: Path
) -> None:
    run(spark, log, tmp_path, seconds=5, seed=7)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_query_over_maintainers_killed_for_minutes_copies_exactly_its_input(
    spark: Any, log: broker.Log, tmp_path: Path
) -> None:
    run(spark, log, tmp_path, seconds=240, seed=random.randrange(1 << 30))
