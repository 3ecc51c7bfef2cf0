# Databricks notebook source
# MAGIC %md
# MAGIC # ETL: bronze, silver, gold
# MAGIC Orders arrive as JSON lines in files, some of them twice, some late, some broken.
# MAGIC - **bronze** is the topic `orders`: every line as it came, each file loaded once;
# MAGIC - **silver** is the topic `orders-silver`: parsed, checked, without duplicates, nothing later than the watermark allows. Lines that cannot be used go to `orders-dead-letter`, with the reason and the place they came from;
# MAGIC - **gold** is a Delta table: orders and revenue per hour and product, kept up to date with `MERGE`.
# MAGIC
# MAGIC Every step is incremental: it takes what is new, and ends. Every step can be killed at any point and run again, and the result is the same.

# COMMAND ----------

# MAGIC %run ./setup

# COMMAND ----------

dbutils.widgets.text("orders", "", "A directory of JSON lines; empty: made-up orders")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The input
# MAGIC Three drops of a few hours each. Of a hundred lines about three come a second time, two are hours late, and two are broken in some way.

# COMMAND ----------

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

MORNING = datetime(2026, 4, 1, 6, tzinfo=UTC)
PRODUCTS = {"lamp": 20, "desk": 240, "chair": 90}
BROKEN = [
    '{"order_id": "o-17", "product": "lamp", "amo',
    "not JSON at all",
    '{"order_id": "x-1", "product": "desk", "amount": "many", "at": "2026-04-01T09:00:00Z"}',
    '{"order_id": "x-2", "product": "desk", "at": "2026-04-01T09:00:00Z"}',
    '{"order_id": "x-3", "product": "lamp", "amount": -5, "at": "2026-04-01T09:00:00Z"}',
    '{"order_id": "x-4", "product": "lamp", "amount": 20, "at": "yesterday"}',
    # A field that is new: the schema has changed, and somebody has to decide what it means.
    '{"order_id": "x-5", "product": "sofa", "amount": 900, "at": "2026-04-01T09:00:00Z", "currency": "EUR"}',
]


