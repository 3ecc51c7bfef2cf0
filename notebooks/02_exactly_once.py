# Databricks notebook source
# MAGIC %md
# MAGIC # Exactly once
# MAGIC A streaming query is killed with `SIGKILL` in the middle of a batch and started again from its checkpoint. Spark then runs that batch a second time:
# MAGIC it cannot know how much of it was written. What is in the result depends on the sink.
# MAGIC
# MAGIC Two queries read the same payments in one Spark process, and die together:
# MAGIC - one writes with `format("log")`: a batch is one commit, known by query and number;
# MAGIC - one writes with a plain producer in `foreachBatch`, as one would with any sink that is *at least once*.
# MAGIC
# MAGIC The process that is killed is a Spark of its own, started from here; this needs a machine where a notebook may start one.

# COMMAND ----------

# MAGIC %run ./setup

# COMMAND ----------

import pyarrow as pa

PAYMENTS = 12_000

for topic in ("payments", "once", "at-least-once"):
    log.create_topic(topic, partitions=2)

with log.producer() as producer:
    ids = [f"payment-{number}" for number in range(PAYMENTS)]
    producer.send_batch("payments", pa.table({"key": ids, "value": ids})).result(timeout=10)

require_records("payments")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The job
# MAGIC The first time, its batches are small and its sinks are slow, so that there is a middle of a batch to be killed in.

# COMMAND ----------

JOB = """
import sys, time
import broker, spark_log

root, checkpoints, pace = sys.argv[1:]
is_slow = pace == "slow"
spark = spark_log.session("payments", **{
    "spark.master": "local[2]", "spark.ui.enabled": "false",
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
})
payments = (spark.readStream.format("log").option("subscribe", "payments")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 2000 if is_slow else 100_000)
    .load(root).select("key", "value"))

def slowly(batches):
    for batch in batches:
        time.sleep(2 if is_slow else 0)
        yield batch

def send(batch, number):
    with broker.open(root).producer() as producer:
        for at, row in enumerate(batch.toLocalIterator()):
            producer.send("at-least-once", key=bytes(row.key), value=bytes(row.value))
            if is_slow and at % 100 == 0:
                producer.flush()
                time.sleep(0.02)

once = (payments.mapInArrow(slowly, "key binary, value binary").writeStream.format("log")
    .option("topic", "once").option("checkpointLocation", f"{checkpoints}/once")
    .trigger(availableNow=True).start(root))
while once.isActive and not once.recentProgress:
    time.sleep(0.1)
(payments.writeStream.foreachBatch(send)
    .option("checkpointLocation", f"{checkpoints}/at-least-once")
    .trigger(availableNow=True).start())
for query in spark.streams.active:
    query.awaitTermination()
"""
(workspace / "job.py").write_text(JOB)
checkpoints = workspace / "checkpoints"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Kill it
# MAGIC A batch has begun when the checkpoint has its offsets, and has ended when it has its commit. The process is killed, and Spark's JVM and workers with it,
# MAGIC when both queries are between the two and the producer has sent a part of its batch.

# COMMAND ----------

import json
import os
import signal
import subprocess
import sys
import time


def start_job(pace: str) -> subprocess.Popen:
    output = open(workspace / "job-output", "ab")
    command = [sys.executable, str(workspace / "job.py"), root, str(checkpoints), pace]
    return subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)


def running_batch(query: str) -> int | None:
    """Return the number of the batch that has begun and not ended, if there is one."""
    begun, ended = (
        {int(path.name) for path in (checkpoints / query / kind).glob("*") if path.name.isdigit()}
        for kind in ("offsets", "commits")
    )
    return max(begun - ended, default=None)


def records(topic: str) -> int:
    return log.describe_topic(topic).record_count


def offsets_before(query: str, batch: int) -> int:
    """Return how many records the batches before this one have read."""
    written = (checkpoints / query / "offsets" / str(batch - 1)).read_text()
    return sum(json.loads(written.splitlines()[-1])["payments"].values())


def is_in_the_middle() -> bool:
    """Tell whether both queries are in a batch, and the producer has sent a part of its own."""
    once, plain = running_batch("once"), running_batch("at-least-once")
    if not once or not plain:
        return False
    return records("at-least-once") - offsets_before("at-least-once", plain) > 800


def kill_in_the_middle() -> None:
    """Start the job and kill all of its processes in the middle of their batches."""
    # What the files say after the kill counts: the batch may have ended just before.
    while not is_in_the_middle():
        job = start_job("slow")
        while not is_in_the_middle():
            if job.poll() is not None:
                raise RuntimeError(f"the job ended by itself: see {workspace / 'job-output'}")
            time.sleep(0.02)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


kill_in_the_middle()
killed = [
    {
        "sink": query,
        "killed in batch": running_batch(query),
        "records there": records(query),
    }
    for query in ("once", "at-least-once")
]
display(killed)

# COMMAND ----------

# MAGIC %md
# MAGIC `once` holds whole batches only: what its tasks had staged for the batch that was cut off, nobody sees. `at-least-once` holds a part of a batch.
# MAGIC
# MAGIC ## Start it again
# MAGIC From the same checkpoints, to the end. Spark runs the batches that were cut off again, with the same records.

# COMMAND ----------

job = start_job("fast")
if job.wait() != 0:
    raise RuntimeError(f"the job failed: see {workspace / 'job-output'}")

# COMMAND ----------

from pyspark.sql import functions as F


def count(topic: str) -> dict:
    found = spark.read.format("log").option("subscribe", topic).load(root)
    row = found.agg(F.count("*").alias("all"), F.countDistinct("value").alias("distinct")).first()
    return {
        "topic": topic,
        "records": row["all"],
        "duplicates": row["all"] - row["distinct"],
        "lost": PAYMENTS - row["distinct"],
    }


counted = [count(topic) for topic in ("payments", "once", "at-least-once")]
display(counted)

# COMMAND ----------

_, once, plain = counted
assert once["duplicates"] == 0 and once["lost"] == 0, once
assert plain["duplicates"] > 0 and plain["lost"] == 0, plain

# COMMAND ----------

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 2.4))
names = [row["topic"] for row in counted]
distinct = [row["records"] - row["duplicates"] for row in counted]
axes.barh(names, distinct, color="#3b7dd8", label="payments")
axes.barh(
    names,
    [row["duplicates"] for row in counted],
    left=distinct,
    color="#d8553b",
    label="duplicates",
)
for at, row in enumerate(counted):
    axes.text(row["records"] + 80, at, f"{row['records']:,}", va="center")
axes.set_xlim(0, max(row["records"] for row in counted) * 1.12)
axes.set_xlabel("records in the topic, after one kill")
axes.invert_yaxis()
axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=2, frameon=False)
axes.spines[["top", "right"]].set_visible(False)
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## How it works
# MAGIC Each task of the sink writes its rows to a file of its own. The driver then makes one commit that names all of these files, and with them the query's id and the batch's number.
# MAGIC If the same pair comes again, the commit is recognised and adds nothing, even if the first one's fate was unknown. The same works for a batch job with a name and a number of your own:

# COMMAND ----------

rows = spark.createDataFrame([("a",), ("b",)], "value STRING")
for _ in range(3):
    (
        rows.write.format("log")
        .option("topic", "loads")
        .option("createTopic", "true")
        .option("txnAppId", "load")
        .option("txnVersion", 1)
        .mode("append")
        .save(root)
    )

records("loads")
