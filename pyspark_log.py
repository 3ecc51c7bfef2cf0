"""Lets Spark find `format("log")` by its name, with nothing registered.

Spark looks through the top-level modules named `pyspark_...` for a class `DefaultSource`.
"""

from spark_log.datasource import LogDataSource as DefaultSource

__all__ = ["DefaultSource"]
