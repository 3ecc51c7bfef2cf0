"""The position of a streaming query, shown to others as that of a consumer group.

The query itself does not need it: its position is in its checkpoint. It is for tools that show lag,
and for jobs that want to start where this one is.
"""

from __future__ import annotations

import logging
import time

import broker
from broker import Position, TopicPartition
from spark_log.metrics import SourceMetrics
from spark_log.offsets import LogOffset
from spark_log.topics import Views

logger = logging.getLogger(__name__)


class PublishedGroup:
    """Publishes each position once; a failure is told once and does not end the query."""

    def __init__(self, log: broker.Log, name: str, metrics: SourceMetrics) -> None:
        self._log = log
        self._name = name
        self._metrics = metrics
        self._published: dict[TopicPartition, Position] = {}
        self._has_warned = False

    def publish(self, offset: LogOffset, views: Views) -> None:
        """Publish where the query is in the topics of today, in the epoch in which it read them."""
        positions = {
            TopicPartition(name, number): Position(at, views[name].incarnation, topic.epoch)
            for name, topic in offset.topics.items()
            if name in views and views[name].is_of(topic)
            for number, at in topic.positions.items()
        }
        if positions == self._published:
            return
        begun = time.monotonic()
        try:
            self._log.publish_positions(self._name, positions)
            self._published = positions
            self._metrics.count_publish(time.monotonic() - begun)
        except broker.LogError as error:
            self._metrics.count_failed_publish()
            self._warn(error)

    def _warn(self, error: broker.LogError) -> None:
        if not self._has_warned:
            logger.warning(
                "the position of this query could not be published to group %r, and its lag will "
                "look larger than it is; the query goes on: %s",
                self._name,
                error,
            )
        self._has_warned = True
