"""Ctrl-C as a request: what has been read is finished first."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Whether the user has asked to stop; a second Ctrl-C stops at once."""

    def __init__(self, wake_descriptor: int) -> None:
        self.is_asked = False
        self._wake_descriptor = wake_descriptor

    def ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def wait_readable(self, descriptor: int, seconds: float | None) -> bool:
        """Wait for input; false if there is none in time, or if the user has asked to stop."""
        if self.is_asked:
            return False
        ready, _, _ = select.select([descriptor, self._wake_descriptor], [], [], seconds)
        return descriptor in ready and not self.is_asked


@contextlib.contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    interrupt = Interrupt(read_end)
    # The signal's byte in the pipe wakes a select that began just before the signal came.
    wakeup_before = signal.set_wakeup_fd(write_end)
    handler_before = signal.getsignal(signal.SIGINT)
    if handler_before is not signal.SIG_IGN:  # A shell's background jobs ignore it.
        signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, handler_before)
        signal.set_wakeup_fd(wakeup_before)
        os.close(read_end)
        os.close(write_end)
