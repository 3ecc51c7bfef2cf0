"""How a command ends that was interrupted, or that its store keeps waiting: soon, in one line.

What it closes then asks the store once more, and may wait for minutes, also in a driver's code,
where Python calls no handler of signals. So a thread watches, and ends the process in its place.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from click.decorators import pass_meta_key

from broker.cli.output import say
from broker.errors import LogError, OutcomeUnknown, StorageError, StoreUnavailable

EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130
# How long a command that is to end may go on without getting any further.
_SECONDS = 4.0
_SHOW_CURSOR = b"\x1b[?25h"
_META_KEY = "broker.cli.ending"

Tell = Callable[[], object]

pass_ending = pass_meta_key(_META_KEY, doc_description="how the command ends")


class Ending:
    """Watches over one command, as a context.

    The first Ctrl-C raises where the command is, unless it is to finish what it has begun. From
    then on it has some seconds, and as many again whenever it gets further; a second Ctrl-C ends
    the process at once. What is lost by that is no more than when the process is killed.
    """

    def __init__(self) -> None:
        self.is_interrupted = False
        # Whether it is the store that keeps the command from being done.
        self.is_by_store = False
        # What is said of a command that is interrupted.
        self.tell: Tell = lambda: "interrupted"
        self._outcome: tuple[int, Tell] | None = None
        self._seconds = _SECONDS
        self._deadline = math.inf
        self._saying = threading.Lock()
        self._is_said = False

    def __enter__(self) -> Ending:
        self._wake, self._woken = os.pipe()
        self._asked, self._asking = os.pipe()
        os.set_blocking(self._woken, False)
        self._wakeup_before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="spark-log-ending", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._woken)  # Ends the thread.
        self._thread.join()
        os.close(self._wake)
        os.close(self._asked)
        if not self.is_interrupted:
            os.close(self._asking)

    def offer(self, meta: dict[str, Any]) -> None:
        """Let commands have this by `pass_ending`."""
        meta[_META_KEY] = self

    @contextlib.contextmanager
    def finish_first(self) -> Iterator[None]:
        """Let Ctrl-C not raise inside: `is_interrupted` says that it came."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:  # A shell's background jobs ignore it.
            signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def wait_readable(self, descriptor: int, seconds: float | None) -> bool:
        """Wait for input; false if there is none in time, or after Ctrl-C."""
        if self.is_interrupted:
            return False
        ready, _, _ = select.select([descriptor, self._asked], [], [], seconds)
        return descriptor in ready and not self.is_interrupted

    @contextlib.contextmanager
    def hurry_after_failure(self) -> Iterator[None]:
        """After what fails inside, what is closed behind it does not wait for a silent store."""
        try:
            yield
        except LogError as error:
            line = str(error)
            self.fail(error, lambda: line)
            raise

    def fail(self, error: LogError, tell: Tell) -> None:
        """Note why the command ends; if the store was silent, it is not waited for once more."""
        self.is_by_store = is_of_store(error)
        if isinstance(error, StoreUnavailable | OutcomeUnknown):
            self._begin(EXIT_REFUSED, tell)
            os.write(self._woken, b"\0")  # The thread sees the deadline.

    def wait_for_batch(self) -> None:
        """Let Ctrl-C only ask: a job of Spark ends after the batch it is in, however long."""
        self._seconds = math.inf

    def prolong(self) -> None:
        """The command has got further: wait on."""
        if self._outcome is not None:
            self._deadline = time.monotonic() + self._seconds

    def say(self, line: object) -> None:
        """Say why the command ends, once."""
        with self._saying:
            if not self._is_said:
                self._is_said = True
                say(line)

    def _begin(self, code: int, tell: Tell) -> None:
        self._outcome = self._outcome or (code, tell)
        self.prolong()

    def _watch(self) -> None:
        while True:
            rest = self._deadline - time.monotonic()
            if rest <= 0:
                self._end()
            if not select.select([self._wake], [], [], None if rest == math.inf else rest)[0]:
                continue
            signals = os.read(self._wake, 64)
            if not signals:
                return
            for _ in range(signals.count(signal.SIGINT)):
                if self._outcome is not None:
                    self._end()
                self._begin(EXIT_INTERRUPTED, lambda: self.tell())
                self.is_interrupted = True
                os.close(self._asking)

    def _end(self) -> None:
        assert self._outcome is not None
        code, tell = self._outcome
        self.say(tell())
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR)  # A progress bar hides it.
        os._exit(code)


def is_of_store(error: object) -> bool:
    """Tell whether an error is what a store says, or that it says nothing."""
    return isinstance(error, StorageError | OutcomeUnknown)
