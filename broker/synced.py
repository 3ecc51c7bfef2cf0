"""How far a journal is certain to survive a power cut, and in which boot that was written.

`synced`: magic `SLY1`, CRC32C of the rest, file number, byte position, boot id. It is overwritten
in place after a sync and not synced itself, so it may lag behind the truth but never leads it.
Missing or torn, it means: nothing is certain, and the boot is unknown.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from contextlib import closing
from dataclasses import dataclass

import google_crc32c

from broker.errors import OutcomeUnknown, StorageError
from broker.storage import Storage

_LAYOUT = struct.Struct("<QQ40s")
_PREFIX = struct.Struct("<4sI")
_MAGIC = b"SLY1"


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything before `position` of the file `file_number` is on disk."""

    file_number: int
    position: int
    boot_id: str

    @property
    def place(self) -> tuple[int, int]:
        return self.file_number, self.position

    def encode(self) -> bytes:
        body = _LAYOUT.pack(self.file_number, self.position, self.boot_id.encode())
        return _PREFIX.pack(_MAGIC, google_crc32c.value(body)) + body

    def write(self, storage: Storage, directory: str) -> None:
        storage.overwrite(f"{directory}/synced", self.encode())

    @classmethod
    def read(cls, storage: Storage, directory: str) -> Synced | None:
        data = storage.read(f"{directory}/synced")
        if data is None or len(data) != _PREFIX.size + _LAYOUT.size:
            return None
        magic, crc = _PREFIX.unpack_from(data)
        body = data[_PREFIX.size :]
        if magic != _MAGIC or google_crc32c.value(body) != crc:
            return None
        file_number, position, boot_id = _LAYOUT.unpack(body)
        return cls(file_number, position, boot_id.rstrip(b"\0").decode(errors="replace"))


class Syncer:
    """Makes a journal durable up to a place, and remembers how far it is.

    One caller syncs for all that wait: whoever finds the place synced already returns at once.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._mutex = threading.Lock()
        self._place = (0, 0)
        self._failure: OutcomeUnknown | None = None

    def through(self, file_number: int, position: int) -> None:
        """Return when everything before this place is on disk.

        Raises:
            OutcomeUnknown: a sync failed. The kernel drops what it could not write, so a later
                sync proves nothing: from then on this always fails.
        """
        if self._storage.is_remote:
            return
        with self._mutex:
            if self._failure is not None:
                raise self._failure
            if self._place >= (file_number, position):
                return
            try:
                self._sync_files(file_number)
            except OutcomeUnknown as failure:
                self._failure = failure
                raise
            except StorageError as error:
                # What is to be synced is committed already: it has not failed.
                raise OutcomeUnknown(f"not known to be on disk: {error}") from error
            self._place = (file_number, position)
            hint = Synced(file_number, position, self._storage.boot_id)
            # It may lag behind: recovery then checks more than it has to.
            with contextlib.suppress(StorageError):
                hint.write(self._storage, self._directory)

    def _sync_files(self, last: int) -> None:
        hint = Synced.read(self._storage, self._directory)
        first = max(self._place[0], hint.file_number if hint is not None else 0)
        journal = f"{self._directory}/journal"
        names = [f"{last:020d}.log"]
        if first != last:
            names = [
                name
                for name in self._storage.list(journal)
                if f"{first:020d}.log" <= name <= names[0]
            ]
        for name in names:
            file = self._storage.open_file(f"{journal}/{name}")
            if file is not None:
                with closing(file):
                    file.sync()
        if first != last:
            self._storage.sync_directory(journal)
