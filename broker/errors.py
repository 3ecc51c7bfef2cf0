"""What can go wrong. Every error is a `LogError`; a class exists where a caller acts differently.

LogError
├── InvalidOption            an option or setting that is unknown, or a value it cannot take
├── LogNotFound              no log at this place
├── NotALog                  files that are not ours
├── UnsupportedFormat        written by a newer version
├── InvalidTopicName
├── UnknownTopic             no such topic, or deleted
├── TopicExists
├── UnknownPartition
├── InvalidGroupName
├── UnknownGroup             no such consumer group, or deleted
├── GroupNotEmpty            only possible while a group has no members
├── CommitFailed             positions of partitions that are not the member's (any more)
├── FencedInstanceId         a newer consumer with the same group_instance_id exists
├── InvalidRecord            wrong type, wrong columns, or no key where one is needed
│   └── RecordTooLarge
├── OffsetOutOfRange         the partition does not hold this offset
│   └── LostPosition         a group's position was in records that a power cut took
├── NoPosition               nowhere to start reading, and auto_offset_reset is "none"
├── BufferExhausted          the producer's memory stayed full for max_block_ms
├── Closed                   used after close()
├── ForkedHandle             inherited from a parent process
├── TransactionError         transaction calls in the wrong order, or over two topics
├── ProducerFenced           a newer owner of the transactional id exists
├── SequenceError            a producer's commits do not follow each other
├── LockTimeout              another process holds the lock (retriable: nothing was written)
├── OutcomeUnknown           a commit may or may not be in the log
├── MaintenanceFailed        some topics or groups could not be maintained, the others were
├── StorageError             the store said no: permissions, I/O
│   ├── DiskFull             nothing was written
│   └── AlreadyExists        put-if-absent found the name taken
└── CorruptLog               bytes on disk that are not what was written
    └── MissingFile          a file that the log names is not there
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from broker.maintenance.keeping import TopicMaintenance
    from broker.records import TopicPartition


class LogError(Exception):
    """The base of every error the log raises on purpose."""

    retriable = False


class InvalidOption(LogError):
    """An option or setting is unknown, or has a value it cannot take."""


class LogNotFound(LogError):
    """There is no log at the given place, and it was not to be created."""

    def __init__(self, root: str) -> None:
        super().__init__(root)

    def __str__(self) -> str:
        return f"no log at {self.args[0]}; check the path, or open it with create=True"


class NotALog(LogError):
    """The directory holds something that is not a log."""


class UnsupportedFormat(LogError):
    """The log was written in a format this version does not understand."""

    def __init__(self, where: str, found: object, understood: str) -> None:
        super().__init__(where, found, understood)

    def __str__(self) -> str:
        where, found, understood = self.args
        return (
            f"{where} is in format version {found!r}; this version understands {understood}. "
            "Upgrade spark-log to read it."
        )


class InvalidTopicName(LogError):
    """A topic name that Kafka would refuse as well."""

    def __init__(self, name: object, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        name, reason = self.args
        return f"topic name {name!r} {reason}; use 1 to 249 of the characters a-z A-Z 0-9 . _ -"


class UnknownTopic(LogError):
    """The topic does not exist, or was deleted under its user."""

    def __init__(self, topic: str, detail: str = "does not exist", hint: str = "") -> None:
        super().__init__(topic, detail, hint)

    def __str__(self) -> str:
        topic, detail, hint = self.args
        return f"topic {topic!r} {detail}" + (f"; {hint}" if hint else "")


class TopicExists(LogError):
    """A topic of this name is there already."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)

    def __str__(self) -> str:
        return f"topic {self.args[0]!r} exists already; choose another name or delete it first"


class UnknownPartition(LogError):
    """The topic has no such partition."""

    def __init__(self, topic: str, partition: int, partition_count: int) -> None:
        super().__init__(topic, partition, partition_count)

    def __str__(self) -> str:
        topic, partition, count = self.args
        if type(partition) is not int:
            return f"topic {topic!r} has no partition {partition!r}; give a whole number (int)"
        return (
            f"topic {topic!r} has no partition {partition}; it has {count}, numbered 0 to "
            f"{count - 1}. Use one of these, or add partitions."
        )


