"""What one task reads: places in files, and how their records become rows.

A plan may be old when a task runs. Records that have moved since are found where they are now;
those that have been removed are data loss, as they are when a batch is planned. A task knows only
its own part of a batch: it says once, at its end, what of that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

import broker
from broker import FileSlice, SliceBatch
from spark_log.losses import DELETED, REMOVED, DataLoss, Loss, report
from spark_log.options import ReadOptions
from spark_log.rows import Rows


class LogTask(InputPartition):
    """Some slices of the log. It goes from the driver to an executor, so it is small."""

    def __init__(self, slices: list[FileSlice]) -> None:
        super().__init__(None)
        self.slices = tuple(slices)


def read_task(
    partition: InputPartition, options: ReadOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task."""
    if not isinstance(partition, LogTask):
        return  # Spark's stand-in for: there is nothing to read.
    lost: list[Loss] = []
    try:
        yield from Rows(schema).batches(_records(partition, options, lost))
    finally:
        report(lost, fail=False, known=set())


def _records(task: LogTask, options: ReadOptions, lost: list[Loss]) -> Iterator[SliceBatch]:
    """Yield what is there, and note what is not."""
    for piece in task.slices:
        start = piece.start
        while start < piece.end:
            # Frames are named only for the whole slice.
            rest = piece if start == piece.start else replace(piece, start=start, frames=())
            try:
                for batch in broker.read_slices(options.path, [rest], options.storage):
                    yield batch
                    start = _end(batch)
                break
            except broker.OffsetOutOfRange as error:
                loss = _loss(piece, start, min(error.start, piece.end), REMOVED)
            except broker.UnknownTopic:
                loss = _loss(piece, start, piece.end, DELETED)
            if options.fail_on_data_loss:
                raise DataLoss([loss])
            lost.append(loss)
            assert loss.end is not None and loss.end > start
            start = loss.end


def _end(batch: SliceBatch) -> int:
    if batch.offsets is None:
        return batch.base_offset + int(batch.batch.num_rows)
    return int(batch.offsets[-1]) + 1 if len(batch.offsets) else batch.base_offset


def _loss(piece: FileSlice, start: int, end: int, reason: str) -> Loss:
    return Loss(piece.topic, piece.partition, start, end, reason, piece.incarnation)
