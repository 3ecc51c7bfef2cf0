"""What a streaming query's source counts, on the driver.

Spark lets no Python source add metrics to a query's progress, and a task cannot reach the driver
between batches. So what is counted is what the driver plans and finds: each batch's records and
bytes as its tasks will read them, how long that took, what was lost, and how far the log's end is
from where the query is. The reader is in a process of Spark's own; `metricsPort` serves them.
"""

from __future__ import annotations

from collections.abc import Iterable

import broker
from broker import Readings
from spark_log.offsets import LogOffset
from spark_log.task import LogTask
from spark_log.topics import Views


class SourceMetrics:
    """The totals of one query since its start, and its lag as of the last look at the log."""

    def __init__(self) -> None:
        self._counts = broker.Metrics(
            "source-metrics",
            ["batch", "task", "records-planned", "bytes-planned", "data-loss", "look"],
            {"look-latency": "look", "plan-latency": "batch"},
        )
        self._publishes = broker.Metrics(
            "source-group-metrics", ["publish", "publish-error"], {"publish-latency": "publish"}
        )
        self._lags: list[int] = []

    def metrics(self) -> Readings:
        lags = self._lags
        gauges = {"records_lag": sum(lags), "records_lag_max": max(lags, default=0)}
        return {**self._counts.read(**gauges), **self._publishes.read()}

    def count_look(self, at: LogOffset, views: Views, seconds: float) -> None:
        """The log was looked at by a query that has read everything before `at`."""
        self._counts.add("look")
        self._counts.add("look-latency", seconds)
        self._lags = [
            max(0, end - max(start, topic.positions.get(number, start)))
            for name, topic in at.topics.items()
            if name in views and (topic.incarnation is None or views[name].is_of(topic))
            for number, (start, end) in views[name].bounds.items()
        ]

    def count_batch(self, record_count: int, tasks: Iterable[LogTask], seconds: float) -> None:
        counts = self._counts
        counts.add("batch")
        counts.add("plan-latency", seconds)
        counts.add("records-planned", record_count)
        for task in tasks:
            counts.add("task")
            counts.add("bytes-planned", sum(piece.byte_count for piece in task.slices))

    def count_losses(self, count: int) -> None:
        self._counts.add("data-loss", count)

    def count_publish(self, seconds: float) -> None:
        self._publishes.add("publish")
        self._publishes.add("publish-latency", seconds)

    def count_failed_publish(self) -> None:
        self._publishes.add("publish-error")
