"""The main job: orders are written, Spark enriches them, is killed in the middle, and goes on.

Three processes: a producer writes to topic `orders`; a streaming query reads it and writes topic
`enriched`, exactly once; this one kills the query with SIGKILL in the middle of a batch, starts it
again from its checkpoint, and in the end counts what came out.

Run by `make demo`. Uses a temporary directory, or the one that LOG_ROOT names, which is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import broker
from broker.cli.output import print_table

ORDERS, ENRICHED, GROUP = "orders", "enriched", "enricher"
PARTITIONS = 4
TOTAL = 60_000
ORDERS_PER_SECOND = 2_500
BATCH_MAX = 4_000
CUSTOMERS = 500
# The first batch is the empty one; a later one is cut off.
BATCHES_BEFORE_KILL = 3
PATIENCE_SECONDS = 300


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="spark-log-demo-") as scratch:
        root = os.environ.get("LOG_ROOT") or str(Path(scratch, "log"))
        return run(root, Path(scratch))


def run(root: str, scratch: Path) -> int:
    started = time.monotonic()
    log = broker.open(root)
    for topic in (ORDERS, ENRICHED):
        with contextlib.suppress(broker.UnknownTopic):
            log.delete_topic(topic)
        log.create_topic(topic, PARTITIONS)
    say(f"A log in {root}: topics {ORDERS!r} and {ENRICHED!r}, {PARTITIONS} partitions each.")
    with Enricher(root, scratch) as enricher:
        say(f"Spark starts a query from {ORDERS!r} to {ENRICHED!r}, exactly once …")
        enricher.wait_until_ready()
        with start("--produce", root) as producer:
            say(f"A producer writes {TOTAL:,} orders, {ORDERS_PER_SECOND:,} a second.")
            wait_for(lambda: is_reading(log), "the first orders read", enricher, interval=0.05)
            say("How far the query is behind while both run, as a consumer group:")
            show_group(log)
            killed = enricher.kill_in_a_batch()
            is_producing = producer.poll() is None
            say(
                f"Spark was killed (SIGKILL) in the middle of batch {killed}: "
                f"{count(log, ORDERS):,} orders in, {count(log, ENRICHED):,} out."
            )
            enricher.start()
            meanwhile = "goes on meanwhile" if is_producing else "has ended"
            say(f"Spark starts again from its checkpoint; the producer {meanwhile} …")
            wait_for(lambda: producer.poll() is not None, "the producer", enricher, interval=0.2)
            wait_for(lambda: lag(log) == 0, "the query to catch up", enricher, interval=0.2)
        say(f"All is read: {count(log, ORDERS):,} orders in, {count(log, ENRICHED):,} out.")
    is_right = show(log, enricher.batch_count(), time.monotonic() - started)
    return 0 if is_right else 1


# The producer, in a process of its own.


def produce(root: str) -> None:
    """Write orders at a steady rate."""
    chance = random.Random(7)
    began = time.monotonic()
    with broker.open(root, create=False).producer(compression_type="lz4") as producer:
        for number in range(TOTAL):
            customer = f"customer-{chance.randrange(CUSTOMERS)}"
            order = {"id": number, "customer": customer, "amount": chance.randint(1, 99)}
            producer.send(ORDERS, json.dumps(order).encode(), key=customer.encode())
            if number % 100 == 0:
                time.sleep(max(0.0, began + number / ORDERS_PER_SECOND - time.monotonic()))


# The streaming query, in a process of its own: what a user would write.


def enrich(root: str, checkpoint: str) -> None:
    """Run the query until there is something to read on the standard input."""
    from pyspark.sql import functions as F

    import spark_log

    spark = spark_log.session("enrich", **{"spark.master": "local[2]", "spark.ui.enabled": False})
    orders = (
        spark.readStream.format("log")
        .option("subscribe", ORDERS)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", BATCH_MAX)
        .option("groupId", GROUP)
        .load(root)
    )
    order = F.from_json(F.col("value").cast("string"), "id BIGINT, customer STRING, amount INT")
    enriched = orders.select("key", order.alias("order")).select(
        "key", F.to_json(F.struct("order.*", (F.col("order.amount") * 1.19).alias("gross")))
        .alias("value")
    )  # fmt: skip
    query = (
        enriched.writeStream.format("log")
        .option("topic", ENRICHED)
        .option("checkpointLocation", checkpoint)
        .start(root)
    )
    while query.isActive and not select.select([sys.stdin], [], [], 0.2)[0]:
        pass
    query.stop()
    spark.stop()
    if query.exception() is not None:
        raise SystemExit(str(query.exception()))


class Enricher:
    """The process of the query; a killed one is started again from the same checkpoint."""

    def __init__(self, root: str, scratch: Path) -> None:
        self._root = root
        self._checkpoint = scratch / "checkpoint"
        self._output = scratch / "spark-output"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Enricher:
        self.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        assert self._process is not None
        if kind is not None:
            self._kill()
            sys.stderr.write(self._output.read_text())
        else:
            self._process.communicate(b"stop\n", timeout=PATIENCE_SECONDS)

    def start(self) -> None:
        with self._output.open("ab") as output:
            self._process = start(
                "--enrich", self._root, str(self._checkpoint), stdin=subprocess.PIPE, stderr=output
            )

    def wait_until_ready(self) -> None:
        """Wait for the first batch, which is empty: Spark's start is over."""
        wait_for(lambda: bool(self._numbers("commits")), "Spark to start", self, interval=0.05)

    def kill_in_a_batch(self) -> int:
        """Kill Spark, all of its processes, in a batch that has begun; return its number."""
        wait_for(self._is_far_enough, "the first batches", self, interval=0.01)
        number = self._running_batch()
        self._kill()
        return number

    def check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise SystemExit("Spark ended by itself; what it said is above")

    def batch_count(self) -> int:
        return max(self._numbers("commits")) + 1

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _is_far_enough(self) -> bool:
        return self._running_batch() >= BATCHES_BEFORE_KILL

    def _running_batch(self) -> int:
        """Return the number of the batch that has begun and has not ended, or -1."""
        running = self._numbers("offsets") - self._numbers("commits")
        return max(running, default=-1)

    def _numbers(self, kind: str) -> set[int]:
        return {
            int(path.name) for path in (self._checkpoint / kind).glob("*") if path.name.isdigit()
        }


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]


