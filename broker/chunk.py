"""Fetched records that a consumer has not given out yet: Arrow until somebody wants objects."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from broker.config import ConsumerOptions
from broker.history import Fetched
from broker.records import ConsumerRecord, TopicPartition

# A namedtuple's own constructor is a Python function; this one is not.
_make_record = partial(tuple.__new__, ConsumerRecord)


class Chunk:
    """The records of [offset, end_offset) of one partition: some offsets may have none."""

    __slots__ = (
        "_batch",
        "_offsets",
        "_place",
        "_timestamp_type",
        "byte_count",
        "count",
        "end_offset",
        "offset",
    )

    def __init__(self, place: TopicPartition, fetched: Fetched) -> None:
        self._place = place
        self._batch = fetched.batch
        self._timestamp_type = fetched.timestamp_type
        self._offsets = fetched.offsets
        self.count = fetched.batch.num_rows
        self.offset = fetched.base_offset
        self.end_offset = fetched.end_offset
        self.byte_count = fetched.byte_count

    def with_offsets(self) -> pa.RecordBatch:
        offsets = self._offsets
        if offsets is None:
            offsets = np.arange(self.offset, self.end_offset, dtype=np.int64)
        return self._batch.append_column("offset", pa.array(offsets))

    def records(self, count_max: int, options: ConsumerOptions) -> Iterator[ConsumerRecord]:
        """Take up to `count_max` records off the front, as objects."""
        batch = self._batch if count_max >= self.count else self._batch.slice(0, count_max)
        count = batch.num_rows
        start = self.offset
        offsets = range(start, start + count)
        if self._offsets is not None:
            offsets = self._offsets[:count].tolist()
        stamps = batch.column(3).cast(pa.int64()).to_numpy() // 1000
        rows = zip(
            repeat(self._place.topic),
            repeat(self._place.partition),
            offsets,
            stamps.tolist(),
            repeat(self._timestamp_type),
            _objects(batch.column(0), options.key_deserializer),
            _objects(batch.column(1), options.value_deserializer),
            _headers(batch.column(2)),
            strict=False,
        )
        self.count -= count
        self._batch = self._batch.slice(count)
        if self._offsets is not None:
            self._offsets = self._offsets[count:]
            self.offset = int(self._offsets[0]) if self.count else self.end_offset
        else:
            self.offset += count
        return map(_make_record, rows)


def _objects(column: pa.Array, deserialize: Any) -> Any:
    if column.null_count == len(column):
        return repeat(None, len(column))
    values = column.to_pylist()
    if deserialize is None:
        return values
    return [None if value is None else deserialize(value) for value in values]


def _headers(column: pa.Array) -> Any:
    if column.null_count == len(column):
        # One by one as they are wanted: thousands of lists at once keep the garbage collector busy.
        return ([] for _ in range(len(column)))
    return [
        [] if entries is None else [(entry["key"], entry["value"]) for entry in entries]
        for entries in column.to_pylist()
    ]
