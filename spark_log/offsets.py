"""The position of a query, as Spark's checkpoint keeps it.

The JSON has the form of Spark's Kafka connector, topic -> partition -> next offset to read, and one
key more that no topic can have:

    {"@": {"log": "5f0c…", "topics": {"orders": [1, 0]}}, "orders": {"0": 23, "1": 345}}

`log` is the cluster id of the log: one that was removed and made again has another. Checkpoints of
earlier versions have none, and it is not asked for there. `topics` gives the incarnation and the
epoch in which the offsets are meant: offsets of a topic that was deleted and made again, or that
lost its end in a power cut, are other records. `start` is in the offsets of a query that has not
finished a batch with records: Spark does not write down where the first batch starts, so its end
says it. Spark compares offsets as text, so keys are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from broker import InvalidOption

EXTRA = "@"
_FORM = '{"@": {"topics": {"orders": [1, 0]}}, "orders": {"0": 23}}'


@dataclass(frozen=True, slots=True)
class TopicOffset:
    """Next offsets of one topic. Without an incarnation it was not written by this source."""

    positions: Mapping[int, int]
    incarnation: int | None = None
    epoch: int = 0
    cluster_id: str | None = None


@dataclass(frozen=True, slots=True)
class LogOffset:
    """Where a query is. `start` is where its first batch started."""

    topics: Mapping[str, TopicOffset]
    start: LogOffset | None = None

    @property
    def is_initial(self) -> bool:
        """Whether nothing has been read up to here."""
        return self.start is not None and self.start.topics == self.topics

    def as_start(self) -> LogOffset:
        """Return this as the offset at which a new query starts."""
        return LogOffset(self.topics, start=LogOffset(self.topics))

    def to_json(self) -> dict[str, Any]:
        """Return the same dictionary, in the same order, for the same offset."""
        extra: dict[str, Any] = {}
        for topic in self.topics.values():
            if topic.cluster_id is not None:
                extra["log"] = topic.cluster_id  # The same for all: they were looked at together.
        if self.start is not None:
            extra["start"] = self.start.to_json()
        extra["topics"] = {
            name: [topic.incarnation, topic.epoch]
            for name, topic in sorted(self.topics.items())
            if topic.incarnation is not None
        }
        offset: dict[str, Any] = {EXTRA: extra}
        for name, topic in sorted(self.topics.items()):
            offset[name] = {str(number): at for number, at in sorted(topic.positions.items())}
        return offset

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> LogOffset:
        try:
            return cls._parse(offset)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidOption(
                f"the checkpoint holds an offset that is not of this source: {offset!r}; expected "
                f"e.g. {_FORM}. Start the query with a new checkpointLocation."
            ) from error

    @classmethod
    def _parse(cls, offset: Mapping[str, Any]) -> LogOffset:
        extra = offset.get(EXTRA, {})
        known, cluster_id = extra.get("topics", {}), extra.get("log")
        topics = {}
        for name, positions in offset.items():
            if name != EXTRA:
                incarnation, epoch = known.get(name, (None, 0))
                places = {int(number): int(at) for number, at in positions.items()}
                topics[name] = TopicOffset(places, incarnation, epoch, cluster_id)
        start = extra.get("start")
        return cls(topics, None if start is None else cls._parse(start))