# Waiting, counting, showing.


def wait_for(is_true: Callable[[], bool], what: str, enricher: Enricher, interval: float) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        enricher.check_alive()
        if time.monotonic() > end:
            raise SystemExit(f"waited {PATIENCE_SECONDS} s for {what}")
        time.sleep(interval)


def count(log: broker.Log, topic: str) -> int:
    return log.describe_topic(topic).record_count


def lag(log: broker.Log) -> int:
    """Return how far the query's group is behind the orders."""
    positions = log.group_positions(GROUP)
    return count(log, ORDERS) - sum(positions.values())


def ids(log: broker.Log, topic: str) -> Counter[int]:
    """Return how often each order is in a topic."""
    found: Counter[int] = Counter()
    with log.consumer(topic, auto_offset_reset="earliest") as consumer:
        while batches := consumer.poll_batches(timeout_ms=0):
            for batch in batches.values():
                found.update(json.loads(value)["id"] for value in batch.column("value").to_pylist())
    return found


def show(log: broker.Log, batch_count: int, seconds: float) -> bool:
    """Print what came out, and tell whether it is right."""
    orders, enriched = ids(log, ORDERS), ids(log, ENRICHED)
    lost = sum((orders - enriched).values())
    doubled = enriched.total() - len(enriched)
    damage = log.verify().damage
    print()
    facts = [
        ["records in", f"{orders.total():,}"],
        ["records out", f"{enriched.total():,}"],
        ["duplicates", f"{doubled:,}"],
        ["lost", f"{lost:,}"],
        ["damaged places", f"{len(damage):,}"],
        ["micro-batches", f"{batch_count:,}"],
        ["seconds", f"{seconds:.0f}"],
    ]
    print_table([f"{ORDERS} → {ENRICHED}", ">count"], facts)
    show_group(log)
    return orders.total() == TOTAL and orders == enriched and not damage and lag(log) == 0


def is_reading(log: broker.Log) -> bool:
    """Tell whether the query has got somewhere in every partition, and has more to read."""
    positions = log.group_positions(GROUP)
    return len(positions) == PARTITIONS and all(positions.values()) and lag(log) > 0


def show_group(log: broker.Log) -> None:
    rows = [
        [GROUP, f"{ORDERS}-{one.partition.partition}", f"{one.position:,}",
         f"{one.end_offset:,}", f"{one.lag:,}", f"{one.lag_seconds:.1f}"]
        for one in log.describe_group(GROUP).partitions
    ]  # fmt: skip
    print()
    print_table(["group", "partition", ">position", ">end", ">lag", ">lag seconds"], rows)
    print(flush=True)


def say(text: str) -> None:
    print(f"\x1b[1;32m•\x1b[0m {text}" if sys.stdout.isatty() else f"* {text}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--produce"]:
        produce(sys.argv[2])
    elif sys.argv[1:2] == ["--enrich"]:
        enrich(*sys.argv[2:])
    else:
        sys.exit(main())
