"""One round of maintenance of one topic: what is due now, in an order that frees the most.

A lock keeps two from doing the same work; a dead holder loses it. It only saves work: correctness
comes from the check at each commit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from broker import forks
from broker.errors import (
    CorruptLog,
    LockTimeout,
    LogError,
    OutcomeUnknown,
    StorageError,
    StoreUnavailable,
)
from broker.maintenance import compaction, delta_view, garbage, retention, sealing
from broker.maintenance.compaction import CompactionUnit
from broker.maintenance.delta_view import Mirrored
from broker.maintenance.sealing import Stopped
from broker.maintenance.units import AnyUnit, Progress, Write, write_here
from broker.metrics import Metrics
from broker.reader import TopicReader
from broker.sealed import SealedFile
from broker.storage import FileLock, LeaseLock, Storage
from broker.topic import Topic

logger = logging.getLogger(__name__)

# How often everything that is not urgent is looked at.
ROUND_MS = 300_000


class Silent:
    """Progress that nobody watches."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int) -> None: ...


@dataclass(slots=True)
class TopicMaintenance:
    """What one round did to a topic. `is_held`: somebody else is at it, so nothing was done.

    `compacted_records` are those that went, `compacted_bytes` what the files are smaller by, and
    `compacted_files` those that others replaced. `conflicts`: how often others had committed when
    a commit was to be made; `dropped_units`: work that did not fit any more then.
    """

    topic: str
    sealed_records: int = 0
    sealed_bytes: int = 0
    sealed_files: int = 0
    merged_files: int = 0
    merged_bytes: int = 0
    compacted_records: int = 0
    compacted_bytes: int = 0
    compacted_files: int = 0
    removed_records: int = 0
    removed_bytes: int = 0
    removed_files: list[str] = field(default_factory=list)
    conflicts: int = 0
    dropped_units: int = 0
    is_held: bool = False


# Fields of `TopicMaintenance`, and what they are counted as.
_COUNTED = {
    "sealed_records": "sealed-records",
    "sealed_bytes": "sealed-bytes",
    "sealed_files": "sealed-files",
    "merged_files": "merged-files",
    "merged_bytes": "merged-bytes",
    "compacted_records": "compacted-records",
    "compacted_bytes": "compacted-bytes",
    "compacted_files": "compacted-files",
    "removed_records": "removed-records",
    "removed_bytes": "removed-bytes",
    "conflicts": "conflict",
    "dropped_units": "dropped-unit",
}


def new_metrics() -> Metrics:
    """Return what rounds of maintenance count.

    `held-round` are those that did nothing since another was at it, `round-error` those that
    failed; `expired-positions` are those of consumer groups.
    """
    rounds = ["round", "held-round", "round-error", "removed-files", "expired-positions"]
    return Metrics("maintenance-metrics", [*rounds, *_COUNTED.values()], {"round-latency": "round"})


