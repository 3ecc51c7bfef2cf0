"""The sender: one thread for each producer that turns units into commits, in order."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable

from broker.accumulator import Accumulator
from broker.batch import Frame
from broker.commit import NO_PRODUCER, Author
from broker.config import ProducerOptions
from broker.data_file import DataFile
from broker.errors import (
    Closed,
    LogError,
    OutcomeUnknown,
    ProducerFenced,
    SequenceError,
    UnknownTopic,
)
from broker.ledger import Appended
from broker.metrics import Metrics
from broker.partitioner import PartitionChooser
from broker.sending import Placed, Unit
from broker.topic import Topic

TopicOpener = Callable[[str], Topic]

_PAUSE_SECONDS = 0.05
_BY_REFERENCE_BYTES_MIN = 1 << 20


class TopicWriter:
    """One topic as one producer sees it: its settings, and the producer's identity there."""

    def __init__(self, topic: Topic, options: ProducerOptions) -> None:
        self.topic = topic
        self.name = topic.name
        self.chooser = PartitionChooser(options.partitioner)
        self._options = options
        self._tokens = itertools.count()
        self._token_prefix = os.urandom(8)
        self._producer_id = NO_PRODUCER
        self._sequence = 0
        self._epoch = 0
        self._new_identity()
        self._read_settings()

    def refresh(self) -> int:
        """Read the topic's settings again; return its partition count."""
        self.topic.refresh()
        self._read_settings()
        return self.partition_count

    def author(self) -> Author:
        """Return the identity of the next commit; kept for every attempt at it."""
        if self._options.transactional_id is not None and self._producer_id == NO_PRODUCER:
            self._take_over(self._options.transactional_id)
        token = self._token_prefix + next(self._tokens).to_bytes(8, "little")
        is_transactional = self._options.transactional_id is not None
        return Author(token, self._producer_id, self._sequence, self._epoch, is_transactional)

    def committed(self) -> None:
        self._sequence += 1
        if self.topic.state.settings is not self._settings:
            self._read_settings()

    def forget_identity(self) -> None:
        """After an outcome that stays unknown: what this identity has committed is not known."""
        self._new_identity()

    def _new_identity(self) -> None:
        self._sequence = self._epoch = 0
        if self._options.transactional_id is not None:
            self._producer_id = NO_PRODUCER
        else:
            self._producer_id = int.from_bytes(os.urandom(8), "little") >> 1 or 1

    def _take_over(self, transactional_id: str) -> None:
        digest = hashlib.sha256(transactional_id.encode()).digest()
        producer_id = int.from_bytes(digest[:8], "little") >> 1 or 1
        author = self.topic.fence(producer_id, timeout_ms=self._options.request_timeout_ms)
        self._producer_id, self._epoch, self._sequence = producer_id, author.epoch, 1

    def _read_settings(self) -> None:
        state = self.topic.state
        self._settings = settings = state.settings
        self.partition_count = state.partition_count
        self.message_bytes_max: int = settings["max.message.bytes"]
        self.needs_key = "compact" in settings["cleanup.policy"]
        self.is_log_append = settings["message.timestamp.type"] == "LogAppendTime"
        codec = settings["compression.type"]
        self.codec: str = (
            (self._options.compression_type or "none") if codec == "producer" else codec
        )


def _by_reference(topic: Topic, frames: Placed) -> Placed:
    """Write large frames to a file of their own, where commits are objects that are merged later.

    What is in that file is written once; what is in the commit itself is written again then.
    """
    size = sum(frame.byte_length for _, frame in frames if isinstance(frame, Frame))
    if not topic.storage.is_remote or size < _BY_REFERENCE_BYTES_MIN:
        return frames
    file = DataFile(topic.storage, topic.directory)
    try:
        placed: Placed = [
            (partition, file.add(frame) if isinstance(frame, Frame) else frame)
            for partition, frame in frames
        ]
        file.finish()
    except BaseException:
        file.discard()
        raise
    return placed


class Sender:
    """Takes units from the accumulator and commits them, one at a time."""

    def __init__(
        self,
        open_topic: TopicOpener,
        accumulator: Accumulator,
        options: ProducerOptions,
        on_open: Callable[[Topic], None],
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
        """Wait for what is left; what is not sent in time fails."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._give_up.set()
            for unit in self._accumulator.drop():
                unit.fail(Closed("producer"))
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._send_all()
        finally:
            # By the thread that uses them: `stop` may have returned before this one is done.
            for writer in self.writers.values():
                writer.topic.close()

    def _send_all(self) -> None:
        while (unit := self._accumulator.take()) is not None:
            try:
                self._send(unit)
            except Exception as error:
                # The last frame of this thread: whoever holds the future must hear of it.
                unit.fail(error)
            finally:
                self._accumulator.done(unit)

    def _send(self, unit: Unit) -> None:
        begun = time.monotonic()
        deadline = begun + self._options.delivery_timeout_ms / 1000
        try:
            writer = self.writer(unit.topic)
            frames = unit.encode(writer.chooser, writer.partition_count, writer.codec)
            if not frames:
                unit.succeed(Appended(b"", time.time_ns() // 1_000_000, -1), False)
                return
            appended = self._commit(writer, frames, deadline)
        except UnknownTopic as error:
            self._forget(unit.topic)
            self._fail(unit, error)
        except LogError as error:
            self._fail(unit, error)
        else:
            self._count(frames, time.monotonic() - begun)
            writer.committed()
            unit.succeed(appended, writer.is_log_append)

    def _count(self, frames: Placed, seconds: float) -> None:
        totals = self.metrics.totals
        totals["batch"] += 1
        totals["commit-latency"] += seconds
        for _partition, frame in frames:
            totals["record-send"] += frame.record_count
            totals["byte"] += frame.byte_length

    def _fail(self, unit: Unit, error: LogError) -> None:
        self.metrics.add("record-error", unit.record_count)
        unit.fail(error)

    def _commit(self, writer: TopicWriter, frames: Placed, deadline: float) -> Appended:
        """Try until it is committed, refused, or the deadline has passed."""
        author = writer.author()
        placed: Placed | None = None  # Once it is written, every try names the same file.
        is_first = True
        is_unknown = False  # Whether one of the tries may have been carried out.
        while True:
            try:
                if placed is None:
                    placed = _by_reference(writer.topic, frames)
                return writer.topic.append(
                    placed,
                    author,
                    timeout_ms=self._patience_ms(deadline),
                    durable=self._options.durability == "fsync",
                )
            except SequenceError:
                # The log has forgotten a producer that was silent for a week. If this commit was
                # never tried before, a new identity is as good; otherwise it could be there twice.
                if not is_first or self._options.transactional_id is not None:
                    raise
                writer.forget_identity()
                author = writer.author()
            except ProducerFenced as error:
                name = f"transactional_id {self._options.transactional_id!r}"
                raise ProducerFenced(name, error.args[1], error.args[2]) from error
            except LogError as error:
                is_lost = isinstance(error, OutcomeUnknown)
                is_unknown = is_unknown or is_lost
                if not (error.retriable or is_lost) or self._is_over(deadline):
                    if not is_unknown:
                        raise
                    writer.forget_identity()
                    if is_lost:
                        raise
                    raise OutcomeUnknown(
                        f"not known whether it was written: an earlier try may have been, and the "
                        f"last one failed: {error}"
                    ) from error
                self._give_up.wait(_PAUSE_SECONDS)
            self.metrics.add("record-retry", sum(frame.record_count for _, frame in frames))
            is_first = is_first and placed is None

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
