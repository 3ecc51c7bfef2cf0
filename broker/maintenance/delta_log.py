"""A Delta log through the library `deltalake`: the files it names, and commits that change it.

Knows nothing of topics. All that is asked of the library is here; it is imported when it is first
needed, because it is optional and starts threads.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema
    from deltalake.transaction import AddAction, CommitProperties

logger = logging.getLogger(__name__)

PARTITION = "partition"
_READER_VERSION, _WRITER_VERSION = 1, 2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE = "↳"


class DeltaFailed(Exception):
    """The library, or the disk below it, could not do it; the Delta log is as it was."""


class Damaged(Exception):
    """This Delta log does not open, or is not of the shape that we give one."""


class Present(NamedTuple):
    """A file that a Delta log names now."""

    path: str
    byte_length: int
    partition: int | None


@dataclass(frozen=True, slots=True)
class Added:
    """A file to be named. Times are milliseconds; `bounds` are those of offset and time, if any.

    `changes_data` is false for one that only arranges records anew that were there before.
    """

    path: str
    byte_length: int
    partition: int
    time: int
    record_count: int
    offset_bounds: tuple[int, int] | None
    time_bounds: tuple[int, int] | None
    changes_data: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """A file to be named no more."""

    file: Present
    changes_data: bool


@dataclass(frozen=True, slots=True)
class Change:
    """What one Delta commit does.

    `versions` are Delta's `txn` actions: a number by name. Two commits at once that carry the same
    name collide, and only one of them is made.
    """

    time: int
    added: list[Added] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    note: dict[str, str] = field(default_factory=dict)


_is_forked = False
_told: set[str] = set()


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or "deltalake" in sys.modules


# The library's threads are not there in a forked child, and it panics without them.
os.register_at_fork(after_in_child=_note_fork)


def is_usable(location: str) -> bool:
    """Tell whether this process can keep a Delta log at a place; says once why not."""
    if _is_forked:
        return False
    if importlib.util.find_spec("deltalake") is None:
        _tell_once("the package deltalake is not installed; spark-log[table] installs it")
        return False
    if location.startswith("memory:"):
        return False  # No other library could read it.
    if "%" in location:
        # The library writes to one place and reads from another.
        _tell_once(
            f"deltalake cannot keep a table below a directory with % in its name: {location}"
        )
        return False
    return True


def _tell_once(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        logger.warning("no Delta table is kept: %s", reason)


class DeltaLog:
    """The Delta log of one table, at one version."""

    def __init__(self, location: str, options: Mapping[str, str] | None = None) -> None:
        """Open the table at a path or address.

        Args:
            options: of the store, as the library calls them.

        Raises:
            FileNotFoundError: there is none.
            Damaged: it cannot be used.
            DeltaFailed: it could not be read this time.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            self._table = DeltaTable(_uri(location), storage_options=dict(options or {}))
            # Some damage shows only when the actions are read.
            self.present = _present(self._table)
            shape = _shape(self._table)
        except TableNotFoundError:
            raise FileNotFoundError(location) from None
        except DeltaError as error:
            raise Damaged(_one_line(error)) from error
        except OSError as error:
            # Not damage: what passes must not cost the table its history.
            raise DeltaFailed(_one_line(error)) from error
        if shape != (_schema(), [PARTITION], _READER_VERSION, _WRITER_VERSION):
            raise Damaged("it has another schema, other partition columns or another protocol")

    def version_of(self, name: str) -> int | None:
        """Return the number that was committed last under a name."""
        from deltalake.exceptions import DeltaError

        try:
            return self._table.transaction_version(name)
        except (DeltaError, OSError) as error:
            raise DeltaFailed(_one_line(error)) from error

    def commit(self, change: Change) -> None:
        """Commit a change to the version that was opened, or to a later one that it goes with.

        Raises:
            DeltaFailed: it was not committed.
        """
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import RemoveAction

        removes = [
            RemoveAction(
                one.file.path,
                one.changes_data,
                change.time,
                one.file.byte_length,
                {PARTITION: None if one.file.partition is None else str(one.file.partition)},
            )
            for one in change.removed
        ]
        try:
            self._table.create_write_transaction(
                [*map(_add_action, change.added), *removes],
                "append",
                _schema(),
                [PARTITION],
                commit_properties=_properties(change),
            )
        except (DeltaError, OSError) as error:
            raise DeltaFailed(_one_line(error)) from error


