# Databricks notebook source
# MAGIC %md
# MAGIC # Clickstream
# MAGIC Page views, impressions of ads and clicks on them, each in a topic: views per window of time, the sessions of visitors, and which impressions were clicked,
# MAGIC found by joining two streams. All are streaming queries; they end when they have read what is there.

# COMMAND ----------

# MAGIC %run ./setup

# COMMAND ----------

# MAGIC %md
# MAGIC ## An afternoon on a web site
# MAGIC Visitors come, look at a few pages, and go; some come back. A third of the views shows an ad; some ads are clicked.

# COMMAND ----------

import json
import random
from datetime import UTC, datetime, timedelta

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
PAGES = ["/", "/search", "/product", "/basket", "/help"]
ADS = {"lamp": 0.10, "sofa": 0.18, "desk": 0.30}


def make_visits(count: int) -> dict[str, list[dict]]:
    chance = random.Random(5)
    made = {"views": [], "impressions": [], "clicks": []}
    for visit in range(count):
        user = f"user-{chance.randrange(count // 2)}"
        # Most come around three o'clock.
        at = NOON + timedelta(minutes=min(max(chance.gauss(180, 70), 0), 350))
        for _ in range(chance.randint(1, 8)):
            made["views"].append({"user": user, "page": chance.choice(PAGES), "at": at})
            if chance.random() < 0.33:
                ad, id = chance.choice(list(ADS)), f"{visit}-{len(made['impressions'])}"
                made["impressions"].append({"id": id, "user": user, "ad": ad, "at": at})
                if chance.random() < ADS[ad]:
                    clicked = at + timedelta(seconds=chance.randint(2, 240))
                    made["clicks"].append({"id": id, "user": user, "ad": ad, "at": clicked})
            at += timedelta(seconds=chance.randint(10, 240))
    return made


visits = make_visits(400)
for topic, rows in visits.items():
    log.create_topic(topic, partitions=2)
    with log.producer() as producer:
        for row in sorted(rows, key=lambda row: row["at"]):
            value = json.dumps({name: value for name, value in row.items() if name != "at"})
            producer.send(
                topic,
                key=row["user"].encode(),
                value=value.encode(),
                timestamp_ms=int(row["at"].timestamp() * 1000),
            )

display([{"topic": topic, "records": require_records(topic)} for topic in visits])

# COMMAND ----------

# MAGIC %md
# MAGIC ## Views per window
# MAGIC The watermark says how late a record may be: a window that ended ten minutes before the latest view is closed, and its count is written, once, to the topic `views-per-window`.

# COMMAND ----------

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def stream(topic: str, schema: str) -> DataFrame:
    """Return a topic as a stream of its fields and its time, with ten minutes of patience."""
    value = F.from_json(F.col("value").cast("string"), schema).alias("value")
    return (
        spark.readStream.format("log")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load(root)
        .select(F.col("timestamp").alias("at"), value)
        .select("at", "value.*")
        .withWatermark("at", "10 minutes")
    )


def write(result: DataFrame, topic: str) -> None:
    """Write the rows of a stream to a topic, as JSON, to its present end."""
    query = (
        result.select(F.to_json(F.struct("*")).alias("value"))
        .writeStream.format("log")
        .option("topic", topic)
        .option("createTopic", "true")
        .option("checkpointLocation", str(workspace / topic))
        .trigger(availableNow=True)
        .start(root)
    )
    query.awaitTermination()


def rows(topic: str, schema: str) -> DataFrame:
    """Return what a query has written."""
    value = F.from_json(F.col("value").cast("string"), schema).alias("value")
    return spark_log.table(spark, root, topic).select(value).select("value.*")


views = stream("views", "user STRING, page STRING")
per_window = views.groupBy(F.window("at", "10 minutes"), "page").count()
write(per_window.select("window.start", "page", "count"), "views-per-window")

WINDOW = "start TIMESTAMP, page STRING, count BIGINT"
display(
    rows("views-per-window", WINDOW)
    .groupBy("page")
    .agg(F.sum("count").alias("views"), F.max("count").alias("most in ten minutes"))
    .orderBy("page")
)

# COMMAND ----------

import matplotlib.pyplot as plt

counts = (
    rows("views-per-window", WINDOW)
    .toPandas()
    .pivot_table(index="start", columns="page", values="count", aggfunc="sum", fill_value=0)
)

figure, axes = plt.subplots(figsize=(8, 3.2))
axes.stackplot(counts.index, counts.T.to_numpy(), labels=counts.columns, alpha=0.85)
axes.set_ylabel("views in ten minutes")
axes.legend(loc="upper left", frameon=False, fontsize=8)
axes.xaxis.set_major_formatter(plt.matplotlib.dates.DateFormatter("%H:%M"))
axes.spines[["top", "right"]].set_visible(False)
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Sessions
# MAGIC A session is a visitor's views with no gap of 15 minutes between them. It is written when it can no longer grow; those that are still open at the end of the stream wait for more.

# COMMAND ----------

sessions = views.groupBy(F.session_window("at", "15 minutes"), "user").agg(
    F.count("*").alias("views")
)
write(
    sessions.select(
        "user",
        F.col("session_window.start").alias("start"),
        F.col("session_window.end").alias("end"),
        "views",
    ),
    "sessions",
)

SESSION = "user STRING, start TIMESTAMP, end TIMESTAMP, views BIGINT"
closed = rows("sessions", SESSION)
length = (F.unix_timestamp("end") - F.unix_timestamp("start")) / 60 - 15
display(
    closed.groupBy("views")
    .agg(F.count("*").alias("sessions"), F.round(F.avg(length), 1).alias("minutes"))
    .orderBy("views")
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Impressions and clicks
# MAGIC Two streams are joined by the id of the impression, if the click came within five minutes. Watermarks let Spark forget impressions that can no longer be clicked.

# COMMAND ----------

impressions = stream("impressions", "id STRING, ad STRING").alias("i")
clicks = stream("clicks", "id STRING").alias("c")
is_match = F.expr("i.id = c.id AND c.at BETWEEN i.at AND i.at + INTERVAL 5 MINUTES")
clicked = impressions.join(clicks, is_match).select(
    "i.id", "i.ad", (F.unix_timestamp("c.at") - F.unix_timestamp("i.at")).alias("seconds")
)
write(clicked, "clicked")

CLICKED = "id STRING, ad STRING, seconds BIGINT"
shown = rows("impressions", "id STRING, ad STRING").groupBy("ad").agg(F.count("*").alias("shown"))
taken = (
    rows("clicked", CLICKED)
    .groupBy("ad")
    .agg(
        F.count("*").alias("clicked"),
        F.round(F.avg("seconds")).cast("int").alias("seconds until then"),
    )
)
rates = (
    shown.join(taken, "ad")
    .withColumn("rate", F.round(F.col("clicked") / F.col("shown"), 3))
    .orderBy("rate")
)
display(rates)

# COMMAND ----------

# MAGIC %md
# MAGIC Every click was joined to its impression, and no click twice:

# COMMAND ----------

joined = [row["id"] for row in rows("clicked", CLICKED).collect()]
assert sorted(joined) == sorted(click["id"] for click in visits["clicks"])
len(joined)