class InvalidGroupName(LogError):
    """A group name that no file can be named after."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        name, reason = self.args
        shown = name if len(name) <= 60 else name[:57] + "..."
        return f"group name {shown!r} {reason}; use 1 to 240 bytes of text"


class UnknownGroup(LogError):
    """The consumer group does not exist, or was deleted under its user."""

    def __init__(self, group: str, detail: str = "does not exist", hint: str = "") -> None:
        super().__init__(group, detail, hint)

    def __str__(self) -> str:
        group, detail, hint = self.args
        return f"group {group!r} {detail}" + (f"; {hint}" if hint else "")


class GroupNotEmpty(LogError):
    """Something that only an empty group allows was asked of one with members."""

    def __init__(self, group: str, member_count: int, what: str) -> None:
        super().__init__(group, member_count, what)

    def __str__(self) -> str:
        group, count, what = self.args
        return (
            f"group {group!r} has {count} active member{'s' if count != 1 else ''}: cannot {what}. "
            "Stop its consumers first, or use another group."
        )


class CommitFailed(LogError):
    """Positions were refused: their partitions are not, or no longer, this member's."""

    def __init__(self, group: str, why: str, generation: int) -> None:
        super().__init__(group, why, generation)

    def __str__(self) -> str:
        group, why, generation = self.args
        return (
            f"group {group!r}, now at generation {generation}, refused the positions: {why}. "
            "Nothing was written, and others read these records again: poll to go on as a member. "
            "If polls are far apart, raise max_poll_interval_ms or lower max_poll_records."
        )


class FencedInstanceId(LogError):
    """Another consumer has taken over this static member's name."""

    def __init__(self, group: str, instance_id: str) -> None:
        super().__init__(group, instance_id)

    def __str__(self) -> str:
        group, instance_id = self.args
        return (
            f"a newer consumer of group {group!r} has group_instance_id={instance_id!r}; close "
            "this one, or give each its own"
        )


class InvalidRecord(LogError):
    """A record or batch that cannot be stored as it is."""


class RecordTooLarge(InvalidRecord):
    """A record is larger than the topic or the producer's memory takes."""

    def __init__(self, topic: str, size: int, limit: int, setting: str) -> None:
        super().__init__(topic, size, limit, setting)

    def __str__(self) -> str:
        topic, size, limit, setting = self.args
        return (
            f"a record of {size} bytes for topic {topic!r} is over {setting}={limit}; "
            f"send smaller records or raise {setting}"
        )


class OffsetOutOfRange(LogError):
    """A read asked for an offset the partition does not hold."""

    def __init__(self, partition: TopicPartition, offset: int, start: int, end: int) -> None:
        super().__init__(partition, offset, start, end)
        self.partition, self.offset, self.start, self.end = partition, offset, start, end

    def __str__(self) -> str:
        place = f"{self.partition.topic}-{self.partition.partition}"
        why = (
            "Retention or delete_records removed it"
            if self.offset < self.start
            else "It is past the end"
        )
        return (
            f"{place} has no offset {self.offset}; it holds [{self.start}, {self.end}). "
            f"{why}: choose an offset in that range."
        )


class LostPosition(OffsetOutOfRange):
    """A group had read records that a power cut took; their offsets are, or will be, of others."""

    def __init__(
        self, partition: TopicPartition, offset: int, start: int, end: int, lost_from: int
    ) -> None:
        super().__init__(partition, offset, start, end)
        self.args = (partition, offset, start, end, lost_from)
        self.lost_from = lost_from

    def __str__(self) -> str:
        place = f"{self.partition.topic}-{self.partition.partition}"
        return (
            f"the group's position {self.offset} in {place} is lost: a power cut took the offsets "
            f"[{self.lost_from}, {self.offset}) after they were read, and other records get them. "
            f"Seek, or reset the group, to {self.lost_from} to read on with those, or elsewhere in "
            f"[{self.start}, {self.end}]."
        )


