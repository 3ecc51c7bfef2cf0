"""An open journal and the state that it describes, going on together.

What a topic and a group have in common: reading from a checkpoint on, entering under the lock,
writing one commit, ending a file, and recovering after a power cut. The state is only ever changed
by applying commits that are in the journal; if that is interrupted half-way, it is read again.

A `Ledger` may be used by several threads; a mutex inside the process goes before the lock between
processes. It belongs to the process that opened it.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from broker import checkpoint, forks, recovery
from broker.commit import (
    COMMIT_BYTES_MAX,
    ROW,
    TRANSACTIONAL,
    Author,
    Commit,
    Kind,
    Placeable,
    apply,
    pack,
)
from broker.errors import (
    Closed,
    Conflict,
    DiskFull,
    ForkedHandle,
    InvalidRecord,
    LockTimeout,
    LogError,
    MissingFile,
)
from broker.home import Home
from broker.journal import Journal
from broker.storage import Storage
from broker.synced import Synced, Syncer
from broker.workers import Workers

logger = logging.getLogger(__name__)

# More buffers than this in one writev are refused by the kernel.
_PARTS_MAX = 1000
# Files that wait to be synced and described before writers wait for them.
_UNFINISHED_MAX = 4
LOCK_WAIT_MS = 30_000
REMOTE_CHECKPOINT_COMMITS = 100
# Between two attempts of writers that have no lock: a random share of this, at first ever longer.
_GIVE_WAY_SECONDS = 0.01
_GIVE_WAY_MAX_SECONDS = 2.0
_GIVE_WAY_TRIES_SECONDS = 8.0
# How long a writer, and on a store a reader, goes without seeing whether the files were taken away.
# On a disk that is a call too slow for each commit, on a store two or three requests.
_LOOK_SECONDS = 1.0
_WRITER_ASKS_SECONDS, _READER_ASKS_SECONDS = 10.0, 300.0


class JournalState(Protocol):
    """What every state knows: how far it has come in its journal."""

    incarnation: int
    number: int
    time: int
    epoch: int
    file_number: int
    position: int
    is_deleted: bool

    def apply(self, commit: Commit, path: str) -> None: ...


State = TypeVar("State", bound=JournalState)
Result = TypeVar("Result")


class Appended(NamedTuple):
    """A commit that is in the journal: its table of frames and its time in milliseconds."""

    table: bytes
    time: int
    number: int


class CompleteFile(NamedTuple):
    """A journal file that has just been ended: commits [first_number, end_number)."""

    first_number: int
    end_number: int
    byte_length: int


def new_token() -> bytes:
    """Return a name for one commit that no other commit has."""
    return os.urandom(16)


def pause_seconds(tries: int, share: float) -> float:
    """Return how long to wait after losing for the `tries`-th time; `share` is in [0, 1).

    By itself, so that the same rule can be tried on a thousand writers in virtual time.
    """
    if tries < 2:
        return 0.0
    longest = min(_GIVE_WAY_SECONDS * 2.0 ** min(tries, 30), _GIVE_WAY_MAX_SECONDS)
    # Who has lost often waits less again: the winner, who need not read on, is hard to overtake.
    # Simulated, 200 writers at 35 ms a put: the longest commit took 26 s and not 71, the slowest
    # writer made 40 % of the mean number of commits and not 7 %, for 18 puts a commit and not 9.
    return share * min(longest, _GIVE_WAY_TRIES_SECONDS / tries)


class Ledger(ABC, Generic[State]):
    """An open incarnation of a topic or a group."""

    state: State

    def __init__(self, storage: Storage, home: Home, *, write: bool = False) -> None:
        self.storage = storage
        self.home = home
        self.name = home.name
        self.incarnation = home.incarnation
        self.journal = Journal(storage, home, write=write)
        self._write = write
        self._is_unrecovered = not write and not storage.is_remote  # A writer recovers first.
        self._clock = storage.clock
        self._mutex = threading.Lock()
        self._syncer = Syncer(storage, self.journal.directory)
        self._finisher = Workers(1, "spark-log-finish")
        self._unfinished: list[Future[None]] = []
        # How often others had committed when this one came to do so.
        self.conflict_count = 0
        self._identity = storage.identity
        self._look_seconds = _LOOK_SECONDS
        if storage.is_remote:
            self._look_seconds = _WRITER_ASKS_SECONDS if write else _READER_ASKS_SECONDS
        # On a store it looks at once: what is remembered may be of another log in the same place.
        self._looked_for_names = -1e18 if storage.is_remote else time.monotonic()
        self._is_stale = False
        self._is_closed = False
        self._is_forked = False
        self._process_id = os.getpid()
        self.state = self._new_state()
        forks.remember(self)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    # What a topic and a group each have of their own.

    @abstractmethod
    def _new_state(self) -> State:
        """Return the state before the first commit."""

    @abstractmethod
    def _encode(self, state: State, boot_id: str) -> bytes:
        """Return the checkpoint file of a state."""

    @abstractmethod
    def _decode(self, data: bytes, path: str) -> tuple[State, str]:
        """Return the state and the boot id of a checkpoint file."""

    @abstractmethod
    def _recovery_details(self) -> dict[str, Any]:
        """Return what a `recover` commit says beside the epoch."""

    @property
    @abstractmethod
    def _file_bytes_max(self) -> int:
        """The size at which a journal file is ended."""

    @property
    @abstractmethod
    def _checkpoint_commits(self) -> int:
        """The number of commits after which a soft checkpoint is written."""

    def _before_end_of_file(self) -> None:
        """Under the lock: commit what is to be said before a file ends."""

    def _describe_file(self, file: CompleteFile) -> None:
        """In the background: write what saves others from reading a complete, synced file."""

    def _on_load(self) -> None:
        """The state was read from a checkpoint; commits after it follow."""

    def _on_commit(self, commit: Commit) -> None:
        """This commit was applied."""

    # What others use.

    @property
    def directory(self) -> str:
        return self.journal.directory

    def refresh(self) -> State:
        """Read what has been committed since, and return the state."""
        with self._mutex:
            self._check_usable()
            if self._is_stale:
                self._load()
            else:
                self._read_on()
            return self.state

    def sync(self) -> None:
        """Make everything committed so far durable."""
        state = self.refresh()
        self._syncer.through(state.file_number, state.position)

    def close(self) -> None:
        """Finish background work and let go of the files."""
        if self._is_closed:
            return
        self._is_closed = True
        self._finisher.close()
        self.journal.close()
        forks.forget(self)

    def finish_background_work(self) -> None:
        """Return when all files that have ended are synced and described."""
        for work in list(self._unfinished):
            work.result()

    def write_checkpoint(self) -> None:
        """Sync everything and write a checkpoint of it, so that files before it can go."""
        with self._mutex:
            self._check_usable()
            if self._is_stale:
                self._load()
            else:
                self._read_on()
            data, number = self._encode(self.state, ""), self.state.number
            place = self.state.file_number, self.state.position
        self._syncer.through(*place)
        checkpoint.write(self.storage, f"{self.directory}/checkpoint", number, data, soft=False)

    def covered_files(self) -> list[int]:
        """Return the journal files that opening does not need: two durable checkpoints cover them.

        Those whose commits say nothing that is still needed may be removed. Readers that are still
        before that place go on from a checkpoint.
        """
        covered = checkpoint.durable_numbers(self.storage, f"{self.directory}/checkpoint")[:-1]
        names = self.storage.list(f"{self.directory}/journal")
        numbers = [int(name[:20]) for name in names]
        if self.storage.is_remote:
            # The one before the last shows that the last is still there: see `storage.pieces`.
            numbers = numbers[:-1]
        return [number for number, end in pairwise(numbers) if covered and end <= covered[-1]]

    def abandon(self) -> None:
        """In a forked child: let go of what the parent still uses."""
        self._is_closed = self._is_forked = True
        self.journal.close()

    # Reading.

    def _load(self) -> None:
        """Read the newest checkpoint and the commits after it."""
        if self._write:
            self._recover_after_power_cut()
        self._start_from_checkpoint()
        self._on_load()
        self._read_on()
        while self.journal.has_later_file():
            number = self.state.number
            self._read_on()
            if self.state.number == number:
                self.journal.refuse_cut_file()
                break
        if self.state.number == 0:
            raise self.home.absent()
        self._is_stale = False

    def _start_from_checkpoint(self) -> None:
        state = checkpoint.read_newest(
            self.storage, f"{self.directory}/checkpoint", self.incarnation, self._decode
        )
        self.state = state or self._new_state()
        self.journal.seek(self.state.file_number, self.state.position, self.state.number)

    def _read_on(self) -> None:
        if self.storage.is_remote and self._is_time_to_look():
            self._check_not_removed()
        self._is_stale = True
        try:
            commits = self._new_commits()
        except MissingFile:
            commits = self._new_commits_from_checkpoint()
        path = self._path_of_state
        for commit in commits:
            apply(self.state, commit, path)
            if commit.kind is Kind.END_OF_FILE:
                path = self._path_of_state
            self._on_commit(commit)
        self._is_stale = False
        if not commits and not self.storage.is_remote:
            self._check_not_removed()

    @property
    def _path_of_state(self) -> str:
        """The file of the commit that the state comes to next, for messages."""
        return self.storage.locate(self.journal.file_path(self.state.file_number))

    def _new_commits_from_checkpoint(self) -> list[Commit]:
        """Go on from a newer checkpoint: the files up to there may have been removed as not needed.

        Raises:
            MissingFile: there is no newer one, so the file is lost.
        """
        number, place = self.state.number, self.journal.place
        self._start_from_checkpoint()
        if self.state.number <= number:
            self.journal.seek(*place)  # It was there once.
            what = "the file is missing"
            if not number:
                what += " and no checkpoint can be read that says what was in it"
            self.journal.check_exists()
            raise MissingFile(self.storage.locate(self.journal.file_path(place[0])), 0, what)
        self._on_load()
        return self._new_commits()

    def _new_commits(self) -> list[Commit]:
        """Read on; before the first writer of a boot, only as far as it will find all whole."""
        if self._is_unrecovered:
            hint = Synced.read(self.storage, self.directory)
            self._is_unrecovered = hint is None or hint.boot_id != self.storage.boot_id
            if self._is_unrecovered:
                return list(recovery.read_whole(self.journal, hint))
        return self.journal.read_new()

    def _is_time_to_look(self) -> bool:
        return time.monotonic() >= self._looked_for_names + self._look_seconds

    def _check_not_removed(self) -> None:
        """Raise if somebody has removed the files: nobody else will see what is written there."""
        is_gone = not self.storage.holds(self._identity) or self.journal.is_removed()
        if is_gone and not self.state.is_deleted:
            raise self.home.removed()
        self._looked_for_names = time.monotonic()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ForkedHandle(self.home.noun) if self._is_forked else Closed(self.home.noun)

    # Writing.

    def _attempt(self, act: Callable[[State], Result], timeout_ms: int = LOCK_WAIT_MS) -> Result:
        """Do something under the lock, up to date, that makes commits: all that it says, or none.

        Where writers have no lock, another's commit may come first; then it is done again, with
        the state as it is then. So `act` changes nothing before its first commit.
        """
        begun, tries = time.monotonic(), 0
        while True:
            self._lock(timeout_ms)
            try:
                return act(self.state)
            except Conflict:
                tries += 1
            finally:
                self._unlock()
            self.give_way(tries, begun, timeout_ms)

    def give_way(self, tries: int, begun: float, timeout_ms: int) -> None:
        """After another's commit came first: wait a little, less often than not for nothing."""
        self.conflict_count += 1
        waited = time.monotonic() - begun
        if waited * 1000 > timeout_ms:
            holder = f"other writers, who were first {tries} times"
            raise LockTimeout(self.journal.path, timeout_ms, holder)
        time.sleep(pause_seconds(tries, random.random()))

    def _lock(self, timeout_ms: int = LOCK_WAIT_MS) -> None:
        """Enter: mutex, then the lock between processes, then what others have written."""
        if not self._mutex.acquire(timeout=timeout_ms / 1000):
            raise LockTimeout(
                self.journal.path, timeout_ms, f"another thread of process {self._process_id}"
            )
        journal = self.journal
        try:
            if self._is_closed:
                self._check_usable()
            journal.lock(timeout_ms)
        except BaseException:
            self._mutex.release()
            raise
        try:
            if self._is_stale:
                self._load()
            if self._is_time_to_look():
                self._check_not_removed()
            if journal.is_behind():
                self.conflict_count += 1
                self._catch_up()
            if self.state.is_deleted:
                raise self.home.deleted()
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        self.journal.unlock()
        self._mutex.release()

    def _catch_up(self) -> None:
        """Under the lock: read what others wrote, and repair what the dead among them left."""
        self._read_on()
        if self.state.is_deleted:
            return
        if self.journal.open_current() is None:
            self.journal.begin_file()
        self.journal.cut_torn_tail()

    def _change(self, kind: Kind, change: Callable[[State], dict[str, Any]]) -> State:
        """Make one durable commit whose details depend on the state at that moment."""

        def act(state: State) -> tuple[int, int]:
            self._commit(kind, Author(new_token()), details=change(state))
            return state.file_number, state.position

        try:
            place = self._attempt(act)
        except DiskFull:
            # It may be what makes room: give it that of what only saves time.
            if not checkpoint.drop_soft(self.storage, f"{self.directory}/checkpoint"):
                raise
            place = self._attempt(act)
        self._syncer.through(*place)
        return self.state

    def _commit(
        self,
        kind: Kind,
        author: Author,
        placed: Sequence[tuple[int, int, Placeable]] = (),
        details: dict[str, Any] | None = None,
        log_append: bool = False,
    ) -> Appended:
        """Write one commit and apply it. Only under the lock, at the journal's end."""
        state, journal = self.state, self.journal
        # Never earlier than the commit before: look-ups by time rely on it. Not strictly later:
        # at many commits in a millisecond the log's clock would run away from the real one.
        now = max(self._clock() // 1_000_000, state.time)
        number, position = state.number, state.position
        parts, length, meta = pack(
            kind,
            author,
            incarnation=self.incarnation,
            number=number,
            position=position,
            time=now,
            frames=placed,
            log_append=log_append,
            details=details,
        )
        if length > COMMIT_BYTES_MAX:
            raise InvalidRecord(
                f"a commit of {length} bytes for {self.name!r} is over {COMMIT_BYTES_MAX}; "
                "send less at a time"
            )
        if len(parts) > _PARTS_MAX:
            parts = [b"".join(parts)]
        table, meta = meta[: len(placed) * ROW.size], meta[len(placed) * ROW.size :]
        flags = TRANSACTIONAL if author.is_transactional else 0
        commit = Commit(
            kind, flags, number, position, length, now, author.token, author.producer_id,
            author.sequence, author.epoch, table, meta,
        )  # fmt: skip
        if details:
            self._check_readable(commit)
        self._write_commit(parts, length)
        state.apply(commit, journal.path if kind is not Kind.APPEND else "")
        self._on_commit(commit)
        self._is_stale = False
        return Appended(table, now, number)

    def _check_readable(self, commit: Commit) -> None:
        """Refuse what nobody could apply: once written, it would be the journal's end."""
        try:
            commit.details()
        except ValueError as error:
            raise InvalidRecord(f"{error} in {self.name!r}; nothing was written") from error

    def _write_commit(self, parts: Sequence[Any], length: int) -> None:
        """Append to the journal; until the state has followed, it is stale."""
        self._is_stale = True
        try:
            self.journal.append(parts, length)
        except Conflict:
            self._is_stale = False  # Nothing was written.
            raise

    # Ending a file, and checkpoints.

    @property
    def _is_file_full(self) -> bool:
        state, pieces_max = self.state, self.storage.pieces_max
        return state.position >= self._file_bytes_max or (
            pieces_max is not None and state.number - state.file_number >= pieces_max
        )

    def _roll_if_possible(self) -> None:
        """Roll after a commit, which is in the journal and must not look as if it had failed."""
        try:
            self._roll()
        except Conflict:
            return  # Somebody else's commit came first; whoever commits next ends the file.
        except (LogError, RuntimeError) as error:  # Python raises that when no thread can begin.
            logger.warning("could not begin the next journal file of %s: %s", self.name, error)

    def _roll(self) -> None:
        """Under the lock: end this file and begin the next; the rest is done in the background.

        The file is not synced here: that could take long, with every writer waiting. A power cut
        may therefore take more than one file's commits away, which `recovery` knows.
        """
        self._before_end_of_file()
        first = self.state.file_number
        self._commit(Kind.END_OF_FILE, Author(new_token()))
        complete = CompleteFile(first, self.state.number, self.journal.position)
        self.journal.begin_file()
        data = self._encode(self.state, "")
        number = self.state.number
        self._unfinished = [work for work in self._unfinished if not work.done()]
        if len(self._unfinished) >= _UNFINISHED_MAX:
            self._unfinished[0].result()
        self._unfinished.append(self._finisher.submit(self._finish_file, complete, number, data))

    def _finish_file(self, file: CompleteFile, number: int, data: bytes) -> None:
        """Sync a complete file, describe it, then write a checkpoint that covers it.

        All of this can be done again by others, and none of it is needed to read the log.
        """
        try:
            self._syncer.through(file.first_number, file.byte_length)
            self.storage.merge(self.journal.file_path(file.first_number), file.byte_length)
            self._describe_file(file)
            checkpoint.write(self.storage, f"{self.directory}/checkpoint", number, data, soft=False)
        except LogError as error:
            try:
                self.journal.check_exists()
            except LogError:
                return  # It was deleted meanwhile: there is nothing left to finish.
            logger.warning("could not finish a journal file of %s: %s", self.name, error)

    def _write_soft_checkpoint(self) -> None:
        with self._mutex:
            if self._is_stale:
                return
            data = self._encode(self.state, self.storage.boot_id)
            number = self.state.number
        try:
            checkpoint.write(self.storage, f"{self.directory}/checkpoint", number, data, soft=True)
        except LogError:
            # It only saves time: the commit that led here is in the journal and acknowledged.
            return

    # After a power cut.

    def _recover_after_power_cut(self) -> None:
        if self.storage.is_remote:
            return
        hint = Synced.read(self.storage, self.directory)
        if hint is not None and hint.boot_id == self.storage.boot_id:
            return
        is_locked = self.journal.is_locked
        if not is_locked:
            self.journal.lock(timeout_ms=LOCK_WAIT_MS)
        try:
            hint = Synced.read(self.storage, self.directory)
            if hint is None or hint.boot_id != self.storage.boot_id:
                self._recover(hint)
        finally:
            if not is_locked:
                self.journal.unlock()

    def _recover(self, hint: Synced | None) -> None:
        self._start_from_checkpoint()
        recovery.survey(self.journal, self.state, hint)
        if self.state.number == 0:
            raise self.home.absent()
        folder = f"{self.directory}/checkpoint"
        checkpoint.drop_unsynced(self.storage, folder, self.state.number)
        if self.state.is_deleted:
            return
        if self.journal.open_current() is None:
            self.journal.begin_file()
        details = {"epoch": self.state.epoch + 1, **self._recovery_details()}
        self._commit(Kind.RECOVER, Author(new_token()), details=details)
        self._syncer.through(self.state.file_number, self.state.position)
