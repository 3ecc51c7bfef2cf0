"""Reading the journal of a topic or a group from its first byte to its last, past any damage.

The end is fixed when the walk begins: the last file there was, and its length. So a walk ends
however fast others write, and what was complete then must be whole. A commit that seems damaged at
the growing end is read again before it is believed to be: a writer may have been cutting a dead
writer's rest, or may be in the middle of writing.

The first files may have been removed since nobody needs them any more. What is wrong with such a
file is no damage; which those are is known at the end.

Behind a damaged header the next commit is found by its magic; a header's checksum covers its own
position, so no other bytes are taken for one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from typing import Generic, NamedTuple

import google_crc32c

from broker.commit import BY_REFERENCE, HEADER, MAGIC, ROW, Commit, Kind, unpack
from broker.errors import CorruptLog, MissingFile, StorageError, UnsupportedFormat
from broker.ledger import State
from broker.storage import File, Storage
from broker.verify.findings import Damage, Findings
from broker.verify.frames import FrameCheck
from broker.verify.replay import Replay

_BLOCK = 1 << 20
_LOOKS = 4
_PAUSE_SECONDS = 0.02
_PAUSES_MAX = 200
_NO_FILE = 1 << 64
_FILE_NAME = re.compile(r"\d{20}\.log")


class Gap(NamedTuple):
    """Files that are not there: from `start` on, before `end`; and how much was found before."""

    start: int
    end: int
    damage_count: int


class Examined(NamedTuple):
    """What is at one place: a commit (None: not readable), and all that is wrong with it."""

    commit: Commit | None
    damage: list[Damage]
    is_short: bool = False


class Window:
    """A file read in blocks, so that many small commits do not cost a system call each."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.path = file.path
        self.forget()

    def forget(self) -> None:
        """Read from the file again: it may have changed."""
        self._block = b""
        self._start = 0

    def block(self, start: int, length: int) -> tuple[bytes, int]:
        """Return bytes that hold [start, start + length), as far as the file does, and where."""
        at = start - self._start
        if at < 0 or at + length > len(self._block):
            self._block = self._file.read(start, max(length, _BLOCK))
            self._start, at = start, 0
        return self._block, at

    def read(self, start: int, length: int) -> bytes:
        if length >= _BLOCK:
            return self._file.read(start, length)
        block, at = self.block(start, length)
        return block[at : at + length]

    def size(self) -> int:
        return self._file.size()


