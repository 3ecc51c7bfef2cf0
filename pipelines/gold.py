"""The gold table: totals in a Delta table, to which each batch is added once.

A batch is added by one `MERGE`, which is one commit of the table; with it Delta records the query's
id and the batch's number, and passes over a pair that it has. So a batch that is run again after
whatever failure changes nothing. Added up, not computed from a state: an order that has reached
silver is never too late for gold.

The table belongs to one query. With another checkpoint the same orders would be added a second
time, without the table only those that are new: both are refused.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from broker import LogError
from pipelines.orders import GOLD_FIELDS, totals
from pipelines.paths import exists

_QUERY = "sparkLog.etl.query"
_WINDOW = "sparkLog.etl.window"


class GoldMismatch(LogError):
    """The table and the checkpoint do not belong together."""


class GoldTable:
    """Adds batches of silver records to the table at `path`."""

    def __init__(self, path: str, *, window: str) -> None:
        self._name = f"delta.`{path.replace('`', '``')}`"
        self._path = path
        self._window = window

    def add(self, batch: DataFrame, number: int) -> None:
        """Add a batch of silver; called by Spark for each."""
        spark = batch.sparkSession
        query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query_id is not None
        self._ensure(spark, query_id, number)
        spark.conf.set("spark.databricks.delta.write.txnAppId", query_id)
        spark.conf.set("spark.databricks.delta.write.txnVersion", str(number))
        totals(batch, self._window).createOrReplaceTempView("changed")
        spark.sql(f"""
            MERGE INTO {self._name} AS gold USING changed
            ON gold.hour = changed.hour AND gold.product = changed.product
            WHEN MATCHED THEN UPDATE SET
                orders = gold.orders + changed.orders, revenue = gold.revenue + changed.revenue
            WHEN NOT MATCHED THEN INSERT *
        """)

    def _ensure(self, spark: SparkSession, query_id: str, number: int) -> None:
        """Make the table with the first batch; after that, hold it to be the same one."""
        wanted = {_QUERY: query_id, _WINDOW: self._window}
        if number == 0:
            properties = ", ".join(f"'{name}' = '{value}'" for name, value in wanted.items())
            spark.sql(
                f"CREATE TABLE IF NOT EXISTS {self._name} ({GOLD_FIELDS}) USING delta "
                f"TBLPROPERTIES ({properties})"
            )
        elif not exists(spark, f"{self._path}/_delta_log"):
            raise GoldMismatch(
                f"the gold table {self._path} is gone, and the checkpoint is at batch {number}: "
                "remove the checkpoint of gold, and all totals are computed anew"
            )
        rows = spark.sql(f"SHOW TBLPROPERTIES {self._name}").collect()
        found = {row["key"]: row["value"] for row in rows}
        if found.get(_QUERY) != query_id:
            raise GoldMismatch(
                f"the gold table {self._path} was made with another checkpoint, and orders would "
                "be counted twice: use that checkpoint, or remove the table, and all totals are "
                "computed anew"
            )
        if found.get(_WINDOW) != self._window:
            raise GoldMismatch(
                f"the gold table {self._path} has windows of {found.get(_WINDOW)}, not of "
                f"{self._window}: set it back, or use another table and another checkpoint"
            )
