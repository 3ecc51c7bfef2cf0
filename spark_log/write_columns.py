"""The columns of a row that the sink takes, and the check that they are of a type it can store.

Names and types are those of Spark's Kafka sink, and so are the words of the errors. Beyond it there
is `timestamp`. Names are compared as Spark hands them over, case included; other columns are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

import broker

TOPIC = "topic"
PARTITION = "partition"


@dataclass(frozen=True, slots=True)
class WriteColumns:
    """Which columns of a row are written: their names, and their places among all columns."""

    names: tuple[str, ...]
    places: tuple[int, ...]

    @classmethod
    def find(cls, schema: StructType, *, has_topic_option: bool) -> WriteColumns:
        """Find and check the columns; the column `topic` counts only if there is no option.

        Raises:
            InvalidRecord: a column is missing, there twice, or of a type that cannot be stored.
        """
        columns = [
            (name, place)
            for place, name in enumerate(schema.names)
            if name in _TYPES and not (name == TOPIC and has_topic_option)
        ]
        names = tuple(name for name, _ in columns)
        for name, place in columns:
            if names.count(name) > 1:
                raise broker.InvalidRecord(f"attribute '{name}' is there more than once")
            _check_type(name, schema.fields[place].dataType)
        if "value" not in names:
            raise broker.InvalidRecord(
                f"Required attribute 'value' not found{_hint(schema, 'value')}"
            )
        if TOPIC not in names and not has_topic_option:
            raise broker.InvalidRecord(
                "topic option required when no 'topic' attribute is present. Use the topic option "
                f"for setting a topic{_hint(schema, TOPIC)}."
            )
        return cls(names, tuple(place for _, place in columns))


def _is_text_or_bytes(kind: DataType) -> bool:
    return isinstance(kind, (StringType, BinaryType))


def _is_headers(kind: DataType) -> bool:
    if not (isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType)):
        return False
    fields = kind.elementType.fields
    return (
        [field.name for field in fields] == ["key", "value"]
        and isinstance(fields[0].dataType, StringType)
        and isinstance(fields[1].dataType, BinaryType)
    )


_TYPES: dict[str, tuple[Callable[[DataType], bool], str]] = {
    "value": (_is_text_or_bytes, "string or binary"),
    "key": (_is_text_or_bytes, "string or binary"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>>"),
    TOPIC: (lambda kind: isinstance(kind, StringType), "string"),
    PARTITION: (lambda kind: isinstance(kind, IntegerType), "int"),
    "timestamp": (lambda kind: isinstance(kind, TimestampType), "timestamp"),
}


def _check_type(name: str, kind: DataType) -> None:
    is_fitting, expected = _TYPES[name]
    if not is_fitting(kind):
        raise broker.InvalidRecord(
            f"{name} attribute unsupported type {kind.simpleString()}. "
            f"{name} must be a(n) {expected}"
        )


def _hint(schema: StructType, wanted: str) -> str:
    for name in schema.names:
        if name.lower() == wanted:
            return f" (there is '{name}': rename it, case counts)"
    return ""
