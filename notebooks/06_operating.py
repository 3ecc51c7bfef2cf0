# Databricks notebook source
# MAGIC %md
# MAGIC # Operating a log
# MAGIC There is no server to watch, but there are questions: how far behind is a reader, what may be removed, is all of it readable, and what if the disk is full?
# MAGIC All of this is on the command line, too; both ways are shown.

# COMMAND ----------

# MAGIC %run ./setup

# COMMAND ----------

import pyarrow as pa


def produce(topic: str, count: int, key_count: int = 100, **columns: list) -> None:
    """Send numbered records."""
    numbers = range(count)
    table = pa.table(
        {
            "key": [f"key-{n % key_count}" for n in numbers],
            "value": [f"value-{n}" for n in numbers],
            **columns,
        }
    )
    with log.producer() as producer:
        producer.send_batch(topic, table).result(timeout=30)


log.create_topic("orders", partitions=2)
produce("orders", 5000)
require_records("orders")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Lag
# MAGIC The lag of a group is how many records it has not read yet, and how old the oldest of them is. A Spark query with the option `groupId` shows here like any consumer.

# COMMAND ----------

with log.consumer(
    "orders", group_id="billing", auto_offset_reset="earliest", enable_auto_commit=False
) as consumer:
    read = 0
    while read < 3000:
        read += sum(map(len, consumer.poll(timeout_ms=2000, max_records=500).values()))
    consumer.commit()

group = log.describe_group("billing")
display(
    [{"group": "billing", "lag": group.lag, "oldest, in seconds": round(group.lag_seconds or 0)}]
)
shell("spark-log group describe billing")

# COMMAND ----------

# MAGIC %md
# MAGIC `producer.metrics()`, `consumer.metrics()` and `log.metrics()` count what Kafka's clients count; `metrics_port=9100`, or `--metrics-port` of a command, serves them to Prometheus.
# MAGIC
# MAGIC ## Reset
# MAGIC A group without active members can be put anywhere: to an offset, a time, the first record or the last. `--dry-run` only shows it.

# COMMAND ----------

shell("spark-log group reset billing --topic orders --shift-by -100 --dry-run")
shell("spark-log group reset billing --topic orders --to-earliest")
log.describe_group("billing").lag

# COMMAND ----------

# MAGIC %md
# MAGIC ## Retention
# MAGIC Records go when they are older than `retention.ms` or when a partition is larger than `retention.bytes`. Producers see to it in the background; `spark-log maintain` does it now, and
# MAGIC `spark-log maintain --forever` is for a machine where only short jobs write. Whole files go, the
# MAGIC oldest first, so there may be a little more than was asked for. Here are events of ten days, of which a week is kept; a tiny `segment.bytes` gives each day a file.

# COMMAND ----------

import time

DAY_MS = 86_400_000
now_ms = time.time_ns() // 1_000_000

