"""Leases: how a member shows that it is alive, and how the others see that it is not.

`leases/<member id>`: magic `SLL1`, CRC32C of the rest, a counter, and 1 if the member has closed
in good order. The member overwrites it now and then; it is no commit, and lost with the machine.
Clocks of different machines are never compared: a member is dead when a watcher has seen its lease
stand still for the session timeout, counting only time in which the watcher itself was looking.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import google_crc32c

from broker.errors import AlreadyExists
from broker.storage import Storage

MAGIC = b"SLL1"
_PREFIX = struct.Struct("<4sI")
_LAYOUT = struct.Struct("<QQ")

Clock = Callable[[], float]


class Lease:
    """The lease of one member, written by that member only."""

    def __init__(self, storage: Storage, directory: str, member_id: str) -> None:
        self._storage = storage
        self._path = lease_path(directory, member_id)
        self._counter = 0

    def renew(self) -> None:
        self._write(is_closed=False)

    def close(self) -> None:
        """Say that this member delivers no more: whoever follows it need not wait."""
        self._write(is_closed=True)

    def remove(self) -> None:
        self._storage.remove(self._path)

    def _write(self, *, is_closed: bool) -> None:
        self._counter += 1
        data = encode(self._counter, is_closed=is_closed)
        if self._counter == 1:
            try:
                self._storage.create(self._path, data, sync=False)
                return
            except AlreadyExists:
                pass
        self._storage.overwrite(self._path, data)


def lease_path(directory: str, member_id: str) -> str:
    return f"{directory}/leases/{member_id}"


def encode(counter: int, *, is_closed: bool) -> bytes:
    body = _LAYOUT.pack(counter, is_closed)
    return _PREFIX.pack(MAGIC, google_crc32c.value(body)) + body


def is_closed(data: bytes | None) -> bool:
    """Tell whether a lease's owner has closed it. A torn or missing one proves nothing."""
    return data is not None and is_whole(data) and bool(_LAYOUT.unpack_from(data, _PREFIX.size)[1])


def is_whole(data: bytes) -> bool:
    """Tell whether these are the bytes of a lease, not torn."""
    if len(data) != _PREFIX.size + _LAYOUT.size:
        return False
    magic, crc = _PREFIX.unpack_from(data)
    return bool(magic == MAGIC and google_crc32c.value(data[_PREFIX.size :]) == crc)


@dataclass(slots=True)
class _Sight:
    """What a watcher saw of one lease: its bytes, and for how many seconds they have stood."""

    data: bytes | None
    still: float


class LeaseWatch:
    """Watches the leases of others. `observe` is to be called regularly."""

    def __init__(self, read: Callable[[str], bytes | None], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._sights: dict[str, _Sight] = {}
        self._observed: float | None = None

    def observe(self, timeouts: dict[str, float], *, interval: float) -> list[str]:
        """Look at the leases of these members; return those that are dead.

        Args:
            timeouts: for each member, the seconds after which it is dead.
            interval: the seconds between two calls. A longer pause counts as twice that: who did
                not look (stopped, or on a sleeping machine) does not know what the others did.
        """
        now = self._clock()
        pause = 0.0 if self._observed is None else min(now - self._observed, 2 * interval)
        self._observed = now
        self._forget(timeouts)
        dead = []
        for member_id, timeout in timeouts.items():
            data = self._read(member_id)
            sight = self._sights.get(member_id)
            if sight is None or sight.data != data:
                self._sights[member_id] = _Sight(data, 0.0)
                continue
            sight.still += pause
            if sight.still >= timeout:
                dead.append(member_id)
        return dead

    def is_still(self, member_id: str) -> bool:
        """Tell whether a lease is what it was when it was last looked at."""
        sight = self._sights.get(member_id)
        return sight is not None and sight.data == self._read(member_id)

    def _forget(self, known: Iterable[str]) -> None:
        kept = set(known)
        self._sights = {one: sight for one, sight in self._sights.items() if one in kept}
