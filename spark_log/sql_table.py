"""Tables in SQL: `CREATE TABLE ... USING log OPTIONS (...)`.

Spark asks for the columns of a table when it is made, and tells its options; when the table is used
it tells only the columns. So the options go along with the first column, as metadata. They are not
put there for any other read: a schema that goes into files should not say where it came from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

_CARRIED = "spark_log.options"
# Spark gives these to none but a table that is being made.
_PROVIDER = "provider"
_PREFIX = "option."
_PATH = "path"


def is_definition(options: Mapping[str, str]) -> bool:
    """Tell whether a table is being made, rather than read."""
    return _PROVIDER in options


def given(options: Mapping[str, str]) -> dict[str, str]:
    """Return what the user wrote of the options of a table that is being made."""
    named = {
        name.removeprefix(_PREFIX): value
        for name, value in options.items()
        if name.startswith(_PREFIX)
    }
    return named | {name: value for name, value in options.items() if name == _PATH}


def carry(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return the schema with the options in it."""
    first, *rest = schema.fields
    metadata = {_CARRIED: json.dumps(dict(options))}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *rest])


def restore(schema: StructType, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a read or write: of its table, if it has one, and its own."""
    carried: dict[str, str] = {}
    for field in schema.fields:
        carried |= json.loads((field.metadata or {}).get(_CARRIED, "{}"))
    return carried | dict(options)
