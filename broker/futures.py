"""What `send` returns: a light future. All records of one buffer share one completion."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Completion:
    """The end of one unit of sending, which many futures wait for.

    A unit of sending derives from this and knows, once done, where each of its parts is.
    """

    __slots__ = ("_callbacks", "_lock", "_waiters", "error", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiters: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] = []

    def metadata(self, index: int) -> Any:
        """Return where the part `index` is; only once it is done without an error."""
        raise NotImplementedError

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self.is_done:
                return
            self.error = error
            self.is_done = True
            waiters, callbacks = self._waiters, self._callbacks
        if waiters is not None:
            waiters.set()
        for callback in callbacks:
            _call(callback)

    def wait(self, timeout: float | None) -> bool:
        if self.is_done:
            return True
        with self._lock:
            if self.is_done:
                return True
            if self._waiters is None:
                self._waiters = threading.Event()
            waiters = self._waiters
        return waiters.wait(timeout)

    def when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        _call(callback)


class SendFuture(Generic[Result]):
    """The place of a record or batch, once it is committed."""

    __slots__ = ("_completion", "_index")

    def __init__(self, completion: Completion, index: int = 0) -> None:
        self._completion = completion
        self._index = index

    def result(self, timeout: float | None = None) -> Result:
        """Return where it is; raise why it is not there, or TimeoutError."""
        if not self._completion.wait(timeout):
            raise TimeoutError(f"not committed within {timeout} s; it may still be")
        if self._completion.error is not None:
            raise self._completion.error
        found: Result = self._completion.metadata(self._index)
        return found

    get = result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._completion.wait(timeout):
            raise TimeoutError(f"not committed within {timeout} s; it may still be")
        return self._completion.error

    def done(self) -> bool:
        return self._completion.is_done

    def succeeded(self) -> bool:
        return self._completion.is_done and self._completion.error is None

    def failed(self) -> bool:
        return self._completion.error is not None

    def add_callback(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> SendFuture[Result]:
        """Call `function(*args, metadata)` when committed; from the sending thread."""

        def call() -> None:
            if self._completion.error is None:
                function(*args, self._completion.metadata(self._index), **kwargs)

        self._completion.when_done(call)
        return self

    def add_errback(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> SendFuture[Result]:
        """Call `function(*args, error)` when it failed; from the sending thread."""

        def call() -> None:
            if self._completion.error is not None:
                function(*args, self._completion.error, **kwargs)

        self._completion.when_done(call)
        return self


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except (Exception, SystemExit):
        # The user's function failed, not the send: say so, and go on with the others. Also if it
        # calls `sys.exit`: that would end the sender's thread only, and others wait for it.
        logger.exception("a callback of send() failed")
