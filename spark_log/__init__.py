"""Spark's view of the log: `format("log")` for batch and streaming, and a topic as a table."""

from spark_log.datasource import LogDataSource, register
from spark_log.maintain import maintain
from spark_log.session import session
from spark_log.table import table

__all__ = ["LogDataSource", "maintain", "register", "session", "table"]
