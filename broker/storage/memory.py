"""A store in this process's memory: safe, since one lock guards it, and gone with the process.

For tests: nothing that is kept here outlives the process, and no other process sees it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import BinaryIO

from broker.config import parse_storage_options
from broker.errors import AlreadyExists, StorageError
from broker.storage.store import Entry


class _Contents:
    """The objects of one address, and what each folder holds."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.folders: dict[str, set[str]] = {}

    def put(self, path: str, data: bytes) -> None:
        self.objects[path] = data, time.time_ns() // 1_000_000
        while path:
            folder, _, name = path.rpartition("/")
            names = self.folders.setdefault(folder, set())
            if name in names:
                return
            names.add(name)
            path = folder

    def delete(self, path: str) -> None:
        self.objects.pop(path, None)
        while path and path not in self.folders:
            folder, _, name = path.rpartition("/")
            names = self.folders.get(folder, set())
            names.discard(name)
            if names or not folder:
                return
            self.folders.pop(folder, None)
            path = folder


class MemoryStore:
    """Objects by name. All that open the same address share them."""

    _everything: dict[str, _Contents] = {}  # noqa: RUF012 - shared on purpose
    _lock = threading.RLock()
    is_known = True

    def __init__(self, root: str, options: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.poll_seconds = parse_storage_options("memory", options or {})["poll.ms"] / 1000
        with self._lock:
            self._contents = self._everything.setdefault(root, _Contents())

    def locate(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def get(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        with self._lock:
            found = self._contents.objects.get(path)
        if found is None:
            return None
        return found[0][start:] if length is None else found[0][start : start + length]

    def put_new(self, path: str, data: bytes) -> None:
        with self._lock:
            if path in self._contents.objects:
                raise AlreadyExists(f"{self.locate(path)} exists already")
            self.put(path, data)

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self._contents.put(path, bytes(data))

    def put_file(self, path: str, file: BinaryIO) -> None:
        file.seek(0)
        self.put_new(path, file.read())

    def stat(self, path: str) -> Entry | None:
        with self._lock:
            found = self._contents.objects.get(path)
        if found is None:
            return None
        return Entry(path.rpartition("/")[2], len(found[0]), found[1], is_folder=False)

    def entries(self, path: str) -> list[Entry]:
        prefix = f"{path}/" if path else ""
        with self._lock:
            found = []
            for name in self._contents.folders.get(path, ()):
                data, changed_ms = self._contents.objects.get(prefix + name, (b"", 0))
                is_folder = prefix + name in self._contents.folders
                found.append(Entry(name, len(data), changed_ms, is_folder))
        return found

    def delete(self, path: str) -> None:
        with self._lock:
            self._contents.delete(path)

    def delete_tree(self, path: str) -> None:
        with self._lock:
            for entry in self.entries(path):
                if entry.is_folder:
                    self.delete_tree(f"{path}/{entry.name}")
                else:
                    self._contents.delete(f"{path}/{entry.name}")

    def names(self) -> list[str]:
        """Return the names of all objects."""
        with self._lock:
            return sorted(self._contents.objects)

    def abort_uploads(self, path: str, older_than_ms: int) -> None:
        """There are none: what is not finished is listed."""

    def begin_anew(self) -> None:
        MemoryStore._lock = threading.RLock()

    def delta_options(self) -> dict[str, str]:
        return {}

    def translate(self, error: Exception, path: str) -> StorageError:
        return StorageError(f"{self.locate(path)}: {error}")

    def close(self) -> None:
        """Nothing is open."""
