"""The sender: a producer's thread that turns units into commits, in order.

On a store it makes units ready ahead, and a second thread commits them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from broker.accumulator import Accumulator
from broker.commit import ROW, Author
from broker.config import ProducerOptions
from broker.errors import (
    Closed,
    LogError,
    OutcomeUnknown,
    ProducerFenced,
    SequenceError,
    StoreUnavailable,
    UnknownTopic,
)
from broker.ledger import Appended
from broker.metrics import Metrics
from broker.ready import ReadyUnit
from broker.sending import Placed, Unit
from broker.topic import Topic
from broker.topic_writer import TopicWriter
from broker.workers import Workers

TopicOpener = Callable[[str], Topic]

_PAUSE_SECONDS = 0.05
# How many units are made ready while another one is committed.
AHEAD = 2


class Sender:
    """Takes units from the accumulator and commits them in order.

    Where a commit takes long, the next units are encoded, and their files written, meanwhile; what
    is ready when its turn has come is one commit.
    """

    def __init__(
        self,
        open_topic: TopicOpener,
        accumulator: Accumulator,
        options: ProducerOptions,
        on_open: Callable[[Topic], None],
        *,
        is_ahead: bool = False,
    ) -> None:
        self.writers: dict[str, TopicWriter] = {}
        self._open_topic = open_topic
        self._on_open = on_open
        self._accumulator = accumulator
        self._options = options
        self._conflicts = 0  # Of topics that are closed.
        self.metrics = Metrics(
            "producer-metrics",
            ["record-send", "byte", "batch", "record-retry", "record-error"],
            {"commit-latency": "batch"},
        )
        self._lock = threading.Lock()
        self._give_up = threading.Event()
        self._own_threads: set[int] = set()
        self._ready: deque[ReadyUnit] = deque()
        self._committer = Workers(1, "spark-log-commit") if is_ahead else None
        self._files = Workers(AHEAD, "spark-log-data") if is_ahead else None
        self._thread = threading.Thread(target=self._run, name="spark-log-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def writer(self, topic: str) -> TopicWriter:
        """Return the open topic, opening it first if need be."""
        with self._lock:
            # What is no name, opening refuses.
            writer = self.writers.get(topic) if isinstance(topic, str) else None
            if writer is None:
                writer = self.writers[topic] = TopicWriter(self._open_topic(topic), self._options)
                self._on_open(writer.topic)
            return writer

    @property
    def conflict_count(self) -> int:
        """How often others had committed when this producer came to do so."""
        return self._conflicts + sum(
            writer.topic.conflict_count for writer in list(self.writers.values())
        )

    def stop(self, timeout: float | None) -> None:
        """Wait for what is left; what is not sent in time fails.

        Who asks in a callback, which one of the threads waited for here has called, does not wait.
        """
        if threading.get_ident() in self._own_threads:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._give_up.set()
            for unit in self._accumulator.drop():
                unit.fail(Closed("producer"))
            self._thread.join(timeout)

    def _run(self) -> None:
        self._own_threads.add(threading.get_ident())
        try:
            while (unit := self._accumulator.take()) is not None:
                self._send(unit)
        finally:
            for workers in (self._committer, self._files):
                if workers is not None:
                    workers.close()
            # By the thread that uses them: `stop` may have returned before this one is done.
            for writer in self.writers.values():
                writer.topic.close()

    def _send(self, unit: Unit) -> None:
        try:
            ready = self._prepare(unit)
            if self._committer is not None:
                self._pass_on(ready, self._committer)
        except Exception as error:
            self._end(unit, error)
        else:
            if self._committer is None:
                self._finish([ready], time.monotonic())

    def _pass_on(self, ready: ReadyUnit, committer: Workers) -> None:
        self._ready.append(ready)
        try:
            committer.submit(self._finish_next)
        except BaseException:
            self._ready.remove(ready)
            raise

    def _prepare(self, unit: Unit) -> ReadyUnit:
        writer = self.writer(unit.topic)
        unit.check_incarnation(writer.topic.incarnation)
        frames = unit.encode(writer.chooser, writer.partition_count, writer.codec)
        return ReadyUnit(unit, writer, frames, self._files)

    def _finish_next(self) -> None:
        """Commit what was begun first, with what is ready behind it. Only by the committer."""
        if not self._ready:
            return  # It went with the one before.
        self._own_threads.add(threading.get_ident())
        first, begun = self._ready.popleft(), time.monotonic()
        first.wait()
        group = [first]
        # What could not be written to its file fails, or is tried again, alone.
        while first.is_placed and self._ready and self._ready[0].is_placed:
            if self._ready[0].writer is not first.writer:
                break
            group.append(self._ready.popleft())
        self._finish(group, begun)

    def _finish(self, group: list[ReadyUnit], begun: float) -> None:
        try:
            if self._give_up.is_set():
                raise Closed("producer")
            writer = group[0].writer
            if self.writers.get(writer.name) is not writer:
                # The topic was deleted meanwhile: this is for the one that took its place.
                group = self._prepare_again(group)
            if group:
                self._commit(group, begun)
        except BaseException as error:
            if isinstance(error, UnknownTopic) or isinstance(error.__cause__, UnknownTopic):
                self._forget(group[0].unit.topic)
            for ready in group:
                self._end(ready.unit, error)
            if not isinstance(error, Exception):
                raise
        else:
            for ready in group:
                self._accumulator.done(ready.unit)

    def _prepare_again(self, group: list[ReadyUnit]) -> list[ReadyUnit]:
        made = []
        for ready in group:
            try:
                made.append(self._prepare(ready.unit))
            except Exception as error:
                self._end(ready.unit, error)
        return made

    def _end(self, unit: Unit, error: BaseException) -> None:
        """Whoever holds the future must hear of any error: this is the last frame of a thread."""
        if isinstance(error, LogError):
            self.metrics.add("record-error", unit.record_count)
        unit.fail(error)
        self._accumulator.done(unit)

    def _commit(self, group: list[ReadyUnit], begun: float) -> None:
        writer = group[0].writer
        appended = Appended(b"", time.time_ns() // 1_000_000, -1)
        if any(ready.frames for ready in group):
            appended = self._append(group, begun + self._options.delivery_timeout_ms / 1000)
            seconds = time.monotonic() - begun
            self._count([frame for ready in group for frame in ready.frames], seconds)
            writer.committed()
        if len(group) == 1:
            group[0].unit.succeed(appended, writer.is_log_append)
            return
        start = 0
        for ready in group:
            end = start + len(ready.frames) * ROW.size
            ready.unit.succeed(
                appended._replace(table=appended.table[start:end]), writer.is_log_append
            )
            start = end

    def _count(self, frames: Placed, seconds: float) -> None:
        totals = self.metrics.totals
        totals["batch"] += 1
        totals["commit-latency"] += seconds
        for _partition, frame in frames:
            totals["record-send"] += frame.record_count
            totals["byte"] += frame.byte_length

    def _append(self, group: list[ReadyUnit], deadline: float) -> Appended:
        """Try until it is committed, refused, or the deadline has passed."""
        writer = group[0].writer
        author: Author | None = None
        placed: Placed | None = None
        is_first = True
        is_unknown = False  # Whether one of the tries may have been carried out.
        while True:
            try:
                if author is None:
                    author = self._author(writer)
                if placed is None:
                    placed = [frame for ready in group for frame in ready.place()]
                return writer.topic.append(
                    placed,
                    author,
                    timeout_ms=self._patience_ms(deadline),
                    durable=self._options.durability == "fsync",
                )
            except LogError as error:
                is_lost = isinstance(error, OutcomeUnknown)
                is_unknown = is_unknown or is_lost
                # The log has forgotten a producer that was silent for a week. If this commit was
                # never tried before, a new identity is as good; otherwise it could be there twice.
                is_forgotten = isinstance(error, SequenceError) and is_first
                if is_forgotten and self._options.transactional_id is None:
                    writer.forget_identity()
                    author = None
                elif not (error.retriable or is_lost) or self._is_over(deadline):
                    if not is_unknown:
                        raise self._named(error) from error.__cause__
                    if not isinstance(error, ProducerFenced):  # Who was fenced stays so.
                        writer.forget_identity()
                    if is_lost:
                        raise
                    raise OutcomeUnknown(
                        f"not known whether it was written: an earlier try may have been, and the "
                        f"last one failed: {self._named(error)}"
                    ) from error
                else:
                    self._give_up.wait(_PAUSE_SECONDS)
            self.metrics.add("record-retry", sum(ready.unit.record_count for ready in group))
            is_first = is_first and placed is None

    def _author(self, writer: TopicWriter) -> Author:
        """Return the identity of a commit. To take it over may take a commit, without records."""
        try:
            return writer.author()
        except OutcomeUnknown as error:
            raise StoreUnavailable(f"topic {writer.name!r}: {error}") from error

    def _named(self, error: LogError) -> LogError:
        """Return an error as it is told to whoever sent the records."""
        if not isinstance(error, ProducerFenced):
            return error
        name = f"transactional_id {self._options.transactional_id!r}"
        return ProducerFenced(name, error.args[1], error.args[2])

    def _patience_ms(self, deadline: float) -> int:
        rest = max(0, int((deadline - time.monotonic()) * 1000))
        return min(rest, self._options.request_timeout_ms)

    def _is_over(self, deadline: float) -> bool:
        return time.monotonic() >= deadline or self._give_up.is_set()

    def _forget(self, topic: str) -> None:
        """Drop a topic that is gone, so that the next send sees what has taken its place."""
        with self._lock:
            writer = self.writers.pop(topic, None)
        if writer is not None:
            self._conflicts += writer.topic.conflict_count
            writer.topic.close()
