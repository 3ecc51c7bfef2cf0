"""Checkpoints of a group: its state before a commit as one Arrow file."""

from __future__ import annotations

import pyarrow as pa

from broker import checked_file
from broker.errors import CorruptLog
from broker.group.state import GroupState, Position
from broker.records import TopicPartition

_POSITION = pa.struct(
    [
        ("topic", pa.string()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("incarnation", pa.int64()),
        ("epoch", pa.int64()),
        ("time", pa.int64()),
        ("metadata", pa.string()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("boot_id", pa.string()),
        ("incarnation", pa.int64()),
        ("number", pa.int64()),
        ("time", pa.int64()),
        ("epoch", pa.int64()),
        ("file_number", pa.int64()),
        ("position", pa.int64()),
        ("is_deleted", pa.bool_()),
        ("positions", pa.list_(_POSITION)),
    ]
)


def encode(state: GroupState, boot_id: str) -> bytes:
    """Return the checkpoint file of a state; `boot_id` is empty if all of it is synced."""
    row = {
        "boot_id": boot_id,
        "incarnation": state.incarnation,
        "number": state.number,
        "time": state.time,
        "epoch": state.epoch,
        "file_number": state.file_number,
        "position": state.position,
        "is_deleted": state.is_deleted,
        "positions": [
            {"topic": place.topic, "partition": place.partition, **position._asdict()}
            for place, position in state.positions.items()
        ],
    }
    return checked_file.encode(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))


def decode(data: bytes, path: str) -> tuple[GroupState, str]:
    """Return the state and the boot id of a checkpoint file."""
    rows = checked_file.decode(data, path).to_pylist()
    if len(rows) != 1:
        raise CorruptLog(path, 0, "a checkpoint has one row")
    row = rows[0]
    state = GroupState(
        incarnation=row["incarnation"],
        number=row["number"],
        time=row["time"],
        epoch=row["epoch"],
        file_number=row["file_number"],
        position=row["position"],
        is_deleted=row["is_deleted"],
        positions={
            TopicPartition(entry.pop("topic"), entry.pop("partition")): Position(**entry)
            for entry in row["positions"]
        },
    )
    return state, row["boot_id"]
