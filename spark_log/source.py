"""The source of `format("log")`: what Spark calls, in the order in which it calls it.

The driver's side of a streaming query is one reader in one process; it decides what each batch
reads. Tasks get another reader, which only knows where the log is and which columns are wanted.
What is available comes from the log each time; `(start, end)` always reads the same records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

import broker
from spark_log import planning, positions, schema, topics
from spark_log.group import PublishedGroup
from spark_log.losses import Loss, Ranges, between, report
from spark_log.metrics import SourceMetrics
from spark_log.offsets import LogOffset
from spark_log.options import EARLIEST, GROUP, LATEST, Edge, ReadOptions
from spark_log.planning import Patience, Sizing
from spark_log.shipping import Shipped
from spark_log.task import LogTask, read_task
from spark_log.topics import TopicSet, Views

logger = logging.getLogger(__name__)


class LogBatchReader(Shipped, DataSourceReader):
    """One batch read; what it covers is fixed when `partitions` is called."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = ReadOptions.parse(options)
        self._options.check_batch()
        self._schema = schema
        check_schema(schema)

    def partitions(self) -> list[InputPartition]:
        options = self._options
        log = broker.open(options.path, create=False, storage=options.storage)
        selected = TopicSet(log, options.selection)
        try:
            views = selected.look_at_all()
            ranges = self._ranges(log, views)
            report(ranges.losses, fail=options.fail_on_data_loss, known=set())
            return list(make_tasks(ranges, views, options))
        finally:
            selected.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(partition, self._options, self._schema)

    def _ranges(self, log: broker.Log, views: Views) -> Ranges:
        options = self._options
        ending = options.ending or Edge("endingOffsets", LATEST)
        start = find_start(options, log, views, default=EARLIEST)
        end = positions.find(ending, views, latest_if_no_time=True)
        for name, begins in start.items():
            for number, begin in begins.items():
                if begin > end[name][number]:
                    raise broker.InvalidOption(
                        f"The resolved start offset {begin} ({options.starting_name}) is greater "
                        f"than the end offset {end[name][number]} ({ending.option}) for topic "
                        f"{name} partition {number}"
                    )
        return between(
            topics.offset_at(views, start),
            topics.offset_at(views, end),
            views,
            options.selection.includes,
        )


