"""Arrow tables as users give them <-> the columns of a record."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from broker.arrow_message import HEADERS_TYPE, SCHEMA, TIMESTAMP_TYPE
from broker.errors import InvalidRecord, RecordTooLarge, unknown_name

COLUMNS = ("key", "value", "headers", "timestamp", "partition")


def to_records(
    table: Any, topic: str, now_ms: int
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None]:
    """Return a user's table as one batch of records and, if given, the partition of each.

    A partition of -1 leaves the choice to the partitioner.
    """
    if not isinstance(table, (pa.Table, pa.RecordBatch)):
        raise InvalidRecord(
            f"send_batch to {topic!r} takes a pyarrow Table or RecordBatch, not "
            f"{type(table).__name__}"
        )
    for name in table.schema.names:
        if name not in COLUMNS:
            error = unknown_name("column", name, COLUMNS)
            raise InvalidRecord(f"batch for {topic!r}: {error}")
    if "value" not in table.schema.names or len(set(table.schema.names)) < table.num_columns:
        raise InvalidRecord(f"batch for {topic!r} needs exactly one column named 'value'")
    count = table.num_rows
    columns = []
    for field in SCHEMA:
        if field.name in table.schema.names:
            columns.append(_cast(table.column(field.name), field.name, topic))
        elif field.name == "timestamp":
            columns.append(pa.array(np.full(count, now_ms * 1000)).view(field.type))
        else:
            columns.append(pa.nulls(count, field.type))
    if columns[3].null_count:
        columns[3] = columns[3].fill_null(pa.scalar(now_ms * 1000, pa.int64()).cast(TIMESTAMP_TYPE))
    if "timestamp" in table.schema.names:
        _check_times(columns[3], topic)
    _check_header_keys(columns[2], topic)
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return batch, _partitions(table, topic)


def _check_times(times: pa.Array, topic: str) -> None:
    """Refuse times before 1970, as `send` does: retention would take them for no time at all."""
    micros = times.view(pa.int64())
    if len(times) and micros.to_numpy().min() < 0:
        row = pc.index(pc.less(micros, 0), True).as_py()
        raise InvalidRecord(
            f"row {row} of column 'timestamp' for {topic!r} is {times[row].cast(pa.string())}: a "
            "record's time must not be before 1970"
        )


def check_sizes(batch: pa.RecordBatch, topic: str, limit: int) -> None:
    """Refuse a batch in which one record is over the topic's limit."""
    if batch.num_rows == 0 or batch.nbytes <= limit:
        return
    key, value, headers, _timestamp = batch.columns
    sizes = _byte_lengths(value)
    if key.null_count < batch.num_rows:
        sizes = pc.add(sizes, _byte_lengths(key))
    if headers.null_count < batch.num_rows:
        sizes = pc.add(sizes, _header_sizes(headers))
    largest = pc.max(sizes).as_py()
    if largest > limit:
        raise RecordTooLarge(topic, largest, limit, "max.message.bytes")


def _byte_lengths(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column)
    return pc.fill_null(lengths, 0) if column.null_count else lengths


def _check_header_keys(headers: pa.Array, topic: str) -> None:
    if headers.null_count == len(headers):
        return
    entries = headers.flatten()
    if entries.null_count or entries.field("key").null_count:
        raise InvalidRecord(f"column 'headers' for {topic!r} holds a header without a key")


def _header_sizes(headers: pa.Array) -> pa.Array:
    entries = headers.flatten()
    sizes = _byte_lengths(entries.field("key")).to_numpy().astype(np.int64)
    sizes = sizes + _byte_lengths(entries.field("value")).to_numpy()
    ends = np.concatenate([[0], np.cumsum(sizes)])
    counts = pc.fill_null(pc.list_value_length(headers), 0).to_numpy()
    places = np.concatenate([[0], np.cumsum(counts)])
    return pa.array(np.diff(ends[places]).astype(np.int32))


def _cast(column: Any, name: str, topic: str) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        raise InvalidRecord(f"column {name!r} for {topic!r} holds over 2 GiB; send less at a time")
    wanted = SCHEMA.field(name).type
    if array.type == wanted:
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    is_fitting = {
        "key": _is_bytes,
        "value": _is_bytes,
        "headers": pa.types.is_list,
        "timestamp": lambda kind: pa.types.is_timestamp(kind) or pa.types.is_integer(kind),
    }[name]
    if not (pa.types.is_null(array.type) or is_fitting(array.type)):
        raise InvalidRecord(
            f"column {name!r} for {topic!r} is {array.type}; it must be {_EXPECTED[name]}"
        )
    try:
        if pa.types.is_integer(array.type):
            array = pc.multiply_checked(array.cast(pa.int64()), 1000)
        if name in ("key", "value") and not pa.types.is_null(array.type):
            array = array.cast(pa.binary()) if not pa.types.is_large_string(array.type) else (
                array.cast(pa.large_binary()).cast(pa.binary())
            )  # fmt: skip
        return array.cast(wanted)
    except pa.ArrowException as error:
        raise InvalidRecord(f"column {name!r} for {topic!r} does not fit: {error}") from error


_EXPECTED = {
    "key": "binary or string",
    "value": "binary or string",
    "headers": str(HEADERS_TYPE),
    "timestamp": "a timestamp, or whole milliseconds since 1970",
}


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _partitions(table: Any, topic: str) -> npt.NDArray[np.int64] | None:
    if "partition" not in table.schema.names:
        return None
    column = table.column("partition")
    if pa.types.is_null(column.type):
        return None
    if not pa.types.is_integer(column.type):
        raise InvalidRecord(
            f"column 'partition' for {topic!r} is {column.type}; it must be whole numbers"
        )
    numbers: npt.NDArray[np.int64] = column.fill_null(-1).to_numpy().astype(np.int64)
    return numbers
