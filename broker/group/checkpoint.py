"""Checkpoints of a group: its state before a commit as one Arrow file."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from broker import checked_file
from broker.errors import CorruptLog
from broker.group.state import (
    GroupState,
    KnownTopic,
    Member,
    Owner,
    Position,
    format_places,
    parse_places,
)
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
_OWNER = pa.struct(
    [
        ("topic", pa.string()),
        ("partition", pa.int64()),
        ("owner", pa.string()),
        ("generation", pa.int64()),
        ("target", pa.string()),
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
        ("config", pa.string()),
        ("generation", pa.int64()),
        ("version", pa.int64()),
        ("members", pa.string()),
        ("owners", pa.list_(_OWNER)),
        ("topics", pa.string()),
        ("late", pa.string()),
        ("is_unsettled", pa.bool_()),
        ("empty_since", pa.int64()),
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
        "config": json.dumps(state.config),
        "generation": state.generation,
        "version": state.version,
        "members": json.dumps([member.details() for member in state.members.values()]),
        "owners": _owner_rows(state),
        "topics": json.dumps(state.topics),
        "late": json.dumps(format_places(sorted(state.late))),
        "is_unsettled": state.is_unsettled,
        "empty_since": state.empty_since,
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
        config=json.loads(row["config"]),
        generation=row["generation"],
        version=row["version"],
        members={entry["member"]: Member.parse(entry) for entry in json.loads(row["members"])},
        owners={
            _place(entry): Owner(entry["owner"], entry["generation"])
            for entry in row["owners"]
            if entry["owner"] is not None
        },
        target={
            _place(entry): entry["target"] for entry in row["owners"] if entry["target"] is not None
        },
        topics={name: KnownTopic(*known) for name, known in json.loads(row["topics"]).items()},
        late=set(parse_places(json.loads(row["late"]))),
        is_unsettled=row["is_unsettled"],
        empty_since=row["empty_since"],
        positions={
            TopicPartition(entry.pop("topic"), entry.pop("partition")): Position(**entry)
            for entry in row["positions"]
        },
    )
    return state, row["boot_id"]


def _owner_rows(state: GroupState) -> list[dict[str, Any]]:
    """Return one row for each partition that has an owner or a target."""
    nobody = Owner("", 0)
    rows = []
    for place in {**state.owners, **state.target}:
        owner = state.owners.get(place, nobody)
        rows.append(
            {
                "topic": place.topic,
                "partition": place.partition,
                "owner": owner.member_id or None,
                "generation": owner.generation,
                "target": state.target.get(place),
            }
        )
    return rows


def _place(entry: dict[str, Any]) -> TopicPartition:
    return TopicPartition(entry["topic"], entry["partition"])
