"""The rows that Spark sees: those of its Kafka connector, or those columns of them a user names."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from broker import InvalidOption

_HEADERS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
COLUMNS: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": _HEADERS,
}
# A record may lack these.
_NULLABLE = ("key", "value", "headers")
_CANONICAL = {name.lower(): name for name in COLUMNS}


def row_schema(*, include_headers: bool) -> StructType:
    """Return the schema of a read for which the user gave none."""
    return StructType(
        [
            StructField(name, kind)
            for name, kind in COLUMNS.items()
            if include_headers or name != "headers"
        ]
    )


def column_names(schema: StructType) -> list[str]:
    """Return which of our columns each of a schema's is.

    Raises:
        InvalidOption: it names a column that a record does not have, or another type for it.
    """
    names = []
    for field in schema.fields:
        name = _CANONICAL.get(field.name.lower())
        if name is None:
            raise InvalidOption(
                f"the schema names column {field.name!r}; a log has {', '.join(COLUMNS)}"
            )
        if not _is_same(field.dataType, COLUMNS[name]):
            kind = COLUMNS[name].simpleString()
            raise InvalidOption(
                f"the schema gives column {field.name!r} the type {field.dataType.simpleString()}; "
                f"in a log it is {kind}. Read it so and cast it in a select."
            )
        if not field.nullable and name in _NULLABLE:
            raise InvalidOption(
                f"the schema says that column {field.name!r} is NOT NULL; a record may lack it"
            )
        names.append(name)
    return names


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return exactly what Spark expects to be sent for a schema."""
    return to_arrow_schema(schema, timezone="UTC")


def _is_same(one: DataType, other: DataType) -> bool:
    """Compare types without their nullability."""
    return bool(_plain(one.jsonValue()) == _plain(other.jsonValue()))


def _plain(kind: Any) -> Any:
    if isinstance(kind, dict):
        skipped = ("nullable", "containsNull", "metadata")
        return {name: _plain(part) for name, part in kind.items() if name not in skipped}
    return [_plain(part) for part in kind] if isinstance(kind, list) else kind
