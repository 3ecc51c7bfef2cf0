"""What becomes of an order: from the line that came to the totals it counts in.

Pure transformations of DataFrames, the same for a stream and for a batch. Notebook 3 tells the
story; here a line is read more strictly, because nobody is looking: Spark's `from_json` by itself
takes the first of two objects in a line and drops the second without a word.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

NAMES = ("order_id", "product", "amount", "at")
# Not floating point: totals must not depend on the order in which orders were added.
FIELDS = "order_id STRING, product STRING, amount DECIMAL(18, 2), at TIMESTAMP"
GOLD_FIELDS = "hour TIMESTAMP, product STRING, orders BIGINT, revenue DECIMAL(28, 2)"
_STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_TIME = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"


def parse(bronze: DataFrame) -> DataFrame:
    """Add `order`, and `reason`: what is wrong with the line, or null."""
    text = F.col("value").cast("string")
    # Whatever follows a complete object makes at least one of these two malformed.
    alone = F.from_json(
        F.concat(F.lit("["), text, F.lit("]")), "ARRAY<MAP<STRING, STRING>>", _STRICT
    )
    inside = F.from_json(
        F.concat(F.lit('{"order":'), text, F.lit("}")), f"order STRUCT<{FIELDS}>", _STRICT
    )
    return (
        bronze.withColumn("fields", F.when(F.size(alone) == 1, alone[0]))
        .withColumn("order", inside["order"])
        .withColumn("reason", _reason(F.map_keys("fields")))
    )


def _reason(keys: Column) -> Column:
    known = F.array(*map(F.lit, NAMES))
    unknown = F.array_except(keys, known)
    unusable = F.filter(
        F.array(*[F.when(_is_unusable(name), F.lit(name)) for name in NAMES]),
        lambda name: name.isNotNull(),
    )
    return (
        F.when(F.col("fields").isNull(), F.lit("not a JSON object"))
        .when(F.size(unknown) > 0, _say("unknown field: ", unknown))
        .when(F.size(F.array_distinct(keys)) < F.size(keys), F.lit("a field is there twice"))
        .when(F.size(unusable) > 0, _say("missing or unusable: ", unusable))
        .when(F.col("order.amount") < 0, F.lit("negative amount"))
        .when(_exact() != F.col("order.amount"), F.lit("amount has more than two decimals"))
    )


def _is_unusable(name: str) -> Column:
    is_missing = F.col("order")[name].isNull()
    # Spark takes a bare number for seconds since 1970, and a day for its midnight.
    return is_missing | ~F.col("fields")[name].rlike(_TIME) if name == "at" else is_missing


def _exact() -> Column:
    return F.col("fields")["amount"].try_cast("DECIMAL(38, 18)")


def _say(what: str, names: Column) -> Column:
    return F.concat(F.lit(what), F.array_join(names, ", "))


def valid(parsed: DataFrame, late: str) -> DataFrame:
    """Return the orders, each once; one that comes later than the watermark allows is left out."""
    return (
        parsed.filter("reason IS NULL")
        .select("order.*")
        .withWatermark("at", late)
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
    headers = F.array(*[make_header(name, text) for name, text in place.items()])
    return parsed.filter("reason IS NOT NULL").select(
        "key", "value", F.concat(headers, F.coalesce("headers", F.array())).alias("headers")
    )


def make_header(name: str, text: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), F.encode(text, "UTF-8").alias("value"))


def totals(silver: DataFrame, window: str) -> DataFrame:
    """Return orders and revenue per window of time and product."""
    order = F.from_json(F.col("value").cast("string"), FIELDS).alias("order")
    return (
        silver.select(order)
        .select("order.*")
        .groupBy(F.window("at", window).alias("hour"), "product")
        .agg(F.count("*").alias("orders"), F.sum("amount").alias("revenue"))
        .select(F.col("hour.start").alias("hour"), "product", "orders", "revenue")
    )
