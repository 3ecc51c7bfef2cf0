"""The Delta view: `table/`, the sealed files under a second name and a Delta log that names them.

The journal is the truth. Maintenance compares the files that the Delta log names with those that
the state does: what is missing is added, what is too much (outsiders' appends, what `OPTIMIZE`
made) is removed, links that are gone (outsiders' `VACUUM`) are made again, and a Delta log that is
lost, damaged or of another shape is put aside and begun anew. The log itself never reads `table/`.

One Delta commit brings the table to what the state says. For each partition that it touches it
carries `txn(spark-log/<topic>/<incarnation>/<partition>, end)`: the end of the offsets that the
table has ever held. Two who mirror at once collide there, and only files with offsets behind it
are said to change the data: a stream over the table sees each record once, whatever is merged or
compacted. The state is looked at after the Delta log is: who slept before, or in between, brings
the table to a state that is no older than the one it shows, or collides.
A crash before the Delta commit leaves links, which the next round finds in place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

from broker.errors import CorruptLog, StorageError
from broker.maintenance import delta_log
from broker.maintenance.delta_log import Added, Change, Damaged, DeltaFailed, DeltaLog, Present
from broker.maintenance.delta_log import Removed as RemovedFile
from broker.naming import born_ms
from broker.parquet import SealedReader
from broker.sealed import SealedFile
from broker.state import TopicState
from broker.storage import LocalStorage
from broker.topic import Topic

logger = logging.getLogger(__name__)

TABLE = "table"
_DELTA_LOG = f"{TABLE}/_delta_log"
# 64 characters: a digest of what was last compared and found, or made, equal. Only a hint that
# saves opening the Delta log; missing, torn or old, it does not match.
_HINT = "mirrored"


class Mirrored(NamedTuple):
    """A state that the table was brought to: the sealed files that it named, and retired ones.

    Those that were retired by then no table of a later state names, either.
    """

    named: frozenset[str]
    retired: frozenset[str]


def mirror(topic: Topic) -> Mirrored | None:
    """Bring the table to what the state says.

    None: the table could not be kept, so nobody knows what it names.
    """
    found = _mirrored(topic.refresh())
    if not found.named and not _has_log(topic):
        return found
    if not delta_log.is_usable(_location(topic)):
        return None if _has_log(topic) else found
    for folder in (TABLE, _DELTA_LOG):
        _make_way(topic, folder)
    _link(topic, found.named)
    seen = _digest(topic, found.named)
    if topic.storage.read(f"{topic.directory}/{_HINT}") == seen:
        return found
    try:
        found = _reconcile(topic)
    except DeltaFailed as error:
        where = topic.storage.locate(f"{topic.directory}/{TABLE}")
        logger.warning("the Delta table %s is behind until the next maintenance: %s", where, error)
        return None
    # While the Delta log did not name them yet, a `VACUUM` may have taken them for garbage.
    _link(topic, found.named)
    # What was there before the comparison: whatever changed since is found the next time.
    topic.storage.overwrite(f"{topic.directory}/{_HINT}", seen)
    return found


def _mirrored(state: TopicState) -> Mirrored:
    return Mirrored(frozenset(file.name for file in state.sealed), frozenset(state.retired))


def _has_log(topic: Topic) -> bool:
    return bool(topic.storage.list(f"{topic.directory}/{_DELTA_LOG}"))


def _link(topic: Topic, names: Iterable[str]) -> None:
    """Let every sealed file have its second name, where a file can have one."""
    if not isinstance(topic.storage, LocalStorage):
        return
    held: dict[str, set[str]] = {}
    for name in sorted(names):
        folder, _, file = name.rpartition("/")
        if folder not in held:
            _make_way(topic, f"{TABLE}/{folder}")
            held[folder] = set(topic.storage.list(f"{topic.directory}/{TABLE}/{folder}"))
        source = f"{topic.directory}/sealed/{name}"
        # One that is lost is not the table's to report: readers do, and verifying.
        if file not in held[folder] and topic.storage.exists(source):
            try:
                topic.storage.link(source, f"{topic.directory}/{TABLE}/{name}")
            except StorageError:
                # Others may have replaced it, and removed it this very moment.
                if topic.storage.exists(source):
                    raise


def _make_way(topic: Topic, folder: str) -> None:
    """Put aside a plain file that somebody has put where a folder belongs."""
    path = f"{topic.directory}/{folder}"
    if isinstance(topic.storage, LocalStorage) and topic.storage.is_file(path):
        now = topic.storage.clock() // 1_000_000
        _put_aside(topic, path, "it is a file, and a folder belongs there", now)


def _put_aside(topic: Topic, path: str, why: object, now: int) -> None:
    aside = f"{topic.directory}/aside/{path.rpartition('/')[2]}-{now}"
    logger.warning(
        "%s is begun anew; the old one is %s: %s",
        topic.storage.locate(path),
        topic.storage.locate(aside),
        why,
    )
    topic.storage.rename(path, aside)


def _digest(topic: Topic, names: Iterable[str]) -> bytes:
    """Return a digest of what the state names and of the files of the Delta log."""
    stamps = topic.storage.stamps(f"{topic.directory}/{_DELTA_LOG}")
    return hashlib.sha256(json.dumps([sorted(names), stamps]).encode()).hexdigest().encode()


def _reconcile(topic: Topic) -> Mirrored:
    """Commit to the Delta log how it differs from the state."""
    now = topic.storage.clock() // 1_000_000
    opened = _open(topic, now)
    state = topic.refresh()
    found = _mirrored(state)
    base = _base(topic)
    present = [] if opened is None else [_named(file, base) for file in opened.present]
    wanted = {file.name: file for file in state.sealed}
    known = {file.path for file in present}
    missing = [file for name, file in wanted.items() if name not in known]
    surplus = [file for file in present if file.path not in wanted]
    if opened is not None and not missing and not surplus:
        return found
    _link(topic, (file.name for file in missing))
    touched = {file.partition for file in missing} | {file.partition for file in surplus}
    held = {
        partition: 0 if opened is None else opened.version_of(_transaction(topic, partition)) or 0
        for partition in range(state.partition_count)
        if partition in touched
    }
    change = Change(
        time=now,
        added=[_added(topic, file, file.end > held[file.partition]) for file in missing],
        removed=_removed(missing, surplus, held, base),
        versions={
            _transaction(topic, partition): max(end, state.sealed_ends[partition])
            for partition, end in held.items()
        },
        note={"sparkLogCommit": str(state.number)},
    )
    if opened is None:
        options = topic.storage.delta_options()
        delta_log.create(_location(topic), options, topic.name, change)
    else:
        opened.commit(change)
    return found


def _open(topic: Topic, now: int) -> DeltaLog | None:
    """Open the Delta log; one that cannot be used is put aside."""
    try:
        return DeltaLog(_location(topic), topic.storage.delta_options())
    except FileNotFoundError:
        return None
    except Damaged as damage:
        _put_aside(topic, f"{topic.directory}/{_DELTA_LOG}", damage, now)
        return None


def _added(topic: Topic, file: SealedFile, changes_data: bool) -> Added:
    times = None
    if file.record_count:
        # Delta keeps milliseconds: rounded outwards, the bounds hold whoever reads them.
        times = file.min_timestamp // 1000, -(-file.max_timestamp // 1000)
    return Added(
        path=_base(topic) + file.name,
        byte_length=file.byte_length,
        partition=file.partition,
        time=born_ms(file.name) or 0,
        record_count=file.record_count,
        offset_bounds=_offset_bounds(topic, file),
        time_bounds=times,
        changes_data=changes_data,
    )


def _offset_bounds(topic: Topic, file: SealedFile) -> tuple[int, int] | None:
    """Return the first and the last offset that a file has: Delta answers queries from them."""
    if not file.record_count:
        return None
    if file.record_count == file.end - file.start:
        return file.start, file.end - 1
    try:
        opened = SealedReader(topic.storage, topic.directory, file)
        try:
            return opened.offset_bounds
        finally:
            opened.close()
    except CorruptLog:
        # Not the table's to report, either: without bounds its readers open the file.
        return None


def _removed(
    missing: Sequence[SealedFile], surplus: Sequence[Present], held: Mapping[int, int], base: str
) -> list[RemovedFile]:
    """Return what is to be removed: housekeeping, of which a stream need not hear.

    But for partitions where a file has both offsets that the table has held and others: it was
    merged before it was mirrored. A stream cannot take just the new ones, so it must stop there.
    """
    mixed = {file.partition for file in missing if file.start < held[file.partition] < file.end}
    return [
        RemovedFile(file._replace(path=_address(file.path, base)), file.partition in mixed)
        for file in surplus
    ]


def _base(topic: Topic) -> str:
    """Return what comes before a sealed file's name in the Delta log.

    Where files have no second name the Delta log names the sealed files themselves, by their whole
    address: they lie outside the table's folder, where no outsider's `VACUUM` comes.
    """
    return topic.storage.locate(f"{topic.directory}/sealed/") if topic.storage.is_remote else ""


def _named(file: Present, base: str) -> Present:
    """Return a file under the name that the state has for it; others have none."""
    if not base:
        return file
    path = unquote(file.path)
    return file._replace(path=path.removeprefix(base) if path.startswith(base) else file.path)


def _address(path: str, base: str) -> str:
    """Return what the Delta log calls a file."""
    return base + path if base and "://" not in path and path.startswith("partition=") else path


def _transaction(topic: Topic, partition: int) -> str:
    return f"spark-log/{topic.name}/{topic.incarnation}/{partition}"


def _location(topic: Topic) -> str:
    return topic.storage.locate(f"{topic.directory}/{TABLE}")
