"""Records on their way to the sender: gathered into buffers, bounded in memory and in time."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from broker.errors import BufferExhausted, Closed, RecordTooLarge
from broker.sending import RecordBuffer, Unit

# What a buffered record takes beyond its bytes: object headers, list slots, its future.
RECORD_OVERHEAD = 96


class Accumulator:
    """A queue of units for one sender thread; per topic, first in is first out."""

    def __init__(
        self,
        *,
        batch_size: int,
        linger_ms: int,
        buffer_memory: int,
        max_block_ms: int,
        gather_bytes: int = 0,
        at_once: int = 1,
    ) -> None:
        """Args:
        gather_bytes: how large a buffer may grow while another one is being sent. Where a
            commit takes long, few large ones carry more than many small ones.
        at_once: how many units the sender may have taken and not yet done. Of a topic of which
            it has one it gets only what grows no more.
        """
        self._at_once = at_once
        self._batch_size = batch_size
        self._gather_bytes = max(batch_size, gather_bytes)
        self._linger = linger_ms / 1000
        self._memory = buffer_memory
        self._max_block_ms = max_block_ms
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._space = threading.Condition(self._lock)
        self._open: dict[str, RecordBuffer] = {}
        self._queue: deque[Unit] = deque()
        self._sending: list[Unit] = []
        self._buffered = 0
        self._flushing = 0
        self._is_sender_waiting = False
        self._is_closed = False

    def add_record(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Any,
        timestamp: int,
        partition: int | None,
        size: int,
    ) -> tuple[RecordBuffer, int]:
        """Put a record into the topic's buffer; return it and the record's place in it."""
        size += RECORD_OVERHEAD
        with self._lock:
            if self._buffered + size > self._memory or self._is_closed:
                self._wait_for_space(size, topic)
            buffer = self._open.get(topic)
            if buffer is None:
                buffer = self._open[topic] = RecordBuffer(topic)
            index = buffer.add(key, value, headers, timestamp, partition, size)
            self._buffered += size
            is_full = buffer.byte_count >= self._gather_bytes or (
                buffer.byte_count >= self._batch_size and not self._sending and not self._queue
            )
            if is_full:
                self._queue.append(self._open.pop(topic))
            if self._is_sender_waiting and (is_full or index == 0):
                self._wake_sender()
            return buffer, index

    def add_unit(self, unit: Unit) -> None:
        """Put a unit behind all that was sent to its topic before."""
        with self._lock:
            if self._is_closed or self._buffered + unit.byte_count > self._memory:
                self._wait_for_space(unit.byte_count, unit.topic, may_exceed=True)
            self._close_buffer(unit.topic)
            self._queue.append(unit)
            self._buffered += unit.byte_count
            self._wake_sender()

    def take(self) -> Unit | None:
        """Wait for the next unit to send; None when closed and empty. Only for the sender."""
        with self._lock:
            while True:
                unit, wait = self._next()
                if unit is not None:
                    self._sending.append(unit)
                    return unit
                if self._is_closed and not self._queue:
                    return None
                self._is_sender_waiting = True
                self._ready.wait(wait)
                self._is_sender_waiting = False

    def done(self, unit: Unit) -> None:
        """The unit has been sent, or has failed: its memory is free."""
        with self._lock:
            self._sending.remove(unit)
            self._buffered -= unit.byte_count
            self._space.notify_all()
            if self._is_sender_waiting:
                self._wake_sender()

    def flush(self, timeout: float | None) -> bool:
        """Send all that is here now; return whether it was done in time."""
        with self._lock:
            for topic in list(self._open):
                self._close_buffer(topic)
            units = [*self._sending, *self._queue]
            self._wake_sender()
        deadline = None if timeout is None else time.monotonic() + timeout
        for unit in units:
            rest = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not unit.wait(rest):
                return False
        return True

    def close(self) -> None:
        """Take no more; what is here is still given to the sender."""
        with self._lock:
            self._is_closed = True
            for topic in list(self._open):
                self._close_buffer(topic)
            self._ready.notify_all()
            self._space.notify_all()

    def drop(self) -> list[Unit]:
        """Empty the queue and return what was in it."""
        with self._lock:
            for topic in list(self._open):
                self._close_buffer(topic)
            units = list(self._queue)
            self._queue.clear()
            self._buffered -= sum(unit.byte_count for unit in units)
            return units

    def _close_buffer(self, topic: str) -> None:
        buffer = self._open.pop(topic, None)
        if buffer is not None:
            self._queue.append(buffer)

    def _wake_sender(self) -> None:
        self._is_sender_waiting = False
        self._ready.notify()

    def _next(self) -> tuple[Unit | None, float | None]:
        """Return what to send now, if anything; else how long to wait for it at most."""
        if len(self._sending) >= self._at_once:
            return None, None
        buffer = self._oldest_open()
        # Units of a topic are in order: what is open was begun when those in the queue were there.
        if self._queue and (buffer is None or self._queue[0].created <= buffer.created):
            return self._queue.popleft(), None
        if buffer is None:
            return None, None
        wait = 0.0
        if self._linger and buffer.byte_count < self._batch_size:
            wait = buffer.created + self._linger - time.monotonic()
        if wait > 0 and not self._is_closed:
            return (self._queue.popleft(), None) if self._queue else (None, wait)
        return self._open.pop(buffer.topic), None

    def _oldest_open(self) -> RecordBuffer | None:
        """Return the buffer that was begun first, but for those that gather during a commit."""
        if not self._sending:
            return next(iter(self._open.values()), None)
        busy = {unit.topic for unit in self._sending}
        return next((one for topic, one in self._open.items() if topic not in busy), None)

    def _wait_for_space(self, size: int, topic: str, may_exceed: bool = False) -> None:
        """Block until there is room. One unit larger than all memory may go when it is alone."""
        if size > self._memory and not may_exceed:
            raise RecordTooLarge(topic, size, self._memory, "buffer_memory")
        deadline = time.monotonic() + self._max_block_ms / 1000
        while not self._is_closed and self._buffered + size > self._memory:
            if may_exceed and self._buffered == 0:
                return
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise BufferExhausted(self._memory, self._max_block_ms)
            # What lingers in the full memory must not: the sender takes it as soon as it can.
            for name in list(self._open):
                self._close_buffer(name)
            self._wake_sender()
            self._space.wait(rest)
        if self._is_closed:
            raise Closed("producer")
