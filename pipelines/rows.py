"""Files of rows as records: which column is the key, the time, the value.

Lines of JSON and of text are values as they are; rows of CSV and Parquet are made JSON, or one
column is taken. What cannot be read, or has no key or time where one was asked for, ends the load
with the name of its file: a row is never left out in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DataType, NumericType, StringType

from broker import InvalidOption
from broker.errors import unknown_name
from pipelines.plan import SourceFile

CSV, JSON, PARQUET, TEXT = "csv", "json", "parquet", "text"
FORMATS = (CSV, JSON, PARQUET, TEXT)
_SUFFIXES = {CSV: ("csv",), JSON: ("json", "jsonl", "ndjson"), PARQUET: ("parquet",)}
_PACKED = ("", ".gz", ".bz2", ".zst", ".lz4", ".snappy")
_OPTIONS = {
    CSV: {
        "header": "true",
        # The header of every file is held to be that of the first, and every row to fit it.
        "enforceSchema": "false",
        "columnPruning": "false",
        "mode": "FAILFAST",
    },
    PARQUET: {"mergeSchema": "true"},
}
_CORRUPT = "_corrupt"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows become records. None: no key, the time of the load, the row itself as value."""

    format: str
    key: str | None = None
    timestamp: str | None = None
    value: str | None = None
    has_file_header: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)
        if self.format == TEXT and (self.key or self.timestamp or self.value):
            raise InvalidOption("lines of text have no columns: use format json, or none of them")

    def describe(self) -> dict[str, object]:
        return asdict(self)


def find_files(spark: SparkSession, directory: str, format_: str) -> list[SourceFile]:
    """Return the files below a directory that a load of this format takes."""
    names = [f"*.{suffix}{packed}" for suffix in _SUFFIXES.get(format_, ()) for packed in _PACKED]
    rows = (
        spark.read.format("binaryFile")
        .option("recursiveFileLookup", "true")
        .option("pathGlobFilter", f"{{{','.join(names)}}}" if names else "*")
        .load(_escape(directory))
        # Without the column `content` no file is opened.
        .select("path", "length", F.unix_millis("modificationTime").alias("modified"))
        .collect()
    )
    return [SourceFile(row["path"], row["length"], row["modified"]) for row in rows]


def read_records(spark: SparkSession, paths: Sequence[str], row_format: RowFormat) -> DataFrame:
    """Return the records of files, with the columns that `format("log")` writes.

    Raises:
        InvalidOption: a column is not there; the nearest name is suggested.
    """
    escaped = [_escape(path) for path in paths]
    if row_format.format in (JSON, TEXT):
        rows = spark.read.text(escaped).filter(F.trim("value") != "")
        columns = _line_columns(row_format)
    else:
        reader = spark.read.options(**_OPTIONS[row_format.format])
        rows = reader.format(row_format.format).load(escaped)
        columns = _table_columns(rows, row_format)
    if row_format.has_file_header:
        name = F.encode(F.element_at(F.split(F.input_file_name(), "/"), -1), "UTF-8")
        columns["headers"] = F.array(F.struct(F.lit("file").alias("key"), name.alias("value")))
    return rows.select(*[column.alias(name) for name, column in columns.items()])


def _line_columns(row_format: RowFormat) -> dict[str, Column]:
    line = F.col("value")
    if row_format.format == TEXT:
        return {"value": line}
    wanted = {
        name: field
        for name in ("key", "timestamp", "value")
        if (field := getattr(row_format, name)) is not None
    }
    fields = ", ".join(f"`{_quote(field)}` STRING" for field in dict.fromkeys(wanted.values()))
    parsed = F.from_json(
        line,
        f"{fields}{', ' if fields else ''}{_CORRUPT} STRING",
        {"columnNameOfCorruptRecord": _CORRUPT},
    )
    bad = _refuse(F.lit("not a JSON object: "), F.left(line, F.lit(100)))
    found = {
        name: F.coalesce(
            parsed[field],
            _refuse(F.lit(f"a line has no field {field!r}: "), F.left(line, F.lit(100))),
        )
        for name, field in wanted.items()
    }
    columns = {"value": line, **found}
    columns["value"] = F.when(parsed[_CORRUPT].isNotNull(), bad).otherwise(columns["value"])
    if "timestamp" in columns:
        columns["timestamp"] = _time(columns["timestamp"], StringType())
    return columns


def _table_columns(rows: DataFrame, row_format: RowFormat) -> dict[str, Column]:
    types = {field.name: field.dataType for field in rows.schema.fields}
    names = {"value": row_format.value, "key": row_format.key, "timestamp": row_format.timestamp}
    for what, name in names.items():
        if name is not None and name not in types:
            raise unknown_name(f"{what} column", name, types)
    whole = F.to_json(F.struct(*map(_column, types)), {"ignoreNullFields": "false"})
    columns = {"value": whole} | {
        what: _text(name, types) for what, name in names.items() if name is not None
    }
    if row_format.timestamp is not None:
        time = row_format.timestamp
        columns["timestamp"] = _time(_column(time), types[time])
    return columns


def _text(name: str, types: Mapping[str, DataType]) -> Column:
    is_stored = isinstance(types[name], BinaryType | StringType)
    return _column(name) if is_stored else _column(name).cast("string")


def _time(column: Column, kind: DataType) -> Column:
    """Return a time: a text of digits and a number are milliseconds since 1970."""
    if isinstance(kind, NumericType):
        time = F.timestamp_millis(column.cast("bigint"))
    elif isinstance(kind, StringType):
        is_number = column.rlike(r"^-?\d{1,18}$")
        time = F.when(is_number, F.timestamp_millis(column.try_cast("bigint"))).otherwise(
            column.try_cast("timestamp")
        )
    else:
        time = column.cast("timestamp")
    shown = F.coalesce(column.cast("string"), F.lit("null"))
    return F.coalesce(time, _refuse(F.lit("not a time: "), shown))


def _refuse(*text: Column) -> Column:
    return F.raise_error(F.concat(F.input_file_name(), F.lit(": "), *text))


def _column(name: str) -> Column:
    return F.col(f"`{_quote(name)}`")


def _quote(name: str) -> str:
    return name.replace("`", "``")


def _escape(path: str) -> str:
    """Spark takes these characters for a pattern."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)
