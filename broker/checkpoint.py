"""Checkpoints: the state before a commit as one Arrow file, so that nobody replays history.

`checkpoint/<number>.arrow` covers only commits that are synced. `checkpoint/<number>.soft.arrow`
may cover more: it is written often and cheaply, and believed only in the boot that wrote it, since
a power cut may take the commits away. Any checkpoint may be missing or damaged: the one before it,
or the journal from its beginning, says the same. Where that beginning was removed, two checkpoints
cover it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import pyarrow as pa

from broker import checked_file, sealed
from broker.errors import AlreadyExists, CorruptLog
from broker.sealed import SealedFiles
from broker.state import JournalFile, ProducerEntry, TopicState, TransactionEntry
from broker.storage import Storage

logger = logging.getLogger(__name__)


class _Numbered(Protocol):
    incarnation: int


Stored = TypeVar("Stored", bound=_Numbered)

_KEPT = 2
_OFFSETS = pa.list_(pa.int64())
_SCHEMA = pa.schema(
    [
        ("boot_id", pa.string()),
        ("incarnation", pa.int64()),
        ("number", pa.int64()),
        ("time", pa.int64()),
        ("epoch", pa.int64()),
        ("config", pa.string()),
        ("starts", _OFFSETS),
        ("ends", _OFFSETS),
        ("file_number", pa.int64()),
        ("file_starts", _OFFSETS),
        ("file_max_timestamp", pa.int64()),
        ("position", pa.int64()),
        ("is_deleted", pa.bool_()),
        (
            "producers",
            pa.list_(
                pa.struct(
                    [
                        ("id", pa.uint64()),
                        ("epoch", pa.int64()),
                        ("sequence", pa.int64()),
                        ("token", pa.binary()),
                        ("time", pa.int64()),
                        ("is_transactional", pa.bool_()),
                        ("table", pa.binary()),
                    ]
                )
            ),
        ),
        (
            "transactions",
            pa.list_(
                pa.struct(
                    [
                        ("name", pa.string()),
                        ("version", pa.int64()),
                        ("time", pa.int64()),
                        ("table", pa.binary()),
                    ]
                )
            ),
        ),
        ("epochs", pa.list_(pa.struct([("epoch", pa.int64()), ("ends", _OFFSETS)]))),
        (
            "files",
            pa.list_(
                pa.struct(
                    [
                        ("first_number", pa.int64()),
                        ("end_number", pa.int64()),
                        ("byte_length", pa.int64()),
                        ("max_timestamp", pa.int64()),
                        ("start_offsets", _OFFSETS),
                        ("time", pa.int64()),
                    ]
                )
            ),
        ),
        ("file_time", pa.int64()),
        ("sealed_ends", _OFFSETS),
        ("cleaned_ends", _OFFSETS),
        ("retired", pa.list_(pa.struct([("path", pa.string()), ("time", pa.int64())]))),
        ("sealed", pa.list_(pa.struct(list(sealed.SCHEMA)))),
    ]
)


def encode(state: TopicState, boot_id: str) -> bytes:
    """Return the checkpoint file of a state; `boot_id` is empty if all of it is synced."""
    row = {
        "boot_id": boot_id,
        "incarnation": state.incarnation,
        "number": state.number,
        "time": state.time,
        "epoch": state.epoch,
        "config": json.dumps(state.given),
        "starts": state.starts,
        "ends": state.ends,
        "file_number": state.file_number,
        "file_starts": state.file_starts,
        "file_max_timestamp": state.file_max_timestamp,
        "position": state.position,
        "is_deleted": state.is_deleted,
        "producers": [{"id": key, **last._asdict()} for key, last in state.producers.items()],
        "transactions": [
            {"name": name, **last._asdict()} for name, last in state.transactions.items()
        ],
        "epochs": [{"epoch": epoch, "ends": ends} for epoch, ends in state.epochs],
        "files": [file._asdict() for file in state.files],
        "file_time": state.file_time,
        "sealed_ends": state.sealed_ends,
        "cleaned_ends": state.cleaned_ends,
        "retired": [{"path": path, "time": time} for path, time in state.retired.items()],
    }
    files = state.sealed.encode()
    columns = [
        pa.array([row[field.name]], field.type)
        if field.name != "sealed"
        else pa.ListArray.from_arrays(pa.array([0, len(files)], pa.int32()), files)
        for field in _SCHEMA
    ]
    return checked_file.encode(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))


def decode(data: bytes, path: str) -> tuple[TopicState, str]:
    """Return the state and the boot id of a checkpoint file."""
    batch = checked_file.decode(data, path)
    if batch.num_rows != 1:
        raise CorruptLog(path, 0, "a checkpoint has one row")
    files = None
    if "sealed" in batch.schema.names:
        # Not as Python objects: there may be thousands, and few who open a topic need them.
        files = batch.column("sealed").flatten()
        batch = batch.drop_columns(["sealed"])
    (row,) = batch.to_pylist()
    # Checkpoints of before sealing have no such columns: nothing was sealed.
    nothing = [0] * len(row["ends"])
    state = TopicState(
        incarnation=row["incarnation"],
        number=row["number"],
        time=row["time"],
        epoch=row["epoch"],
        given=json.loads(row["config"]),
        starts=row["starts"],
        ends=row["ends"],
        producers={entry.pop("id"): ProducerEntry(**entry) for entry in row["producers"]},
        transactions={
            entry.pop("name"): TransactionEntry(**entry) for entry in row["transactions"]
        },
        epochs=[(entry["epoch"], tuple(entry["ends"])) for entry in row["epochs"]],
        files=[
            JournalFile(**{**entry, "start_offsets": tuple(entry["start_offsets"])})
            for entry in row["files"]
        ],
        file_number=row["file_number"],
        file_starts=tuple(row["file_starts"]),
        file_max_timestamp=row["file_max_timestamp"],
        file_time=row.get("file_time", 0),
        sealed=SealedFiles(files),
        sealed_ends=row.get("sealed_ends", nothing),
        cleaned_ends=row.get("cleaned_ends", list(nothing)),
        retired={entry["path"]: entry["time"] for entry in row.get("retired", ())},
        position=row["position"],
        is_deleted=row["is_deleted"],
    )
    return state, row["boot_id"]


def write(storage: Storage, directory: str, number: int, data: bytes, *, soft: bool) -> None:
    """Store an encoded checkpoint and remove the older ones of its sort."""
    try:
        storage.create(f"{directory}/{_name(number, soft)}", data, sync=not soft)
    except AlreadyExists:
        return
    names = [name for name in storage.list(directory) if _is_soft(name) == soft]
    for name in names[:-_KEPT]:
        storage.remove(f"{directory}/{name}")


def read_newest(
    storage: Storage,
    directory: str,
    incarnation: int,
    decode: Callable[[bytes, str], tuple[Stored, str]],
) -> Stored | None:
    """Return the newest state that can be believed, or None.

    Args:
        decode: returns the state and the boot id of a checkpoint file.
    """
    names = storage.list(directory)
    while names:
        path = f"{directory}/{names.pop()}"
        data = storage.read(path)
        if data is None:
            # Newer ones have taken its place since: look again, or it would seem that none is left.
            names = storage.list(directory)
            continue
        try:
            state, boot_id = decode(data, storage.locate(path))
        except CorruptLog as error:
            logger.warning("%s Going on with an older checkpoint.", error)
            continue
        if state.incarnation == incarnation and boot_id in ("", storage.boot_id):
            return state
    return None


def durable_numbers(storage: Storage, directory: str) -> list[int]:
    """Return the numbers of the checkpoints that survive a power cut, in order."""
    return [int(name[:20]) for name in storage.list(directory) if not _is_soft(name)]


def drop_soft(storage: Storage, directory: str) -> bool:
    """Remove all soft checkpoints; tell whether there were any."""
    names = [name for name in storage.list(directory) if _is_soft(name)]
    for name in names:
        storage.remove(f"{directory}/{name}")
    return bool(names)


def drop_unsynced(storage: Storage, directory: str, number: int) -> None:
    """After a power cut: remove what may describe commits that are gone."""
    for name in storage.list(directory):
        if _is_soft(name) or name >= _name(number + 1, soft=False):
            storage.remove(f"{directory}/{name}")


def _name(number: int, soft: bool) -> str:
    return f"{number:020d}.soft.arrow" if soft else f"{number:020d}.arrow"


def _is_soft(name: str) -> bool:
    return name.endswith(".soft.arrow")
