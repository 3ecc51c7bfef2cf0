"""Waiting for files to change without asking again and again: inotify where there is one."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

if sys.platform == "linux":
    from inotify_simple import INotify, flags

    _EVENTS = flags.MODIFY | flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.DELETE

# Writers on another machine (a network file system) raise no event here, so a wait also ends by
# itself after a while.
_BLIND_SECONDS = 0.25
_ASK_SECONDS = 0.002


class Watch:
    """Tells that something in some directories has changed since the last `clear`."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._directories: dict[str, int] = {}
        self._inotify = None
        if sys.platform == "linux":
            # Without inotify (its instances are limited for each user) asking again will do.
            with contextlib.suppress(OSError):
                self._inotify = INotify()

    def keep(self, directories: set[str]) -> None:
        """Watch these directories and no others."""
        if self._inotify is None:
            return
        for gone in self._directories.keys() - directories:
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(self._directories[gone])
            del self._directories[gone]
        for path in directories - self._directories.keys():
            with contextlib.suppress(OSError):
                self._directories[path] = self._inotify.add_watch(
                    os.path.join(self._root, path), _EVENTS
                )

    def clear(self) -> None:
        """Forget what has happened; the caller looks at the files after this."""
        if self._inotify is not None and self._directories:
            self._inotify.read(timeout=0)

    def wait(self, seconds: float) -> None:
        """Return when something changed since `clear`, or after `seconds`, or now and then."""
        if self._inotify is None or not self._directories:
            time.sleep(min(seconds, _ASK_SECONDS))
            return
        select.select([self._inotify.fileno()], [], [], min(seconds, _BLIND_SECONDS))

    def may_look(self) -> bool:
        """Looking costs nothing here."""
        return True

    def changed(self) -> None:
        """Something new was there; the next change is heard of by itself."""

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class Pause:
    """Waiting for a store to change means asking it again, ever less often."""

    def __init__(self, seconds: float) -> None:
        self.longest = seconds
        self._next = seconds / 64
        self._looked = 0.0

    def keep(self, directories: set[str]) -> None:
        """All of them are asked."""

    def clear(self) -> None:
        """There is nothing to forget."""

    def may_look(self) -> bool:
        """Tell whether it is time to ask again."""
        now = time.monotonic()
        if now < self._looked + self._next:
            return False
        self._looked = now
        self._next = min(2 * self._next, self.longest)
        return True

    def wait(self, seconds: float) -> None:
        """Return when it is time to ask again, or after `seconds`."""
        time.sleep(max(0.0, min(seconds, self._looked + self._next - time.monotonic())))

    def changed(self) -> None:
        """Something new was there, or is looked for elsewhere: more may follow at once."""
        self._next = self.longest / 64
        self._looked = 0.0

    def close(self) -> None:
        """Nothing is open."""