log.create_topic(
    "events",
    partitions=1,
    config={"retention.ms": 7 * DAY_MS, "segment.bytes": 1000, "maintenance.enabled": False},
)
for days_ago in range(10, 0, -1):
    at = pa.array([now_ms - days_ago * DAY_MS + DAY_MS // 2] * 100, pa.timestamp("ms", "UTC"))
    produce("events", 100, timestamp=at)

shell("spark-log maintain events")
kept = log.describe_topic("events").partitions[0]
assert 0 < kept.start_offset <= 300, kept
days = (kept.end_offset - kept.start_offset) // 100
display([{"first offset": kept.start_offset, "end": kept.end_offset, "days kept": days}])

# COMMAND ----------

# MAGIC %md
# MAGIC A reader whose place is gone is told so, with the offsets; nothing is skipped in silence. `failOnDataLoss=false` makes it a warning.

# COMMAND ----------

reader = spark.read.format("log").option("subscribe", "events")
try:
    reader.option("startingOffsets", '{"events": {"0": 5}}').load(root).count()
except Exception as error:
    print(next(line for line in str(error).splitlines() if "events" in line))
else:
    raise AssertionError("records that are gone were read")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Compaction
# MAGIC With `cleanup.policy=compact` the last record of every key stays. Compaction works on sealed files: here 5,000 records of 100 keys become 100.

# COMMAND ----------

log.create_topic(
    "customers", partitions=1, config={"cleanup.policy": "compact", "maintenance.enabled": False}
)
produce("customers", 5000)
shell("spark-log maintain customers --seal")
spark_log.table(spark, root, "customers").count()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Verify
# MAGIC `verify` reads every byte, checks every checksum and lists all damage. It changes nothing and can run beside writers. Here a copy of the log is damaged, one byte of it.

# COMMAND ----------

import shutil
from pathlib import Path

shell("spark-log verify")

copy = workspace / "damaged-log"
shutil.copytree(root, copy)
journal = max(
    Path(copy, "topics", "orders").rglob("journal/*.log"), key=lambda path: path.stat().st_size
)
with journal.open("r+b") as file:
    file.seek(journal.stat().st_size // 2)
    byte = file.read(1)[0]
    file.seek(-1, 1)
    file.write(bytes([byte ^ 1]))

shell(f"spark-log verify --log {copy}")

# COMMAND ----------

# MAGIC %md
# MAGIC What to do: a read across the damage ends with an error, never with a gap; from an offset behind it, all can be read. Restore the file from a copy, or give up the records up to there
# MAGIC with `spark-log topic truncate`.
# MAGIC
# MAGIC ## A full disk
# MAGIC A log of its own, on a disk of 3 MB, is filled by a producer until that fails. Where a notebook may not mount such a disk, a limit on the size of files stands in for it.

# COMMAND ----------

FULL_DISK = """
import resource, sys
import broker
from broker import TopicPartition

root, limit = sys.argv[1], int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
log = broker.open(root)
log.create_topic("orders", config={
    "segment.bytes": 10_000_000 if limit else 500_000,
    "file.delete.delay.ms": 0, "maintenance.enabled": False,
})

def produce(count):
    with log.producer() as producer:
        for number in range(count):
            error = producer.send("orders", b"x" * 100_000).exception(timeout=10)
            if error is not None:
                return f"{number} records sent, then {type(error).__name__}: {error}"
    return f"{count} records sent"

print("fill it:     ", produce(100))

end = log.describe_topic("orders").partitions[0].end_offset
with log.consumer("orders", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
    count = sum(1 for _ in consumer)
print("look at it:  ", f"{count} records can be read, {len(log.verify().damage)} places damaged")

if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print("make room:    the limit is lifted")
else:
    log.delete_records({TopicPartition("orders", 0): end - 5})
    (done,) = log.maintain("orders")
    print("make room:   ", f"{end - 5} old records deleted, {len(done.removed_files)} files removed")

print("go on:       ", produce(5))
"""
(workspace / "full_disk.py").write_text(FULL_DISK)
(workspace / "disk").mkdir()

# COMMAND ----------

import subprocess
import sys


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=workspace, capture_output=True, text=True)


# The disk is seen by this process only, and goes with it.
mount = "mount -t tmpfs -o size=3m tmpfs disk"
story = f"{mount} && exec '{sys.executable}' full_disk.py disk/log 0"
told = run("unshare", "--mount", "--map-root-user", "sh", "-c", story)
if told.returncode != 0 and not told.stdout:
    told = run(sys.executable, "full_disk.py", "disk/log", "1000000")
if told.returncode != 0:
    raise RuntimeError(told.stderr)
print(told.stdout)

# COMMAND ----------

# MAGIC %md
# MAGIC What a full disk does: the `send` that did not fit fails, with `DiskFull` and the name of the file; nothing of it is there. What was acknowledged stays, and can be read.
# MAGIC A Spark query ends with the same error, and goes on from its checkpoint when there is room.
# MAGIC
# MAGIC What to do:
# MAGIC 1. Make room: something else on the disk, or old records (`spark-log topic truncate`, a smaller `retention.ms` or `retention.bytes`), then `spark-log maintain`. Files that hold nothing any more
# MAGIC    are removed after `file.delete.delay.ms`, an hour, because readers may be at them; set it to 0 if there is no time.
# MAGIC 2. Producers go on by themselves with the next `send`; start Spark queries again.
# MAGIC 3. Set `retention.bytes`, so that it does not happen again.
