"""One topic, open: what can be done with it, each as one commit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from broker import checkpoint, index
from broker.batch import Frame
from broker.commit import Author, Commit, FramePlace, Kind, Placeable, pack, pack_one
from broker.errors import AlreadyExists as NameTaken
from broker.errors import Conflict, InvalidRecord, OffsetOutOfRange, TopicExists, UnknownPartition
from broker.home import remove_deleted, topic_home
from broker.ledger import (
    REMOTE_CHECKPOINT_COMMITS,
    Appended,
    CompleteFile,
    Ledger,
    new_token,
)
from broker.naming import may_be_named
from broker.records import TopicPartition
from broker.sealed import SealedFile, fits
from broker.state import TopicState
from broker.storage import Storage
from broker.synced import Synced

LOG_APPEND_TIME = "LogAppendTime"


class Observer(Protocol):
    """Somebody who wants to see each commit as it is applied."""

    def on_load(self, state: TopicState) -> None:
        """The state was read from a checkpoint; commits after it follow."""

    def on_commit(self, commit: Commit, state: TopicState) -> None:
        """This commit was applied, and this is the state now."""


class Topic(Ledger[TopicState]):
    """An open topic incarnation."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        incarnation: int,
        *,
        write: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer
        super().__init__(storage, topic_home(name, incarnation), write=write)

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
        begun, tries = time.monotonic(), 0
        while True:
            # As `_attempt`, without a function for each of the most common commits.
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
                    if self._is_file_full:
                        self._roll_if_possible()
                place = state.file_number, state.position
                break
            except Conflict:
                tries += 1
            finally:
                self._unlock()
            self.give_way(tries, begun, timeout_ms)
        if durable:
            self._syncer.through(*place)
        if appended.number % self._checkpoint_commits == 0:
            self._write_soft_checkpoint()
        return appended

    def fence(self, producer_id: int, *, timeout_ms: int = 30_000) -> Author:
        """Take over a transactional id: an empty commit of a higher epoch."""

        def act(state: TopicState) -> Author:
            last = state.producers.get(producer_id)
            epoch = 0 if last is None else last.epoch + 1
            author = Author(new_token(), producer_id, 0, epoch, is_transactional=True)
            self._commit(Kind.APPEND, author)
            return author

        return self._attempt(act, timeout_ms)

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

    def seal(
        self, added: Sequence[SealedFile], removed: Sequence[str], cleaned: dict[int, int]
    ) -> bool:
        """Let files hold what the journal, or the files `removed`, held until now.

        Returns:
            False if the state has changed so that they no longer fit; then nothing was committed.
        """

        def act(state: TopicState) -> tuple[int, int] | None:
            policy = state.settings["cleanup.policy"]
            if (
                not fits(state, added, removed)
                or not self._may_name(file.name for file in added)
                or (cleaned and "compact" not in policy)
            ):
                return None
            details: dict[str, Any] = {"added": [list(file) for file in added]}
            if removed:
                details["removed"] = list(removed)
            if cleaned:
                details["cleaned"] = {str(number): end for number, end in cleaned.items()}
            self._commit(Kind.SEAL, Author(new_token()), details=details)
            return state.file_number, state.position

        place = self._attempt(act)
        if place is not None:
            self._syncer.through(*place)
        return place is not None

    def end_file(self) -> None:
        """Begin a new journal file, so that the present one can be sealed."""
        # Another may have done so just now: an empty file is not worth ending.
        self._attempt(lambda state: self._roll() if state.position else None)
        self.finish_background_work()

    def trim(self, before: int) -> None:
        """Forget the journal files before this one: all their records are sealed or removed."""
        self._change(Kind.TRIM, lambda state: {"before": before})

    def delete(self) -> None:
        """Commit the end of this incarnation, then remove its files."""
        self._change(Kind.DELETE, lambda state: {})
        self.close()
        remove_deleted(self.storage, self.home)

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
        files = {frame.file for _, frame in frames if isinstance(frame, FramePlace)}
        if not self._may_name(files):
            raise InvalidRecord(
                f"records for {self.name!r} were staged more than three days ago, and their files "
                "may be gone; write them again"
            )
        ends = self.state.ends
        placed = []
        next_offsets: dict[int, int] = {}
        for partition, frame in frames:
            self._check_partition(partition)
            base_offset = next_offsets.get(partition, ends[partition])
            placed.append((partition, base_offset, frame))
            next_offsets[partition] = base_offset + frame.record_count
        return self._commit(Kind.APPEND, author, placed, details, self._is_log_append)

    def _append_one(self, partition: int, frame: Frame, author: Author) -> Appended:
        """The most common commit, with nothing done that it does not need."""
        state = self.state
        if not 0 <= partition < len(state.ends):
            raise UnknownPartition(self.name, partition, len(state.ends))
        now = self._clock() // 1_000_000
        if now < state.time:
            now = state.time
        number = state.number
        parts, length, table, newest = pack_one(
            author, self.incarnation, number, state.position, now, partition,
            state.ends[partition], frame, self._is_log_append,
        )  # fmt: skip
        self._write_commit(parts, length)
        state.apply_one(author, partition, frame.record_count, newest, now, length, table)
        self._is_stale = False
        return Appended(table, now, number)

    @property
    def _is_log_append(self) -> bool:
        return bool(self.state.settings["message.timestamp.type"] == LOG_APPEND_TIME)

    def _may_name(self, names: Iterable[str]) -> bool:
        """Tell whether files are so young that no cleaner takes them for garbage."""
        now = max(self._clock() // 1_000_000, self.state.time)
        return all(may_be_named(name, now) for name in names)

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self.state.partition_count:
            raise UnknownPartition(self.name, partition, self.state.partition_count)

    def _new_state(self) -> TopicState:
        return TopicState(self.home.incarnation)

    def _encode(self, state: TopicState, boot_id: str) -> bytes:
        return checkpoint.encode(state, boot_id)

    def _decode(self, data: bytes, path: str) -> tuple[TopicState, str]:
        return checkpoint.decode(data, path)

    def _recovery_details(self) -> dict[str, Any]:
        return {"ends": self.state.ends}

    @property
    def _file_bytes_max(self) -> int:
        size: int = self.state.settings["segment.bytes"]
        return size

    @property
    def _checkpoint_commits(self) -> int:
        count: int = self.state.settings["checkpoint.commits"]
        # Each commit after a checkpoint is a request for everybody who opens the topic there.
        return min(count, REMOTE_CHECKPOINT_COMMITS) if self.storage.is_remote else count

    def _before_end_of_file(self) -> None:
        forgotten = self.state.expired_producers(self._clock() // 1_000_000)
        if forgotten:
            details = {"producers": forgotten}
            self._commit(Kind.EXPIRE, Author(new_token()), details=details)

    def _describe_file(self, file: CompleteFile) -> None:
        made = index.scan(
            self.storage,
            self.directory,
            incarnation=self.incarnation,
            file_number=file.first_number,
            end_number=file.end_number,
            byte_length=file.byte_length,
        )
        index.write(self.storage, self.directory, file.first_number, made)

    def _on_load(self) -> None:
        if self._observer is not None:
            self._observer.on_load(self.state)

    def _on_commit(self, commit: Commit) -> None:
        if self._observer is not None:
            self._observer.on_commit(commit, self.state)


def create(
    storage: Storage, name: str, incarnation: int, *, partitions: int, config: dict[str, Any]
) -> None:
    """Make a topic by its first commit: from then on it exists, whole."""
    directory = topic_home(name, incarnation).directory
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
        storage.create_appended(f"{directory}/journal/{0:020d}.log", b"".join(parts))
    except NameTaken:
        raise TopicExists(name) from None
