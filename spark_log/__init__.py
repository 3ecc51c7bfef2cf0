"""Spark's view of the log: `format("log")` for batch and streaming, reads and writes."""

from spark_log.datasource import LogDataSource, register
from spark_log.session import session

__all__ = ["LogDataSource", "register", "session"]
