"""Records as JSON, one object on a line: what `consume --format json` prints `produce` takes.

Bytes that are not UTF-8 text are given in base64, under `value_base64` and `key_base64`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from broker.errors import InvalidRecord, unknown_name
from broker.records import TopicPartition

# Where a record came from says nothing about where it goes.
_IGNORED = ("topic", "offset")
_quote = json.encoder.encode_basestring
_KNOWN = ("value", "value_base64", "key", "key_base64", "headers", "partition", "timestamp")


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the arguments of `send` for one line."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise InvalidRecord(f"not JSON: {error}") from error
    except RecursionError:
        raise InvalidRecord("not a record: brackets within brackets, too deep to read") from None
    if not isinstance(given, dict):
        raise InvalidRecord('not an object; write {"value": "text"}')
    for name in given:
        if name not in _KNOWN and name not in _IGNORED:
            raise InvalidRecord(str(unknown_name("field", name, _KNOWN)))
    if "value" not in given and "value_base64" not in given:
        raise InvalidRecord('no field "value"; give null for a record without one')
    return {
        "value": _bytes_of(given, "value"),
        "key": _bytes_of(given, "key"),
        "headers": _headers_of(given.get("headers")),
        "partition": _whole_number(given, "partition"),
        "timestamp_ms": _whole_number(given, "timestamp"),
    }


def format_records(place: TopicPartition, batch: pa.RecordBatch) -> Iterator[str]:
    """Return one line for each record of a batch that a consumer gave."""
    # Put together by hand: a dict and an encoder for each record take five times as long.
    head = f'{{"topic": {_quote(place.topic)}, "partition": {place.partition}, "offset": '
    stamps = batch.column("timestamp").cast(pa.int64()).to_numpy() // 1000
    columns = (batch.column(name).to_pylist() for name in ("offset", "key", "value", "headers"))
    for stamp, offset, key, value, headers in zip(stamps.tolist(), *columns, strict=True):
        tail = _format_headers(headers) if headers else "[]"
        yield (
            f'{head}{offset}, "timestamp": {stamp}, {_field("key", key)}, '
            f'{_field("value", value)}, "headers": {tail}}}'
        )


def _format_headers(headers: list[dict[str, Any]]) -> str:
    return ", ".join(
        f'{{"key": {_quote(header["key"])}, {_field("value", header["value"])}}}'
        for header in headers
    ).join("[]")


def _field(name: str, data: bytes | None) -> str:
    if data is None:
        return f'"{name}": null'
    try:
        return f'"{name}": {_quote(data.decode())}'
    except UnicodeDecodeError:
        return f'"{name}_base64": "{base64.b64encode(data).decode()}"'


def _bytes_of(given: dict[str, Any], name: str) -> bytes | None:
    encoded = given.get(f"{name}_base64")
    text = given.get(name)
    if encoded is not None and text is not None:
        raise InvalidRecord(f'both "{name}" and "{name}_base64"; give one')
    if encoded is None and text is None:
        return None
    if not isinstance(text if encoded is None else encoded, str):
        raise InvalidRecord(f'"{name}" is not text; write it as a JSON string')
    if encoded is None:
        return str(text).encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:  # Of a wrong length, or with a letter that is not ASCII.
        raise InvalidRecord(f'"{name}_base64" is not base64: {error}') from error


def _headers_of(given: Any) -> list[tuple[str, bytes | None]] | None:
    if given is None:
        return None
    if isinstance(given, dict):
        given = [{"key": name, "value": value} for name, value in given.items()]
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise InvalidRecord('"headers" must be {"name": "text"} or a list of {"key", "value"}')
    headers = []
    for one in given:
        if not isinstance(one.get("key"), str):
            raise InvalidRecord('a header has no "key"')
        headers.append((one["key"], _bytes_of(one, "value")))
    return headers


def _whole_number(given: dict[str, Any], name: str) -> int | None:
    number = given.get(name)
    if number is not None and type(number) is not int:
        raise InvalidRecord(f'"{name}" is not a whole number')
    return number
