"""A topic as one DataFrame: sealed history by Spark's own scan, the tail by `format("log")`.

Both parts come from one state of the topic, so they fit together without a gap or an overlap,
whatever is written and sealed meanwhile. No Delta jar is needed: the journal knows the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

import broker
from broker import InvalidOption, SealedFile, TopicSnapshot
from spark_log import schema as schemas

logger = logging.getLogger(__name__)

# What Hadoop says where it has no driver for a store, as Spark has none for S3 unless it is added.
_NO_FILE_SYSTEM = ("No FileSystem for scheme", "S3AFileSystem not found")
# Spark takes these for patterns of names, unless told not to.
_GLOB = frozenset("*?[]{}\\")
# The last millisecond of Spark's timestamps, which count microseconds.
_TIME_MS_MAX = ((1 << 63) - 1) // 1000


def table(
    spark: Any,
    root: str,
    topic: str,
    *,
    headers: bool = False,
    starting_timestamp: int | None = None,
    ending_timestamp: int | None = None,
    storage: Mapping[str, str] | None = None,
) -> Any:
    """Return a topic's records, to the last commit, with the columns of Spark's Kafka connector.

    Filters and the choice of columns reach the Parquet files: a filter on `timestamp`, `offset` or
    `partition` reads just the parts of files that may hold such records. The DataFrame stays what
    it is for as long as files that were replaced are kept, `table.delete.delay.ms` (7 days). After
    that Spark may say that a file does not exist: make the frame again.

    Args:
        spark: a session, classic or of Spark Connect.
        root: where the log is.
        headers: with the column `headers`.
        starting_timestamp: only records of this time or later, in milliseconds since 1970; files
            without any are not even opened.
        ending_timestamp: only records before this time.
        storage: options of the store's driver; Spark's own scan is told by Hadoop's settings.
            Where Hadoop has no driver for the store, `format("log")` reads the history too.
    """
    _check_times(starting_timestamp, ending_timestamp)
    snapshot = broker.open(root, create=False, storage=storage).snapshot(topic)
    schema = schemas.row_schema(include_headers=headers)
    low = None if starting_timestamp is None else starting_timestamp * 1000
    high = None if ending_timestamp is None else ending_timestamp * 1000
    files = [file for file in snapshot.files if _may_hold(file, low, high)]
    starts = {one.partition: one.sealed_end for one in snapshot.partitions}
    parts = []
    if files:
        try:
            history = _history(spark, snapshot, files, schema)
            history.schema  # noqa: B018 - over Spark Connect nothing was looked at before
            parts.append(history)
        except Exception as error:
            # Of Py4J or of Spark Connect: they have no class in common.
            reason = next((sign for sign in _NO_FILE_SYSTEM if sign in str(error)), None)
            if reason is None:
                raise
            logger.warning(
                "Spark cannot read %s by itself (%s); format('log') reads all of topic %r",
                snapshot.location,
                reason,
                topic,
            )
            starts = {one.partition: one.start for one in snapshot.partitions}
    if not parts or any(starts[one.partition] < one.end for one in snapshot.partitions):
        parts.append(_read(spark, root, snapshot, starts, headers=headers, storage=storage))
    frame = reduce(lambda one, other: one.unionAll(other), parts)
    if starting_timestamp is not None:
        frame = frame.filter(F.col("timestamp") >= F.timestamp_millis(F.lit(starting_timestamp)))
    if ending_timestamp is not None:
        frame = frame.filter(F.col("timestamp") < F.timestamp_millis(F.lit(ending_timestamp)))
    return frame


def _check_times(starting: int | None, ending: int | None) -> None:
    for name, value in (("starting_timestamp", starting), ("ending_timestamp", ending)):
        if value is not None and (type(value) is not int or not 0 <= value <= _TIME_MS_MAX):
            raise InvalidOption(
                f"{name}={value!r}: use whole milliseconds since 1970, at most {_TIME_MS_MAX}"
            )


def _may_hold(file: SealedFile, low: int | None, high: int | None) -> bool:
    """Tell whether a file has a record of [low, high), in microseconds, as far as is known."""
    return (
        file.record_count > 0
        and (low is None or file.max_timestamp >= low)
        and (high is None or file.min_timestamp < high)
    )


def _history(
    spark: Any, snapshot: TopicSnapshot, files: Sequence[SealedFile], schema: StructType
) -> Any:
    stored = StructType([field for field in schema.fields if field.name != "topic"])
    reader = (
        spark.read.schema(_nullable(stored))
        .option("basePath", snapshot.location)
        # A file that is gone or damaged is an error, whatever the session says.
        .option("ignoreMissingFiles", "false")
        .option("ignoreCorruptFiles", "false")
    )
    if _GLOB.intersection(snapshot.location):
        reader = reader.option("__globPaths__", "false")
    frame = reader.parquet(*(snapshot.path(file) for file in files))
    for one in snapshot.partitions:
        # Records below the log start stay in a file until it is written anew.
        if any(file.partition == one.partition and file.start < one.start for file in files):
            is_kept = (F.col("partition") != one.partition) | (F.col("offset") >= one.start)
            frame = frame.filter(is_kept)
    columns = [
        F.lit(snapshot.topic).alias("topic") if name == "topic" else F.col(name)
        for name in schema.names
    ]
    return frame.select(*columns)


def _read(
    spark: Any,
    root: str,
    snapshot: TopicSnapshot,
    starts: Mapping[int, int],
    *,
    headers: bool,
    storage: Mapping[str, str] | None,
) -> Any:
    """Return the records from `starts` on, by the log's own source."""
    ends = {one.partition: one.end for one in snapshot.partitions}
    # If there are none, an empty range of some partition stands for: nothing.
    chosen = [one for one in ends if starts[one] < ends[one]] or [snapshot.partitions[0].partition]
    first = {str(one): min(starts[one], ends[one]) for one in chosen}
    last = {str(one): ends[one] for one in chosen}
    return (
        spark.read.format("log")
        .option("assign", json.dumps({snapshot.topic: chosen}))
        .option("startingOffsets", json.dumps({snapshot.topic: first}))
        .option("endingOffsets", json.dumps({snapshot.topic: last}))
        .option("includeHeaders", str(headers).lower())
        .options(**{f"storage.{name}": value for name, value in (storage or {}).items()})
        .load(root)
    )


def _nullable(schema: StructType) -> StructType:
    return StructType([StructField(field.name, field.dataType) for field in schema.fields])
