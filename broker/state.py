"""The state that a topic's journal describes: a pure function of its commits.

Two processes that have applied the same commits agree on everything here. Nothing in this module
reads a clock or a file; what depends on time was decided by a writer and is in the commits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker.commit import ROW, TRANSACTIONAL, Author, Commit, Kind
from broker.config import topic_settings
from broker.errors import CorruptLog, ProducerFenced, SequenceError
from broker.sealed import SealedFile, SealedFiles

PRODUCER_EXPIRY_MS = 7 * 86_400_000
# How long the state remembers a file that nothing names and that should have been removed by then.
RETIRED_KEPT_MS = 7 * 86_400_000


class ProducerEntry(NamedTuple):
    """The last commit of one producer: enough to know a repetition and to answer it."""

    epoch: int
    sequence: int
    token: bytes
    time: int
    is_transactional: bool
    table: bytes


class TransactionEntry(NamedTuple):
    """The last version that an application committed under its own name."""

    version: int
    time: int
    table: bytes


class JournalFile(NamedTuple):
    """A journal file that is complete: commits [first_number, end_number).

    `time` is that of its first commit, in milliseconds; 0 where it is not known.
    """

    first_number: int
    end_number: int
    byte_length: int
    max_timestamp: int
    start_offsets: tuple[int, ...]
    time: int = 0


@dataclass(slots=True)
class TopicState:
    """What the commits before `number` say."""

    incarnation: int
    number: int = 0
    time: int = 0
    epoch: int = 0
    given: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    producers: dict[int, ProducerEntry] = field(default_factory=dict)
    transactions: dict[str, TransactionEntry] = field(default_factory=dict)
    epochs: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    files: list[JournalFile] = field(default_factory=list)
    file_number: int = 0
    file_starts: tuple[int, ...] = ()
    file_max_timestamp: int = -1
    file_time: int = 0
    position: int = 0
    sealed: SealedFiles = field(default_factory=SealedFiles)
    sealed_ends: list[int] = field(default_factory=list)
    cleaned_ends: list[int] = field(default_factory=list)
    retired: dict[str, int] = field(default_factory=dict)
    is_deleted: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = topic_settings(self.given)

    @property
    def partition_count(self) -> int:
        return len(self.ends)

    def apply(self, commit: Commit, path: str) -> None:
        """Move on by one commit; its number and position were checked when it was read."""
        if not self.file_time:
            self.file_time = commit.time
        if commit.kind is Kind.APPEND:
            self._append(commit, path)
        else:
            _APPLY[commit.kind](self, commit)
        self.number = commit.number + 1
        self.time = commit.time
        self.position = commit.position + commit.length
        if commit.kind is Kind.END_OF_FILE:
            self._next_file()

    def apply_one(
        self, author: Author, partition: int, record_count: int, newest: int, time: int,
        length: int, table: bytes,
    ) -> None:  # fmt: skip
        """Move on by an append of one frame that this process has just written itself."""
        token, producer_id, sequence, epoch, is_transactional = author
        if not self.file_time:
            self.file_time = time
        self.ends[partition] += record_count
        if newest > self.file_max_timestamp:
            self.file_max_timestamp = newest
        if producer_id:
            self.producers[producer_id] = ProducerEntry(
                epoch, sequence, token, time, is_transactional, table
            )
        self.number += 1
        self.time = time
        self.position += length

    def repeated(self, author: Author) -> bytes | None:
        """Return the table of the commit that this one repeats, or None if it is new.

        Raises:
            ProducerFenced: a newer owner of the transactional id has committed.
            SequenceError: it is neither new nor the last one.
        """
        last = self.producers.get(author.producer_id)
        if last is None or author.epoch > last.epoch:
            if author.sequence:
                raise SequenceError(author.producer_id, author.sequence, 0)
            return None
        if author.epoch == last.epoch and author.sequence == last.sequence + 1:
            return None
        if author.token == last.token:
            return last.table
        if author.is_transactional or author.epoch < last.epoch:
            raise ProducerFenced(f"producer {author.producer_id:x}", author.epoch, last.epoch)
        raise SequenceError(author.producer_id, author.sequence, last.sequence + 1)

    def finished(self, application: str, version: int) -> TransactionEntry | None:
        """Return an application's last transaction if this version is not after it."""
        last = self.transactions.get(application)
        return last if last is not None and version <= last.version else None

    def expired_producers(self, now: int) -> list[int]:
        """Return the producers that have been silent for so long that nobody repeats a commit."""
        return [
            producer_id
            for producer_id, last in self.producers.items()
            if not last.is_transactional and now - last.time > PRODUCER_EXPIRY_MS
        ]

    def end_of_epoch(self, epoch: int, partition: int) -> int:
        """Return where the records of `epoch` end: a position above it was lost in a power cut."""
        for later, ends in self.epochs:
            if later > epoch:
                return ends[partition] if partition < len(ends) else 0
        return self.ends[partition]

    def record_count(self, partition: int, start: int, end: int) -> int:
        """Return how many records there are from `start` to before `end`, as the state knows it.

        Compaction leaves fewer than offsets. Where a range cuts through a compacted file, the part
        of it counts with the most records that it may have.
        """
        sealed = sum(file.records_in(start, end) for file in self.sealed.of(partition))
        return sealed + max(0, end - max(start, self.sealed_ends[partition]))

    def _append(self, commit: Commit, path: str) -> None:
        ends, newest = self.ends, self.file_max_timestamp
        table = commit.table
        for row in ROW.iter_unpack(table) if len(table) != ROW.size else (ROW.unpack(table),):
            partition = row[0]
            if partition >= len(ends) or ends[partition] != row[3]:
                raise CorruptLog(path, commit.position, "a commit's offsets do not follow the last")
            ends[partition] += row[4]
            if row[8] > newest:
                newest = row[8]
        self.file_max_timestamp = newest
        if commit.producer_id:
            self.producers[commit.producer_id] = ProducerEntry(
                commit.epoch,
                commit.sequence,
                commit.token,
                commit.time,
                bool(commit.flags & TRANSACTIONAL),
                table,
            )
        if commit.meta:
            details = commit.details()
            if "transaction" in details:
                name, version = details["transaction"]
                self.transactions[name] = TransactionEntry(version, commit.time, table)

    def _configure(self, commit: Commit) -> None:
        details = commit.details()
        added = details.get("partitions", len(self.ends)) - len(self.ends)
        for offsets in (self.starts, self.ends, self.sealed_ends, self.cleaned_ends):
            offsets += [0] * added
        self.given = details.get("config", self.given)
        self.settings = topic_settings(self.given)
        if commit.kind is Kind.CREATE:
            self.file_starts = tuple(self.ends)

    def _truncate(self, commit: Commit) -> None:
        for partition, start in commit.details()["starts"].items():
            self.starts[int(partition)] = max(self.starts[int(partition)], start)
        gone = [file.name for file in self.sealed if file.end <= self.starts[file.partition]]
        self._retire(self.sealed.replace(gone, []), commit.time)

    def _seal(self, commit: Commit) -> None:
        details = commit.details()
        added = [SealedFile(*row) for row in details["added"]]
        self._retire(self.sealed.replace(details.get("removed", []), added), commit.time)
        for file in added:
            self.sealed_ends[file.partition] = max(self.sealed_ends[file.partition], file.end)
        for partition, end in details.get("cleaned", {}).items():
            self.cleaned_ends[int(partition)] = end

    def _retire(self, files: list[SealedFile], time: int) -> None:
        """Note when files stopped being named, and forget those that are long gone."""
        forgotten = time - RETIRED_KEPT_MS - self.settings["table.delete.delay.ms"]
        self.retired = {name: since for name, since in self.retired.items() if since >= forgotten}
        self.retired |= {f"sealed/{file.name}": time for file in files}
        for journal_file in self.freed_files():
            self.retired.setdefault(f"journal/{journal_file.first_number}", time)

    def freed_files(self) -> list[JournalFile]:
        """Return the first journal files, as far as all their records are sealed or removed."""
        freed = []
        ends = [*(file.start_offsets for file in self.files), self.file_starts][1:]
        needed = [max(pair) for pair in zip(self.starts, self.sealed_ends, strict=True)]
        for file, end in zip(self.files, ends, strict=True):
            if any(offset > free for offset, free in zip(end, needed, strict=False)):
                break
            freed.append(file)
        return freed

    def _trim(self, commit: Commit) -> None:
        before = commit.details()["before"]
        for file in self.files:
            if file.first_number < before:
                self.retired.pop(f"journal/{file.first_number}", None)
        self.files = [file for file in self.files if file.first_number >= before]

    def _delete(self, commit: Commit) -> None:
        self.is_deleted = True

    def _end_file(self, commit: Commit) -> None:
        self.files.append(
            JournalFile(
                self.file_number,
                commit.number + 1,
                commit.position + commit.length,
                self.file_max_timestamp,
                self.file_starts,
                self.file_time,
            )
        )

    def _next_file(self) -> None:
        self.file_number = self.number
        self.file_starts = tuple(self.ends)
        self.file_max_timestamp = -1
        self.file_time = 0
        self.position = 0

    def _recover(self, commit: Commit) -> None:
        details = commit.details()
        self.epoch = details["epoch"]
        self.epochs.append((self.epoch, tuple(details["ends"])))

    def _expire(self, commit: Commit) -> None:
        for producer_id in commit.details()["producers"]:
            self.producers.pop(producer_id, None)


_APPLY = {
    Kind.CREATE: TopicState._configure,
    Kind.CONFIG: TopicState._configure,
    Kind.TRUNCATE: TopicState._truncate,
    Kind.DELETE: TopicState._delete,
    Kind.END_OF_FILE: TopicState._end_file,
    Kind.RECOVER: TopicState._recover,
    Kind.EXPIRE: TopicState._expire,
    Kind.SEAL: TopicState._seal,
    Kind.TRIM: TopicState._trim,
}