def make_drop(number: int, count: int = 600) -> list[str]:
    """Return the lines of a drop: about four hours of orders, in the order of time."""
    chance = random.Random(number)
    lines: list[str] = []
    for at in range(count):
        time = MORNING + timedelta(hours=4 * number, seconds=at * 4 * 3600 / count)
        if number > 0 and chance.random() < 0.02:
            time -= timedelta(hours=chance.choice([1, 6]))
        product = chance.choice(list(PRODUCTS))
        amount = PRODUCTS[product] * chance.randint(1, 3)
        order = {"order_id": f"o-{number}-{at}", "product": product, "amount": amount}
        lines.append(json.dumps({**order, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ")}))
        if chance.random() < 0.03:
            lines.append(lines[-1])
        if chance.random() < 0.02:
            lines.append(chance.choice(BROKEN))
    return lines


drops = Path(dbutils.widgets.get("orders") or workspace / "drops")
if not dbutils.widgets.get("orders"):
    drops.mkdir(exist_ok=True)
    for number in range(3):
        (drops / f"drop-{number}.json").write_text("\n".join(make_drop(number)) + "\n")

files = sorted(drops.glob("*.json"))
if not files:
    raise FileNotFoundError(f"there are no *.json files in {drops}: nothing to load")
display([{"file": path.name, "lines": len(path.read_text().splitlines())} for path in files])

# COMMAND ----------

# MAGIC %md
# MAGIC ## Bronze
# MAGIC A file is loaded by one commit under its own name: to load it again adds nothing. The lines stay as they are, with the name of their file as a header: what is dropped here can never be looked at again.

# COMMAND ----------

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

BRONZE, SILVER, DEAD_LETTER = "orders", "orders-silver", "orders-dead-letter"


def load_bronze(spark: SparkSession, root: str, path: Path) -> None:
    """Append the lines of a file to the bronze topic, unless they are there already."""
    lines = spark.read.text(str(path)).filter(F.trim("value") != "")
    source = F.struct(
        F.lit("file").alias("key"), F.encode(F.lit(path.name), "UTF-8").alias("value")
    )
    (
        lines.withColumn("headers", F.array(source))
        .write.format("log")
        .option("topic", BRONZE)
        .option("createTopic", "true")
        .option("numPartitions", 2)
        .option("txnAppId", f"load {path.name}")
        .option("txnVersion", 1)
        .mode("append")
        .save(root)
    )


# COMMAND ----------

# MAGIC %md
# MAGIC ## Silver
# MAGIC `parse` says what is wrong with a line, if anything; `valid` and `rejected` are its two sides. A line with a field that nobody knows is rejected too: it can be sent again when the schema knows the field, but what was
# MAGIC dropped without a word cannot.

# COMMAND ----------

FIELDS = "order_id STRING, product STRING, amount DOUBLE, at TIMESTAMP"
NAMES = ["order_id", "product", "amount", "at"]
LATE = "2 hours"


def read_stream(spark: SparkSession, root: str, topic: str) -> DataFrame:
    return (
        spark.readStream.format("log")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .load(root)
    )


def parse(bronze: DataFrame) -> DataFrame:
    """Add `order`, and `reason`: what is wrong with it, or null."""
    text = F.col("value").cast("string")
    fields = F.from_json(text, "MAP<STRING, STRING>")
    order = F.from_json(text, FIELDS)
    unknown = F.array_except(F.map_keys("fields"), F.array(*map(F.lit, NAMES)))
    unusable = F.filter(
        F.array(*[F.when(F.col("order")[name].isNull(), F.lit(name)) for name in NAMES]),
        lambda name: name.isNotNull(),
    )
    reason = (
        F.when(F.col("fields").isNull(), F.lit("not a JSON object"))
        .when(
            F.size("unknown") > 0, F.concat(F.lit("unknown field "), F.array_join("unknown", ", "))
        )
        .when(
            F.size("unusable") > 0,
            F.concat(F.lit("missing or unusable: "), F.array_join("unusable", ", ")),
        )
        .when(F.col("order.amount") < 0, F.lit("negative amount"))
    )
    return (
        bronze.withColumn("fields", fields)
        .withColumn("order", order)
        .withColumn("unknown", unknown)
        .withColumn("unusable", unusable)
        .withColumn("reason", reason)
    )


def valid(parsed: DataFrame) -> DataFrame:
    """Return the orders, each once; one that comes later than the watermark allows is left out."""
    return (
        parsed.filter("reason IS NULL")
        .select("order.*")
        .withWatermark("at", LATE)
        .dropDuplicatesWithinWatermark(["order_id"])
        .select(F.col("product").alias("key"), F.to_json(F.struct(*NAMES)).alias("value"))
    )


def rejected(parsed: DataFrame) -> DataFrame:
    """Return the lines that cannot be used as they came, with the reason and the place."""
    place = {
        "reason": F.col("reason"),
        "topic": F.col("topic"),
        "partition": F.col("partition").cast("string"),
        "offset": F.col("offset").cast("string"),
    }
    headers = [
        F.struct(F.lit(name).alias("key"), F.encode(text, "UTF-8").alias("value"))
        for name, text in place.items()
    ]
    return parsed.filter("reason IS NOT NULL").select(
        "value", F.concat(F.array(*headers), F.coalesce("headers", F.array())).alias("headers")
    )


# COMMAND ----------

# MAGIC %md
# MAGIC ## Gold
# MAGIC The aggregate is a streaming one: its state holds the totals of the hours that may still change. What a batch changed is merged into the table as new totals, not added to the old ones:
# MAGIC if the batch is run again, it writes the same.

# COMMAND ----------


def aggregate(silver: DataFrame) -> DataFrame:
    """Return orders and revenue per hour and product."""
    order = F.from_json(F.col("value").cast("string"), FIELDS).alias("order")
    return (
        silver.select(order)
        .select("order.*")
        .withWatermark("at", LATE)
        .groupBy(F.window("at", "1 hour").alias("hour"), "product")
        .agg(F.count("*").alias("orders"), F.sum("amount").alias("revenue"))
        .select(F.col("hour.start").alias("hour"), "product", "orders", "revenue")
    )


GOLD_COLUMNS = "hour TIMESTAMP, product STRING, orders BIGINT, revenue DOUBLE"


def merge_gold(batch: DataFrame, gold: str) -> None:
    """Replace the totals that a batch has changed."""
    spark = batch.sparkSession
    spark.sql(f"CREATE TABLE IF NOT EXISTS delta.`{gold}` ({GOLD_COLUMNS}) USING delta")
    batch.createOrReplaceTempView("changed")
    spark.sql(f"""
        MERGE INTO delta.`{gold}` AS gold USING changed
        ON gold.hour = changed.hour AND gold.product = changed.product
        WHEN MATCHED THEN UPDATE SET *
        WHEN NOT MATCHED THEN INSERT *
    """)


# COMMAND ----------

# MAGIC %md
# MAGIC ## The pipeline
# MAGIC Three queries, each with a checkpoint of its own, run to the present end of what they read.

# COMMAND ----------

gold = str(workspace / "gold")


def to_topic(result: DataFrame, topic: str) -> dict:
    return finish(
        result.writeStream.format("log")
        .option("topic", topic)
        .option("createTopic", "true")
        .option("checkpointLocation", str(workspace / "checkpoints" / topic))
        .trigger(availableNow=True)
        .start(root)
    )


def to_gold(result: DataFrame, after_merge=lambda: None) -> dict:
    def write(batch: DataFrame, number: int) -> None:
        merge_gold(batch, gold)
        after_merge()

    return finish(
        result.writeStream.outputMode("update")
        .foreachBatch(write)
        .option("checkpointLocation", str(workspace / "checkpoints" / "gold"))
        .trigger(availableNow=True)
        .start()
    )


def finish(query) -> dict:
    """Wait for a query; return how many rows it read, and how many were too late."""
    query.awaitTermination()
    late = sum(
        operator["numRowsDroppedByWatermark"]
        for one in query.recentProgress
        for operator in one["stateOperators"]
    )
    return {"read": sum(one["numInputRows"] for one in query.recentProgress), "too late": late}


def run_pipeline(path: Path) -> dict:
    """Take a file through all steps; whatever was done before is not done again."""
    load_bronze(spark, root, path)
    parsed = parse(read_stream(spark, root, BRONZE))
    silver = to_topic(valid(parsed), SILVER)
    to_topic(rejected(parsed), DEAD_LETTER)
    merged = to_gold(aggregate(read_stream(spark, root, SILVER)))
    return {
        "file": path.name,
        "new lines": silver["read"],
        "too late": silver["too late"],
        "new orders in gold": merged["read"],
    }


first, rest = files[0], files[1:] or files
display([run_pipeline(first)])

# COMMAND ----------

# MAGIC %md
# MAGIC ## Stopped half-way
# MAGIC The second file: the step to gold fails after its `MERGE`, before Spark has noted that the batch is done. That is the worst moment: the table is changed, and the batch will be run again.

# COMMAND ----------

load_bronze(spark, root, rest[0])
parsed = parse(read_stream(spark, root, BRONZE))
display([to_topic(valid(parsed), SILVER)])


def fail() -> None:
    raise RuntimeError("the machine is gone")


try:
    to_gold(aggregate(read_stream(spark, root, SILVER)), after_merge=fail)
except Exception as error:
    print(f"gold stopped: {type(error).__name__}")
else:
    print("gold had nothing to do")

# COMMAND ----------

# MAGIC %md
# MAGIC Then the same again, from the beginning, and the rest. The file is recognised, silver has nothing to do, the rejected lines and gold are made up for.
# MAGIC A step that has nothing new to read does nothing, so all of it can be run as often as one likes.

# COMMAND ----------

display([run_pipeline(path) for path in rest])

# COMMAND ----------

# MAGIC %md
# MAGIC ## What came out

# COMMAND ----------

require_records(SILVER)
topics = [log.describe_topic(topic) for topic in (BRONZE, SILVER, DEAD_LETTER)]
display([{"topic": topic.name, "records": topic.record_count} for topic in topics])

# COMMAND ----------

headers = F.map_from_entries("headers")
dead = (
    spark.read.format("log")
    .option("subscribe", DEAD_LETTER)
    .option("includeHeaders", "true")
    .load(root)
)
columns = [
    headers[name].cast("string").alias(name) for name in ("reason", "file", "partition", "offset")
]
display(
    dead.select(*columns, F.col("value").cast("string").alias("line"))
    .dropDuplicates(["reason"])
    .orderBy("reason")
)

# COMMAND ----------

# MAGIC %md
# MAGIC Gold is what one batch over silver computes, in spite of the failure:

# COMMAND ----------

at_once = aggregate(spark.read.format("log").option("subscribe", SILVER).load(root))
in_steps = spark.read.format("delta").load(gold)
assert sorted(in_steps.collect()) == sorted(at_once.collect())
display(
    in_steps.groupBy("product")
    .agg(F.sum("orders").alias("orders"), F.sum("revenue").alias("revenue"))
    .orderBy("product")
)

# COMMAND ----------

# MAGIC %md
# MAGIC And nothing is missing: every line of bronze is an order in silver, a duplicate, too late, or a dead letter.

# COMMAND ----------

bronze = parse(spark.read.format("log").option("subscribe", BRONZE).load(root))
good = bronze.filter("reason IS NULL").select("order.*")
silver_ids = (
    spark.read.format("log")
    .option("subscribe", SILVER)
    .load(root)
    .select(F.from_json(F.col("value").cast("string"), FIELDS)["order_id"].alias("order_id"))
)
late = good.join(silver_ids, "order_id", "left_anti").select("order_id").distinct().count()
assert silver_ids.count() == silver_ids.distinct().count()
assert good.select("order_id").distinct().count() == silver_ids.count() + late
assert bronze.filter("reason IS NOT NULL").count() == dead.count()
display(
    [{"orders": silver_ids.count(), "left out as too late": late, "dead letters": dead.count()}]
)

# COMMAND ----------

import matplotlib.dates
import matplotlib.pyplot as plt

revenue = in_steps.toPandas().pivot_table(
    index="hour", columns="product", values="revenue", aggfunc="sum", fill_value=0
)

figure, axes = plt.subplots(figsize=(8, 3.2))
bottom = 0
for product in revenue.columns:
    axes.bar(revenue.index, revenue[product], bottom=bottom, width=1 / 30, label=product)
    bottom = bottom + revenue[product]
axes.set_ylabel("revenue per hour")
axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M"))
axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
axes.spines[["top", "right"]].set_visible(False)
display(figure)
