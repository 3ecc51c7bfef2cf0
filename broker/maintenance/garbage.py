"""Removing files that nothing names any more, after a time of grace, and those nothing ever named.

Journal files go in this order: a checkpoint, a `trim` commit, another checkpoint, then the files.
So two checkpoints cover what is removed, and a crash leaves files that the next cleaner finds.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import closing
from dataclasses import dataclass, field

from broker import index
from broker.errors import LogError, MissingFile
from broker.maintenance.delta_view import TABLE, Mirrored
from broker.naming import GARBAGE_AFTER_MS, is_garbage
from broker.reader import TopicReader
from broker.state import JournalFile, TopicState
from broker.topic import Topic

logger = logging.getLogger(__name__)

SEALED = "sealed"


@dataclass(slots=True)
class Removed:
    """What was removed: relative paths and their bytes."""

    paths: list[str] = field(default_factory=list)
    byte_count: int = 0


def clean(topic: Topic, reader: TopicReader, now: int, mirrored: Mirrored | None) -> Removed:
    """Remove what is not needed any more.

    Args:
        reader: of the same topic.
        mirrored: a state that the Delta log has shown, or none if nobody knows what it names. A
            sealed file retired since then stays: the Delta log may name it still.
    """
    removed = Removed()
    # First what can go without anything being written: on a full disk it makes room for the rest.
    _remove_unfinished(topic, removed)
    if mirrored is not None:
        _remove_sealed(topic, topic.refresh(), now, mirrored, removed)
    _trim(topic, now)
    state = topic.refresh()
    _remove_journal_files(topic, state, removed)
    _remove_pieces(topic, state, removed)
    _remove_unnamed_data(topic, reader, removed)
    return removed


def _trim(topic: Topic, now: int) -> None:
    state = topic.refresh()
    delay = state.settings["file.delete.delay.ms"]
    gone: list[JournalFile] = []
    for file in state.freed_files():
        if now - state.retired.get(f"journal/{file.first_number}", now) < delay:
            break
        gone.append(file)
    if gone:
        topic.write_checkpoint()
        topic.trim(gone[-1].end_number)
        topic.write_checkpoint()


def _remove_journal_files(topic: Topic, state: TopicState, removed: Removed) -> None:
    """Remove the files before the first one that the state names."""
    first = state.files[0].first_number if state.files else state.file_number
    for number in topic.covered_files():
        if number >= first:
            return
        # A later one may be removed nevertheless: this may have been left by who woke up too late.
        if not topic.storage.may_remove(topic.journal.file_path(number)):
            continue
        for data in _data_files(topic, number):
            _remove(topic, f"data/{data}", removed)
        _remove(topic, f"journal/{number:020d}.log", removed)
        _remove(topic, f"index/{number:020d}.arrow", removed)


def _remove_pieces(topic: Topic, state: TopicState, removed: Removed) -> None:
    """Where a journal file is kept in pieces: merge those of dead writers, remove old ones."""
    if not topic.storage.is_remote:
        return
    for file in state.files:
        path = topic.journal.file_path(file.first_number)
        topic.storage.merge(path, file.byte_length)
        if topic.storage.remove_pieces(path):
            removed.paths.append(f"journal/{file.first_number:020d}.log+")


def _data_files(topic: Topic, file_number: int) -> set[str]:
    """Return the data files that a journal file names; without its index they become garbage."""
    path = index.index_path(topic.directory, file_number)
    data = topic.storage.read(path)
    if data is None:
        return set()
    try:
        return index.FileIndex.decode(data, topic.storage.locate(path)).data_files()
    except LogError as error:
        logger.warning("%s Its data files are removed later.", error)
        return set()


def _remove_sealed(
    topic: Topic, state: TopicState, now: int, mirrored: Mirrored, removed: Removed
) -> None:
    delay = state.settings["table.delete.delay.ms"]
    for path, since in state.retired.items():
        name = path.removeprefix(f"{SEALED}/")
        if name != path and path in mirrored.retired and now - since >= delay:
            _remove(topic, path, removed)
            _remove(topic, f"{TABLE}/{name}", removed)
    named = {file.name for file in state.sealed} | mirrored.named
    for folder in topic.storage.list(f"{topic.directory}/{SEALED}"):
        for file in topic.storage.list(f"{topic.directory}/{SEALED}/{folder}"):
            name = f"{folder}/{file}"
            is_known = name in named or f"{SEALED}/{name}" in state.retired
            if not is_known and is_garbage(name, state.time):
                _remove(topic, f"{SEALED}/{name}", removed)
                _remove(topic, f"{TABLE}/{name}", removed)


def _remove_unnamed_data(topic: Topic, reader: TopicReader, removed: Removed) -> None:
    """Remove files of tasks whose commit never came."""
    names = topic.storage.list(f"{topic.directory}/data")
    old = {name for name in names if is_garbage(name, topic.state.time)}
    if not old:
        return
    reader.refresh()
    for name in sorted(old - reader.data_files()):
        _remove(topic, f"data/{name}", removed)


def _remove_unfinished(topic: Topic, removed: Removed) -> None:
    """Remove what killed processes left half made: a Parquet file may be large."""
    topic.storage.abort_uploads(topic.directory, GARBAGE_AFTER_MS)
    partitions = topic.storage.list(f"{topic.directory}/{SEALED}")
    for folder in ("data", "checkpoint", "index", *(f"{SEALED}/{one}" for one in partitions)):
        for name in topic.storage.unfinished(f"{topic.directory}/{folder}"):
            age = topic.storage.age_ms(f"{topic.directory}/{folder}/{name}")
            if age is not None and age > GARBAGE_AFTER_MS:
                _remove(topic, f"{folder}/{name}", removed)


def _remove(topic: Topic, path: str, removed: Removed) -> None:
    """Remove one file; what cannot be removed now is tried again next time."""
    full = f"{topic.directory}/{path}"
    with contextlib.suppress(LogError):
        file = topic.storage.open_file(full)
        if file is not None:
            with closing(file):
                try:
                    size = file.size()
                except MissingFile:
                    size = 0  # It was removed before; what is there was put by who woke up late.
            topic.storage.remove(full)
            removed.paths.append(path)
            # What is in the table is the same file by another name.
            removed.byte_count += 0 if path.startswith(f"{TABLE}/") else size
