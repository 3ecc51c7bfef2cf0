# Databricks notebook source
# MAGIC %md
# MAGIC # First steps
# MAGIC A log, a topic, records in and out: from Python, from Spark as a batch and as a stream, as a table, and from the command line.
# MAGIC There is no server to start. The log is a directory.

# COMMAND ----------

# MAGIC %run ./setup

# COMMAND ----------

# MAGIC %md
# MAGIC ## A topic
# MAGIC A topic has partitions; records with the same key go to the same one, and stay in order there.

# COMMAND ----------

log.create_topic("orders", partitions=3)
log.topics()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Produce
# MAGIC `send` returns at once with a future; `result()` waits until the record is committed. A transaction is seen as a whole or not at all.

# COMMAND ----------

import json

with log.producer(compression_type="zstd") as producer:
    sent = producer.send(
        "orders", key=b"ada", value=json.dumps({"item": "lamp", "total": 12}).encode()
    )
    print(sent.result(timeout=10))

    with producer.transaction():
        for customer, item, total in [
            ("ben", "desk", 240),
            ("ada", "bulb", 3),
            ("eve", "chair", 90),
        ]:
            producer.send(
                "orders",
                key=customer.encode(),
                value=json.dumps({"item": item, "total": total}).encode(),
            )

# COMMAND ----------

# MAGIC %md
# MAGIC Many records at once go as an Arrow table, without a Python object for each.

# COMMAND ----------

import pyarrow as pa

numbers = range(1000)
table = pa.table(
    {
        "key": [f"customer-{n % 50}" for n in numbers],
        "value": [json.dumps({"item": f"item-{n % 7}", "total": n % 100}) for n in numbers],
    }
)
with log.producer() as producer:
    producer.send_batch("orders", table).result(timeout=10)

log.describe_topic("orders").record_count

# COMMAND ----------

# MAGIC %md
# MAGIC ## Consume
# MAGIC Any number of consumers read the same records, from any offset, as often as they like.

# COMMAND ----------

with log.consumer("orders", auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
    first = [next(consumer) for _ in range(4)]

for record in first:
    print(record.partition, record.offset, record.key, record.value)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Spark, batch
# MAGIC `format("log")` has the rows and the options of Spark's Kafka connector.

# COMMAND ----------

orders = spark.read.format("log").option("subscribe", "orders").load(root)
orders.printSchema()

# COMMAND ----------

from pyspark.sql import functions as F

ORDER = "item STRING, total INT"
parsed = orders.select(
    F.col("key").cast("string").alias("customer"),
    F.from_json(F.col("value").cast("string"), ORDER).alias("order"),
).select("customer", "order.*")

display(
    parsed.groupBy("item")
    .agg(F.count("*").alias("orders"), F.sum("total").alias("total"))
    .orderBy("item")
)

# COMMAND ----------

# MAGIC %md
# MAGIC In SQL, a topic is a view:

# COMMAND ----------

view = f"(path '{root}', subscribe 'orders')"
created = spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING log OPTIONS {view}")

# COMMAND ----------

# MAGIC %sql
# MAGIC SELECT partition, count(*) AS records, min(offset) AS first, max(offset) AS last
# MAGIC FROM orders
# MAGIC GROUP BY partition
# MAGIC ORDER BY partition

# COMMAND ----------

# MAGIC %md
# MAGIC ## Spark, streaming
# MAGIC A query reads `orders` and writes `large-orders`: each record once, whatever is killed or run again. With `availableNow` it stops when it has read all there is;
# MAGIC started again from the same checkpoint, it goes on from there. `groupId` lets others see how far it is.

# COMMAND ----------


def copy_large_orders() -> int:
    """Copy what is new, and return how many records the result has now."""
    source = (
        spark.readStream.format("log")
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("groupId", "large-orders")
        .load(root)
    )
    total = F.from_json(F.col("value").cast("string"), ORDER)["total"]
    query = (
        source.filter(total >= 90)
        .select("key", "value")
        .writeStream.format("log")
        .option("topic", "large-orders")
        .option("createTopic", "true")
        .option("checkpointLocation", str(workspace / "large-orders"))
        .trigger(availableNow=True)
        .start(root)
    )
    query.awaitTermination()
    return log.describe_topic("large-orders").record_count


copy_large_orders()

# COMMAND ----------

with log.producer() as producer:
    producer.send("orders", key=b"ben", value=b'{"item": "sofa", "total": 900}')

copy_large_orders()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The topic as a table
# MAGIC Old records become Parquet files by themselves; here maintenance is told to do it now. With the tail that is not sealed yet, they are one DataFrame:
# MAGIC filters and columns reach the files. The same files are a Delta table for whatever reads Delta.

# COMMAND ----------

log.maintain("orders", seal=True)

with log.producer() as producer:
    producer.send("orders", key=b"eve", value=b'{"item": "vase", "total": 35}')

whole = spark_log.table(spark, root, "orders")
delta = spark.read.format("delta").load(log.table_path("orders"))
display([{"as a table": whole.count(), "sealed, as Delta": delta.count()}])

# COMMAND ----------

# MAGIC %md
# MAGIC ## The command line
# MAGIC Everything is there as `spark-log`, too. `SPARK_LOG_ROOT` names the log.

# COMMAND ----------

shell("spark-log topic describe orders")
shell("spark-log produce orders --key-separator :", stdin='ada:{"item": "rug", "total": 70}\n')
shell("spark-log consume large-orders --max-records 2 --format json")
shell("spark-log group describe large-orders")

# COMMAND ----------

# MAGIC %md
# MAGIC The query has not run since two more orders came: that is its lag. The next notebook, `02_exactly_once`, kills it.
