"""Places as Spark sees them: on local disk, HDFS, S3 or what else Hadoop knows."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def exists(spark: SparkSession, path: str) -> bool:
    location, system = _locate(spark, path)
    return bool(system.exists(location))


def qualified(spark: SparkSession, path: str) -> str:
    """Return a path in full, the same whatever way a person gave it."""
    location, system = _locate(spark, path)
    return str(system.makeQualified(location).toString())


def _locate(spark: SparkSession, path: str) -> tuple[Any, Any]:
    jvm, context = spark._jvm, spark._jsc
    assert jvm is not None and context is not None
    location = jvm.org.apache.hadoop.fs.Path(path)
    return location, location.getFileSystem(context.hadoopConfiguration())