class Round:
    """Maintains one topic incarnation once."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        incarnation: int,
        *,
        progress: Progress | None = None,
        metrics: Metrics | None = None,
        write: Write = write_here,
    ) -> None:
        """Args:
        write: writes the files, here and now or on many machines.
        """
        self._metrics = metrics or new_metrics()
        self._storage = storage
        self._name = name
        self._incarnation = incarnation
        self._progress = progress or Silent()
        self._failure: CorruptLog | StorageError | None = None
        self._write = write
        self.done = TopicMaintenance(name)

    def run(self, *, is_forced: bool = False, only_seal: bool = False) -> TopicMaintenance:
        """Do what is due.

        Args:
            is_forced: seal everything that is committed, due or not.
            only_seal: what can wait, waits.
        """
        with hold(self._storage, self._name) as is_ours:
            if not is_ours:
                self.done.is_held = True
                self._metrics.add("held-round")
                return self.done
            begun = time.monotonic()
            topic = Topic(self._storage, self._name, self._incarnation, write=True)
            reader = TopicReader(self._storage, self._name, self._incarnation)
            try:
                with contextlib.suppress(Stopped):
                    self._run(topic, reader, is_forced, only_seal)
            except LogError:
                self._metrics.add("round-error")
                raise
            finally:
                reader.close()
                topic.close()
                self.done.conflicts = topic.conflict_count
                self._count(time.monotonic() - begun)
        return self.done

    def _count(self, seconds: float) -> None:
        metrics = self._metrics
        metrics.add("round")
        metrics.add("round-latency", seconds)
        metrics.add("removed-files", len(self.done.removed_files))
        for name, counted in _COUNTED.items():
            metrics.add(counted, getattr(self.done, name))

    def _run(self, topic: Topic, reader: TopicReader, is_forced: bool, only_seal: bool) -> None:
        if not only_seal:
            with self._one_of_many():
                self._end_file_if_due(topic, is_forced)
            with self._one_of_many():
                self._apply_retention(topic, reader)
        # Only what survives a power cut may be sealed: the journal's copy goes some day.
        topic.sync()
        with self._one_of_many():
            units = sealing.plan(reader.refresh(), self._now(), is_forced=is_forced)
            self._do(topic, reader, units)
        # Before merges hide which records are new; and whatever an earlier round left undone.
        self._mirror(topic)
        if not only_seal:
            self._do_what_can_wait(topic, reader)
        if self._failure is not None:
            raise self._failure

    def _do_what_can_wait(self, topic: Topic, reader: TopicReader) -> None:
        with self._one_of_many():
            self._do(topic, reader, compaction.plan(reader.refresh(), self._now()))
        with self._one_of_many():
            self._do(topic, reader, sealing.plan_merges(reader.refresh()))
        mirrored = self._mirror(topic)
        with self._one_of_many():
            removed = garbage.clean(topic, reader, self._now(), mirrored)
            self.done.removed_files += removed.paths
            self.done.removed_bytes += removed.byte_count
        self._storage.touch(last_round(self._name))

    def _mirror(self, topic: Topic) -> Mirrored | None:
        """Bring the table to the state; None: nobody knows what it names."""
        mirrored = None
        with self._one_of_many():
            mirrored = delta_view.mirror(topic)
        return mirrored

    @contextlib.contextmanager
    def _one_of_many(self) -> Iterator[None]:
        """Let what fails, for ever perhaps, not keep all else from being done; it is raised later.

        A damaged file is not the others' fault, and on a full disk what comes next makes room. A
        store that does not answer would not answer then, either.
        """
        try:
            yield
        except StoreUnavailable:
            raise
        except (CorruptLog, StorageError) as failure:
            self._failure = self._failure or failure

    def _end_file_if_due(self, topic: Topic, is_forced: bool) -> None:
        state, now = topic.refresh(), self._now()
        has_records = state.ends != [
            *state.file_starts, *[0] * (state.partition_count - len(state.file_starts))
        ]  # fmt: skip
        is_due = sealing.is_roll_due(state, now) or retention.is_roll_due(state, now)
        if has_records and (is_forced or is_due):
            topic.end_file()

    def _apply_retention(self, topic: Topic, reader: TopicReader) -> None:
        state = reader.refresh()
        starts = retention.plan(reader, self._now())
        if starts:
            self.done.removed_records += sum(
                state.record_count(partition, state.starts[partition], start)
                for partition, start in starts.items()
            )
            topic.truncate(starts)

    def _do(self, topic: Topic, reader: TopicReader, units: Sequence[AnyUnit]) -> None:
        """Have units written, and let a commit name what was."""
        for unit, written in self._write(reader, units, self._progress):
            with self._one_of_many():
                if isinstance(written, CorruptLog):
                    raise written
                is_compacted = isinstance(unit, CompactionUnit)
                cleaned = {unit.partition: unit.end} if is_compacted else {}
                if written is None or not self._commit(
                    topic, reader, written, unit.removed, cleaned
                ):
                    self.done.dropped_units += 1
                    logger.info("others changed what %s was to be made of: nothing done", unit)
                else:
                    self._note(unit, written)

    def _note(self, unit: AnyUnit, written: list[SealedFile]) -> None:
        done = self.done
        count = sum(file.record_count for file in written)
        size = sum(file.byte_length for file in written)
        if isinstance(unit, CompactionUnit):
            done.compacted_files += len(unit.files)
            done.compacted_records += unit.record_count - count
            # Few records may need more room than before, and a total never goes back.
            done.compacted_bytes += max(0, sum(file.byte_length for file in unit.files) - size)
        elif unit.removed:
            done.merged_files += len(unit.removed)
            done.merged_bytes += size
        else:
            done.sealed_files += len(written)
            done.sealed_records += count
            done.sealed_bytes += size

    def _commit(
        self,
        topic: Topic,
        reader: TopicReader,
        written: list[SealedFile],
        removed: tuple[str, ...],
        cleaned: dict[int, int],
    ) -> bool:
        """Commit files that were written; those that no commit names are removed again."""
        try:
            is_named = topic.seal(written, removed, cleaned)
        except OutcomeUnknown:
            raise  # Perhaps they are named: a later round finds out.
        except LogError:
            with contextlib.suppress(LogError):
                self._discard_unnamed(reader, written)
            raise
        if not is_named:
            self._discard_unnamed(reader, written)
        reader.refresh()
        return is_named

    def _discard_unnamed(self, reader: TopicReader, written: list[SealedFile]) -> None:
        """Remove files again, having looked that no commit names them, whatever was answered."""
        named = {file.name for file in reader.refresh().sealed}
        sealing.discard(reader, [file for file in written if file.name not in named])

    def _now(self) -> int:
        return self._storage.clock() // 1_000_000


def is_round_due(storage: Storage, topic: str) -> bool:
    """Tell whether nobody has maintained a topic for some minutes; a new topic was just now."""
    age = storage.age_ms(last_round(topic))
    if age is None:
        storage.touch(last_round(topic))
    return age is not None and age >= ROUND_MS


def last_round(topic: str) -> str:
    """Return the file that is changed whenever all that was due was done."""
    # Beside the locks: no topic has such a name, and it outlives the topic without harm.
    return f"locks/maintained={topic}"


@contextlib.contextmanager
def hold(storage: Storage, topic: str) -> Iterator[bool]:
    """Be the only one who maintains a topic; yields false if another one is."""
    # No topic has such a name, so no topic has such a lock.
    held = _Held(storage.lock(f"maintain={topic}"))
    if not held.acquire():
        yield False
        return
    try:
        yield True
    finally:
        held.release()


class _Held:
    """The lock of who maintains a topic. A forked child lets go of it, and so outlives no one."""

    def __init__(self, lock: FileLock | LeaseLock) -> None:
        self._lock = lock
        self._is_ours = False
        forks.remember(self)

    def acquire(self) -> bool:
        try:
            self._lock.acquire(timeout_ms=0)
        except LockTimeout:
            self._lock.close()
            return False
        self._is_ours = True
        return True

    def release(self) -> None:
        if self._is_ours:
            self._lock.release()
            self.abandon()
        forks.forget(self)

    def abandon(self) -> None:
        self._is_ours = False
        self._lock.close()