def create(location: str, options: Mapping[str, str], name: str, change: Change) -> None:
    """Begin a Delta log, with the files that a change adds.

    Raises:
        DeltaFailed: it was not begun, or somebody else has just begun it.
    """
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import create_table_with_add_actions

    try:
        create_table_with_add_actions(
            _uri(location),
            _schema(),
            [_add_action(one) for one in change.added],
            partition_by=[PARTITION],
            name=name,
            storage_options=dict(options),
            commit_properties=_properties(change),
        )
    except (DeltaError, OSError) as error:
        raise DeltaFailed(_one_line(error)) from error


def _uri(location: str) -> str:
    # As an address, or the library would take some names for something else.
    return location if "://" in location else Path(location).as_uri()


def _schema() -> Schema:
    """The columns of sealed files, and the partition, which is in the path."""
    from deltalake import Field, Schema
    from deltalake.schema import ArrayType, PrimitiveType, StructType

    header = StructType(
        [Field("key", PrimitiveType("string")), Field("value", PrimitiveType("binary"))]
    )
    return Schema(
        [
            Field("key", PrimitiveType("binary")),
            Field("value", PrimitiveType("binary")),
            Field("headers", ArrayType(header, contains_null=True)),
            Field("timestamp", PrimitiveType("timestamp")),
            Field("timestampType", PrimitiveType("integer")),
            Field("offset", PrimitiveType("long")),
            Field(PARTITION, PrimitiveType("integer")),
        ]
    )


def _shape(table: DeltaTable) -> tuple[Schema, list[str], int, int]:
    protocol = table.protocol()
    return (
        table.schema(),
        table.metadata().partition_columns,
        protocol.min_reader_version,
        protocol.min_writer_version,
    )


def _present(table: DeltaTable) -> list[Present]:
    actions = pa.table(table.get_add_actions(flatten=True))
    places = [None] * actions.num_rows
    if f"partition.{PARTITION}" in actions.column_names:
        places = actions.column(f"partition.{PARTITION}").to_pylist()
    paths, sizes = (actions.column(name).to_pylist() for name in ("path", "size_bytes"))
    return [Present(*row) for row in zip(paths, sizes, places, strict=True)]


def _add_action(one: Added) -> AddAction:
    from deltalake.transaction import AddAction

    return AddAction(
        path=one.path,
        size=one.byte_length,
        partition_values={PARTITION: str(one.partition)},
        modification_time=one.time,
        data_change=one.changes_data,
        stats=json.dumps(_statistics(one)),
    )


def _statistics(one: Added) -> dict[str, object]:
    """Return what a reader may know without opening the file."""
    found: dict[str, object] = {"numRecords": one.record_count}
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    if one.offset_bounds is not None:
        low["offset"], high["offset"] = one.offset_bounds
    texts = [_time_text(time) for time in one.time_bounds or ()]
    if texts and None not in texts:
        low["timestamp"], high["timestamp"] = texts
    return found | {"minValues": low, "maxValues": high, "nullCount": dict.fromkeys(low, 0)}


def _time_text(time: int) -> str | None:
    """Return a time as Delta writes it; None for one that no calendar has."""
    try:
        moment = _EPOCH + timedelta(milliseconds=time)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _properties(change: Change) -> CommitProperties:
    from deltalake.transaction import CommitProperties, Transaction

    transactions: Iterable[tuple[str, int]] = sorted(change.versions.items())
    return CommitProperties(
        custom_metadata=change.note,
        app_transactions=[Transaction(name, version) for name, version in transactions],
    )


def _one_line(error: Exception) -> str:
    """Return what the library says and the causes that it names, without its stack trace."""
    first, *rest = _COLOUR.sub("", str(error)).splitlines() or [type(error).__name__]
    causes = [line.partition(_CAUSE)[2].strip() for line in rest if _CAUSE in line]
    return ": ".join([first.strip(), *causes])
