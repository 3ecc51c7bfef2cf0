"""After a power cut: find what survived, cut the rest, and say so.

In one boot of a machine a killed writer leaves a prefix. A power cut is different: pages that were
not synced are lost in any order. So the first writer of a new boot checks every byte that was not
known to be synced, cuts at the first commit that is not whole, keeps what it cut aside, and
commits `recover`: a new epoch, and the offsets at which it begins. A crash on the way leaves the
old boot id in `synced`, and the next writer does it all again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import pyarrow as pa

from broker import batch
from broker.commit import BY_REFERENCE, ROW, Applicable, Commit, Kind, apply
from broker.errors import CorruptLog
from broker.journal import Journal
from broker.synced import Synced

logger = logging.getLogger(__name__)

# A topic begins to exist when its first commit is there whole and synced.
_FIRST_COMMIT = (0, 1)


def survey(journal: Journal, state: Applicable, hint: Synced | None) -> None:
    """Under the lock: bring `state` and the journal to the last whole commit; cut what follows."""
    for commit in read_whole(journal, hint):
        apply(state, commit, journal.path)
    _cut(journal)


def read_whole(journal: Journal, hint: Synced | None) -> Iterator[Commit]:
    """Yield the commits after the cursor up to the first that is not whole, frames and all.

    Readers that come before the first writer see exactly what it will keep.

    Raises:
        CorruptLog: one of the commits that were synced is not whole.
    """
    certain = max(_FIRST_COMMIT, hint.place if hint is not None else _FIRST_COMMIT)
    while (commit := _read_one(journal, certain)) is not None:
        if commit.kind is Kind.END_OF_FILE:
            journal.seek(journal.number, 0, journal.number)
        yield commit
    if journal.open_current() is None:
        journal.check_exists()
    if journal.place[:2] < certain:
        raise CorruptLog(journal.path, journal.position, "synced commits are missing")


def _read_one(journal: Journal, certain: tuple[int, int]) -> Commit | None:
    """Return the next commit if it is whole."""
    place = journal.place
    try:
        commit = journal.read_one()
        if commit is not None and place[:2] >= certain:
            _check_frames(journal, commit)
        return commit
    except CorruptLog:
        if place[:2] < certain:
            raise
        journal.seek(*place)
        return None


def _check_frames(journal: Journal, commit: Commit) -> None:
    file = journal.open_current()
    assert file is not None
    for row in ROW.iter_unpack(commit.table):
        flags, length, start = row[1], row[5], row[6]
        if flags & BY_REFERENCE:
            continue  # Synced before the commit that names it.
        at = commit.position + start
        batch.check(pa.py_buffer(file.read(at, length)), file.path, at)


def _cut(journal: Journal) -> None:
    storage = journal.storage
    file = journal.open_current()
    lost = 0
    if file is not None:
        lost = file.size() - journal.position
        journal.cut_torn_tail()
        file.sync()
    folder = f"{journal.directory}/journal"
    for name in storage.list(folder):
        if name.endswith(".log") and int(name[:20]) > journal.file_number:
            aside = f"{journal.directory}/aside/{name}-{uuid.uuid4().hex[:8]}"
            storage.rename(f"{folder}/{name}", aside)
            lost += 1
    storage.sync_directory(folder)
    if lost:
        logger.warning(
            "%s lost unsynced commits in a power cut after commit %d; the rest is kept in %s/aside",
            journal.home.name,
            journal.number - 1,
            storage.locate(journal.directory),
        )
