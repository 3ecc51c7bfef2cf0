"""Spark's view of the log: `format("log")` for batch and streaming reads."""

from spark_log.datasource import LogDataSource, register

__all__ = ["LogDataSource", "register"]