class NoPosition(LogError):
    """A consumer has nowhere to start and was told not to choose."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(partition)

    def __str__(self) -> str:
        (at,) = self.args
        return (
            f"no position for {at.topic}-{at.partition} and auto_offset_reset='none'; seek to an "
            "offset, or set auto_offset_reset to 'earliest' or 'latest'"
        )


class BufferExhausted(LogError):
    """The producer's memory stayed full for as long as `send` may block."""

    retriable = True

    def __init__(self, buffer_memory: int, max_block_ms: int) -> None:
        super().__init__(buffer_memory, max_block_ms)

    def __str__(self) -> str:
        memory, block = self.args
        return (
            f"buffer_memory={memory} stayed full for max_block_ms={block}; the record was not "
            "taken. The store is slower than the sender: wait, or raise buffer_memory."
        )


class Closed(LogError):
    """A producer, consumer or log was used after it was closed."""

    def __init__(self, what: str) -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return f"this {self.args[0]} is closed; open a new one"


class ForkedHandle(LogError):
    """A producer, consumer or log was inherited by a forked process."""

    def __init__(self, what: str) -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return (
            f"this {self.args[0]} belongs to the parent process and cannot be used after a fork; "
            "open a new one in the child"
        )


class TransactionError(LogError):
    """Transaction calls in the wrong order, or a transaction over two topics."""


class ProducerFenced(LogError):
    """A newer owner of the same transactional id has taken over."""

    def __init__(self, owner: str, epoch: int, current: int) -> None:
        super().__init__(owner, epoch, current)

    def __str__(self) -> str:
        owner, epoch, current = self.args
        return (
            f"{owner} at epoch {epoch} is fenced: a newer owner holds epoch {current}. "
            "Stop this producer; nothing of this commit was written."
        )


class SequenceError(LogError):
    """A producer's commit does not follow the last one the log knows of it."""

    def __init__(self, producer_id: int, sequence: int, expected: int) -> None:
        super().__init__(producer_id, sequence, expected)

    def __str__(self) -> str:
        producer_id, sequence, expected = self.args
        return (
            f"producer {producer_id:x} sent sequence {sequence}, expected {expected}; nothing was "
            "written. Open a new producer."
        )


class LockTimeout(LogError):
    """Another process holds the lock for longer than we wait. Nothing was written."""

    retriable = True

    def __init__(self, path: str, waited_ms: int, holder: str) -> None:
        super().__init__(path, waited_ms, holder)

    def __str__(self) -> str:
        path, waited_ms, holder = self.args
        return (
            f"waited {waited_ms} ms for the lock {path}, held by {holder}; nothing was written. "
            "If that process is stopped or stuck, continue or end it."
        )


class OutcomeUnknown(LogError):
    """A commit may or may not be in the log; sending it again with the same identity is safe."""


class MaintenanceFailed(LogError):
    """Some of many could not be maintained; `done` is what was done to the others.

    `failures` has the error of each, by "topic 'name'" or "group 'name'".
    """

    def __init__(self, failures: Mapping[str, LogError], done: Sequence[TopicMaintenance]) -> None:
        super().__init__(failures, done)
        self.failures, self.done = failures, done

    def __str__(self) -> str:
        told = "; ".join(f"{what}: {error}" for what, error in self.failures.items())
        return f"could not maintain {told}"


class StorageError(LogError):
    """The store refused or failed."""


class DiskFull(StorageError):
    """There was no room; nothing was written."""


class AlreadyExists(StorageError):
    """Put-if-absent found the name taken."""


class StoreUnavailable(StorageError):
    """The store did not answer: what was asked of it may or may not have been done."""

    retriable = True


class Conflict(StorageError):
    """Another one has written at this place first. Nothing was written."""

    retriable = True


class CorruptLog(LogError):
    """Bytes on disk that are not what was written. Never skipped, never cut."""

    def __init__(self, path: str, position: int, what: str) -> None:
        super().__init__(path, position, what)
        self.path, self.position, self.what = path, position, what

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged at byte {self.position}: {self.what}. "
            "Run `spark-log verify` for all damage, and restore the file from a copy."
        )


class MissingFile(CorruptLog):
    """A file that the log names is not there: lost, or no longer needed since it was named."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InvalidOption:
    """Build the error for a name nobody knows, with the nearest known one."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.65)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return InvalidOption(f"unknown {kind} {name!r}; {hint}")
