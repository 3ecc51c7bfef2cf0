"""The producer: records in, futures out, commits in the background."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from broker import checks, forks
from broker.accumulator import Accumulator
from broker.columns import check_sizes
from broker.config import ProducerOptions
from broker.data_file import DataFile
from broker.errors import (
    Closed,
    ForkedHandle,
    InvalidRecord,
    LogError,
    RecordTooLarge,
    TransactionError,
    UnknownPartition,
)
from broker.futures import SendFuture
from broker.metrics import Readings, export_if_asked
from broker.records import BatchMetadata, RecordMetadata
from broker.sender import AHEAD, Sender, TopicOpener
from broker.sending import RecordBuffer, TransactionUnit, Unit, make_columnar
from broker.topic import Topic
from broker.topic_writer import TopicWriter

# Frames of a columnar batch, in units of batch_size: few and large, but small enough to hold some.
_FRAME_BATCHES = 4
_GATHER_BYTES = 16 << 20
_EXIT_SECONDS = 10.0

_open_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class Keeper(Protocol):
    """Somebody who maintains the topics that a producer writes to."""

    def look_after(self, topic: Topic) -> None: ...

    def close(self) -> None: ...


class Producer:
    """Sends records to topics. Made by `log.producer(...)`; any thread may use it.

    What one thread sends to a partition keeps its order. A retry never duplicates.
    """

    def __init__(
        self,
        open_topic: TopicOpener,
        options: ProducerOptions,
        keeper: Keeper,
        *,
        is_remote: bool = False,
    ) -> None:
        """Args:
        is_remote: commits take tens of milliseconds, so more is gathered for each.
        """
        self._options = options
        self._keeper = keeper
        self._serialize_key = options.key_serializer
        self._serialize_value = options.value_serializer
        self._accumulator = Accumulator(
            batch_size=options.batch_size,
            linger_ms=options.linger_ms,
            buffer_memory=options.buffer_memory,
            max_block_ms=options.max_block_ms,
            # What waits must leave room for what comes meanwhile.
            gather_bytes=min(_GATHER_BYTES, options.buffer_memory // 4) if is_remote else 0,
            at_once=1 + AHEAD if is_remote else 1,
        )
        self._sender = Sender(
            open_topic, self._accumulator, options, keeper.look_after, is_ahead=is_remote
        )
        self._writers = self._sender.writers
        self._add_record = self._accumulator.add_record
        self._transaction: _Transaction | None = None
        self._is_transactional = options.transactional_id is not None
        self._transaction_lock = threading.RLock()
        self._process_id = os.getpid()
        self._is_closed = False
        self._is_forked = False
        self._exported = export_if_asked(options.metrics_port, options.client_id, self)
        forks.remember(self)
        _open_producers.add(self)
        self._sender.start()

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> SendFuture[RecordMetadata]:
        """Take a record for sending; the future tells where it is once it is committed.

        Raises:
            InvalidRecord, UnknownTopic, UnknownPartition: it cannot be stored; nothing was taken.
            BufferExhausted: the memory stayed full for `max_block_ms`.
        """
        if self._is_closed:
            raise self._unusable()
        if self._serialize_key is not None:
            key = self._serialize_key(key)
        if self._serialize_value is not None:
            value = self._serialize_value(value)
        size = 0
        if value is not None:
            if type(value) is not bytes:
                value = _as_bytes(value, "value", topic)
            size = len(value)
        if key is not None:
            if type(key) is not bytes:
                key = _as_bytes(key, "key", topic)
            size += len(key)
        if headers:
            headers, header_bytes = _check_headers(headers, topic)
            size += header_bytes
        try:
            writer = self._writers[topic]
        except (KeyError, TypeError):  # Not opened yet; or what no dict can have as a key.
            writer = self._sender.writer(topic)
        if size > writer.message_bytes_max or (key is None and writer.needs_key):
            raise _refuse(writer, size)
        if partition is not None:
            partition = self._check_partition(writer, partition)
        timestamp = (
            time.time_ns() // 1_000_000 * 1000
            if timestamp_ms is None
            else _check_timestamp(timestamp_ms, topic)
        )
        return SendFuture(
            *(self._collect() if self._is_transactional else self._add_record)(
                topic, key, value, headers, timestamp, partition, size
            )
        )

    def send_batch(self, topic: str, table: Any) -> SendFuture[BatchMetadata]:
        """Take an Arrow Table or RecordBatch; it is committed at once, whole or not at all.

        Columns: `value` and, optionally, `key`, `headers`, `timestamp`, `partition`.
        """
        if self._is_closed:
            raise self._unusable()
        writer = self._sender.writer(topic)
        frame_bytes = self._options.batch_size * _FRAME_BATCHES
        unit, batch = make_columnar(topic, table, frame_bytes)
        check_sizes(batch, topic, writer.message_bytes_max)
        if writer.needs_key and batch.column(0).null_count:
            raise _refuse(writer, 0)
        unit.check_partitions(writer.partition_count, writer.refresh)
        if self._is_transactional:
            self._open_transaction().add_unit(unit)
        else:
            self._accumulator.add_unit(unit)
        return SendFuture(unit)

    def flush(self, timeout: float | None = None) -> None:
        """Return when all that was sent before is committed or has failed.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
        """
        if self._is_closed:
            raise self._unusable()
        if not self._accumulator.flush(timeout):
            raise TimeoutError(f"flush took longer than {timeout} s; sending goes on")

    @contextmanager
    def transaction(self) -> Iterator[Producer]:
        """Commit all that is sent inside at once; leaving by an exception sends nothing."""
        self.begin_transaction()
        try:
            yield self
        except BaseException:
            if not self._is_closed:  # Otherwise it was aborted then.
                self.abort_transaction()
            raise
        self.commit_transaction()

    def init_transactions(self) -> None:
        """Nothing to do: fencing happens per topic, at the first transaction on it."""
        if self._options.transactional_id is None:
            raise TransactionError("init_transactions needs transactional_id; set that option")

    def begin_transaction(self) -> None:
        if self._is_closed:
            raise self._unusable()
        with self._transaction_lock:
            if self._transaction is not None:
                raise TransactionError("a transaction is open already; commit or abort it first")
            self._transaction = _Transaction(self._sender, self._options)
            self._is_transactional = True

    def commit_transaction(self) -> None:
        """Commit and wait for it; raises if nothing was committed, or if that is unknown."""
        transaction = self._end_transaction()
        unit = transaction.finish()
        if unit is None:
            return
        self._accumulator.add_unit(unit)
        unit.wait(None)
        if unit.error is not None:
            raise unit.error

    def abort_transaction(self) -> None:
        """Forget all that was sent in the transaction."""
        self._end_transaction().abort()

    def metrics(self) -> Readings:
        """Return what was sent so far, as totals and rates."""
        return self._sender.metrics.read(conflict_total=self._sender.conflict_count)

    @property
    def metrics_port(self) -> int | None:
        """The port on which the metrics are served."""
        return None if self._exported is None else self._exported.port

    def partitions_for(self, topic: str) -> set[int]:
        """Return the partitions of a topic."""
        if self._is_closed:
            raise self._unusable()
        writer = self._sender.writer(topic)
        writer.refresh()
        return set(range(writer.partition_count))

    def close(self, timeout: float | None = None) -> None:
        """Send what is left, at most for `timeout` seconds, and let go of everything."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._transaction_lock:
            transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.abort()
        self._accumulator.close()
        self._sender.stop(timeout)
        self._keeper.close()
        if self._exported is not None:
            self._exported.close()
        forks.forget(self)
        _open_producers.discard(self)

    def abandon(self) -> None:
        """In a forked child: the parent's sender is not here, so nothing may be taken."""
        self._is_closed = self._is_forked = True

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unusable(self) -> LogError:
        return ForkedHandle("producer") if self._is_forked else Closed("producer")

    def _collect(self) -> Callable[..., tuple[RecordBuffer, int]]:
        return self._open_transaction().add_record

    def _open_transaction(self) -> _Transaction:
        transaction = self._transaction
        if transaction is None:
            raise TransactionError(
                "a producer with transactional_id sends only inside a transaction; use "
                "`with producer.transaction():` around its sends"
            )
        return transaction

    def _end_transaction(self) -> _Transaction:
        with self._transaction_lock:
            transaction, self._transaction = self._transaction, None
            self._is_transactional = self._options.transactional_id is not None
        if transaction is None and self._is_forked:
            raise self._unusable()
        if transaction is None:
            raise TransactionError(
                "the producer is closed, and a transaction that was open then was aborted: nothing "
                "of it was sent. Commit before closing."
                if self._is_closed
                else "no transaction is open; begin one first"
            )
        return transaction

    def _check_partition(self, writer: TopicWriter, partition: int) -> int:
        number = partition if type(partition) is int else checks.index(partition)
        if number is not None and number >= writer.partition_count:
            writer.refresh()  # It may have grown since.
        if number is None or not 0 <= number < writer.partition_count:
            raise UnknownPartition(writer.name, partition, writer.partition_count)
        return number


