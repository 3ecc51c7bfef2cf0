"""The values that go in and come out: places, records, and what a send returns."""

from __future__ import annotations

from typing import Any, NamedTuple

CREATE_TIME = 0
LOG_APPEND_TIME = 1


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class RecordMetadata(NamedTuple):
    """Where a sent record is, once it is committed."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class BatchMetadata(NamedTuple):
    """Where a sent Arrow batch is: the first offset and the record count in each partition."""

    topic: str
    offsets: dict[int, tuple[int, int]]
    timestamp: int


class OffsetAndMetadata(NamedTuple):
    """A position of a group with a note of whoever committed it."""

    offset: int
    metadata: str = ""


class OffsetAndTimestamp(NamedTuple):
    """The answer to a look-up by time."""

    offset: int
    timestamp: int


class ConsumerRecord(NamedTuple):
    """A record as a consumer gets it; the timestamp is in milliseconds since 1970, UTC."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: Any
    value: Any
    headers: list[tuple[str, bytes]]
