"""Where to put the positions of a group: an end, an offset, a time, or some records further."""

from __future__ import annotations

from dataclasses import dataclass

from broker.errors import InvalidOption, LostPosition
from broker.group.state import Position
from broker.reader import TopicReader
from broker.records import TopicPartition

KINDS = ("earliest", "latest", "offset", "time", "shift")


@dataclass(frozen=True, slots=True)
class Reset:
    """One rule for all partitions. Results outside a partition mean its nearest end.

    Args:
        kind: earliest, latest, offset, time (milliseconds since 1970) or shift (records).
        value: the offset, time or number of records.
    """

    kind: str
    value: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidOption(f"reset to {self.kind!r}: use one of {', '.join(KINDS)}")

    def target(self, reader: TopicReader, partition: int, position: Position | None) -> int:
        """Return the new offset of one partition."""
        start, end = reader.bounds(partition)
        if self.kind == "earliest":
            return start
        if self.kind == "latest":
            return end
        if self.kind == "time":
            found = reader.offset_for_time(partition, self.value * 1000)
            return end if found is None else found.offset
        wanted = self.value
        if self.kind == "shift":
            if position is None:
                raise InvalidOption(
                    f"{reader.topic.name}-{partition} has no position to shift; reset it to an "
                    "offset, a time, earliest or latest"
                )
            lost_from = position.lost_from(reader.state, partition)
            if lost_from is not None:
                place = TopicPartition(reader.topic.name, partition)
                raise LostPosition(place, position.offset, start, end, lost_from)
            wanted += position.offset
        return min(max(wanted, start), end)