class _Transaction:
    """What is sent between begin and commit: one topic, one commit."""

    def __init__(self, sender: Sender, options: ProducerOptions) -> None:
        self._sender = sender
        self._options = options
        self._lock = threading.Lock()
        self._unit: TransactionUnit | None = None
        self._buffer: RecordBuffer | None = None
        self._failure: Exception | None = None
        self._is_over = False

    def add_record(
        self, topic: str, key: Any, value: Any, headers: Any, timestamp: int,
        partition: int | None, size: int,
    ) -> tuple[RecordBuffer, int]:  # fmt: skip
        with self._lock:
            self._enter(topic)
            buffer = self._buffer
            if buffer is None:
                buffer = self._buffer = RecordBuffer(topic)
            index = buffer.add(key, value, headers, timestamp, partition, size)
            if buffer.byte_count >= self._options.batch_size:
                self._encode_buffer()
            return buffer, index

    def add_unit(self, unit: Unit) -> None:
        with self._lock:
            self._enter(unit.topic)
            self._encode_buffer()
            self._encode(unit)

    def finish(self) -> Unit | None:
        with self._lock:
            self._is_over = True
            try:
                if self._failure is not None:
                    raise self._failure
                self._encode_buffer()
            except Exception as error:
                self._discard(error)
                raise
            return self._unit

    def abort(self) -> None:
        with self._lock:
            self._is_over = True
            self._discard(TransactionError("the transaction was aborted; nothing was sent"))

    def _discard(self, error: Exception) -> None:
        if self._buffer is not None:
            self._buffer.fail(error)
        if self._unit is not None:
            self._unit.discard(error)

    def _enter(self, topic: str) -> None:
        if self._is_over:
            raise TransactionError("the transaction is over; begin another one")
        if self._unit is None:
            writer = self._sender.writer(topic)
            spill = DataFile(writer.topic.storage, writer.topic.directory)
            self._unit = TransactionUnit(topic, writer.topic.incarnation, spill)
        elif self._unit.topic != topic:
            raise TransactionError(
                f"this transaction is on topic {self._unit.topic!r} and cannot also write to "
                f"{topic!r}: a transaction spans the partitions of one topic. Use one for each."
            )

    def _encode_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._encode(buffer)

    def _encode(self, unit: Unit) -> None:
        assert self._unit is not None
        writer = self._sender.writer(unit.topic)
        try:
            self._unit.add(unit, writer.chooser, writer.partition_count, writer.codec)
        except Exception as error:
            # Without these records the transaction is not whole: it cannot be committed any more.
            self._failure = error
            unit.fail(error)
            raise


