"""Verifying one topic: its journal, and the files that only repeat what the journal says.

Nothing is changed and no lock is taken. Files beside the journal are listed before the journal is:
whatever they describe must be in it.
"""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np

from broker import checkpoint, index
from broker.errors import CorruptLog, LogError, StorageError
from broker.index import FileIndex
from broker.state import JournalFile, TopicState
from broker.storage import LocalStorage
from broker.synced import Synced
from broker.topic import Topic
from broker.verify.findings import Findings, TopicReport
from broker.verify.journal import JournalWalk
from broker.verify.sealed import SealedCheck

_CHECKPOINT_NAME = re.compile(r"(\d{20})(\.soft)?\.arrow")
_INDEX_NAME = re.compile(r"(\d{20})\.arrow")
_COLUMNS = ("base", "count", "start", "length", "low", "high", "flags")
_HINT_LOOKS = 3


def verify_topic(storage: LocalStorage, name: str, incarnation: int) -> TopicReport | None:
    """Read every byte of a topic; None if it is deleted."""
    check = _TopicCheck(storage, name, incarnation)
    check.run()
    is_gone = storage.exists(f"topics/{name}/{incarnation}.deleted")
    if is_gone or check.walk.replay.state.is_deleted:
        return None
    return check.findings.report(name, incarnation)


