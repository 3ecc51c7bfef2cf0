"""A Spark session that is ready for `format("log")`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from broker import InvalidOption
from spark_log.datasource import register

DELTA_JAR = "io.delta:delta-spark_4.2_2.13:4.4.0"

_REMOTE = "spark.remote"
_PYTHON = "spark.pyspark.python"
_JARS = "spark.jars.packages"
_EXTENSIONS = "spark.sql.extensions"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_QUIET = Path(__file__).with_name("log4j2.properties")
# What starts with a session and cannot be changed later; a setting of the user goes before each.
_DEFAULTS = {
    # Tens of milliseconds less for each micro-batch than by TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    # Spark refuses a checkpoint for ever that was left by a driver killed while it wrote the file
    # of its first batch.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
}
_DELTA = {
    _JARS: DELTA_JAR,
    _EXTENSIONS: "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def session(name: str, delta: bool = False, **conf: object) -> Any:
    """Return a session that knows `format("log")`: the one that is running, or a new one.

    It runs locally, on all cores, unless Spark is configured otherwise. A setting with dots in its
    name is given like this: `session("my-job", **{"spark.master": "local[4]"})`.

    Args:
        name: what the session is called in Spark's web pages and logs.
        delta: also load Delta Lake, whose jar is fetched the first time; refused if a session
            without it is running.
        conf: settings of Spark; `spark.remote` connects to a Spark Connect server.
    """
    given = {key: _text(key, value) for key, value in conf.items()}
    remote = given.get(_REMOTE, os.environ.get("SPARK_REMOTE"))
    builder = SparkSession.builder.appName(name)
    if remote is None or remote.startswith("local"):
        given = _complete(given, delta=delta)
    elif delta:
        raise InvalidOption(f"delta=True: the server {remote} decides whether it has Delta")
    for key, value in given.items():
        builder = builder.config(key, value)
    running = SparkSession.getActiveSession()
    if delta and running is not None:
        _check_delta(running)  # Before settings of Delta reach a session that cannot have it.
    spark = builder.getOrCreate()
    if delta:
        _check_delta(spark)
    register(spark)
    return spark


def _check_delta(spark: SparkSession) -> None:
    if _DELTA[_EXTENSIONS] not in (spark.conf.get(_EXTENSIONS, None) or ""):
        raise InvalidOption(
            "delta=True: a session without Delta Lake is running in this process, and cannot get "
            "it any more. Stop that one first, with its stop(), or make it with delta=True"
        )


def _complete(given: dict[str, str], *, delta: bool) -> dict[str, str]:
    """Add what was not given, for a Spark that is started by this process."""
    python = given.get(_PYTHON) or os.environ.get("PYSPARK_PYTHON") or sys.executable
    # Some of Spark's parts read the one, some the other; without them workers use another Python.
    os.environ["PYSPARK_PYTHON"] = python
    complete = {**_DEFAULTS, **given, _PYTHON: python}
    if "SPARK_CONF_DIR" not in os.environ:
        # Spark's own way to be quieter takes effect only after its first pages of warnings.
        # Before what the user gave, which wins where both say something.
        quiet = f'-Dlog4j2.configurationFile="{_QUIET}"'
        complete[_JAVA_OPTIONS] = f"{quiet} {given.get(_JAVA_OPTIONS, '')}".strip()
    if delta:
        for key, value in _DELTA.items():
            if key in (_JARS, _EXTENSIONS) and key in given and value not in given[key]:
                complete[key] = f"{given[key]},{value}"
            else:
                complete.setdefault(key, value)
    return complete


def _text(key: str, value: object) -> str:
    if not key.startswith("spark."):
        raise InvalidOption(
            f"unknown setting {key!r}: settings of Spark begin with 'spark.', for example "
            f"session(name, **{{'spark.sql.shuffle.partitions': 4}})"
        )
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