class JournalWalk(Generic[State]):
    """One pass over the journal of one incarnation."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        replay: Replay[State],
        findings: Findings,
        on_commit: Callable[[State, bool], None],
        on_file_end: Callable[[State, bool], None],
    ) -> None:
        """Args:
        on_commit: called with the state after each commit, and whether all of it is certain.
        on_file_end: called after an end-of-file commit, with whether that file is sound.
        """
        self._storage = storage
        self._directory = directory
        self._incarnation = replay.state.incarnation
        self._findings = findings
        self._on_commit = on_commit
        self._on_file_end = on_file_end
        self._pause_count = 0
        self._next_file: int | None = 0
        self.frames = FrameCheck(storage, directory)
        self.replay = replay
        self.valid_ends: dict[int, int] = {}
        self.first_file = 0
        self._gaps: list[Gap] = []
        self._damage_before: dict[int, int] = {}

    def run(self) -> None:
        numbers = self._list_files()
        if not numbers:
            self._findings.add(self._path(0), 0, "the file is missing")
            return
        self.first_file = numbers[0]
        end, lost = self._end(numbers[-1])
        for place, number in enumerate(numbers):
            self._damage_before[number] = len(self._findings.damage)
            self._enter(number)
            is_last = place == len(numbers) - 1
            try:
                self._walk_file(number, end if is_last else None)
                if is_last and lost is not None:
                    raise lost
            except StorageError as error:
                self._findings.add(self._path(number), 0, f"the file cannot be read: {error}")
                self.replay.begin_file(number)
            except MissingFile as damage:
                self._findings.add(self._path(number), damage.position, damage.what)
                self.replay.begin_file(number)
        self.frames.close()
        self._damage_before[_NO_FILE] = len(self._findings.damage)

    @property
    def has_gap(self) -> bool:
        """Whether files are not there, so that only a checkpoint can say what was in them."""
        return bool(self._gaps)

    def settle(self, first_needed: int) -> None:
        """Decide about files that are not there, and forget what is wrong with those before."""
        for gap in reversed(self._gaps):
            if gap.end > first_needed:
                path = self._path(max(gap.start, first_needed))
                self._findings.insert(gap.damage_count, Damage(path, 0, "the file is missing"))
        found = sorted(self._damage_before.items())
        if found:
            kept = next(count for number, count in found if number >= first_needed)
            del self._findings.damage[found[0][1] : kept]

    def _list_files(self) -> list[int]:
        names = self._storage.list(f"{self._directory}/journal")
        for name in names:
            if not _FILE_NAME.fullmatch(name):
                self._findings.note(f"journal/{name} is not a journal file")
        return [int(name[:20]) for name in names if _FILE_NAME.fullmatch(name)]

    def _enter(self, number: int) -> None:
        """Be at the beginning of this file; say so if the one before does not lead here."""
        expected, self._next_file = self._next_file, None
        if expected == number:
            return
        if expected is not None and expected < number:
            self._gaps.append(Gap(expected, number, len(self._findings.damage)))
        elif expected is not None:
            self._findings.add(self._path(number), 0, "no end-of-file commit names this file")
        self.replay.begin_file(number)
        self._on_commit(self.replay.state, self.replay.is_whole)  # A checkpoint may be of here.

    def _walk_file(self, number: int, end: int | None) -> None:
        """Check one file; `end` is where the journal's last file ended when the walk began."""
        file = self._storage.open_file(f"{self._directory}/journal/{number:020d}.log")
        if file is None:
            self._findings.add(self._path(number), 0, "the file is missing")
            return
        with closing(file):
            damage_count = len(self._findings.damage)
            window = Window(file)
            is_last = end is not None
            length = file.size() if end is None else end
            position, is_ended = self._walk_commits(window, length, is_last)
            self.valid_ends[number] = position
            is_sound = len(self._findings.damage) == damage_count
            if is_ended:
                self._next_file = self.replay.state.number
                self._check_after_end(window, position)
                self._on_file_end(self.replay.state, is_sound)
            elif not is_last and is_sound:
                self._findings.add(file.path, position, "the file has no end-of-file commit")

    def _walk_commits(self, window: Window, end: int, is_last: bool) -> tuple[int, bool]:
        """Return how far commits go, and whether the last one ends the file."""
        position = 0
        while position < end:
            examined = self._examine(window, position, is_last)
            if examined.is_short:
                self._report_rest(window, position, is_last)
                return position, False
            for damage in examined.damage:
                self._findings.add(damage.path, damage.position, damage.what)
            commit = examined.commit
            if commit is None:
                position = self._skip(window, position, end)
                continue
            self._apply(commit, window.path)
            position += commit.length
            if commit.kind is Kind.END_OF_FILE:
                return position, True
        return position, False

    def _examine(self, window: Window, position: int, is_last: bool) -> Examined:
        """Read what is at a place: more than once where others may be writing."""
        examined = self._look(window, position)
        looks = 1
        while is_last and looks < _LOOKS and (examined.damage or examined.is_short):
            if self._pause_count < _PAUSES_MAX:
                self._pause_count += 1
                time.sleep(_PAUSE_SECONDS)
            window.forget()
            examined = self._look(window, position)
            looks += 1
        return examined

    def _look(self, window: Window, position: int) -> Examined:
        try:
            commit = self._read_commit(window, position)
        except CorruptLog as damage:
            return Examined(None, [Damage(window.path, position, damage.what)])
        except UnsupportedFormat as error:
            return Examined(None, [Damage(window.path, position, str(error))])
        if commit is None or position + commit.length > window.size():
            return Examined(None, [], is_short=True)
        if len(commit.table) % ROW.size:
            return Examined(None, [Damage(window.path, position, "a commit's table is cut short")])
        return Examined(commit, self.frames.check(commit, window))

    def _read_commit(self, window: Window, position: int) -> Commit | None:
        needed = HEADER.size
        while True:
            block, at = window.block(position, needed)
            commit, wanted = unpack(
                block,
                at,
                incarnation=self._incarnation,
                number=self.replay.state.number,
                position=position,
                path=window.path,
            )
            if commit is not None or wanted == needed:
                return commit
            needed = wanted

    def _apply(self, commit: Commit, path: str) -> None:
        findings, replay = self._findings, self.replay
        for what in replay.apply(commit, path):
            findings.add(path, commit.position, what)
        findings.commit_count += 1
        findings.byte_count += commit.length
        for row in ROW.iter_unpack(commit.table):
            findings.frame_count += 1
            findings.record_count += row[4]
            findings.byte_count += row[5] if row[1] & BY_REFERENCE else 0
        self._on_commit(replay.state, replay.is_whole)

    def _report_rest(self, window: Window, position: int, is_last: bool) -> None:
        size = window.size()
        rest = size - position
        if not is_last:
            self._findings.add(window.path, position, "the file ends inside a commit")
        elif rest > 0:
            self._findings.note(
                f"{window.path} has {rest} bytes of an unfinished commit after byte {position}; "
                "no reader sees them and the next writer cuts them off"
            )

    def _check_after_end(self, window: Window, position: int) -> None:
        rest = window.size() - position
        if rest > 0:
            self._findings.add(
                window.path, position, f"{rest} bytes follow the file's end-of-file commit"
            )

    def _skip(self, window: Window, position: int, end: int) -> int:
        """Return where to go on behind what cannot be read, and be ready for what is there."""
        number = self.replay.state.number
        header = self._header_at(window, position)
        if header is not None and header[0] == number and position + header[1] <= end:
            self.replay.skip_to(number + 1)
            return position + header[1]
        start = position
        while (found := self._find_magic(window, start, end)) is not None:
            header = self._header_at(window, found)
            if header is not None and header[0] >= number + (found == position):
                self.replay.skip_to(header[0])
                return found
            start = found + 1
        self.replay.skip_to(number)
        return end

    def _find_magic(self, window: Window, start: int, end: int) -> int | None:
        while start < end:
            block, at = window.block(start, min(_BLOCK, end - start))
            found = block.find(MAGIC, at)
            if found >= 0:
                return start + found - at
            if len(block) - at < len(MAGIC):
                return None
            start += len(block) - at - len(MAGIC) + 1
        return None

    def _header_at(self, window: Window, position: int) -> tuple[int, int] | None:
        """Return number and length of a commit whose header is whole and belongs here."""
        data = window.read(position, HEADER.size)
        if len(data) < HEADER.size or data[:4] != MAGIC:
            return None
        header = HEADER.unpack(data)
        if google_crc32c.value(data[8:]) != header[1]:
            return None
        incarnation, number, at, length = header[5:9]
        if (incarnation, at) != (self._incarnation, position) or length < HEADER.size:
            return None
        return number, length

    def _end(self, number: int) -> tuple[int, MissingFile | None]:
        """Return where a file ends, or where something is missing in it, and what."""
        file = self._storage.open_file(f"{self._directory}/journal/{number:020d}.log")
        if file is None:
            return 0, None
        with closing(file):
            try:
                return file.size(), None
            except MissingFile as damage:
                return damage.position, damage

    def _path(self, number: int) -> str:
        return self._storage.locate(f"{self._directory}/journal/{number:020d}.log")
