"""Verifying one topic: its journal, and the files that only repeat what the journal says."""

from __future__ import annotations

import re

import numpy as np

from broker import checkpoint, index
from broker.errors import CorruptLog, LogError
from broker.home import topic_home
from broker.index import FileIndex
from broker.state import JournalFile, TopicState
from broker.storage import Storage
from broker.topic import Topic
from broker.verify.findings import TopicReport
from broker.verify.ledger import LedgerCheck
from broker.verify.sealed import SealedCheck
from broker.verify.topic_replay import TopicReplay

_INDEX_NAME = re.compile(r"(\d{20})\.arrow")
_COLUMNS = ("base", "count", "start", "length", "low", "high", "flags")


def verify_topic(storage: Storage, name: str, incarnation: int) -> TopicReport | None:
    """Read every byte of a topic; None if it is deleted."""
    check = _TopicCheck(storage, name, incarnation)
    check.run()
    is_gone = storage.exists(f"topics/{name}/{incarnation}.deleted")
    if is_gone or check.walk.replay.state.is_deleted:
        return None
    return check.findings.report(name, incarnation)


class _TopicCheck(LedgerCheck[TopicState]):
    """One topic incarnation, while it is verified."""

    def __init__(self, storage: Storage, name: str, incarnation: int) -> None:
        self._replay = TopicReplay(incarnation)
        home = topic_home(name, incarnation)
        super().__init__(storage, home, self._replay, checkpoint.decode)
        self._complete: set[int] = set()
        self._indexes: set[int] = set()
        self._sealed = SealedCheck(storage, self._directory, self.findings)

    def _list_more(self) -> None:
        self._indexes = self._list_indexes()

    def _check_more(self, first_needed: int) -> None:
        for number in sorted(self._indexes - self._complete):
            if number >= first_needed:
                self._check_other_index(number)
        self._check_sealed()

    # Where the journal begins.

    def _first_needed(self) -> int:
        """Return the first journal file that is named: all before it may be there, or gone."""
        firsts = [self._replay.trimmed_before, self._adopted_first or 0]
        # Written before files were removed, perhaps while the journal was walked.
        if (newest := self._newest_checkpoint()) is not None:
            firsts.append(self._first_file(newest))
        return max(firsts)

    def _first_file(self, state: TopicState) -> int:
        return state.files[0].first_number if state.files else state.file_number

    def _note_beginning(self) -> None:
        self.findings.note(
            f"the commits before {self.walk.first_file} are not in the journal any more: "
            "their records are sealed or removed"
        )

    # Indexes.

    def _list_indexes(self) -> set[int]:
        names = self._list("index")
        for name in names:
            if not _INDEX_NAME.fullmatch(name):
                self.findings.note(f"index/{name} is not an index")
        return {int(name[:20]) for name in names if _INDEX_NAME.fullmatch(name)}

    def _on_file_end(self, state: TopicState, is_sound: bool) -> None:
        """Compare the index of the file that has just ended with what a scan of it gives."""
        file = state.files[-1]
        self._complete.add(file.first_number)
        name = f"index/{file.first_number:020d}.arrow"
        try:
            stored = self._read_index(name)
            if stored is None:
                self.findings.note(f"{name} is not there; readers read the journal file instead")
            elif not is_sound:
                self.findings.note(f"{name} was not compared: its journal file is damaged")
            elif not _is_same_index(stored, self._scan(file), state.partition_count):
                self.findings.add(self._locate(name), 0, "the journal file holds other frames")
        except CorruptLog as damage:
            self.findings.add(damage.path, damage.position, damage.what)

    def _check_other_index(self, number: int) -> None:
        """Check an index whose file has no readable end, which is reported unless it is last."""
        name = f"index/{number:020d}.arrow"
        try:
            if self._read_index(name) is not None and number >= max(
                self.walk.valid_ends, default=0
            ):
                self.findings.add(self._locate(name), 0, "its journal file is not complete")
        except CorruptLog as damage:
            self.findings.add(damage.path, damage.position, damage.what)

    def _read_index(self, name: str) -> FileIndex | None:
        data = self._read(name)
        return None if data is None else FileIndex.decode(data, self._locate(name))

    def _scan(self, file: JournalFile) -> FileIndex:
        return index.scan(
            self._storage,
            self._directory,
            incarnation=self._incarnation,
            file_number=file.first_number,
            end_number=file.end_number,
            byte_length=file.byte_length,
        )

    # Sealed files.

    def _check_sealed(self) -> None:
        replay = self.walk.replay
        state = replay.state if replay.is_whole else self._newest_checkpoint()
        if state is None:
            return  # Which files there should be is not known; that is reported.
        self._sealed.check(state)
        if self._sealed.missing:
            self._sealed.report_missing({file.name for file in self._state_now(state).sealed})
        if unnamed := self._sealed.unnamed(self._state_now(state)):
            self.findings.note(f"sealed/ holds {len(unnamed)} files that no commit names (yet)")

    def _state_now(self, state: TopicState) -> TopicState:
        """Return the state as others have changed it since; of a damaged journal, `state`."""
        if self.findings.damage:
            return state
        try:
            topic = Topic(self._storage, self._home.name, self._incarnation)
        except LogError:
            return state
        topic.close()
        return topic.state

    # What is no damage but worth knowing.

    def _take_notes(self) -> None:
        if unnamed := set(self._list("data")) - self.walk.frames.named:
            self.findings.note(f"data/ holds {len(unnamed)} files that no commit names (yet)")
        super()._take_notes()


def _is_same_index(one: FileIndex, other: FileIndex, partition_count: int) -> bool:
    if len(one) != len(other):
        return False
    for partition in range(partition_count):
        left, right = one.partition(partition), other.partition(partition)
        if left.files != right.files:
            return False
        for column in _COLUMNS:
            if not np.array_equal(getattr(left, column), getattr(right, column)):
                return False
    return True
