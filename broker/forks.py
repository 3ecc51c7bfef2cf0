"""What must not outlive a fork: open files and locks belong to the process that opened them.

A child that used an inherited descriptor would share its lock with the parent, and both would
write.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

# pyarrow imports this when it first meets a numpy array, perhaps in a background thread. A child
# that is forked in the middle of an import waits for its end for ever.
import numpy.ma  # noqa: F401


class Abandonable(Protocol):
    def abandon(self) -> None: ...


_open: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def remember(handle: Abandonable) -> None:
    _open.add(handle)


def forget(handle: Abandonable) -> None:
    _open.discard(handle)


def _abandon_all() -> None:
    for handle in list(_open):
        handle.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)
