"""What a task does: gather rows into large batches, split them by topic, and stage them.

Spark hands over 10,000 rows at a time. Each call of `stage.write` makes at least one frame for each
partition, and large frames are what readers are fast with, so rows are gathered first. Nothing that
is staged can be seen before the driver commits it; what a killed task leaves is garbage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import broker
from spark_log.options import warn_once
from spark_log.write_columns import PARTITION, TOPIC, WriteColumns
from spark_log.write_options import WriteOptions

# Rows are kept in memory up to this many bytes; partitioning them takes as much again.
GATHER_BYTES = 32 << 20
# Each open stage holds a few file descriptors.
_OPEN_STAGES_MAX = 64


class TaskStaging:
    """Stages the rows of one task; `finish` returns what the driver has to commit."""

    def __init__(
        self, options: WriteOptions, columns: WriteColumns, gather_bytes: int = GATHER_BYTES
    ) -> None:
        self._log = broker.open(options.path, create=False, storage=options.storage)
        self._options = options
        self._columns = columns
        self._gather_bytes = gather_bytes
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        self._open: dict[str, broker.Stage] = {}
        self._staged: list[broker.Staged] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take some rows, with all their columns as Spark has them."""
        if not batch.num_rows:
            return
        arrays = [batch.column(place) for place in self._columns.places]
        taken = pa.RecordBatch.from_arrays(arrays, names=list(self._columns.names))
        if self._gathered_bytes and self._gathered_bytes + taken.nbytes > self._gather_bytes:
            self._flush()
        self._gathered.append(taken)
        self._gathered_bytes += taken.nbytes

    def finish(self) -> tuple[broker.Staged, ...]:
        """Make everything durable and describe it."""
        self._flush(is_last=True)
        for topic in list(self._open):
            self._finish_stage(topic)
        return tuple(self._staged)

    def discard(self) -> None:
        """Remove all files: no commit will name them."""
        for stage in self._open.values():
            with contextlib.suppress(broker.LogError):
                stage.discard()
            stage.close()
        for staged in self._staged:
            with contextlib.suppress(broker.LogError):
                self._log.discard_staged(staged.topic, [staged])

    def _flush(self, *, is_last: bool = False) -> None:
        if not self._gathered:
            return
        table = pa.Table.from_batches(self._gathered).combine_chunks()
        self._gathered, self._gathered_bytes = [], 0
        _check_partitions(table)
        for topic, rows in self._by_topic(table):
            self._stage(topic).write(rows)
            if is_last or len(self._open) > _OPEN_STAGES_MAX:
                self._finish_stage(topic)

    def _by_topic(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if self._options.topic is not None:
            yield self._options.topic, table
            return
        names = table.column(TOPIC)
        if names.null_count:
            raise broker.InvalidRecord(
                "null topic present in the data. Use the topic option for setting a topic."
            )
        yield from split(table.drop_columns([TOPIC]), names.combine_chunks())

    def _stage(self, topic: str) -> broker.Stage:
        if topic not in self._open:
            ensure_topic(self._log, topic, self._options)
            self._open[topic] = self._log.stage(topic, compression_type=self._options.compression)
        return self._open[topic]

    def _finish_stage(self, topic: str) -> None:
        stage = self._open[topic]
        self._staged.append(stage.finish())
        stage.close()
        del self._open[topic]


def split(table: pa.Table, names: pa.Array) -> Iterator[tuple[str, pa.Table]]:
    """Return the rows of each name, in their order."""
    if isinstance(names, pa.ChunkedArray):
        raise broker.InvalidRecord("column 'topic' holds over 2 GiB in 10,000 rows")
    encoded = names.dictionary_encode()
    numbers = encoded.indices.to_numpy()
    found = encoded.dictionary.to_pylist()
    if len(found) > 1:
        table = table.take(pa.array(np.argsort(numbers, kind="stable")))
    start = 0
    for name, count in zip(found, np.bincount(numbers, minlength=len(found)).tolist(), strict=True):
        yield name, table.slice(start, count)
        start += count


def ensure_topic(log: broker.Log, topic: str, options: WriteOptions) -> None:
    """Create the topic if it is not there and the user wants that.

    Raises:
        UnknownTopic: it is not there, and is not to be created.
    """
    try:
        with contextlib.closing(log.reader(topic)) as reader:
            _compare_partitions(topic, reader.state.partition_count, options.partition_count)
    except broker.UnknownTopic as error:
        if not options.create_topic:
            hint = "create it first, or set the option createTopic to true"
            raise broker.UnknownTopic(topic, hint=hint) from error
        # Another task or query may be faster.
        with contextlib.suppress(broker.TopicExists):
            log.create_topic(topic, partitions=options.partition_count or 1)


def _compare_partitions(topic: str, found: int, wanted: int | None) -> None:
    if wanted is not None and wanted != found:
        reason = f"topic {topic!r} is there already, with {found} partitions and not {wanted}"
        warn_once(["numPartitions"], reason)


def _check_partitions(table: pa.Table) -> None:
    """Refuse negative numbers, which to `broker` would mean that the choice is left to it."""
    if PARTITION not in table.column_names:
        return
    lowest = pc.min(table.column(PARTITION)).as_py()
    if lowest is not None and lowest < 0:
        raise broker.InvalidRecord(
            f"partition {lowest} in the data: use 0 and up, or null to leave the choice to the "
            "partitioner"
        )
