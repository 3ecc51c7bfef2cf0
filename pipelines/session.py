"""The Spark session of a command: quiet, and stopped in order, so that stderr is our line."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import spark_log
from pipelines.failure import JobFailed, explain

_STDERR = 2
_WHY = re.compile(r"JAVA_HOME|bin/java: |unresolved dependency|Exception")
_SETTINGS = {
    "spark.ui.enabled": "false",
    # Times without a zone must not depend on where a job runs.
    "spark.sql.session.timeZone": "UTC",
}


@contextmanager
def running(
    name: str, settings: Mapping[str, str], *, delta: bool = False
) -> Iterator[SparkSession]:
    """Give a session, made with these settings and ours.

    Raises:
        JobFailed: Spark does not start.
    """
    complete: dict[str, Any] = {**_SETTINGS, **settings}
    # What goes wrong is said in one line; Py4J would say it before, in pages.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    with explain("Spark did not start"), _apart_from_stderr():
        spark: SparkSession = spark_log.session(name, delta=delta, **complete)
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _apart_from_stderr() -> Iterator[None]:
    """Let a JVM that is started here, and its workers, write elsewhere what they have to say.

    The resolver of packages lists them all, and a worker whose query ends prints a traceback. If
    the JVM does not start, a line of it says why.
    """
    with tempfile.TemporaryFile() as output:
        kept = os.dup(_STDERR)
        os.dup2(output.fileno(), _STDERR)
        try:
            yield
        except PySparkException as error:
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            why = next(filter(_WHY.search, said), said[-1] if said else str(error))
            raise JobFailed(f"Spark did not start: {why}") from error
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)
