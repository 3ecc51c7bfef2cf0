"""The plan of a load: which files are its chunks. Once made, it stays: it is kept in the log.

A chunk is one commit, known by the name of the load and the number of the chunk. That is worth
something only if chunk 7 is the same files each time, also after the directory has got others. So
the plan is written down before anything is loaded: as records of the topic `__loads`, one for each
chunk, key the load, value `{"chunk": 7, "rows": {"format": "csv", ...}, "files": [[path, bytes,
modified_ms], ...]}`. Files that come later become further chunks.

Planners that are at work at once meet in a commit: each adds its chunks under (load, number of the
last chunk), the second one's commit is passed over, and it uses what the first one wrote. A planner
that is killed has written all of its chunks or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

import broker
from broker import LogError

TOPIC = "__loads"
_CONFIG = {"retention.ms": -1}
# A chunk is one record, and a record has a size.
_FILES_MAX = 1000


class LoadRefused(LogError):
    """What is to be loaded is not what it was, or is not there."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was planned."""

    path: str
    byte_count: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Files that are loaded by one commit."""

    number: int
    files: tuple[SourceFile, ...]
    rows: dict[str, object]

    @property
    def byte_count(self) -> int:
        return sum(file.byte_count for file in self.files)


def make_plan(
    log: broker.Log,
    load: str,
    found: Sequence[SourceFile],
    *,
    rows: Mapping[str, object],
    chunk_bytes: int,
    done: int,
) -> list[Chunk]:
    """Return all chunks of a load: those that were planned before, then the files that are new.

    Args:
        rows: how rows become records; the same for all chunks of a load.
        done: how many chunks have been loaded.

    Raises:
        LoadRefused: a file is not what it was when it was loaded, or is gone before it was.
    """
    _ensure_topic(log)
    known = _read(log, load)
    _check_rows(known, rows)
    _check(known, found, done)
    new = _new_chunks(known, found, rows, chunk_bytes)
    if not new:
        return known
    _write(log, load, new)
    # Another one may have been faster; then its chunks count.
    return _read(log, load)


def _new_chunks(
    known: Sequence[Chunk],
    found: Sequence[SourceFile],
    rows: Mapping[str, object],
    chunk_bytes: int,
) -> list[Chunk]:
    """Put the files that no chunk has into chunks, in the order of their names."""
    planned = {file.path for chunk in known for file in chunk.files}
    groups: list[list[SourceFile]] = []
    room = 0
    for file in sorted((one for one in found if one.path not in planned), key=lambda one: one.path):
        if not groups or file.byte_count > room or len(groups[-1]) == _FILES_MAX:
            groups.append([])
            room = chunk_bytes
        groups[-1].append(file)
        room -= file.byte_count
    return [
        Chunk(number, tuple(files), dict(rows))
        for number, files in enumerate(groups, start=len(known))
    ]


def _check_rows(known: Sequence[Chunk], rows: Mapping[str, object]) -> None:
    """Refuse to load one half of the files in one way, and the other in another."""
    for chunk in known:
        for name, value in chunk.rows.items():
            if rows[name] != value:
                raise LoadRefused(
                    f"this load was begun with {name}={value!r}, not {rows[name]!r}: use the same, "
                    "or begin another load by --name"
                )


def _check(known: Sequence[Chunk], found: Iterable[SourceFile], done: int) -> None:
    now = {file.path: file for file in found}
    for chunk in known:
        for file in chunk.files:
            is_loaded = chunk.number < done
            there = now.get(file.path)
            if there is None and not is_loaded:
                raise LoadRefused(
                    f"{file.path} was to be loaded, and is gone: put it back, or begin another "
                    "load by --name"
                )
            if there is not None and there != file and is_loaded:
                raise LoadRefused(
                    f"{file.path} has changed since it was loaded: give what is new a file of its "
                    "own, or load all files again by another --name"
                )


def _ensure_topic(log: broker.Log) -> None:
    if TOPIC not in log.topics():
        with suppress(broker.TopicExists):
            log.create_topic(TOPIC, 1, config=_CONFIG)


def _read(log: broker.Log, load: str) -> list[Chunk]:
    chunks = []
    with log.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        while batches := consumer.poll_batches(timeout_ms=0):
            for batch in batches.values():
                keys = batch.column("key").to_pylist()
                for key, value in zip(keys, batch.column("value").to_pylist(), strict=True):
                    if key == load.encode():
                        chunks.append(_parse(value))
    return chunks


def _parse(value: bytes) -> Chunk:
    found = json.loads(value)
    files = tuple(SourceFile(*file) for file in found["files"])
    return Chunk(found["chunk"], files, found["rows"])


def _write(log: broker.Log, load: str, chunks: Sequence[Chunk]) -> None:
    values = [
        json.dumps(
            {
                "chunk": chunk.number,
                "rows": chunk.rows,
                "files": [[one.path, one.byte_count, one.modified_ms] for one in chunk.files],
            }
        )
        for chunk in chunks
    ]
    table = pa.table({"key": pa.array([load] * len(values)), "value": pa.array(values)})
    stage = log.stage(TOPIC, compression_type="zstd")
    try:
        stage.write(table)
        staged = stage.finish()
    finally:
        stage.close()
    log.commit_staged(TOPIC, [staged], (load, chunks[-1].number))
