"""Frames: what goes in comes out, whatever the codec; what was changed is not believed."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from broker.arrow_message import SCHEMA, TIMESTAMP_TYPE, encode_columns, parts_of
from broker.batch import HEADER, Frame, check, decode, encode_batch, encode_records
from broker.config import CODECS
from broker.errors import CorruptLog, LogError, UnsupportedFormat

every_codec = pytest.mark.parametrize("codec", CODECS)

HEADERS: list[Any] = [
    None,
    [],
    [("h", b"1")],
    [("schlüssel", None), ("", b""), ("鍵", b"\x00\xff"), ("h", b"1"), ("h", b"2")],
]


def joined(frame: Frame) -> bytes:
    return b"".join(bytes(part) for part in frame.parts)


def opened(frame: Frame) -> pa.RecordBatch:
    data = joined(frame)
    assert len(data) == frame.byte_length
    return decode(pa.py_buffer(data), "a file", 0)


def columns_of(batch: pa.RecordBatch) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    batch.validate(full=True)
    headers = [
        None if row is None else [(one["key"], one["value"]) for one in row]
        for row in batch.column(2).to_pylist()
    ]
    stamps = batch.column(3).cast(pa.int64()).to_pylist()
    return batch.column(0).to_pylist(), batch.column(1).to_pylist(), headers, stamps


@every_codec
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ([b"k"], [b"v"]),
        ([None], [b"v"]),
        ([b"k"], [None]),
        ([None], [None]),
        ([b""], [b""]),
        ([b"a", b"", b"ccc"], [b"", b"two", b""]),
        ([None, None, None], [b"1", b"2", b"3"]),
        ([b"a", None, b"c"], [None, b"2", None]),
        ([None] * 9, [None] * 9),
        ([bytes(range(256))] * 300, [b"x" * 1000] * 300),
    ],
)
def test_records_come_out_as_they_went_in(
    codec: str, keys: list[bytes | None], values: list[bytes | None]
) -> None:
    stamps = [1000 * number for number in range(len(values), 0, -1)]
    frame = encode_records(keys, values, None, stamps, codec)
    assert columns_of(opened(frame)) == (keys, values, [None] * len(keys), stamps)
    assert (frame.record_count, frame.min_timestamp, frame.max_timestamp) == (
        len(values),
        min(stamps),
        max(stamps),
    )


@every_codec
def test_headers_come_out_as_they_went_in(codec: str) -> None:
    count = len(HEADERS)
    frame = encode_records([None] * count, [b"v"] * count, HEADERS, [0] * count, codec)
    assert columns_of(opened(frame))[2] == HEADERS


@every_codec
def test_a_value_of_many_megabytes_comes_out_as_it_went_in(codec: str) -> None:
    value = bytes(range(256)) * (5 << 12)
    assert columns_of(opened(encode_records([b"k"], [value], None, [1], codec)))[1] == [value]


@every_codec
def test_an_arrow_batch_comes_out_as_it_went_in(codec: str) -> None:
    arrays = [
        pa.array([b"a", None, b""]),
        pa.array([None, b"2", b"3"], pa.binary()),
        pa.array([None, [], [{"key": "h", "value": b"1"}]], SCHEMA.field("headers").type),
        pa.array([3, 1, 2], pa.int64()).cast(TIMESTAMP_TYPE),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    frame = encode_batch(batch, codec)
    assert opened(frame).equals(batch)
    assert (frame.record_count, frame.min_timestamp, frame.max_timestamp) == (3, 1, 3)


def test_a_slice_of_an_arrow_batch_takes_only_its_own_bytes() -> None:
    values = [bytes([number]) * 1000 for number in range(100)]
    stamps = list(range(100))
    whole = opened(encode_records([None] * 100, values, None, stamps))
    frame = encode_batch(whole.slice(40, 2))
    assert frame.byte_length < 4000
    assert columns_of(opened(frame))[1] == values[40:42]
    assert (frame.min_timestamp, frame.max_timestamp) == (40, 41)


def record_batch(keys: list[bytes | None], values: list[bytes | None]) -> pa.RecordBatch:
    count = len(values)
    arrays = [
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.nulls(count, SCHEMA.field("headers").type),
        pa.array(range(count), pa.int64()).cast(TIMESTAMP_TYPE),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 300])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("column", ["full", "null", "mixed", "empty"])
def test_a_batch_of_any_shape_makes_a_message_that_arrow_opens(
    count: int, start: int, column: str
) -> None:
    full: list[bytes | None] = [b"v" * (number % 11) for number in range(count + start)]
    keys = {
        "full": full,
        "null": [None] * len(full),
        "mixed": [one if number % 2 else None for number, one in enumerate(full)],
        "empty": [b""] * len(full),
    }[column]
    for batch in (record_batch(keys, full), record_batch(full, keys)):
        batch = batch.slice(start)
        assert opened(encode_batch(batch)).equals(batch)
        opened(encode_batch(batch)).validate(full=True)
        shared = pa.py_buffer(b"".join(bytes(part) for part in parts_of(batch)))
        assert pa.ipc.read_record_batch(shared, SCHEMA).equals(batch)


def test_an_arrow_batch_is_not_copied_into_its_frame() -> None:
    batch = record_batch([None] * 2, [b"v" * 100_000, b"w" * 100_000]).slice(1)
    place = batch.column(1).buffers()[2].address + 100_000
    parts = [part for part in encode_batch(batch).parts if isinstance(part, pa.Buffer)]
    assert place in [part.address for part in parts]


def test_an_uncompressed_frame_is_opened_without_a_copy() -> None:
    data = pa.py_buffer(joined(encode_records([None], [b"v" * 100_000], None, [1])))
    before = pa.total_allocated_bytes()
    batch = decode(data, "a file", 0)
    assert pa.total_allocated_bytes() == before
    place = batch.column(1).buffers()[2].address
    assert data.address <= place < data.address + data.size


def test_a_codec_makes_repetitive_records_smaller() -> None:
    plain = encode_records([None], [b"v" * 10_000], None, [1])
    for codec in CODECS[1:]:
        assert encode_records([None], [b"v" * 10_000], None, [1], codec).byte_length < (
            plain.byte_length / 10
        )


optional_bytes = st.none() | st.binary(max_size=20)
all_or_none = st.lists(st.binary(max_size=20)) | st.lists(st.none()) | st.lists(optional_bytes)


@settings(max_examples=300, deadline=None)
@given(keys=all_or_none, values=all_or_none, data=st.data())
def test_the_message_built_by_hand_is_what_arrow_reads(
    keys: list[bytes | None], values: list[bytes | None], data: st.DataObject
) -> None:
    count = max(1, min(len(keys), len(values)))
    keys = (keys or [None])[:count] + [None] * (count - len(keys or [None]))
    values = (values or [None])[:count] + [None] * (count - len(values or [None]))
    stamps = data.draw(st.lists(st.integers(0, 1 << 61), min_size=count, max_size=count))
    message, low, high = encode_columns(keys, values, None, stamps)
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    assert columns_of(batch) == (keys, values, [None] * count, stamps)
    assert (low, high) == (min(stamps), max(stamps))


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 600), key_size=st.integers(0, 9), value_size=st.integers(0, 9))
def test_messages_of_every_shape_are_as_arrow_itself_says(
    count: int, key_size: int, value_size: int
) -> None:
    keys: list[bytes | None] = [b"k" * key_size] * count
    values: list[bytes | None] = [b"v" * value_size] * count
    stamps = list(range(count))
    message, _, _ = encode_columns(keys, values, None, stamps)
    arrays = [
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.nulls(count, SCHEMA.field("headers").type),
        pa.array(stamps, pa.int64()).cast(TIMESTAMP_TYPE),
    ]
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    batch.validate(full=True)
    assert batch.equals(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))


@every_codec
def test_a_changed_bit_anywhere_in_a_frame_is_found(codec: str) -> None:
    data = joined(encode_records([b"k"] * 3, [b"v" * 30] * 3, None, [1, 2, 3], codec))
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(LogError):
                decode(pa.py_buffer(bytes(damaged)), "a file", 0)


@every_codec
def test_a_frame_of_another_length_is_found(codec: str) -> None:
    data = joined(encode_records([b"k"], [b"v" * 30], None, [1], codec))
    for length in range(len(data)):
        with pytest.raises(CorruptLog):
            decode(pa.py_buffer(data[:length]), "a file", 0)
    with pytest.raises(CorruptLog, match="length does not match its place"):
        decode(pa.py_buffer(data + b"\0"), "a file", 0)


def resealed(data: bytes, at: int, byte: int) -> pa.Buffer:
    """Change a byte and make the checksum right again, as another version would write it."""
    import google_crc32c

    changed = bytearray(data)
    changed[at] = byte
    changed[4:8] = google_crc32c.value(bytes(changed[8:])).to_bytes(4, "little")
    return pa.py_buffer(bytes(changed))


@pytest.mark.parametrize(("what", "at"), [("version", 8), ("codec", 9), ("schema", 10)])
def test_a_newer_frame_is_refused_not_guessed_at(what: str, at: int) -> None:
    data = joined(encode_records([b"k"], [b"v"], None, [1]))
    with pytest.raises(UnsupportedFormat, match="the frame at byte 17 of a file"):
        check(resealed(data, at, 9), "a file", 17)


def test_a_frame_that_says_another_record_count_is_damaged() -> None:
    data = joined(encode_records([b"k"], [b"v"], None, [1]))
    count_at = HEADER.size - 20
    with pytest.raises(CorruptLog, match="another number of records"):
        decode(resealed(data, count_at, 2), "a file", 0)


def test_a_payload_that_does_not_open_is_damage_not_a_foreign_error() -> None:
    data = joined(encode_records([b"k"], [b"v" * 50], None, [1], "zstd"))
    with pytest.raises(CorruptLog, match="does not open"):
        decode(resealed(data, HEADER.size, 0), "a file", 0)
    plain = joined(encode_records([b"k"], [b"v"], None, [1]))
    with pytest.raises(CorruptLog, match="does not open"):
        decode(resealed(plain, HEADER.size + 8, 0xFF), "a file", 0)
