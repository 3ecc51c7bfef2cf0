"""Maintenance of large topics as a Spark job: executors write the files, the driver commits them.

The same as `log.maintain`, with the same result; only the writing is done on many cores. Executors
must see the log's files, as they must for any read.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

import broker
from broker import (
    MaintenanceUnit,
    Progress,
    SealedFile,
    TopicMaintenance,
    TopicReader,
    Written,
)
from spark_log.shipping import Shipped

_RESULT = pa.schema([("part", pa.int64()), ("written", pa.binary())])


def maintain(
    spark: Any,
    root: str,
    topic: str,
    *,
    seal: bool = False,
    storage: Mapping[str, str] | None = None,
) -> TopicMaintenance:
    """Do what is due for a topic, once: retention, sealing, compaction, the table, garbage.

    Args:
        spark: a session, classic or of Spark Connect.
        root: where the log is.
        seal: seal everything that is committed now, due or not.
        storage: options of the store's driver, such as credentials.

    Returns:
        What was done; `is_held` if somebody else is at it.
    """
    log = broker.open(root, create=False, storage=storage)
    (done,) = log.maintain(topic, seal=seal, write=_SparkWriter(spark, log.root, storage or {}))
    return done


class _SparkWriter:
    """Writes units of work by a Spark job of one task for each part of them."""

    def __init__(self, spark: Any, root: str, storage: Mapping[str, str]) -> None:
        self._spark = spark
        self._root = root
        self._storage = dict(storage)

    def __call__(
        self, reader: TopicReader, units: Sequence[MaintenanceUnit], progress: Progress
    ) -> Iterator[tuple[MaintenanceUnit, Written]]:
        parts = [(unit, part) for unit in units for part in broker.cut_unit(reader, unit)]
        if not parts:
            return
        count = sum(broker.count_of_unit(unit) for unit in units)
        progress.begin(f"writing {reader.topic.name} in {len(parts)} tasks", count)
        place = self._root, self._storage, reader.topic.name, reader.topic.incarnation
        written = self._run(_Task(place, [part for _, part in parts]), len(parts))
        progress.advance(count)
        for unit in units:
            own = [written[number] for number, (whole, _) in enumerate(parts) if whole is unit]
            yield unit, _together(own)

    def _run(self, task: _Task, count: int) -> dict[int, Written]:
        numbers = self._spark.range(0, count, 1, count)
        rows = numbers.mapInArrow(task, "part bigint, written binary").collect()
        return {row.part: pickle.loads(row.written) for row in rows}


def _together(parts: list[Written]) -> Written:
    """Return the files of all parts; if one could not be written, why."""
    found: list[SealedFile] = []
    for written in parts:
        if not isinstance(written, list):
            return written
        found += written
    return found


class _Task(Shipped):
    """What an executor does: write the parts whose numbers it is given."""

    def __init__(
        self, place: tuple[str, dict[str, str], str, int], parts: list[MaintenanceUnit]
    ) -> None:
        self.place = place  # Root, options of the store, topic and incarnation.
        self.parts = parts

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                written = pickle.dumps(broker.write_unit(*self.place, self.parts[number]))
                yield pa.RecordBatch.from_arrays([[number], [written]], schema=_RESULT)
