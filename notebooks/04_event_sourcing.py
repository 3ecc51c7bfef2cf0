# Databricks notebook source
# MAGIC %md
# MAGIC # Event sourcing
# MAGIC Accounts are not stored; what happened to them is. A balance is what a replay of the events gives: now, or at any time that has passed.
# MAGIC A second topic holds the last balance of each account; compaction keeps it small, whatever the number of events.

# COMMAND ----------

# MAGIC %run ./setup

# COMMAND ----------

# MAGIC %md
# MAGIC ## Events
# MAGIC The key of an event is its account, so that the events of an account are in order. Events carry the time at which they happened.

# COMMAND ----------

import json
import random
from datetime import UTC, datetime, timedelta

START = datetime(2026, 3, 1, tzinfo=UTC)
ACCOUNTS = [f"account-{number:02}" for number in range(20)]


def make_events(count: int) -> list[dict]:
    chance = random.Random(4)
    balance = dict.fromkeys(ACCOUNTS, 0)
    events = []
    for number in range(count):
        account = chance.choice(ACCOUNTS)
        amount = chance.randint(1, 200)
        is_in = balance[account] < amount or chance.random() < 0.55
        balance[account] += amount if is_in else -amount
        at = START + timedelta(minutes=10 * number)
        events.append(
            {
                "account": account,
                "kind": "paid in" if is_in else "paid out",
                "amount": amount,
                "at": at,
            }
        )
    return events


events = make_events(3000)

log.create_topic("account-events", partitions=2, config={"retention.ms": -1})
with log.producer() as producer:
    for event in events:
        producer.send(
            "account-events",
            key=event["account"].encode(),
            value=json.dumps({"kind": event["kind"], "amount": event["amount"]}).encode(),
            timestamp_ms=int(event["at"].timestamp() * 1000),
        )

require_records("account-events")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Balances now
# MAGIC A replay is a query over the topic as a table.

# COMMAND ----------

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def signed(events: DataFrame) -> DataFrame:
    """Return account, time and amount of each event; money that left is negative."""
    event = F.from_json(F.col("value").cast("string"), "kind STRING, amount INT")
    amount = F.when(event["kind"] == "paid in", event["amount"]).otherwise(-event["amount"])
    account = F.col("key").cast("string").alias("account")
    return events.select(account, "offset", "timestamp", amount.alias("amount"))


def balances(events: DataFrame) -> DataFrame:
    return (
        signed(events)
        .groupBy("account")
        .agg(F.sum("amount").alias("balance"), F.count("*").alias("events"))
    )


everything = spark_log.table(spark, root, "account-events")
display(balances(everything).orderBy("account").limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Balances at a time
# MAGIC `ending_timestamp` ends the replay; files that hold only later events are not opened. What was true on 10 March stays true, whatever happens later.

# COMMAND ----------

tenth_of_march = datetime(2026, 3, 10, tzinfo=UTC)
before = spark_log.table(
    spark, root, "account-events", ending_timestamp=int(tenth_of_march.timestamp() * 1000)
)
display(balances(before).orderBy("account").limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC The same in plain Python, for one account: the events of a key are in one partition, in order.

# COMMAND ----------


def replay(account: str, until: datetime) -> int:
    balance = 0
    with log.consumer(
        "account-events", auto_offset_reset="earliest", consumer_timeout_ms=0
    ) as consumer:
        for record in consumer:
            if record.key == account.encode() and record.timestamp < until.timestamp() * 1000:
                event = json.loads(record.value)
                balance += event["amount"] if event["kind"] == "paid in" else -event["amount"]
    return balance


by_spark = {row["account"]: row["balance"] for row in balances(before).collect()}
assert replay("account-03", tenth_of_march) == by_spark["account-03"]
by_spark["account-03"]

# COMMAND ----------

# MAGIC %md
# MAGIC ## The course of a balance
# MAGIC Every balance that ever was is there to be asked for.

# COMMAND ----------

import matplotlib.pyplot as plt
from pyspark.sql import Window

order = Window.partitionBy("account").orderBy("offset")
course = signed(everything).withColumn("balance", F.sum("amount").over(order))
chosen = ["account-03", "account-07", "account-11"]
found = course.filter(F.col("account").isin(chosen)).orderBy("timestamp").toPandas()

figure, axes = plt.subplots(figsize=(8, 3))
for account, own in found.groupby("account"):
    axes.step(own["timestamp"], own["balance"], where="post", label=account)
axes.axvline(tenth_of_march.replace(tzinfo=None), color="#888", linestyle=":", linewidth=1)
axes.set_ylabel("balance")
axes.tick_params(axis="x", labelrotation=20)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A compacted topic
# MAGIC A stream keeps `balances` up to date: each time an account changes, its new balance is sent with the account as key. Only the last record of a key counts, so the topic is compacted:
# MAGIC maintenance removes what a later record has replaced. The query's result is a total, so a batch that is run again sends the same balance; with `txnAppId` and `txnVersion` it is not even there twice.

# COMMAND ----------

log.create_topic(
    "balances", partitions=2, config={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.1}
)


def send_balances(batch: DataFrame, number: int) -> None:
    (
        batch.select(F.col("account").alias("key"), F.col("balance").cast("string").alias("value"))
        .write.format("log")
        .option("topic", "balances")
        .option("txnAppId", "balances")
        .option("txnVersion", number)
        .mode("append")
        .save(root)
    )


def update_balances() -> None:
    stream = (
        spark.readStream.format("log")
        .option("subscribe", "account-events")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 1000)
        .load(root)
    )
    query = (
        balances(stream)
        .writeStream.outputMode("update")
        .foreachBatch(send_balances)
        .option("checkpointLocation", str(workspace / "balances"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


update_balances()
require_records("balances")

# COMMAND ----------

(done,) = log.maintain("balances", seal=True)
left = spark_log.table(spark, root, "balances").count()
display([{"removed by compaction": done.compacted_records, "records left": left}])

# COMMAND ----------

# MAGIC %md
# MAGIC One record is left for each account, and it is the same as the replay of all events says. An account that is closed is removed by a tombstone, a record without a value;
# MAGIC compaction removes the tombstone too, after `delete.retention.ms`.

# COMMAND ----------


def last_balances() -> dict[str, int]:
    """Return the last value of each key: what a compacted topic means, compacted or not."""
    last = {}
    with log.consumer("balances", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        for record in consumer:
            last[record.key.decode()] = record.value
    return {account: int(value) for account, value in last.items() if value is not None}


by_replay = {row["account"]: row["balance"] for row in balances(everything).collect()}
assert last_balances() == by_replay

with log.producer() as producer:
    producer.send("balances", key=b"account-00", value=None)

display([{"accounts by replay": len(by_replay), "after one was closed": len(last_balances())}])
