"""Verifying what a topic and a group have in common: a journal, checkpoints of it, and `synced`.

Nothing is changed and no lock is taken. Files beside the journal are listed before the journal is:
whatever they describe must be in it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic

from broker import checkpoint
from broker.errors import CorruptLog, LogError, StorageError
from broker.home import Home
from broker.ledger import State
from broker.storage import Storage
from broker.synced import Synced
from broker.verify.findings import Findings
from broker.verify.journal import JournalWalk
from broker.verify.replay import Replay

_CHECKPOINT_NAME = re.compile(r"(\d{20})(\.soft)?\.arrow")
_HINT_LOOKS = 3


class LedgerCheck(ABC, Generic[State]):
    """One incarnation of a topic or a group, while it is verified."""

    def __init__(
        self,
        storage: Storage,
        home: Home,
        replay: Replay[State],
        decode: Callable[[bytes, str], tuple[State, str]],
    ) -> None:
        """Args:
        decode: reads a checkpoint file.
        """
        self._storage = storage
        self._home = home
        self._incarnation = home.incarnation
        self._directory = home.directory
        self._decode = decode
        self._adopted_first: int | None = None
        self._checkpoints: dict[int, list[str]] = {}
        self.findings = Findings()
        self.walk = JournalWalk(
            storage,
            self._directory,
            replay,
            self.findings,
            on_commit=self._on_commit,
            on_file_end=self._on_file_end,
        )

    def run(self) -> None:
        hint = self._read_hint()
        self._checkpoints = self._list_checkpoints()
        self._list_more()
        self.walk.run()
        first_needed = self._first_needed()
        self.walk.settle(first_needed)
        self._check_beginning(first_needed)
        self._check_hint(hint, first_needed)
        for number, names in self._checkpoints.items():
            self._check_unreached(names, is_before=number < self.walk.first_file)
        self._check_more(first_needed)
        self._take_notes()

    # What a topic and a group each have of their own.

    @abstractmethod
    def _first_needed(self) -> int:
        """Return the first journal file that is needed: all before it may be there, or gone."""

    @abstractmethod
    def _first_file(self, state: State) -> int:
        """Return the first journal file that is needed beside a checkpoint of this state."""

    def _list_more(self) -> None:
        """List what else is beside the journal, before it is walked."""

    def _check_more(self, first_needed: int) -> None:
        """Check what else is beside the journal, after it was walked."""

    def _on_file_end(self, state: State, is_sound: bool) -> None:
        """A journal file was walked to its end."""

    def _note_beginning(self) -> None:
        """Say that the first commits were removed, if that is worth knowing."""

    # Files.

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

    def _newest_checkpoint(self) -> State | None:
        folder = f"{self._directory}/checkpoint"
        try:
            return checkpoint.read_newest(self._storage, folder, self._incarnation, self._decode)
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
            self._note_beginning()

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
        if any(one.path == path and one.position >= (end or 0) for one in self.findings.damage):
            return  # That the rest of the file is missing has been said.
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

    def _on_commit(self, state: State, is_certain: bool) -> None:
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
            elif wrong := self._differences(stored, state):
                path = self._locate(f"checkpoint/{name}")
                self.findings.add(path, 0, f"the journal says otherwise: {', '.join(wrong)}")

    def _adopt(self, stored: State, name: str) -> bool:
        """Let the first checkpoint say what the removed commits said."""
        if wrong := self.walk.replay.adopt(stored):
            path = self._locate(f"checkpoint/{name}")
            self.findings.add(path, 0, f"the journal says otherwise: {', '.join(wrong)}")
            return False
        self._adopted_first = self._first_file(stored)
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

    def _read_checkpoint(self, name: str) -> State | None:
        """Return a checkpoint that readers would believe."""
        path = f"checkpoint/{name}"
        data = self._read(path)
        if data is None:
            return None
        is_soft = name.endswith(".soft.arrow")
        try:
            state, boot_id = self._decode(data, self._locate(path))
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

    def _differences(self, stored: State, replayed: State) -> list[str]:
        """Name the fields in which two states differ."""
        known: Any = stored
        return [
            field.name
            for field in fields(known)
            if getattr(stored, field.name) != getattr(replayed, field.name)
        ]

    # What is no damage but worth knowing.

    def _take_notes(self) -> None:
        findings = self.findings
        if aside := self._list("aside"):
            findings.note(f"aside/ keeps {len(aside)} pieces that were cut off the journal's end")
        for name in self._storage.list(self._home.parent):
            if name.isdigit() and int(name) != self._incarnation:
                findings.note(f"{self._home.parent}/{name} is left of a deleted incarnation")