def _as_bytes(data: Any, what: str, topic: str) -> bytes:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise InvalidRecord(
        f"the {what} for topic {topic!r} is {type(data).__name__}, not bytes; encode it, or give "
        f"the producer a {what}_serializer"
    )


def _check_headers(headers: Any, topic: str) -> tuple[list[tuple[str, bytes | None]], int]:
    """Return the headers as a list, and how many bytes they have."""
    size = 0
    try:
        checked = [(name, data) for name, data in headers]
        for name, data in checked:
            if not (data is None or isinstance(data, bytes)):
                raise TypeError(type(data))
            size += len(str.encode(name)) + len(data or b"")
    except (TypeError, ValueError) as error:
        raise InvalidRecord(
            f"headers for topic {topic!r} must be a list of (str, bytes); got {headers!r}"
        ) from error
    return checked, size


def _check_timestamp(timestamp_ms: Any, topic: str) -> int:
    if type(timestamp_ms) is not int or not 0 <= timestamp_ms < 1 << 52:
        raise InvalidRecord(
            f"timestamp_ms={timestamp_ms!r} for topic {topic!r} is not whole milliseconds since "
            "1970"
        )
    return timestamp_ms * 1000


def _refuse(writer: TopicWriter, size: int) -> LogError:
    writer.refresh()
    if size > writer.message_bytes_max:
        return RecordTooLarge(writer.name, size, writer.message_bytes_max, "max.message.bytes")
    return InvalidRecord(
        f"topic {writer.name!r} is compacted (cleanup.policy): every record needs a key"
    )


@atexit.register
def _close_all() -> None:
    for producer in list(_open_producers):
        producer.close(timeout=_EXIT_SECONDS)
