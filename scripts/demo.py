"""The log at work: a producer is killed in the middle of writing, and nothing is lost or doubled.

Run by `make demo`. Uses a temporary directory, or the one that LOG_ROOT names, which is kept.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import broker
from broker import TopicPartition
from broker.cli.output import print_table

TOPIC = "orders"
PARTITIONS = 4
KILL_AFTER = 20_000
TOTAL = 60_000
ACKNOWLEDGE_EVERY = 500
CUSTOMERS = 500


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        root = os.environ.get("LOG_ROOT") or str(Path(scratch, "log"))
        return run(root)


def run(root: str) -> int:
    log = broker.open(root)
    if TOPIC in log.topics():
        log.delete_topic(TOPIC)
    log.create_topic(TOPIC, PARTITIONS, config={"segment.bytes": 512 << 10})
    say(f"A log in {root}, topic {TOPIC!r} with {PARTITIONS} partitions.")
    follower = Follower(log)
    follower.start()
    started = time.time()
    acknowledged = produce_until_killed(root)
    first_count = count_records(log)
    say(
        f"Producer 1 was killed (SIGKILL) with {acknowledged:,} orders acknowledged; "
        f"the log holds {first_count:,}."
    )
    middle_ms = int(time.time() * 1000)
    acknowledged = run_producer(root, stop_at=None)
    say(f"Producer 2 looked where the log ends and went on; {acknowledged:,} acknowledged.")
    follower.finish(count_records(log))
    show_offsets(log)
    show_look_ups(log, middle_ms)
    is_right = show_counts(log, acknowledged, follower.ids, time.time() - started)
    show_files(root)
    return 0 if is_right else 1


# Writing, in a process of its own.


def produce_until_killed(root: str) -> int:
    return run_producer(root, stop_at=KILL_AFTER)


def run_producer(root: str, stop_at: int | None) -> int:
    """Start a producer and return the last order it said was committed; kill it at `stop_at`."""
    command = [sys.executable, __file__, "--produce", root]
    acknowledged = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged = int(line)
            if stop_at is not None and acknowledged >= stop_at:
                process.send_signal(signal.SIGKILL)
                stop_at = None
    return acknowledged


def produce(root: str) -> None:
    """Write orders from where the log ends; say after each few how many are committed."""
    log = broker.open(root, create=False)
    chance = random.Random(7)
    with log.producer(linger_ms=1, compression_type="lz4") as producer:
        first = count_records(log)
        for number in range(first, TOTAL):
            customer = f"customer-{chance.randrange(CUSTOMERS)}"
            order = {"id": number, "customer": customer, "amount": chance.randint(1, 99)}
            future = producer.send(TOPIC, json.dumps(order).encode(), key=customer.encode())
            if (number + 1) % ACKNOWLEDGE_EVERY == 0:
                # One producer's commits keep their order: this one is behind all before it.
                future.add_callback(acknowledge, number + 1)


def acknowledge(count: int, _metadata: broker.RecordMetadata) -> None:
    print(count, flush=True)


# Reading meanwhile.


class Follower(threading.Thread):
    """A consumer that follows the topic from before the first record."""

    def __init__(self, log: broker.Log) -> None:
        super().__init__(daemon=True)
        self._log = log
        self._end: int | None = None
        self.ids: Counter[int] = Counter()

    def run(self) -> None:
        with self._log.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
            while self._end is None or self.ids.total() < self._end:
                for batch in consumer.poll_batches(timeout_ms=200).values():
                    self.ids.update(ids_of(batch))

    def finish(self, record_count: int) -> None:
        self._end = record_count
        self.join(timeout=10)


def ids_of(batch: object) -> list[int]:
    return [json.loads(value)["id"] for value in batch.column("value").to_pylist()]


def count_records(log: broker.Log) -> int:
    return log.describe_topic(TOPIC).record_count


# Showing.


def say(text: str) -> None:
    print(f"\x1b[1;32m•\x1b[0m {text}" if sys.stdout.isatty() else f"* {text}", flush=True)


def show_offsets(log: broker.Log) -> None:
    rows = [
        [one.partition, f"{one.start_offset:,}", f"{one.end_offset:,}"]
        for one in log.describe_topic(TOPIC).partitions
    ]
    print()
    print_table([">partition", ">start offset", ">end offset"], rows)
    print()


def show_look_ups(log: broker.Log, middle_ms: int) -> None:
    """Find an offset by time in the busiest partition, and read again from there."""
    busiest = max(log.describe_topic(TOPIC).partitions, key=lambda one: one.record_count)
    place = TopicPartition(TOPIC, busiest.partition)
    with log.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([place])
        found = consumer.offsets_for_times({place: middle_ms})[place]
        assert found is not None, "orders were written after that time"
        say(f"First record of partition {place.partition} after the kill: offset {found.offset:,}.")
        consumer.seek(place, found.offset)
        (record, *_) = consumer.poll(timeout_ms=1000, max_records=1)[place]
        say(f"Replay from offset {record.offset:,}: {record.value.decode()}")


def show_counts(log: broker.Log, acknowledged: int, followed: Counter[int], seconds: float) -> bool:
    with log.consumer(TOPIC, auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        ids = Counter(json.loads(record.value)["id"] for record in consumer)
    lost = sum(1 for number in range(acknowledged) if number not in ids)
    doubled = ids.total() - len(ids)
    report = log.verify(TOPIC)
    is_right = acknowledged == TOTAL == ids.total() and not lost and not doubled
    is_right = is_right and followed == ids and report.is_sound
    rows = [
        ["acknowledged", f"{acknowledged:,}"],
        ["in the log", f"{ids.total():,}"],
        ["seen by the follower", f"{followed.total():,}"],
        ["lost", lost],
        ["duplicates", doubled],
        ["damaged places", len(report.damage)],
        ["seconds", f"{seconds:.1f}"],
    ]
    print()
    print_table(["orders", ">count"], rows)
    print()
    return is_right


def show_files(root: str) -> None:
    paths = sorted(path for path in Path(root).rglob("*") if path.is_file())
    rows = [[path.relative_to(root), f"{path.stat().st_size:,}"] for path in paths]
    print_table(["file", ">bytes"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--produce"]:
        produce(sys.argv[2])
    else:
        sys.exit(main())