class LogStreamReader(Shipped, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query. What is wrong with its options is said at the first call.

    An exception from the constructor would reach the user as another one.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._given = dict(options)
        self._schema = schema
        self._opened: StreamQuery | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        self._query().fix_target()

    def getDefaultReadLimit(self) -> ReadLimit:
        # Only tells Spark's triggers apart: what the options say is applied by ourselves.
        return ReadMaxRows((1 << 63) - 1) if self._query().has_limits else ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        return self._query().initial().to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        is_limited = not isinstance(limit, ReadAllAvailable)
        at = LogOffset.from_json(start)
        end = self._query().latest(at, is_limited=is_limited)
        # Spark compares offsets as text: the same place is the same text.
        return start if end is at else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        latest = self._query().last_seen()
        return None if latest is None else latest.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if start == end:
            return []
        return self._query().plan(LogOffset.from_json(start), LogOffset.from_json(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(partition, ReadOptions.parse(self._given), self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the position is in Spark's checkpoint."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _query(self) -> StreamQuery:
        if self._opened is None:
            check_schema(self._schema)
            self._opened = StreamQuery(ReadOptions.parse(self._given))
        return self._opened


class StreamQuery:
    """The driver's side of a streaming query: how far each batch reads, and what is lost."""

    def __init__(self, options: ReadOptions) -> None:
        options.check_streaming()
        self._options = options
        self._log = broker.open(options.path, create=False, storage=options.storage)
        self._topics = TopicSet(self._log, options.selection)
        self._metrics = SourceMetrics()
        label = options.group_id or "query"
        self._exported = broker.export_metrics(options.metrics_port, label, self._metrics)
        if options.metrics_port == 0:
            logger.warning("metricsPort=0: metrics are served on port %s", self.metrics_port)
        self._group: PublishedGroup | None = None
        if options.group_id is not None:
            self._group = PublishedGroup(self._log, options.group_id, self._metrics)
        self._views: Views | None = None
        self._target: Views | None = None
        self._initial: LogOffset | None = None
        self._reported: set[Loss] = set()
        self._patience: Patience | None = None
        if options.offsets_per_trigger_min is not None:
            self._patience = Patience(
                options.offsets_per_trigger_min, options.trigger_delay_ms_max, time.monotonic
            )

    @property
    def has_limits(self) -> bool:
        options = self._options
        limits = (
            options.offsets_per_trigger_max,
            options.offsets_per_trigger_min,
            options.bytes_per_trigger_max,
        )
        return any(limit is not None for limit in limits)

    def fix_target(self) -> None:
        """Let nothing that is committed from now on be read by this run."""
        self._target = self._views = self._topics.look(afresh=True)

    def initial(self) -> LogOffset:
        """Return where a query without a checkpoint starts."""
        if self._initial is None:
            views = self._topics.look_at_all()
            if self._target is not None:
                views = self._target
            found = find_start(self._options, self._log, views, default=LATEST)
            self._views = views
            self._initial = topics.offset_at(views, found).as_start()
        return self._initial

    def latest(self, start: LogOffset, *, is_limited: bool) -> LogOffset:
        """Return where the batch that starts at `start` ends; `start` itself if there is none."""
        begun = time.monotonic()
        self._views = views = self._topics.look()
        self._metrics.count_look(start, views, time.monotonic() - begun)
        if self._group is not None:
            # All batches before this call are done, and Spark makes it when it is idle, too.
            self._group.publish(start, views)
        ranges = between(start, self._end(views), views, self._options.selection.includes)
        self._report(ranges.losses)
        if is_limited:
            if self._target is None and self._patience is not None:
                if not self._patience.is_over(ranges.offset_count):
                    return start
            ranges = self._limit(ranges, views)
        ends = {name: {number: end for number, (_, end) in ranges.found[name].items()}
                for name in ranges.found}  # fmt: skip
        end = topics.offset_at({name: views[name] for name in ends}, ends)
        if end.topics == start.topics:
            return start
        return LogOffset(end.topics, start.start) if start.is_initial else end

    def last_seen(self) -> LogOffset | None:
        return None if self._views is None else topics.latest(self._views)

    def plan(self, start: LogOffset, end: LogOffset) -> list[InputPartition]:
        """Return the tasks of one batch."""
        # Spark does not log where the first batch started and asks anew: its end knows.
        begun = time.monotonic()
        start = end.start or start
        self._views = views = self._topics.look()
        ranges = between(start, end, views, self._options.selection.includes)
        self._report(ranges.losses)
        tasks = make_tasks(ranges, views, self._options)
        count = sum(piece.record_count for task in tasks for piece in task.slices)
        self._metrics.count_batch(count, tasks, time.monotonic() - begun)
        return list(tasks)

    def metrics(self) -> broker.Readings:
        """Return what was counted since the query's start, and its lag."""
        return self._metrics.metrics()

    @property
    def metrics_port(self) -> int | None:
        """The port on which they are served."""
        return None if self._exported is None else self._exported.port

    def close(self) -> None:
        if self._exported is not None:
            self._exported.close()
        self._topics.close()

    def _end(self, views: Views) -> LogOffset:
        """Return the end of what may be read: of now, or of when the run began."""
        if self._target is None:
            return topics.latest(views)
        kept = {name: view for name, view in views.items() if name in self._target}
        ends = {}
        for name, view in kept.items():
            target = self._target[name]
            is_same = (target.cluster_id, target.incarnation) == (view.cluster_id, view.incarnation)
            ends[name] = {
                number: min(target.bounds[number][1] if is_same else 0, high)
                for number, (_low, high) in view.bounds.items()
                if number in target.bounds
            }
        return topics.offset_at(kept, ends)

    def _limit(self, ranges: Ranges, views: Views) -> Ranges:
        options = self._options
        if options.offsets_per_trigger_max is not None:
            ranges = planning.limit_offsets(ranges, options.offsets_per_trigger_max)
        if options.bytes_per_trigger_max is not None:
            ranges = planning.limit_bytes(ranges, views, options.bytes_per_trigger_max)
        return ranges

    def _report(self, losses: list[Loss]) -> None:
        self._metrics.count_losses(len(set(losses) - self._reported))
        report(losses, fail=self._options.fail_on_data_loss, known=self._reported)


def check_schema(wanted: StructType) -> None:
    """Refuse a schema that the log cannot fill."""
    schema.column_names(wanted)


def find_start(
    options: ReadOptions, log: broker.Log, views: Views, *, default: str
) -> dict[str, dict[int, int]]:
    """Return where a read starts that has no checkpoint."""
    edge = options.starting or Edge("startingOffsets", default)
    if edge.kind == GROUP:
        assert options.group_id is not None
        held = log.located_positions(options.group_id)
        fallback = options.starting_fallback or default
        found, losses = positions.find_of_group(held, views, fallback=fallback)
        report(losses, fail=options.fail_on_data_loss, known=set())
        return found
    return positions.find(edge, views, latest_if_no_time=options.latest_if_no_time)


def make_tasks(ranges: Ranges, views: Views, options: ReadOptions) -> list[LogTask]:
    sizing = Sizing(options.task_count_min, options.records_per_task_max)
    tasks = planning.plan(ranges, views, sizing, planning.core_count())
    return [LogTask(task) for task in tasks]