class _TopicCheck:
    """One topic incarnation, while it is verified."""

    def __init__(self, storage: LocalStorage, name: str, incarnation: int) -> None:
        self._storage = storage
        self._name = name
        self._incarnation = incarnation
        self._topic_directory = f"topics/{name}"
        self._directory = f"topics/{name}/{incarnation}"
        self._complete: set[int] = set()
        self._adopted_first: int | None = None
        self.findings = Findings()
        self.walk = JournalWalk(
            storage,
            self._directory,
            incarnation,
            self.findings,
            on_commit=self._on_commit,
            on_file_end=self._check_index,
        )
        self._sealed = SealedCheck(storage, self._directory, self.findings)

    def run(self) -> None:
        hint = self._read_hint()
        self._checkpoints = self._list_checkpoints()
        indexes = self._list_indexes()
        self.walk.run()
        first_needed = self._first_needed()
        self.walk.settle(first_needed)
        self._check_beginning(first_needed)
        self._check_hint(hint, first_needed)
        for number, names in self._checkpoints.items():
            self._check_unreached(names, is_before=number < self.walk.first_file)
        for number in sorted(indexes - self._complete):
            if number >= first_needed:
                self._check_other_index(number)
        self._check_sealed()
        self._take_notes()

    def _locate(self, path: str) -> str:
        return self._storage.locate(f"{self._directory}/{path}")

    def _list(self, folder: str) -> list[str]:
        return self._storage.list(f"{self._directory}/{folder}")

    def _read(self, path: str) -> bytes | None:
        """Return a file's bytes; None if it has gone, or cannot be read, which is reported."""
        try:
            return self._storage.read(f"{self._directory}/{path}")
        except StorageError as error:
            self.findings.add(self._locate(path), 0, f"the file cannot be read: {error}")
            return None

    # Where the journal begins.

    def _first_needed(self) -> int:
        """Return the first journal file that is named: all before it may be there, or gone."""
        firsts = [self.walk.replay.trimmed_before, self._adopted_first or 0]
        # Written before files were removed, perhaps while the journal was walked.
        if (newest := self._newest_checkpoint()) is not None:
            firsts.append(_first_file(newest))
        return max(firsts)

    def _newest_checkpoint(self) -> TopicState | None:
        folder = f"{self._directory}/checkpoint"
        try:
            return checkpoint.read_newest(
                self._storage, folder, self._incarnation, checkpoint.decode
            )
        except (LogError, LookupError, TypeError, ValueError):
            return None  # It is reported where all checkpoints are read.

    def _check_beginning(self, first_needed: int) -> None:
        if not self.walk.first_file or first_needed < self.walk.first_file:
            return  # It begins with the first commit, or what is missing there is reported.
        # One that was listed may have made way for a newer one since.
        if self._adopted_first is None and self._newest_checkpoint() is None:
            self.findings.add(
                self._locate("checkpoint"),
                0,
                f"no checkpoint can be read that says what the commits before "
                f"{self.walk.first_file} said; they were removed from the journal",
            )
        else:
            self.findings.note(
                f"the commits before {self.walk.first_file} are not in the journal any more: "
                "their records are sealed or removed"
            )

    # How far the journal is synced.

    def _read_hint(self) -> Synced | None:
        for _ in range(_HINT_LOOKS):  # It is overwritten in place: one look may see half of it.
            hint = Synced.read(self._storage, self._directory)
            if hint is not None:
                return hint
        is_there = self._storage.exists(f"{self._directory}/synced")
        what = "the file's checksum does not match" if is_there else "the file is missing"
        self.findings.add(self._locate("synced"), 0, what)
        return None

    def _check_hint(self, hint: Synced | None, first_needed: int) -> None:
        if hint is None or hint.file_number < first_needed:
            return
        if self.findings.damage and hint.boot_id != self._storage.boot_id:
            self.findings.note(
                f"nobody has written since the machine was started; after byte {hint.position} of "
                f"journal/{hint.file_number:020d}.log, what was not synced may be damaged by a "
                "power cut, and the next writer cuts it there"
            )
        end = self.walk.valid_ends.get(hint.file_number)
        path = self._locate(f"journal/{hint.file_number:020d}.log")
        if end is None:
            self.findings.add(path, 0, "the file is missing; `synced` says that it was on disk")
        elif end < hint.position:
            self.findings.add(
                path, end, f"commits are missing: `synced` says that {hint.position} bytes were "
                "on disk"
            )  # fmt: skip

    # Checkpoints.

    def _list_checkpoints(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in self._list("checkpoint"):
            match = _CHECKPOINT_NAME.fullmatch(name)
            if match is None:
                self.findings.note(f"checkpoint/{name} is not a checkpoint")
            else:
                found.setdefault(int(match[1]), []).append(name)
        return found

    def _on_commit(self, state: TopicState, is_certain: bool) -> None:
        for name in self._checkpoints.pop(state.number, ()):
            stored = self._read_checkpoint(name)
            if stored is None:
                continue
            if not is_certain and self.walk.has_gap and self._adopted_first is None:
                is_certain = self._adopt(stored, name)
                state = self.walk.replay.state
            elif not is_certain:
                self.findings.note(
                    f"checkpoint/{name} was not compared: commits before it are damaged"
                )
            elif wrong := _differences(stored, state):
                path = self._locate(f"checkpoint/{name}")
                self.findings.add(path, 0, f"the journal says otherwise: {', '.join(wrong)}")

    def _adopt(self, stored: TopicState, name: str) -> bool:
        """Let the first checkpoint say what the removed commits said."""
        if wrong := self.walk.replay.adopt(stored):
            path = self._locate(f"checkpoint/{name}")
            self.findings.add(path, 0, f"the journal says otherwise: {', '.join(wrong)}")
            return False
        self._adopted_first = _first_file(stored)
        return True

    def _check_unreached(self, names: list[str], *, is_before: bool) -> None:
        for name in names:
            stored = self._read_checkpoint(name)
            if stored is None or is_before:
                continue
            path = self._locate(f"checkpoint/{name}")
            self.findings.add(
                path, 0, f"it covers {stored.number} commits, and the journal does not hold them"
            )

    def _read_checkpoint(self, name: str) -> TopicState | None:
        """Return a checkpoint that readers would believe."""
        path = f"checkpoint/{name}"
        data = self._read(path)
        if data is None:
            return None
        is_soft = name.endswith(".soft.arrow")
        try:
            state, boot_id = checkpoint.decode(data, self._locate(path))
        except (LogError, LookupError, TypeError, ValueError) as error:
            what = error.what if isinstance(error, CorruptLog) else f"it does not open: {error!r}"
            self.findings.add(self._locate(path), 0, what)
            return None
        if state.incarnation != self._incarnation or state.number != int(name[:20]):
            self.findings.add(self._locate(path), 0, "it is another checkpoint than its name says")
        elif is_soft != bool(boot_id):
            self.findings.add(self._locate(path), 0, "its name and its boot id do not go together")
        elif boot_id in ("", self._storage.boot_id):
            return state
        return None

    # Indexes.

    def _list_indexes(self) -> set[int]:
        names = self._list("index")
        for name in names:
            if not _INDEX_NAME.fullmatch(name):
                self.findings.note(f"index/{name} is not an index")
        return {int(name[:20]) for name in names if _INDEX_NAME.fullmatch(name)}

    def _check_index(self, state: TopicState, is_sound: bool) -> None:
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
            topic = Topic(self._storage, self._name, self._incarnation)
        except LogError:
            return state
        topic.close()
        return topic.state

    # What is no damage but worth knowing.

    def _take_notes(self) -> None:
        findings = self.findings
        if unnamed := set(self._list("data")) - self.walk.frames.named:
            findings.note(f"data/ holds {len(unnamed)} files that no commit names (yet)")
        if aside := self._list("aside"):
            findings.note(f"aside/ keeps {len(aside)} pieces that were cut off the journal's end")
        for name in self._storage.list(self._topic_directory):
            if name.isdigit() and int(name) != self._incarnation:
                findings.note(f"{self._topic_directory}/{name} is left of a deleted incarnation")


def _first_file(state: TopicState) -> int:
    return state.files[0].first_number if state.files else state.file_number


def _differences(stored: TopicState, replayed: TopicState) -> list[str]:
    """Name the fields in which two states differ."""
    return [
        field.name
        for field in fields(TopicState)
        if getattr(stored, field.name) != getattr(replayed, field.name)
    ]


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
