"""One topic, open: its journal, the state that it describes, and how both go on.

A `Topic` may be used by several threads; a mutex inside the process goes before the lock between
processes. It belongs to the process that opened it. The state is only ever changed by applying
commits that are in the journal; if that is interrupted half-way, it is read again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from broker import checkpoint, forks, index, recovery
from broker.batch import Frame
from broker.commit import (
    COMMIT_BYTES_MAX,
    ROW,
    TRANSACTIONAL,
    Author,
    Commit,
    Kind,
    Placeable,
    pack,
    pack_one,
)
from broker.errors import AlreadyExists as NameTaken
from broker.errors import (
    Closed,
    ForkedHandle,
    InvalidRecord,
    LockTimeout,
    LogError,
    OffsetOutOfRange,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from broker.journal import Journal
from broker.records import TopicPartition
from broker.state import JournalFile, TopicState
from broker.storage import LocalStorage
from broker.synced import Synced, Syncer

logger = logging.getLogger(__name__)

# More buffers than this in one writev are refused by the kernel.
_PARTS_MAX = 1000
LOG_APPEND_TIME = "LogAppendTime"
# Files that wait to be synced and indexed before writers wait for them.
_UNFINISHED_MAX = 4


class Observer(Protocol):
    """Somebody who wants to see each commit as it is applied."""

    def on_load(self, state: TopicState) -> None:
        """The state was read from a checkpoint; commits after it follow."""

    def on_commit(self, commit: Commit, state: TopicState) -> None:
        """This commit was applied, and this is the state now."""


class Appended(NamedTuple):
    """A commit that is in the journal: its table of frames and its time in milliseconds."""

    table: bytes
    time: int
    number: int


def new_token() -> bytes:
    """Return a name for one commit that no other commit has."""
    return os.urandom(16)


class Topic:
    """An open topic incarnation."""

    def __init__(
        self,
        storage: LocalStorage,
        name: str,
        incarnation: int,
        *,
        write: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.storage = storage
        self.name = name
        self.incarnation = incarnation
        self.journal = Journal(storage, name, incarnation, write=write)
        self._write = write
        self._is_unrecovered = not write  # A writer recovers first.
        self._observer = observer
        self._clock = storage.clock
        self._mutex = threading.Lock()
        self._syncer = Syncer(storage, self.journal.directory)
        self._finisher: ThreadPoolExecutor | None = None
        self._unfinished: list[Future[None]] = []
        self._is_stale = False
        self._is_closed = False
        self._is_forked = False
        self._process_id = os.getpid()
        self.state = TopicState(incarnation)
        forks.remember(self)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> str:
        return self.journal.directory

    def refresh(self) -> TopicState:
        """Read what has been committed since, and return the state."""
        with self._mutex:
            self._check_usable()
            if self._is_stale:
                self._load()
            else:
                self._read_on()
            return self.state

    def append(
        self,
        frames: Sequence[tuple[int, Placeable]],
        author: Author,
        *,
        timeout_ms: int = 30_000,
        durable: bool = False,
        transaction: tuple[str, int] | None = None,
    ) -> Appended:
        """Commit frames for some partitions: all of them or none.

        A repetition (same author, or a version of the transaction's application that is not above
        its last one) is not written again; it gets the answer of the first time.

        Raises:
            LockTimeout, DiskFull, UnknownTopic, UnknownPartition, ...: nothing was written.
            OutcomeUnknown: it may have been written; repeat it with the same author.
        """
        self._lock(timeout_ms)
        try:
            state = self.state
            if author.producer_id and (table := state.repeated(author)) is not None:
                last = state.producers[author.producer_id]
                appended = Appended(table, last.time, -1)
            elif transaction is not None and (done := state.finished(*transaction)) is not None:
                appended = Appended(done.table, done.time, -1)
            else:
                details = None if transaction is None else {"transaction": transaction}
                appended = self._append(frames, author, details)
                if state.position >= state.settings["segment.bytes"]:
                    self._roll_if_possible()
            place = state.file_number, state.position
        finally:
            self._unlock()
        if durable:
            self._syncer.through(*place)
        if appended.number % state.settings["checkpoint.commits"] == 0:
            self._write_soft_checkpoint()
        return appended

    def fence(self, producer_id: int, *, timeout_ms: int = 30_000) -> Author:
        """Take over a transactional id: an empty commit of a higher epoch."""
        self._lock(timeout_ms)
        try:
            last = self.state.producers.get(producer_id)
            epoch = 0 if last is None else last.epoch + 1
            author = Author(new_token(), producer_id, 0, epoch, is_transactional=True)
            self._commit(Kind.APPEND, author)
            return author
        finally:
            self._unlock()

    def configure(
        self, config: dict[str, Any] | None = None, partitions: int | None = None
    ) -> TopicState:
        """Change settings (a value of None goes back to the default) or add partitions."""

        def change(state: TopicState) -> dict[str, Any]:
            details: dict[str, Any] = {}
            if config is not None:
                merged = {**state.given, **config}
                details["config"] = {k: v for k, v in merged.items() if v is not None}
            if partitions is not None:
                if partitions <= state.partition_count:
                    raise InvalidRecord(
                        f"topic {self.name!r} has {state.partition_count} partitions and cannot "
                        f"have {partitions}: the number can only grow"
                    )
                details["partitions"] = partitions
            return details

        return self._change(Kind.CONFIG, change)

    def truncate(self, starts: dict[int, int]) -> TopicState:
        """Move the log start of partitions; records before it are gone. -1 is the end."""

        def change(state: TopicState) -> dict[str, Any]:
            resolved = {}
            for partition, start in starts.items():
                self._check_partition(partition)
                end = state.ends[partition]
                start = end if start == -1 else start
                if not 0 <= start <= end:
                    place = TopicPartition(self.name, partition)
                    raise OffsetOutOfRange(place, start, state.starts[partition], end)
                resolved[str(partition)] = start
            return {"starts": resolved}

        return self._change(Kind.TRUNCATE, change)

    def delete(self) -> None:
        """Commit the end of this incarnation, then remove its files."""
        self._change(Kind.DELETE, lambda state: {})
        self.close()
        remove_deleted(self.storage, self.name, self.incarnation)

    def sync(self) -> None:
        """Make everything committed so far durable."""
        state = self.refresh()
        self._syncer.through(state.file_number, state.position)

    def close(self) -> None:
        """Finish background work and let go of the files."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._finisher is not None:
            self._finisher.shutdown(wait=True)
        self.journal.close()
        forks.forget(self)

    def abandon(self) -> None:
        """In a forked child: let go of what the parent still uses."""
        self._is_closed = self._is_forked = True
        self.journal.close()

    def _change(self, kind: Kind, change: Callable[[TopicState], dict[str, Any]]) -> TopicState:
        self._lock(timeout_ms=30_000)
        try:
            self._commit(kind, Author(new_token()), details=change(self.state))
            place = self.state.file_number, self.state.position
        finally:
            self._unlock()
        self._syncer.through(*place)
        return self.state

    def _lock(self, timeout_ms: int) -> None:
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
            if journal.is_behind():
                self._catch_up()
            if self.state.is_deleted:
                raise UnknownTopic(self.name, "was deleted", "create it again or choose another")
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        self.journal.unlock()
        self._mutex.release()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ForkedHandle("topic") if self._is_forked else Closed("topic")

    def _load(self) -> None:
        """Read the newest checkpoint and the commits after it."""
        if self._write:
            self._recover_after_power_cut()
        state = checkpoint.read_newest(
            self.storage, f"{self.directory}/checkpoint", self.incarnation
        )
        self.state = state or TopicState(self.incarnation)
        self.journal.seek(self.state.file_number, self.state.position, self.state.number)
        if self._observer is not None:
            self._observer.on_load(self.state)
        self._read_on()
        while self.journal.has_later_file():
            number = self.state.number
            self._read_on()
            if self.state.number == number:
                self.journal.refuse_cut_file()
                break
        if self.state.number == 0:
            raise UnknownTopic(self.name)
        self._is_stale = False

    def _read_on(self) -> None:
        self._is_stale = True
        for commit in self._new_commits():
            self.state.apply(commit, self.journal.path)
            if self._observer is not None:
                self._observer.on_commit(commit, self.state)
        self._is_stale = False

    def _new_commits(self) -> list[Commit]:
        """Read on; before the first writer of a boot, only as far as it will find all whole."""
        if self._is_unrecovered:
            hint = Synced.read(self.storage, self.directory)
            self._is_unrecovered = hint is None or hint.boot_id != self.storage.boot_id
            if self._is_unrecovered:
                return list(recovery.read_whole(self.journal, hint))
        return self.journal.read_new()

    def _catch_up(self) -> None:
        """Under the lock: read what others wrote, and repair what the dead among them left."""
        self._read_on()
        if self.state.is_deleted:
            return
        if self.journal.open_current() is None:
            self.journal.begin_file()
        self.journal.cut_torn_tail()

    def _append(
        self,
        frames: Sequence[tuple[int, Placeable]],
        author: Author,
        details: dict[str, Any] | None,
    ) -> Appended:
        """Give each frame the next offset of its partition, and commit."""
        if len(frames) == 1 and details is None and self._observer is None:
            partition, frame = frames[0]
            if type(frame) is Frame:
                return self._append_one(partition, frame, author)
        ends = self.state.ends
        placed = []
        next_offsets: dict[int, int] = {}
        for partition, frame in frames:
            self._check_partition(partition)
            base_offset = next_offsets.get(partition, ends[partition])
            placed.append((partition, base_offset, frame))
            next_offsets[partition] = base_offset + frame.record_count
        return self._commit(Kind.APPEND, author, placed, details)

    def _append_one(self, partition: int, frame: Frame, author: Author) -> Appended:
        """The most common commit, with nothing done that it does not need."""
        state = self.state
        if not 0 <= partition < len(state.ends):
            raise UnknownPartition(self.name, partition, len(state.ends))
        now = self._clock() // 1_000_000
        if now < state.time:
            now = state.time
        number = state.number
        is_log_append = state.settings["message.timestamp.type"] == LOG_APPEND_TIME
        parts, length, table, newest = pack_one(
            author, self.incarnation, number, state.position, now, partition,
            state.ends[partition], frame, is_log_append,
        )  # fmt: skip
        self._is_stale = True
        self.journal.append(parts, length)
        state.apply_one(author, partition, frame.record_count, newest, now, length, table)
        self._is_stale = False
        return Appended(table, now, number)

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self.state.partition_count:
            raise UnknownPartition(self.name, partition, self.state.partition_count)

    def _commit(
        self,
        kind: Kind,
        author: Author,
        placed: Sequence[tuple[int, int, Placeable]] = (),
        details: dict[str, Any] | None = None,
    ) -> Appended:
        """Write one commit and apply it. Only under the lock, at the journal's end."""
        state, journal = self.state, self.journal
        # Never earlier than the commit before: look-ups by time rely on it. Not strictly later:
        # at many commits in a millisecond the log's clock would run away from the real one.
        now = max(self._clock() // 1_000_000, state.time)
        number, position = state.number, state.position
        is_log_append = state.settings["message.timestamp.type"] == LOG_APPEND_TIME
        parts, length, meta = pack(
            kind,
            author,
            incarnation=self.incarnation,
            number=number,
            position=position,
            time=now,
            frames=placed,
            log_append=is_log_append,
            details=details,
        )
        if length > COMMIT_BYTES_MAX:
            raise InvalidRecord(
                f"a commit of {length} bytes for {self.name!r} is over {COMMIT_BYTES_MAX}; "
                "send less at a time"
            )
        if len(parts) > _PARTS_MAX:
            parts = [b"".join(parts)]
        self._is_stale = True
        journal.append(parts, length)
        table, meta = meta[: len(placed) * ROW.size], meta[len(placed) * ROW.size :]
        flags = TRANSACTIONAL if author.is_transactional else 0
        commit = Commit(
            kind, flags, number, position, length, now, author.token, author.producer_id,
            author.sequence, author.epoch, table, meta,
        )  # fmt: skip
        state.apply(commit, journal.path if kind is not Kind.APPEND else "")
        if self._observer is not None:
            self._observer.on_commit(commit, state)
        self._is_stale = False
        return Appended(table, now, number)

    def _roll_if_possible(self) -> None:
        """Roll after a commit, which is in the journal and must not look as if it had failed."""
        try:
            self._roll()
        except LogError as error:
            logger.warning("could not begin the next journal file of %s: %s", self.name, error)

    def _roll(self) -> None:
        """Under the lock: end this file and begin the next; the rest is done in the background.

        The file is not synced here: that could take long, with every writer waiting. A power cut
        may therefore take more than one file's commits away, which `recovery` knows.
        """
        forgotten = self.state.expired_producers(self._clock() // 1_000_000)
        if forgotten:
            details = {"producers": forgotten}
            self._commit(Kind.EXPIRE, Author(new_token()), details=details)
        self._commit(Kind.END_OF_FILE, Author(new_token()))
        self.journal.begin_file()
        complete = self.state.files[-1]
        data = checkpoint.encode(self.state, boot_id="")
        number = self.state.number
        if self._finisher is None:
            self._finisher = ThreadPoolExecutor(1, thread_name_prefix="spark-log-finish")
        self._unfinished = [work for work in self._unfinished if not work.done()]
        if len(self._unfinished) >= _UNFINISHED_MAX:
            self._unfinished[0].result()
        self._unfinished.append(self._finisher.submit(self._finish_file, complete, number, data))

    def _finish_file(self, file: JournalFile, number: int, data: bytes) -> None:
        """Sync a complete file, then write its index and a checkpoint that covers it.

        All of this can be done again by others, and none of it is needed to read the log.
        """
        try:
            self._sync_and_describe(file, number, data)
        except LogError as error:
            try:
                self.journal.check_exists()
            except UnknownTopic:
                return  # It was deleted meanwhile: there is nothing left to finish.
            logger.warning("could not finish a journal file of %s: %s", self.name, error)

    def _sync_and_describe(self, file: JournalFile, number: int, data: bytes) -> None:
        self._syncer.through(file.first_number, file.byte_length)
        made = index.scan(
            self.storage,
            self.directory,
            incarnation=self.incarnation,
            file_number=file.first_number,
            end_number=file.end_number,
            byte_length=file.byte_length,
        )
        index.write(self.storage, self.directory, file.first_number, made)
        checkpoint.write(self.storage, f"{self.directory}/checkpoint", number, data, soft=False)

    def _write_soft_checkpoint(self) -> None:
        with self._mutex:
            if self._is_stale:
                return
            data = checkpoint.encode(self.state, self.storage.boot_id)
            number = self.state.number
        try:
            checkpoint.write(self.storage, f"{self.directory}/checkpoint", number, data, soft=True)
        except LogError:
            # It only saves time: the commit that led here is in the journal and acknowledged.
            return

    def _recover_after_power_cut(self) -> None:
        hint = Synced.read(self.storage, self.directory)
        if hint is not None and hint.boot_id == self.storage.boot_id:
            return
        is_locked = self.journal.is_locked
        if not is_locked:
            self.journal.lock(timeout_ms=30_000)
        try:
            hint = Synced.read(self.storage, self.directory)
            if hint is None or hint.boot_id != self.storage.boot_id:
                self._recover(hint)
        finally:
            if not is_locked:
                self.journal.unlock()

    def _recover(self, hint: Synced | None) -> None:
        folder = f"{self.directory}/checkpoint"
        state = checkpoint.read_newest(self.storage, folder, self.incarnation)
        self.state = state or TopicState(self.incarnation)
        self.journal.seek(self.state.file_number, self.state.position, self.state.number)
        recovery.survey(self.journal, self.state, hint)
        if self.state.number == 0:
            raise UnknownTopic(self.name)
        checkpoint.drop_unsynced(self.storage, folder, self.state.number)
        if self.state.is_deleted:
            return
        if self.journal.open_current() is None:
            self.journal.begin_file()
        details = {"epoch": self.state.epoch + 1, "ends": self.state.ends}
        self._commit(Kind.RECOVER, Author(new_token()), details=details)
        self._syncer.through(self.state.file_number, self.state.position)


def create(
    storage: LocalStorage, name: str, incarnation: int, *, partitions: int, config: dict[str, Any]
) -> None:
    """Make a topic by its first commit: from then on it exists, whole."""
    directory = f"topics/{name}/{incarnation}"
    parts, _length, _table = pack(
        Kind.CREATE,
        Author(new_token()),
        incarnation=incarnation,
        number=0,
        position=0,
        time=storage.clock() // 1_000_000,
        details={"partitions": partitions, "config": config},
    )
    # Before the topic exists, so that a missing `synced` always means: lost, check everything.
    try:
        storage.create(f"{directory}/synced", Synced(0, 0, storage.boot_id).encode())
    except NameTaken:
        pass
    try:
        storage.create(f"{directory}/journal/{0:020d}.log", b"".join(parts))
    except NameTaken:
        raise TopicExists(name) from None


def remove_deleted(storage: LocalStorage, name: str, incarnation: int) -> None:
    """Remove the files of an incarnation whose journal ends with a delete commit.

    The mark comes first and stays until a later incarnation exists, so that its number is never
    used again.
    """
    try:
        storage.create(f"topics/{name}/{incarnation}.deleted", b"deleted\n")
    except NameTaken:
        pass
    storage.remove_tree(f"topics/{name}/{incarnation}")
