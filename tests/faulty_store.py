"""Stores whose answers get lost, at one request or at random, and stores that one dies on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from faulty_storage import Fuse

from broker.errors import StoreUnavailable
from broker.storage.memory import MemoryStore
from broker.storage.store import ObjectStore

_REQUESTS = ("get", "put_new", "put", "put_file", "stat", "entries", "delete", "delete_tree")
_CHANGES = ("put_new", "put", "put_file", "delete", "delete_tree")


class LossyStore:
    """Passes requests on and loses some answers: before it was done, or after.

    Args:
        at: the request, counted from 0, whose answer is lost.
        share: of requests whose answer is lost, at random.
    """

    def __init__(
        self, store: ObjectStore, *, at: int = -1, after: bool = False, share: float = 0.0
    ) -> None:
        self._store = store
        self._at = at
        self._after = after
        self._random = random.Random(7)
        self._share = share
        self._mutex = threading.Lock()
        self.root = store.root
        self.poll_seconds = 0.005
        self.is_known = True
        self.count = 0
        # No answer comes from the next object that is created, which it is, until `speak`.
        self.is_falling_silent = False
        self._is_silent = False
        self.requests: list[tuple[str, str]] = []
        self.delay_seconds = 0.0  # What every request takes.
        self.most_at_once = self._at_once = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in _REQUESTS:
            return method

        def ask(path: str, *arguments: Any) -> Any:
            with self._begun():
                time.sleep(self.delay_seconds)
                fate = self._next(name, path)
                if fate == "before":
                    raise StoreUnavailable(f"{path}: the connection broke before {name}")
                answer = method(path, *arguments)
                if fate == "after":
                    raise StoreUnavailable(f"{path}: the connection broke after {name}")
                return answer

        return ask

    @contextmanager
    def _begun(self) -> Iterator[None]:
        with self._mutex:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._mutex:
                self._at_once -= 1

    def speak(self) -> None:
        """Answer again."""
        self.is_falling_silent = self._is_silent = False

    def _next(self, name: str, path: str) -> str | None:
        with self._mutex:
            number, self.count = self.count, self.count + 1
            self.requests.append((name, path))
            self._is_silent |= self.is_falling_silent and name == "put_new"
            if self._is_silent:
                return "after" if name == "put_new" else "before"
            if number == self._at:
                return "after" if self._after else "before"
            if self._share and self._random.random() < self._share:
                return self._random.choice(["before", "after"])
            return None


class DyingStore:
    """Passes requests on until its fuse goes off: at a change, before or after it.

    From then on every request raises `Died`, so no clean-up of the code under test gets there.
    """

    def __init__(self, store: ObjectStore, fuse: Fuse) -> None:
        self._store = store
        self._fuse = fuse
        self.root = store.root
        self.poll_seconds = 0.005
        self.is_known = True

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in _REQUESTS:
            return method

        def ask(path: str, *arguments: Any) -> Any:
            if name not in _CHANGES:
                self._fuse.check()
                return method(path, *arguments)
            return self._fuse.change(name, lambda: method(path, *arguments))

        return ask


class CrumblingStore(DyingStore):
    """Dies also in the middle of removing a folder: S3 removes its objects one after another."""

    def delete_tree(self, path: str) -> None:
        for entry in self._store.entries(path):
            if entry.is_folder:
                self.delete_tree(f"{path}/{entry.name}")
            else:
                self.delete(f"{path}/{entry.name}")


def fresh_store(name: str) -> MemoryStore:
    """Return a store that nobody has used before."""
    return MemoryStore(f"memory://{name}")
