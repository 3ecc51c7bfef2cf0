"""Threads that work for others, to the very end of the process.

`concurrent.futures.ThreadPoolExecutor` refuses work once the main thread has ended. A producer that
nobody has closed sends only then what is left, and a commit may be in the journal already when the
next step needs a thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# How long the end of the process waits for work that nobody waits for.
_EXIT_SECONDS = 10.0

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None  # None: stop.


class Workers:
    """Up to `count` threads, each begun when there is work and nobody is idle.

    They end by `close`, or when nobody knows them any more and all work is done.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[_Work] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._is_closed = False
        _known.add(self)
        forgotten = weakref.finalize(self, _stop, self._queue, self._threads)
        forgotten.atexit = False

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Let a thread call the function; what it returns or raises is in the future."""
        future: Future[Result] = Future()
        with self._mutex:
            if self._is_closed:
                raise RuntimeError(f"{self._name} takes no more work: it is closed")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                self._begin_thread()
            self._queue.put((future, function, arguments))
        return future

    def _begin_thread(self) -> None:
        thread = threading.Thread(
            target=_work, args=(self._queue, self._idle), name=self._name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # There are as many threads as there may be.
            if not self._threads:
                raise
            return
        self._threads.append(thread)
        _running.add(thread)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call the function for all items at once; return the results in their order."""
        return [future.result() for future in [self.submit(function, item) for item in items]]

    def close(self) -> None:
        """Return when all work is done. None is taken from now on."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        with self._mutex:
            if not self._is_closed:
                self._is_closed = True
                _stop(self._queue, self._threads)


_known: weakref.WeakSet[Workers] = weakref.WeakSet()
_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Wait until no thread works any more; also for workers that nobody knows any more.

    One that is in a library's code when the interpreter ends may bring the process down. Users of
    workers are loaded later than this, so what they have registered for the end comes before.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    for workers in list(_known):
        workers._end()
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))


def _forget() -> None:
    """In a forked child: none of the threads are here, and a lock may be held by one of them."""
    _known.clear()
    _running.clear()


os.register_at_fork(after_in_child=_forget)


def _stop(queue: SimpleQueue[_Work], threads: list[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)


def _work(queue: SimpleQueue[_Work], idle: threading.Semaphore) -> None:
    while (work := queue.get()) is not None:
        future, function, arguments = work
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            # Whoever waits for the result must hear of it.
            future.set_exception(error)
        # A thread that waits for work holds nobody's data.
        del work, future, function, arguments
        idle.release()
